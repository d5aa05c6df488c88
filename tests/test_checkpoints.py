"""Saved trainings continue bit by bit on other ranks, in another cut and in shards."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_data_parallel import meshed
from tests.test_distributed import MSE, is_equal_tree, local_part, rows
from tests.test_update import join_stages, net_of, updating_program


def build_training(stages: int, schedule: str, *transforms: Any) -> tuple[Any, Any, fpipe.Program]:
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net_of()), stages=stages, loss=MSE)
    return model, params, updating_program(model, fpipe.schedules.get(schedule)(2), "AdamW", None, *transforms)


def train(steps: int, params: Any = None, opt: Any = None) -> fpipe.Result:
    """Train for some steps in one process, from the start or from these parameters and state."""
    model, initial_params, program = build_training(2, "gpipe")
    params = initial_params if params is None else params
    result = fpipe.Result(params=params, opt=opt or fpipe.optimizer_state(program, params))
    step = fpipe.build(program, model)
    for _ in range(steps):
        result = step(result.params, rows(8), opt=result.opt, lr=0.01)
    return result


def test_training_continues_in_another_cut_bit_by_bit(tmp_path: Path):
    result, (_, initial_params, program) = train(2), build_training(2, "gpipe")
    fpipe.save(tmp_path, program, result.params, opt=result.opt, step=2, loss=float(result.loss))
    model, params, other_program = build_training(4, "zbv")
    opt = fpipe.optimizer_state(other_program, params)
    loaded = fpipe.load(tmp_path, other_program, params, opt=opt)
    assert loaded.numbers == {"step": 2, "loss": float(result.loss)}
    step = fpipe.build(other_program, model)
    next_result = step(loaded.params, rows(8), opt=loaded.opt, lr=0.01)
    expected = train(3)
    assert all(
        torch.equal(leaf, join_stages(expected.params)[name]) for name, leaf in join_stages(next_result.params).items()
    )
    assert join_stages(params).keys() == join_stages(initial_params).keys()
    assert all(
        torch.equal(leaf, join_stages(initial_params)[name]) for name, leaf in join_stages(params).items()
    )  # loading wrote into no leaf


def test_checkpoints_with_too_many_blocks_are_refused(tmp_path: Path):
    """Used to load five of six blocks and train without the sixth."""
    blocks = [{"w": torch.ones(2)} for _ in range(6)]
    fpipe.save(tmp_path, fpipe.program(6), tuple(blocks), step=3)
    with pytest.raises(
        ValueError, match=r"has params of 5\.w, which is not among these: it was saved of another net\."
    ):
        fpipe.load(tmp_path, fpipe.program(5), tuple(blocks[:5]))
    params = tuple({"w": torch.zeros(2)} for _ in range(6))
    assert is_equal_tree(fpipe.load(tmp_path, fpipe.program(6), params).params, tuple(blocks))


def test_running_statistics_are_saved(tmp_path: Path):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=MSE)
    program = updating_program(model, fpipe.schedules.gpipe(2), "SGD", None, momentum=0.9)
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model)(params, rows(8), state=state, opt=opt, lr=0.1)
    fpipe.save(tmp_path, program, result.params, opt=result.opt, state=result.state)
    loaded = fpipe.load(tmp_path, program, params, opt=opt, state=state)
    loaded_state = fpipe.load_params(model, program, tmp_path, rank=1, state=state)
    assert is_equal_tree((loaded.params, loaded.opt, loaded.state), (result.params, result.opt, result.state))
    assert is_equal_tree(loaded_state[1], result.state[1])


def test_a_gathered_file_loads_into_another_cut(tmp_path: Path):
    _, params, program = build_training(2, "gpipe")
    file = tmp_path / "model.safetensors"
    assert fpipe.gather_state_dict(program, params, file=file) is None
    other_model, _, other_program = build_training(4, "zbv")
    loaded = fpipe.load_params(other_model, other_program, str(file), rank=0)
    gathered = fpipe.gather_state_dict(program, params)
    assert gathered is not None
    assert all(torch.equal(leaf, gathered[name]) for name, leaf in join_stages(loaded).items())
    # Strict: a missing or unexpected name raises.
    net = net_of()
    net.load_state_dict(gathered)


def test_parameters_of_functions_are_named_by_stage():
    params = ({"w": torch.ones(1)}, {"w": torch.zeros(2)})
    assert list(fpipe.gather_state_dict(fpipe.program(2), params) or ()) == ["0.w", "1.w"]


def test_a_saved_folder_loads_onto_a_meta_net(tmp_path: Path):
    """Loading needs only names, shapes and dtypes; used to return the meta tensors unfilled."""
    _, params, program = build_training(2, "gpipe")
    fpipe.save(tmp_path, program, params, opt=fpipe.optimizer_state(program, params))
    model, meta_params, _ = fpipe.from_sequential(net_of().to("meta"), stages=4, loss=MSE)
    meta_program = updating_program(model, fpipe.schedules.gpipe(1), "AdamW", None)
    loaded = fpipe.load(tmp_path, meta_program, meta_params, opt=fpipe.optimizer_state(meta_program, meta_params))
    for loaded_params in (loaded.params, fpipe.load_params(model, meta_program, tmp_path, rank=0)):
        assert all(torch.equal(leaf, join_stages(params)[name]) for name, leaf in join_stages(loaded_params).items())
    assert not any(leaf.is_meta for leaf in fpipe.tree.leaves(loaded.opt))


def test_a_second_save_into_a_folder_gives_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    for value in (1.0, 2.0):
        fpipe.save(tmp_path, fpipe.program(1), ({"w": torch.tensor(value)},))
    assert fpipe.load(tmp_path, fpipe.program(1), ({"w": torch.tensor(0.0)},)).params == ({"w": torch.tensor(2.0)},)
    assert not recwarn.list


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    fpipe.save("saved", ONE_STAGE, ({"w": torch.ones(2)},))
    fpipe.save("blocks", ONE_STAGE, ({"w": torch.ones(2), "v": torch.ones(2)},))


ONE_STAGE = fpipe.program(1)
test_invalid_checkpoints_are_refused = pytest.mark.usefixtures("saved")(
    refusals(
        globals(),
        """
fpipe.save("other", ONE_STAGE, ({"w": torch.ones(2, device="meta")},))
    ValueError: params[0]['w'] is on meta
fpipe.save("file", ONE_STAGE, ({},))
    ValueError: file is a file; name another.
fpipe.save("file/two", ONE_STAGE, ({},))
    ValueError: file is a file; name another.
fpipe.load("saved", ONE_STAGE, ({"v": torch.ones(2)},))
    ValueError: has no params of v
# Used to load six blocks into a net of five.
fpipe.load("blocks", ONE_STAGE, ({"w": torch.ones(2)},))
    ValueError: blocks has params of v, which is not among these: it was saved of another net.
fpipe.load("saved", ONE_STAGE, ({"w": torch.ones(3)},))
    ValueError: shape [2], and is of shape [3]
fpipe.gather_state_dict(ONE_STAGE, ({},), file=Path("o.pt"))
    ValueError: file= is a .safetensors file, found 'o.pt'. For another format write the dict
fpipe.gather_state_dict(fpipe.program(2), ({},))
    ValueError: the program has 2 stages, one entry each; found 1 entries.
fpipe.gather_state_dict(fpipe.program(2), ({}, None))
    ValueError: no rank has passed stage 1
fpipe.gather_state_dict(ONE_STAGE, ({"w": 3},))
    ValueError: no tensor at w
""",
    )
)


def save_on_four(rank: int, folder: str, sharded: bool) -> Any:
    """Train two steps on 2 x 2 processes and save them; return the parameters gathered on rank 0."""
    mesh, replica, pipeline_rank = meshed()
    replication = fpipe.shard() if sharded else fpipe.data_parallel()
    model, params, program = build_training(4, "interleaved", replication)
    local_params = local_part(program, pipeline_rank, params)
    local_params = fpipe.shard_params(local_params, mesh["dp"]) if sharded else local_params
    batch = tuple(half.chunk(2)[replica] for half in rows(8))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(local_params, batch))
    result = fpipe.Result(params=local_params, opt=fpipe.optimizer_state(program, local_params))
    for _ in range(2):
        result = step(result.params, batch, opt=result.opt, lr=0.01)
    if sharded:
        fpipe.save(folder, program, result.params, opt=result.opt, mesh=mesh, step=2, background=True).result()
    else:
        fpipe.save(folder, program, result.params, opt=result.opt, mesh=mesh, step=2)
    gathered = fpipe.gather_state_dict(program, result.params, mesh=mesh)
    fpipe.gather_state_dict(program, result.params, mesh=mesh, file=f"{folder}.safetensors")
    return None if gathered is None else {name: leaf.tolist() for name, leaf in gathered.items()}


def load_on_four(rank: int, folder: str, sharded: bool) -> Any:
    """Load parameters and optimizer state on 2 x 2 processes; return both gathered on rank 0."""
    mesh, _, pipeline_rank = meshed()
    _, params, program = build_training(2, "one_f_one_b", fpipe.shard() if sharded else fpipe.data_parallel())
    local_params = local_part(program, pipeline_rank, params)
    local_params = fpipe.shard_params(local_params, mesh["dp"]) if sharded else local_params
    loaded = fpipe.load(folder, program, local_params, opt=fpipe.optimizer_state(program, local_params), mesh=mesh)
    assert loaded.numbers == {"step": 2}
    with pytest.raises(ValueError, match=r"ranks along dimension 'pp' of a mesh, and the mesh has dp\. Say mesh=init"):
        fpipe.gather_state_dict(program, loaded.params, mesh=mesh["dp"])
    gathered = [fpipe.gather_state_dict(program, tree, mesh=mesh) for tree in (loaded.params, loaded.opt)]
    return None if gathered[0] is None else [{name: leaf.tolist() for name, leaf in tree.items()} for tree in gathered]


@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "replicas"])
def test_training_continues_on_other_ranks(four: Processes, tmp_path: Path, sharded: bool):
    folder = str(tmp_path / "saved")
    gathered, *other_results = four.run(save_on_four, folder, sharded)
    assert other_results == [None] * 3
    _, params, program = build_training(2, "gpipe")
    loaded = fpipe.load(folder, program, params, opt=fpipe.optimizer_state(program, params))
    assert {name: leaf.tolist() for name, leaf in join_stages(loaded.params).items()} == gathered
    reloaded, *_ = four.run(load_on_four, folder, not sharded)
    assert reloaded[0] == gathered
    opt = fpipe.gather_state_dict(program, loaded.opt)
    assert opt is not None
    assert reloaded[1] == {name: leaf.tolist() for name, leaf in opt.items()}
    model, _, _ = build_training(2, "gpipe")
    file_params = fpipe.load_params(model, program, f"{folder}.safetensors", rank=1)
    assert all(leaf.tolist() == gathered[name] for name, leaf in join_stages(file_params).items())
