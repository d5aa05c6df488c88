"""Make random numbers a function of a key: what a stage draws for a microbatch depends on nothing else.

    key  --> fold_in(key, stage, microbatch) -->  the seed of that stage's forward

So the same numbers are drawn under every schedule, on every rank, and once more where a forward is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache

import torch

from fpipe.meaning.purity.ambient import in_fake_mode

TORCHS_GENERATOR: torch.Generator = torch.default_generator
"""Torch's own random numbers on the CPU, whatever stands under their name while a stage is traced."""

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_LOCK = threading.RLock()
_OWN = threading.local()


def fold_in(key: int, *ints: int) -> int:
    """A new key from a key and numbers, such as a step, a stage, a microbatch: as different as if drawn by chance.

    Args:
        key: a whole number.
        ints: whole numbers; their order matters.

    Returns:
        A whole number from 0 to 2**63 - 1, which `torch.manual_seed` takes.

    Source: the mixing function of SplitMix64 (Steele, Lea and Flood 2014, figure 17).

    >>> fold_in(0, 3, 5) == fold_in(fold_in(0, 3), 5)
    True
    >>> len({fold_in(0, stage, index) for stage in range(100) for index in range(100)})
    10000
    """
    for number in (key, *ints):
        if type(number) is not int:
            raise TypeError(f"a key is a whole number, and so is what is folded into it; found {number!r}.")
    for number in ints:
        key = _mixed(key, number)
    return key


def _mixed(key: int, number: int) -> int:
    return _scrambled(key + _STEP * (number + 1))


def _scrambled(z: int) -> int:
    z &= _ALL
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _ALL
    return (z ^ (z >> 31)) >> 1


_of_stage = lru_cache(maxsize=1024)(_mixed)  # one for all microbatches of a step


def seeder(stage: int, microbatch: int, piece: int | None = None) -> Callable[[int], int]:
    """`fold_in` of a stage and a microbatch (and slice of its sequences), as often as a step has keys.

    >>> seeder(1, 2)(7) == fold_in(7, 1, 2), seeder(1, 2, 3)(7) == fold_in(7, 1, 2, 3)
    (True, True)
    """
    step = _STEP * (microbatch + 1)

    def seed(key: int) -> int:
        # What is no int fold_in refuses in words.
        found = _scrambled(_of_stage(key, stage) + step) if type(key) is int else fold_in(key)
        return found if piece is None else _mixed(found, piece)

    return seed


@contextmanager
def exclusive_generator() -> Generator[None]:
    """While it lasts no other thread's stage draws from torch's own random numbers, nor seeds them."""
    with _LOCK:
        yield


@contextmanager
def seeded(seed: int | None, who: str) -> Generator[None]:
    """While it lasts torch's own random numbers start from a seed, without which none may be drawn; afterwards they are
    as they were found."""
    if in_fake_mode():  # such tensors draw nothing
        yield
        return
    with _restored() as (generators, before):
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
        now = random_states()
    if seed is None and not all(map(torch.equal, before, now)):
        other = " Or another thread drew meanwhile: torch's own generator is one for all threads."
        # Threads that only watch, as that of a progress bar, are daemons.
        raise ValueError(needs_key(who) + other * (sum(not one.daemon for one in threading.enumerate()) > 1))


@contextmanager
def _restored() -> Generator[tuple[list[torch.Generator], list[torch.Tensor]]]:
    """Torch's own generators, and where they are; afterwards they are there again. There is one for all threads."""
    with _LOCK:
        generators, before = torchs_generators(), random_states()
        try:
            yield generators, before
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def torchs_generators() -> list[torch.Generator]:
    """Torch's own generators: that of the CPU, and those of the GPUs once one is used."""
    return [TORCHS_GENERATOR, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def random_states() -> list[torch.Tensor]:
    """Where torch's own random numbers are now."""
    return [generator.get_state() for generator in torchs_generators()]


@contextmanager
def replaying(states: list[torch.Tensor]) -> Generator[None]:
    """While it lasts torch's own random numbers go on from there; afterwards they are as they were found."""
    with _restored() as (generators, _):
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        yield


def needs_key(who: str) -> str:
    """The message to those who hand in no key."""
    return f"{who} draws random numbers: hand in key=, an int that they follow from."


def generator_on(device: str) -> torch.Generator:
    """This thread's generator for a device, to be seeded before it is used."""
    try:
        return _OWN.generators[device]
    except (AttributeError, KeyError):
        found: dict[str, torch.Generator] = _OWN.__dict__.setdefault("generators", {})
        return found.setdefault(device, torch.Generator(device))
