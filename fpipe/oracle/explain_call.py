"""Explain an output of a module that differs from the reference, by a mistake that gives it.

each known mistake --replayed with the reference--> as near as rounding?        -->        "eps is 1e-05, not 1e-06"
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.oracle.differences import describe_difference
from fpipe.oracle.run_report import distance, eps_of
from fpipe.oracle.verdict import is_plain_scale, nearest_plain_scale
from fpipe.verification.report import to_double

_EPS_NAMES = ("eps", "variance_epsilon")
_USUAL_EPS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)

# A mistake has to leave at most this share of the difference.
_LEFT_SHARE = 0.1


Change = Callable[[nn.Module], Any]
"""A context in which a module makes a mistake."""


def find_mistake(module: nn.Module, replay: Callable[[Change], Tensor], actual: Tensor, expected: Tensor) -> str:
    """Return the mistake of a module that explains a tensor of its forward, or "".

    Args:
        module: the reference's module.
        replay: computes the tensor again under a mistake.
        actual, expected: the recorded tensor and the reference's.
    """
    smallest_error, sentence = _LEFT_SHARE * distance(actual, expected), ""
    for mistake, change in _list_changes(module):
        try:
            error = distance(actual, replay(change))
        # Not every module runs in another dtype, or has running statistics to evaluate with.
        except (RuntimeError, ValueError, TypeError):
            continue
        if error <= smallest_error:
            # A later mistake has to be much nearer.
            smallest_error, sentence = error / 2, mistake
    return sentence


def explain_output(module: nn.Module, replay: Callable[[Change], Tensor], actual: Tensor, expected: Tensor) -> str:
    """Return the mistake that explains an output of a module, as `find_mistake` does, or describe the difference."""
    if actual.shape != expected.shape:
        return f"its output has the shape {[*actual.shape]}, and that of the reference {[*expected.shape]}"
    mistake = find_mistake(module, replay, actual, expected) or _explain_bias(module, actual, expected)
    return mistake or f"its output is {explain_gradient(actual, expected)}"


def explain_gradient(actual: Tensor, expected: Tensor) -> str:
    """Describe how a tensor differs from the expected one: by a factor, a rounding, an order, or its distance.

    >>> explain_gradient(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    '2 x that of the reference'
    """
    if actual.shape != expected.shape:
        return f"of shape {[*actual.shape]}, not {[*expected.shape]}"
    scale = scale_between(actual, expected)
    if scale is not None:
        return "0" if scale == 0 else f"{scale:.6g} x that of the reference"
    return describe_difference(actual, expected) if actual.is_floating_point() else "other numbers"


def scale_between(actual: Tensor, expected: Tensor) -> float | None:
    """Return the factor between two tensors, to rounding; None if they differ by more than a factor.

    >>> right = torch.tensor([2.0, 4.0])
    >>> scale_between(right / 2, right), scale_between(torch.ones(2), right)
    (0.5, None)
    """
    wide_actual, wide_expected = to_double(actual).flatten(), to_double(expected).flatten()
    size = float(torch.vdot(wide_expected, wide_expected).real)
    if not size or not wide_actual.isfinite().all():
        return None
    scale = float(torch.vdot(wide_expected, wide_actual).real) / size
    near = nearest_plain_scale(scale)
    scale = near if is_plain_scale(near) and abs(near - scale) <= 1e-3 * abs(scale) + 1e-6 else scale
    # One number is any multiple of another: only a plain factor says something.
    if wide_actual.numel() < 2 and not is_plain_scale(scale):
        return None
    tolerance = max(eps_of(actual, expected), torch.finfo(torch.float32).eps) ** 0.5
    is_near = float((wide_actual - scale * wide_expected).norm()) <= tolerance * float(wide_actual.norm()) + 1e-30
    return scale if is_near else None


def _list_changes(module: nn.Module) -> Iterator[tuple[str, Change]]:
    """Yield mistakes of a module with the context in which it makes them."""
    for name in _EPS_NAMES:
        eps = getattr(module, name, None)
        if isinstance(eps, float):
            for other_eps in _USUAL_EPS:
                if other_eps != eps:
                    yield f"its {name} is {other_eps:g}, not {eps:g}", _attribute(name, other_eps)
    mode, other_mode = ("training", "evaluation") if module.training else ("evaluation", "training")
    if any(isinstance(part, nn.Dropout) or hasattr(part, "running_mean") for part in module.modules()):
        yield f"it runs in {other_mode} mode, not in {mode} mode", _other_mode
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"it computes in {name}", _autocast(dtype)
        # Autocast keeps a softmax in float32.
        yield f"its softmax computes in {name}", partial(_SoftmaxIn, dtype)


def _explain_bias(module: nn.Module, actual: Tensor, expected: Tensor) -> str:
    """Name a bias that is added too often or not at all."""
    for name, param in module.named_parameters():
        if param.ndim != 1 or expected.shape[-1:] != param.shape:
            continue
        difference = to_double(actual) - to_double(expected)
        times = scale_between(difference, to_double(param).expand_as(difference))
        if times is not None and times == round(times) and times:
            return f"its {name} is {'left out' if times == -1 else f'added {times + 1:g} times'}"
    return ""


class _SoftmaxIn(TorchFunctionMode):
    """A context in which every softmax rounds its input and its result to a dtype."""

    def __init__(self, dtype: torch.dtype, module: nn.Module) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax):
            return func(*args, **(kwargs or {}))
        return func(args[0].to(self.dtype), *args[1:], **(kwargs or {})).to(args[0].dtype)


def _attribute(name: str, value: float) -> Change:
    @contextmanager
    def context(module: nn.Module) -> Generator[None]:
        former = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, former)

    return context


def _autocast(dtype: torch.dtype) -> Change:
    return lambda module: torch.autocast("cpu", dtype)


@contextmanager
def _other_mode(module: nn.Module) -> Generator[None]:
    modes = {part: part.training for part in module.modules()}
    module.train(not module.training)
    try:
        yield
    finally:
        for part, is_training in modes.items():
            part.training = is_training
