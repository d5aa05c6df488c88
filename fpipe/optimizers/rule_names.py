"""Names of the optimizers' rules that an UPDATE may say: elementwise ones of torch.optim, and those that were added.

Here, and not beside the rules, since a program is written without torch.
"""

from __future__ import annotations

from typing import Any

TORCHS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Muon")
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
