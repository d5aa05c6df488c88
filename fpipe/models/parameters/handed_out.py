"""Notice that a net has other parameters than those that a front door handed out, which an optimizer goes on writing.

params = from_sequential(net, ..)  ;  net[0].weight.data = other        -->        params[0]["0.weight"] trains no net
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import Tensor, nn

from fpipe.torch_internals import held_by


class HandedOut:
    """Where a net has the parameters that were handed out, by the names under which aliases of them were, and where
    these are in memory.

    >>> net = nn.Linear(2, 2)
    >>> found = HandedOut(dict(net.named_parameters()), [net])
    >>> before, net.weight.data = found.moved(), net.weight.data + 1
    >>> [*before], [*found.moved()]
    ([], ['weight'])
    """

    def __init__(self, parameters: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> None:
        held = [held_by(module).parameters for module in modules]
        homes = {id(one): (own, key) for own in held for key, one in own.items()}
        known = {
            name: (homes[id(one)], address)
            for name, one in parameters.items()
            if id(one) in homes and (address := _address(one))
        }
        self.names = [*known]
        self.homes = [home for home, _ in known.values()]
        self.addresses = [address for _, address in known.values()]

    def moved(self) -> dict[str, int]:
        """Those that the net has elsewhere by now, with the address of what was handed out."""
        now = [own.get(key) for own, key in self.homes]
        with suppress(TypeError):  # one may be None by now
            if [*map(Tensor.data_ptr, now)] == self.addresses:  # pyright: ignore[reportArgumentType]
                return {}
        each = zip(self.names, now, self.addresses, strict=True)
        return {name: address for name, one, address in each if one is None or one.data_ptr() != address}

    def __reduce__(self) -> tuple[type[HandedOut], tuple[dict[str, Tensor], tuple[()]]]:
        return HandedOut, ({}, ())  # of a copied net nothing was handed out


def _address(tensor: Tensor) -> int:
    """Where a tensor is in memory; 0 for those that are nowhere, or not in one place."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
