"""What a net gives under plain autograd: microbatch after microbatch, seeded anew where a stage of its cut begins."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fpipe
from fpipe import tree


def own_autograd(
    net: nn.Module,
    batch: tuple[Any, Any],
    parts: int,
    *,
    key: int,
    ends: Sequence[str],
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch and the gradients of what trains, by name; `ends` are the calls after which stages end, in
    their order, and `loss` None says that the net computes it."""
    stage = index = 0

    def seed() -> None:
        torch.manual_seed(fpipe.fold_in(key, stage, index))

    def ended(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal stage
            if stage < len(ends) and ends[stage] == path:
                stage += 1
                seed()

        return hook

    hooks = [net.get_submodule(path).register_forward_hook(ended(path)) for path in {*ends}]
    trained = {name: leaf for name, leaf in net.named_parameters() if leaf.requires_grad}
    pieces = parts_of(batch, parts)
    total, grads, rows = torch.zeros(()), dict[str, Tensor](), sum(count for _, count in pieces)
    for index, ((inputs, target), count) in enumerate(pieces):
        stage = 0
        seed()
        made = called(net, inputs)
        own = loss(made, target) if loss is not None else made if isinstance(made, Tensor) else made["loss"]
        one = own * (count / rows)
        found = torch.autograd.grad(one, [*trained.values()], allow_unused=True)
        total = total + one.detach() if index else one.detach()
        for name, grad in zip(trained, found, strict=True):
            if grad is not None:
                grads[name] = grads[name] + grad if name in grads else grad
    for hook in hooks:
        hook.remove()
    return total, grads


def called(net: nn.Module, inputs: Any) -> Any:
    """What a net returns, its inputs a dict of keywords, a tuple of arguments or the one argument."""
    if isinstance(inputs, Mapping):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def parts_of(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """A batch as microbatches, each with its number of rows."""
    leaves, spec = tree.flatten(batch)
    cut = [one.tensor_split(parts) if isinstance(one, Tensor) else [one] * parts for one in leaves]
    counts = [len(piece) for piece in next(one for one in cut if isinstance(one[0], Tensor))]
    each = zip(zip(*cut, strict=True), counts, strict=True)
    return [(tree.unflatten(spec, list(own)), count) for own, count in each]


def without_caches(net: Any) -> None:
    """Let a model of transformers make no cache: with one, attention reads copies, and gives other last bits."""
    for module in net.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False


def assert_own(
    net: nn.Module, batch: tuple[Any, Any], ends: Sequence[str], loss: Any = None, near: tuple[str, ...] = ()
) -> None:
    """A net cut in four has its own loss, gradients and state: bit by bit, but for tied leaves, which stages add up,
    and what begins with a path of `near`; the loss too where that is all."""
    key, parts = 3, 2
    model, params, state = fpipe.from_module(net, 4, example=batch, loss=loss)
    steps = fpipe.schedules.zb_h1(4), fpipe.checkpoint("except_last"), fpipe.merge()
    program = fpipe.chain(fpipe.split(parts), *steps)(fpipe.program(model))
    kept = state if any(state) else None
    report = fpipe.verify(program, model, params, batch, state=kept, key=key)
    assert report.bitwise, report
    result = fpipe.build(program, model)(params, batch, state=kept, key=key)
    without_caches(net)
    right_loss, right = own_autograd(net, batch, parts, key=key, ends=ends, loss=loss)
    found = fpipe.join_params(model, result.grads)
    summed = {name for tie in model.ties for _, name in tie}
    reached = {name for name, _ in net.named_parameters() if found.get(name) is not None}
    assert reached - summed == right.keys() - summed
    for name, one, other in [("", result.loss, right_loss), *((name, found[name], right[name]) for name in right)]:
        if name in summed or name.startswith(near):
            # BEiT's class token is 0 at first: the norm of that row has a gradient of 38, and a rounding of its size.
            size = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=1.3e-6, atol=1e-5 * max(1.0, size / 10), msg=name)
        else:
            assert torch.equal(one, other), (name, (one - other).abs().max())
    now = dict(net.named_buffers())
    assert [name for one in result.state or () for name in one if not torch.equal(one[name], now[name])] == []
