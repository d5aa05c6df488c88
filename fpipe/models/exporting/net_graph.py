"""Read an exported program as one flat graph, whose placeholders are parameters, buffers and leaves of the inputs.

wrap_with_set_grad_enabled(False, submod)        -->        set_grad_enabled(False)  ...  set_grad_enabled(True)

torch.export writes what a net assigns to a buffer at the end of the graph. Here it is written as soon as nobody reads
the old value, so that the write falls into the stage that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import getitem
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.meaning.purity.ambient import (
    ATTENTION_FLAGS,
    SDP_PRIORITY,
    attention_backends,
    changed_settings,
    kernel_settings,
)
from fpipe.meaning.purity.outputs import has_python_backward
from fpipe.meaning.purity.write_guard import mutated_nodes
from fpipe.models.exporting.node_contexts import keep_attention_backends, note_attention_backends
from fpipe.models.exporting.opaque_ops import FunctionCall, apply_as_ops
from fpipe.models.exporting.source_locations import location_of, was_traced_with_grad
from fpipe.torch_internals import warn
from fpipe.torch_private import dispatch
from fpipe.torch_private.fx import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAPH_CALLS,
    SET_GRAD,
    call_trees,
    guards_of,
    is_of_vmap,
    shape_env_of,
)


class OutsideTrace(ValueError):
    """Python in a module that a trace above autograd cannot contain, and that its stage can run.

    Attributes:
        deed: what the module does, such as "calls torch.vmap".
        path, location: the path of the module and the line, if the error does not come out of its call.
    """

    def __init__(self, subject: str, deed: str, advice: str, path: str = "", location: str = "") -> None:
        super().__init__(f"{subject} {deed}{advice}{location}")
        self.deed, self.path, self.location = deed, path, location


class OnlyTraceable(TorchFunctionMode):
    """Raises ValueError for operations that a trace above autograd cannot contain, and notes the kernels of attention.

    These are random numbers from a generator, hooks of gradients, inference mode, flags of kernels, and derivatives
    that the function takes itself, where the tracer does not see their ops.

    Attributes:
        in_python: whether Python code computes a gradient of a result of the function, and is no op of the trace.
        calls: the custom autograd.Functions that are ops of the trace, which the owner of the graph has to keep alive.
    """

    def __init__(self, who: str, derivatives: bool) -> None:
        super().__init__()
        self.who, self.derivatives, self.in_python = who, derivatives, False
        self.settings: tuple[Any, ...] | None = None
        self.calls = list[FunctionCall]()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, and record whether Python code computes a gradient of its results."""
        # Only now, and not after: torch.export sets flags of its own around the call.
        self.settings = kernel_settings()
        with apply_as_ops(self.calls), dispatch.intercept_saved_tensors_hooks(self._refuse_hooks):
            results = function(*args, **kwargs)
        self.settings = None
        functions = {call.function for call in self.calls}
        self.in_python |= has_python_backward(tree.leaves(results), custom_ops=False, ignored=functions)
        return results

    def _refuse_hooks(self) -> None:
        raise OutsideTrace(self.who, "uses saved_tensors_hooks", ", which no trace above autograd runs")

    def warn(self, stacklevel: int) -> None:
        """Warn of a gradient in Python, which the trace does not contain."""
        if self.in_python:
            warn(
                f"{self.who} computes a gradient in Python (a hook of a module, or a Function that takes a size), and "
                "a trace above autograd has only its forward, which stages differentiate. Compare gradients by "
                "fpipe.verify, or use from_sequential or from_functions.",
                stacklevel=stacklevel,
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not self.derivatives:
            raise OutsideTrace(
                self.who, "calls torch.autograd.grad or torch.func", ", which only from_functions can trace"
            )
        if self.settings is not None and (settings := kernel_settings()) != self.settings:
            self._note_attention(changed_settings(self.settings, settings))
        if func is Tensor.register_hook or torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.who} registers a gradient hook or uses inference_mode, which no trace captures. Use no_grad "
                "for the latter, or from_functions."
            )
        if (kwargs or {}).get("generator") is not None:
            name = getattr(func, "__name__", "")
            raise ValueError(
                f"{self.who} draws from a generator of its own ({name}), which is in no key; draw without it."
            )
        # On meta the numbers would be lost: make the tensor on the CPU first, so that the trace records them.
        if func is torch.tensor and _device(kwargs or {}).type == "meta":
            return func(*args, **{**(kwargs or {}), "device": "cpu"}).to("meta")
        return func(*args, **(kwargs or {}))

    def _note_attention(self, changed_names: Sequence[str]) -> None:
        """Note in the node of this call which kernels of attention are enabled; refuse other changed flags."""
        for name in changed_names:
            if name not in ATTENTION_FLAGS and name != SDP_PRIORITY:
                raise ValueError(f"{self.who} sets {name} as it runs, which no trace keeps. Set it around the step")
        note_attention_backends(attention_backends())


def _device(kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


def without_checkpoints() -> AbstractContextManager[None]:
    """Let torch.utils.checkpoint just call its function, and refuse its reentrant form.

    A trace of checkpoints would lose gradients of a tensor that two of them read.
    """

    def refuse() -> Any:
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=True) has a backward that no trace captures; set "
            "use_reentrant=False, or use fpipe.checkpoint()"
        )

    return dispatch.without_checkpoints(refuse)


def make_literals_pure(graph: fx.Graph) -> None:
    """Remove the in-place detach behind each literal: torch.tensor(4) is traced as a copy and `detach_`.

    Nothing is mutated, but the op would count as a mutation.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        (copy,) = node.args
        if isinstance(copy, fx.Node) and copy.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


_COPY_OP: Any = torch.ops.aten.copy_.default


class NetTensors(NamedTuple):
    """The tensors of a net by name, looked up in the net at each use.

    Attributes:
        attribute_by_name: the owner of each tensor, and the name of its attribute there.
        param_names: the canonical names of the tensors that a step is handed: parameters that require gradients, and
            `untrained` ones.
        canonical_names: by name the first name of the same tensor; its keys are all names.
        buffers: the names of the buffers.
        literals: tensors that the code of the net creates from numbers.
        untrained: canonical names of other tensors that have no values yet, as they are on meta.
    """

    attribute_by_name: Mapping[str, tuple[Any, str]]
    param_names: frozenset[str]
    canonical_names: Mapping[str, str] = {}
    buffers: frozenset[str] = frozenset()
    literals: Mapping[str, Tensor] = {}
    untrained: frozenset[str] = frozenset()

    def current_tensor(self, name: str) -> Tensor:
        """Return the tensor that the net has under a name now."""
        return self.literals[name] if name in self.literals else getattr(*self.attribute_by_name[name])

    def names(self, first_name: str) -> tuple[str, ...]:
        """Return all names of a tensor, the canonical one first."""
        names = [name for name, canonical_name in self.canonical_names.items() if canonical_name == first_name]
        return (first_name, *(name for name in names if name != first_name))


class NetGraph(NamedTuple):
    """The graph of a net or of a loss function.

    Attributes:
        module: the graph, without calls of other graphs.
        params, constants: by placeholder the canonical names of the tensors that a step is handed, and of all others.
        inputs: the arguments and keywords of the call, or the batch, as containers of placeholders.
        output: the result of the net, as a container of nodes.
        guards: conditions on symbolic sizes that the trace relies on.
        who, door: how errors name the net, and the function of fpipe that traced it.
    """

    module: fx.GraphModule
    params: dict[fx.Node, str]
    constants: dict[fx.Node, str]
    inputs: tuple[Any, Any]
    output: Any
    guards: tuple[Any, ...]
    who: str = "the net"
    door: str = "from_module"


def tensors_of(net: nn.Module | ExportedProgram, exported: ExportedProgram) -> NetTensors:
    """Return the tensors of a module or an exported program, and the literals of its code."""
    constants: dict[str, Any] = exported.constants
    if isinstance(net, nn.Module):
        params = dict(net.named_parameters(remove_duplicate=False))
        buffers = dict(net.named_buffers(remove_duplicate=False))
        split_names = ((name, name.rpartition(".")) for name in (*params, *buffers))
        attribute_by_name = {name: (net.get_submodule(path), attribute) for name, (path, _, attribute) in split_names}
    else:
        tensors: dict[str, Any] = {**constants, **net.state_dict}
        params = {name: tensors[name] for name in net.graph_signature.parameters}
        buffers = {name: tensors[name] for name in net.graph_signature.buffers}
        attribute_by_name = {name: (SimpleNamespace(**tensors), name) for name in tensors}
    # Tied tensors are one object under several names: the first name stands for all.
    name_by_id: dict[int, str] = {}
    canonical_names = {name: name_by_id.setdefault(id(x), name) for name, x in (*params.items(), *buffers.items())}
    param_names = frozenset(canonical_names[name] for name, tensor in params.items() if tensor.requires_grad)
    specs = exported.graph_signature.input_specs
    literals = [spec.target or "" for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]
    tensor_by_literal = {name: _constant_tensor(net, name, constants) for name in literals}
    return NetTensors(attribute_by_name, param_names, canonical_names, frozenset(buffers), tensor_by_literal)


def _constant_tensor(net: nn.Module | ExportedProgram, name: str, constants: Mapping[str, Tensor]) -> Tensor:
    """Return a constant of the export, or the attribute of the net behind it if the export has it on meta."""
    path, _, attribute = name.rpartition(".")
    modules = dict(net.named_modules()) if isinstance(net, nn.Module) else {}
    attribute_value = vars(modules[path]).get(attribute) if path in modules else None
    return attribute_value if constants[name].is_meta and isinstance(attribute_value, Tensor) else constants[name]


def refuse_vmap(exported: ExportedProgram) -> None:
    """Raise OutsideTrace if an exported graph reads what torch.vmap computes."""
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes)
    for vmapped in (user for node in nodes if is_of_vmap(node) for user in node.users if not is_of_vmap(user)):
        paths = [path for path, _ in (vmapped.meta.get("nn_module_stack") or {}).values()]
        advice = ", which cannot be cut; use operations on batches, as torch.einsum, or from_functions."
        raise OutsideTrace("the net", "calls torch.vmap", advice, paths[-1] if paths else "", location_of(vmapped))


def read_graph(exported: ExportedProgram, tensors: NetTensors) -> NetGraph:
    """Return the flat graph of an exported program; ValueError if it takes non-tensor objects or mutates inputs."""
    refuse_vmap(exported)
    flat_graph, placeholder_by_name, input_nodes = _FlatGraph(exported), dict[str, fx.Node](), list[fx.Node]()
    for node, spec in zip(flat_graph.placeholders, exported.graph_signature.input_specs, strict=True):
        name = tensors.canonical_names.get(spec.target or "", spec.target or "")
        if spec.kind == InputKind.USER_INPUT:
            input_nodes.append(node)
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            location = next((location_of(user) for user in node.users), "")
            raise ValueError(
                f"the net computes with {name!r}, an object that is no tensor, which no graph can hold.{location}"
            )
        # A tied tensor has a placeholder for each name: keep the first.
        elif name in placeholder_by_name:
            node.replace_all_uses_with(placeholder_by_name[name])
        else:
            placeholder_by_name[name] = node
    _write_assigned(flat_graph, {node for name, node in placeholder_by_name.items() if name in tensors.buffers})
    make_literals_pure(flat_graph.graph)
    inputs, output = call_trees(exported, input_nodes, flat_graph.results)
    # All symbolic sizes of an export share one environment, which knows its guards: take it from any of them.
    sizes = (size for node in input_nodes for size in getattr(node.meta.get("val"), "shape", ()))
    size = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return NetGraph(
        fx.GraphModule({}, flat_graph.graph),
        {node: name for name, node in placeholder_by_name.items() if name in tensors.param_names},
        {node: name for name, node in placeholder_by_name.items() if name not in tensors.param_names},
        inputs,
        output,
        () if size is None else guards_of(shape_env_of(size)),
    )


class _FlatGraph:
    """A copy of an exported graph, with the graphs that it calls in other contexts inlined.

    Attributes:
        placeholders: the placeholders of the copy, in order.
        results: the leaves that the net returns.
        assigned: pairs of a buffer's placeholder and the node of its new value.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self.graph = fx.Graph()
        # Whether gradients are on at the end of the copy, and in the graph that is being copied. A SET_GRAD op is
        # inserted only where they differ.
        self.has_grad = self.source_has_grad = True
        source: Any = exported.graph_module
        copy_by_node = {node: self.graph.node_copy(node) for node in source.graph.find_nodes(op="placeholder")}
        self.placeholders = [*copy_by_node.values()]
        outputs = self._copy_nodes(source, copy_by_node)
        keep_attention_backends(self.graph)
        signature = exported.graph_signature
        by_target = {spec.target: node for spec, node in zip(signature.input_specs, self.placeholders, strict=True)}
        self.results: list[Any] = []
        self.assigned: list[tuple[fx.Node, fx.Node]] = []
        for spec, value in zip(signature.output_specs, outputs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                self.assigned.append((by_target[spec.target], value))
            elif spec.kind == OutputKind.USER_OUTPUT:
                self.results.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else value)
            else:
                who = f"the net writes its input {spec.target!r}"
                raise ValueError(f"{who}; a stage is a pure function. Work on a copy.{location_of(value)}")
        self.graph.output(tuple(result for result in self.results if isinstance(result, fx.Node)))

    def _copy_nodes(self, source: Any, copy_by_node: dict[fx.Node, Any]) -> Any:
        """Copy the nodes of a graph, and return its outputs as nodes of the copy."""
        for node in source.graph.nodes:
            if node in copy_by_node:
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], copy_by_node.__getitem__)
            if node.op == "get_attr":
                copy_by_node[node] = getattr(source, str(node.target))
            # A graph that is called with other settings: its nodes go into this one, between ops that switch them.
            elif node.target in GRAPH_CALLS:
                copy_by_node[node] = self._inline_call(node, [copy_by_node.get(x, x) for x in node.args])
            elif is_of_vmap(node):
                continue  # `refuse_vmap`: nobody reads what it computes
            # The results of an inlined graph are a tuple of nodes, which needs no getitem in the copy.
            elif node.target is getitem and isinstance(copy_by_node[node.args[0]], tuple | list):
                copy_by_node[node] = copy_by_node[node.args[0]][node.args[1]]
            else:
                has_grad = self.source_has_grad and was_traced_with_grad(node)
                if has_grad != self.has_grad:
                    self.graph.call_function(SET_GRAD, (has_grad,))
                    self.has_grad = has_grad
                copy_by_node[node] = self.graph.node_copy(node, copy_by_node.__getitem__)
        return None

    def _inline_call(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """Copy the nodes of a graph that is called with gradients off, or under autocast; return its new outputs."""
        setting_count = GRAPH_CALLS[node.target]
        settings, body, inputs = args[:setting_count], args[setting_count], args[setting_count + 1 :]
        copy_by_node = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        # One setting is whether gradients are on; several are those of autocast.
        if setting_count == 1:
            outer_has_grad, self.source_has_grad = self.source_has_grad, bool(settings[0])
            outputs = self._copy_nodes(body, copy_by_node)
            self.source_has_grad = outer_has_grad
            return outputs
        enter = self.graph.call_function(ENTER_AUTOCAST, tuple(settings))
        outputs = self._copy_nodes(body, copy_by_node)
        self.graph.call_function(EXIT_AUTOCAST, (enter,))
        return outputs


def _write_assigned(flat_graph: _FlatGraph, buffers: set[fx.Node]) -> None:
    """Write each value that is assigned to a buffer directly after the last reader of its old value."""
    position_by_node = {node: position for position, node in enumerate(flat_graph.graph.nodes)}
    # 1. The copies of `_call_and_write_back` count as assignments: take them out of the graph.
    for node in flat_graph.graph.find_nodes(op="call_function", target=_COPY_OP):
        buffer, value, *_ = node.args
        if buffer in buffers and not node.users and isinstance(value, fx.Node):
            flat_graph.assigned.append((buffer, value))
            flat_graph.graph.erase_node(node)
    # 2. Write each where nobody reads the old value any more, but not before the new one is computed.
    for buffer, value in flat_graph.assigned:
        if buffer in mutated_nodes(value) or value is buffer:
            continue  # the net wrote it in place
        last_reader = max((value, *buffer.users), key=position_by_node.__getitem__)
        with flat_graph.graph.inserting_after(last_reader):
            copy = flat_graph.graph.call_function(_COPY_OP, (buffer, value))
        copy.meta = dict(value.meta)
        position_by_node[copy] = position_by_node[last_reader]
