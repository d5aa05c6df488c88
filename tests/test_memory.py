"""Memory is predicted before a run: simulated bytes equal the bytes that the local runtime holds."""

from collections.abc import Callable

import pytest
import torch

import fpipe
from fpipe.program import Program, ProgramError
from fpipe.timing.memory import HOLDERS, Account
from tests.test_conformance import ROWS, Row, layers_model, served

POLICIES: dict[str, Callable[[Program], Program]] = {
    "never": fpipe.identity(),
    "always": fpipe.checkpoint("always"),
    "except_last": fpipe.checkpoint("except_last"),
    "split": fpipe.split_backward(),
    "always, split": fpipe.chain(fpipe.split_backward(), fpipe.checkpoint("always")),
    "layer": fpipe.checkpoint("always", grain="layer"),
}
# Under each policy: in turns, searched, offloaded, sliced, and in pairs. Others under the one policy that makes
# the most kinds of op.
THOROUGH = {"one_f_one_b", "pipe_offload v=2", "seq1f1b slices=4", "dualpipev v=2", "zbv v=2"}
CASES = [
    pytest.param(row, policy, marks=[] if str(row) in THOROUGH or policy == "always, split" else pytest.mark.deep)
    for row in ROWS
    for policy in POLICIES
]
FORMS = fpipe.identity(), fpipe.communicate(), fpipe.chain(fpipe.communicate(), fpipe.free())


@pytest.mark.parametrize(("row", "policy"), CASES, ids=str)
def test_simulated_bytes_are_those_that_the_local_runtime_holds(row: Row, policy: str):
    """Transfers may be ops or not. A copy on the reader's rank used to count only once a RECV made it."""
    ranks, microbatches = max(
        ((p, m) for p, m in served(row) if p <= 3 and m >= p), key=lambda size: (size[0], -size[1])
    )
    try:
        program = POLICIES[policy](row.program(ranks, microbatches))
    except ProgramError as error:
        pytest.skip(str(error))
    model, params = layers_model(program.stages)
    batch = torch.ones(2 * microbatches, program.slices, 4), torch.zeros(2 * microbatches, program.slices, 4)
    forms = [form(program) for form in FORMS]
    predicted_peaks = {fpipe.simulate(p, fpipe.Costs(bytes=fpipe.sizes(p, model, params, batch))).peak for p in forms}
    recorded_peaks = {fpipe.build(p, model, record=True)(params, batch).timeline.peak for p in forms}
    (peak,) = predicted_peaks | recorded_peaks
    assert max(peak) > 0


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no rows": lambda y: y[:0],
    "overlapping": lambda y: y.as_strided((2, 2), (1, 1)),
    "imaginary parts": lambda y: torch.fft.fft(y).imag,
    "first column": lambda y: y[:, :1],
}


@pytest.mark.crossed
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("policy", ["never", "always, split", "layer"])
def test_a_kept_view_keeps_its_whole_storage(policy: str, part: Callable[[torch.Tensor], torch.Tensor]):
    """Used to predict too few bytes that never go: the next stage knew only its view of the storage."""

    def cuts(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return part(x @ p["w"])

    def total(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y.sum() - target.sum()).square()

    model = fpipe.from_functions([cuts, lambda p, x: torch.sin(x) * p["s"]], total)
    params, batch = ({"w": torch.eye(4)}, {"s": torch.tensor(2.0)}), (torch.ones(7, 4), torch.ones(7, 1))
    program = fpipe.chain(fpipe.split(5), POLICIES[policy], fpipe.merge(outputs=False))
    built = fpipe.build(program(fpipe.program(model)), model, record=True)(params, batch)
    assert fpipe.sizes(program(fpipe.program(model)), model, params, batch).peak == built.timeline.peak


def test_a_timeline_gives_the_bytes_held_over_time():
    """The copy of y on rank 1 is there from 1, when it comes, to 2; dx leaves at 4 and is on rank 0 from then on."""
    costs = fpipe.Costs(bytes={"y": 10, "res": [100, 200], "dx": 10, "loss": 1, "g": 5})
    timeline = fpipe.simulate(fpipe.place("linear")(fpipe.program(2)), costs)
    assert timeline.memory_curve(1) == [(1, 221), (2, 226), (4, 26), (4, 16)]
    assert timeline.memory_curve(0) == [(0, 110), (1, 100), (4, 115), (6, 15), (6, 5)]


def test_a_storage_of_several_values_is_held_for_the_first_kind_of_holder():
    """An output that the backward reads too counts as residual until the backward is over."""
    y, res = fpipe.Value("y", 0, 0), fpipe.Value("res", 0, 0)
    account = Account(1)
    output, residuals = HOLDERS.index("in flight"), HOLDERS.index("residuals")
    assert account.record_op(0, [(y, {"storage": 10})], []) == ([(0, 10, output)], [])
    assert account.record_op(0, [(res, {"storage": 10})], []) == ([(0, -10, output), (0, 10, residuals)], [])
    assert account.record_op(0, [], [res]) == ([], [(0, -10, residuals), (0, 10, output)])
    assert account.peak == [10]


OFFLOADED = fpipe.offload(lambda stage, microbatch: stage == 0)(fpipe.program(2))


def test_an_offloaded_value_is_not_held():
    timeline = fpipe.simulate(OFFLOADED, fpipe.Costs(offload=0.5, load=0.75))
    assert timeline.memory_curve(0) == [(0, 0.5), (1, 1), (1.5, 0.5), (2, 1), (4, 0.5), (6, 0)]
    assert timeline.peak == (1,)
