"""Nets of DTensors that are cut where these are redistributed, on 2 x 2 processes: two ranks of a program, times two
that share their stages."""

from __future__ import annotations

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


def parallel(tp: DeviceMesh, sequence: bool) -> nn.Module:
    """A block of words, whose activations are whole between modules, or parts of the sequence."""
    net, every, parts = word_net(dropout=0.5), Replicate(), Shard(1)
    del net[2]
    up, down = ColwiseParallel(output_layouts=every), RowwiseParallel(input_layouts=every)
    if sequence:
        parallelize_module(
            net, tp, {"1.norm": SequenceParallel(), "2": ColwiseParallel(input_layouts=parts, output_layouts=every)}
        )
        up, down = ColwiseParallel(input_layouts=parts), RowwiseParallel(output_layouts=parts)
    rows = RowwiseParallel(input_layouts=every, output_layouts=parts if sequence else every)
    return parallelize_module(net, tp, {"0": rows, "1.up": up, "1.down": down})


def by_autograd(net: Any, stage: int) -> dict[str, Any]:
    """The gradients of the same net of DTensors, each placed as its parameter before they are added up; a stage begins
    with the dropout."""
    own, made = dict(net.named_parameters()), dict[str, Any]()
    for microbatch, (x, target) in enumerate(zip(*(part.tensor_split(4) for part in sentences()), strict=True)):
        seed = fpipe.fold_in(KEY, stage, microbatch)

        def draw(*_: Any, seed: int = seed) -> None:
            torch.manual_seed(seed)

        hook = net[1].dropout.register_forward_pre_hook(draw)
        grads = torch.autograd.grad(loss(net(x), target) * 0.25, [*own.values()])
        hook.remove()
        for (name, param), grad in zip(own.items(), grads, strict=True):
            grad = grad.redistribute(placements=param.placements) if isinstance(param, DTensor) else grad
            made[name] = made[name] + grad if name in made else grad
    return made


def cut(rank: int, sequence: bool) -> list[Any]:
    """The stages of a net, what is odd of the gradients of a step, and how many these are."""
    mesh, batch = meshed(), sentences()
    net = parallel(mesh["tp"], sequence)
    model, params, _ = fpipe.from_module(net, example=batch, loss=loss, cut_collectives=True)
    schedule = fpipe.schedules.one_f_one_b_overlap(2)
    program = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example)
    found = step(fpipe.local_params(program, params, mesh.get_local_rank("pp")), batch, key=KEY)
    grads = {name: grad for stage in found.grads if stage for name, grad in stage.items()}
    expected = by_autograd(parallel(mesh["tp"], sequence), 4 if sequence else 8)
    odd = [name for name, grad in grads.items() if not torch.equal(gather_full(grad), gather_full(expected[name]))]
    odd += [f"{name} elsewhere" for name, grad in grads.items() if placements_of(grad) != placements_of(expected[name])]
    return [[stage.name.removesuffix(" over tp") for stage in model.stages], odd, len(grads)]


CUT = {
    False: "0, 1.norm; copy; 1.up; gather; 1.up, 1.down; scatter; 1.down; reduce; 1.dropout, 2",
    True: "0, 1.norm; all_gather; 1.up, 1.down; reduce_scatter; 1.dropout; all_gather; 2; gather; 2",
}


@pytest.mark.parametrize("sequence", CUT)
def test_a_net_of_dtensors_is_cut_where_they_are_redistributed(four: Processes, sequence: bool):
    found = four.run(cut, sequence)
    assert [names for names, _, _ in found] == [CUT[sequence].split("; ")] * 4
    assert [odd for _, odd, _ in found] == [[]] * 4
    assert sum(count for _, _, count in found) == 2 * 9
