"""Families of transformers at four stages: loss, gradients and state are the net's own, for dropout drawn by a key."""

from pathlib import Path

import pytest
import torch

import fpipe
from tests.families import FAMILIES, Family
from tests.own_autograd import own_autograd, without_caches

hf = pytest.importorskip("transformers")
KEY, PARTS = 3, 2
IN_CI = ("GPT2", "Whisper", "ResNet")


def check(family: Family) -> None:
    torch.manual_seed(0)
    net, batch = family.make(hf), family.batch()
    model, params, state = fpipe.from_module(net, 4, example=batch, loss=family.loss)
    program = fpipe.chain(fpipe.split(PARTS), fpipe.schedules.zb_h1(4), fpipe.checkpoint("except_last"), fpipe.merge())(
        fpipe.program(model)
    )
    kept = state if any(state) else None
    report = fpipe.verify(program, model, params, batch, state=kept, key=KEY)
    assert report.bitwise, report
    result = fpipe.build(program, model)(params, batch, state=kept, key=KEY)
    without_caches(net)
    loss, right = own_autograd(net, batch, PARTS, key=KEY, ends=family.ends, loss=family.loss)
    if family.rounds and not family.rounds.path:  # all of its gradients are
        torch.testing.assert_close(result.loss, loss)
    else:
        assert torch.equal(result.loss, loss)
    found = fpipe.join_params(model, result.grads)
    summed = {name for tie in model.ties for _, name in tie}
    for name, grad in right.items():
        if name in summed or (family.rounds and name.startswith(family.rounds.path)):
            torch.testing.assert_close(found[name], grad, msg=name)
        else:
            assert torch.equal(found[name], grad), (name, (found[name] - grad).abs().max())
    now = dict(net.named_buffers())
    assert [name for one in result.state or () for name in one if not torch.equal(one[name], now[name])] == []


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]
)
def test_a_family_trains_as_on_one_device(name: str) -> None:
    check(FAMILIES[name])


def test_the_table_has_the_families_that_are_tested() -> None:
    page = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "`" in line]
    said = {row[0].removeprefix("| "): row[2] for row in rows}
    ends = {name: ", ".join(f"`{end}`" for end in family.ends) for name, family in FAMILIES.items()}
    assert said == ends, "run `make families-page`"
