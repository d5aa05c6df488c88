"""Stages that look at data run in processes, beside traced ones, with the bits of plain autograd."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.processes import SOON, Processes, timed
from tests.test_distributed import alike, differs, own

Params = dict[str, Tensor]
Stage = Callable[[Params, Tensor], Tensor]


def smooth(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def looks(p: Params, x: Tensor) -> Tensor:
    """A branch on what the data say, with gradients of other leaves."""
    return torch.tanh(x @ p["u"]) if x.abs().max().item() > 1.5 else x @ p["w"] * 2


def routes(p: Params, x: Tensor) -> Tensor:
    """A dropless mixture of experts: each takes the rows that are sent to it, and some get none."""
    out, route = torch.zeros_like(x), (x @ p["gate"]).argmax(-1)
    for expert in range(4):
        (rows,) = torch.where(route == expert)
        if len(rows) == 0:
            continue
        out[rows] += F.dropout(torch.tanh(x[rows] @ p[f"expert {expert}"]), p=0.25)
    return x + out


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def params_of(stages: Sequence[Stage]) -> tuple[Params, ...]:
    torch.manual_seed(0)
    names = {smooth: ["w"], looks: ["w", "u"], routes: ["gate", *(f"expert {n}" for n in range(4))]}
    return tuple({name: torch.randn(6, 4 if name == "gate" else 6) for name in names[stage]} for stage in stages)


def rows(count: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 6), torch.randn(count, 6)


def made_of(
    stages: Sequence[Stage], *steps: Any, microbatches: int = 4
) -> tuple[fpipe.Program, fpipe.Model, tuple[Params, ...]]:
    """A program on two ranks, its model, and parameters."""
    model, steps = fpipe.from_functions(stages, squares), steps or (fpipe.schedules.one_f_one_b(2), fpipe.merge())
    return fpipe.chain(fpipe.split(microbatches), *steps)(fpipe.program(model)), model, params_of(stages)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a stage runs under autograd")
        yield


STAGES: dict[str, list[Stage]] = {
    "the last": [smooth, looks],
    "the first": [looks, smooth],
    "routed, then traced": [routes, smooth],
    "traced, then routed": [smooth, routes],
    "all": [routes, looks],
    "four": [smooth, routes, looks, smooth],
}
CHAINS: dict[str, Any] = {
    "1F1B": (fpipe.schedules.one_f_one_b(2),),
    "ZB-H1": (fpipe.split_backward(), fpipe.schedules.zb_h1(2)),
    "checkpoint": (fpipe.checkpoint(), fpipe.schedules.one_f_one_b(2)),
    "layers again": (fpipe.checkpoint(grain="layer"), fpipe.schedules.one_f_one_b(2)),
    "interleaved": (fpipe.schedules.interleaved(2),),
    "zbv": (fpipe.schedules.zbv(2),),
}


def runs(rank: int, which: str, chain: str, how: dict[str, Any]) -> list[str]:
    """Differences from plain autograd in steps on batches of two sizes."""
    found = list[str]()
    program, model, params = made_of(STAGES[which], *CHAINS[chain], fpipe.merge())
    with quiet():
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows()), **how)
        for count, key in ((10, 1), (10, 2), (16, 3), (10, 4)):
            made = step(own(program, rank, params), rows(count), key=key)
            whole = fpipe.reference(model, params, rows(count), microbatches=4, key=key)
            found += differs(rank, program, made, whole)
    return found


@pytest.mark.parametrize(
    ("which", "chain"),
    [
        pytest.param(which, chain, marks=pytest.mark.deep if chain != "ZB-H1" and which not in ("all", "four") else [])
        for which in STAGES
        for chain in CHAINS
        if (which == "four") == (chain in ("interleaved", "zbv"))
    ],
)
def test_stages_that_look_at_data_have_the_bits_of_autograd(pair: Processes, which: str, chain: str):
    """A build in processes refused them: that the whole program be in one process was the way out."""
    assert pair.each(runs, which, chain, {}) == [[], []]


@pytest.mark.parametrize(
    "how", [{"trace": False}, {"record": True}, {"check_finite": True, "check_batch": "always"}], ids=str
)
def test_options_of_a_build_hold_for_them_too(pair: Processes, how: dict[str, Any]):
    assert pair.each(runs, "traced, then routed", "ZB-H1", how) == [[], []]


def carries(p: Params, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x @ p["w"] + (0 if carry is None else carry))
    return y * (2 if x.sum().item() > 0 else 3), y[:, -1:].contiguous()


def carries_on(p: Params, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x @ p["w"] + (0 if carry is None else carry))
    return y, y[:, -1:].contiguous()


def centred(p: Params, x: Tensor, *, state: Params) -> tuple[Tensor, Params]:
    return smooth(p, x - state["mean"]) * x.sum().sign().item(), average(state, x)


def looks_beside(p: Params, x: Tensor, *, state: Params) -> tuple[Tensor, Params]:
    return looks(p, x), average(state, x)


def average(state: Params, x: Tensor) -> Params:
    return {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}


SLICED = fpipe.split(4, slices=2), fpipe.schedules.seq1f1b(2), fpipe.merge(outputs=False)
WHOLE = fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge()
FLOWS: dict[str, tuple[Any, Any]] = {
    "a carry to a traced stage": (SLICED, (carries, carries_on)),
    "a carry from a traced stage": (SLICED, (carries_on, carries)),
    "state that the output reads": (WHOLE, (smooth, centred)),
    "state beside": (WHOLE, (smooth, looks_beside)),
    "casts": (WHOLE, (looks, smooth)),
}


def flows(rank: int, name: str) -> list[bool]:
    steps, stages = FLOWS[name]
    model = fpipe.from_functions(stages, squares)
    program, params = fpipe.chain(*steps)(fpipe.program(model)), params_of([looks, looks])
    state: Any = ({}, {"mean": torch.zeros(6)}) if "state" in name else None
    batch = (torch.randn(8, 4, 6), torch.randn(8, 4, 6)) if "carry" in name else rows()
    example, mine = (params, batch, *([state] if state else [])), state and own(program, rank, state)
    with quiet(), torch.autocast("cpu", enabled=name == "casts", dtype=torch.bfloat16):
        alone = fpipe.build(program, model, trace=False)(params, batch, state=state)
        step = fpipe.build(program, model, runtime="distributed", example=example)
        made = [step(own(program, rank, params), batch, state=mine) for _ in range(2)]
        made += [fpipe.build(program, model)(params, batch, state=state) for _ in range(2)]
    right = [(own(program, rank, alone.grads), alone.state and own(program, rank, alone.state))] * 2
    right += [(alone.grads, alone.state)] * 2
    return [alike((one.grads, one.state), other) for one, other in zip(made, right, strict=True)]


@pytest.mark.parametrize("name", FLOWS)
def test_whatever_flows_is_known_to_all(pair: Processes, name: str):
    assert pair.each(flows, name) == [[True] * 4] * 2


def replicated(rank: int) -> list[bool]:
    """Two replicas of two ranks, of experts that get no rows in one replica, say."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, mine = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    found = list[bool]()
    steps = fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False), fpipe.data_parallel("dp")
    program, model, params = made_of(STAGES["traced, then routed"], *steps, microbatches=2)
    halves = [*zip(*(half.chunk(2) for half in rows(8)), strict=True)]
    with quiet():
        step = fpipe.build(
            program, model, runtime="distributed", mesh=mesh, example=(params, halves[0]), broadcast=True
        )
        for key in (1, 2):
            made = step(own(program, mine, params), halves[replica], key=key)
            whole = fpipe.reference(model, params, rows(8), microbatches=2, replicas=2, key=key)
            found.append(alike((made.loss, made.grads), (whole.loss, own(program, mine, whole.grads))))
    return found


def test_replicas_add_the_gradients_of_experts_that_only_one_has_rows_for(four: Processes):
    assert four.each(replicated) == [[True] * 2] * 4


def picks(p: Params, x: Tensor) -> Tensor:
    """As many rows as the data say."""
    if x[0, 1] > 90:
        raise ArithmeticError("this row is odd")
    return x[x[:, 0] >= 0] @ p["w"]


def failing(rank: int, who: int, how: str) -> list[Any]:
    params = params_of([smooth] * 2)
    model = fpipe.from_functions(
        [picks if n == who else lambda p, x: x @ p["w"].abs() for n in range(2)], lambda y, t: y.sum()
    )
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    good = rows()[0].abs(), torch.zeros(10)
    odd, negative = (good[0].clone() for _ in range(2))
    odd[5, 1], negative[7] = 1e4, -1.0
    with quiet():
        step = fpipe.build(program, model, runtime="distributed", example=(params, good))
    batches = good[0], odd if how == "odd" else negative
    return [timed(lambda x=x: step(own(program, rank, params), (x, good[1]))) for x in batches]


@pytest.mark.parametrize("how", ["odd", "negative"])
@pytest.mark.parametrize("who", [0, 1])
def test_what_such_a_stage_raises_ends_all_ranks_and_so_does_a_shape_that_depends_on_the_data(
    pair: Processes, who: int, how: str
):
    shape = (
        rf"stage {who} \(picks\) runs without a trace, and {who}F1 wrote y\[{who},1\] as float32\[4, 6\] .*, "
        r"and for zeros as float32\[5, 6\] .*\. Pad it to one shape, or place its readers"
    )
    words = "ArithmeticError: this row is odd" if how == "odd" else f"UnexpectedValue: {shape}"
    for rank, ((before, _), (said, took)) in enumerate(pair.each(failing, who, how)):
        assert before == "worked"
        assert re.match(("" if rank == who else f"RankError: rank {who} failed in {who}F1: .*: ") + words, said)
        assert took < SOON


def refused(rank: int, how: str) -> str:
    stages: dict[str, Stage] = {
        "on zeros": lambda p, x: x / (1 / x.sum().item()),
        "apart": looks,
        "sparse": lambda p, x: (x @ p["w"]).to_sparse() if x.sum() > 1 else x.to_sparse(),
    }
    params, batch = params_of([looks, smooth]), rows()
    model = fpipe.from_functions([stages[how], lambda p, x: x.to_dense() @ p["w"]], squares)
    where = fpipe.schedules.one_f_one_b(2)
    if how == "apart":
        where = fpipe.place(lambda kind, stage, _: stage if kind == "F" else 1 - stage, homes=lambda stage: [stage])
    program = fpipe.chain(fpipe.split(2), where, fpipe.merge())(fpipe.program(model))
    return timed(lambda: fpipe.build(program, model, runtime="distributed", example=(params, batch)))[0]


REFUSED = {
    "on zeros": r"DataDependent.*; stage 0 \(<lambda>\): a run on zeros, .*, ended in ZeroDivisionError: ",
    "apart": r"res\[0,0\].* is autograd's own, which no message carries: stage 0 \(looks\): Data.* Place",
    "sparse": r"ended in TypeError: it writes a tensor of layout torch.sparse_coo. In processes a stage",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_no_rank_can_know_or_send_is_refused_when_the_step_is_built(pair: Processes, how: str):
    for said in pair.each(refused, how):
        assert re.search(REFUSED[how], said, re.DOTALL)


def tied(rank: int) -> list[str]:
    """A tied parameter that a stage reads for some data alone, and a gradient laid out anew."""

    def table(p: Params, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["e"])

    def unties(p: Params, x: Tensor) -> Tensor:
        return (p["w"] @ x.t()).t() @ p["e"] if x.sum().item() > 0 else x @ p["w"]

    torch.manual_seed(0)
    params = {"e": torch.randn(6, 6)}, {"w": torch.randn(6, 6)}
    model = fpipe.from_functions([table, unties], squares, ties=[((0, "e"), (1, "e"))])
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    with quiet():
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    found = step(own(program, rank, params), rows())
    return differs(rank, program, found, fpipe.reference(model, params, rows(), microbatches=4))


def test_a_sum_of_a_tied_parameter_travels_whether_or_not_it_was_read(pair: Processes):
    assert pair.each(tied) == [[], []]


def warned(rank: int) -> list[str]:
    program, model, params = made_of(STAGES["traced, then routed"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    return [str(one.message) for one in said]


def test_the_rank_of_a_stage_is_warned_of_it(pair: Processes):
    first, (second,) = pair.each(warned)
    assert first == []
    assert second.startswith(
        "a stage runs under autograd, without a trace, and its I computes what W hands over: stage 1"
    )


def test_an_expert_without_rows_ends_no_traces_in_one_process():
    """Its gradient is there for some data and not for others: then all stages ran under autograd from that step on."""
    program, model, params = made_of(STAGES["traced, then routed"])
    step = fpipe.build(program, model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [(key, step(params, rows(key), key=key)) for key in (9, 10, 11, 9, 10, 11)]
    for key, made in found:
        right = fpipe.reference(model, params, rows(key), microbatches=4, key=key)
        assert alike((made.loss, made.grads), (right.loss, right.grads))
    assert {str(one.message)[:33] for one in told} == {"a stage runs under autograd, with"}


@pytest.mark.parametrize("steps", [(), (fpipe.split_backward(),), (fpipe.checkpoint(),)], ids=["B", "I W", "R"])
def test_what_autograd_keeps_is_recorded(steps: Any):
    """A recorded step ran all stages under autograd if one was not traced, so that these were counted."""
    params = params_of([smooth, smooth])
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"]) * x.sum().sign().item()] * 2, squares)
    chain = fpipe.chain(fpipe.split(4), *steps, fpipe.schedules.one_f_one_b(2), fpipe.merge())
    found = list[Any]()
    for trace in (True, False):
        with quiet():
            step = fpipe.build(chain(fpipe.program(model)), model, record=True, trace=trace)
            found += [step(params, rows()).timeline.peak for _ in range(2)]
    assert found[0] == found[1] == found[2]
