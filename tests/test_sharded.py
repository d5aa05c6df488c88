"""Parallelism inside stages, on four processes: two ranks of a program, times two that share the stages of a rank."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import parametrize

import fpipe
from fpipe.tree import tree_map
from tests.processes import SOON, Processes, time_call

LIMIT = 3.0
"""Seconds that a collective inside a stage waits for one that will not come."""


def meshed(limit: float = 40.0) -> DeviceMesh:
    options = dist.ProcessGroupGloo.Options("gloo", timedelta(seconds=limit))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"), backend_override={"tp": options})


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def word_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), Block(dropout=dropout), Block(dropout=dropout), nn.Linear(8, 12))


def parallelize_net(net: nn.Sequential, tp: DeviceMesh, sequence: bool) -> nn.Sequential:
    """Shard the embedding by rows and the products by columns and rows; with `sequence` the activations too."""
    flows = Shard(1) if sequence else Replicate()
    sequence_plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))} if sequence else {}
    block = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=flows)} | sequence_plan
    ends = RowwiseParallel(input_layouts=Replicate(), output_layouts=flows)
    parallelize_module(net, tp, {"0": ends, "3": ColwiseParallel(input_layouts=flows, output_layouts=Replicate())})
    for module in net[1:3]:
        parallelize_module(module, tp, block)
    return net


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def sentences() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(12, (8, 6)), torch.randint(12, (8, 6))


def make_program(model: fpipe.Model, schedule: Any, *transforms: Any) -> fpipe.Program:
    return fpipe.chain(fpipe.split(4), *transforms, schedule, fpipe.merge())(fpipe.program(model))


def by_autograd(net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of one device."""
    for x, target in zip(*(part.tensor_split(4) for part in batch), strict=True):
        (loss(net(x), target) * 0.25).backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def gather_full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare_tensor_parallel(rank: int, sequence: bool) -> list[str]:
    """Return the differences of a tensor-parallel step. One device agrees to rounding, since an all-reduce adds in its
    own order; one process with all ranks of the program agrees to the bit."""
    mesh = meshed()
    net, batch, pp_rank = parallelize_net(word_net(), mesh["tp"], sequence), sentences(), mesh.get_local_rank("pp")
    expected = by_autograd(word_net(), batch)
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=loss)
    program = make_program(model, fpipe.schedules.zbv(2), fpipe.checkpoint("except_last"))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example)
    step_result = step(fpipe.local_params(program, params, pp_rank), batch)
    grads = {name: grad for stage in step_result.grads if stage for name, grad in stage.items()}
    wrong = [name for name, grad in grads.items() if not torch.allclose(gather_full(grad), expected[name], atol=1e-7)]
    param_by_name = dict(net.named_parameters())
    wrong += [
        f"{name} elsewhere" for name, grad in grads.items() if placements_of(grad) != placements_of(param_by_name[name])
    ]

    alone = fpipe.build(program, model)(params, batch)
    plain = fpipe.build(program, model, trace=False)(params, batch)
    pairs = [(step_result, alone), *([(alone, plain)] if sequence else [])]
    for actual, reference in pairs:
        stage_pairs = zip(actual.grads, reference.grads, strict=True)
        wrong += [
            name
            for a, b in stage_pairs
            if a and b
            for name in a
            if not torch.equal(local_part(a[name]), local_part(b[name]))
        ]
    norm = fpipe.global_norm(step_result.grads, mesh=mesh)
    wrong += ["norm"] * (not torch.allclose(norm, nn.utils.get_total_norm(list(expected.values()))))

    optimizer = torch.optim.SGD([leaf for stage in params for leaf in stage.values()], lr=0.1)
    fpipe.assign_grads(params, alone.grads)
    optimizer.step()
    moved = {name: gather_full(param.detach()) for name, param in net.named_parameters()}
    start = dict(word_net().named_parameters())
    close = {name: torch.allclose(start[name] - moved[name], 0.1 * expected[name], atol=1e-6) for name in moved}
    return wrong + [f"{name} is not trained" for name, is_close in close.items() if not is_close]


def placements_of(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_stages_have_the_gradients_of_one_device(four: Processes, sequence: bool):
    assert four.run(compare_tensor_parallel, sequence) == [[]] * 4


def verify_tensor_parallel(rank: int) -> tuple[bool, list[list[str]], bool]:
    """Return whether a program with dropout is bitwise plain autograd on the same shards, the collectives of each part
    of a stage, and whether gradients are placed like their parameters."""
    mesh = meshed()
    net = parallelize_net(word_net(dropout=0.5), mesh["tp"], False)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
    program = make_program(model, fpipe.schedules.zb_h1(2), fpipe.checkpoint())
    report = fpipe.verify(program, model, params, sentences(), key=7)

    net.eval()
    x = torch.randn(2, 6, 8)
    block_params = {name: param.detach() for name, param in net[1].named_parameters()}
    linearized = fpipe.linearize(lambda p, x: torch.func.functional_call(net[1], p, (x,)), block_params, x)
    parts = [
        [collective for collective in ("all_reduce", "wait_tensor") for _ in range(part.count(f"{collective}("))]
        for part in (str(linearized).split("\n\n")[part_index] for part_index in (0, 2, 3))
    ]
    y, res = linearized.forward(block_params, x)
    _, wres = linearized.backward_input(block_params, res, torch.ones_like(y))
    weight_grads = linearized.backward_weight(block_params, wres)
    is_placed = all(placements_of(weight_grads[name]) == placements_of(block_params[name]) for name in block_params)
    return report.bitwise, parts, is_placed


def test_f_and_i_have_collectives_and_w_has_none(four: Processes):
    """F adds up parts of its output, I parts of its input gradient; each part waits for its collectives."""
    collectives = ["all_reduce", "wait_tensor"]
    assert four.run(verify_tensor_parallel) == [(True, [collectives, collectives, []], True)] * 4


class Gather(nn.Module):
    """A parameter gathered from shards, whose gradient is the mean over processes with different rows."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def fully_sharded(net: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for module in list(net.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gather(), unsafe=True)
    return net


def compare_fully_sharded(rank: int) -> tuple[list[str], bool]:
    """Return the differences of a step in which each process has half of the rows and parameters, and whether the step
    is plain autograd."""
    mesh = meshed()
    net, batch, tp_rank = fully_sharded(word_net(), mesh["tp"]), sentences(), mesh.get_local_rank("tp")
    expected = by_autograd(word_net(), batch)
    local_batch = tuple(torch.cat([rows.chunk(2)[tp_rank] for rows in part.tensor_split(4)]) for part in batch)
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=loss)
    program = make_program(model, fpipe.schedules.zbv(2), fpipe.checkpoint("except_last"))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, local_batch))
    result = step(fpipe.local_params(program, params, mesh.get_local_rank("pp")), local_batch)
    grads = {name: grad for stage in result.grads if stage for name, grad in stage.items()}
    plain = {name: name.replace("parametrizations.", "").replace(".original", "") for name in grads}
    wrong = [name for name, grad in grads.items() if placements_of(grad) != (Shard(0),)]
    wrong += [
        name for name, grad in grads.items() if not torch.allclose(gather_full(grad), expected[plain[name]], atol=1e-7)
    ]
    return wrong, fpipe.verify(program, model, params, local_batch).bitwise


def test_fully_sharded_parameters_are_gathered_inside_a_stage(four: Processes):
    """A parametrization, as FSDP has it without hooks, gathers at each use and recompute, and scatters gradients."""
    assert four.run(compare_fully_sharded) == [([], True)] * 4


class Enter(torch.autograd.Function):
    """Megatron's f: gradients are added up over the shards that read the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(dy, ctx.group), None


class Leave(torch.autograd.Function):
    """Megatron's g: partial results are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def all_reduce_sum(x: Tensor, group: Any) -> Tensor:
    from torch.distributed import _functional_collectives as functional

    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def manual_stages(mesh: DeviceMesh) -> tuple[fpipe.Model, Any, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return stages of plain shards that call collectives, and the whole parameters by stage and name."""
    group, tp_rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    torch.manual_seed(2)
    full = {f"{n}{name}": torch.randn(8, 8).mul_(0.5).requires_grad_() for n in range(2) for name in ("up", "down")}

    def stage(p: Any, x: Tensor) -> Tensor:
        return Leave.apply(torch.tanh(Enter.apply(x, group) @ p["up"]) @ p["down"], group)

    cut = {"up": 1, "down": 0}
    params = tuple(
        {name: full[f"{n}{name}"].detach().chunk(2, dim)[tp_rank] for name, dim in cut.items()} for n in range(2)
    )
    model = fpipe.from_functions([stage, stage], nn.functional.mse_loss)
    return model, params, (torch.randn(8, 8), torch.randn(8, 8)), full


def compare_manual_collectives(rank: int) -> list[str]:
    mesh = meshed()
    model, params, batch, full = manual_stages(mesh)
    program, pp_rank = make_program(model, fpipe.schedules.zb_h1(2)), mesh.get_local_rank("pp")
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    actual = step(fpipe.local_params(program, params, pp_rank), batch).grads[pp_rank]
    for x, target in zip(*(part.chunk(4) for part in batch), strict=True):
        for n in range(2):
            x = torch.tanh(x @ full[f"{n}up"]) @ full[f"{n}down"]
        (nn.functional.mse_loss(x, target) * 0.25).backward()
    dims = {"up": 1, "down": 0}
    tp_rank = mesh.get_local_rank("tp")
    expected = {name: full[f"{pp_rank}{name}"].grad.chunk(2, dim)[tp_rank] for name, dim in dims.items()}
    return [name for name in expected if not torch.allclose(actual[name], expected[name], atol=1e-6)]


def test_stages_of_plain_shards_may_call_collectives(four: Processes):
    assert four.run(compare_manual_collectives) == [[]] * 4


def refuse_case(rank: int, case: str) -> str:
    from torch.distributed.fsdp import fully_shard

    mesh = meshed()
    tp, batch = mesh["tp"], sentences()
    net = parallelize_net(word_net(), tp, False)
    try:
        if case == "loss function":

            def loss_fn(params: Any, batch: Any) -> Tensor:
                return loss(torch.func.functional_call(net, params, (batch[0],)), batch[1])

            fpipe.from_loss(loss_fn, dict(net.named_parameters()), batch)
        if case == "output":
            net = word_net()
            parallelize_module(net, tp, {"3": ColwiseParallel(use_local_output=False)})
        if case == "exported":
            net[1].register_buffer("table", DTensor.from_local(torch.ones(2), tp, [Shard(0)]))
            fpipe.from_module(net, 2, loss=loss, batch=batch)
        if case in ("fully_shard", "whole", "whole, exported", "whole, called"):
            net = word_net()
            for module in net[1:3] if case == "fully_shard" else [net]:
                fully_shard(module, mesh=tp)
        if case == "whole, exported":
            fpipe.from_module(net, 2, loss=loss, batch=batch)
        if case == "whole, called":
            fpipe.from_functions([lambda p, x: torch.func.functional_call(net, p, (x,))], loss)
        if case == "ddp":
            net = nn.Sequential(nn.parallel.DistributedDataParallel(word_net(), process_group=tp.get_group()))
        model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
        if case == "by hand":
            model, params, batch, _ = manual_stages(mesh)
        program = make_program(model, fpipe.schedules.gpipe(2))
        if case == "batch":
            batch = DTensor.from_local(batch[0], tp, [Replicate()]), batch[1]
        if case in ("threads", "by hand"):
            fpipe.build(program, model, runtime="threads")(params, batch)
        fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch))
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


REFUSED = {
    "threads": "stages that talk to other processes (DTensors, collectives) must do so in the same order in each",
    "by hand": "stages that talk to other processes (DTensors, collectives) must do so in the same order in each",
    "output": "TypeError: what it returned holds a DTensor; only parameters and buffers are sharded",
    "batch": "inputs holds a DTensor; only parameters and buffers are sharded",
    "loss function": "is a DTensor, of which no loss function is traced whole. from_sequential and from_functions take",
    "fully_shard": "module '1' (FSDPBlock) is wrapped by fully_shard, whose hooks gather the module's own parameters",
    "whole": "module '' (FSDPSequential) is wrapped by fully_shard, whose hooks gather the module's own parameters",
    "whole, exported": "module '' (FSDPSequential) is wrapped by fully_shard, whose hooks gather the module's own",
    "whole, called": "module 'net' (FSDPSequential) is wrapped by fully_shard, whose hooks gather the module's own",
    "exported": "buffer '1.table' is a DTensor, which from_module takes only as a parameter. Keep it whole, or use",
    "ddp": "module '0' (DistributedDataParallel) is wrapped by DistributedDataParallel, whose hooks gather",
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_shards_are_refused(four: Processes, case: str):
    for message in four.run(refuse_case, case):
        assert REFUSED[case] in message


def fail_one_process(rank: int, fault: str) -> list[Any]:
    """Return the errors of this process for a step in which one process fails, and for the next step."""
    mesh = meshed(LIMIT)
    model, params, batch, _ = manual_stages(mesh)
    program = make_program(model, fpipe.schedules.one_f_one_b(2))
    options: Any = {"mesh": mesh, "example": (params, batch), "timeout": 2 * LIMIT, "check_finite": True}
    options["check_batch"] = "never"
    step = fpipe.build(program, model, runtime="distributed", **options)
    rank_params = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    dist.barrier()
    step(rank_params, batch)
    if rank == 1 and fault == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1:
        batch[0][5] = torch.nan
    return [*time_call(lambda: step(rank_params, batch)), *time_call(lambda: step(rank_params, batch))]


@pytest.mark.parametrize("fault", ["killed", "failed"])
def test_a_lost_process_ends_those_that_share_its_stage_in_time(fault: str):
    """A failed process closes all its connections, also for collectives inside stages."""
    with Processes(4) as processes:
        processes.start(fail_one_process, fault)
        for rank, outcome in enumerate(processes.results()):
            if rank == 1 and fault == "killed":
                assert outcome is None
                continue
            assert outcome[1] < SOON
            assert "start all ranks again" in outcome[2]
            if fault == "failed":
                prefixes = "RankError: rank 0 failed in ", "FloatingPointError: "
                assert outcome[0].startswith(prefixes[rank == 1])
