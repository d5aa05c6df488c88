"""Make random numbers a function of a key, the stage and the microbatch alone.

    key  --> fold_in(key, stage, microbatch) -->  the seed of that stage's forward

So every schedule draws the same numbers on every rank, and a recomputed forward draws those of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from fpipe.meaning.purity.ambient import in_fake_mode
from fpipe.torch_internals import warn

TORCH_CPU_GENERATOR: torch.Generator = torch.default_generator
"""Torch's default generator on the CPU; while a stage is traced, `torch.default_generator` may be another one."""

_MASK_64 = (1 << 64) - 1
# SplitMix64's increment: 2**64 divided by the golden ratio, made odd.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_LOCK = threading.RLock()
_THREAD_LOCAL = threading.local()


def fold_in(key: int, *ints: int) -> int:
    """Return a new key from a key and numbers, such as step, stage and microbatch, as if drawn at random.

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
        key = _mix(key, number)
    return key


def _mix(key: int, number: int) -> int:
    return _scramble(key + _GOLDEN_GAMMA * (number + 1))


def _scramble(z: int) -> int:
    z &= _MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    # 63 bits, because manual_seed takes a signed number.
    return (z ^ (z >> 31)) >> 1


# All microbatches of a step share the part of the key that is folded with the stage.
_mix_stage = lru_cache(maxsize=1024)(_mix)


def make_seeder(stage: int, microbatch: int, slice_index: int | None = None) -> Callable[[int], int]:
    """Return the function that folds a stage and a microbatch (and slice) into a key.

    >>> make_seeder(1, 2)(7) == fold_in(7, 1, 2), make_seeder(1, 2, 3)(7) == fold_in(7, 1, 2, 3)
    (True, True)
    """
    step = _GOLDEN_GAMMA * (microbatch + 1)

    def seed(key: int) -> int:
        # fold_in raises the TypeError for a key that is no int.
        seed_of_microbatch = _scramble(_mix_stage(key, stage) + step) if type(key) is int else fold_in(key)
        return seed_of_microbatch if slice_index is None else _mix(seed_of_microbatch, slice_index)

    return seed


@contextmanager
def lock_torch_generators() -> Generator[None]:
    """Keep the stages of other threads from drawing from torch's generators, or seeding them, in this context."""
    with _LOCK:
        yield


@contextmanager
def collect_drawing() -> Generator[list[str]]:
    """Collect the labels of the stages that draw random numbers in this thread, in this context."""
    labels = _THREAD_LOCAL.drawing = list[str]()
    try:
        yield labels
    finally:
        _THREAD_LOCAL.drawing = None


@contextmanager
def with_seed(seed: int | None, label: str) -> Generator[None]:
    """Seed torch's generators in this context and restore them after it; without a seed nothing may be drawn.

    Raises:
        ValueError: there is no seed, and something was drawn.
    """
    if in_fake_mode():  # fake tensors draw nothing
        yield
        return
    with _restore_generators() as (generators, states_before):
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        drawing: list[str] | None = getattr(_THREAD_LOCAL, "drawing", None)
        states_seeded = states_before if seed is None or drawing is None else random_states()
        yield
        states_after = random_states()
        if seed is not None and drawing is not None and not all(map(torch.equal, states_seeded, states_after)):
            drawing.append(label)
    if seed is None and not all(map(torch.equal, states_before, states_after)):
        hint = " Or another thread drew meanwhile: torch's own generator is one for all threads."
        # Daemon threads watch, as a progress bar's does, and the idle threads of an earlier step wait: neither draws.
        may_draw = [
            thread
            for thread in threading.enumerate()
            if thread is not threading.current_thread() and not thread.daemon and not thread.name.startswith("fpipe")
        ]
        raise ValueError(missing_key_message(label) + hint * bool(may_draw))


@contextmanager
def _restore_generators() -> Generator[tuple[list[torch.Generator], list[torch.Tensor]]]:
    """Yield torch's generators and their states, and restore the states after the context."""
    # All threads share these generators: under the lock only one stage at a time uses them.
    with _LOCK:
        generators, states_before = torch_generators(), random_states()
        try:
            yield generators, states_before
        finally:
            for generator, state in zip(generators, states_before, strict=True):
                generator.set_state(state)


def torch_generators() -> list[torch.Generator]:
    """Return torch's default generators: the CPU's, and the accelerator's once it is initialised."""
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    # MPS has no such list.
    if module is None or not hasattr(module, "default_generators") or not module.is_initialized():
        return [TORCH_CPU_GENERATOR]
    return [TORCH_CPU_GENERATOR, *module.default_generators]


def random_states() -> list[torch.Tensor]:
    """Return the current states of torch's default generators."""
    return [generator.get_state() for generator in torch_generators()]


@contextmanager
def replay_from(states: list[torch.Tensor]) -> Generator[None]:
    """Set torch's generators to these states in this context, and restore them after it."""
    with _restore_generators() as (generators, _):
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        yield


class KeyWatch:
    """Warns if two steps of a training draw the same random numbers: the key is the same, the parameters changed."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, list[tuple[int, int]]]] = []

    @property
    def is_complete(self) -> bool:
        """Whether two steps were noted: further ones are not compared."""
        return len(self._steps) == 2

    def note(self, key: Any, params: Sequence[Any]) -> None:
        """Note the key and the parameters of a step that draws."""
        if self.is_complete:
            return
        # Parameters have changed if they are other tensors, or were written in place. One key for the same parameters
        # is a call that is made again, and no second step of a training.
        versions = [(leaf.data_ptr(), leaf._version) for leaf in params if isinstance(leaf, torch.Tensor)]
        self._steps.append((key, versions))
        (first_key, first_versions), (last_key, last_versions) = self._steps[0], self._steps[-1]
        if first_versions != last_versions and first_key == last_key:
            warn(
                f"two steps of a training were handed key={key!r}, so that they dropped the same units. Hand in a new "
                "one each step, such as fpipe.fold_in(key, step).",
                stacklevel=5,
            )


def missing_key_message(label: str) -> str:
    """Return the error message for a step without a key."""
    return f"{label} draws random numbers: hand in key=, an int that they follow from."


def thread_generator(device: str) -> torch.Generator:
    """Return this thread's generator for a device; the caller seeds it before use."""
    try:
        return _THREAD_LOCAL.generators[device]
    except (AttributeError, KeyError):
        generators: dict[str, torch.Generator] = _THREAD_LOCAL.__dict__.setdefault("generators", {})
        return generators.setdefault(device, torch.Generator(device))
