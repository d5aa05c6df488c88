"""Tell by the class of a module whether it draws random numbers, depends on its mode, or cannot be pure."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parameter import is_lazy

from fpipe.torch_internals import has_gradient_hooks, has_own_samples, is_dropout, is_norm


def may_depend_on_mode(module: nn.Module) -> bool:
    """Whether a module may do something else in training than in eval: one of those, or not one of torch's own."""
    known = isinstance(module, nn.RReLU | nn.MultiheadAttention | nn.RNNBase) or is_dropout(module) or is_norm(module)
    return known or not type(module).__module__.startswith("torch.")


def refuse_net(net: nn.Module) -> None:
    """A ValueError for a net with a module that cannot be part of a pure stage, or a tensor that is not there yet."""
    for path, module in net.named_modules():
        refuse_wrapped(path, module)
        refuse_impure(path, module)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is not initialised yet (a lazy module); run the net once on an example.")
    for name, tensor in net.named_parameters():
        if tensor.requires_grad and has_gradient_hooks(tensor):
            raise ValueError(
                f"parameter {name!r} has a gradient hook; stages differentiate detached aliases of parameters, which "
                "no hook sees. Remove it, and change the gradients that a step returns."
            )


def refuse_wrapped(path: str, module: nn.Module) -> None:
    """A ValueError for a module that runs with no parameters but its own."""
    refuse_hooked(path, module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"module {path!r} ({type(module).__name__}) is compiled by torch.jit: no trace sees into it, and it runs "
            "with no parameters but its own. Take the module that it was made from."
        )


def refuse_hooked(path: str, module: nn.Module) -> None:
    """A ValueError for a module whose hooks gather its parameters and reduce their gradients, or that copies itself."""
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    by_hooks = {"DistributedDataParallel": nn.parallel.DistributedDataParallel}
    if sharded is not None:
        by_hooks |= {"fully_shard": sharded.FSDPModule, "FullyShardedDataParallel": sharded.FullyShardedDataParallel}
    for name, kind in by_hooks.items():
        if isinstance(module, kind):
            raise ValueError(
                f"module {path!r} ({type(module).__name__}) is wrapped by {name}, whose hooks gather the module's own "
                "parameters and reduce their gradients; a stage computes with those that it is handed, and no hook "
                "would run. Take the module without it: fpipe.data_parallel adds gradients up over replicas, and "
                "inside a stage parameters are sharded by parallelize_module, or by a parametrization that gathers "
                "them (docs/running.md)."
            )
    if isinstance(module, nn.DataParallel):
        raise ValueError(
            f"module {path!r} (DataParallel) makes copies of its module as it runs; a stage computes with parameters "
            "that it is handed. Take its .module: fpipe.data_parallel makes replicas of a program."
        )


def refuse_impure(path: str, module: nn.Module) -> None:
    """A ValueError for a module that would mutate its weights, or wait for other processes."""
    who = f"module {path!r} ({type(module).__name__})"
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{who}: max_norm rewrites the weight as it runs, which a pure function cannot; leave it out.")
    several = distributed.is_available() and distributed.is_initialized()
    if isinstance(module, nn.SyncBatchNorm) and module.training and several:
        many = distributed.get_world_size(module.process_group)
        if many == 1:
            return
        raise ValueError(
            f"{who} averages over {many} processes in the middle of a forward, which a pure function cannot. Put a "
            "BatchNorm in its place; fpipe.deferred_batch_norm gives it the statistics of the whole batch."
        )


def draws_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in the mode that it is in; they follow from the step's key."""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return not has_own_samples(module)
    if isinstance(module, nn.RReLU):
        return module.training and module.lower != module.upper
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    drops = module.dropout if isinstance(module, nn.MultiheadAttention) else module.p if is_dropout(module) else 0
    return module.training and drops > 0
