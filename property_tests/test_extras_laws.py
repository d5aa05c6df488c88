"""What real models add leaves the promise as it is: skips, ties, middle losses, frozen leaves, ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from fpipe.program import Program
from fpipe.tree import leaves

WIDTH = 3
POLICIES: dict[str, Callable[[], Callable[[Program], Program]]] = {
    "kept": fpipe.identity,
    "always": lambda: fpipe.checkpoint("always"),
    "except_last": lambda: fpipe.checkpoint("except_last"),
    "cut": fpipe.split_backward,
}
SCHEDULES = ("gpipe", "one_f_one_b", "zb_h1")


def mean(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": mean,
    "sum": lambda y, t: (y - t).square().sum(),
    "count": lambda y, t: ((y - t).square().sum(), y.shape[0]),
}


@dataclass(frozen=True)
class Case:
    """A model: for each stage an earlier one whose second output it takes (or none), and whether it gives a loss; tied
    and frozen stages; microbatches by their rows, cut by us or already; and the chain of transforms."""

    skips: tuple[int | None, ...]
    gives_loss: tuple[bool, ...]
    tied: tuple[int, ...]
    frozen: tuple[int, ...]
    reduction: str
    rows: tuple[int, ...]
    presplit: bool
    input_grads: bool
    policy: str
    schedule: str
    ranks: int

    @property
    def stages(self) -> int:
        return len(self.skips)

    def forked(self, stage: int) -> bool:
        return stage in self.skips

    def function(self, stage: int) -> Callable[..., Any]:
        def run(p: dict[str, Tensor], x: Any) -> Any:
            if self.skips[stage] is not None:
                x, extra = x
                x = torch.where(extra["mask"], x, x + extra["early"])
            early = x @ p["w"]
            y = torch.tanh(early)
            made: Any = (y, {"early": early, "mask": y > 0, "none": None}) if self.forked(stage) else y
            return (made, y.square().mean()) if self.gives_loss[stage] else made

        return run

    @property
    def model(self) -> fpipe.Model:
        before: list[Any] = ["batch", *range(self.stages - 1)]
        inputs = [one if skip is None else (one, (skip, 1)) for one, skip in zip(before, self.skips, strict=True)]
        ties = [tuple((stage, "w") for stage in self.tied)] if len(self.tied) > 1 else []
        loss = LOSSES[self.reduction]
        model = fpipe.from_functions(
            [self.function(stage) for stage in range(self.stages)],
            lambda y, t: (loss(y, t), {"rows": y.shape[0], "size": y.abs().mean()}),
            inputs=inputs,
            ties=ties,
            reduction=self.reduction,  # type: ignore[arg-type]
            aux=True,
            aux_losses=[stage for stage in range(self.stages) if self.gives_loss[stage]],
        )
        return fpipe.freeze(model, *self.frozen)

    @property
    def params(self) -> tuple[dict[str, Tensor], ...]:
        make = torch.Generator().manual_seed(len(self.rows))
        away = self.tied[1:] if len(self.tied) > 1 else ()
        drawn = [{"w": torch.randn(WIDTH, WIDTH, generator=make)} for _ in range(self.stages)]
        return tuple({} if stage in away else own for stage, own in enumerate(drawn))

    @property
    def batch(self) -> Any:
        make = torch.Generator().manual_seed(sum(self.rows))
        if not self.presplit:
            n = sum(self.rows)
            return torch.randn(n, WIDTH, generator=make), torch.randn(n, WIDTH, generator=make)
        shapes = [(n, 1 + at % 3, WIDTH) for at, n in enumerate(self.rows)]
        return [(torch.randn(shape, generator=make), torch.randn(shape, generator=make)) for shape in shapes]

    @property
    def program(self) -> Program:
        how = {"rows": fpipe.Sum(), "size": None}
        return fpipe.chain(
            fpipe.split(len(self.rows), presplit=self.presplit),
            POLICIES[self.policy](),
            fpipe.schedules.get(self.schedule)(self.ranks),
            fpipe.merge(outputs="stream", aux=how),
            fpipe.communicate(),
            fpipe.free(),
        )(fpipe.program(self.model, input_grads=self.input_grads))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(2, 4))
    skips = tuple(draw(st.sampled_from([None, *range(stage)])) for stage in range(n))
    chosen = st.lists(st.integers(0, n - 1), max_size=n, unique=True).map(lambda found: tuple(sorted(found)))
    return Case(
        skips=skips,
        gives_loss=(*(draw(st.booleans()) for _ in range(n - 1)), False),
        tied=draw(chosen),
        frozen=draw(chosen),
        reduction=draw(st.sampled_from(sorted(LOSSES))),
        rows=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))),
        presplit=draw(st.booleans()),
        input_grads=draw(st.booleans()),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        schedule=draw(st.sampled_from(SCHEDULES)),
        ranks=draw(st.integers(1, n)),
    )


@settings(max_examples=8)
@given(cases())
def test_every_program_is_plain_autograd(case: Case):
    program, model = case.program, case.model
    assert Program.parse(str(program)) == program
    assert fpipe.verify(program, model, case.params, case.batch).bitwise
    traced, walked = (fpipe.build(program, model, trace=trace)(case.params, case.batch) for trace in (True, False))
    for name in ("loss", "grads", "outputs", "aux", "input_grads"):
        for one, other in zip(leaves(getattr(traced, name)), leaves(getattr(walked, name)), strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    frozen = {stage for stage in case.frozen if case.params[stage]}
    assert {stage for stage, grads in enumerate(traced.grads) if grads.get("w", 0) is None} == frozen
