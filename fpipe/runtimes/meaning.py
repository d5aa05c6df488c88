"""What each kind of op does to real values, with plain autograd inside each stage.

A rule takes what the op reads, in order, and gives what it writes, in order. What flows: activations are pytrees of
detached tensors; cotangents and gradients are lists over the leaves of what they belong to, None where there is none;
residuals are the stage's own autograd graph, cut off from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.microbatch import cut, join
from fpipe.models import Model, loss_of
from fpipe.program import Op

Leaves = list[Any]


@dataclass
class Run:
    """What a rule knows besides the values it reads: the model, the rows of the batch, and who wants saved tensors."""

    model: Model
    rows: int
    watch_saved: bool = False


Rule = Callable[[Op, Sequence[Any], Run], Sequence[Any]]


@dataclass
class Residuals:
    """A stage's graph: from the leaves it was given to what it returned; `saved` only for a run that watches."""

    params: list[Leaves]
    inputs: list[Leaves]
    carry: Leaves
    outputs: Leaves
    carried: Leaves
    loss: Tensor | None
    saved: list[Tensor]


def forward(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """F and R: run the stage on leaves of its own and keep the graph. Being one code, they give the same bits."""
    number = op.stage or 0
    stage = run.model.stages[number]
    named: dict[str, list[Any]] = {}
    taken: list[Any] = []
    for value, arg in zip(op.reads, args, strict=True):
        named.setdefault(value.name, []).append(arg)
        if value.name in ("x", "inputs"):
            taken.append(arg)
        elif value.name in ("y", "again"):
            taken.append(tree.tree_map(_same_leaf, arg))
    bundles = [tree.tree_map(_own_leaf, bundle) for bundle in named["params"]]
    ties = {leaf: bundle for (_, _, leaf), bundle in zip(run.model.tied(number), bundles[1:], strict=True)}
    params = {**bundles[0], **ties} if ties else bundles[0]
    said = {word: named[word][0] for word in ("state", "key") if word in named}
    carry = tree.tree_map(_same_leaf, named["carry"][0]) if "carry" in named else None
    said |= {"microbatch": op.microbatch, "carry": carry}
    target = (named.get("t") or named.get("target") or [None])[0]
    guard = _Guard(stage.name or f"stage {number}", named, taken)
    saved: list[Tensor] = []
    with torch.enable_grad(), _Watch(saved) if run.watch_saved else _Watch.nobody():
        x = tuple(taken) if isinstance(run.model.inputs[number], tuple) else taken[0]
        y = stage.forward(params, x, **{word: said[word] for word in stage.asks})
        y, carried = y if "carry" in stage.asks else (y, None)
        with_loss = any(value.name in ("t", "target") for value in op.reads)
        loss, count = loss_of(run.model, y, target) if with_loss else (None, None)
    guard.check()
    outputs = tree.leaves(y)
    if not any(isinstance(leaf, Tensor) for leaf in outputs):
        raise TypeError(
            f"{stage.name or f'stage {number}'} returned {type(y).__name__} without any tensor; a stage returns a "
            "pytree of tensors."
        )
    inputs = [
        [] if value.name in ("x", "inputs") else tree.leaves(arg)
        for value, arg in zip(_sources(op), taken, strict=True)
    ]
    residuals = Residuals(
        list(map(tree.leaves, bundles)), inputs, tree.leaves(carry), outputs, tree.leaves(carried), loss, saved
    )
    made = {
        "y": lambda: tree.tree_map(_handed_on, y),
        "again": lambda: tree.tree_map(_handed_on, y),
        "carry": lambda: tree.tree_map(_handed_on, carried),
        "loss": lambda: detached(loss),
        "count": lambda: detached(count),
        "res": lambda: residuals,
    }
    return [made[value.name]() for value in op.writes]


def _sources(op: Op) -> list[Any]:
    return [value for value in op.reads if value.name in ("x", "inputs", "y", "again")]


def backward(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """B and I: the gradient of a stage's graph. I computes the weight gradients too and hands them over: plain autograd
    cannot stop half-way without doing the way to that point twice."""
    residuals: Residuals | None = None
    cotangent: Leaves | None = None
    carried: Leaves | None = None
    weight = 1.0
    for value, arg in zip(op.reads, args, strict=True):
        if value.name == "res":
            residuals = arg
        elif value.name in ("dx", "dy"):
            cotangent = arg
        elif value.name == "dcarry":
            carried = arg
        elif value.name == "w":
            weight = arg if run.model.reduction == "mean" else 1.0
    assert residuals is not None
    roots: list[Tensor] = []
    seeds: list[Tensor] = []
    pairs = [
        *zip(residuals.outputs, cotangent or [], strict=False),
        *zip(residuals.carried, carried or [], strict=False),
    ]
    if residuals.loss is not None:
        pairs.append((residuals.loss, torch.full_like(residuals.loss, weight)))
    for root, seed in pairs:
        if isinstance(root, Tensor) and root.requires_grad and seed is not None:
            roots.append(root)
            seeds.append(seed)
    groups = [*residuals.inputs, residuals.carry, *residuals.params]
    wanted = [leaf for group in groups for leaf in group if _wants(leaf)]
    found = iter(
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots and wanted else [None] * len(wanted)
    )
    grads = [[next(found) if _wants(leaf) else None for leaf in group] for group in groups]
    inputs, carry, params = (
        grads[: len(residuals.inputs)],
        grads[len(residuals.inputs)],
        grads[len(residuals.inputs) + 1 :],
    )
    made: list[Any] = []
    for value in op.writes:
        if value.name == "dx":
            made.append(inputs[value.port])
        elif value.name == "dcarry":
            made.append(carry)
        else:
            made.append(params if value.name == "wres" else params[value.port])
    return made


def weight_gradient(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """W: what I left."""
    handed = next(arg for value, arg in zip(op.reads, args, strict=True) if value.name == "wres")
    return [handed[value.port] for value in op.writes]


def split_batch(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """SPLIT: views of the batch's rows, and the share of the microbatch (and slice) in the whole."""
    how = dict(op.how)
    made: dict[str, Any] = {}
    share = 1.0
    for value, arg in zip(op.reads, args, strict=True):
        part, rows = cut(arg, how["index"], how["count"], how.get("spec"), size=how.get("size"), total=run.rows)
        if "slices" in how:
            whole = tree.leaves(part)[0].shape[1]
            leaves, spec = tree.flatten(part)
            part = tree.unflatten(spec, [leaf.tensor_split(how["slices"], dim=1)[op.slice or 0] for leaf in leaves])
            share = tree.leaves(part)[0].shape[1] / whole
        made["x" if value.name == "inputs" else "t"] = part
        made["w"] = rows / run.rows * share
    return [made[value.name] for value in op.writes]


def add(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """ADD: leaf by leaf, from left to right."""
    total: Leaves = list(args[0])
    for more in args[1:]:
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]
    return [total]


def scale(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """SCALE: gradients of a total, divided by what it counts (by 1 if it counts nothing)."""
    total, count = args
    divisor = count if count != 0 else 1
    return [[leaf if leaf is None else leaf / divisor for leaf in total]]


def merge_results(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """MERGE: the loss over all microbatches, what it counts, and the joined outputs."""
    named: dict[str, list[Any]] = {}
    for value, arg in zip(op.reads, args, strict=True):
        named.setdefault(value.name, []).append(arg)
    losses = named["loss"]
    if run.model.reduction == "mean":
        losses = [loss * weight for loss, weight in zip(losses, named["w"], strict=True)]
    loss = sum(losses[1:], losses[0])
    made: dict[str, Any] = {}
    if "count" in named:
        made["count"] = count = sum(named["count"][1:], named["count"][0])
        loss = loss / (count if count != 0 else 1)
    made["loss"] = loss
    if "y" in named:
        made["outputs"] = join(named["y"], spec=dict(op.how).get("spec"))
    return [made[value.name] for value in op.writes]


def update(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """U: the module state after a microbatch, from the state before and the stage's input."""
    change = run.model.stages[op.stage or 0].update
    assert change is not None, f"stage {op.stage} has no update"
    state, *taken = args
    x = tuple(taken) if isinstance(run.model.inputs[op.stage or 0], tuple) else taken[0]
    return [change(state, tree.tree_map(detached, x))]


def both(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """PAIR: its parts, which do not read each other, one after the other."""
    values = dict(zip(op.reads, args, strict=True))
    return [made for part in op.parts for made in RULES[part.kind](part, [values[value] for value in part.reads], run)]


def pass_on(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """SEND, RECV, OFFLOAD and LOAD within one process: the value itself."""
    return args


def drop(op: Op, args: Sequence[Any], run: Run) -> Sequence[Any]:
    """FREE: being the last reader is all it does."""
    return ()


RULES: dict[str, Rule] = {
    "F": forward,
    "R": forward,
    "B": backward,
    "I": backward,
    "W": weight_gradient,
    "SPLIT": split_batch,
    "ADD": add,
    "SCALE": scale,
    "MERGE": merge_results,
    "U": update,
    "PAIR": both,
    **dict.fromkeys(("SEND", "RECV", "OFFLOAD", "LOAD"), pass_on),
    "FREE": drop,
}


def register_meaning(kind: str, rule: Rule) -> None:
    """Say what an op of a kind of your own does: `rule(op, args, run)` gives what the op writes, in order."""
    RULES[kind] = rule


class _Guard:
    """Sees whether a stage changed what it was given in place, and puts the caller's batch back if it did."""

    def __init__(self, who: str, named: dict[str, list[Any]], taken: list[Any]) -> None:
        batch = [leaf for name in ("x", "inputs", "t", "target") for leaf in tree.leaves(named.get(name, []))]
        self.who = who
        self.batch = [(leaf, leaf._version, leaf.clone()) for leaf in batch if isinstance(leaf, Tensor)]
        self.rest = [(leaf, leaf._version) for leaf in tree.leaves(taken) if isinstance(leaf, Tensor)]

    def check(self) -> None:
        changed = [(leaf, copy) for leaf, version, copy in self.batch if leaf._version != version]
        with torch.no_grad():
            for leaf, copy in changed:
                leaf.copy_(copy)
        if changed or any(leaf._version != version for leaf, version in self.rest):
            raise RuntimeError(
                f"{self.who} changed its input in place; a stage is a pure function. Work on a copy, or use "
                "inplace=False."
            )


class _Watch(torch.autograd.graph.saved_tensors_hooks):
    """Lists the tensors that autograd saves."""

    def __init__(self, saved: list[Tensor]) -> None:
        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @staticmethod
    def nobody() -> Any:
        return torch.enable_grad()


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _own_leaf(leaf: Any) -> Any:
    """A parameter as a leaf of this stage's graph, on the caller's storage."""
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.detach().requires_grad_()
    return leaf


def _same_leaf(leaf: Any) -> Any:
    """An activation as a leaf of this stage's graph; it wants a gradient if the stage that made it depends on one."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _handed_on(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def detached(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
