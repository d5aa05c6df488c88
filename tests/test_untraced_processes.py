"""Stages that look at data run in processes next to traced stages, with the bits of plain autograd."""

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
from tests.processes import SOON, Processes, time_call
from tests.test_distributed import differing_fields, is_equal_tree, local_part

Params = dict[str, Tensor]
Stage = Callable[[Params, Tensor], Tensor]


def smooth(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def branch_on_data(p: Params, x: Tensor) -> Tensor:
    """Branch on the numbers in x; each branch has gradients of other leaves."""
    return torch.tanh(x @ p["u"]) if x.abs().max().item() > 1.5 else x @ p["w"] * 2


def mixture_of_experts(p: Params, x: Tensor) -> Tensor:
    """Route each row to one expert without dropping; some experts get no rows."""
    output, route = torch.zeros_like(x), (x @ p["gate"]).argmax(-1)
    for expert in range(4):
        (rows,) = torch.where(route == expert)
        if len(rows) == 0:
            continue
        output[rows] += F.dropout(torch.tanh(x[rows] @ p[f"expert {expert}"]), p=0.25)
    return x + output


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def params_of(stages: Sequence[Stage]) -> tuple[Params, ...]:
    torch.manual_seed(0)
    names = {
        smooth: ["w"],
        branch_on_data: ["w", "u"],
        mixture_of_experts: ["gate", *(f"expert {n}" for n in range(4))],
    }
    return tuple({name: torch.randn(6, 4 if name == "gate" else 6) for name in names[stage]} for stage in stages)


def rows(count: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 6), torch.randn(count, 6)


def build_program(
    stages: Sequence[Stage], *steps: Any, microbatches: int = 4
) -> tuple[fpipe.Program, fpipe.Model, tuple[Params, ...]]:
    """Return a program on two ranks, its model, and parameters."""
    model, steps = fpipe.from_functions(stages, squares), steps or (fpipe.schedules.one_f_one_b(2), fpipe.merge())
    return fpipe.chain(fpipe.split(microbatches), *steps)(fpipe.program(model)), model, params_of(stages)


@contextmanager
def ignore_untraced_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a stage runs under autograd")
        yield


STAGES: dict[str, list[Stage]] = {
    "the last": [smooth, branch_on_data],
    "the first": [branch_on_data, smooth],
    "routed, then traced": [mixture_of_experts, smooth],
    "traced, then routed": [smooth, mixture_of_experts],
    "all": [mixture_of_experts, branch_on_data],
    "four": [smooth, mixture_of_experts, branch_on_data, smooth],
}
CHAINS: dict[str, Any] = {
    "1F1B": (fpipe.schedules.one_f_one_b(2),),
    "ZB-H1": (fpipe.split_backward(), fpipe.schedules.zb_h1(2)),
    "checkpoint": (fpipe.checkpoint(), fpipe.schedules.one_f_one_b(2)),
    "layers again": (fpipe.checkpoint(grain="layer"), fpipe.schedules.one_f_one_b(2)),
    "interleaved": (fpipe.schedules.interleaved(2),),
    "zbv": (fpipe.schedules.zbv(2),),
}


def differences_in_steps(rank: int, case: str, chain: str, options: dict[str, Any]) -> list[str]:
    """Compare steps on batches of two sizes with plain autograd."""
    differences = list[str]()
    program, model, params = build_program(STAGES[case], *CHAINS[chain], fpipe.merge())
    with ignore_untraced_warning():
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows()), **options)
        for count, key in ((10, 1), (10, 2), (16, 3), (10, 4)):
            result = step(local_part(program, rank, params), rows(count), key=key)
            expected = fpipe.reference(model, params, rows(count), microbatches=4, key=key)
            differences += differing_fields(rank, program, result, expected)
    return differences


@pytest.mark.parametrize(
    ("case", "chain"),
    [
        pytest.param(case, chain, marks=pytest.mark.deep if chain != "ZB-H1" and case not in ("all", "four") else [])
        for case in STAGES
        for chain in CHAINS
        if (case == "four") == (chain in ("interleaved", "zbv"))
    ],
)
def test_stages_that_look_at_data_have_the_bits_of_autograd(pair: Processes, case: str, chain: str):
    """A build in processes used to refuse such stages."""
    assert pair.run(differences_in_steps, case, chain, {}) == [[], []]


@pytest.mark.parametrize(
    "options", [{"trace": False}, {"record": True}, {"check_finite": True, "check_batch": "always"}], ids=str
)
def test_options_of_a_build_hold_for_stages_that_look_at_data(pair: Processes, options: dict[str, Any]):
    assert pair.run(differences_in_steps, "traced, then routed", "ZB-H1", options) == [[], []]


def carry_and_branch(p: Params, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x @ p["w"] + (0 if carry is None else carry))
    return y * (2 if x.sum().item() > 0 else 3), y[:, -1:].contiguous()


def carry_on(p: Params, x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x @ p["w"] + (0 if carry is None else carry))
    return y, y[:, -1:].contiguous()


def centre_by_mean(p: Params, x: Tensor, *, state: Params) -> tuple[Tensor, Params]:
    return smooth(p, x - state["mean"]) * x.sum().sign().item(), average(state, x)


def branch_and_average(p: Params, x: Tensor, *, state: Params) -> tuple[Tensor, Params]:
    return branch_on_data(p, x), average(state, x)


def average(state: Params, x: Tensor) -> Params:
    return {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}


SLICED = fpipe.split(4, slices=2), fpipe.schedules.seq1f1b(2), fpipe.merge(outputs=False)
UNSLICED = fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge()
FLOWS: dict[str, tuple[Any, Any]] = {
    "a carry to a traced stage": (SLICED, (carry_and_branch, carry_on)),
    "a carry from a traced stage": (SLICED, (carry_on, carry_and_branch)),
    "state that the output reads": (UNSLICED, (smooth, centre_by_mean)),
    "state beside": (UNSLICED, (smooth, branch_and_average)),
    "casts": (UNSLICED, (branch_on_data, smooth)),
}


def equal_results(rank: int, name: str) -> list[bool]:
    steps, stages = FLOWS[name]
    model = fpipe.from_functions(stages, squares)
    program, params = fpipe.chain(*steps)(fpipe.program(model)), params_of([branch_on_data, branch_on_data])
    state: Any = ({}, {"mean": torch.zeros(6)}) if "state" in name else None
    batch = (torch.randn(8, 4, 6), torch.randn(8, 4, 6)) if "carry" in name else rows()
    example, local_state = (params, batch, *([state] if state else [])), state and local_part(program, rank, state)
    with ignore_untraced_warning(), torch.autocast("cpu", enabled=name == "casts", dtype=torch.bfloat16):
        expected = fpipe.build(program, model, trace=False)(params, batch, state=state)
        step = fpipe.build(program, model, runtime="distributed", example=example)
        results = [step(local_part(program, rank, params), batch, state=local_state) for _ in range(2)]
        results += [fpipe.build(program, model)(params, batch, state=state) for _ in range(2)]
    expected_trees = [
        (local_part(program, rank, expected.grads), expected.state and local_part(program, rank, expected.state))
    ] * 2
    expected_trees += [(expected.grads, expected.state)] * 2
    return [
        is_equal_tree((result.grads, result.state), expected_tree)
        for result, expected_tree in zip(results, expected_trees, strict=True)
    ]


@pytest.mark.parametrize("name", FLOWS)
def test_carries_state_and_casts_pass_between_traced_and_untraced_stages(pair: Processes, name: str):
    assert pair.run(equal_results, name) == [[True] * 4] * 2


def replicas_are_equal(rank: int) -> list[bool]:
    """Compare two replicas of two ranks with the reference; some experts get rows in one replica only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, pipeline_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    are_equal = list[bool]()
    steps = fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False), fpipe.data_parallel("dp")
    program, model, params = build_program(STAGES["traced, then routed"], *steps, microbatches=2)
    halves = [*zip(*(leaf.chunk(2) for leaf in rows(8)), strict=True)]
    with ignore_untraced_warning():
        step = fpipe.build(
            program, model, runtime="distributed", mesh=mesh, example=(params, halves[0]), broadcast=True
        )
        for key in (1, 2):
            result = step(local_part(program, pipeline_rank, params), halves[replica], key=key)
            expected = fpipe.reference(model, params, rows(8), microbatches=2, replicas=2, key=key)
            are_equal.append(
                is_equal_tree(
                    (result.loss, result.grads), (expected.loss, local_part(program, pipeline_rank, expected.grads))
                )
            )
    return are_equal


def test_replicas_add_the_gradients_of_experts_that_only_one_has_rows_for(four: Processes):
    assert four.run(replicas_are_equal) == [[True] * 2] * 4


def select_rows(p: Params, x: Tensor) -> Tensor:
    """Return as many rows as the data say."""
    if x[0, 1] > 90:
        raise ArithmeticError("this row is odd")
    return x[x[:, 0] >= 0] @ p["w"]


def answers_of_failing(rank: int, failing_stage: int, fault: str) -> list[Any]:
    params = params_of([smooth] * 2)
    model = fpipe.from_functions(
        [select_rows if n == failing_stage else lambda p, x: x @ p["w"].abs() for n in range(2)], lambda y, t: y.sum()
    )
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    good = rows()[0].abs(), torch.zeros(10)
    too_large, negative = (good[0].clone() for _ in range(2))
    too_large[5, 1], negative[7] = 1e4, -1.0
    with ignore_untraced_warning():
        step = fpipe.build(program, model, runtime="distributed", example=(params, good))
    batches = good[0], too_large if fault == "odd" else negative
    return [time_call(lambda x=x: step(local_part(program, rank, params), (x, good[1]))) for x in batches]


@pytest.mark.parametrize("fault", ["odd", "negative"])
@pytest.mark.parametrize("failing_stage", [0, 1])
def test_an_error_or_a_shape_that_depends_on_data_ends_all_ranks(pair: Processes, failing_stage: int, fault: str):
    shape = (
        rf"stage {failing_stage} \(select_rows\) runs without a trace, and {failing_stage}F1 wrote "
        rf"y\[{failing_stage},1\] as float32\[4, 6\] .*, "
        r"and for zeros as float32\[5, 6\] .*\. Give it one structure and shape, or"
    )
    message = "ArithmeticError: this row is odd" if fault == "odd" else f"UnexpectedValue: {shape}"
    for rank, ((first_answer, _), (answer, seconds)) in enumerate(pair.run(answers_of_failing, failing_stage, fault)):
        assert first_answer == "worked"
        assert re.match(
            ("" if rank == failing_stage else f"RankError: rank {failing_stage} failed in {failing_stage}F1: .*: ")
            + message,
            answer,
        )
        assert seconds < SOON


def build_error(rank: int, case: str) -> str:
    stages: dict[str, Stage] = {
        "on zeros": lambda p, x: x / (1 / x.sum().item()),
        "apart": branch_on_data,
        "sparse": lambda p, x: (x @ p["w"]).to_sparse() if x.sum() > 1 else x.to_sparse(),
    }
    params, batch = params_of([branch_on_data, smooth]), rows()
    model = fpipe.from_functions([stages[case], lambda p, x: x.to_dense() @ p["w"]], squares)
    schedule = fpipe.schedules.one_f_one_b(2)
    if case == "apart":
        schedule = fpipe.place(lambda kind, stage, _: stage if kind == "F" else 1 - stage, homes=lambda stage: [stage])
    program = fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))
    return time_call(lambda: fpipe.build(program, model, runtime="distributed", example=(params, batch)))[0]


REFUSED = {
    "on zeros": r"DataDependent.*; stage 0 \(<lambda>\): a run on zeros, .*, ended in ZeroDivisionError: ",
    "apart": r"res\[0,0\].* is autograd's own, which no message carries: stage 0 \(branch_on_data\): Data.* Place",
    "sparse": r"ended in TypeError: it writes a tensor of layout torch.sparse_coo. In processes a stage",
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_be_sent_are_refused_by_the_build(pair: Processes, case: str):
    for answer in pair.run(build_error, case):
        assert re.search(REFUSED[case], answer, re.DOTALL)


def differences_of_tied(rank: int) -> list[str]:
    """Compare a tied parameter that a stage reads for some data only, with a gradient of another layout."""

    def multiply_table(p: Params, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["e"])

    def branch_on_tie(p: Params, x: Tensor) -> Tensor:
        return (p["w"] @ x.t()).t() @ p["e"] if x.sum().item() > 0 else x @ p["w"]

    torch.manual_seed(0)
    params = {"e": torch.randn(6, 6)}, {"w": torch.randn(6, 6)}
    model = fpipe.from_functions([multiply_table, branch_on_tie], squares, ties=[((0, "e"), (1, "e"))])
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    with ignore_untraced_warning():
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    result = step(local_part(program, rank, params), rows())
    return differing_fields(rank, program, result, fpipe.reference(model, params, rows(), microbatches=4))


def test_a_tied_parameters_gradient_is_sent_even_if_unread(pair: Processes):
    assert pair.run(differences_of_tied) == [[], []]


def build_warnings(rank: int) -> list[str]:
    program, model, params = build_program(STAGES["traced, then routed"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    return [str(warning.message) for warning in caught]


def test_only_the_rank_of_an_untraced_stage_warns(pair: Processes):
    rank_0_warnings, (rank_1_warning,) = pair.run(build_warnings)
    assert rank_0_warnings == []
    assert rank_1_warning.startswith(
        "a stage runs under autograd, without a trace, and its I computes what W hands over: stage 1"
    )


def test_an_expert_without_rows_ends_no_traces_in_one_process():
    """A gradient that is missing for some data used to end all traces from that step on."""
    program, model, params = build_program(STAGES["traced, then routed"])
    step = fpipe.build(program, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [(key, step(params, rows(key), key=key)) for key in (9, 10, 11, 9, 10, 11)]
    for key, result in results:
        expected = fpipe.reference(model, params, rows(key), microbatches=4, key=key)
        assert is_equal_tree((result.loss, result.grads), (expected.loss, expected.grads))
    assert {str(warning.message)[:33] for warning in caught} == {"a stage runs under autograd, with"}


@pytest.mark.parametrize("steps", [(), (fpipe.split_backward(),), (fpipe.checkpoint(),)], ids=["B", "I W", "R"])
def test_residuals_that_autograd_keeps_are_recorded(steps: Any):
    """A recorded step used to run all stages under autograd if one had no trace."""
    params = params_of([smooth, smooth])
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"]) * x.sum().sign().item()] * 2, squares)
    pipeline = fpipe.chain(fpipe.split(4), *steps, fpipe.schedules.one_f_one_b(2), fpipe.merge())
    peaks = list[Any]()
    for trace in (True, False):
        with ignore_untraced_warning():
            step = fpipe.build(pipeline(fpipe.program(model)), model, record=True, trace=trace)
            peaks += [step(params, rows()).timeline.peak for _ in range(2)]
    assert peaks[0] == peaks[1] == peaks[2]
