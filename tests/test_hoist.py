"""What depends on parameters alone is computed once for all microbatches, with the bits of a plain loop."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe.meaning.single_device.result import Result
from tests.processes import Processes
from tests.test_data_parallel import by_hand, meshed, started
from tests.test_distributed import MSE
from tests.test_shard import differing_names
from tests.test_update import differences

MICROBATCHES, WIDTH = 4, 6


class Einsum(nn.Module):
    """Multiply by a weight whose transpose an einsum copies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,hdi->bhd", x, self.weight).flatten(1).tanh()


class LowRank(nn.Module):
    """Add a product of two small matrices to a frozen weight, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.frozen + self.up @ self.down)


class Upcast(nn.Module):
    """Compute in float32 with a bfloat16 weight, whose copy is larger than the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float())


class Masked(nn.Module):
    """Draw a mask from a parameter's exponential, and add a tensor that depends on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dropped = nn.functional.dropout(self.scale.exp().expand(len(x), -1), 0.5, self.training)
        return x * dropped + torch.arange(WIDTH).sin()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tied": lambda: nn.Linear(WIDTH, WIDTH),
    "weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "einsum": Einsum,
    "low rank": LowRank,
    "upcast": Upcast,
    "masked": Masked,
}


def net_of(layer: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [LAYERS[layer]() if index % 2 == 0 else nn.Tanh() for index in range(7)]
    if layer == "tied":
        layers[4].weight = layers[0].weight
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def batch_of(rows: int = 4 * MICROBATCHES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 1, generator=generator)


def program_of(model: fpipe.Model, schedule: str = "zb_h1", *parts: fpipe.Transform) -> fpipe.Program:
    chained = fpipe.split(MICROBATCHES), fpipe.schedules.get(schedule)(2), fpipe.merge(outputs=False), *parts
    return fpipe.chain(*chained)(fpipe.program(model))


def backward_in_a_loop(net: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Add up the gradients of each microbatch in `.grad`, as a plain training loop does; return the loss."""
    losses = list[Tensor]()
    net.zero_grad()
    for x, target in zip(*(half.tensor_split(MICROBATCHES) for half in batch), strict=True):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            losses.append(MSE(net(x), target) / MICROBATCHES)
        losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


class CastCounter(TorchDispatchMode):
    """Counts the casts of each tensor, by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.count_by_address = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count_by_address[args[0].data_ptr()] += 1
        return func(*args, **kwargs or {})


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name not in ("masked", "tied")])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "checkpointed"])
@pytest.mark.parametrize("hoist", [True, False])
def test_a_hoisted_step_has_the_bits_of_a_plain_loop(hoist: bool, schedule: str, layer: str, dtype: torch.dtype | None):
    net, batch = net_of(layer), batch_of()
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    name, parts = ("one_f_one_b", [fpipe.checkpoint()]) if schedule == "checkpointed" else (schedule, [])
    result = fpipe.build(program_of(model, name, *parts), model, autocast=dtype, hoist=hoist)(params, batch)
    assert torch.equal(result.loss, backward_in_a_loop(net, batch, dtype))
    grads = fpipe.join_params(model, result.grads)
    for path, parameter in net.named_parameters():
        assert not parameter.requires_grad or torch.equal(grads[path], parameter.grad)


@pytest.mark.parametrize("layer", ["masked", "tied"])
def test_a_hoisted_step_has_the_bits_of_a_step_without_traces(layer: str):
    """A mask is drawn in memory that depends on nothing; two stages cast one weight and add up its gradients."""
    model, params, _ = fpipe.from_sequential(net_of(layer), stages=2, loss=MSE)
    steps = [fpipe.build(program_of(model), model, trace=trace, autocast=torch.bfloat16) for trace in (True, False)]
    traced, untraced = (step(params, batch_of(), key=3) for step in steps)
    assert torch.equal(traced.loss, untraced.loss)
    pairs = zip(fpipe.tree.leaves(traced.grads), fpipe.tree.leaves(untraced.grads), strict=True)
    assert all(torch.equal(grad, expected) for grad, expected in pairs)


@pytest.mark.parametrize("hoist", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_autocast_casts_each_weight_once_a_step(schedule: str, hoist: bool):
    model, params, _ = fpipe.from_sequential(net_of("linear"), stages=2, loss=MSE)
    step = fpipe.build(program_of(model, schedule), model, autocast=torch.bfloat16, hoist=hoist, audit="never")
    step(params, batch_of())
    with CastCounter() as counter:
        step(params, batch_of())
    counts = [counter.count_by_address[leaf.data_ptr()] for leaf in fpipe.tree.leaves(params)]
    assert counts == [1 if hoist else MICROBATCHES] * len(counts)


def test_a_cast_weight_is_no_residual():
    model, params, _ = fpipe.from_sequential(net_of("linear"), stages=2, loss=MSE)
    program = program_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        bytes_of = [fpipe.sizes(program, model, params, batch_of(), hoist=hoist).bytes for hoist in (True, False)]
    hoisted, computed = (sizes[fpipe.Value("res", 1, 0)] for sizes in bytes_of)
    # Three linear layers of the second stage, of which the last has one row.
    assert computed - hoisted == (2 * WIDTH * WIDTH + WIDTH) * torch.bfloat16.itemsize


def test_a_larger_tensor_that_no_backward_reads_is_computed_in_each_op():
    """The bias of each pair of positions, looked up in a small table, would stay in memory for each layer."""

    def stage(params: Tensor, x: Tensor) -> Tensor:
        return x + params.unsqueeze(0).add(params.unsqueeze(1)).mean()

    model = fpipe.from_functions([stage], loss=MSE)
    program, batch = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), (torch.ones(4), torch.ones(4))
    peaks = [fpipe.sizes(program, model, (torch.rand(64),), batch, hoist=hoist).peak for hoist in (True, False)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_larger_tensor_that_backwards_read_is_computed_once(schedule: str):
    """Each microbatch in flight used to hold a float32 copy of the weight, which took a quarter of a short step."""
    model, params, _ = fpipe.from_sequential(net_of("upcast"), stages=2, loss=MSE)
    program = program_of(model, schedule)
    peaks = [fpipe.sizes(program, model, params, batch_of(), hoist=hoist).peak for hoist in (True, False)]
    assert all(hoisted <= computed for hoisted, computed in zip(*peaks, strict=True))
    assert sum(peaks[0]) < sum(peaks[1])
    step = fpipe.build(program, model, audit="never")
    step(params, batch_of())
    with CastCounter() as counter:
        step(params, batch_of())
    halves = [leaf for leaf in fpipe.tree.leaves(params) if leaf.dtype is torch.bfloat16]
    # The first stage's input wants no gradient, so no backward reads the first weight.
    assert [counter.count_by_address[leaf.data_ptr()] for leaf in halves] == [MICROBATCHES, 1, 1, 1]


def test_an_audit_reads_parameters_with_their_strides():
    """An audit copied a weight with gaps to dense memory, for which addmm rounds otherwise."""
    for seed in range(8):
        torch.manual_seed(seed)
        params = (torch.randn(8, 8)[::2, ::2], torch.randn(8)[::2])
        model = fpipe.from_functions([lambda params, x: nn.functional.linear(x, *params)], loss=MSE)
        step = fpipe.build(fpipe.program(model), model, audit="always")
        assert step((params,), (torch.randn(1, 4), torch.randn(1, 4))).loss > 0


def test_a_check_of_a_parameter_still_raises():
    def stage(params: Tensor, x: Tensor) -> Tensor:
        torch._assert_async((params > 0).all())
        return x * params.exp()

    model = fpipe.from_functions([stage], loss=MSE)
    step = fpipe.build(fpipe.program(model), model)
    batch = torch.ones(2), torch.ones(2)
    assert step((torch.ones(2),), batch).loss > 0
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        step((-torch.ones(2),), batch)


@pytest.mark.parametrize("runtime", ["local", "threads"])
@pytest.mark.parametrize("donate", [True, False])
def test_each_version_of_the_parameters_is_cast_once(runtime: Any, donate: bool):
    # Two training steps in one program: the second reads what the UPDATE of the first has written.
    net, results = net_of("weight_norm"), list[Result]()
    for hoist in (True, False):
        model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
        program = program_of(model, "zb_h1", fpipe.update("SGD"), fpipe.steps(2))
        step = fpipe.build(program, model, runtime=runtime, donate=donate, autocast=torch.bfloat16, hoist=hoist)
        results.append(step(params, [batch_of(), batch_of()], opt=fpipe.optimizer_state(program, params), lr=0.1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        backward_in_a_loop(net, batch_of(), torch.bfloat16)
        optimizer.step()
    for result in results:
        assert differences(net, optimizer, result) == []


@pytest.mark.crossed
@pytest.mark.parametrize("hoist", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_sizes_count_what_is_kept(schedule: str, layer: str, hoist: bool):
    model, params, _ = fpipe.from_sequential(net_of(layer), stages=2, loss=MSE)
    program, batch = program_of(model, schedule), batch_of()
    step = fpipe.build(program, model, autocast=torch.bfloat16, hoist=hoist, record=True)
    with torch.autocast("cpu", torch.bfloat16):
        sizes = fpipe.sizes(program, model, params, batch, hoist=hoist)
    assert step(params, batch, key=3).timeline.peak == tuple(map(float, sizes.peak))


def gradients_that_differ(rank: int, gather: str) -> list[str]:
    """Name the gathered gradients that differ from a plain loop over the rows of both replicas."""
    _, replica, _ = meshed()
    net, batches = net_of("weight_norm"), [tuple(half.chunk(2)[index] for half in batch_of(32)) for index in range(2)]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = fpipe.shard(gather=gather)(program_of(model))  # type: ignore[arg-type]
    step, shards = started(model, params, program, batches[replica], autocast=torch.bfloat16)
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)  # type: ignore[method-assign]
    return differing_names(step(shards, batches[replica]).grads, by_hand(net, batches, MICROBATCHES)[1])


@pytest.mark.parametrize("gather", ["step", "use"])
def test_gathered_parameters_are_cast_as_whole_ones(four: Processes, gather: str):
    assert four.run(gradients_that_differ, gather) == [[]] * 4
