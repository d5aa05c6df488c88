"""Loss and gradients of a net under plain autograd, microbatch by microbatch, reseeded where each stage begins."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fpipe
from fpipe import tree


def eager_loss_and_grads(
    net: nn.Module,
    batch: tuple[Any, Any],
    microbatch_count: int,
    *,
    key: int,
    ends: Sequence[str],
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch and the gradients of trained parameters by name.

    Args:
        ends: paths of the modules after whose calls stages end, in order.
        loss: None if the net computes its loss.
    """
    stage = index = 0

    # A cut net draws in each stage from the key folded with the stage and the microbatch. Hooks on the modules in which
    # stages end reseed torch's generator there, so that the live net draws the same numbers.
    def seed() -> None:
        torch.manual_seed(fpipe.fold_in(key, stage, index))

    def count_calls_of(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal stage
            if stage < len(ends) and ends[stage] == path:
                stage += 1
                seed()

        return hook

    hooks = [net.get_submodule(path).register_forward_hook(count_calls_of(path)) for path in {*ends}]
    trained_params = {name: leaf for name, leaf in net.named_parameters() if leaf.requires_grad}
    microbatches = split_batch(batch, microbatch_count)
    total, grads, rows = torch.zeros(()), dict[str, Tensor](), sum(count for _, count in microbatches)
    for index, ((inputs, target), count) in enumerate(microbatches):
        stage = 0
        seed()
        output = call_net(net, inputs)
        part_loss = (
            loss(output, target) if loss is not None else output if isinstance(output, Tensor) else output["loss"]
        )
        weighted_loss = part_loss * (count / rows)
        part_grads = torch.autograd.grad(weighted_loss, [*trained_params.values()], allow_unused=True)
        total = total + weighted_loss.detach() if index else weighted_loss.detach()
        for name, grad in zip(trained_params, part_grads, strict=True):
            if grad is not None:
                grads[name] = grads[name] + grad if name in grads else grad
    for hook in hooks:
        hook.remove()
    return total, grads


def call_net(net: nn.Module, inputs: Any) -> Any:
    """Call a net with a dict of keywords, a tuple of arguments or a single argument."""
    if isinstance(inputs, Mapping):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def split_batch(batch: Any, microbatch_count: int) -> list[tuple[Any, int]]:
    """Split a batch into microbatches, each with its number of rows."""
    leaves, spec = tree.flatten(batch)
    columns = [
        leaf.tensor_split(microbatch_count) if isinstance(leaf, Tensor) else [leaf] * microbatch_count
        for leaf in leaves
    ]
    counts = [len(piece) for piece in next(column for column in columns if isinstance(column[0], Tensor))]
    microbatches = zip(zip(*columns, strict=True), counts, strict=True)
    return [(tree.unflatten(spec, list(row_leaves)), count) for row_leaves, count in microbatches]


def disable_caches(net: Any) -> None:
    """Turn off the caches of a transformers model: with a cache attention reads copies, whose last bits differ."""
    for module in net.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False


def assert_cut_equals_net(
    net: nn.Module, batch: tuple[Any, Any], ends: Sequence[str], loss: Any = None, near: tuple[str, ...] = ()
) -> None:
    """Assert that a net cut in four has the net's loss, gradients and state, bit by bit.

    Tied leaves, which several stages sum, and names that begin with a path of `near` may differ by rounding.
    """
    key, microbatch_count = 3, 2
    model, params, state = fpipe.from_module(net, 4, batch=batch, loss=loss)
    steps = fpipe.schedules.zb_h1(4), fpipe.checkpoint("except_last"), fpipe.merge()
    program = fpipe.chain(fpipe.split(microbatch_count), *steps)(fpipe.program(model))
    traced_state = state if any(state) else None
    report = fpipe.verify(program, model, params, batch, state=traced_state, key=key)
    assert report.bitwise, report
    result = fpipe.build(program, model)(params, batch, state=traced_state, key=key)
    disable_caches(net)
    expected_loss, expected_grads = eager_loss_and_grads(net, batch, microbatch_count, key=key, ends=ends, loss=loss)
    actual_grads = fpipe.join_params(model, result.grads)
    tied_names = {name for tie in model.ties for _, name in tie}
    names_with_grad = {name for name, _ in net.named_parameters() if actual_grads.get(name) is not None}
    assert names_with_grad - tied_names == expected_grads.keys() - tied_names
    for name, actual, expected in [
        ("", result.loss, expected_loss),
        *((name, actual_grads[name], expected_grads[name]) for name in expected_grads),
    ]:
        if name in tied_names or name.startswith(near):
            # BEiT's class token is 0 at first: the norm of that row has a gradient of 38, and a rounding of its size.
            size = float(expected.abs().max())
            torch.testing.assert_close(actual, expected, rtol=1.3e-6, atol=1e-5 * max(1.0, size / 10), msg=name)
        else:
            assert torch.equal(actual, expected), (name, (actual - expected).abs().max())
    expected_buffers = dict(net.named_buffers())
    assert [
        name
        for stage_buffers in result.state or ()
        for name in stage_buffers
        if not torch.equal(stage_buffers[name], expected_buffers[name])
    ] == []
