"""Laws of layouts: gradients have the strides that `.backward()` gives them; torch's fused rules rely on that."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from property_tests.bits import is_same_gradient
from tests.processes import Processes

Rule = tuple[str, dict[str, Any]]


def einsum(formula: str) -> Callable[..., Tensor]:
    return lambda params, x: torch.einsum(formula, x, params["w"]) + params["b"]


def convolved(params: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x.view(4, 2, 3, 8).transpose(1, 3), params["w"])


LAYOUTS: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor]]] = {
    "linear": (einsum("btd,ed->bte"), lambda: torch.randn(5, 8)),
    "heads": (einsum("btd,hdk->bthk"), lambda: torch.randn(3, 8, 5)),
    "experts": (einsum("btd,edf->ebtf"), lambda: torch.randn(2, 8, 5)),
    "turned inside": (lambda p, x: x @ p["w"].t().contiguous(), lambda: torch.randn(5, 8)),
    "turned parameter": (lambda p, x: x @ p["w"], lambda: torch.randn(5, 8).t()),
    "channels last": (convolved, lambda: torch.randn(5, 8, 1, 1).to(memory_format=torch.channels_last)),
    "larger kernel": (convolved, lambda: torch.randn(5, 8, 2, 2).to(memory_format=torch.channels_last)),
    "every other column": (lambda p, x: x @ p["w"], lambda: torch.randn(8, 10)[:, ::2]),
}
RULES: list[Rule] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("Adam", {"fused": True, "amsgrad": True}),
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"foreach": True}),
]
BUILDS: dict[str, dict[str, Any]] = {
    "traced": {},
    "under autograd": {"trace": False},
    "threads": {"runtime": "threads"},
}


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y.flatten(1).mean(1) - target).square().mean() if y.shape[0] == len(target) else y.square().mean()


def parameters(layout: str) -> list[dict[str, Tensor]]:
    """Draw the parameters of two stages in a row."""
    torch.manual_seed(1)
    return [{"v": torch.randn(8)}, {"w": LAYOUTS[layout][1](), "b": torch.randn(5)}]


def loop(
    layout: str, batch: tuple[Tensor, Tensor], rule: Rule | None, clip: float | None = 0.1
) -> tuple[list[Tensor], list[Any], Tensor]:
    """Return parameters after three steps of a plain loop, and the last step's gradients and norm before the clip."""
    params = [leaf.requires_grad_() for stage in parameters(layout) for leaf in stage.values()]
    optimizer = None if rule is None else getattr(torch.optim, rule[0])(params, lr=0.1, **rule[1])
    norm = torch.zeros(())
    for _ in range(1 if optimizer is None else 3):
        for leaf in params:
            leaf.grad = None
        for x, target in zip(*(half.tensor_split(2) for half in batch), strict=True):
            y = LAYOUTS[layout][0]({"w": params[1], "b": params[2]}, (x * params[0]).tanh())
            (loss_of(y, target) * 0.5).backward()
        if optimizer is not None:
            norm = torch.nn.utils.clip_grad_norm_(params, float("inf") if clip is None else clip)
            optimizer.step()
    return [leaf.detach() for leaf in params], [leaf.grad for leaf in params], norm


def model_of(layout: str) -> fpipe.Model:
    return fpipe.from_functions([lambda p, x: (x * p["v"]).tanh(), LAYOUTS[layout][0]], loss=loss_of)


def batch_of(layout: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(8, 6, 8), torch.randn(8)


def leaves(per_stage: Sequence[Any]) -> list[Tensor]:
    return [leaf for stage in per_stage for leaf in stage.values()]


def strides(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the strides of each gradient, without dimensions of size 1, whose stride means nothing."""
    return [
        None if leaf is None else [step for step, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
        for leaf in tensors
    ]


@pytest.mark.parametrize("build_name", [*BUILDS, "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_strides_that_backward_gives(layout: str, build_name: str):
    params, batch = tuple(parameters(layout)), batch_of(layout)
    _, expected, _ = loop(layout, batch, None)
    if build_name == "reference":
        grads = leaves(fpipe.reference(model_of(layout), params, batch, microbatches=2).grads)
    else:
        program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(2))
        grads = leaves(fpipe.build(program, model_of(layout), **BUILDS[build_name])(params, batch).grads)
    assert all(map(is_same_gradient, grads, expected))
    assert strides(grads) == strides(expected)


@pytest.mark.crossed
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("build_name", [*BUILDS, "reference"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "every other column"])
def test_rules_update_parameters_of_every_layout_as_a_plain_loop(layout: str, build_name: str, rule: Rule):
    model, params, batch = model_of(layout), tuple(parameters(layout)), batch_of(layout)
    expected, _, norm = loop(layout, batch, rule)
    parts = fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.update(rule[0], clip=0.1, **rule[1])
    program = fpipe.chain(*parts)(fpipe.program(2))
    opt, result = fpipe.optimizer_state(program, params), fpipe.Result()
    step = fpipe.build(program, model, **BUILDS.get(build_name, {}))
    for _ in range(3):
        if build_name == "reference":
            options = {"rule": rule[0], "clip": 0.1, "lr": 0.1, "opt": opt, **rule[1]}
            result = fpipe.reference(model, params, batch, microbatches=2, **options)
        else:
            result = step(params, batch, opt=opt, lr=0.1)
        params, opt = result.params, result.opt
    assert torch.equal(result.norm, norm)
    assert all(map(torch.equal, leaves(params), expected))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "every other column"])
def test_assigned_gradients_are_read_by_a_fused_rule_as_those_of_backward(layout: str):
    params, batch = tuple(parameters(layout)), batch_of(layout)
    expected, _, _ = loop(layout, batch, ("AdamW", {"fused": True}))
    optimizer = torch.optim.AdamW([leaf.requires_grad_() for leaf in leaves(params)], lr=0.1, fused=True)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(2))
    step = fpipe.build(program, model_of(layout))
    for _ in range(3):
        grads = step(params, batch).grads
        fpipe.assign_grads(params, grads)
        torch.nn.utils.clip_grad_norm_(leaves(params), 0.1)
        optimizer.step()
    assert all(map(torch.equal, leaves(params), expected))


def differences_in_processes(rank: int, layout: str, kind: str) -> list[str]:
    """Return the names of this process's results that differ from a plain loop's: parameters and the norm."""
    rule: Rule = ("AdamW", {} if kind == "shards" else {"fused": True})
    clip = None if kind == "shards" else 0.1  # the norm of shards is a root of squares
    expected, _, norm = loop(layout, batch_of(layout), rule, clip=clip)
    model, params, batch = model_of(layout), tuple(parameters(layout)), batch_of(layout)
    ranks = 2 if kind == "pipeline" else 1
    mesh = None if kind == "pipeline" else init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    replications = {"pipeline": fpipe.identity(), "replicas": fpipe.data_parallel(), "shards": fpipe.shard()}
    parts = fpipe.split(ranks), fpipe.schedules.gpipe(ranks), fpipe.merge(), replications[kind]
    program = fpipe.chain(*parts, fpipe.update(rule[0], clip=clip, **rule[1]))(fpipe.program(model))
    rows = batch if kind == "pipeline" else tuple(half.chunk(2)[rank] for half in batch)
    mine: Any = [None if kind == "pipeline" and number != rank else stage for number, stage in enumerate(params)]
    mine = fpipe.shard_params(mine, mesh["dp"]) if kind == "shards" and mesh is not None else mine
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rows))
    opt, result = fpipe.optimizer_state(program, mine), fpipe.Result()
    for _ in range(3):
        result = step(mine, rows, opt=opt, lr=0.1)
        mine, opt = result.params, result.opt
    expected_by_name = {"v": expected[0], "w": expected[1], "b": expected[2]}
    actual_by_name = {name: leaf for stage in mine for name, leaf in (stage or {}).items()}
    if kind == "shards":
        chunks = {name: leaf.chunk(2) for name, leaf in expected_by_name.items()}
        expected_by_name = {name: c[rank] if len(c) > rank else c[0][:0] for name, c in chunks.items()}
        actual_by_name = {name: leaf.to_local() for name, leaf in actual_by_name.items()}
    # Shards are gathered to a contiguous parameter, for which torch may pick another kernel than for a turned one.
    is_equal = partial(torch.allclose, atol=1e-6) if kind == "shards" else torch.equal
    wrong = [name for name, leaf in actual_by_name.items() if not is_equal(leaf, expected_by_name[name])]
    return wrong + ["norm"] * (result.norm is not None and clip is not None and not torch.equal(result.norm, norm))


@pytest.mark.parametrize("kind", ["pipeline", "replicas", "shards"])
@pytest.mark.parametrize("layout", ["linear", "heads", "turned parameter", "larger kernel"])
def test_processes_update_parameters_of_every_layout_as_a_plain_loop(pair: Processes, layout: str, kind: str):
    assert pair.run(differences_in_processes, layout, kind) == [[], []]
