"""Rename what an op in place writes where nobody reads what was there before: torch then need not rewrite the trace.

y = exp(x); y.add_(1); z = y * 2        --> rename_writes -->        y = exp(x); y1 = add(y, 1); z = y1 * 2

A recurrent layer is hundreds of such ops, and torch's rewriting runs every op of a trace once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from fpipe.meaning.purity.own_memory import memory, tensors_in
from fpipe.meaning.purity.schema import written
from fpipe.torch_internals import OpOverload, arguments_of, is_view, names_of

_aten: Any = torch.ops.aten
_COPY = _aten.copy_.default
_NOTHING = (_aten.detach.default, _aten.alias.default)
_ARITHMETIC = (
    *(packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul, _aten.add_, _aten.sub_, _aten.mul_)),
    *(op.default for op in (_aten.neg, _aten.clone, _aten.cat, _aten.sigmoid_backward, _aten.tanh_backward)),
)
_APART = (_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default)


def mutated_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op mutates."""
    return [value for value in written(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]


def keep_layouts(traced: fx.GraphModule) -> set[fx.Node]:
    """Where an op in place keeps an order in memory that its twin would not, copy what the twin makes: by the order
    later ops pick their kernels, and so their last bits.

    h.sigmoid_()        --> keep_layouts -->        h.copy_(sigmoid(h))        where h is some columns of a table
    """
    copies: set[fx.Node] = set()
    for node in [*traced.graph.nodes]:
        twin = _twin(node)
        if twin is None or is_view_in_place(node.target):
            continue
        before, made = _value(node.args[0]), _run(twin, node)
        if made.shape == before.shape and made.stride() != before.stride():
            with traced.graph.inserting_before(node):
                apart = traced.graph.call_function(twin, node.args, node.kwargs)
                copy = traced.graph.call_function(_COPY, (node.args[0], apart))
            apart.meta["val"], copy.meta["val"] = made, _value(node)
            node.replace_all_uses_with(copy)
            traced.graph.erase_node(node)
            copies.add(copy)
    return copies


def rename_writes(traced: fx.GraphModule, copies: Iterable[fx.Node] = ()) -> None:
    """Rewrite each op in place whose tensor, and what shares its memory, nobody reads later but by what the op returns.

    What has another value than it was traced with says what that `was`. Of `copies`, which only keep an order in
    memory, those are left out whose order nobody minds.
    """
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    inside: defaultdict[Any, list[fx.Node]] = defaultdict(list)  # by memory, the values in it
    parts: dict[fx.Node, fx.Node] = {}  # of which part of a table a value is; parts share no memory

    def is_free(before: fx.Node, at: int) -> bool:
        others = {other for place in _memories(_value(before)) for other in inside[place]} - {before}
        others = {other for other in others if parts.get(other, before) is parts.get(before, before)}
        return all(order[user] <= at for other in others for user in other.users)

    def renamed(node: fx.Node, twin: Any, at: int) -> fx.Node:
        before, other = _node(node.args[0]), _node(node.args[-1])
        readers = [*node.users, *(user for user in before.users if order[user] > at)]
        if node in copies and all(_is_arithmetic(user, {node, before}, other) for user in readers):
            return other
        found = _run(twin, node)
        if _layout(found) != _layout(_value(node)):
            return node
        with traced.graph.inserting_before(node):
            made = traced.graph.call_function(twin, node.args, node.kwargs)
        made.meta["val"], order[made] = found, at
        return made

    for node, at in [*order.items()]:
        _renew(node)
        made, twin = node, _twin(node)
        if twin is not None and (is_view_in_place(node.target) or is_free(_node(node.args[0]), at)):
            made = renamed(node, twin, at)
        if made is not node:
            made.meta["was"] = node.meta.get("was", _value(node))
            _node(node.args[0]).replace_all_uses_with(made, lambda user, at=at: order[user] > at)
            node.replace_all_uses_with(made)
            traced.graph.erase_node(node)
        held = _memories(_value(made))
        whole = next((one for one in made.all_input_nodes if held & _memories(_value(one))), None)
        if whole is not None and whole.target in _APART:
            parts[made] = made
        elif whole in parts:
            parts[made] = parts[whole]
        for place in held:
            inside[place].append(made)


def _renew(node: fx.Node) -> None:
    """Know what a node makes of arguments that are not what they were."""
    old = _value(node)
    for one in node.all_input_nodes if _tensors(old) else ():
        was = one.meta.get("was")
        if was is not None and (_memories(was) & _memories(old) or _layout(was) != _layout(_value(one))):
            made = _run(node.target, node)
            if _memories(was) & _memories(old) or _layout(made) != _layout(old):
                node.meta["was"], node.meta["val"] = old, made
            return


def _is_arithmetic(user: fx.Node, names: set[fx.Node], other: fx.Node) -> bool:
    """Whether an op does arithmetic, each element for itself, and makes the same of `other`, which has another order in
    memory."""
    if user.target in _NOTHING:
        return all(_is_arithmetic(one, {user}, other) for one in user.users)
    if user.target not in _ARITHMETIC or not names.isdisjoint(mutated_by(user)):
        return False
    if not all(_value(one).is_floating_point() for one in user.all_input_nodes):
        return False
    return _layout(_run(user.target, user, dict.fromkeys(names, other))) == _layout(_value(user))


def _twin(node: fx.Node) -> Any:
    """The op that returns what this one leaves in its first argument, if there is one that takes the same. Only by
    their names does torch say that they belong together."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or mutated_by(node) != [*node.args[:1]]:
        return None
    name, overload = names_of(target)
    packet = getattr(_aten, name.removesuffix("_"), None)
    # A view in place has a twin under another name: transpose_ of "default", transpose of "int".
    names = packet.overloads() if packet and is_view_in_place(node.target) else [overload]
    found = [getattr(packet, name, None) for name in names]
    return next((op for op in found if op is not None and op is not target and _takes(op) == _takes(target)), None)


@cache
def is_view_in_place(op: Any) -> bool:
    """Whether an op in place changes only how a tensor looks at its memory, as `t_` does."""
    return isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags


def turns_view(op: Any, args: Sequence[Any]) -> bool:
    """Whether an op in place changes how a view looks at its memory."""
    return is_view_in_place(op) and is_view(args[0])


def _takes(op: Any) -> list[str]:
    return [str(argument.type) for argument in arguments_of(op)]


def _node(arg: Any) -> fx.Node:
    return arg


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _run(op: Any, node: fx.Node, instead: Mapping[fx.Node, fx.Node] = {}) -> Any:
    """The abstract result of an op for the arguments of a node, some of them replaced."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: _value(instead.get(one, one)))
    with _tensors(_value(node))[0].fake_mode:
        return op(*args, **kwargs)


def _layout(value: Any) -> list[Any]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in _tensors(value)]


def _tensors(value: Any) -> list[Any]:
    return [*tensors_in((value,))]


def _memories(value: Any) -> set[Any]:
    return {memory(tensor) for tensor in _tensors(value)} - {None}
