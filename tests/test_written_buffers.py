"""Buffers that a net writes are found by running it on an example, or are named; they become module state."""

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.transforms._rewrite import Transform
from tests.refusals import refusals
from tests.toys import Toy, assert_unsplit, merged, run_unsplit, state_by_name, two_equal_stages

MSE = nn.functional.mse_loss
ROWS = (torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), torch.ones(10, 8))


class Tracker(nn.Module):
    """Count calls and keep a running mean of the input."""

    count: Tensor
    mean: Tensor

    def __init__(self, style: str = "in place") -> None:
        super().__init__()
        self.style, self.scale = style, nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = torch.tanh(x) * self.scale
        with torch.no_grad():
            if self.style == "in place":
                self.mean.lerp_(x.mean(0), 0.1)
            elif self.style == "another":
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            elif self.style == "out":
                torch.maximum(self.mean, y.amax(0), out=self.mean)
            elif self.style == "a part":
                self.mean[2:] += y[0, 2:]
            elif self.style == "a parameter":
                self.mean.lerp_(self.scale, 0.1)
            else:
                self.mean.lerp_(y.mean(0), 1 / self.count)
        return y


def keep_last(module: Any, x: Tensor) -> Tensor:
    """Keep the first row of the last input, and count positive rows."""
    module.row = x.detach()[0]
    module.hits[(x.detach() > 0).sum(0).clamp(max=2)] += 1
    module.hits.scatter_add_(0, torch.tensor([0, 0, 1]), module.hits.new_ones(3))
    return x * 1.0


def add_to_total(module: Any, x: Tensor) -> Tensor:
    """Read a value that the next module writes in place."""
    y = x * 2
    module.total.add_(y.detach()[0])
    return module.relu(y)


def nested_block(module: Any, x: Tensor) -> Tensor:
    """Count around a tracker that is called two times, norms and linears, under no_grad and autocast."""
    module.calls.add_(1)
    y = module.inner(module.linear(x)) + module.inner(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module.cast.copy_(torch.nn.functional.linear(module.cast + 1, module.linear.weight) + module.linear(x).mean(0))
    return module.norm(y)


def make_nested_block() -> Toy:
    return Toy(
        nested_block,
        calls=torch.zeros(()),
        cast=torch.zeros(8),
        inner=Tracker(),
        norm=nn.BatchNorm1d(8),
        linear=nn.Linear(8, 8),
    )


def normalize_by_mode(module: Any, x: Tensor) -> Tensor:
    """Normalize by the batch in training, and by the running mean in eval."""
    if not module.training:
        return x - module.mean
    mean = x.mean(0)
    module.mean.lerp_(mean.detach(), 0.1)
    return x - mean


def average_with_grad(module: Any, x: Tensor) -> Tensor:
    """Average an output that needs a gradient into a buffer that needs none, which ran under autograd."""
    y = module.linear(x)
    module.mean = 0.9 * module.mean.detach() + 0.1 * y.mean(0)
    return y


def add_outputs(linear: Any, args: Any, out: Tensor) -> None:
    linear.seen += out.detach().sum(0)


def linear_with_hook() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.register_buffer("seen", torch.zeros(8))
    linear.register_forward_hook(add_outputs)
    return linear


def tracker_in_two_places() -> nn.Sequential:
    """Return a net with one module in two places of a stage."""
    tracker = Tracker()
    return nn.Sequential(nn.Linear(8, 8), tracker, tracker, nn.Linear(8, 8), nn.Tanh(), nn.Tanh())


NETS: dict[str, Callable[[], nn.Sequential]] = {
    how: lambda how=how: two_equal_stages(lambda: Tracker(how))
    for how in ("in place", "another", "out", "a part", "a parameter", "by the count")
} | {
    "what was there": lambda: two_equal_stages(
        lambda: Toy(keep_last, row=torch.zeros(8), hits=torch.zeros(3, dtype=torch.long))
    ),
    "written behind it": lambda: two_equal_stages(
        lambda: Toy(add_to_total, total=torch.zeros(8), relu=nn.ReLU(inplace=True))
    ),
    "a norm beside": lambda: two_equal_stages(
        lambda: nn.Sequential(Tracker(), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    ),
    "inside": lambda: two_equal_stages(make_nested_block),
    "by mode": lambda: two_equal_stages(lambda: Toy(normalize_by_mode, mean=torch.zeros(8))),
    "not detached": lambda: two_equal_stages(
        lambda: Toy(average_with_grad, linear=nn.Linear(8, 8), mean=torch.zeros(8))
    ),
    "a hook": lambda: two_equal_stages(linear_with_hook),
    "in two places": tracker_in_two_places,
}
PLANS: dict[str, tuple[Transform, ...]] = {
    "gpipe": (fpipe.schedules.gpipe(2), fpipe.merge()),
    "zb-h1, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(2), fpipe.merge()),
    "layer by layer": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.one_f_one_b(2), fpipe.merge()),
    "among processes": (fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate(), fpipe.free()),
}


@functools.cache
def cut_case(name: str) -> tuple[nn.Sequential, nn.Module, Tensor, Any]:
    """Return a net, its copy after plain autograd, the copy's outputs, and the net cut."""
    net = NETS[name]()
    return net, *run_unsplit(net, ROWS), fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, batch=ROWS)


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NETS)
def test_state_equals_the_unsplit_modules_for_every_plan(name: str, plan: str, trace: bool):
    initial_buffers = {name: buffer.clone() for name, buffer in NETS[name]().named_buffers()}
    net, expected_net, outputs, (model, params, state) = cut_case(name)
    program = fpipe.chain(fpipe.split(4), *PLANS[plan])(fpipe.program(model))
    step = fpipe.build(program, model, trace=trace)
    if trace:
        step(params, ROWS, state=state)
    result = step(params, ROWS, state=state)  # a warning is an error
    assert state_by_name(result).keys() == initial_buffers.keys()
    assert torch.equal(result.outputs, outputs)
    assert_unsplit(model, result, expected_net)
    assert all(torch.equal(initial_buffers[name], buffer) for name, buffer in net.named_buffers())


@pytest.mark.parametrize("plan", ["zb-h1, recomputed", "among processes"])
def test_sizes_predict_the_recorded_peak(plan: str):
    _, _, _, (model, params, state) = cut_case("inside")
    program = fpipe.chain(fpipe.split(4), *PLANS[plan])(fpipe.program(model))
    timeline = fpipe.build(program, model, record=True)(params, ROWS, state=state).timeline
    assert timeline is not None
    assert fpipe.sizes(program, model, params, ROWS, state=state).peak == timeline.peak


def dropout_and_count(module: Any, x: Tensor) -> Tensor:
    """Count kept numbers of a dropout, and add random numbers."""
    y = module.dropout(x)
    module.kept += (y.detach() != 0).sum(0)
    module.kept += torch.rand(8)
    return y


@pytest.mark.parametrize("trace", [True, False])
def test_random_numbers_are_drawn_once(trace: bool):
    model, params, state = fpipe.from_sequential(
        two_equal_stages(lambda: Toy(dropout_and_count, kept=torch.zeros(8), dropout=nn.Dropout(0.5))),
        sizes=[3, 3],
        loss=MSE,
        batch=ROWS,
    )
    expected_net = two_equal_stages(lambda: Toy(dropout_and_count, kept=torch.zeros(8), dropout=nn.Dropout(0.5)))
    for microbatch, x in enumerate(ROWS[0].tensor_split(4)):
        for stage_index, stage in enumerate((expected_net[:3], expected_net[3:])):
            torch.manual_seed(fpipe.fold_in(7, stage_index, microbatch))
            x = stage(x)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        state_after = state_by_name(fpipe.build(program, model, trace=trace)(params, ROWS, state=state, key=7))
        assert all(torch.equal(tensor, expected_net.get_buffer(name)) for name, tensor in state_after.items())


@pytest.mark.parametrize("trace", [True, False])
def test_autocast_holds_for_written_buffers(trace: bool):
    net = two_equal_stages(lambda: Toy(square_and_cast, square=torch.eye(8)))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, batch=ROWS)
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(model))
    with torch.autocast("cpu", torch.bfloat16):
        expected_net, _ = run_unsplit(net, ROWS)
        step = fpipe.build(program, model, trace=trace)
        for _ in range(2):
            result = step(params, ROWS, state=state)
    assert_unsplit(model, result, expected_net)


def square_and_cast(module: Any, x: Tensor) -> Tensor:
    """Multiply a buffer by products of the input, for which autocast matters."""
    h = x.detach()
    module.square = (module.square @ (h.t() @ h)).float() * 0.1
    return torch.tanh(x)


def test_norms_next_to_written_buffers_may_be_deferred():
    net = two_equal_stages(make_nested_block)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, batch=ROWS)
    deferred = fpipe.deferred_batch_norm(model)
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(deferred))
    assert fpipe.verify(program, deferred, params, ROWS, state=state).bitwise
    state_after = fpipe.build(program, deferred)(params, ROWS, state=state).state
    assert state_after is not None
    assert [list(stage) for stage in state_after] == [list(stage) for stage in state]
    assert (state_after[0]["1.norm.num_batches_tracked"], state_after[0]["1.calls"]) == (1, 4)


def append_rows(module: Any, x: Tensor) -> Tensor:
    """Append the input to a buffer."""
    module.all = torch.cat([module.all, x.detach()])
    return torch.tanh(x)


def test_a_buffer_may_grow():
    net = nn.Sequential(nn.Linear(8, 8), Toy(append_rows, all=torch.zeros(0, 8)))
    model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, batch=ROWS)
    step = fpipe.build(merged(model, 4), model)
    first_state = step(params, ROWS, state=state).state
    expected_net, _ = run_unsplit(net, ROWS)
    for tracker_in_two_places in (first_state, step(params, ROWS, state=state).state):
        assert tracker_in_two_places is not None
        assert torch.equal(tracker_in_two_places[0]["1.all"], expected_net.get_buffer("1.all"))


def total_of(module: Any) -> Tensor:
    return module.total


def use_total(use: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Build a module that reaches its buffer by a function outside the class, and uses it by `use`."""

    def forward(module: Any, x: Tensor) -> Tensor:
        y = x * 1
        module.total += y.detach()[0]
        return module.use(y, total_of(module))

    return Toy(forward, total=torch.zeros(8), use=use)


def add_total(y: Tensor, total: Tensor) -> Tensor:
    y += total
    return y


def assign_view(y: Tensor, total: Tensor) -> Tensor:
    total.data = y[0] * 1
    total.mul_(2)
    return y


def assign_detached(y: Tensor, total: Tensor) -> Tensor:
    total.data = y.detach()
    total.mul_(2)
    return y * 1


USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "in the output": (lambda y, total: y * total, ""),
    "a view": (lambda y, total: total.expand(y.shape) * y, ""),
    "into another": (add_total, ""),
    "in place later": (lambda y, total: y.relu_(), ""),
    "its numbers": (lambda y, total: y * float(total.sum()), "_local_scalar_dense"),
    "a question": (lambda y, total: y if total.sum() > 3 else y * 2, "_local_scalar_dense"),
    "its data": (assign_view, "it assigns a tensor's .data, which no trace sees"),
    "its data, shared": (assign_detached, "it assigns a tensor's .data, which no trace sees"),
}


@pytest.mark.crossed
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("use", "reason"), USES.values(), ids=USES.keys())
def test_written_buffers_are_found_by_running_an_example(use: Any, reason: str, trace: bool):
    """A stage that looks at data runs under autograd."""
    net = two_equal_stages(lambda: use_total(use))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, batch=ROWS)
    assert all("state" in stage.keywords for stage in model.stages)
    expected_net, outputs = run_unsplit(net, ROWS)
    step = fpipe.build(merged(model, 4), model, trace=trace)
    with pytest.warns(UserWarning, match=re.escape(reason)) if reason and trace else nullcontext():
        result = step(params, ROWS, state=state)
    assert torch.equal(result.outputs, outputs)
    assert_unsplit(model, result, expected_net)
    assert not net[1].total.any()


def test_an_example_may_be_without_data_where_no_stage_looks_at_any():
    meta = ROWS[0].to("meta")
    model, _, state = fpipe.from_sequential(two_equal_stages(Tracker), sizes=[3, 3], batch=(meta, None))
    assert [list(stage) for stage in state] == [["1.count", "1.mean"], ["4.count", "4.mean"]]
    assert all("state" in stage.keywords for stage in model.stages)


@pytest.mark.parametrize("trace", [True, False])
def test_written_buffers_may_be_named_without_an_example(trace: bool):
    names = [f"{position}.{name}" for position in (1, 4) for name in ("count", "mean")]
    net = two_equal_stages(Tracker)
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=MSE, state=names)
    program = fpipe.chain(fpipe.split(4), *PLANS["gpipe"])(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params, ROWS, state=state)
    assert_unsplit(model, result, run_unsplit(net, ROWS)[0])


META_ROWS = ROWS[0].to("meta")
test_names_of_no_buffer_are_refused = refusals(
    globals(),
    """
fpipe.from_sequential(two_equal_stages(Tracker), sizes=[3, 3], state=["4.odd"])
    ValueError: state= names '4.odd', which is no buffer of the net; these are: 1.count, 1.mean
fpipe.from_sequential(two_equal_stages(lambda: use_total(USES["a question"][0])), sizes=[3, 3], batch=(META_ROWS, None))
    ValueError: Hand in an example with data
""",
)


def count_large_batches(module: Any, x: Tensor) -> Tensor:
    """Write one buffer for all batches, and another for large ones."""
    y = x * 1
    module.seen += y.detach()[0]
    if len(x) > 4:
        module.more += 1
    return y


@pytest.mark.parametrize("trace", [True, False])
def test_a_branch_that_the_example_did_not_take_is_refused_by_name(trace: bool):
    net = nn.Sequential(nn.Linear(8, 8), Toy(count_large_batches, seen=torch.zeros(8), more=torch.zeros(8)))
    model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, batch=(ROWS[0][:3], None))
    assert list(state[0]) == ["1.seen"]
    step = fpipe.build(fpipe.program(model), model, trace=trace)
    sentence = (
        "stage 0 (0, 1) writes buffer or parameter '1.more' in place (aten.add_.Tensor). What a module remembers is "
        "state: cut the net by from_sequential(..., batch=batch), or say state=['1.more']. Or switch"
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        step(params, ROWS, state=state)
    assert not net[1].more.any()


def assign_data(module: Any, x: Tensor) -> Tensor:
    """Write a buffer without an op; this went unseen, and the net was changed by a step."""
    module.mean.data = 0.9 * module.mean.data + x.detach().mean(0)
    return x * 1


def keep_first_mean(module: Any, x: Tensor) -> Tensor:
    """Make a buffer at the first call; the example used to leave a tensor without data in the net."""
    if module.first is None:
        module.first = x.detach().mean(0)
    return x - module.first


def alias_buffers(module: Any, x: Tensor) -> Tensor:
    """Make the second buffer an alias of the first. As separate state they silently gave another loss from the next
    microbatch on."""
    module.first.add_(1.0)
    y = x * module.second.mean() if module.reads else x * 2
    module.second = module.first
    return y


ONE_STORAGE = "stage 0 left buffers '1.first' and '1.second' in one storage. Assign a .clone() to one."
BATCH = {"batch": ROWS}
REFUSED: dict[str, tuple[Callable[[], Toy], dict[str, Any], str]] = {
    "by its data, without an example": (
        lambda: Toy(assign_data, mean=torch.zeros(8)),
        {},
        "assigns the .data of buffer or parameter '1.mean'",
    ),
    "None before": (
        lambda: Toy(keep_first_mean, first=None),
        BATCH,
        "makes a tensor of buffer '1.first', which is None before",
    ),
    "two in one memory": (
        lambda: Toy(alias_buffers, reads=False, first=torch.zeros(8), second=torch.zeros(8)),
        BATCH,
        ONE_STORAGE,
    ),
    "two in one memory, read": (
        lambda: Toy(alias_buffers, reads=True, first=torch.zeros(8), second=torch.zeros(8)),
        BATCH,
        ONE_STORAGE,
    ),
}


@pytest.mark.filterwarnings("ignore:.*runs under autograd")
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("make_module", "options", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_writes_that_are_no_state_are_refused_by_name_and_the_net_stays(
    make_module: Any, options: Any, sentence: str, trace: bool
):
    net = nn.Sequential(nn.Linear(8, 8), make_module())
    initial_buffers = dict(net[1]._buffers)

    def run() -> None:
        model, params, state = fpipe.from_sequential(net, stages=1, loss=MSE, **options)
        fpipe.build(fpipe.program(model), model, trace=trace)(params, ROWS, state=state)

    with pytest.raises((ValueError, RuntimeError), match=re.escape(sentence)):
        run()
    assert all(buffer is initial_buffers[name] for name, buffer in net[1]._buffers.items())
    assert not any(buffer.any() for buffer in net.buffers() if "first" not in initial_buffers)


def write_containers(module: Any, x: Tensor) -> Tensor:
    """Write tensors and a number in lists, and clamp weights where data are looked at."""
    module.calls[0] += 1
    module.means[0] = 0.9 * module.means[0] + x.detach().mean(0)
    if module.looks and x.sum() > -1e9:
        module.linear.weight.data = module.linear.weight.data.clamp(-0.1, 0.1)
    return module.linear(x)


@pytest.mark.parametrize("looks", [False, True])
def test_the_example_leaves_the_net_as_it_was(looks: bool):
    """The example used to leave fake tensors in lists, moved counters and clamped weights."""
    net = nn.Sequential(
        nn.Linear(8, 8), Toy(write_containers, means=[torch.zeros(8)], calls=[0], looks=looks, linear=nn.Linear(8, 8))
    )
    mean, weight = net[1].means[0], net[1].linear.weight.detach().clone()
    fpipe.from_sequential(net, stages=1, loss=MSE, batch=ROWS)
    assert net[1].means[0] is mean
    assert net[1].calls == [0]
    assert torch.equal(net[1].linear.weight, weight)


def normalize_three_rows(module: Any, x: Tensor) -> Tensor:
    """Count, and normalize batches of three rows."""
    module.count += 1
    return module.norm(x) if len(x) == 3 else x


@pytest.mark.parametrize("trace", [True, False])
def test_norms_that_did_not_run_are_updated_beside_a_counter(trace: bool):
    """The update of norm and counter was taken for the counter's alone, and failed on the int of the deferred norm."""
    net = nn.Sequential(
        nn.Linear(4, 4), Toy(normalize_three_rows, norm=nn.BatchNorm1d(4), count=torch.zeros(())), nn.Linear(4, 2)
    )
    batch = torch.randn(8, 4), torch.randn(8, 2)
    model, params, state = fpipe.from_sequential(net, sizes=[2, 1], loss=MSE, batch=batch)
    model = fpipe.deferred_batch_norm(model)
    state_after = fpipe.build(merged(model, 3), model, trace=trace)(params, batch, state=state).state
    expected = fpipe.reference(model, params, batch, microbatches=3, state=state).state
    assert state_after is not None
    assert state_after[0]["1.count"] == 3
    assert [stage.keys() for stage in state_after] == [stage.keys() for stage in expected or ()]
    assert all(
        torch.equal(buffer, (expected or ())[0][name])
        for name, buffer in state_after[0].items()
        if "gathered" not in name
    )
