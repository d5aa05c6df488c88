"""Judge what another pipeline, or a loop of one's own, made of one or several training steps.

{"0.weight": w}  after two steps        --> compare_step -->        a Report, or the mistake by its name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.purity.sharded import is_sharded
from fpipe.limits import whole
from fpipe.model import Model, the_model
from fpipe.models.parameters.params import join_params
from fpipe.optimizers.op_words import words_of
from fpipe.optimizers.state import initial_states
from fpipe.single_device.batches import check_batch
from fpipe.single_device.microbatch import cut
from fpipe.single_device.over_parts import over_parts
from fpipe.single_device.params_and_state import check_all_state, check_params
from fpipe.single_device.result import Result
from fpipe.transforms.update import words_of_update
from fpipe.verification.after_steps import GRADIENT, AfterSteps, shaken
from fpipe.verification.compare_grads import dotted
from fpipe.verification.gradient_changes import Parts
from fpipe.verification.rank_pieces import Pieces, Region, put_together
from fpipe.verification.report import Close, GradientMismatch, Report, listed, wide
from fpipe.verification.rounding import is_mean_to_rounding
from fpipe.verification.step_mistakes import Loop, clipped_by_parts


def compare_step(
    model: Model,
    params: Sequence[Any],
    batches: tuple[Any, Any] | list[tuple[Any, Any]],
    after: Any,
    *,
    rule: str | type[Any],
    lr: float | Sequence[float],
    clip: float | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    opt: Sequence[Any] | None = None,
    norm: float | Tensor | Sequence[Any] | None = None,
    loss: float | Tensor | Sequence[Any] | None = None,
    grads: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    opt_after: Mapping[str, Mapping[str, Any]] | None = None,
    microbatches: int = 1,
    state: Sequence[Any] | None = None,
    key: int | Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **settings: Any,
) -> Report:
    """Compare parameters after training steps made elsewhere with those of plain autograd and torch.optim, and name the
    mistake that explains them.

    Args:
        model, params, state, key: as for `reference`, before the first step.
        batches: the whole batch of the step, of all replicas; or a list with that of each step.
        after: the parameters after the last step, by the names of the state_dict (one name of a tied one is enough,
            and buffers may be among them), or one tree for each stage. DTensors are put together. Of ranks that have a
            part each a list of such dicts: pieces along one dimension are put together in the order of the ranks, and
            copies have to be equal: otherwise their gradients are not added over these ranks.
        rule, clip, groups, settings: the update that was meant, as for `update`.
        lr: the learning rate, or that of each step.
        opt: the optimizer's state before the first step, as `optimizer_state` makes it; that of the first by default.
        norm, loss: what the other pipeline told of them, of each step; compared too, where given.
        grads: the gradients of the last step by name, before they are clipped, or a dict for each rank; compared too,
            where given.
        opt_after: the optimizer's state after the last step by name, `{"0.weight": {"exp_avg": .., "step": ..}}`;
            compared too, where given.
        microbatches: how many equal parts each batch was cut into, over all replicas: so mistakes in adding them up are
            told apart.
        rtol, atol: relative and absolute tolerance. Without either a parameter may be as far away as small changes of
            the gradients move it, which is little but where an optimizer divides by them.

    Returns:
        A `Report` with a leaf for each parameter.

    Raises:
        ValueError: a name too many or too few, a parameter of another shape; what `update` and `reference` refuse.
        GradientMismatch: a parameter that is another one, with the mistake, if one explains all of them.

    >>> import fpipe, torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> before = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    >>> batch = (torch.randn(8, 3), torch.randn(8, 1))
    >>> optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    >>> torch.nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
    >>> optimizer.step()
    >>> after = dict(net.named_parameters())
    >>> fpipe.compare_step(model, before, batch, after, rule="AdamW", lr=0.01, weight_decay=0.1)
    Traceback (most recent call last):
    fpipe.verification.report.GradientMismatch: 4 of 4 parameters are not those of plain autograd and AdamW.
    There is no weight decay.
      0.weight, 0.bias, 2.weight, 2.bias
    """
    close = None if rtol is None and atol is None else Close(rtol, atol)
    found, pieces = _by_leaf(the_model(model), params, after)
    check_all_state(model, state, "compare_step")
    each: list[Any] = batches if isinstance(batches, list) else [batches]
    if not each:
        raise ValueError("batches is the batch (inputs, target) of the step, or a list with that of each; found none.")
    for batch in each:
        check_batch(batch)
    _check_named(opt, grads, opt_after)
    whole("microbatches", microbatches)
    words = words_of(words_of_update(rule, clip, groups, settings))
    steps = [[cut(batch, index, microbatches) for index in range(microbatches)] for batch in each]
    loop = Loop(
        model=model,
        params=params,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        steps=steps,
        words=words,
        rates=_one_a_step(lr, len(each), "lr"),
        plain=_Plain(model, params, state, steps),
        keys=_one_a_step(key, len(each), "key"),
        places=_places(pieces, found),
    )
    expected = loop.run()
    judged = AfterSteps(found, loop, expected, close)
    apart = [*pieces.apart] if pieces is not None else []
    known, said = _beside(judged, grads or {}, opt_after or {})
    told = [*_differ_by_rank(judged, apart), *said]
    told += [*_told("loss", loss, expected.loss, microbatches), *_told("norm", norm, expected.norm, microbatches)]
    report = judged.report
    if not judged.wrong and not told:
        return report
    raise GradientMismatch("\n".join(told if apart else [*judged.message(known), *told]), report)


def _check_named(opt: Any, grads: Any, opt_after: Any) -> None:
    """A TypeError for gradients or optimizer state of another shape."""
    if opt is not None and not isinstance(opt, list | tuple):
        raise TypeError(f"opt is what optimizer_state makes, one tree a stage; found {type(opt).__name__}.")
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    if not all(isinstance(one, Mapping) and all(g is not None for g in one.values()) for one in ranks):
        raise TypeError('grads is a dict of tensors by name, {"0.weight": p.grad}, or a list with that of each rank.')
    states: Any = opt_after or {}
    if not isinstance(states, Mapping) or not all(isinstance(one, Mapping) for one in states.values()):
        raise TypeError(
            'opt_after is by name, {"0.weight": {"exp_avg": .., "step": ..}}, as {name: optimizer.state[p] for name, p '
            "in net.named_parameters()} is; an optimizer's state_dict() has numbers for names."
        )


def _one_a_step(given: Any, steps: int, word: str) -> list[Any]:
    found: list[Any] = [*given] if isinstance(given, list | tuple) else [given] * steps
    odd = next((one for one in found if not isinstance(one, int | float | Tensor | None)), None)
    if odd is not None:
        raise TypeError(f"{word} is one number, or a list with that of each step; found {odd!r}.")
    if len(found) != steps:
        raise ValueError(f"{word} is one number, or a list of {steps}, one for each step; found {len(found)}.")
    return found


class _Plain:
    """Gradients of some microbatches, as a mean over their rows. Those at the first parameters, which all mistakes
    begin with, are computed once, while few numbers are kept."""

    def __init__(self, model: Model, params: Sequence[Any], state: Any, steps: Sequence[Parts]) -> None:
        self.model, self.params, self.state = model, params, state
        self.parts = {id(part): part for step in steps for part, _ in step}
        self.most = _KEPT // (1 + sum(leaf.numel() for leaf in tree.leaves(tuple(params)) if isinstance(leaf, Tensor)))
        self.known = dict[Any, Result]()

    def __call__(
        self, read: Sequence[Any], parts: Parts, state: Any = None, key: int | None = None, see: Any = None
    ) -> Result:
        """Gradients for these parameters."""
        first = see is None and state is self.state and all(map(_is, read, self.params))
        named = (
            (key, *(id(part) for part, _ in parts))
            if first and all(id(part) in self.parts for part, _ in parts)
            else None
        )
        if named in self.known:
            return self.known[named]
        made = over_parts(self.model, read, parts, state=state, key=key, see=see, zeros=False)
        if named is not None and len(self.known) < self.most:
            self.known[named] = made
        return made


_KEPT = 2**26


def _is(one: object, other: object) -> bool:
    return one is other


def _places(pieces: Pieces | None, found: Mapping[int, tuple[str, Tensor]]) -> list[dict[int, Region | None]]:
    """Where in the whole each rank has its part of each leaf."""
    names = {name: at for at, (name, _) in found.items()}
    ranks = [] if pieces is None else pieces.places
    return [{names[name]: place for name, place in one.items() if name in names} for one in ranks]


def _by_leaf(model: Model, params: Sequence[Any], after: Any) -> tuple[dict[int, tuple[str, Tensor]], Pieces | None]:
    """The parameters after the steps by the number of their leaf, with their names; and the pieces that ranks have."""
    pieces: Pieces | None = None
    leaves, containers = tree.flatten(tuple(check_params(model, params)))
    numbered = join_params(model, tree.unflatten(containers, range(len(leaves))))
    if isinstance(after, tuple | list) and _by_ranks(model, after):  # pyright: ignore[reportUnknownArgumentType]
        shapes = {dotted(place): leaves[at].shape for place, at in tree.paths(numbered)}
        pieces = put_together(after, shapes)  # pyright: ignore[reportUnknownArgumentType]
        after = pieces.whole
    elif isinstance(after, tuple | list):
        after = join_params(model, [*after])  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(after, Mapping):
        raise ValueError(
            "after is a dict by name, such as {name: p for name, p in net.named_parameters()}, or one tree for each "
            f"stage; found {type(after).__name__}."
        )
    places = {dotted(place): at for place, at in tree.paths(numbered)}
    own: dict[str, Any] = {dotted(place): leaf for place, leaf in tree.paths(after)}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, at in places.items():
        leaf = own.get(name)
        if at in found or leaf is None:
            continue
        leaf = leaf.full_tensor() if is_sharded(leaf) else leaf
        if not isinstance(leaf, Tensor) or leaf.shape != leaves[at].shape:
            is_now = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"{name!r} has the shape {is_now} after the steps, and {[*leaves[at].shape]} before.")
        found[at] = name, leaf.detach().to(leaves[at].device)
    missing = next((name for name, at in places.items() if at not in found), None)
    if missing is not None:
        raise ValueError(f"there is no {missing!r} after the steps; found {listed([*own]) or 'nothing'}.")
    return found, pieces


def _by_ranks(model: Model, after: Sequence[Any]) -> bool:
    """Whether these are dicts by the names of a net, of a stage or a rank each."""
    flat = all(isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in after)
    return flat and all(stage.names is not None for stage in model.stages)


def _differ_by_rank(judged: AfterSteps, names: Sequence[str]) -> list[str]:
    """A sentence about parameters that were copies before the steps."""
    if not names:
        return []
    for words, loop in clipped_by_parts(judged.loop):
        if not judged.wrong_beside(loop, loop.run()):
            return [f"Ranks have copies that differ, such as {names[0]}: {words}."]
    words = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    norms = ", or each rank clips by a norm of its own" * (judged.loop.words.clip is not None)
    return [f"{words}{norms}: {listed(names)}."]


def _not_added(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """A sentence about a gradient that ranks have each a part of."""
    total = torch.stack([wide(one) for one in ranks]).sum(0)
    ways = (("add up to", "tensor-parallel ranks", total), ("have the mean", "replicas", total / len(ranks)))
    for way, over, made in ways:
        if Close(_NEAR, _NEAR * float(wide(right).abs().max()))(made, wide(right)):
            return f"The gradient of {name} is not added over {over}: those of {len(ranks)} ranks {way} the right one."
    return f"The gradient of {name} is another one on each of {len(ranks)} ranks that are to have copies."


_NEAR = 1e-4
"""How near a sum over ranks is to the gradient that it explains."""


def _beside(
    judged: AfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[int, Tensor], list[str]]:
    """Gradients by the number of their leaf, and sentences about those and optimizer state that are not the loop's."""
    right, said = judged.values_of(judged.expected), list[str]()
    if not isinstance(grads, Mapping):
        shapes = {name.removeprefix(GRADIENT): leaf.shape for name, leaf in right.items()}
        pieces = put_together(grads, shapes)
        for name, ranks in pieces.apart.items():
            said.append(_not_added(name, ranks, right[GRADIENT + name]))
        grads = {name: leaf for name, leaf in pieces.whole.items() if name not in pieces.apart}
    given = {GRADIENT + name: leaf for name, leaf in grads.items()}
    given |= {f"{word} of {name}": leaf for name, state in states.items() for word, leaf in state.items()}
    unknown = next((what for what in given if what not in right), None)
    if unknown is not None:
        raise ValueError(f"there is nothing to compare {unknown} with; there is {listed([*right])}.")
    found = {what: _tensor(leaf) for what, leaf in given.items()}
    for what, leaf in found.items():
        if leaf.shape != right[what].shape:
            raise ValueError(f"{what} has the shape {[*leaf.shape]}, and is to have {[*right[what].shape]}.")
    odd = [what for what, leaf in found.items() if not judged.same(leaf, right[what])]
    if odd and judged.close is None:
        moved = judged.values_of(shaken(judged.loop).run())
        odd = [what for what in odd if not judged.near(found[what], right[what], moved[what])]
    said += [f"{len(odd)} of {len(given)} values beside the parameters are others: {listed(odd)}."] if odd else []
    known = {at: found[GRADIENT + name] for at, (name, _) in judged.found.items() if GRADIENT + name in found}
    return known, said


def _tensor(leaf: Any) -> Tensor:
    return torch.as_tensor(leaf.full_tensor() if is_sharded(leaf) else leaf).detach()


def _told(word: str, told: Any, expected: Any, microbatches: int) -> list[str]:
    """Sentences about a loss or norm that another pipeline told."""
    if told is None:
        return []
    found = [torch.as_tensor(one) for one in _one_a_step(told, len(expected), word)]
    for step, (one, right) in enumerate(zip(found, expected, strict=True)):
        if is_mean_to_rounding(one.to(torch.float32), right.to(torch.float32)):
            continue
        ratio = float(one) / float(right) if float(right) else float("inf")
        scales = {k: f"{k} x" for k in (2, 4, 8, microbatches)} | {1 / k: f"1/{k} x" for k in (2, 4, 8, microbatches)}
        roots = {k**0.5: f"counts everything {k} times" for k in (2, 4, 8)} if word == "norm" else {}
        words = next((said for scale, said in (scales | roots).items() if abs(ratio / scale - 1) < 1e-4), "")
        return [f"The {word} of step {step} is {float(one):g}, and not {float(right):g}{': ' * bool(words)}{words}."]
    return []
