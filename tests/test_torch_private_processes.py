"""Private parts of torch.distributed that fpipe uses: each message says what breaks without them."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fpipe.torch_private.dispatch import C10D, C10D_AUTOGRAD
from fpipe.torch_private.pipelining import TableRuntime
from fpipe.torch_private.processes import (
    backend_on,
    clone_client,
    coalesce,
    create_gloo,
    create_pair_group,
    default_store,
    is_served_by_process,
    strided_shard,
    timeout_of,
    world_group,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group_of_one(tmp_path: Path):
    """Join a process group of one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=7)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_collectives_are_ops_of_graphs(name: str):
    for ops in (C10D, C10D_AUTOGRAD):
        assert hasattr(ops, name), f"torch has no op {name} in {ops}, by which a graph's collectives are found"


def test_torchs_runtime_takes_tables():
    assert issubclass(TableRuntime, PipelineScheduleMulti), "torch's runtime is another class: no program runs on it"
    assert "_prepare_schedule_with_comms" in dir(TableRuntime), "torch's runtime takes no table with transfers"


def test_the_default_group_is_found():
    assert world_group().size() == 1, "the default process group is elsewhere: meetings and meshes look for it"


def test_the_default_store_is_found():
    default_store().set("word", "there")
    assert default_store().get("word") == b"there", "ranks can no longer leave word in the default group's store"


def test_a_store_takes_further_clients():
    clone_client(default_store()).set("more", "there")
    assert default_store().get("more") == b"there", "a watchdog waits for a store as long as its process does"


def test_a_tcp_store_is_recognized():
    tcp = dist.PrefixStore("more", dist.TCPStore("localhost", 0, is_master=True))
    served = is_served_by_process(tcp), is_served_by_process(default_store())
    assert served == (True, False), "nobody is named any longer when the process that keeps the store is lost"


def test_a_group_tells_its_backend_for_a_device():
    assert backend_on(world_group(), CPU).name() == "gloo", "fpipe can no longer tell gloo from NCCL"


def test_collectives_are_coalesced_where_a_backend_can():
    with coalesce(world_group(), [CPU, CPU]) as joint:
        pass
    assert joint == [], "gloo is taken for a backend that starts collectives as one"
    assert {"_start_coalescing", "_end_coalescing"} <= {*dir(dist.ProcessGroup)}, "NCCL starts each part by itself"


def test_a_group_tells_its_timeout():
    assert timeout_of(world_group()) == timedelta(seconds=7), "steps no longer wait as long as their process group"


def test_rows_are_sharded_after_another_shard_of_rows():
    placement = strided_shard(2)
    facts = placement.dim, placement.split_factor, placement.is_replicate(), placement.is_partial()
    assert facts == (0, 2, False, False), "shards of what a stage's processes share are put together in another order"


def test_gloo_makes_connections_next_to_a_groups_own():
    gloo_backend = create_gloo(backend_on(world_group(), CPU), default_store(), 0, 1, timedelta(seconds=7))
    assert gloo_backend.size() == 1, "gloo's connections can no longer be made by hand: what goes down shares those up"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_makes_a_group_of_two():
    assert create_pair_group(dist.ProcessGroupNCCL, default_store(), 0, timedelta(seconds=7)).size() == 2, (
        "NCCL's groups of two can't be made"
    )
