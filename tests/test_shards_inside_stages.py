"""Parameters sharded twice: over processes that share a stage ("tp"), and over replicas."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fpipe
from tests.processes import Processes, time_call
from tests.test_sharded import by_autograd, loss, sentences, word_net
from tests.test_sharded import parallelize_net as parallel

POLICIES: dict[str, dict[str, Any]] = {"step": {}, "use": {"gather": "use"}, "microbatch": {"scatter": "microbatch"}}


def compare_shards_of_shards(rank: int, policy: str, sequence: bool) -> list[str]:
    """Return the differences of a step on shards of shards. Replicas with whole parts agree to the bit, one device
    agrees to rounding."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    net, (x, target) = parallel(word_net(), mesh["tp"], sequence), sentences()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    base, replica = merged(fpipe.program(model)), mesh.get_local_rank("dp")
    batch = x.chunk(2)[replica], target.chunk(2)[replica]
    shards = fpipe.shard_params(params, mesh["dp", "tp"])
    results: list[Any] = []
    for program, step_params in (
        (fpipe.data_parallel()(base), params),
        (fpipe.shard(**POLICIES[policy])(base), shards),
    ):
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(step_params, batch))
        step(step_params, batch)
        results.append(step(step_params, batch))
    replicated, sharded_grads = (
        {name: grad for stage in result.grads for name, grad in stage.items()} for result in results
    )
    shard_by_name = {name: leaf for stage in shards for name, leaf in stage.items()}
    expected, bits = by_autograd(word_net(), (x, target)), policy != "microbatch"
    wrong = [
        f"{name} elsewhere" for name, grad in sharded_grads.items() if grad.placements != shard_by_name[name].placements
    ]
    wrong += [
        name for name, grad in sharded_grads.items() if not torch.allclose(gather_full(grad), expected[name], atol=1e-7)
    ]
    wrong += [
        f"bits of {n}"
        for n in sharded_grads
        if bits and not torch.equal(gather_full(sharded_grads[n]), gather_full(replicated[n]))
    ]
    return wrong + ["missing"] * (len(sharded_grads) != len(expected))


def gather_full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("policy", "sequence"),
    [
        pytest.param(policy, sequence, marks=pytest.mark.deep if sequence != (policy == "step") else [])
        for policy in POLICIES
        for sequence in (False, True)
    ],
)
def test_shards_of_shards_give_the_gradients_of_unsharded_parts(four: Processes, policy: str, sequence: bool):
    assert four.run(compare_shards_of_shards, policy, sequence) == [[]] * 4


def misplaced_names(rank: int) -> list[str]:
    """Return the parameters that shard_params places differently from fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(word_net(), mesh["tp"], False)
    (ours,) = fpipe.shard_params([dict(net.named_parameters())], mesh["dp", "tp"])
    net = parallel(word_net(), mesh["tp"], False)
    fully_shard(net, mesh=mesh["dp"])
    theirs = dict(net.named_parameters())
    pairs = [(name, ours[name], theirs[name]) for name in ours if isinstance(theirs[name], DTensor)]
    return [name for name, a, b in pairs if a.placements != b.placements or not torch.equal(a.to_local(), b.to_local())]


def test_shards_of_shards_lie_where_fully_shard_puts_them(four: Processes):
    assert four.run(misplaced_names) == [[]] * 4


def refusal_messages(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    model, params, _ = fpipe.from_sequential(parallel(word_net(), mesh["tp"], False), stages=2, loss=loss)
    program = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False), fpipe.shard())(fpipe.program(model))
    with pytest.raises(TypeError) as error:
        fpipe.shard_params(params, mesh["dp"])

    def train() -> None:
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, sentences()))
        step(params, sentences())

    return [str(error.value), time_call(train)[0]]  # where another process fails first, its words


def test_parts_that_are_not_sharded_are_refused(four: Processes):
    for shard_message, build_message in four.run(refusal_messages):
        assert "Say fpipe.shard_params(params, mesh['dp', 'tp']) to cut its parts" in shard_message
        assert "that is none of 'dp'" in build_message
        assert "makes a replica's shards" in build_message
