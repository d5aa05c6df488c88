"""Nets of modules that remember and draw are their unsplit selves, whether or not a forward reads what it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fpipe
from fpipe.transforms._rewrite import Transform
from property_tests.strategies import few

WIDTH = 4


class Moving(nn.Module):
    """A moving average, updated in one of three ways, in training or always, and subtracted before or after."""

    mean: Tensor

    def __init__(self, how: int, always: bool, first: bool) -> None:
        super().__init__()
        self.how, self.always, self.first = how, always, first
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean if self.first else x
        now = x.detach().mean(0)
        if self.training or self.always:
            if self.how == 0:
                self.mean = 0.5 * self.mean + 0.5 * now
            elif self.how == 1:
                self.mean.mul_(0.5).add_(now)
            else:
                torch.lerp(self.mean, now, 0.5, out=self.mean)
        return y if self.first else x - self.mean


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / self.count


class Watching(nn.Module):
    """Remembers what passes, and reads it only to do so."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 1 / self.count)
        return x.sin()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "tanh": nn.Tanh,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "norm, no statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "dropout": lambda: nn.Dropout(0.4),
    "counter": Counter,
    "watching": Watching,
    **{
        f"moving {how} {always} {first}": lambda how=how, always=always, first=first: Moving(how, always, first)
        for how in range(3)
        for always in (False, True)
        for first in (False, True)
    },
}
PLANS: dict[str, Callable[[int], tuple[Transform, ...]]] = {
    "gpipe": lambda n: (fpipe.schedules.gpipe(n),),
    "recomputed": lambda n: (fpipe.checkpoint("always"), fpipe.schedules.one_f_one_b(n)),
    "some recomputed": lambda n: (fpipe.checkpoint("except_last"), fpipe.schedules.eager_1f1b(n)),
    "split": lambda n: (fpipe.split_backward(), fpipe.schedules.zb_h1(n)),
    "layer by layer": lambda n: (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.gpipe(1)),
    "on one rank": lambda n: (),
}


@dataclass(frozen=True)
class Case:
    """The layers of each stage, those in eval (by their place), microbatches, rows, and the plan."""

    stages: tuple[tuple[str, ...], ...]
    still: tuple[int, ...]
    microbatches: int
    rows: int
    plan: str
    trace: bool

    def net(self) -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(*(LAYERS[name]() for stage in self.stages for name in ("linear", *stage)))
        for place in self.still:
            net[place % len(net)].eval()
        return net


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stage = st.lists(st.sampled_from(sorted(LAYERS)), max_size=3).map(tuple)
    stages = draw(st.lists(stage, min_size=1, max_size=3))
    stages += [stages[-1]] * draw(st.integers(0, 1))  # equal stages share their traces
    m = draw(st.integers(1, 4))
    still = draw(st.lists(st.integers(0, 11), max_size=2))
    rows = draw(st.integers(2 * m, 3 * m))
    return Case(tuple(stages), tuple(still), m, rows, draw(st.sampled_from(sorted(PLANS))), draw(st.booleans()))


@few(5)
@given(cases())
def test_a_net_that_remembers_is_the_unsplit_net(case: Case):
    """One microbatch after the other, torch seeded where each stage begins: every gradient and buffer, bit by bit."""
    net, sizes, n = case.net(), [1 + len(stage) for stage in case.stages], len(case.stages)
    whole = copy.deepcopy(net)
    batch = torch.randn(case.rows, WIDTH), torch.randn(case.rows, WIDTH)
    for index, (x, t) in enumerate(zip(*(half.tensor_split(case.microbatches) for half in batch), strict=True)):
        for stage, end in enumerate(accumulate(sizes)):
            torch.manual_seed(fpipe.fold_in(7, stage, index))
            x = whole[end - sizes[stage] : end](x)
        (nn.functional.mse_loss(x, t) * (len(x) / case.rows)).backward()
    model, params, state = fpipe.from_sequential(net, sizes=sizes, loss=nn.functional.mse_loss, example=batch[0])
    pipeline = fpipe.chain(fpipe.split(case.microbatches), *PLANS[case.plan](n), fpipe.merge())
    step = fpipe.build(pipeline(fpipe.program(model)), model, trace=case.trace)
    result: Any = step(params, batch, state=state, key=7)
    grads = fpipe.join_params(model, result.grads)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in whole.named_parameters())
    held = {name: buffer for stage in result.state or () for name, buffer in stage.items()}
    kept = {name: buffer for name, buffer in net.named_buffers() if name not in held}
    assert all(torch.equal(buffer, whole.get_buffer(name)) for name, buffer in (held | kept).items())


def both_sizes(params: dict[str, Tensor], batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    """A loss that asks for the rows of a table and of the batch, also of what it computes."""
    (table, x), target = batch
    y = fpipe.boundary(torch.tanh(x @ params["w"]) / x.shape[0])
    pairs = (y[:, None] * table).reshape(-1, WIDTH)
    return pairs.square().sum() / x.shape[0] + pairs.shape[0] * table.shape[0] * target.mean()


@few(4)
@given(
    example=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    count=st.integers(1, 3),
    each=st.integers(1, 4),
    table_rows=st.integers(1, 5),
)
def test_each_leaf_of_a_batch_has_rows_of_its_own(example: tuple[int, int], count: int, each: int, table_rows: int):
    """Whatever the rows of the example, a step whose microbatches take a table whole is the function of each."""

    def batch(rows: int, of_table: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        table, x = (torch.randn(size, WIDTH, dtype=torch.float64) for size in (of_table, rows))
        return (table, x), torch.randn(rows, dtype=torch.float64)

    params = {"w": torch.randn(WIDTH, WIDTH, dtype=torch.float64)}
    model, own = fpipe.from_loss(both_sizes, params, batch(*example))
    (table, x), target = batch(count * each, table_rows)
    spec = (fpipe.Replicate(), fpipe.Chunk(0)), fpipe.Chunk(0)
    program = fpipe.chain(fpipe.split(count, spec=spec), fpipe.merge(outputs=False))(fpipe.program(model))
    parts = zip(x.split(each), target.split(each), strict=True)
    right = sum(both_sizes(params, ((table, part), aim)) / count for part, aim in parts)
    torch.testing.assert_close(fpipe.build(program, model)(own, ((table, x), target)).loss, right)
