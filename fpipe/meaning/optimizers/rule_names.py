"""The names and settings of the rules of an UPDATE, from torch.optim or registered.

Here, and not beside the rules, since a program is written without torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

_COMMON_SETTINGS = "lr maximize foreach differentiable"
_ADAM_SETTINGS = f"{_COMMON_SETTINGS} betas eps weight_decay capturable"
SETTINGS = {
    "SGD": f"{_COMMON_SETTINGS} momentum dampening weight_decay nesterov fused",
    "Adam": f"{_ADAM_SETTINGS} amsgrad fused decoupled_weight_decay",
    "AdamW": f"{_ADAM_SETTINGS} amsgrad fused",
    "Adamax": _ADAM_SETTINGS,
    "NAdam": f"{_ADAM_SETTINGS} momentum_decay decoupled_weight_decay",
    "RAdam": f"{_ADAM_SETTINGS} decoupled_weight_decay",
    "Adagrad": f"{_COMMON_SETTINGS} lr_decay weight_decay initial_accumulator_value eps fused",
    "Adadelta": f"{_COMMON_SETTINGS} rho eps weight_decay capturable",
    "RMSprop": f"{_COMMON_SETTINGS} alpha eps weight_decay momentum centered capturable",
    "Rprop": f"{_COMMON_SETTINGS} etas step_sizes capturable",
    "ASGD": f"{_COMMON_SETTINGS} lambd alpha t0 weight_decay capturable",
    "Muon": "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
}
"""The settings that each rule of torch.optim takes."""
TORCH_RULES = tuple(SETTINGS)
RULES: dict[str, Any] = {}
"""The rules added by `register_update`, by name."""


def check_rule(name: str) -> None:
    """Raise ValueError for an unknown rule.

    >>> check_rule("AdamW")
    >>> check_rule("AdamV")
    Traceback (most recent call last):
    ValueError: 'AdamV' is no optimizer rule; did you mean Adam? fpipe.register_update adds one.
    """
    if name not in TORCH_RULES and name not in RULES:
        rules = {rule.lower(): rule for rule in (*TORCH_RULES, *RULES)}
        close = difflib.get_close_matches(name.lower(), rules, n=1)
        hint = f"did you mean {rules[close[0]]}?" if close else f"known: {', '.join(rules.values())}."
        raise ValueError(f"{name!r} is no optimizer rule; {hint} fpipe.register_update adds one.")


def check_settings(name: str, settings: Iterable[str]) -> None:
    """Raise ValueError for a setting that a rule does not take.

    >>> check_settings("SGD", ["momentum", "lr_scale"])
    >>> check_settings("SGD", ["momentun"])
    Traceback (most recent call last):
    ValueError: SGD takes no momentun=; it takes lr, maximize, foreach, differentiable, momentum, dampening, \
weight_decay, nesterov, fused.
    """
    allowed = SETTINGS[name].split() if name in SETTINGS else _settings_of_registered(RULES[name].apply)
    misfit = (
        next((setting for setting in settings if setting not in allowed and setting != "lr_scale"), None)
        if allowed
        else None
    )
    if misfit is not None:
        raise ValueError(f"{name} takes no {misfit}=; it takes {', '.join(allowed)}.")


def _settings_of_registered(apply: Any) -> list[str]:
    """Return the settings that a registered rule takes; [] if it takes any."""
    # Its first three parameters are the leaf, the gradient and the state.
    parameters = inspect.signature(apply).parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [] if open_ended else [parameter.name for parameter in parameters][3:]
