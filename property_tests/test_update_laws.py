"""Laws of programs that update: whatever the order, parameters are those of a plain loop with torch's optimizer."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.testing.stage_functions import LOSSES
from property_tests.strategies import few, outputs, shared
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
    """A rule, and the words of an update by it."""
    rule, settings = draw(st.sampled_from(RULES))
    how = {"clip": draw(st.sampled_from([None, 0.01, 100.0]))} | settings
    how["groups"] = draw(st.sampled_from([None, {"*b": {"lr_scale": 0.5}}]))
    return rule, how


WAYS = st.sampled_from(["", "late", "scaled"])


def validated(how: dict[str, Any], way: str) -> dict[str, Any]:
    """The words of an update, which waits for no norm if one is asked for `late`, or whose loss is scaled."""
    late = {"validate": "after"} if how["clip"] is not None else {}
    return how | {"": {}, "late": late, "scaled": {"loss_scale": {"growth_interval": 1}}}[way]


@few(12)
@given(updates(), st.sampled_from(SCHEDULES), st.booleans(), st.integers(1, 3), WAYS)
def test_an_order_changes_no_bit_of_any_step(drawn: Any, name: str, split: bool, count: int, way: str):
    rule, how = drawn[0], validated(drawn[1], way)
    model, params = model_of(4)
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(count)]
    schedule, halves = fpipe.schedules.get(name)(2), [fpipe.split_backward()] * split
    program = fpipe.chain(fpipe.split(4), *halves, schedule, fpipe.merge(), fpipe.update(rule, **how))
    program = fpipe.steps(count)(program(fpipe.program(model)))
    report = fpipe.verify(program, model, params, batches if count > 1 else batches[0], lr=[0.1, 0.05, 0.2][:count])
    assert report.bitwise, report
    assert fpipe.Program.parse(str(program)) == program


@few(10)
@given(updates(), st.integers(1, 4), st.sampled_from([0, 1, 2, "stash"]), st.booleans())
def test_stale_steps_have_the_bits_of_a_loop_with_the_same_delays(drawn: Any, count: int, stale: Any, on_host: bool):
    rule, how = drawn
    model, params = model_of(3)
    torch.manual_seed(0)
    batches: Any = [(torch.randn(8, 4), torch.randn(8)) for _ in range(count)]
    batches = batches if count > 1 else batches[0]
    before, after = (
        [fpipe.schedules.roundpipe(2)] * on_host,
        [fpipe.schedules.one_f_one_b(3)] * (stale != 0 and not on_host),
    )
    parts = fpipe.split(3), *before, fpipe.merge(outputs=False), fpipe.update(rule, **how)
    program = fpipe.chain(*parts, fpipe.steps(count, stale=stale), *after)(fpipe.program(model))
    assert fpipe.verify(program, model, params, batches).bitwise
    whole = fpipe.reference(model, params, batches, microbatches=3, steps=count, stale=stale, rule=rule, lr=0.01, **how)
    found = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=0.01)
    for ours, theirs in zip(fpipe.tree.leaves(found.params), fpipe.tree.leaves(whole.params), strict=True):
        assert torch.equal(ours, theirs)


REPLICAS: Any = st.sampled_from([1, 2, 3, (2, 2), (1, 3)])


@given(updates(), REPLICAS, st.integers(1, 2), st.sampled_from(["step", "use"]), WAYS)
def test_replicas_that_share_parameters_update_them_as_one_device_does(
    drawn: Any, replicas: Any, count: int, gather: Any, way: str
):
    rule, how = drawn[0], validated(drawn[1], way)
    model, params = model_of(4)
    torch.manual_seed(0)
    batches: Any = [(torch.randn(24, 4), torch.randn(24)) for _ in range(count)]
    ways = [fpipe.shard(gather=gather), *[fpipe.data_parallel("replicate")] * isinstance(replicas, tuple)]
    parts = fpipe.split(2), fpipe.schedules.interleaved(2), fpipe.merge(outputs=False), *ways
    program = fpipe.chain(*parts, fpipe.update(rule, **how), fpipe.steps(count))(fpipe.program(model))
    report = fpipe.verify(program, model, params, batches if count > 1 else batches[0], replicas=replicas)
    assert report.bitwise, report


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.floats(0, 2))
def test_a_clip_makes_no_step_shorter(name: str, ranks: int, update: float):
    assume(name != "dualpipe" or ranks % 2 == 0)
    stages = ranks * (2 if name in ("interleaved", "zbv") else 1)
    costs = fpipe.Costs(update=update)

    def timeline(**how: Any) -> fpipe.Timeline:
        parts = fpipe.split(2 * ranks), fpipe.schedules.get(name)(ranks), fpipe.merge(outputs=False)
        program = fpipe.chain(*parts, fpipe.update("SGD", **how), fpipe.steps(3))(fpipe.program(stages))
        return fpipe.simulate(program, costs)

    free, late, clipped = timeline(), timeline(clip=1.0, validate="after"), timeline(clip=1.0)
    assert free.makespan <= late.makespan <= clipped.makespan
    assert late.redone == clipped.makespan


@given(fpipe.testing.models(), updates(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_right_steps_are_not_accused(net: Any, drawn: Any, count: int, microbatches: int, seed: int):
    rule, how = drawn
    params, batches = net.params(seed), [net.batch(8, seed + step) for step in range(count)]
    leaves, spec = fpipe.tree.flatten(params)
    assume(leaves)
    now = [leaf.clone().requires_grad_() for leaf in leaves]
    own = {key: value for key, value in how.items() if key not in ("clip", "groups")}
    names = [name for stage in params for name in stage]
    slow = [
        [leaf for leaf, name in zip(now, names, strict=True) if (name[-1] == "b") is each] for each in (True, False)
    ]
    optimizer = getattr(torch.optim, rule)([{"params": some} for some in slow if some], lr=0.1, **own)
    if slow[0] and how["groups"]:
        optimizer.param_groups[0]["lr"] = 0.05
    for x, target in batches:
        optimizer.zero_grad()
        counted = int((target[:, 0] > -0.5).sum()) or 1
        for rows, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            loss = LOSSES[net.reduction](outputs(net, shared(net, fpipe.tree.unflatten(spec, now)), rows), wanted)
            share = {"mean": 1 / microbatches, "sum": 1.0, "count": 1 / counted}[net.reduction]
            ((loss[0] if net.reduction == "count" else loss) * share).backward()
        if how["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(now, how["clip"])
        optimizer.step()
    after = fpipe.tree.unflatten(spec, [leaf.detach() for leaf in now])
    fpipe.compare_step(net.model, params, batches, after, rule=rule, lr=0.1, **how)
