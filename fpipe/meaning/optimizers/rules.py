"""Apply an optimizer's rule to leaves: one of torch.optim's, with its bits, or one that was registered.

    [p], [dp], [{"step": 3, "exp_avg": ..}], lr        --> AdamW -->        [p'], [{"step": 4, "exp_avg": ..}]

The classes of torch.optim update in place, and keep state by tensor. An instance is made once for each thread and kept,
because making one takes longer than updating a small net. It steps copies of the leaves, and the new state is taken out
of it. At step 0 it is given no state, so it starts as torch's own does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.meaning.optimizers.rule_names import RULES, SETTINGS, TORCH_RULES, check_rule
from fpipe.torch_internals import silence_capture_warning, version_of

RuleSettings = tuple[tuple[str, Any], ...]
Numbers = Mapping[str, float | Tensor | None]
"""The learning rate of a step as `lr`, and others of its numbers by name; tensors in a rule that is captured."""
State = dict[str, Tensor]
Apply = Callable[..., tuple[Tensor, State]]
Initial = Callable[[Tensor], State]

STEP = "step"


class Registered(NamedTuple):
    """A registered rule: `apply(param, grad, state, lr=, **settings) -> (param, state)`, a pure function."""

    apply: Apply
    initial: Initial


def register_update(name: str, apply: Apply, initial: Initial | None = None) -> None:
    """Add an optimizer's rule, as a pure function of one leaf.

    Args:
        name: the rule's name, for `update`.
        apply: `f(param, grad, state, *, lr, **settings) -> (param, state)`, which mutates nothing. It is called outside
            of traces, and may look at data.
        initial: `f(param) -> state`, a dict of tensors; by default {}.

    Raises:
        ValueError: the name is torch.optim's or taken already.

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
    if name in TORCH_RULES or name in RULES or not name.isidentifier():
        raise ValueError(f"a rule's name is a new word, which torch.optim has not; found {name!r}.")
    RULES[name] = Registered(apply, initial or _no_state)


def _no_state(param: Tensor) -> State:
    return {}


def rule_of(rule: str, settings: RuleSettings) -> tuple[str, RuleSettings]:
    """Return the rule and the settings of a leaf; settings that begin with `by` name another rule.

    >>> rule_of("AdamW", (("by", "Muon"), ("weight_decay", 0.1))), rule_of("AdamW", ())
    (('Muon', (('weight_decay', 0.1),)), ('AdamW', ()))
    """
    return (settings[0][1], settings[1:]) if settings and settings[0][0] == "by" else (rule, settings)


def initial_state(rule: str, settings: RuleSettings, param: Any) -> State:
    """Return the state of a leaf before its first update; {} for a leaf that is no floating tensor."""
    if not _is_trainable(param):
        return {}
    rule, settings = rule_of(rule, settings)
    param = param.detach()
    if rule in MATRIX_RULES and param.ndim != 2:
        raise ValueError(
            f"{rule} is of matrices alone, and there is a parameter of shape {[*param.shape]}: take another."
        )
    if rule in RULES:
        return RULES[rule].initial(param)
    tensors_by_name = _state_tensors(rule, settings, param.ndim, param.dtype)
    if dict(settings).get("capturable") and param.device.type == "cpu":
        raise ValueError("capturable=True is of parameters on an accelerator; these are on the CPU. Leave it out.")
    # Torch's fused and capturable kernels read the count of steps on the parameter's device.
    is_count_on_device = any(dict(settings).get(kernel) for kernel in ("fused", "capturable"))
    count_device = param.device if is_count_on_device else None
    state = {
        name: torch.zeros_like(param, dtype=dtype)
        if is_param_shaped
        else torch.zeros((), dtype=dtype, device=count_device)
        for name, (is_param_shaped, dtype) in tensors_by_name.items()
    }
    constructor_state = _make_optimizer(rule, settings, [param], 0.0).state[param]  # what a constructor fills
    return state | constructor_state


def state_shapes(rule: str, settings: RuleSettings, param: Any) -> Mapping[str, tuple[int, ...]] | None:
    """Return the shapes in the state of a leaf, by name; None for a registered rule, which alone knows them."""
    if not _is_trainable(param):
        return {}
    rule, settings = rule_of(rule, settings)
    if rule in RULES:
        return None
    tensors_by_name = _state_tensors(rule, settings, param.ndim, param.dtype)
    return {
        name: tuple(param.shape) if is_param_shaped else () for name, (is_param_shaped, _) in tensors_by_name.items()
    }


def _is_trainable(param: Any) -> bool:
    return isinstance(param, Tensor) and (param.is_floating_point() or param.is_complex())


def apply_rule(
    rule: str,
    settings: Sequence[RuleSettings],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    numbers: Numbers,
    may_overwrite: Sequence[bool],
    capturable: bool = False,
) -> tuple[list[Tensor], list[State]]:
    """Return the next parameters and states of leaves, each stepped under its settings, which may name its rule.

    If `capturable`, numbers are 0-d tensors on the device, nothing is read from there, and leaves that the rule may
    overwrite end in the memory where they were.
    """
    if not params:
        return [], []
    pairs = [rule_of(rule, leaf_settings) for leaf_settings in settings]
    if any(leaf_rule != rule for leaf_rule, _ in pairs):
        new_params, new_states = [*params], [*states]
        for leaf_rule in dict.fromkeys(leaf_rule for leaf_rule, _ in pairs):
            indices = [index for index, pair in enumerate(pairs) if pair[0] == leaf_rule]
            next_leaves = apply_rule(
                leaf_rule,
                [pairs[index][1] for index in indices],
                [params[index] for index in indices],
                [grads[index] for index in indices],
                [states[index] for index in indices],
                numbers,
                [may_overwrite[index] for index in indices],
                capturable,
            )
            for index, param, state in zip(indices, *next_leaves, strict=True):
                new_params[index], new_states[index] = param, state
        return new_params, new_states
    # From here on all leaves have one rule, which a group may have named too.
    settings = [leaf_settings for _, leaf_settings in pairs]
    if capturable:
        rate_is_tensor = isinstance(numbers.get("lr"), Tensor)
        settings = [as_capturable(rule, group_settings, rate_is_tensor) for group_settings in settings]
    leaves = zip(params, grads, states, settings, may_overwrite, strict=True)
    if rule in RULES:
        pairs = [
            _apply_registered(rule, param, grad, state, with_numbers(group_settings, numbers))
            for param, grad, state, group_settings, _ in leaves
        ]
        if capturable:
            former = zip(params, states, may_overwrite, strict=True)
            pairs = [_write_back(*pair, *leaf) for pair, leaf in zip(pairs, former, strict=True)]
        return [param for param, _ in pairs], [state for _, state in pairs]
    # 1. Give the optimizer copies, with gradients and states. A leaf at step 0 has none yet, but for rules whose
    #    constructor makes state.
    optimizer, new_params = _thread_optimizer(rule, tuple(dict.fromkeys(settings))), list[Tensor]()
    for param, grad, state, group_settings, overwrites in leaves:
        new_params.append(param.detach() if overwrites else param.detach().clone())
        new_params[-1].grad = grad
        if capturable or rule in _RULES_WITH_INITIAL_STATE or (STEP in state and state[STEP].item()):
            leaf_state = {name: leaf for name, leaf in state.items() if name != STEP or rule not in RULES_WITHOUT_STEP}
            copied = leaf_state if overwrites else {name: leaf.clone() for name, leaf in leaf_state.items()}
            if capturable:
                _start_on_device(rule, copied, with_numbers(group_settings, numbers)["lr"])
            optimizer.state[new_params[-1]] = copied
    # 2. One group for each of the settings, in the order in which leaves first have them.
    for group, group_settings in zip(optimizer.param_groups, dict.fromkeys(settings), strict=True):
        group["params"] = [
            param for param, leaf_settings in zip(new_params, settings, strict=True) if leaf_settings == group_settings
        ]
        group |= with_numbers(group_settings, numbers)
        # SGD reads a rate on the host, unless a gradient of the rate is wanted: then it multiplies by it.
        if capturable and rule == "SGD" and isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].detach().requires_grad_()
    try:
        optimizer.step()
        return new_params, [
            _next_state(optimizer.state[param], state, capturable and overwrites)
            for param, state, overwrites in zip(new_params, states, may_overwrite, strict=True)
        ]
    finally:
        # 3. Empty it: the instance lives as long as the thread, and would keep this step's tensors.
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            group |= {"params": [], **{name: optimizer.defaults[name] for name in numbers}}
        for param in new_params:
            param.grad = None


def _start_on_device(rule: str, state: State, lr: float | Tensor | None) -> None:
    """Fill in place what torch starts a state with instead of zeros, if its count, on the device, is 0."""
    starts: dict[str, dict[str, Any]] = {
        "NAdam": {"mu_product": 1.0},
        "ASGD": {"eta": lr, "mu": 1.0},
        "Rprop": {"step_size": lr},
    }
    for name, number in starts.get(rule, {}).items():
        # A complex leaf takes steps of this size in both of its parts.
        leaf = torch.view_as_real(state[name]) if state[name].is_complex() else state[name]
        leaf.copy_(torch.where(state[STEP] == 0, number, leaf))


def _apply_registered(
    rule: str, param: Tensor, grad: Tensor, state: State, settings: dict[str, Any]
) -> tuple[Tensor, State]:
    """Return the parameter and state of a registered rule; raise ValueError if it mutates or returns no such pair."""
    # Torch counts the mutations of each tensor, except in inference mode.
    tensors = (param, grad, *state.values())
    versions = [0 if leaf.is_inference() else version_of(leaf) for leaf in tensors]
    returned = RULES[rule].apply(param, grad, state, **settings)
    if versions != [0 if leaf.is_inference() else version_of(leaf) for leaf in tensors]:
        raise ValueError(f"rule {rule!r} mutates what it is handed: write p - lr * g, not p.sub_(..).")
    pair: Any = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
    new_param, new_state = pair
    if not isinstance(new_param, Tensor) or not isinstance(new_state, dict) or {*new_state} != {*state}:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"rule {rule!r} gives (param, state) back, with {', '.join(state) or 'nothing'} in the dict as its start "
            f"has; found {type(returned).__name__}."
        )
    if new_param.shape != param.shape or new_param.dtype != param.dtype:
        actual = f"{new_param.dtype} of shape {[*new_param.shape]}"
        raise ValueError(f"rule {rule!r} makes a parameter {actual} of one {param.dtype} of shape {[*param.shape]}.")
    return new_param, new_state


def _next_state(new_state: Mapping[str, Any], former_state: State, overwrites: bool) -> State:
    """Return the state that an optimizer has left; `step` is counted here for a rule that does not count steps."""
    return {
        name: new_state[name] if name in new_state else leaf.add_(1) if overwrites else leaf + 1
        for name, leaf in former_state.items()
    }


def _write_back(
    new_param: Tensor, new_state: State, param: Tensor, state: State, overwrites: bool
) -> tuple[Tensor, State]:
    """Return a parameter and its state in the memory of the former ones, if the rule may overwrite these."""
    if not overwrites:
        return new_param, new_state
    return param.detach().copy_(new_param), {name: leaf.copy_(new_state[name]) for name, leaf in state.items()}


def as_number_by_name(rate: Any) -> dict[str, float | None]:
    """Return the numbers of a step by name, from a learning rate or a dict."""
    number_by_name = rate if isinstance(rate, Mapping) else {"lr": rate}
    return {name: None if number is None else float(number) for name, number in number_by_name.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def with_numbers(leaf_settings: RuleSettings, numbers: Numbers) -> dict[str, Any]:
    """Return settings completed by the numbers of a step; a group's `lr_scale` multiplies the learning rate."""
    settings = {"lr": None, **numbers, **dict(leaf_settings)}
    scale, rate = settings.pop("lr_scale", None), settings["lr"]
    return settings | {"lr": rate if scale is None or rate is None else rate * scale}


def refuse_uncapturable_rule(rule: str, settings: RuleSettings, rate_is_tensor: bool) -> None:
    """Raise ValueError for a rule that reads a number of the device, or whose first step is of another kind."""
    rule, settings = rule_of(rule, settings)
    settings_by_name = dict(settings)
    if rule == "Adagrad" or (rule == "SGD" and settings_by_name.get("dampening")):
        rule_name = "SGD with dampening" if rule == "SGD" else rule
        raise ValueError(f"graph=True cannot capture {rule_name}, which looks at its step count; take AdamW, say.")
    if not rate_is_tensor or "lr" in settings_by_name:
        return
    is_foreach = settings_by_name.get("foreach") is not False and not settings_by_name.get("differentiable")
    if rule == "Muon" or (rule in _RULES_OF_FOREACH_RATES and not is_foreach):
        rule_name = rule if rule == "Muon" else f"{rule} without foreach"
        raise ValueError(f"graph=True: torch's {rule_name} reads lr on the host; set it by update({rule!r}, lr=..).")


def as_capturable(rule: str, settings: RuleSettings, rate_is_tensor: bool) -> RuleSettings:
    """Return settings under which a torch rule reads no number of the device."""
    if "capturable" not in SETTINGS.get(rule, "").split():
        return settings
    is_foreach = rate_is_tensor and rule in _RULES_OF_FOREACH_RATES and "lr" not in dict(settings)
    return tuple((dict(settings) | {"capturable": True} | ({"foreach": True} if is_foreach else {})).items())


def without_foreach(rule: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a torch rule with foreach=False, unless they set foreach or fused."""
    # By default torch chooses foreach kernels by the devices of the leaves; False makes the choice everywhere the same.
    has_foreach = "foreach" in SETTINGS[rule].split() and not {"foreach", "fused"} & settings.keys()
    return {"foreach": False} | settings if has_foreach else settings


@lru_cache(maxsize=256)
def check_torch_settings(rule: str, settings: RuleSettings) -> None:
    """Raise ValueError for settings that the constructor of a torch optimizer refuses."""
    _make_optimizer(*rule_of(rule, settings), [_probe(2)], 1.0)


# Rules that are given their state at the first step too: the constructor fills it, or it starts with zeros.
_RULES_WITH_INITIAL_STATE = frozenset(("Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta"))
# Rules of torch that count no steps. Here their state has a count, which says whether it has started.
RULES_WITHOUT_STEP = frozenset(("SGD", "Muon"))
# Torch's foreach kernels compute with a rate on the device, where those of single leaves read it.
_RULES_OF_FOREACH_RATES = frozenset(("RMSprop", "Adadelta"))
MATRIX_RULES = frozenset(("Muon",))
_THREAD_LOCAL = threading.local()


def _thread_optimizer(rule: str, settings: tuple[RuleSettings, ...]) -> torch.optim.Optimizer:
    optimizers = _THREAD_LOCAL.__dict__.setdefault("meaning.optimizers", dict[Any, torch.optim.Optimizer]())
    if (rule, settings) not in optimizers:
        optimizer = optimizers[rule, settings] = _make_optimizer(rule, settings[0], [_probe(2)], 0.0)
        silence_capture_warning(optimizer)
        for group_settings in settings[1:]:
            # Without its own defaults a group would take those of the first group.
            group_defaults = _make_optimizer(rule, group_settings, [_probe(2)], 0.0).defaults
            optimizer.add_param_group({"params": [_probe(2)], **group_defaults})
    return optimizers[rule, settings]


def _probe(ndim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros([2] * ndim, dtype=dtype, device="cpu")


def _make_optimizer(rule: str, settings: RuleSettings, params: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return a torch optimizer; raise ValueError if torch has none of that name, or it refuses the settings."""
    cls = class_of(rule)
    if cls is None:
        check_rule(rule)
        raise ValueError(f"this torch has no {rule}: take another rule or torch.")
    try:
        return cls(params, **without_foreach(rule, with_numbers(settings, {"lr": lr})))
    except (ValueError, RuntimeError, TypeError) as error:
        description = ", ".join(f"{name}={value!r}" for name, value in settings)
        raise ValueError(f"torch.optim.{rule} refuses its settings ({description}): {error}") from None


def class_of(rule: str) -> Callable[..., torch.optim.Optimizer] | None:
    """Return the class of torch.optim of that name, or None if this torch has none."""
    return getattr(torch.optim, rule, None) if rule in TORCH_RULES else None


@lru_cache(maxsize=256)
def _state_tensors(
    rule: str, settings: RuleSettings, ndim: int, dtype: torch.dtype
) -> Mapping[str, tuple[bool, torch.dtype]]:
    """Return the tensors in a leaf's state after a first step, by name: whether it has the leaf's shape, and dtype."""
    # Torch does not declare them: step a probe of the leaf's dtype once and look. It is on the CPU, where no kernel is
    # capturable; such a rule has the same state.
    settings = tuple((name, value) for name, value in settings if name != "capturable")
    param = _probe(max(ndim, 1), dtype)
    optimizer = _make_optimizer(rule, settings, [param], 0.0)
    param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"torch.optim.{rule} takes no step with {dict(settings)}: {str(error) or 'a check of its own'}"
        ) from None
    state = {name: leaf for name, leaf in optimizer.state[param].items() if isinstance(leaf, Tensor)}
    tensor_by_name = {name: (leaf.shape == param.shape, leaf.dtype) for name, leaf in state.items()}
    return (
        {STEP: (False, torch.float32)} | tensor_by_name
        if rule in RULES_WITHOUT_STEP and tensor_by_name
        else tensor_by_name
    )
