"""Apply an optimizer's rule to leaves: one of torch.optim's, with its bits, or one that was registered.

    [p], [dp], [{"step": 3, "exp_avg": ..}], lr        --> AdamW -->        [p'], [{"step": 4, "exp_avg": ..}]

The classes of torch.optim update in place, and keep state by the tensor it is of. An instance is made once for each
thread and kept: to make one takes longer than to update a small net. It is handed copies, and what it leaves is taken
from it. At step 0 it finds no state, and so begins as it always does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.meaning.optimizers.rule_names import RULES, SETTINGS, TORCHS, check_rule
from fpipe.torch_internals import version_of

Words = tuple[tuple[str, Any], ...]
Numbers = Mapping[str, float | None]
"""The learning rate of a step as `lr`, and others of its numbers by name."""
State = dict[str, Tensor]
Apply = Callable[..., tuple[Tensor, State]]
Initial = Callable[[Tensor], State]

STEP = "step"


class Registered(NamedTuple):
    """A rule of a user's own: `apply(param, grad, state, lr=, **settings) -> (param, state)`, pure."""

    apply: Apply
    initial: Initial


def register_update(name: str, apply: Apply, initial: Initial | None = None) -> None:
    """Add an optimizer's rule, as a pure function of one leaf.

    Args:
        name: what `update` calls it.
        apply: `f(param, grad, state, *, lr, **settings) -> (param, state)`, which mutates nothing. It is called outside
            of traces, and may look at data.
        initial: `f(param) -> state`, a dict of tensors; none by default.

    Raises:
        ValueError: the name is torch.optim's or taken already, or what is given is no function.

    >>> import fpipe, torch
    >>> fpipe.register_update("SignSGD", lambda param, grad, state, lr: (param - lr * grad.sign(), state))
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
    >>> program = fpipe.chain(fpipe.split(1), fpipe.merge(), fpipe.update("SignSGD"))(fpipe.program(model))
    >>> params = ({"w": torch.tensor(3.0)},)
    >>> opt = fpipe.optimizer_state(program, params)
    >>> fpipe.build(program, model)(params, (torch.ones(2), torch.ones(2)), opt=opt, lr=0.5).params
    ({'w': tensor(2.5000)},)
    >>> _ = RULES.pop("SignSGD")
    """
    if name in TORCHS or name in RULES or not name.isidentifier():
        raise ValueError(f"a rule's name is a new word, which torch.optim has not; found {name!r}.")
    if not callable(apply) or not (initial is None or callable(initial)):
        raise ValueError("a rule is f(param, grad, state, *, lr, **settings) -> (param, state), its start f(param).")
    RULES[name] = Registered(apply, initial or _nothing)


def _nothing(param: Tensor) -> State:
    return {}


def initial_state(by: str, settings: Words, param: Any) -> State:
    """The state of a leaf before its first update; of what is no floating tensor there is none."""
    if not _trains(param):
        return {}
    param = param.detach()
    if by in OF_MATRICES and param.ndim != 2:
        raise ValueError(
            f"{by} is of matrices alone, and there is a parameter of shape {[*param.shape]}: take another."
        )
    if by in RULES:
        return RULES[by].initial(param)
    kept = _kept(by, settings, param.ndim, param.dtype)
    made = {
        word: torch.zeros_like(param, dtype=dtype) if whole else torch.zeros((), dtype=dtype)
        for word, (whole, dtype) in kept.items()
    }
    filled = _optimizer(by, settings, [param], 0.0).state[param]  # what a constructor fills
    return made | filled


def state_shapes(by: str, settings: Words, param: Any) -> Mapping[str, tuple[int, ...]] | None:
    """The names in the state of a leaf, with their shapes; None where only its rule knows them."""
    if not _trains(param):
        return {}
    if by in RULES:
        return None
    kept = _kept(by, settings, param.ndim, param.dtype)
    return {word: tuple(param.shape) if whole else () for word, (whole, _) in kept.items()}


def _trains(param: Any) -> bool:
    return isinstance(param, Tensor) and (param.is_floating_point() or param.is_complex())


def apply_rule(
    by: str,
    settings: Sequence[Words],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    numbers: Numbers,
    own: Sequence[bool],
) -> tuple[list[Tensor], list[State]]:
    """The next parameters and states of some leaves, each under its own settings; those that are one's `own` may be
    overwritten."""
    given = zip(params, grads, states, settings, own, strict=True)
    if by in RULES:
        made = [
            _applied(by, param, grad, state, with_numbers(words, numbers)) for param, grad, state, words, _ in given
        ]
        return [param for param, _ in made], [state for _, state in made]
    if not params:
        return [], []
    optimizer, now = _of_thread(by, tuple(dict.fromkeys(settings))), list[Tensor]()
    for param, grad, state, _, mine in given:
        now.append(param.detach() if mine else param.detach().clone())
        now[-1].grad = grad
        if by in _FILLED or (STEP in state and state[STEP].item()):
            kept = {word: leaf for word, leaf in state.items() if word != STEP or by not in UNCOUNTED}
            optimizer.state[now[-1]] = kept if mine else {word: leaf.clone() for word, leaf in kept.items()}
    for group, words in zip(optimizer.param_groups, dict.fromkeys(settings), strict=True):
        group["params"] = [param for param, said in zip(now, settings, strict=True) if said == words]
        group |= with_numbers(words, numbers)
    try:
        optimizer.step()
        return now, [_after(optimizer.state[param], state) for param, state in zip(now, states, strict=True)]
    finally:
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups if len(numbers) > 1 else ():
            group |= {word: optimizer.defaults[word] for word in numbers}
        for param in now:
            param.grad = None


def _applied(by: str, param: Tensor, grad: Tensor, state: State, settings: dict[str, Any]) -> tuple[Tensor, State]:
    """The parameter and state that a rule of a user's own makes; a ValueError if it makes no such pair, or mutates."""
    given = (param, grad, *state.values())
    versions = [0 if leaf.is_inference() else version_of(leaf) for leaf in given]
    made = RULES[by].apply(param, grad, state, **settings)
    if versions != [0 if leaf.is_inference() else version_of(leaf) for leaf in given]:
        raise ValueError(
            f"rule {by!r} mutates what it is handed, and has to be pure: write p - lr * g, not p.sub_(..)."
        )
    pair: Any = made if isinstance(made, tuple) and len(made) == 2 else (None, None)  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
    after, left = pair
    if not isinstance(after, Tensor) or not isinstance(left, dict) or {*left} != {*state}:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"rule {by!r} gives (param, state) back, with {', '.join(state) or 'nothing'} in the dict as its start "
            f"has; found {type(made).__name__}."
        )
    if after.shape != param.shape or after.dtype != param.dtype:
        now = f"{after.dtype} of shape {[*after.shape]}"
        raise ValueError(f"rule {by!r} makes a parameter {now} of one {param.dtype} of shape {[*param.shape]}.")
    return after, left


def _after(found: Mapping[str, Any], before: State) -> State:
    """The state that an optimizer left; the steps of one that counts none are counted here."""
    return {word: found[word] if word in found else leaf + 1 for word, leaf in before.items()}


def numbers_of(rate: Any) -> dict[str, float | None]:
    """The numbers of a step, of its learning rate alone or of a dict of them."""
    each = rate if isinstance(rate, Mapping) else {"lr": rate}
    return {word: None if one is None else float(one) for word, one in each.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def with_numbers(words: Words, numbers: Numbers) -> dict[str, Any]:
    """Settings with the numbers of a step where the program does not say them, scaled where a group says so."""
    settings = {"lr": None, **numbers, **dict(words)}
    scale, rate = settings.pop("lr_scale", None), settings["lr"]
    return settings | {"lr": rate if scale is None or rate is None else rate * scale}


def one_by_one(by: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a rule of torch.optim that takes parameters one by one, if they do not say otherwise."""
    takes = "foreach" in SETTINGS[by].split() and not {"foreach", "fused"} & settings.keys()
    return {"foreach": False} | settings if takes else settings


@lru_cache(maxsize=256)
def check_together(by: str, settings: Words) -> None:
    """A ValueError for settings that the constructor of an optimizer of torch refuses."""
    _optimizer(by, settings, [_probe(2)], 1.0)


# Rules whose state is handed over before the first step too: a constructor fills it, or it begins with zeros.
_FILLED = frozenset(("Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta"))
UNCOUNTED = frozenset(("SGD", "Muon"))  # rules that count no steps: here a state tells by them whether it has begun
OF_MATRICES = frozenset(("Muon",))
_KNOWN = threading.local()


def _of_thread(by: str, settings: tuple[Words, ...]) -> torch.optim.Optimizer:
    """An optimizer of this thread, with a group for each of the settings."""
    known = _KNOWN.__dict__.setdefault("meaning.optimizers", dict[Any, torch.optim.Optimizer]())
    if (by, settings) not in known:
        made = known[by, settings] = _optimizer(by, settings[0], [_probe(2)], 0.0)
        for words in settings[1:]:
            own = _optimizer(by, words, [_probe(2)], 0.0).defaults  # those of the first group are not this one's
            made.add_param_group({"params": [_probe(2)], **own})
    return known[by, settings]


def _probe(ndim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros([2] * ndim, dtype=dtype, device="cpu")


def _optimizer(by: str, settings: Words, params: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """One of torch.optim's; a ValueError if there is none of that name, or it takes no such settings."""
    cls = class_of(by)
    if cls is None:
        check_rule(by)
        raise ValueError(f"this torch has no {by}: take another rule, or a newer torch.")
    try:
        return cls(params, **one_by_one(by, with_numbers(settings, {"lr": lr})))
    except (ValueError, RuntimeError, TypeError) as error:
        said = ", ".join(f"{word}={value!r}" for word, value in settings)
        raise ValueError(f"torch.optim.{by} refuses its settings ({said}): {error}") from None


def class_of(by: str) -> Callable[..., torch.optim.Optimizer] | None:
    """The class of torch.optim of that name, if this torch has one."""
    return getattr(torch.optim, by, None) if by in TORCHS else None


@lru_cache(maxsize=256)
def _kept(by: str, settings: Words, ndim: int, dtype: torch.dtype) -> Mapping[str, tuple[bool, torch.dtype]]:
    """The tensors that an optimizer keeps of a leaf once it has begun: whether one is as large as that, and its
    dtype."""
    param = _probe(max(ndim, 1), dtype)
    optimizer = _optimizer(by, settings, [param], 0.0)
    param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"torch.optim.{by} takes no step with {dict(settings)}: {str(error) or 'a check of its own'}"
        ) from None
    found = {word: leaf for word, leaf in optimizer.state[param].items() if isinstance(leaf, Tensor)}
    made = {word: (leaf.shape == param.shape, leaf.dtype) for word, leaf in found.items()}
    return {STEP: (False, torch.float32)} | made if by in UNCOUNTED and made else made
