"""Names of the optimizers' rules that an UPDATE may say: elementwise ones of torch.optim, and those that were added.

Here, and not beside the rules, since a program is written without torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

_EACH = "lr maximize foreach differentiable"
_ADAMS = f"{_EACH} betas eps weight_decay capturable"
SETTINGS = {
    "SGD": f"{_EACH} momentum dampening weight_decay nesterov fused",
    "Adam": f"{_ADAMS} amsgrad fused decoupled_weight_decay",
    "AdamW": f"{_ADAMS} amsgrad fused",
    "Adamax": _ADAMS,
    "NAdam": f"{_ADAMS} momentum_decay decoupled_weight_decay",
    "RAdam": f"{_ADAMS} decoupled_weight_decay",
    "Adagrad": f"{_EACH} lr_decay weight_decay initial_accumulator_value eps fused",
    "Adadelta": f"{_EACH} rho eps weight_decay capturable",
    "RMSprop": f"{_EACH} alpha eps weight_decay momentum centered capturable",
    "Rprop": f"{_EACH} etas step_sizes capturable",
    "ASGD": f"{_EACH} lambd alpha t0 weight_decay capturable",
    "Muon": "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
}
"""The settings that each rule of torch.optim takes."""
TORCHS = tuple(SETTINGS)
RULES: dict[str, Any] = {}
"""Rules that `register_update` has added, by name."""


def check_rule(name: str) -> None:
    """A ValueError for a rule that there is not.

    >>> check_rule("AdamW")
    >>> check_rule("AdamV")
    Traceback (most recent call last):
    ValueError: 'AdamV' is no rule of an optimizer; known: SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, \
RMSprop, Rprop, ASGD, Muon. fpipe.register_update adds one.
    """
    if name not in TORCHS and name not in RULES:
        known = ", ".join([*TORCHS, *RULES])
        raise ValueError(f"{name!r} is no rule of an optimizer; known: {known}. fpipe.register_update adds one.")


def check_settings(name: str, words: Iterable[str]) -> None:
    """A ValueError for a setting that a rule does not take.

    >>> check_settings("SGD", ["momentum", "lr_scale"])
    >>> check_settings("SGD", ["momentun"])
    Traceback (most recent call last):
    ValueError: SGD takes no momentun=; it takes lr, maximize, foreach, differentiable, momentum, dampening, \
weight_decay, nesterov, fused.
    """
    takes = SETTINGS[name].split() if name in SETTINGS else _named(RULES[name].apply)
    odd = next((word for word in words if word not in takes and word != "lr_scale"), None) if takes else None
    if odd is not None:
        raise ValueError(f"{name} takes no {odd}=; it takes {', '.join(takes)}.")


def _named(apply: Any) -> list[str]:
    """The settings that a rule of a user's own takes; none where it takes any."""
    found = inspect.signature(apply).parameters.values()
    open_ended = any(one.kind is one.VAR_KEYWORD for one in found)
    return [] if open_ended else [one.name for one in found][3:]
