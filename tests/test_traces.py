"""Traced steps: when a trace is made, which stages share it, its results and memory, and steps without a trace."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from fpipe.graphs.tracing import trace_cache
from fpipe.tree import leaves, tree_map
from tests.toys import Ops, Toy, merged

TRACES = trace_cache


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of each trace that is made."""
    names: list[str] = []
    for name in ("trace", "outline"):
        function = getattr(TRACES, name)
        monkeypatch.setattr(
            TRACES, name, lambda *args, name_of=name, wrapped=function: names.append(name_of) or wrapped(*args)
        )
    return names


def attention(width: int = 64, heads: int = 4) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def blocks(n: int = 4, loss: Callable[..., Tensor] = squares) -> tuple[fpipe.Model, tuple, tuple[Tensor, Tensor]]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)))
    model, params, _ = fpipe.from_sequential(net, stages=n, loss=loss)
    return model, params, (torch.randn(8, 8), torch.randn(8, 8))


def program(model: fpipe.Model, *steps, m: int = 4, ranks: int | None = None) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(ranks or len(model.stages))
    return merged(model, m, *steps, schedule)


def equal_bits(result: fpipe.Result, expected: fpipe.Result) -> bool:
    """Compare bits of results; a stage without a trace has zeros for parameters that it does not read."""
    pairs = zip(leaves((result.loss, result.grads)), leaves((expected.loss, expected.grads)), strict=True)
    return all(a is b or torch.equal(a, torch.zeros_like(a) if b is None else b) for a, b in pairs)


# What is traced when.


def test_equal_stages_share_one_trace(traced: list[str]):
    model, params, batch = blocks(4, loss=lambda y, target: squares(y, target))
    fpipe.build(program(model), model)(params, batch)
    assert traced.count("trace") == 2  # a stage and the loss


def test_equal_blocks_inside_of_stages_share_one_trace(traced: list[str]):
    """Stages with an embedding or a head next to equal blocks used to be traced as a whole."""
    layers = {"embed": nn.Linear(32, 64), "blocks": nn.Sequential(*(attention() for _ in range(4)))}
    net = Toy(lambda module, x: module.head(module.blocks(module.embed(x))), **layers, head=nn.Linear(64, 32))
    batch = torch.randn(4, 8, 32), torch.randn(4, 8, 32)
    model, params, _ = fpipe.from_module(net, 2, loss=squares, batch=batch)
    fpipe.build(program(model, m=2), model)(params, batch)
    parts = ["sizes of the batch", "embedding", "block", "sizes of activations", "head", "loss"]
    assert traced.count("trace") == len(parts)


def test_an_example_without_data_is_traced_at_once(traced: list[str]):
    model, params, batch = blocks()
    meta = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program(model), model, example=meta)
    assert "trace" in traced
    traced.clear()
    assert equal_bits(step(params, batch), fpipe.reference(model, params, batch, microbatches=4))
    assert traced == []


class NeedsInputGrad(torch.autograd.Function):
    """Multiply, with another weight gradient where the input needs none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (dy @ w.t(), x.t() @ dy) if ctx.needs_input_grad[0] else (None, x.t() @ dy * 3)


def needs_input_grad(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(NeedsInputGrad.apply(x, p["w"]))


def checkpointed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(x @ p["w"]), x, use_reentrant=False)


@pytest.mark.parametrize(("stage", "traces"), [(needs_input_grad, 2), (checkpointed, 1)])
@pytest.mark.parametrize("steps", [(), (fpipe.split_backward(),)])
def test_stages_whose_backward_asks_for_needed_gradients_are_traced_for_each_need(
    stage, traces, steps, traced: list[str]
):
    """The stage that takes the batch used to run the trace of later stages, whose inputs need a gradient."""
    params, batch = tuple({"w": torch.randn(8, 8)} for _ in range(3)), (torch.randn(8, 8), torch.randn(8, 8))
    model = fpipe.from_functions([lambda p, x: stage(p, x)] * 3, loss=lambda y, target: squares(y, target))
    step = fpipe.build(program(model, *steps), model)
    result = step(params, batch)
    assert traced.count("trace") == traces + 1  # the loss
    assert equal_bits(result, fpipe.reference(model, params, batch, microbatches=4))


# What a module is when the step runs, not when it was traced.


def masked() -> nn.Module:
    layers = {"linear": nn.Linear(8, 8), "frozen": nn.Linear(8, 8).requires_grad_(False)}
    return Toy(lambda module, x: module.frozen(module.linear(x)) * module.mask, **layers, mask=torch.ones(8))


def test_buffers_and_frozen_parameters_are_read_at_each_step(traced: list[str]):
    net = nn.Sequential(masked(), masked())
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    batch = torch.randn(8, 8), torch.randn(8, 8)
    step = fpipe.build(program(model), model)
    step(params, batch)
    net[0].mask = torch.randn(8)
    net[1].mask.mul_(3)
    net[1].frozen.weight.data.normal_()
    traced.clear()
    assert equal_bits(step(params, batch), fpipe.reference(model, params, batch, microbatches=4))
    assert traced == []


# What it computes.


def flops(run: Callable[[], object]) -> int:
    run()  # traced before it is counted
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_a_step_has_the_flops_of_autograd_and_a_recompute_adds_a_forward():
    net = nn.Sequential(*(attention(16, 2) for _ in range(3)))
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=squares)
    batch = torch.randn(6, 8, 16), torch.randn(6, 8, 16)

    def eager() -> None:
        for x, target in zip(*(leaf.tensor_split(3) for leaf in batch), strict=True):
            squares(net(x), target).backward()

    flops_by_kinds = {
        name: flops(lambda steps=steps: fpipe.build(program(model, *steps, m=3), model, audit="never")(params, batch))
        for name, steps in {
            "B": (),
            "I W": (fpipe.split_backward(),),
            "R B": (fpipe.checkpoint(),),
            "R I W": (fpipe.checkpoint(), fpipe.split_backward()),
        }.items()
    }
    with torch.no_grad():
        forward = flops(lambda: net(batch[0]))
    eager_flops = flops(eager)
    assert flops_by_kinds["B"] == flops_by_kinds["I W"] == eager_flops
    # A recompute leaves out what no backward reads: the last product of each stage but the one that the loss follows.
    last_product = 2 * 2 * batch[0].numel() * 4 * 16
    assert flops_by_kinds["R B"] == flops_by_kinds["R I W"] == eager_flops + forward - last_product


# What it holds.


class Peak(TorchDispatchMode):
    """Measure the peak of bytes that ops allocate while this mode is on."""

    def __init__(self, inputs: object) -> None:
        super().__init__()
        self.input_storages = {StorageWeakRef(leaf.untyped_storage()) for leaf in leaves(inputs)}
        self.bytes_by_storage: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for leaf in leaves(outputs):
            if isinstance(leaf, Tensor):
                self.bytes_by_storage[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self.bytes_by_storage = {
            storage: size for storage, size in self.bytes_by_storage.items() if not storage.expired()
        }
        self.peak = max(
            self.peak,
            sum(size for storage, size in self.bytes_by_storage.items() if storage not in self.input_storages),
        )
        return outputs


PERCEPTRON = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))


def test_residuals_stay_unless_it_is_their_last_read():
    params, x = {"w": torch.randn(4, 4)}, torch.randn(2, 4)
    linearized = fpipe.linearize(lambda p, x: torch.tanh(x @ p["w"]), params, x)
    y, res = linearized.forward(params, x)
    residuals = [*res]
    grads, second_grads = (linearized.backward(params, res, y) for _ in range(2))
    assert all(linearized is residual for linearized, residual in zip(res, residuals, strict=True))
    assert all(map(torch.equal, leaves(grads), leaves(second_grads)))
    with pytest.raises(TypeError, match="last=True empties res: hand in the list itself, found tuple"):
        linearized.backward(params, tuple(res), y, last=True)


@pytest.mark.parametrize(
    ("net", "x"),
    [(attention(), torch.randn(12, 128, 64)), (PERCEPTRON, torch.randn(768, 64))],
    ids=["attention", "perceptron"],
)
@pytest.mark.parametrize("steps", [(), (fpipe.split_backward(),)], ids=["B", "I W"])
def test_a_step_needs_no_more_memory_than_autograd(net: nn.Module, x: Tensor, steps):
    target = torch.randn_like(x)
    for leaf in net.parameters():
        leaf.grad = torch.zeros_like(leaf)
    inputs = [x, target, *net.parameters(), *(leaf.grad for leaf in net.parameters())]
    with Peak(inputs) as eager:
        for x_part, target_part in zip(x.tensor_split(3), target.tensor_split(3), strict=True):
            F.mse_loss(net(x_part), target_part).backward()
    model, params, _ = fpipe.from_sequential(nn.Sequential(net), stages=1, loss=F.mse_loss)
    pipeline = fpipe.chain(fpipe.split(3), *steps, fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    step = fpipe.build(pipeline(fpipe.program(model)), model, audit="never")
    step(params, (x, target))
    with Peak([x, target, params]) as ours:
        step(params, (x, target))
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in net.parameters())
    assert ours.peak - gradients <= eager.peak


# What cannot be traced.


def branch_on_data(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ p["w"] + p["b"] @ p["e"] if x.sum() > 0 else (x * 2) @ p["w"] + p["b"]


def smooth(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


STEPS = {"B": (), "I W": (fpipe.split_backward(),), "R": (fpipe.checkpoint(),)}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("untraced", [(1,), (0, 2), (0, 1, 2)], ids=str)
def test_a_stage_that_looks_at_data_runs_among_traced_ones(untraced: tuple[int, ...], steps, traced: list[str]):
    """W used to take the first bundle that I left for all of it, which is right for one parameter only."""

    def traced_stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"] @ p["e"])

    ties = [((0, "e"), (1, "e"), (2, "e"))]
    model = fpipe.from_functions(
        [branch_on_data if n in untraced else traced_stage for n in range(3)], loss=squares, ties=ties
    )
    params = tuple({"w": torch.randn(4, 4), "b": torch.randn(4), "unused": torch.randn(2)} for _ in range(3))
    params[0]["e"] = torch.randn(4, 4)
    batch = torch.randn(7, 4), torch.randn(7, 4)
    step = fpipe.build(program(model, *steps, m=3), model)
    with pytest.warns(UserWarning, match="a stage runs under autograd, without a trace") as warnings:
        results = [step(params, batch) for _ in range(3)]
    expected = fpipe.reference(model, params, batch, microbatches=3)
    assert all(equal_bits(result, expected) for result in results)
    assert [str(warning.message).split(": ")[1] for warning in warnings] == [
        f"stage {n} (branch_on_data)" for n in untraced
    ]
    assert ("trace" in traced) == (len(untraced) < 3)


def sparse(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ p["w"]).to_sparse()


OFFSETS = torch.tensor([0, 1, 3])  # one for F and R: torch takes jagged sizes to be equal by this tensor's identity


def jagged(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x @ p["w"], OFFSETS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    ("sparse_stage", "dense"), [(sparse, Tensor.to_dense), (jagged, lambda x: x.values())], ids=["sparse", "jagged"]
)
def test_tensors_of_another_layout_flow_between_stages_under_autograd(sparse_stage: Any, dense: Any, steps):
    """They have no strides and no alias, which ended the step and the reference in an error of torch."""
    model = fpipe.from_functions([sparse_stage, lambda p, x: smooth(p, dense(x))], lambda y, t: (y * y).sum() + t.sum())
    params = tuple({"w": torch.randn(4, 4)} for _ in range(2))
    batch = torch.randn(6, 4), torch.randn(6, 4)
    step = fpipe.build(fpipe.chain(fpipe.split(2), *steps, fpipe.merge(outputs=False))(fpipe.program(model)), model)
    with pytest.warns(UserWarning, match="this step runs every stage under autograd, without a trace"):
        results = [step(params, batch), step(params, batch)]
    expected = fpipe.reference(model, params, batch, microbatches=2)
    assert all(equal_bits(result, expected) for result in results)


LAYOUTS: dict[str, tuple[Any, Any, str]] = {
    "sparse": (Tensor.to_sparse, torch.sparse.mm, "tensor of layout torch.sparse_coo"),
    "jagged": (
        lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
        lambda x, w: (x @ w).values(),
        "nested tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_of_another_layout_is_presplit_or_replicated(name: str):
    """Such a batch used to end in an error of torch, about narrow() or strides."""
    to_layout, product, kind = LAYOUTS[name]
    model = fpipe.from_functions([lambda p, x: product(x, p["w"])], lambda y, t: (y * t.sum()).sum(), reduction="sum")
    params, xs = ({"w": torch.randn(4, 4)},), torch.randn(2, 3, 4)
    targets = torch.randn(2, to_layout(xs[0]).size(0))
    replicated = fpipe.split(2, (fpipe.Replicate(), fpipe.Chunk()))
    cases = {
        "cut already": (fpipe.split(2, presplit=True), [(to_layout(x), t) for x, t in zip(xs, targets, strict=True)]),
        "whole": (replicated, (to_layout(xs[0]), targets.flatten())),
    }
    for split, batch in cases.values():
        step = fpipe.build(fpipe.chain(split, fpipe.merge(outputs=False))(fpipe.program(model)), model)
        with pytest.warns(UserWarning, match=f"it is handed a {kind}"):
            result = step(params, batch)
        w = params[0]["w"].clone().requires_grad_()
        pairs = batch if isinstance(batch, list) else [(batch[0], t) for t in targets]
        for x, t in pairs:
            (product(x, w) * t.sum()).sum().backward()
        assert torch.equal(result.grads[0]["w"], w.grad)
    step = fpipe.build(merged(model, 2), model, trace=False)
    message = (
        f"inputs is a {kind}, of which torch has no part as a view: hand in a list of microbatches, to split(m, pre"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        step(params, (to_layout(xs[0]), targets[0]))


def assigned(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = x @ p["w"]
    y.data = y.detach() * 2
    return y * y


def filled(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = torch.zeros(2, 4)
    y.data = x * 2
    return y @ p["w"]


@pytest.mark.parametrize("stage", [assigned, filled])
def test_a_tensor_with_assigned_data_has_the_new_data(stage: Any):
    """A trace silently went on with the tensor's former data, with wrong outputs and gradients."""
    model = fpipe.from_functions([stage], loss=squares)
    params, (x, t) = ({"w": torch.randn(4, 4)},), torch.randn(2, 6, 4)
    step = fpipe.build(merged(model, 3), model)
    with pytest.warns(UserWarning, match=r"it assigns a tensor's \.data, which no trace sees"):
        step(params, (x, t))
    assert equal_bits(step(params, (x, t)), fpipe.reference(model, params, (x, t), microbatches=3))


def test_bytes_that_torch_func_saves_cannot_be_recorded():
    """The error used to be torch's, which asks to open an issue."""

    def slope(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.grad(lambda a: (a @ p["w"]).sin().sum())(x)

    model = fpipe.from_functions([slope], loss=squares)
    run = fpipe.build(program(model, m=2, ranks=1), model, trace=False, record=True)
    with pytest.raises(RuntimeError, match=r"stage 0 \(slope\) runs under autograd and calls torch.func"):
        run(({"w": torch.randn(4, 4)},), (torch.randn(6, 4), torch.randn(6, 4)))


def test_an_error_that_depends_on_numbers_is_raised_without_a_second_run():
    """After any RuntimeError the step used to run again without a trace, even if it was out of memory."""
    calls: list[int] = []

    def gather(p: dict[str, Tensor], x: Tensor) -> Tensor:
        calls.append(1)
        return p["w"].gather(1, x.long())

    model = fpipe.from_functions([gather], loss=squares)
    step = fpipe.build(program(model, m=1, ranks=1), model, audit="never")
    params, index = ({"w": torch.randn(4, 4)},), torch.ones(4, 4)
    expected, call_count = step(params, (index, index)), len(calls)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        step(params, (9 * index, index))
    assert equal_bits(step(params, (index, index)), expected)
    assert len(calls) == call_count


def test_without_traces_the_python_of_a_stage_runs_every_time():
    calls: list[int] = []

    def counting(p: dict[str, Tensor], x: Tensor) -> Tensor:
        calls.append(1)
        return smooth(p, x)

    model = fpipe.from_functions([counting], loss=squares)
    params, batch = ({"w": torch.eye(4)},), (torch.randn(6, 4), torch.randn(6, 4))
    untraced_step = fpipe.build(program(model, m=3), model, trace=False)
    untraced_step(params, batch)
    untraced_step(params, batch)
    assert len(calls) == 6
    step = fpipe.build(program(model, m=3), model, audit="never")
    step(params, batch)
    calls.clear()
    assert equal_bits(step(params, batch), untraced_step(params, batch))
    assert len(calls) == 3  # the plain one's


# Found by a review, each once wrong without a word.


def test_a_gradient_that_is_a_constant_is_not_added_to():
    five = torch.full((4,), 5.0)
    rules = fpipe.custom_stage(lambda p, x: (x * p["w"], ()), lambda p, res, dy: (dy, ()), lambda p, wres: {"w": five})
    model = fpipe.from_functions([rules], loss=squares)
    step = fpipe.build(program(model, m=2), model)
    for _ in range(2):
        result = step(({"w": torch.ones(4)},), (torch.randn(4, 4), torch.randn(4, 4)))
        assert result.grads[0]["w"].tolist() == [10.0] * 4
    assert five.tolist() == [5.0] * 4


def linear_of_another(linear: nn.Linear) -> nn.Module:
    """Read the weight of a module that is not a child."""
    return Toy(lambda module, x: x @ module.other[0].weight.detach().t(), other=[linear])


def test_a_module_that_reads_another_module_shares_no_trace():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    net = nn.Sequential(first, linear_of_another(first), second, linear_of_another(first))
    model, params, _ = fpipe.from_sequential(net, sizes=[2, 2], loss=squares)
    batch = torch.randn(8, 8), torch.randn(8, 8)
    result = fpipe.build(program(model), model)(params, batch)
    assert equal_bits(result, fpipe.build(program(model), model, trace=False)(params, batch))


def test_an_operand_that_repeats_one_number_is_not_probed():
    model = fpipe.from_functions([lambda p, x: x[:, :1].expand_as(x) @ p["w"].t()], loss=squares)
    params, batch = ({"w": torch.randn(4, 4)},), (torch.randn(4, 4), torch.randn(4, 4))
    result = fpipe.build(program(model, m=2), model)(params, batch)
    assert equal_bits(result, fpipe.reference(model, params, batch, microbatches=2))


def test_attention_without_gradients_is_one_op_in_a_step():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    model, params, _ = fpipe.from_sequential(nn.Sequential(layer, nn.Linear(8, 8)), stages=2, loss=squares)
    step, batch = fpipe.build(program(model, m=2), model, audit="never"), (torch.randn(4, 3, 8), torch.randn(4, 3, 8))
    assert equal_bits(step(params, batch), fpipe.reference(model, params, batch, microbatches=2))
    with Ops() as ops:
        step(params, batch)
    assert ops.count_by_op["aten._transformer_encoder_layer_fwd.default"] == 2


def test_a_leaf_that_cannot_be_compared_is_named_as_the_reason():
    model = fpipe.from_functions([lambda p, x: x["x"] @ p["w"]], loss=squares)
    params, x, target = ({"w": torch.randn(4, 4)},), torch.randn(4, 4), torch.randn(4, 4)
    step = fpipe.build(fpipe.program(model), model)
    with pytest.warns(UserWarning, match="a leaf cannot be compared .*unhashable type: 'set'"):
        result = step(params, ({"x": x, "names": {1, 2}}, target))
    assert equal_bits(result, fpipe.reference(model, params, ({"x": x, "names": {1, 2}}, target)))


def test_one_and_true_are_not_one_input():
    def add_kind(p: dict[str, Tensor], x: Tensor, *, microbatch: int) -> object:
        return x @ p["w"], (1, True)[microbatch]

    def read_kind(p: dict[str, Tensor], x: tuple[Tensor, object]) -> Tensor:
        return x[0] * p["w"] if x[1] is True else x[0].tanh() * p["w"]

    stages = fpipe.Stage(add_kind, keywords=frozenset({"microbatch"})), fpipe.Stage(read_kind)
    model = fpipe.Model(stages, squares, ("batch", 0))
    params, batch = ({"w": torch.randn(4, 4)}, {"w": torch.randn(4)}), (torch.randn(4, 4), torch.randn(4, 4))
    pipeline = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))
    result = fpipe.build(pipeline(fpipe.program(model)), model)(params, batch)
    assert equal_bits(result, fpipe.reference(model, params, batch, microbatches=2))


@pytest.mark.parametrize("trace", [True, False])
def test_a_parameter_as_an_output_is_averaged_as_any_other_number(trace: bool):
    # It is one object in all microbatches of a traced step, and was handed back itself.
    def stage(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return x * p["w"], p["w"]

    model = fpipe.from_functions([stage], loss=lambda y, target: squares(y[0], target) + y[1])
    params, batch = ({"w": torch.tensor(0.1)},), (torch.randn(7, 4), torch.randn(7, 4))
    result = fpipe.build(program(model, m=3), model, trace=trace)(params, batch)
    expected = fpipe.reference(model, params, batch, microbatches=3)
    assert equal_bits(result, expected)
    assert torch.equal(result.outputs[1], expected.outputs[1])
    result.outputs[1].zero_()
    assert params[0]["w"] == 0.1


LOOKS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("position", [0, 1])
def test_autograd_attributes_of_a_tensor_read_as_without_a_trace(position: int, look: str):
    """An input of the batch used to run the trace of later stages, if equal ops ran with other numbers."""

    def needs_input_grad(p: Any, x: Tensor) -> Tensor:
        return x * p["w"] * (2 if LOOKS[look](x) else 3)

    functions = [needs_input_grad, lambda p, x: x * p["w"]]
    model = fpipe.from_functions(functions[:: -1 if position else 1], nn.functional.mse_loss)
    params, batch = tuple({"w": torch.ones(4)} for _ in functions), (torch.randn(6, 4), torch.zeros(6, 4))
    result = fpipe.build(merged(model, 2), model)(params, batch)
    assert torch.equal(result.outputs, fpipe.reference(model, params, batch, microbatches=2).outputs)


class Tripled(Tensor):
    """A tensor whose products are three times as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is Tensor.matmul else result


def test_a_tensor_with_functions_of_its_own_keeps_them():
    model = fpipe.from_functions([lambda p, x: x.matmul(p["w"])], lambda y, t: y.sum())
    batch = torch.ones(2, 4).as_subclass(Tripled), torch.zeros(2, 4)
    with pytest.warns(UserWarning, match="it is handed a Tripled, whose __torch_function__ a trace would not call"):
        loss = fpipe.build(fpipe.program(model), model)(({"w": torch.ones(4, 4)},), batch).loss
    assert float(loss) == 3 * 32


def test_a_dispatch_mode_around_threads_is_refused():
    """Such a mode used to see the ops of rank 0 alone."""
    model = fpipe.from_functions([lambda p, x: x @ p["w"]], lambda y, t: y.sum())
    step = fpipe.build(fpipe.program(model), model, runtime="threads")
    inputs = ({"w": torch.ones(4, 4)},), (torch.ones(2, 4), torch.zeros(2, 4))
    step(*inputs)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=r"DispatchMode is on \(_Flop"):
        step(*inputs)
    step(*inputs)
