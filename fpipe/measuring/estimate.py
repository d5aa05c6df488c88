"""Count what a program's ops cost by their shapes, where nothing can run: a model on meta, or for another machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fpipe.graphs.language.flops import flops_of
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.measuring.sizes import sizes
from fpipe.measuring.timeline_costs import Runs, note, seconds_of, variants_of, with_halves
from fpipe.model import Model
from fpipe.program import Program, the_program
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import Untraced
from fpipe.timing.costs import Costs


def estimate(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    flops: float,
    state: Sequence[Any] | None = None,
) -> Costs:
    """Seconds of a program's ops by their floating-point operations, and bytes of its values. Nothing is computed.

    The operations are those of products, convolutions and attention, as torch's `FlopCounterMode` counts them, in the
    graphs that a step would run. What only reads and writes memory, such as a norm or an embedding, takes no time here:
    so `flops` is best what whole models reach on a device, not what it could.

    Args:
        program, model, params, batch, state: as for `fpipe.profile`; tensors may be on the meta device.
        flops: operations a second of a rank, such as 400e12. With 1 the costs are operations.

    Returns:
        Costs in seconds per stage, of the kinds that `fpipe.profile` measures; transfers are free.

    Raises:
        ValueError: a rate that is no number above 0; what `sizes` refuses.

    >>> import fpipe, torch
    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    ...     batch = torch.empty(64, 512), torch.empty(64, 256)
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> costs = fpipe.estimate(program, model, params, batch, flops=1e12)
    >>> costs.forward[0] == 2 * 16 * 512 * 256 / 1e12, costs.backward_input[0]  # 16 rows; no input gradient is wanted
    (True, 0.0)
    """
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"flops is how many operations a rank does a second, such as 400e12; found {flops!r}.")
    halves = with_halves(the_program(program))
    check_match(halves, model)
    counted: dict[Any, int] = {}
    runs: Runs = {}
    for variant in variants_of(halves):
        try:
            inputs = StepInputs(params, batch, state, example_optim(variant, params))
            options = StepOptions(runs=False)
            parts = Prepared(variant, model, inputs, Untraced(), options, ProcessContext()).lowered.parts
        except Untraceable as error:
            raise ValueError(f"the operations of this program are not known before it runs: {error}") from error
        found: Runs = {}
        for op, graph in parts.items():
            note(found, op, flops_of(graph, counted) / flops)
        runs = {**found, **runs}
    return Costs(**seconds_of(program, runs, alone=True), bytes=sizes(halves, model, params, batch, state=state))
