"""Make a net whose parameters are on meta and have no data, while the buffers that its constructors fill have theirs.

lambda: GPT(config)        -->        wte.weight on meta, h.0.attn.bias = tril(ones(n, n)) on torch's default device
"""

from __future__ import annotations

import inspect
import threading
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fpipe.graphs.tracing.keys import fold_in, seeded


def made_on_meta(net: Any) -> Any:
    """Call a function without arguments that makes a net, and move each parameter to meta as soon as a module has it,
    so that there is never more than one in memory. Buffers are the same on every rank, random ones too. What is no
    such function is handed back."""
    if not isinstance(net, FunctionType | MethodType | partial) or not _takes_nothing(net):
        return net
    make: Any = net
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, own: nn.Parameter) -> None:
        if threading.get_ident() == thread and not own.is_meta:
            moved = nn.Parameter(own.detach().to("meta"), own.requires_grad)
            vars(moved).update(vars(own))
            torch.utils.swap_tensors(own, moved)  # whoever else has it, as a tie does, has it on meta too

    hook = register_module_parameter_registration_hook(move)
    try:
        with seeded(fold_in(0), "the net"):
            return make()
    finally:
        hook.remove()


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
