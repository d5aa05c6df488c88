"""Laws of updates: whatever the order, parameters equal a plain loop's with torch's optimizer."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe
from property_tests.bits import is_same_gradient
from property_tests.drawn_models import models
from property_tests.stage_functions import LOSSES
from property_tests.strategies import max_examples, outputs, shared
from property_tests.test_shard_laws import model_of

RULES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("AdamW", {"weight_decay": 0.2}),
    ("Adam", {"betas": (0.5, 0.9)}),
    ("RMSprop", {}),
    ("Adagrad", {}),
]
SCHEDULES = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "zbv", "dualpipe", "roundpipe"]


@st.composite
def updates(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a rule and options for an update by it."""
    rule, settings = draw(st.sampled_from(RULES))
    options = {"clip": draw(st.sampled_from([None, 0.01, 100.0]))} | settings
    options["groups"] = draw(st.sampled_from([None, {"*b": {"lr_scale": 0.5}}]))
    return rule, options


VARIANTS = st.sampled_from(["", "late", "scaled"])


def add_variant(options: dict[str, Any], variant: str) -> dict[str, Any]:
    """Add the options of a variant: `late` does not wait for the norm, `scaled` scales the loss."""
    after_options = {"validate": "after"} if options["clip"] is not None else {}
    return options | {"": {}, "late": after_options, "scaled": {"loss_scale": {"growth_interval": 1}}}[variant]


@max_examples(6)
@given(updates(), st.sampled_from(SCHEDULES), st.booleans(), st.integers(1, 3), VARIANTS)
def test_an_order_changes_no_bit_of_any_step(drawn: Any, name: str, split: bool, count: int, variant: str):
    rule, options = drawn[0], add_variant(drawn[1], variant)
    model, params = model_of(4)
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(count)]
    schedule, halves = fpipe.schedules.get(name)(2), [fpipe.split_backward()] * split
    program = fpipe.chain(fpipe.split(4), *halves, schedule, fpipe.merge(), fpipe.update(rule, **options))
    program = fpipe.steps(count)(program(fpipe.program(model)))
    report = fpipe.verify(program, model, params, batches if count > 1 else batches[0], lr=[0.1, 0.05, 0.2][:count])
    assert report.bitwise, report
    assert fpipe.Program.parse(str(program)) == program


@max_examples(5)
@given(updates(), st.integers(1, 4), st.sampled_from([0, 1, 2, "stash"]), st.booleans())
def test_stale_steps_have_the_bits_of_a_loop_with_the_same_delays(drawn: Any, count: int, stale: Any, on_host: bool):
    rule, options = drawn
    model, params = model_of(3)
    torch.manual_seed(0)
    batches: Any = [(torch.randn(8, 4), torch.randn(8)) for _ in range(count)]
    batches = batches if count > 1 else batches[0]
    on_host_first, pipelined_last = (
        [fpipe.schedules.roundpipe(2)] * on_host,
        [fpipe.schedules.one_f_one_b(3)] * (stale != 0 and not on_host),
    )
    parts = fpipe.split(3), *on_host_first, fpipe.merge(outputs=False), fpipe.update(rule, **options)
    program = fpipe.chain(*parts, fpipe.steps(count, stale=stale), *pipelined_last)(fpipe.program(model))
    assert fpipe.verify(program, model, params, batches).bitwise
    steps = {"microbatches": 3, "steps": count, "stale": stale}
    expected = fpipe.reference(model, params, batches, rule=rule, lr=0.01, **steps, **options)
    actual = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=0.01)
    for leaves in zip(fpipe.tree.leaves(actual.params), fpipe.tree.leaves(expected.params), strict=True):
        assert torch.equal(*leaves)


REPLICAS: Any = st.sampled_from([1, 2, 3, (2, 2), (1, 3)])


@given(updates(), REPLICAS, st.integers(1, 2), st.sampled_from(["step", "use"]), VARIANTS)
def test_replicas_that_share_parameters_update_them_as_one_device_does(
    drawn: Any, replicas: Any, count: int, gather: Any, variant: str
):
    rule, options = drawn[0], add_variant(drawn[1], variant)
    model, params = model_of(4)
    torch.manual_seed(0)
    batches: Any = [(torch.randn(24, 4), torch.randn(24)) for _ in range(count)]
    replications = [fpipe.shard(gather=gather), *[fpipe.data_parallel("replicate")] * isinstance(replicas, tuple)]
    parts = fpipe.split(2), fpipe.schedules.interleaved(2), fpipe.merge(outputs=False), *replications
    program = fpipe.chain(*parts, fpipe.update(rule, **options), fpipe.steps(count))(fpipe.program(model))
    report = fpipe.verify(program, model, params, batches if count > 1 else batches[0], replicas=replicas)
    assert report.bitwise, report


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.floats(0, 2))
def test_a_clip_makes_no_step_shorter(name: str, ranks: int, update: float):
    assume(name != "dualpipe" or ranks % 2 == 0)
    stages = ranks * (2 if name in ("interleaved", "zbv") else 1)
    costs = fpipe.Costs(update=update)

    def timeline(**options: Any) -> fpipe.Timeline:
        parts = fpipe.split(2 * ranks), fpipe.schedules.get(name)(ranks), fpipe.merge(outputs=False)
        program = fpipe.chain(*parts, fpipe.update("SGD", **options), fpipe.steps(3))(fpipe.program(stages))
        return fpipe.simulate(program, costs)

    free, validated_later, clipped = timeline(), timeline(clip=1.0, validate="after"), timeline(clip=1.0)
    assert free.makespan <= validated_later.makespan <= clipped.makespan
    assert validated_later.rerun_makespan == clipped.makespan


@given(models(), updates(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_compare_step_accepts_correct_steps(net: Any, drawn: Any, count: int, microbatches: int, seed: int):
    rule, options = drawn
    params, batches = net.params(seed), [net.batch(8, seed + step) for step in range(count)]
    leaves, spec = fpipe.tree.flatten(params)
    assume(leaves)
    trained = [leaf.clone().requires_grad_() for leaf in leaves]
    rule_options = {key: value for key, value in options.items() if key not in ("clip", "groups")}
    names = [name for stage in params for name in stage]
    named = list(zip(trained, names, strict=True))
    leaf_groups = [[leaf for leaf, name in named if (name[-1] == "b") is is_bias] for is_bias in (True, False)]
    groups = [{"params": group} for group in leaf_groups if group]
    optimizer = getattr(torch.optim, rule)(groups, lr=0.1, **rule_options)
    if leaf_groups[0] and options["groups"]:
        optimizer.param_groups[0]["lr"] = 0.05
    for x, target in batches:
        optimizer.zero_grad()
        counted = int((target[:, 0] > -0.5).sum()) or 1
        for rows, target_rows in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            y = outputs(net, shared(net, fpipe.tree.unflatten(spec, trained)), rows)
            loss = LOSSES[net.reduction](y, target_rows)
            share = {"mean": 1 / microbatches, "sum": 1.0, "count": 1 / counted}[net.reduction]
            ((loss[0] if net.reduction == "count" else loss) * share).backward()
        if options["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(trained, options["clip"])
        optimizer.step()
    updated_params = fpipe.tree.unflatten(spec, [leaf.detach() for leaf in trained])
    fpipe.compare_step(net.model, params, batches, updated_params, rule=rule, lr=0.1, **options)


class Shuffled(nn.Module):
    """Linear layers that run in the order of their numbers, are registered in another, and do not all run.

    The last that runs may share the weight of the first. A layer computes in the dtype of its weight.
    """

    def __init__(self, registered: Sequence[int], runs: int, is_tied: bool, dtypes: Sequence[torch.dtype]):
        super().__init__()
        for number in registered:
            self.add_module(f"layer{number}", nn.Linear(5, 5, bias=number % 2 == 0, dtype=dtypes[number]))
        self.layers = [getattr(self, f"layer{number}") for number in range(runs)]
        if is_tied:
            self.layers[-1].to(dtypes[0]).weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()

    def in_order_of_use(self) -> list[Tensor]:
        """Return the gradients in the order in which the layers run."""
        parameters = dict.fromkeys(leaf for layer in self.layers for leaf in layer.parameters())
        return [leaf.grad for leaf in parameters if leaf.grad is not None]

    def loss_of(self, named: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss, with a boundary after each layer, for `from_loss`."""
        name_by_id = {id(leaf): name for name, leaf in self.named_parameters()}
        x = batch[0]
        for layer in self.layers:
            weights = {name: named[name_by_id[id(leaf)]] for name, leaf in layer.named_parameters()}
            x = fpipe.boundary(torch.tanh(torch.func.functional_call(layer, weights, (x.to(layer.weight.dtype),))))
        return nn.functional.mse_loss(x.float(), batch[1])


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[Shuffled, tuple[Tensor, Tensor]]:
    """Draw a net with gradients whose norm has other bits in the order in which the layers run."""
    runs = draw(st.integers(3, 5))
    permutations = st.permutations(range(runs + draw(st.integers(0, 1))))
    registered = draw(permutations.filter(lambda order: order != sorted(order)))
    dtypes = draw(st.lists(st.sampled_from([torch.float32, torch.float64]), min_size=6, max_size=6))
    parts = registered, runs, draw(st.booleans()), draw(st.sampled_from([dtypes, [torch.float32] * 6]))
    for seed in range(30):
        torch.manual_seed(seed)
        net, batch = Shuffled(*parts), (torch.randn(4, 5), torch.randn(4, 5))
        nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
        grads = [leaf.grad for leaf in net.parameters() if leaf.grad is not None]
        if not torch.equal(*(nn.utils.get_total_norm(order) for order in (grads, net.in_order_of_use()))):
            return net, batch
    reject()  # where no order rounds otherwise the law could not fail; hypothesis complains if most draws are such


BUILT: list[dict[str, Any]] = [{}, {"trace": False}, {"runtime": "threads"}]


@max_examples(6)
@given(shuffled(), st.integers(1, 3), st.sampled_from(["net", "loss"]), st.sampled_from(BUILT), st.booleans())
def test_norms_are_stacked_in_the_order_of_the_net_however_it_is_cut(
    drawn: tuple[Shuffled, tuple[Tensor, Tensor]], stages: int, door: str, options: dict[str, Any], is_sharded: bool
):
    net, batch = drawn
    fresh = copy.deepcopy(net)
    if door == "net":
        model, params, _ = fpipe.from_module(fresh, stages, loss=nn.functional.mse_loss, batch=batch)
    else:
        model, params = fpipe.from_loss(fresh.loss_of, dict(fresh.named_parameters()), batch)
    sharding = [fpipe.shard()] * is_sharded
    parts = fpipe.split(1), fpipe.schedules.gpipe(len(model.stages)), fpipe.merge(outputs=False), *sharding
    program = fpipe.chain(*parts, fpipe.update("SGD", clip=0.01, grads=True))(fpipe.program(model))
    result = fpipe.build(program, model, **options)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.1)
    assert fpipe.verify(program, model, params, batch, replicas=1 + is_sharded).bitwise
    grads = [leaf.grad for leaf in net.parameters() if leaf.grad is not None]
    squares = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert torch.equal(result.norm, squares if is_sharded else nn.utils.get_total_norm(grads))
    clipped, norm = fpipe.clip_grads(result.grads, 0.01, model=model)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(net.parameters(), 0.01))
    named = {name: grad for stage in clipped for name, grad in stage.items()}
    assert all(is_same_gradient(named[name], leaf.grad) for name, leaf in net.named_parameters())
