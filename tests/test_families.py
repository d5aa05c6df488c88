"""Families of transformers at four stages: loss, gradients and state are the net's own, for dropout drawn by a key."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.families import FAMILIES, Family

hf = pytest.importorskip("transformers")
KEY = 3
IN_CI = ("GPT2", "Whisper", "ResNet")


def own(net: nn.Module, inputs: dict[str, Tensor], ends: tuple[str, ...], parts: int) -> tuple[Tensor, dict[str, Any]]:
    """Loss and gradients under plain autograd, microbatch after microbatch, seeded where a stage begins."""
    stage = index = 0

    def seed() -> None:
        torch.manual_seed(fpipe.fold_in(KEY, stage, index))

    def ended(path: str) -> Any:
        def hook(*_: Any) -> None:
            nonlocal stage
            if stage < len(ends) and ends[stage] == path:
                stage += 1
                seed()

        return hook

    hooks = [net.get_submodule(path).register_forward_hook(ended(path)) for path in {*ends}]
    losses: list[Tensor] = []
    trained = {name: leaf for name, leaf in net.named_parameters() if leaf.requires_grad}
    total: dict[str, Tensor] = {}
    for index in range(parts):
        stage = 0
        seed()
        part = {name: leaf.tensor_split(parts)[index] for name, leaf in inputs.items()}
        losses.append(net(**part).loss * (1 / parts))
        grads = torch.autograd.grad(losses[-1], [*trained.values()], materialize_grads=True)
        total = {name: total[name] + grad if index else grad for name, grad in zip(trained, grads, strict=True)}
    for hook in hooks:
        hook.remove()
    return torch.stack(losses).detach().sum(), total


def check(family: Family) -> None:
    torch.manual_seed(0)
    net, inputs = family.make(hf), family.inputs()
    model, params, state = fpipe.from_module(net, 4, example=inputs)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(4), fpipe.checkpoint("except_last"), fpipe.merge())(
        fpipe.program(model)
    )
    kept = state if any(state) else None
    report = fpipe.verify(program, model, params, (inputs, None), state=kept, key=KEY)
    assert report.bitwise, report
    result = fpipe.build(program, model)(params, (inputs, None), state=kept, key=KEY)
    net.config.use_cache = False  # with a cache attention reads copies, and gives other last bits
    loss, right = own(net, inputs, family.ends, 2)
    torch.testing.assert_close(result.loss, loss)
    found = fpipe.join_params(model, result.grads)
    # What several stages read has its gradient added up stage by stage: in the last bits it is another.
    several = {name for tie in model.ties for _, name in tie}
    for name, grad in right.items():
        if name in several or family.skips:
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
