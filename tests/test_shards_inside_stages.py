"""Parameters with two placements: of processes that share a stage ("tp"), and of replicas that share these out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fpipe
from tests.processes import Processes, timed
from tests.test_sharded import by_autograd, loss, sentences, words
from tests.test_sharded import sharded as parallel

HOW: dict[str, dict[str, Any]] = {"step": {}, "use": {"gather": "use"}, "microbatch": {"scatter": "microbatch"}}


def both(rank: int, how: str, sequence: bool) -> list[str]:
    """What is odd of a step on shards of shards: beside replicas that keep their parts whole to the bit, and beside one
    device to rounding."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    net, (x, target) = parallel(words(), mesh["tp"], sequence), sentences()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    base, replica = merged(fpipe.program(model)), mesh.get_local_rank("dp")
    batch = x.chunk(2)[replica], target.chunk(2)[replica]
    shards = fpipe.shard_params(params, mesh["dp", "tp"])
    found: list[Any] = []
    for program, given in ((fpipe.data_parallel()(base), params), (fpipe.shard(**HOW[how])(base), shards)):
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(given, batch))
        step(given, batch)
        found.append(step(given, batch))
    replicated, made = ({name: grad for stage in one.grads for name, grad in stage.items()} for one in found)
    own = {name: leaf for stage in shards for name, leaf in stage.items()}
    expected, bits = by_autograd(words(), (x, target)), how != "microbatch"
    odd = [f"{name} elsewhere" for name, grad in made.items() if grad.placements != own[name].placements]
    odd += [name for name, grad in made.items() if not torch.allclose(full(grad), expected[name], atol=1e-7)]
    odd += [f"bits of {n}" for n in made if bits and not torch.equal(full(made[n]), full(replicated[n]))]
    return odd + ["missing"] * (len(made) != len(expected))


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("how", "sequence"),
    [
        pytest.param(how, sequence, marks=pytest.mark.deep if sequence and how != "step" else [])
        for how in HOW
        for sequence in (False, True)
    ],
)
def test_shards_of_shards_train_as_parts_that_are_whole(four: Processes, how: str, sequence: bool):
    assert four.each(both, how, sequence) == [[]] * 4


def placed(rank: int) -> list[str]:
    """Where shard_params puts a parameter otherwise than fully_shard does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(words(), mesh["tp"], False)
    (ours,) = fpipe.shard_params([dict(net.named_parameters())], mesh["dp", "tp"])
    net = parallel(words(), mesh["tp"], False)
    fully_shard(net, mesh=mesh["dp"])
    theirs = dict(net.named_parameters())
    pairs = [(name, ours[name], theirs[name]) for name in ours if isinstance(theirs[name], DTensor)]
    return [name for name, a, b in pairs if a.placements != b.placements or not torch.equal(a.to_local(), b.to_local())]


def test_shards_of_shards_lie_where_fully_shard_puts_them(four: Processes):
    assert four.each(placed) == [[]] * 4


def refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    model, params, _ = fpipe.from_sequential(parallel(words(), mesh["tp"], False), stages=2, loss=loss)
    program = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False), fpipe.shard())(fpipe.program(model))
    with pytest.raises(TypeError) as error:
        fpipe.shard_params(params, mesh["dp"])

    def train() -> None:
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, sentences()))
        step(params, sentences())

    return [str(error.value), timed(train)[0]]  # where another process fails first, its words


def test_parts_that_are_not_shared_out_are_refused_with_the_way_out(four: Processes):
    for first, second in four.each(refused):
        assert "fpipe.shard_params(params, mesh['dp', 'tp']) cuts them on" in first
        assert "that is none of 'dp'" in second
        assert "makes a replica's shards" in second
