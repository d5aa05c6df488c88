"""What keeps a module from being a function of what it is handed: random numbers, and weights that it writes."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

DEPEND_ON_MODE = (_DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, _NormBase)


def refuse_impure(path: str, module: nn.Module) -> None:
    """A ValueError for a module that would write its weights."""
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(
            f"module {path!r} ({type(module).__name__}): max_norm rewrites the weight as it runs, which a pure "
            "function cannot; leave it out."
        )


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
