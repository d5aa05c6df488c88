"""What keeps a module from being a function of what it is handed: random numbers, and buffers or weights it writes."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.spectral_norm import SpectralNorm

DEPEND_ON_MODE = (_DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, _NormBase, _SpectralNorm)


def refuse_impure(path: str, module: nn.Module) -> None:
    """A ValueError for a module that would write its weights, or buffers that its output reads."""
    who = f"module {path!r} ({type(module).__name__})"
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{who}: max_norm rewrites the weight as it runs, which a pure function cannot; leave it out.")
    if _writes(module):
        raise ValueError(f"{who}: buffers written in training that the output reads are not supported; call .eval().")


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers now; they follow from the step's key."""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return getattr(module, "_random_samples", None) is None
    if isinstance(module, nn.RReLU):
        return module.training and module.lower != module.upper
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    return module.training and (
        (isinstance(module, _DropoutNd) and module.p > 0)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
    )


def _writes(module: nn.Module) -> bool:
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    spectral = (isinstance(module, _SpectralNorm) and hasattr(module, "_u")) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )
    return module.training and spectral
