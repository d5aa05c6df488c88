"""Results of a step share memory with nothing, and no gradient is zero silently."""

import copy
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import fpipe
from fpipe import tree
from tests.processes import Processes
from tests.toys import linear


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum(1).mean()


def two_stages(loss: Any = squares, **options: Any) -> fpipe.Model:
    return fpipe.from_functions([linear, linear], loss, **options)


def params() -> tuple[dict[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(3, 3, generator=generator)} for _ in range(2))


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 3, generator=generator)


def test_gradients_share_no_memory():
    """Used to return one tensor for two leaves, since the cotangent of `x + p` is the gradient of p; clipping scaled
    both."""
    model = fpipe.from_functions(
        [lambda p, x: x * 0 + p["b"], lambda p, x: x + p["c"]], lambda y, t: (y * t).sum(), reduction="sum"
    )
    stage_params = ({"b": torch.ones(1, 3)}, {"c": torch.ones(1, 3)})
    grads = fpipe.build(fpipe.program(model), model)(stage_params, batch(1)).grads
    assert grads[0]["b"].data_ptr() != grads[1]["c"].data_ptr()


def test_a_gradient_can_be_changed_in_place():
    model = fpipe.from_functions([lambda p, x: p["w"] + x.sum() * 0], lambda y, t: y.sum())
    grads = fpipe.build(fpipe.program(model), model)(({"w": torch.ones(2, 2)},), batch()).grads
    assert torch.equal(grads[0]["w"].mul_(2), torch.full((2, 2), 2.0))


def test_outputs_do_not_alias_the_batch():
    model = fpipe.from_functions([lambda p, x: x], squares)
    caller_batch = batch()
    fpipe.build(fpipe.program(model), model)(({},), caller_batch).outputs.add_(1)
    assert torch.equal(caller_batch[0], batch()[0])


def test_a_counted_loss_is_divided_without_a_split():
    model = two_stages(lambda y, t: ((y - t).square().sum(), 21), reduction="count")
    result = fpipe.build(fpipe.program(model), model)(params(), batch())
    expected = (batch()[0] @ params()[0]["w"] @ params()[1]["w"] - batch()[1]).square().sum() / 21
    assert torch.equal(result.loss, expected)


def test_inference_mode_is_refused_instead_of_giving_zeros():
    model = two_stages()
    step = fpipe.build(fpipe.program(model), model)
    for run in (step, lambda *args: fpipe.reference(model, *args)):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
            run(params(), batch())


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda run, w: torch.vmap(run)(torch.stack([w, w])),
    "grad": lambda run, w: torch.func.grad(run)(w),
    "jvp": lambda run, w: torch.func.jvp(run, (w,), (w,)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_around_a_step_is_refused(name: str):
    """Used to give zeros under grad, and torch's own errors under vmap and jvp."""
    model, stage_params, rows = two_stages(), params(), batch()
    step = fpipe.build(fpipe.program(model), model)
    step(stage_params, rows)
    message = f"fpipe computes gradients itself, and torch.func.{name} around it does not see them. Call it for one"
    for run in (step, partial(fpipe.reference, model)):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            TRANSFORMS[name](lambda w, run=run: run(({"w": w}, *stage_params[1:]), rows).loss, stage_params[0]["w"])


def test_no_grad_around_a_step_changes_nothing():
    model = two_stages()
    with torch.no_grad():
        report = fpipe.verify(fpipe.program(model), model, params(), batch())
        loss = fpipe.reference(model, params(), batch()).grads[0]["w"].abs().sum()
    assert report.bitwise
    assert loss > 0


def test_tensors_inside_an_object_that_is_no_pytree_are_refused():
    @dataclasses.dataclass
    class Hidden:
        inside: Tensor

    model = fpipe.from_functions(
        [lambda p, x: {"plain": x, "hidden": Hidden(x @ p["w"])}, lambda p, x: x["hidden"].inside + x["plain"]], squares
    )
    with pytest.raises(TypeError, match=r"returned a Hidden that holds tensors, which is no pytree"):
        fpipe.build(fpipe.program(model), model)((params()[0], {}), batch())


def test_a_stage_that_adds_to_its_dict_leaves_the_callers_unchanged():
    def adds(p: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        x["more"] = x["x"]
        return x["more"] @ p["w"]

    model = fpipe.from_functions([adds], squares)
    inputs = {"x": batch()[0]}
    fpipe.build(fpipe.program(model), model)(params()[:1], (inputs, batch()[1]))
    assert list(inputs) == ["x"]


def test_merge_joins_along_its_spec():
    model = fpipe.from_functions([lambda p, x: p["w"] @ x], lambda y, t: (y - t).square().mean())
    wide = tuple(part.T.contiguous() for part in batch(12))
    spec = fpipe.Chunk(1)
    program = fpipe.chain(fpipe.split(4, spec), fpipe.merge(spec))(fpipe.program(model))
    assert fpipe.verify(program, model, params()[:1], wide).bitwise
    assert fpipe.build(program, model)(params()[:1], wide).outputs.shape == (3, 12)


def test_the_state_of_stages_that_do_not_use_it_is_returned():
    def count(p: Any, x: torch.Tensor, *, state: Any) -> Any:
        return linear(p, x), {"n": state["n"] + len(x)}

    counted = fpipe.Stage(count, frozenset({"state"}))
    model = fpipe.Model((counted, fpipe.Stage(linear)), squares, ("batch", 0))
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    state = ({"n": torch.zeros(())}, {"idle": torch.ones(2)})
    report = fpipe.verify(program, model, params(), batch(), state=state)
    assert report.bitwise
    assert "state[1]['idle']" in [leaf.name for leaf in report.leaves]


@pytest.mark.parametrize("merge", [fpipe.merge(losses=True), fpipe.identity()], ids=["merged", "not merged"])
def test_the_repl_shows_a_result_on_a_few_lines(merge: Any):
    """Used to print all numbers of all gradients: 4,000 characters for this result."""
    halves = fpipe.chain(fpipe.split(64), fpipe.schedules.one_f_one_b(2), merge)(
        fpipe.program(two_stages(), input_grads=True)
    )
    result = fpipe.build(halves, two_stages(), record=True)(params(), batch(64))
    assert len(repr(result)) <= 600
    assert re.match(r"<Result: loss [\d. ]+.*, grads of \d+ leaves, [\d,]+ numbers, outputs float32\[", repr(result))


def test_a_result_on_meta_prints_its_shapes():
    on_meta = [[leaf.to("meta") for leaf in leaves] for leaves in ([stage["w"] for stage in params()], batch())]
    model = two_stages()
    result = fpipe.build(fpipe.program(model), model)(tuple({"w": leaf} for leaf in on_meta[0]), tuple(on_meta[1]))
    assert repr(result) == "<Result: loss float32[], grads of 2 leaves, 18 numbers, outputs float32[7, 3]>"


class WithSpare(nn.Module):
    """A layer with a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def spare_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(WithSpare() for _ in range(2)))


def train_by_hand(net: nn.Sequential, full_batch: tuple[Tensor, Tensor], steps: int = 3) -> dict[str, Tensor]:
    """Return the parameters after a few steps of a plain loop with an optimizer that decays."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        for x, target in zip(*(tensor.tensor_split(2) for tensor in full_batch), strict=True):
            (squares(net(x), target) * (len(x) / len(full_batch[0]))).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in net.named_parameters()}


DOORS: dict[str, Callable[[nn.Sequential], Any]] = {
    "sequential": lambda net: fpipe.from_sequential(net, stages=2, loss=squares),
    "module": lambda net: fpipe.from_module(net, 2, loss=squares, batch=batch(8)),
    "loss": lambda net: (
        *fpipe.from_loss(
            lambda leaves, pair: squares(functional_call(net, leaves, pair[0]), pair[1]),
            dict(net.named_parameters()),
            batch(8),
        ),
        None,
    ),
}


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}, None], ids=repr)
@pytest.mark.parametrize("door", DOORS)
def test_an_unread_parameter_has_no_gradient_and_does_not_decay(door: str, options: dict[str, Any] | None):
    """Used to have a gradient of zeros, by which AdamW decayed the last layers of vision towers."""
    net, full_batch = spare_net(), batch(8)
    expected = train_by_hand(copy.deepcopy(net), full_batch)
    model, stages, _ = DOORS[door](net)
    count = len(model.stages)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(count), fpipe.merge())(fpipe.program(model))
    stages = tree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), stages)
    optimizer = torch.optim.AdamW(tree.leaves(stages), lr=0.1, weight_decay=0.5, foreach=False)
    assert fpipe.verify(program, model, stages, full_batch).bitwise
    step = partial(fpipe.reference, microbatches=2) if options is None else None
    built = fpipe.build(program, model, **options or {})
    for _ in range(3):
        grads = (built(stages, full_batch) if step is None else step(model, stages, full_batch)).grads
        assert [name for stage in grads for name, grad in stage.items() if grad is None] == ["0.spare", "1.spare"]
        fpipe.assign_grads(stages, grads)
        optimizer.step()
    actual = {name: leaf.detach() for stage in stages for name, leaf in stage.items()}
    assert all(torch.equal(actual[name], leaf) for name, leaf in expected.items())
    assert actual.keys() == expected.keys()


def test_verify_notes_zeros_where_autograd_has_no_gradient():
    model, stages, _ = DOORS["sequential"](spare_net())
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    step, unread_names = fpipe.build(program, model), {"0.spare", "1.spare"}

    def zeroed(*args: Any, fill_value: float = 0.0) -> fpipe.Result:
        result = step(*args)
        filled = [
            {name: torch.full((4, 3), fill_value) if name in unread_names else grad for name, grad in stage.items()}
            for stage in result.grads
        ]
        return dataclasses.replace(result, grads=tuple(filled))

    report = fpipe.verify(program, model, stages, batch(8), step=zeroed)
    assert report.bitwise
    assert report.notes == (
        "Plain autograd has no gradient, and these are zeros: grads[0]['0.spare'], grads[1]['1.spare'].",
    )
    with pytest.raises(fpipe.GradientMismatch, match=re.escape("grads[0]['0.spare'] differs from plain autograd by")):
        fpipe.verify(program, model, stages, batch(8), step=partial(zeroed, fill_value=0.5))


def compare_trained_params(rank: int, kind: str) -> list[Any]:
    """Return the names of local parameters that differ from a plain loop after a step of AdamW."""
    net, full_batch = spare_net(), batch(8)
    expected = train_by_hand(copy.deepcopy(net), full_batch, steps=1)
    model, stages, _ = DOORS["sequential"](net)
    transform_by_kind = {"pipeline": fpipe.identity(), "replicas": fpipe.data_parallel(), "shards": fpipe.shard()}
    parts = fpipe.split(2 if kind == "pipeline" else 1), fpipe.schedules.gpipe(2 if kind == "pipeline" else 1)
    program = fpipe.chain(*parts, fpipe.merge(), transform_by_kind[kind])(fpipe.program(model))
    mesh = None if kind == "pipeline" else init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    rows = full_batch if kind == "pipeline" else tuple(tensor.chunk(2)[rank] for tensor in full_batch)
    mine = [stage if kind != "pipeline" or n == rank else None for n, stage in enumerate(stages)]
    mine = fpipe.shard_params(mine, mesh["dp"]) if kind == "shards" and mesh is not None else mine
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(stages, rows))
    grads = step(mine, rows).grads
    wrong: list[Any] = []
    for params, stage in zip(mine, grads, strict=True):
        for name, grad in (stage or {}).items():
            leaf = params[name].detach().requires_grad_()
            leaf.grad = grad
            torch.optim.AdamW([leaf], lr=0.1, weight_decay=0.5, foreach=False).step()
            rows_of_it = expected[name].chunk(2)[rank] if kind == "shards" else expected[name]
            trained = leaf.detach().to_local() if kind == "shards" else leaf.detach()
            wrong += [] if torch.equal(trained, rows_of_it) else [name]
            wrong += [name] if (grad is None) != ("spare" in name) else []
    return wrong


@pytest.mark.parametrize("kind", ["pipeline", "replicas", "shards"])
def test_an_unread_parameter_has_no_gradient_in_processes(pair: Processes, kind: str):
    assert pair.run(compare_trained_params, kind) == [[], []]


class Routed(nn.Module):
    """Three experts for the rows whose first number selects them: sizes depend on data, so the stage is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        route = (x[:, 0].detach() * 8).long() % 4
        for number, expert in enumerate(self.experts):
            rows = torch.where(route == number)[0]
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]))
        return x


UPDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "clipped": {"clip": 0.05},
    "clipped on threads": {"clip": 0.05, "runtime": "threads"},
    "clipped after validation": {"clip": 0.05, "validate": "after"},
    "with a loss scale": {"loss_scale": {}},
    "recorded": {"clip": 0.05, "record": True},
}


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
@pytest.mark.parametrize("name", UPDATES)
def test_experts_that_no_row_reaches_do_not_decay(name: str):
    """Stages without a trace had zeros for them in all but the first step, and AdamW decays a parameter with zeros."""
    torch.manual_seed(0)
    options = {**UPDATES[name]}
    settings = {word: options.pop(word) for word in ("clip", "validate", "loss_scale") if word in options}
    net = nn.Sequential(Routed(), nn.Linear(4, 4))
    expected_net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(expected_net.parameters(), lr=0.1, weight_decay=0.5)
    model, params, _ = fpipe.from_sequential(net, 2, loss=nn.functional.mse_loss)
    pipeline = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())
    program = fpipe.chain(pipeline, fpipe.update("AdamW", weight_decay=0.5, **settings))(fpipe.program(model))
    step = fpipe.build(program, model, **options)
    grads_step = fpipe.build(pipeline(fpipe.program(model)), model)
    opt = fpipe.optimizer_state(program, params)
    scale = {"scale": 1.0} if "loss_scale" in settings else {}
    for number in range(4):
        x, target = torch.rand(8, 4), torch.rand(8, 4)
        if number:
            x[:, 0] = x[:, 0] / 8 + 0.125 * (torch.arange(8) % 2)  # rows of experts 0 and 1 only
        optimizer.zero_grad()
        for part, part_target in zip(x.split(4), target.split(4), strict=True):
            (nn.functional.mse_loss(expected_net(part), part_target) / 2).backward()
        expected_grads = {leaf_name: param.grad for leaf_name, param in expected_net.named_parameters()}
        grads = {
            leaf_name: grad for stage in grads_step(params, (x, target)).grads for leaf_name, grad in stage.items()
        }
        missing = [leaf_name for leaf_name, grad in grads.items() if grad is None]
        assert missing == [leaf_name for leaf_name, grad in expected_grads.items() if grad is None]
        assert ("0.experts.2.weight" in missing) == bool(number)
        if "clip" in settings:
            nn.utils.clip_grad_norm_(expected_net.parameters(), settings["clip"])
        optimizer.step()
        result = step(params, (x, target), opt=opt, lr=0.1, **scale)
        params, opt = result.params, result.opt
        trained = {leaf_name: leaf for stage in params for leaf_name, leaf in stage.items()}
        for leaf_name, param in expected_net.named_parameters():
            assert torch.equal(trained[leaf_name], param), (number, leaf_name)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_experts_without_rows_do_not_decay_in_programs_of_several_steps():
    torch.manual_seed(0)
    net = nn.Sequential(Routed(), nn.Linear(4, 4))
    expected_net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(expected_net.parameters(), lr=0.1, weight_decay=0.5)
    model, params, _ = fpipe.from_sequential(net, 2, loss=nn.functional.mse_loss)
    update = fpipe.update("AdamW", weight_decay=0.5)
    one_step = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(), update)
    program = fpipe.chain(one_step, fpipe.steps(2))(fpipe.program(model))
    step, opt = fpipe.build(program, model), fpipe.optimizer_state(program, params)
    for number in range(3):
        batches = [(torch.rand(8, 4), torch.rand(8, 4)) for _ in range(2)]
        for x, target in batches:
            if number:
                x[:, 0] = x[:, 0] / 8 + 0.125 * (torch.arange(8) % 2)
            optimizer.zero_grad()
            for part, part_target in zip(x.split(4), target.split(4), strict=True):
                (nn.functional.mse_loss(expected_net(part), part_target) / 2).backward()
            optimizer.step()
        result = step(params, batches, opt=opt, lr=[0.1, 0.1])
        params, opt = result.params, result.opt
        trained = {leaf_name: leaf for stage in params for leaf_name, leaf in stage.items()}
        assert all(torch.equal(trained[leaf_name], param) for leaf_name, param in expected_net.named_parameters())
