"""Trace a net with DTensors on what they stand for, so that its graph is that of one device, with their moves in it.

    Colwise up, Rowwise down        -->        from_local(x)  linear(up)  to_local  ..  linear(down)  redistribute

Code that runs is handed DTensors without data, whose placements torch decides as ever; what it computes with them is
traced with whole tensors in their place. One backward of these DTensors tells how gradients are placed.
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
from fpipe.meaning.purity.sharded import is_sharded, refuse_sharded, sharded_as
from fpipe.models.tracing.dtensor_ops import DTENSOR, DTensorCall, forget, named
from fpipe.torch_internals import held_by
from fpipe.torch_private.dispatch import fake_mode_class, told_of_dtensor_moves, unwatched
from fpipe.torch_private.fx import example_number


@contextmanager
def as_whole(net: nn.Module) -> Generator[ShardedTrace | None]:
    """Put whole tensors on meta in the place of a net's DTensors; yield None where it has none."""
    dicts = [held_by(module).parameters for module in net.modules()]
    found: list[Any] = [(held, name, p) for held in dicts for name, p in held.items() if is_sharded(p)]
    wholes = {
        id(p): nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"), p.requires_grad)
        for _, _, p in found
    }
    trace = ShardedTrace(found) if found else None
    try:
        for held, name, p in found:
            held[name] = wholes[id(p)]
        yield trace
    finally:
        forget(trace.calls if trace else ())
        for held, name, p in found:
            held[name] = p


class ShardedTrace(TorchFunctionMode):
    """The trace of a net with DTensors, each with the whole tensor that is traced in its place; `found` are those of
    its parameters: in which dict, under which name, and which."""

    def __init__(self, found: list[tuple[dict[str, Any], str, Any]]) -> None:
        super().__init__()
        self._found, self._thread, self._aside = found, get_ident(), False
        self._wholes: dict[int, tuple[Any, Tensor]] = {}
        self.calls: dict[str, DTensorCall] = {}
        self._ends: list[Tensor] = []
        self._device, self._fake = found[0][2].device, fake_mode_class()(allow_non_fake_inputs=True)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the net, whose tensors are traced."""
        whole = [own[name] for own, name, _ in self._found]
        try:
            for (own, name, one), traced in zip(self._found, whole, strict=True):
                with self._untraced():
                    made = sharded_as(one, self._as_in_example(one.to_local())).detach()
                    own[name] = self._bound(made.requires_grad_(one.requires_grad), traced)
            with self._moves_traced(), self:
                made = forward(*args, **kwargs)
        finally:
            for (own, name, _), traced in zip(self._found, whole, strict=True):
                own[name] = traced
        refuse_sharded(tree.leaves(made), "the output of the net")
        with self._untraced():
            torch.autograd.backward(self._ends, [torch.zeros_like(one) for one in self._ends])
        return made

    def settle(self, graph_module: fx.GraphModule) -> None:
        """Put the operations that each call is into the graph, now that it is known how gradients are placed."""
        for module in (one for one in graph_module.modules() if isinstance(one, fx.GraphModule)):
            for node in module.graph.find_nodes(op="call_function", target=DTENSOR):
                value, call = node.args
                for step, shape in self.calls[call].steps([*node.meta["val"].shape]):
                    with module.graph.inserting_before(node):
                        value = module.graph.call_function(DTENSOR, (value, step))
                    value.meta = node.meta | {"val": node.meta["val"].new_empty(shape)}
                node.replace_all_uses_with(value)
                module.graph.erase_node(node)
            module.recompile()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if not any(map(is_sharded, tree.leaves(given))):
            return func(*args, **given[1])
        args, kwargs = tree.tree_map(self._whole, given)
        traced, spec = tree.flatten(func(*args, **kwargs))
        if not any(isinstance(one, Tensor) for one in traced):
            return tree.unflatten(spec, traced)
        with self._untraced():
            args, kwargs = tree.tree_map(self._as_in_example, given)
            made = tree.leaves(func(*args, **kwargs))
        both = zip(made, traced, strict=True)
        return tree.unflatten(spec, [self._bound(one, whole) if is_sharded(one) else whole for one, whole in both])

    def _whole(self, leaf: Any) -> Any:
        if is_sharded(leaf) and id(leaf) not in self._wholes:
            raise TypeError(
                "the net makes a DTensor otherwise than by DTensor.from_local, redistribute and operations on its "
                "DTensor parameters; make it before, as a parameter, or use from_sequential or from_functions."
            )
        return self._wholes[id(leaf)][1] if is_sharded(leaf) else leaf

    def _bound(self, one: Any, whole: Tensor) -> Any:
        self._wholes[id(one)] = one, whole  # which holds it: ids are of what lives
        return one

    @contextmanager
    def _untraced(self) -> Generator[None]:
        before, self._aside = self._aside, True
        try:
            with unwatched(), self._fake:
                yield
        finally:
            self._aside = before

    def _as_in_example(self, leaf: Any) -> Any:
        """A number for an open size, and for a plain tensor one without data, as large as in the example."""
        if isinstance(leaf, Tensor) and not is_sharded(leaf):
            return torch.empty([*map(example_number, leaf.shape)], dtype=leaf.dtype, device=self._device)
        return example_number(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _moves_traced(self) -> AbstractContextManager[None]:
        """Let the moves of DTensors be calls of the trace, in this thread."""

        def traced(name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if self._aside or get_ident() != self._thread:
                return method(*args, **options)
            odd = [word for word, value in options.items() if word not in _KNOWN and value not in (None, False)]
            if odd:
                raise TypeError(
                    f"the net calls DTensor.{name} with {odd[0]}=, which no graph has; leave it out, or use "
                    "from_sequential or from_functions."
                )
            move = getattr(self, f"_{name}")
            return move(method, *args, **{word: value for word, value in options.items() if word in _KNOWN})

        return told_of_dtensor_moves(traced)

    def _from_local(self, torchs: Any, x: Tensor, *where: Any, **how: Any) -> Any:
        with self._untraced():
            made = torchs(self._as_in_example(x).requires_grad_(x.requires_grad), *where, **how)
            shape = _sized(x, made.placements, made)
        call = DTensorCall(made.device_mesh, None, made.placements, how.get("grad_placements"))
        return self._moved(call, made, x, shape)

    def _redistribute(self, torchs: Any, one: Any, *where: Any, **how: Any) -> Any:
        with self._untraced():
            made = torchs(one, *where, **how)
            cut = [at for at in (*one.placements, *made.placements) if at.is_shard()]
            even = all(made.shape[at.dim] % made.device_mesh.size() == 0 for at in cut)
        whole = self._whole(one)
        call = DTensorCall(made.device_mesh, one.placements, made.placements, even=even)
        return self._moved(call, made, whole, whole.shape)

    def _to_local(self, torchs: Any, one: Any, *, grad_placements: Any = None) -> Any:
        with self._untraced():
            made = torchs(one, grad_placements=grad_placements)
            self._ends += [made] * made.requires_grad
        whole = self._whole(one)
        call = DTensorCall(one.device_mesh, one.placements, None, grad_placements)
        return self._traced(call, whole, _sized(whole, call.source, made))

    def _full_tensor(self, _: Any, one: Any, *, grad_placements: Any = None) -> Any:
        from torch.distributed.tensor import Replicate

        whole = one.redistribute(placements=[Replicate()] * one.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def _moved(self, call: DTensorCall, made: Any, x: Tensor, shape: Sequence[Any]) -> Any:
        with self._untraced():
            if made.requires_grad:
                made.register_hook(call.note)
        return self._bound(made, self._traced(call, x, shape))

    def _traced(self, call: DTensorCall, x: Tensor, shape: Sequence[Any]) -> Tensor:
        name = named(lambda x: x.new_empty(shape).requires_grad_(x.requires_grad), str(uuid4()))
        self.calls[name] = call
        return DTENSOR(x, name)


def _sized(one: Tensor, placements: Any, made: Tensor) -> list[Any]:
    """The shape of one tensor, but that sizes which are cut are fixed, and those of what is made of it."""
    cut = {placement.dim: int(one.shape[placement.dim]) for placement in placements if hasattr(placement, "dim")}
    return [made.shape[at] if at in cut else size for at, size in enumerate(one.shape)]


_KNOWN = ("device_mesh", "placements", "grad_placements", "async_op")
