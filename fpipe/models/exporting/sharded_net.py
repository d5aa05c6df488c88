"""Trace a net with DTensors as one device would run it, with the DTensor moves as ops of the graph.

    Colwise up, Rowwise down        -->        from_local(x)  linear(up)  to_local  ..  linear(down)  redistribute

The code of the net is handed fake DTensors, whose placements torch decides as always. Each op on them runs once more,
traced, on the whole tensors that they stand for. One backward of the DTensors shows how gradients are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.meaning.purity.sharded import as_dtensor_like, is_sharded, refuse_sharded
from fpipe.models.exporting.dtensor_ops import DTENSOR, DTensorCall, forget_steps, register_step
from fpipe.torch_internals import direct_members
from fpipe.torch_private.dispatch import fake_mode_class, intercept_dtensor_moves, without_any_mode
from fpipe.torch_private.fx import example_number


@contextmanager
def replace_by_whole_tensors(net: nn.Module) -> Generator[ShardedTrace | None]:
    """Replace the DTensors of a net by whole tensors on meta; yield their trace, or None if there are none."""
    dicts = [direct_members(module).parameters for module in net.modules()]
    sharded_params: list[Any] = [(holder, name, p) for holder in dicts for name, p in holder.items() if is_sharded(p)]
    whole_by_id = {
        id(param): nn.Parameter(
            torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta"), param.requires_grad
        )
        for _, _, param in sharded_params
    }
    trace = ShardedTrace(sharded_params) if sharded_params else None
    try:
        for holder, name, param in sharded_params:
            holder[name] = whole_by_id[id(param)]
        yield trace
    finally:
        forget_steps(trace.calls if trace else ())
        for holder, name, param in sharded_params:
            holder[name] = param


class ShardedTrace(TorchFunctionMode):
    """The trace of a net with DTensors, which maps each DTensor to the whole tensor that is traced for it.

    `sharded_params` are the DTensor parameters: the dict that holds each, its name there, and the DTensor.
    """

    def __init__(self, sharded_params: list[tuple[dict[str, Any], str, Any]]) -> None:
        super().__init__()
        self._params, self._thread, self._is_paused = sharded_params, get_ident(), False
        self._whole_by_id: dict[int, tuple[Any, Tensor]] = {}
        self.calls: dict[str, DTensorCall] = {}
        self._local_outputs: list[Tensor] = []
        self._device, self._fake = sharded_params[0][2].device, fake_mode_class()(allow_non_fake_inputs=True)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the net on fake DTensors, trace it, and run one backward to learn gradient placements."""
        # 1. Put a fake DTensor in place of each traced whole parameter: the code of the net sees DTensors, as ever.
        traced_params = [holder[name] for holder, name, _ in self._params]
        try:
            for (holder, name, param), traced in zip(self._params, traced_params, strict=True):
                with self._pause_tracing():
                    fake = as_dtensor_like(param, self._as_in_example(param.to_local())).detach()
                    holder[name] = self._bind_whole(fake.requires_grad_(param.requires_grad), traced)
            # 2. Run the net: `self` traces each op on the whole tensors, and runs it on the fake DTensors.
            with self._trace_moves(), self:
                output = forward(*args, **kwargs)
        finally:
            for (holder, name, _), traced in zip(self._params, traced_params, strict=True):
                holder[name] = traced
        refuse_sharded(tree.leaves(output), "the output of the net")
        with self._pause_tracing():
            # 3. Run one backward of the fake DTensors: hooks record with which placements gradients arrive.
            torch.autograd.backward(self._local_outputs, [torch.zeros_like(local) for local in self._local_outputs])
        return output

    def expand_calls(self, graph_module: fx.GraphModule) -> None:
        """Replace each DTensor call in the graph by its steps, now that the placements of gradients are known."""
        for module in (submodule for submodule in graph_module.modules() if isinstance(submodule, fx.GraphModule)):
            for node in module.graph.find_nodes(op="call_function", target=DTENSOR):
                value, call = node.args
                for step, shape in self.calls[call].register_steps([*node.meta["val"].shape]):
                    with module.graph.inserting_before(node):
                        value = module.graph.call_function(DTENSOR, (value, step))
                    value.meta = node.meta | {"val": node.meta["val"].new_empty(shape)}
                node.replace_all_uses_with(value)
                module.graph.erase_node(node)
            module.recompile()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = args, kwargs or {}
        if not any(map(is_sharded, tree.leaves(arguments))):
            return func(*args, **arguments[1])
        # Once on whole tensors, which is traced, and once on the fake DTensors, by which torch finds the placements.
        args, kwargs = tree.tree_map(self._whole_of, arguments)
        traced, spec = tree.flatten(func(*args, **kwargs))
        if not any(isinstance(leaf, Tensor) for leaf in traced):
            return tree.unflatten(spec, traced)
        with self._pause_tracing():
            args, kwargs = tree.tree_map(self._as_in_example, arguments)
            dtensors = tree.leaves(func(*args, **kwargs))
        pairs = zip(dtensors, traced, strict=True)
        return tree.unflatten(spec, [self._bind_whole(x, leaf) if is_sharded(x) else leaf for x, leaf in pairs])

    def _whole_of(self, leaf: Any) -> Any:
        if is_sharded(leaf) and id(leaf) not in self._whole_by_id:
            raise TypeError(
                "the net makes a DTensor other than by from_local or redistribute; make it a parameter, or use "
                "from_functions."
            )
        return self._whole_by_id[id(leaf)][1] if is_sharded(leaf) else leaf

    def _bind_whole(self, dtensor: Any, traced: Tensor) -> Any:
        # Keep the DTensor too: the id of a dead object may be reused.
        self._whole_by_id[id(dtensor)] = dtensor, traced
        return dtensor

    @contextmanager
    def _pause_tracing(self) -> Generator[None]:
        was_paused, self._is_paused = self._is_paused, True
        try:
            with without_any_mode(), self._fake:
                yield
        finally:
            self._is_paused = was_paused

    def _as_in_example(self, leaf: Any) -> Any:
        """Return the example's number for a symbolic size, and a fake tensor of that size for a plain tensor."""
        if isinstance(leaf, Tensor) and not is_sharded(leaf):
            return torch.empty([*map(example_number, leaf.shape)], dtype=leaf.dtype, device=self._device)
        return example_number(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _trace_moves(self) -> AbstractContextManager[None]:
        """Record from_local, redistribute, to_local and full_tensor as calls of the trace, in this thread."""

        def trace_move(name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self._is_paused or get_ident() != self._thread:
                return method(*args, **options)
            unsupported = [key for key, x in options.items() if key not in _MOVE_OPTIONS and x not in (None, False)]
            if unsupported:
                raise TypeError(
                    f"the net calls DTensor.{name} with {unsupported[0]}=, which no graph has; leave it out, or use "
                    "from_sequential or from_functions."
                )
            # from_local, redistribute, to_local and full_tensor each have a method below.
            move = getattr(self, f"_{name}")
            return move(method, *args, **{option: x for option, x in options.items() if option in _MOVE_OPTIONS})

        return intercept_dtensor_moves(trace_move)

    def _from_local(self, torch_method: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        with self._pause_tracing():
            result = torch_method(self._as_in_example(x).requires_grad_(x.requires_grad), *args, **options)
            shape = _shape_with_fixed_dims(x, result.placements, result)
        call = DTensorCall(result.device_mesh, None, result.placements, options.get("grad_placements"))
        return self._trace_result(call, result, x, shape)

    def _redistribute(self, torch_method: Any, dtensor: Any, *args: Any, **options: Any) -> Any:
        with self._pause_tracing():
            result = torch_method(dtensor, *args, **options)
            shard_placements = [p for p in (*dtensor.placements, *result.placements) if p.is_shard()]
            is_even = all(result.shape[p.dim] % result.device_mesh.size() == 0 for p in shard_placements)
        traced = self._whole_of(dtensor)
        call = DTensorCall(result.device_mesh, dtensor.placements, result.placements, is_even=is_even)
        return self._trace_result(call, result, traced, traced.shape)

    def _to_local(self, torch_method: Any, dtensor: Any, *, grad_placements: Any = None) -> Any:
        with self._pause_tracing():
            result = torch_method(dtensor, grad_placements=grad_placements)
            self._local_outputs += [result] * result.requires_grad
        traced = self._whole_of(dtensor)
        call = DTensorCall(dtensor.device_mesh, dtensor.placements, None, grad_placements)
        return self._record_call(call, traced, _shape_with_fixed_dims(traced, call.source, result))

    def _full_tensor(self, _: Any, dtensor: Any, *, grad_placements: Any = None) -> Any:
        from torch.distributed.tensor import Replicate

        traced = dtensor.redistribute(placements=[Replicate()] * dtensor.device_mesh.ndim)
        return traced.to_local(grad_placements=grad_placements)

    def _trace_result(self, call: DTensorCall, result: Any, x: Tensor, shape: Sequence[Any]) -> Any:
        with self._pause_tracing():
            if result.requires_grad:
                result.register_hook(call.record_gradient)
        return self._bind_whole(result, self._record_call(call, x, shape))

    def _record_call(self, call: DTensorCall, x: Tensor, shape: Sequence[Any]) -> Tensor:
        # A placeholder step under a unique name: `expand_calls` replaces it once the backward has shown the gradients.
        name = register_step(lambda x: x.new_empty(shape).requires_grad_(x.requires_grad), str(uuid4()))
        self.calls[name] = call
        return DTENSOR(x, name)


def _shape_with_fixed_dims(tensor: Tensor, placements: Any, result: Tensor) -> list[Any]:
    """Return the shape of a tensor, with the sizes of sharded dimensions fixed to the result's."""
    cut_sizes = {p.dim: int(tensor.shape[p.dim]) for p in placements if hasattr(p, "dim")}
    return [result.shape[dim] if dim in cut_sizes else size for dim, size in enumerate(tensor.shape)]


_MOVE_OPTIONS = ("device_mesh", "placements", "grad_placements", "async_op")
