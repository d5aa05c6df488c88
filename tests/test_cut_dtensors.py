"""Nets of DTensors are cut at redistributions, on two ranks of a program times two tensor-parallel ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fpipe
from fpipe.tree import tree_map
from tests.processes import Processes
from tests.test_sharded import gather_full, loss, meshed, placements_of, sentences, word_net

KEY = 7


def parallel_net(tp: DeviceMesh, sequence: bool) -> nn.Module:
    """Return a tensor-parallel block whose activations between modules are replicated or sequence shards."""
    net, replicated, sequence_shard = word_net(dropout=0.5), Replicate(), Shard(1)
    del net[2]
    up_style, down_style = ColwiseParallel(output_layouts=replicated), RowwiseParallel(input_layouts=replicated)
    if sequence:
        parallelize_module(
            net,
            tp,
            {
                "1.norm": SequenceParallel(),
                "2": ColwiseParallel(input_layouts=sequence_shard, output_layouts=replicated),
            },
        )
        up_style, down_style = (
            ColwiseParallel(input_layouts=sequence_shard),
            RowwiseParallel(output_layouts=sequence_shard),
        )
    embedding_style = RowwiseParallel(
        input_layouts=replicated, output_layouts=sequence_shard if sequence else replicated
    )
    return parallelize_module(net, tp, {"0": embedding_style, "1.up": up_style, "1.down": down_style})


def dtensor_grads(net: Any, stage: int) -> dict[str, Any]:
    """Sum the gradients of the uncut net over microbatches, each first placed like its parameter.

    Dropout draws with the key of `stage`, which begins with it.
    """
    params, summed_grads = dict(net.named_parameters()), dict[str, Any]()
    for microbatch, (x, target) in enumerate(zip(*(part.tensor_split(4) for part in sentences()), strict=True)):
        seed = fpipe.fold_in(KEY, stage, microbatch)

        def draw(*_: Any, seed: int = seed) -> None:
            torch.manual_seed(seed)

        hook = net[1].dropout.register_forward_pre_hook(draw)
        grads = torch.autograd.grad(loss(net(x), target) * 0.25, [*params.values()])
        hook.remove()
        for (name, param), grad in zip(params.items(), grads, strict=True):
            grad = grad.redistribute(placements=param.placements) if isinstance(param, DTensor) else grad
            summed_grads[name] = summed_grads[name] + grad if name in summed_grads else grad
    return summed_grads


def run_cut_net(rank: int, sequence: bool) -> list[Any]:
    """Return the stages of a cut net, the gradients that differ, and the number of gradients."""
    mesh, batch = meshed(), sentences()
    net = parallel_net(mesh["tp"], sequence)
    model, params, _ = fpipe.from_module(net, batch=batch, loss=loss, cut_collectives=True)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example)
    result = step(fpipe.local_params(program, params, mesh.get_local_rank("pp")), batch, key=KEY)
    grads = {name: grad for stage in result.grads if stage for name, grad in stage.items()}
    expected = dtensor_grads(parallel_net(mesh["tp"], sequence), 4 if sequence else 8)
    differences = [
        name for name, grad in grads.items() if not torch.equal(gather_full(grad), gather_full(expected[name]))
    ]
    differences += [
        f"{name} elsewhere" for name, grad in grads.items() if placements_of(grad) != placements_of(expected[name])
    ]
    return [[stage.name.removesuffix(" over tp") for stage in model.stages], differences, len(grads)]


CUT = {
    False: "0, 1.norm; copy; 1.up; gather; 1.up, 1.down; scatter; 1.down; reduce; 1.dropout, 2",
    True: "0, 1.norm; all_gather; 1.up, 1.down; reduce_scatter; 1.dropout; all_gather; 2; gather; 2",
}


@pytest.mark.parametrize("sequence", CUT)
def test_nets_are_cut_where_dtensors_are_redistributed(four: Processes, sequence: bool):
    reports = four.run(run_cut_net, sequence)
    assert [names for names, _, _ in reports] == [CUT[sequence].split("; ")] * 4
    assert [differences for _, differences, _ in reports] == [[]] * 4
    assert sum(count for _, _, count in reports) == 2 * 9
