"""Read an exported program as one flat graph: which placeholder is which parameter, buffer or leaf of the inputs.

wrap_with_set_grad_enabled(False, submod)        -->        set_grad_enabled(False)  ...  set_grad_enabled(True)

What a net assigns to a buffer is written at the end of an export; here it is written once nobody reads the old value.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
from fpipe.meaning.purity.own_memory import mutated_by
from fpipe.meaning.stages.outputs import partly_python
from fpipe.models.tracing.places import place_of, traced_with_grad
from fpipe.torch_private import dispatch
from fpipe.torch_private.fx import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAPH_CALLS,
    SET_GRAD,
    call_trees,
    environment,
    guards_of,
    is_of_vmap,
)


class OnlyTraceable(TorchFunctionMode):
    """Refuses what is in no trace above autograd: random numbers from a generator, hooks of gradients, inference mode,
    and derivatives that the function takes itself where the tracer sees nothing of their operations.

    Attributes:
        in_python: whether a gradient of what the function returned is computed by Python.
    """

    def __init__(self, who: str, derivatives: bool) -> None:
        super().__init__()
        self.who, self.derivatives, self.in_python = who, derivatives, False

    def returned(self, results: Any) -> Any:
        """Look at the results of the function, and return them."""
        self.in_python |= partly_python(tree.leaves(results), custom_ops=False)
        return results

    def warn(self, stacklevel: int) -> None:
        """Warn of a gradient that the trace does not have."""
        if self.in_python:
            warnings.warn(
                f"{self.who} computes a gradient in Python (a custom autograd.Function, or a hook of a module), and a "
                "trace above autograd has only its forward, which stages differentiate. Compare gradients by "
                "fpipe.verify, or use from_sequential or from_functions.",
                stacklevel=stacklevel,
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not self.derivatives:
            raise ValueError(f"{self.who} calls torch.autograd.grad or torch.func, which only from_functions can trace")
        if func is Tensor.register_hook or torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.who} registers a hook of a gradient, or computes in inference_mode, which no trace above "
                "autograd captures. Use no_grad for the last, or from_functions."
            )
        if (kwargs or {}).get("generator") is not None:
            name = getattr(func, "__name__", "")
            raise ValueError(
                f"{self.who} draws from a generator of its own ({name}), which is in no key; draw without it."
            )
        if func is torch.tensor and _device(kwargs or {}).type == "meta":  # its numbers would be lost
            return func(*args, **{**(kwargs or {}), "device": "cpu"}).to("meta")
        return func(*args, **(kwargs or {}))


def _device(kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


def without_checkpoints() -> AbstractContextManager[None]:
    """Let torch.utils.checkpoint only call its function, since a trace would lose gradients of what is in two of them;
    the old way, a backward within a backward, is refused."""

    def refuse() -> Any:
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=True) has a backward that no trace above autograd captures; say "
            "use_reentrant=False, or leave it out and let fpipe.checkpoint() recompute"
        )

    return dispatch.without_checkpoints(refuse)


def make_literals_pure(graph: fx.Graph) -> None:
    """torch.tensor(4) is traced as a copy that is then detached in place, though nothing is mutated."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        (copy,) = node.args
        if isinstance(copy, fx.Node) and copy.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


_COPY: Any = torch.ops.aten.copy_.default


class NetTensors(NamedTuple):
    """The tensors of a net by name, as it has them now.

    Attributes:
        homes: where each is: its owner, and the attribute.
        trains: the first names of those that a step is handed: the parameters that require gradients, and `untrained`,
            what else has no values yet.
        first: for each name the first name of the same tensor; its keys are all names.
        buffers: the names of the buffers.
        literals: the tensors that its code makes of numbers.
    """

    homes: Mapping[str, tuple[Any, str]]
    trains: frozenset[str]
    first: Mapping[str, str] = {}
    buffers: frozenset[str] = frozenset()
    literals: Mapping[str, Tensor] = {}
    untrained: frozenset[str] = frozenset()

    def now(self, name: str) -> Tensor:
        """The tensor that is under a name now."""
        return self.literals[name] if name in self.literals else getattr(*self.homes[name])

    def names(self, first: str) -> tuple[str, ...]:
        """All names of a tensor, the first one first."""
        return (first, *(name for name, other in self.first.items() if other == first and name != first))


class NetGraph(NamedTuple):
    """A net, or a loss function, as a graph.

    Attributes:
        module: the graph, without calls of other graphs.
        params, constants: by placeholder the first names of the parameters that train, and of other tensors.
        inputs: the arguments and keywords of the call, or the batch, of placeholders.
        output: what the net returns, of nodes.
        guards: what was decided by open sizes.
        who, door: what errors call the net, and what has traced it.
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
    """The tensors of a module, or of an exported program, and those that its code makes of numbers."""
    constants: dict[str, Any] = exported.constants
    if isinstance(net, nn.Module):
        params = dict(net.named_parameters(remove_duplicate=False))
        buffers = dict(net.named_buffers(remove_duplicate=False))
        places = ((name, name.rpartition(".")) for name in (*params, *buffers))
        homes = {name: (net.get_submodule(path), own) for name, (path, _, own) in places}
    else:
        tensors: dict[str, Any] = {**constants, **net.state_dict}
        params = {name: tensors[name] for name in net.graph_signature.parameters}
        buffers = {name: tensors[name] for name in net.graph_signature.buffers}
        homes = {name: (SimpleNamespace(**tensors), name) for name in tensors}
    known: dict[int, str] = {}
    first = {name: known.setdefault(id(tensor), name) for name, tensor in (*params.items(), *buffers.items())}
    trains = frozenset(first[name] for name, tensor in params.items() if tensor.requires_grad)
    specs = exported.graph_signature.input_specs
    literals = [spec.target or "" for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]
    return NetTensors(homes, trains, first, frozenset(buffers), {name: _now(net, name, constants) for name in literals})


def _now(net: nn.Module | ExportedProgram, name: str, constants: Mapping[str, Tensor]) -> Tensor:
    """A tensor that is no parameter or buffer: the net's own, where it was on meta while the net was traced there."""
    path, _, attribute = name.rpartition(".")
    held = {path: vars(module) for path, module in net.named_modules()} if isinstance(net, nn.Module) else {}
    now = held.get(path, {}).get(attribute)
    return now if constants[name].is_meta and isinstance(now, Tensor) else constants[name]


def read_graph(exported: ExportedProgram, tensors: NetTensors) -> NetGraph:
    """The flat graph of an exported program; a ValueError if it takes odd objects, or mutates its inputs."""
    flat, first, given = _Flat(exported), dict[str, fx.Node](), list[fx.Node]()
    for node, spec in zip(flat.placeholders, exported.graph_signature.input_specs, strict=True):
        name = tensors.first.get(spec.target or "", spec.target or "")
        if spec.kind == InputKind.USER_INPUT:
            given.append(node)
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            place = next((place_of(user) for user in node.users), "")
            raise ValueError(
                f"the net computes with {name!r}, an object that is no tensor, which no graph can hold.{place}"
            )
        elif name in first:
            node.replace_all_uses_with(first[name])
        else:
            first[name] = node
    _write_assigned(flat, {node for name, node in first.items() if name in tensors.buffers})
    make_literals_pure(flat.graph)
    inputs, output = call_trees(exported, given, flat.results)
    sizes = (size for node in given for size in getattr(node.meta.get("val"), "shape", ()))
    size = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return NetGraph(
        fx.GraphModule({}, flat.graph),
        {node: name for name, node in first.items() if name in tensors.trains},
        {node: name for name, node in first.items() if name not in tensors.trains},
        inputs,
        output,
        () if size is None else guards_of(environment(size)),
    )


class _Flat:
    """Copies a graph, and the graphs that it calls in other contexts into it.

    Attributes:
        placeholders: those of the new graph, in order.
        results: what the net returns, and `assigned`, the new values of buffers, by their placeholders.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self.graph = fx.Graph()
        self.grad = self.inside = True  # whether gradients are on in what is written, and in the graph that is copied
        source: Any = exported.graph_module
        own = {node: self.graph.node_copy(node) for node in source.graph.find_nodes(op="placeholder")}
        self.placeholders = [*own.values()]
        made = self._copied(source, own)
        signature = exported.graph_signature
        by_target = {spec.target: node for spec, node in zip(signature.input_specs, self.placeholders, strict=True)}
        self.results: list[Any] = []
        self.assigned: list[tuple[fx.Node, fx.Node]] = []
        for spec, value in zip(signature.output_specs, made, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                self.assigned.append((by_target[spec.target], value))
            elif spec.kind == OutputKind.USER_OUTPUT:
                self.results.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else value)
            else:
                who = f"the net writes its input {spec.target!r}"
                raise ValueError(f"{who}; a stage is a pure function. Work on a copy.{place_of(value)}")
        self.graph.output(tuple(one for one in self.results if isinstance(one, fx.Node)))

    def _copied(self, source: Any, own: dict[fx.Node, Any]) -> Any:
        """Copy the nodes of a graph; what it returns, of new nodes."""

        for node in source.graph.nodes:
            if node in own:
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], own.__getitem__)
            if node.op == "get_attr":
                own[node] = getattr(source, str(node.target))  # a graph that is called
            elif node.target in GRAPH_CALLS:
                own[node] = self._inlined(node, [own.get(one, one) for one in node.args])
            elif is_of_vmap(node):
                inside = next((one for one in node.users if not is_of_vmap(one)), None)
                if inside is not None:
                    raise ValueError(
                        "the net calls torch.vmap, whose operations on single rows are no graph that can be cut; write "
                        f"them for batches, as torch.einsum does, or use from_functions.{place_of(inside)}"
                    )
            elif node.target is getitem and isinstance(own[node.args[0]], tuple | list):
                own[node] = own[node.args[0]][node.args[1]]
            else:
                on = self.inside and traced_with_grad(node)
                if on != self.grad:
                    self.graph.call_function(SET_GRAD, (on,))
                    self.grad = on
                own[node] = self.graph.node_copy(node, own.__getitem__)
        return None

    def _inlined(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """Copy the nodes of a graph that is called with gradients off, say, or under autocast; the new results."""
        count = GRAPH_CALLS[node.target]
        settings, body, given = args[:count], args[count], args[count + 1 :]
        inner = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
        if count == 1:
            before, self.inside = self.inside, bool(settings[0])
            made = self._copied(body, inner)
            self.inside = before
            return made
        enter = self.graph.call_function(ENTER_AUTOCAST, tuple(settings))
        made = self._copied(body, inner)
        self.graph.call_function(EXIT_AUTOCAST, (enter,))
        return made


def _write_assigned(flat: _Flat, buffers: set[fx.Node]) -> None:
    """Write what is assigned to a buffer right behind who reads its old value last, so in the stage that does."""
    order = {node: at for at, node in enumerate(flat.graph.nodes)}
    for node in flat.graph.find_nodes(op="call_function", target=_COPY):
        buffer, value, *_ = node.args
        if buffer in buffers and not node.users and isinstance(value, fx.Node):
            flat.assigned.append((buffer, value))
            flat.graph.erase_node(node)
    for buffer, value in flat.assigned:
        if buffer in mutated_by(value) or value is buffer:
            continue  # it was written in place
        last = max((value, *buffer.users), key=order.__getitem__)
        with flat.graph.inserting_after(last):
            copy = flat.graph.call_function(_COPY, (buffer, value))
        copy.meta = dict(value.meta)
        order[copy] = order[last]
