"""Cases in which other systems were measured to fail, and how a step handles them. Further cases are in tests with a
larger subject: counted losses (test_losses), two steps (property_tests/test_gradients), norms (test_state), dropout
(test_random), ties, skips, in-place ops and ordered outputs (test_bad_input), a B that cannot be cut (layers.py)."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from property_tests.bits import bits
from tests.refusals import refusals
from tests.toys import POLICIES, Toy, assert_unsplit, merged, run_unsplit

WIDTH, ROWS = 4, 12
SCHEDULES = {name: getattr(fpipe.schedules, name) for name in ("gpipe", "one_f_one_b", "zb_h1")}


def batch_of(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def observe_state(net: nn.Module) -> list[Any]:
    """Return all state of the net and of torch that a caller can observe."""
    modes = [module.training for module in net.modules()]
    grads = [leaf.grad for leaf in net.parameters()]
    return [*modes, *grads, *bits(dict(net.state_dict())), *bits(torch.get_rng_state())]


@pytest.mark.crossed
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reading", ["sizes", "build", "verify", "profile", "reference", "simulate"])
def test_reading_a_step_changes_no_state(reading: str, training: bool):
    """Parameters, buffers, modes, random numbers and the caller's tensors keep their bits."""
    net, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)), batch_of()
    net[1].train(training)
    model, params, state = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = merged(model, 4, fpipe.checkpoint(), fpipe.schedules.gpipe(2))
    observed_before, bits_before = observe_state(net), bits((params, batch, state))
    reading_by_name: dict[str, Callable[[], Any]] = {
        "sizes": lambda: fpipe.sizes(program, model, params, batch, state=state),
        "build": lambda: fpipe.build(program, model, example=(params, batch, state)),
        "verify": lambda: fpipe.verify(program, model, params, batch, state=state, key=1),
        "profile": lambda: fpipe.profile(program, model, params, batch, state=state, key=1, repeats=1),
        "reference": lambda: fpipe.reference(model, params, batch, microbatches=4, state=state, key=1),
        "simulate": lambda: fpipe.simulate(program),
    }
    assert reading_by_name[reading]() is not None
    assert observe_state(net) == observed_before
    assert bits((params, batch, state)) == bits_before


@pytest.mark.parametrize(("policy", "times"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_recomputes_follow_the_actual_number_of_microbatches(policy: Any, times: int):
    """Splits 6 rows into 4 microbatches, and 4 rows where up to 8 microbatches are allowed."""
    rows_per_call: list[int] = []

    class Counting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            rows_per_call.append(len(input))
            return super().forward(input)

    net = nn.Sequential(Counting(WIDTH, WIDTH), nn.Tanh())
    model, params, _ = fpipe.from_sequential(net, stages=1, loss=nn.functional.mse_loss)
    splits = fpipe.split(4), fpipe.split(8, rows=4, allow_fewer=True)
    for split, rows in zip(splits, (6, 4), strict=True):
        program = fpipe.chain(split, fpipe.checkpoint(policy), fpipe.merge())(fpipe.program(model))
        assert [op.kind for op in program.ops].count("R") == times
        rows_per_call.clear()
        fpipe.build(program, model, trace=False)(params, batch_of(rows))
        assert len(rows_per_call) == 4 + times
        evaluation = fpipe.forward_only()(program)
        assert not {"R", "B", "I", "W"} & {op.kind for op in evaluation.ops}
        assert not any(value.name == "res" for op in evaluation.ops for value in op.writes)


def test_the_input_gradient_op_of_the_first_stage_makes_no_tensor():
    """torch 2.13 raises here. The I of stage 0 only passes on the residuals it reads; the I of stage 1 adds tensors."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    model, params, _ = fpipe.from_sequential(net, sizes=[4, 4], loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split_backward(), fpipe.schedules.gpipe(2))(fpipe.program(model))
    sizes = fpipe.sizes(program, model, params, batch_of())
    new_storages: list[int] = []
    for op in program.ops:
        if op.kind == "I":
            read_storages = {storage for value in op.reads for storage in sizes.storages(value)}
            new_storages.append(
                sum(storage not in read_storages for storage in sizes.storages(fpipe.Value("wres", op.stage, 0)))
            )
    last_stage_count, first_stage_count = new_storages
    assert (first_stage_count, last_stage_count > 0) == (0, True)
    assert_unsplit(model, fpipe.build(program, model)(params, batch_of()), run_unsplit(net, batch_of(), 1)[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_is_a_misaligned_view_gives_the_same_bits(policy: str):
    """Kernels start at another address on misaligned memory, so a copy would add up in another order."""
    memory = torch.randn(2, 1 + 11 * WIDTH)
    batch = tuple(row[1:].view(11, WIDTH) for row in memory)
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = merged(model, 3, *POLICIES[policy], fpipe.schedules.gpipe(2))
    assert_unsplit(model, fpipe.build(program, model)(params, batch), run_unsplit(net, batch, 3)[0])


def test_autocast_with_a_weight_used_twice_is_right_in_threads():
    """A traced cast of a weight is one value for both uses; torch's cache of casts belongs to one thread."""

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return (torch.tanh(x @ p["w"]) @ p["v"] @ p["w"]).float()

    model = fpipe.from_functions([stage, stage], nn.functional.mse_loss)
    program = merged(model, 3, fpipe.split_backward(), fpipe.schedules.gpipe(2))
    params = tuple({"w": torch.randn(WIDTH, WIDTH), "v": torch.randn(WIDTH, WIDTH)} for _ in range(2))
    batch = batch_of()
    step, results = fpipe.build(program, model), list[fpipe.Result]()
    threads = [threading.Thread(target=lambda: results.append(step(params, batch))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected_grads = bits(fpipe.reference(model, params, batch, microbatches=3).grads)
    assert [bits(result.grads) == expected_grads for result in results] == [True] * 4


@pytest.mark.parametrize("front", ["functions", "one loss"])
@pytest.mark.parametrize("trace", [True, False])
def test_a_transposed_batch_of_one_row_gives_the_bits_of_autograd(front: str, trace: bool):
    """Used to pass on `y.view_as(y)`, which has other strides if there is one row. A product with a frozen matrix then
    ran another kernel, and gradients differed in their last bits."""
    weights, x, t = [torch.randn(4, 4) for _ in range(2)], torch.randn(1, 4, 4), torch.randn(1, 4, 4)
    params = {"a": weights[0], "frozen": weights[1]}

    def normalize(p: dict[str, Tensor], h: Tensor) -> Tensor:
        return nn.functional.batch_norm((h @ p["a"]).transpose(1, 2), None, None, training=True).transpose(1, 2)

    def multiply_frozen(p: dict[str, Tensor], h: Tensor) -> Tensor:
        return torch.tanh(h @ p["frozen"])

    def loss_fn(p: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(multiply_frozen(p, fpipe.boundary(normalize(p, batch[0]))), batch[1])

    if front == "one loss":
        model, stage_params = fpipe.from_loss(loss_fn, params, (x, t))
    else:
        model = fpipe.from_functions([normalize, multiply_frozen], nn.functional.mse_loss)
        stage_params = ({"a": params["a"]}, {"frozen": params["frozen"]})
    model = fpipe.freeze(model, 1)
    program = merged(model, 1, fpipe.schedules.gpipe(2))
    assert fpipe.verify(program, model, stage_params, (x, t)).bitwise
    result = fpipe.build(program, model, trace=trace)(stage_params, (x, t))
    leaf = params["a"].clone().requires_grad_()
    loss_fn({**params, "a": leaf}, (x, t)).backward()
    assert torch.equal(result.grads[0]["a"], leaf.grad)


ROUTES = {**POLICIES, "by layers": (fpipe.checkpoint(grain="layer"), fpipe.split_backward())}


@pytest.mark.crossed
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("trace", [True, False])
def test_a_noisy_route_is_the_same_under_every_schedule_and_policy(schedule: str, trace: bool):
    """A recompute draws what F drew; otherwise a token would get the gradient of another expert. By layers, `keep` even
    stores the route."""

    def mixed(module: Any, x: Tensor) -> Tensor:
        scores = torch.softmax(x @ module.router + torch.rand(len(x), 3), 1)
        weight, expert_index = scores.max(1)
        expert_index = fpipe.keep(expert_index)
        return torch.tanh((x[:, None] @ module.experts[expert_index]).squeeze(1)) * weight[:, None]

    def experts() -> nn.Module:
        router, weights = torch.randn(WIDTH, 3), torch.randn(3, WIDTH, WIDTH)
        return Toy(mixed, router=nn.Parameter(router), experts=nn.Parameter(weights))

    net, batch = nn.Sequential(experts(), nn.Tanh(), experts(), experts()), batch_of()
    model, params, state = fpipe.from_sequential(net, sizes=[2, 1, 1], loss=nn.functional.mse_loss)
    expected_grads = bits(fpipe.reference(model, params, batch, microbatches=3, state=state, key=7).grads)
    for transforms in ROUTES.values():
        program = merged(model, 3, *transforms, SCHEDULES[schedule](3))
        result = fpipe.build(program, model, trace=trace)(params, batch, state=state, key=7)
        assert bits(result.grads) == expected_grads


class Wire(torch.autograd.Function):
    """A cast to few bits, forward and backward, as a link does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None) -> Tensor:
        ctx.back = backward_dtype
        return x.clone() if forward_dtype is None else x.to(forward_dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad if ctx.back is None else grad.to(ctx.back).to(grad.dtype), None, None


BF16 = torch.bfloat16
CASTS: dict[str, tuple[Any, torch.dtype | None, torch.dtype | None]] = {
    "both": (BF16, BF16, BF16),
    "forth": ({"y": torch.float16}, torch.float16, None),
    "back": ({"dx": "bfloat16"}, None, BF16),
}


def first_stage(p: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    return {"h": torch.tanh(x @ p["w"]), "ids": x.argmax(1), "half": x.to(BF16), "none": None}


def middle_stage(p: dict[str, Tensor], x: dict[str, Any]) -> dict[str, Any]:
    h = (x["h"] * x["ids"][:, None]) @ p["w"] + x["half"].float()
    return {**x, "h": h}


def last_stage(p: dict[str, Tensor], x: dict[str, Any]) -> Tensor:
    return torch.tanh(x["h"] @ p["w"]) * x["ids"][:, None]


@pytest.mark.crossed
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    ("schedule", "trace"),
    [
        ("gpipe", True),
        ("one_f_one_b", True),
        ("zb_h1", True),
        ("zb_h1", False),
        pytest.param("gpipe", False, marks=pytest.mark.deep),
        pytest.param("one_f_one_b", False, marks=pytest.mark.deep),
    ],
)
def test_a_cast_on_the_wire_is_the_same_under_every_schedule_and_policy(schedule: str, cast: str, trace: bool):
    """Only transfers are rounded: stages 0 and 1 share a rank, a recompute reads the received value, and integers and
    narrow dtypes stay as they are."""
    cast_option, forward_dtype, backward_dtype = CASTS[cast]
    torch.manual_seed(0)
    stages = [first_stage, middle_stage, middle_stage, last_stage]
    model = fpipe.from_functions(stages, nn.functional.mse_loss)
    params = tuple({"w": torch.randn(WIDTH, WIDTH)} for _ in stages)
    batch = batch_of()
    wired = [
        first_stage,
        middle_stage,
        lambda p, x: middle_stage(p, {**x, "h": Wire.apply(x["h"], forward_dtype, backward_dtype)}),
        last_stage,
    ]
    expected = fpipe.reference(fpipe.from_functions(wired, nn.functional.mse_loss), params, batch, microbatches=3)
    for transforms in POLICIES.values():
        program = fpipe.communicate(cast=cast_option)(merged(model, 3, *transforms, SCHEDULES[schedule](2)))
        assert fpipe.Program.parse(str(program)) == program
        result = fpipe.build(program, model, trace=trace)(params, batch)
        assert bits((result.loss, result.grads)) == bits((expected.loss, expected.grads))
        with pytest.raises(fpipe.GradientMismatch):
            fpipe.verify(program, model, params, batch)
        assert fpipe.verify(program, model, params, batch, rtol=0.1, atol=0.02).max_error > 0


@pytest.mark.parametrize("cast", [BF16, {"y": BF16}, {"dx": BF16}])
def test_a_cast_does_not_round_results_sent_to_the_caller(cast: Any):
    """Used to round outputs that travel to another rank. Chimera sends half of its outputs, so the rows of one output
    had two precisions. Its cuts are equal to 1F1B's, so all bits must be equal."""

    def joins(p: dict[str, Tensor], x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh((x[0] + x[1]) @ p["w"])

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"])

    inputs = ["batch", 0, (1, 0), (2, "batch")]  # a skip, whose gradients a stage reads; two gradients of the input
    model = fpipe.from_functions([plain, plain, joins, joins], nn.functional.mse_loss, inputs=inputs)
    torch.manual_seed(0)
    params = tuple({"w": torch.randn(WIDTH, WIDTH)} for _ in range(4))
    results: list[Any] = []
    for schedule in (fpipe.schedules.one_f_one_b(4), fpipe.schedules.chimera(4)):
        start = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model, input_grads=True))
        program = fpipe.communicate(cast=cast)(start)
        result = fpipe.build(program, model)(params, batch_of())
        results.append((result.outputs, result.input_grads, result.loss))
        rounded = {str(op.reads[0]) for op in program.ops if op.kind == "SEND" and op.options}
        crossing_by_name = {"y": ("y[0,0]", "y[1,0]", "y[2,0]"), "dx": ("dx[1,0]", "dx[2,0]", "dx[2,0]:1", "dx[3,0]")}
        for name in crossing_by_name if cast is BF16 else cast:
            assert {value for value in rounded if value.startswith(name) and ",0]" in value} == {
                *crossing_by_name[name]
            }
    assert bits(results[0]) == bits(results[1])


def test_a_cast_does_not_round_a_value_that_is_also_an_output():
    """A value is sent to a rank once for all its readers, so an output keeps its bits for the next stage too."""
    start = fpipe.place([0, 1])(fpipe.program(2))
    for homes, rounded in (((0,), ["y[0,0]", "dx[1,0]"]), ((1,), ["dx[1,0]"])):
        extra_output = fpipe.Output(fpipe.Value("outputs", 0), fpipe.Value("y", 0, 0), homes)
        program = fpipe.communicate(cast=BF16)(fpipe.Program(start.inputs, start.ops, (*start.outputs, extra_output)))
        assert [str(op.reads[0]) for op in program.ops if op.kind == "SEND" and op.options] == rounded


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_cast_rounds_within_the_documented_bound(dtype: torch.dtype, bound: float):
    """The bound of the docstring of `communicate`, for numbers that are neither too large nor too small."""
    model = fpipe.from_functions([lambda p, x: x * p["w"], lambda p, x: x * p["w"]], lambda y, t: y.sum())
    pipeline = fpipe.chain(fpipe.place([0, 1]), fpipe.communicate(cast=dtype))
    x = torch.cat([torch.randn(10**4), torch.linspace(0.001, 60000, 10**4)])
    params = ({"w": torch.ones(())}, {"w": torch.ones(())})
    y = fpipe.build(pipeline(fpipe.program(model)), model)(params, (x, x)).outputs
    error = ((y - x).double() / x.double()).abs()[x.abs() > 1e-4]
    assert bound / 2 < error.max() <= bound


def test_a_cast_halves_the_time_on_a_link():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=nn.functional.mse_loss)
    batch = torch.empty(32, 64, device="meta"), torch.empty(32, 64, device="meta")
    start = merged(model, 4, fpipe.schedules.one_f_one_b(4))
    makespans: list[float] = []
    for cast, message_bytes in ((None, 2048), (BF16, 1024), (torch.float32, 2048)):
        program = fpipe.communicate(cast=cast)(start)
        sizes = fpipe.sizes(program, model, params, batch)
        sent_bytes = {sizes.size(op.writes[0]) for op in program.ops if op.kind == "SEND"}
        assert sent_bytes == {message_bytes}
        costs = fpipe.Costs(0, 0, 0, bytes=sizes, bandwidth=2048.0)
        makespans.append(fpipe.simulate(program, costs).makespan)
        assert fpipe.bounds(program, costs).makespan <= makespans[-1] + 1e-9
    assert makespans[0] == makespans[2] == 2 * makespans[1] > 0


test_cast_refusals = refusals(
    globals(),
    """
fpipe.communicate(cast={"params": BF16})
    ValueError: cast= is of what flows between stages, 'y', 'dx', 'carry', 'dcarry'; found 'params'.
fpipe.communicate(cast=torch.int8)
    ValueError: cast= is a floating dtype, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2; found torch.int8.
""",
)


def test_an_unregistered_class_is_one_leaf():
    """Every microbatch gets the object whole, and no trace relies on it."""

    class Settings:
        scale = 2.0

    model = fpipe.from_functions([lambda p, x: x["x"] * x["how"].scale * p["w"]], nn.functional.mse_loss)
    program = merged(model, 3)
    x, t = batch_of()
    batch = ({"x": x, "how": Settings()}, t)
    with pytest.warns(UserWarning, match="it is handed a Settings, which may change and stay the same object"):
        assert fpipe.verify(program, model, ({"w": torch.randn(WIDTH)},), batch).bitwise
