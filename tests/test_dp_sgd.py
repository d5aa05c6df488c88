"""Per-example clipping for DP-SGD: the pipeline gives the gradients that torch.func gives on one device."""

import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import fpipe
from examples import dp_sgd


def test_clipped_gradients_are_those_of_torch_func():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = dp_sgd.network().double()
    batch = dp_sgd.sample_points(11, 0)
    batch = batch[0].double(), batch[1]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.cross_entropy)
    rows = dp_sgd.pipeline(fpipe.per_example(model))(params, batch).grads
    private_grads = dp_sgd.private_gradient(rows, limit=0.5, noise=0.0, generator=torch.Generator())

    def of_row(params, x, target):
        return F.cross_entropy(functional_call(net, params, (x[None],)), target[None])

    params_by_name = {name: leaf.detach() for name, leaf in net.named_parameters()}
    grads_by_name = vmap(grad(of_row), in_dims=(None, 0, 0))(params_by_name, *batch)
    clipped = []
    for row in range(11):
        row_grads = [leaf[row] for leaf in grads_by_name.values()]
        norm = torch.cat([leaf.flatten() for leaf in row_grads]).norm()
        clipped.append([leaf * min(1.0, 0.5 / norm.item()) for leaf in row_grads])
    grads_by_row = ([leaf[row] for stage in rows for leaf in stage.values()] for row in range(11))
    assert any(fpipe.global_norm(row_grads).item() > 0.5 for row_grads in grads_by_row)
    for (name, leaf), *parts in zip(
        ((n, g) for stage in private_grads for n, g in stage.items()), *clipped, strict=True
    ):
        torch.testing.assert_close(leaf, sum(parts) / 11, rtol=1e-10, atol=1e-12, msg=name)


def test_private_training_learns(capsys):
    with torch.random.fork_rng(devices=[]):
        assert dp_sgd.run(steps=60) > 0.7
    assert "of the worst example" in capsys.readouterr().out
