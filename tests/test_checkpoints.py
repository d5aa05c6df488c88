"""Save a training and go on from it, on other ranks, in another cut, in shards: bit by bit."""

from __future__ import annotations

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
from tests.test_distributed import MSE, alike, own, rows
from tests.test_update import joined, net_of, updating


def made(stages: int, schedule: str, *more: Any) -> tuple[Any, Any, fpipe.Program]:
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net_of()), stages=stages, loss=MSE)
    return model, params, updating(model, fpipe.schedules.get(schedule)(2), "AdamW", None, *more)


def trained(steps: int, params: Any = None, opt: Any = None) -> fpipe.Result:
    """So many steps in one process, from the first or from what is handed in."""
    model, first, program = made(2, "gpipe")
    params = first if params is None else params
    result = fpipe.Result(params=params, opt=opt or fpipe.optimizer_state(program, params))
    step = fpipe.build(program, model)
    for _ in range(steps):
        result = step(result.params, rows(8), opt=result.opt, lr=0.01)
    return result


def test_what_is_saved_is_read_again_in_another_cut(tmp_path: Path):
    result, (_, first, program) = trained(2), made(2, "gpipe")
    fpipe.save(tmp_path, program, result.params, opt=result.opt, step=2, loss=float(result.loss))
    model, params, other = made(4, "zbv")
    opt = fpipe.optimizer_state(other, params)
    found = fpipe.load(tmp_path, other, params, opt=opt)
    assert found.numbers == {"step": 2, "loss": float(result.loss)}
    step = fpipe.build(other, model)
    after = step(found.params, rows(8), opt=found.opt, lr=0.01)
    whole = trained(3)
    assert all(torch.equal(leaf, joined(whole.params)[name]) for name, leaf in joined(after.params).items())
    assert joined(params).keys() == joined(first).keys()
    assert all(torch.equal(leaf, joined(first)[name]) for name, leaf in joined(params).items())  # as it was handed in


def test_a_checkpoint_of_more_blocks_than_there_are_is_refused(tmp_path: Path):
    """Five of six blocks were read, and the training went on without the sixth."""
    blocks = [{"w": torch.ones(2)} for _ in range(6)]
    fpipe.save(tmp_path, fpipe.program(6), tuple(blocks), step=3)
    with pytest.raises(
        ValueError, match=r"has params of 5\.w, which is not among these: it was saved of another net\."
    ):
        fpipe.load(tmp_path, fpipe.program(5), tuple(blocks[:5]))
    params = tuple({"w": torch.zeros(2)} for _ in range(6))
    assert alike(fpipe.load(tmp_path, fpipe.program(6), params).params, tuple(blocks))


def test_running_statistics_are_saved_too(tmp_path: Path):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=MSE)
    program = updating(model, fpipe.schedules.gpipe(2), "SGD", None, momentum=0.9)
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model)(params, rows(8), state=state, opt=opt, lr=0.1)
    fpipe.save(tmp_path, program, result.params, opt=result.opt, state=result.state)
    found = fpipe.load(tmp_path, program, params, opt=opt, state=state)
    read = fpipe.load_params(model, program, tmp_path, rank=1, of=state)
    assert alike((found.params, found.opt, found.state), (result.params, result.opt, result.state))
    assert alike(read[1], result.state[1])


def test_a_file_of_all_ranks_is_read_by_those_of_another_cut(tmp_path: Path):
    _, params, program = made(2, "gpipe")
    file = tmp_path / "model.safetensors"
    assert fpipe.gather_state_dict(program, params, file=file) is None
    other, _, placed = made(4, "zbv")
    loaded = fpipe.load_params(other, placed, str(file), rank=0)
    whole = fpipe.gather_state_dict(program, params)
    assert whole is not None
    assert all(torch.equal(leaf, whole[name]) for name, leaf in joined(loaded).items())
    net = net_of()
    net.load_state_dict(whole)


def test_functions_have_names_with_the_number_of_their_stage():
    params = ({"w": torch.ones(1)}, {"w": torch.zeros(2)})
    assert list(fpipe.gather_state_dict(fpipe.program(2), params) or ()) == ["0.w", "1.w"]


def test_a_folder_of_save_is_read_onto_a_net_on_meta(tmp_path: Path):
    """Names, shapes and dtypes matter, so that tensors on meta are enough; they came back as they were."""
    _, params, program = made(2, "gpipe")
    fpipe.save(tmp_path, program, params, opt=fpipe.optimizer_state(program, params))
    model, meta, _ = fpipe.from_sequential(net_of().to("meta"), stages=4, loss=MSE)
    placed = updating(model, fpipe.schedules.gpipe(1), "AdamW", None)
    found = fpipe.load(tmp_path, placed, meta, opt=fpipe.optimizer_state(placed, meta))
    for read in (found.params, fpipe.load_params(model, placed, tmp_path, rank=0)):
        assert all(torch.equal(leaf, joined(params)[name]) for name, leaf in joined(read).items())
    assert not any(leaf.is_meta for leaf in fpipe.tree.leaves(found.opt))


def test_a_second_save_into_a_folder_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    for value in (1.0, 2.0):
        fpipe.save(tmp_path, fpipe.program(1), ({"w": torch.tensor(value)},))
    assert fpipe.load(tmp_path, fpipe.program(1), ({"w": torch.tensor(0.0)},)).params == ({"w": torch.tensor(2.0)},)
    assert not recwarn.list


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    fpipe.save("saved", ONE, ({"w": torch.ones(2)},))
    fpipe.save("blocks", ONE, ({"w": torch.ones(2), "v": torch.ones(2)},))


ONE = fpipe.program(1)
test_what_cannot_be_is_refused_in_a_sentence = pytest.mark.usefixtures("saved")(
    refusals(
        globals(),
        """
fpipe.save("other", ONE, ({"w": torch.ones(2, device="meta")},))
    ValueError: params[0]['w'] is on meta
fpipe.save("file", ONE, ({},))
    ValueError: file is a file; name another.
fpipe.save("file/two", ONE, ({},))
    ValueError: file is a file; name another.
fpipe.save("other", ONE, ({},), step="3")
    ValueError: step= is a number
fpipe.load("saved", ONE, ({"v": torch.ones(2)},))
    ValueError: has no params of v
# Six blocks were read into a net of five.
fpipe.load("blocks", ONE, ({"w": torch.ones(2)},))
    ValueError: blocks has params of v, which is not among these: it was saved of another net.
fpipe.load("saved", ONE, ({"w": torch.ones(3)},))
    ValueError: shape [2], and is of shape [3]
fpipe.gather_state_dict(ONE, ({},), file=Path("o.pt"))
    ValueError: file= is a .safetensors file, found 'o.pt'. For another format write the dict
fpipe.gather_state_dict(fpipe.program(2), ({},))
    ValueError: 2 stages, and one entry for each
fpipe.gather_state_dict(fpipe.program(2), ({}, None))
    ValueError: no rank has passed stage 1
fpipe.gather_state_dict(ONE, ({"w": 3},))
    ValueError: no tensor at w
fpipe.local_params(ONE, ({},), "0")
    ValueError: rank is a whole number, at least 0; found '0'
fpipe.load_params(*made(2, "gpipe")[::2], net_of().state_dict(), True)
    ValueError: rank is a whole number, at least 0; found True
""",
    )
)


def on_four(rank: int, folder: str, sharded: bool) -> Any:
    """Two steps on 2 x 2 processes, saved; and the whole as rank 0 gathers it."""
    mesh, replica, place = meshed()
    how = fpipe.shard() if sharded else fpipe.data_parallel()
    model, params, program = made(4, "interleaved", how)
    mine = own(program, place, params)
    mine = fpipe.shard_params(mine, mesh["dp"]) if sharded else mine
    batch = tuple(half.chunk(2)[replica] for half in rows(8))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(mine, batch))
    result = fpipe.Result(params=mine, opt=fpipe.optimizer_state(program, mine))
    for _ in range(2):
        result = step(result.params, batch, opt=result.opt, lr=0.01)
    if sharded:
        fpipe.save(folder, program, result.params, opt=result.opt, mesh=mesh, step=2, background=True).result()
    else:
        fpipe.save(folder, program, result.params, opt=result.opt, mesh=mesh, step=2)
    whole = fpipe.gather_state_dict(program, result.params, mesh=mesh)
    fpipe.gather_state_dict(program, result.params, mesh=mesh, file=f"{folder}.safetensors")
    return None if whole is None else {name: leaf.tolist() for name, leaf in whole.items()}


def again_on_four(rank: int, folder: str, sharded: bool) -> Any:
    """Parameters and one moment on 2 x 2 processes, as they were saved, whole on rank 0."""
    mesh, _, place = meshed()
    _, params, program = made(2, "one_f_one_b", fpipe.shard() if sharded else fpipe.data_parallel())
    mine = own(program, place, params)
    mine = fpipe.shard_params(mine, mesh["dp"]) if sharded else mine
    found = fpipe.load(folder, program, mine, opt=fpipe.optimizer_state(program, mine), mesh=mesh)
    assert found.numbers == {"step": 2}
    with pytest.raises(ValueError, match=r"ranks along dimension 'pp' of a mesh, and the mesh has dp\. Say mesh=init"):
        fpipe.gather_state_dict(program, found.params, mesh=mesh["dp"])
    both = [fpipe.gather_state_dict(program, one, mesh=mesh) for one in (found.params, found.opt)]
    return None if both[0] is None else [{name: leaf.tolist() for name, leaf in one.items()} for one in both]


@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "replicas"])
def test_ranks_save_and_others_go_on(four: Processes, tmp_path: Path, sharded: bool):
    folder = str(tmp_path / "saved")
    whole, *rest = four.each(on_four, folder, sharded)
    assert rest == [None] * 3
    _, params, program = made(2, "gpipe")
    found = fpipe.load(folder, program, params, opt=fpipe.optimizer_state(program, params))
    assert {name: leaf.tolist() for name, leaf in joined(found.params).items()} == whole
    again, *_ = four.each(again_on_four, folder, not sharded)
    assert again[0] == whole
    opt = fpipe.gather_state_dict(program, found.opt)
    assert opt is not None
    assert again[1] == {name: leaf.tolist() for name, leaf in opt.items()}
    model, _, _ = made(2, "gpipe")
    loaded = fpipe.load_params(model, program, f"{folder}.safetensors", rank=1)
    assert all(leaf.tolist() == whole[name] for name, leaf in joined(loaded).items())
