"""Make a net whose parameters are on meta and have no data, while the buffers that its constructors fill have theirs.

lambda: GPT(config)        -->        wte.weight on meta, h.0.attn.bias = tril(ones(n, n)) on torch's default device
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from fpipe.meaning.stages.keys import fold_in, seeded
from fpipe.models.parameters.first_values import LOST
from fpipe.torch_private.modules import parameters_made


def made_on_meta(net: Any) -> Any:
    """Call a function without arguments that makes a net, and move each parameter that it makes to meta as soon as a
    module has it, so that there is never more than one in memory. Parameters that were there before stay as they are.
    Buffers are the same on every rank, random ones too. What is no function is handed back.

    Raises:
        TypeError: the function takes arguments.
        ValueError: it reads numbers of a parameter, or refers to one otherwise before a module has it.
    """
    if not isinstance(net, FunctionType | MethodType | partial):
        return net
    make: Any = net
    _refuse_arguments(make)

    def move(module: nn.Module, name: str, own: nn.Parameter) -> None:
        if id(own) in made and not own.is_meta:
            moved = nn.Parameter(own.detach().to("meta"), own.requires_grad)
            vars(moved).update({**vars(own), LOST: True})
            try:
                torch.utils.swap_tensors(own, moved)  # whoever else has it, as a tie does, has it on meta too
            except RuntimeError as error:
                raise ValueError(
                    f"the function that makes the net gives {name!r} to a {type(module).__name__} when there is "
                    "already a weak reference to the parameter, or a view of it, so that it cannot be moved to meta: "
                    f"{str(error).splitlines()[0].rstrip('.')}. Make those after the module has it, or hand in the net "
                    "itself, as in from_module(Net(config), ..)."
                ) from error

    def mark(module: nn.Module, name: str, own: Tensor | None) -> None:
        if own is not None and own.is_meta:
            vars(own)[LOST] = True

    hooks = register_module_parameter_registration_hook(move), register_module_buffer_registration_hook(mark)
    try:
        with seeded(fold_in(0), "the net"), parameters_made() as made:  # one thread at a time
            return make()
    except (NotImplementedError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise
        raise ValueError(
            "the function that makes the net reads numbers of a parameter, and those are on meta while it runs: "
            f"{str(error).splitlines()[0].rstrip('.')}. Hand in the net itself, as in from_module(Net(config), ..), or "
            "take those numbers from the config."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_arguments(make: Any) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin that does not say
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(
            f"a function that makes the net is called without arguments, and this one takes {signature}: bind them, as "
            "in from_module(lambda: Net(config), ..). A function of parameters is for from_functions, and one that "
            "computes a loss for from_loss."
        ) from error
