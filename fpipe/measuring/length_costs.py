"""Fit how long ops take as a function of the length of a microbatch, from profiles at a few lengths.

costs at 256, 512 and 1024 tokens    --> fit_lengths -->    a + b n + c n^2    --> at([300, 900]) -->    Costs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe.limits import checked_init
from fpipe.timing.costs import Costs

_FITTED_FIELDS = ("forward", "backward_input", "backward_weight", "recompute", "backward")


@checked_init
@dataclass(frozen=True)
class LengthCosts:
    """Costs as a function of the lengths of microbatches.

    Attributes:
        costs: of the longest microbatch that was measured; what depends on no length is taken from it.
        coefficients: for each field a tensor `[stages, 3]`: the constant, linear and quadratic part, in seconds.

    >>> fitted = fit_lengths({2: Costs(forward=[4.0]), 4: Costs(forward=[16.0])})
    >>> [abs(round(number, 9)) for number in fitted.coefficients["forward"][0].tolist()]
    [0.0, 0.0, 1.0]
    """

    costs: Costs
    coefficients: Mapping[str, Tensor]

    def at(self, lengths: Sequence[float]) -> Costs:
        """Return the costs of microbatches of these lengths, for a program of as many.

        Raises:
            ValueError: no lengths, or one that is no positive number.

        >>> costs = fit_lengths({2: Costs(forward=[4.0]), 4: Costs(forward=[16.0])})
        >>> [round(seconds) for seconds in costs.at([1, 3]).forward[0]]
        [1, 9]
        """
        if not lengths or not all(isinstance(length, int | float) and length > 0 for length in lengths):
            raise ValueError(f"lengths are positive numbers, one for each microbatch; found {lengths!r}.")
        powers = _powers(lengths)
        # Where the fit goes below zero, between measured lengths that hardly differ, an op takes no time.
        tables = {name: (fit @ powers.T).clamp(min=0).tolist() for name, fit in self.coefficients.items()}
        # One number for all stages stays one for all, whose number the program knows.
        by_microbatch = {
            name: table if isinstance(getattr(self.costs, name), Sequence) else _of_any_stage(table[0])
            for name, table in tables.items()
        }
        return replace(self.costs, **by_microbatch)


def fit_lengths(costs_by_length: Mapping[float, Costs]) -> LengthCosts:
    """Fit the seconds of F, B, I, W and R by a line and a parabola in the length of a microbatch, by least squares.

    Attention grows with the square of the length, the rest in proportion to it. With three lengths or more there is a
    constant too, for what each op costs in any case; with one length seconds are proportional to it.

    Args:
        costs_by_length: what `fpipe.profile` measured with microbatches of these lengths, of the same stages.

    Returns:
        Costs of any lengths: `fpipe.simulate(program, fitted, lengths=[..])`, or `fitted.at([..])` for what else takes
        costs: which packing of documents is faster, and in which order.

    Raises:
        ValueError: no costs, a length that is no positive number, or costs of different numbers of stages.

    >>> import fpipe
    >>> fitted = fpipe.fit_lengths({2: fpipe.Costs(4, 4, 4), 4: fpipe.Costs(16, 16, 16)})
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1))(fpipe.program(1))
    >>> [round(fpipe.simulate(program, fitted, lengths=lengths).makespan) for lengths in ([2, 2], [1, 3])]
    [24, 30]
    """
    if not costs_by_length or not all(isinstance(length, int | float) and length > 0 for length in costs_by_length):
        raise ValueError(f"costs are by length, a positive number; found {[*costs_by_length]}.")
    lengths = sorted(costs_by_length)
    powers = _powers(lengths)
    # Of few lengths the linear part comes first, then the quadratic one, then the constant.
    columns = [[1], [1, 2]][len(lengths) - 1] if len(lengths) < 3 else [0, 1, 2]
    coefficients: dict[str, Tensor] = {}
    for field_name in _FITTED_FIELDS:
        rows = [getattr(costs_by_length[length], field_name) for length in lengths]
        if any(row is None for row in rows):
            continue
        per_stage = [row if isinstance(row, Sequence) else [row] for row in rows]
        if len({len(row) for row in per_stage}) > 1:
            raise ValueError(f"{field_name} is of different numbers of stages; profile the same stages at all lengths.")
        seconds = torch.tensor(per_stage, dtype=torch.float64)
        fit = torch.zeros(seconds.shape[1], 3, dtype=torch.float64)
        fit[:, columns] = torch.linalg.lstsq(powers[:, columns], seconds).solution.T
        coefficients[field_name] = fit
    return LengthCosts(costs_by_length[lengths[-1]], coefficients)


def _of_any_stage(seconds: Sequence[float]) -> Callable[[int, int], float]:
    return lambda stage, microbatch: seconds[microbatch]


def _powers(lengths: Sequence[Any]) -> Tensor:
    """Return a row of 1, n and n^2 for each length n."""
    column = torch.tensor(lengths, dtype=torch.float64)
    return torch.stack([torch.ones_like(column), column, column**2], 1)
