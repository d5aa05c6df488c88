"""A save never harms the one before it, a load never mixes two, and no file runs code."""

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import fpipe
from tests.processes import Processes, exit_code_of

NAME = "params/0.weight"
ONE_STAGE, TWO_STAGES = fpipe.program(1), fpipe.schedules.gpipe(2)(fpipe.program(2))


def params_of(value: float, rank: int | None = None) -> Any:
    """Return parameters of one stage, or of this rank's stage of two, large enough to be written in pieces."""
    stages = tuple({name: torch.full((50, 1000), float(value))} for name in ("0.weight", "1.weight"))
    return (
        tuple(stage if stage_index == rank else None for stage_index, stage in enumerate(stages))
        if rank is not None
        else stages[:1]
    )


def saved_value(folder: Path, program: fpipe.Program = ONE_STAGE, rank: int | None = None) -> tuple[float, Any]:
    """Return the only value in the parameters of a folder, and the step."""
    saved = fpipe.load(folder, program, params_of(0, rank))
    stage = next(stage for stage in saved.params if stage is not None)
    (value,) = {value for leaf in stage.values() for value in leaf.unique().tolist()}
    return value, saved.numbers["step"]


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder: Path, moment: str) -> None:
    """Save step 2, and kill this process while it writes the data, after it or as the folders are switched."""
    files = list[int]()
    dies: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "data": (torch, "save", kill),
        "metadata": (os, "fsync", lambda file: files.append(file) or (len(files) > 1 and kill())),
        "switch": (Path, "replace", kill),
    }
    setattr(*dies[moment])
    fpipe.save(folder, ONE_STAGE, params_of(2), step=2)


@pytest.mark.parametrize("moment", ["data", "metadata", "switch"])
def test_a_kill_during_a_second_save_keeps_the_first(tmp_path: Path, moment: str):
    """Used to leave parameters of one step under the number of another, or an unreadable folder."""
    fpipe.save(tmp_path, ONE_STAGE, params_of(1), step=1)
    assert exit_code_of(save_and_die, tmp_path, moment) == -signal.SIGKILL
    assert saved_value(tmp_path) == (1, 1)
    fpipe.save(tmp_path, ONE_STAGE, params_of(3), step=3)
    assert saved_value(tmp_path) == (3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", f"saved-{3 if moment == 'switch' else 2}"]


FORGOTTEN = """
import sys, torch, fpipe
def full(*_, **__):
    raise OSError(28, "No space left on device")
torch.save = full
fpipe.save(sys.argv[1], fpipe.program(1), ({"w": torch.ones(2)},), background=True)
"""


def test_an_unread_background_failure_is_printed(tmp_path: Path):
    process = subprocess.run([sys.executable, "-c", FORGOTTEN, tmp_path], capture_output=True, text=True, check=False)
    assert "__0_0.distcp could not be written: No space left on device; what" in process.stderr


def gather_and_die(file: Path) -> None:
    os.fsync = kill
    fpipe.gather_state_dict(ONE_STAGE, ({"w": torch.zeros(3)},), file=file)


def test_a_kill_during_a_second_file_keeps_the_first(tmp_path: Path):
    file = tmp_path / "net.safetensors"
    fpipe.gather_state_dict(ONE_STAGE, ({"w": torch.ones(3)},), file=file)
    assert exit_code_of(gather_and_die, file) == -signal.SIGKILL
    assert load_file(file)["w"].tolist() == [1, 1, 1]


def save_twice(rank: int, folder: Path) -> None:
    fpipe.save(folder, TWO_STAGES, params_of(1, rank), step=1)
    if rank == 1:
        vars(filesystem)["_write_item"] = kill
    fpipe.save(folder, TWO_STAGES, params_of(2, rank), step=2)


def test_a_rank_killed_during_a_second_save_keeps_the_first(tmp_path: Path):
    """Used to overwrite rank 0's half of step 1 by step 2, so that a load gave half of each."""
    with Processes(2, timeout=20) as ranks:
        ranks.start(save_twice, tmp_path)
        ranks.results()
    assert [saved_value(tmp_path, TWO_STAGES, rank) for rank in range(2)] == [(1, 1), (1, 1)]


def save_and_mix(rank: int, folder: Path) -> str:
    for step in (1, 2):
        fpipe.save(folder / str(step), TWO_STAGES, params_of(step, rank), step=step)
    dist.barrier()
    if rank == 0:
        (old,), (new,) = ([*(folder / step).rglob("__1_0.distcp")] for step in "12")
        shutil.copy(old, new)
    dist.barrier()
    with pytest.raises(ValueError, match=r"__1_0\.distcp is of another save than .*\.metadata; load one") as error_info:
        fpipe.load(folder / "2", TWO_STAGES, params_of(0, rank))
    return str(error_info.value)


def test_files_of_two_saves_are_refused_on_all_ranks(pair: Processes, tmp_path: Path):
    message, other_message = pair.run(save_and_mix, tmp_path)
    assert message == other_message
    with pytest.raises(ValueError, match="is of another save"):
        fpipe.load(tmp_path / "2", TWO_STAGES, params_of(0, 1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_does_not_match_the_program_is_named(tmp_path: Path):
    torch_save({NAME: params_of(1)[0]["0.weight"], "numbers/step": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=f"^{tmp_path} could not be read: .*numbers/step") as error_info:
        fpipe.load(tmp_path, ONE_STAGE, params_of(0))
    assert len(str(error_info.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fpipe_and_torch_read_each_others_folders(tmp_path: Path):
    fpipe.save(tmp_path / "ours", ONE_STAGE, params_of(3), step=3)
    torch_state = {NAME: torch.zeros(50, 1000)}
    torch_load(torch_state, checkpoint_id=tmp_path / "ours", no_dist=True)
    torch_load(torch_state, checkpoint_id=tmp_path / "ours" / "saved-1", no_dist=True)
    assert torch.equal(torch_state[NAME], torch.full((50, 1000), 3.0))
    torch_source = {NAME: torch.full((50, 1000), 4.0), "numbers/step": torch.tensor(4)}
    torch_save(torch_source, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert saved_value(tmp_path / "torchs") == (4, 4)
    fpipe.save(tmp_path / "torchs", ONE_STAGE, params_of(5), step=5)
    assert saved_value(tmp_path / "torchs") == (5, 5)
    assert not [*(tmp_path / "torchs").glob("*.distcp")]


def test_keep_retains_the_newest_saves(tmp_path: Path):
    for step in range(1, 6):
        fpipe.save(tmp_path, ONE_STAGE, params_of(step), step=step, keep=3)
    assert [saved_value(path)[0] for path in sorted(tmp_path.glob("saved-*"))] == [3, 4, 5]
    assert saved_value(tmp_path) == (5, 5)
    fpipe.save(tmp_path, ONE_STAGE, params_of(6), step=6)
    assert [path.name for path in tmp_path.glob("saved-*")] == ["saved-6"]
    with pytest.raises(ValueError, match="keep is a whole number, at least 1; found 0"):
        fpipe.save(tmp_path, ONE_STAGE, params_of(6), keep=0)


def test_numbers_keep_their_bits(tmp_path: Path):
    """Used to load a learning rate as the nearest float32."""
    fpipe.save(tmp_path, ONE_STAGE, params_of(0), lr=0.1, step=2**53 + 1)
    assert fpipe.load(tmp_path, ONE_STAGE, params_of(0)).numbers == {"lr": 0.1, "step": 2**53 + 1}


@contextmanager
def blocked_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block all writes of files until the event is set."""
    event, write = threading.Event(), vars(filesystem)["_write_item"]
    monkeypatch.setattr(filesystem, "_write_item", lambda *args, **kwargs: event.wait(20) and write(*args, **kwargs))
    yield event
    event.set()


def test_a_background_save_has_the_values_at_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    params = params_of(1)
    with blocked_writes(monkeypatch) as event:
        saving = fpipe.save(tmp_path, ONE_STAGE, params, step=1, background=True)
        params[0]["0.weight"].fill_(2)  # as a donated step does
        assert not saving.done()
        assert not (tmp_path / ".metadata").exists()
        event.set()
        assert saving.result(20) is None
    assert saved_value(tmp_path) == (1, 1)
    fpipe.save(tmp_path, ONE_STAGE, params_of(2), step=2, background=True)
    assert saved_value(tmp_path) == (2, 2)  # a load waits


def test_a_failed_background_save_raises_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem, "_write_item", full)
    saving = fpipe.save(tmp_path, ONE_STAGE, params_of(1), background=True)
    with pytest.raises(OSError, match="No space left on device"):
        saving.result(20)
    second_saving = fpipe.save(tmp_path, ONE_STAGE, params_of(1), background=True)
    assert second_saving.exception(20) is not None
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left on device"):
        fpipe.save(tmp_path, ONE_STAGE, params_of(2), step=2)
    fpipe.save(tmp_path, ONE_STAGE, params_of(2), step=2)
    assert saved_value(tmp_path) == (2, 2)


def save_beside_collectives(rank: int, folder: Path) -> tuple[float, Any]:
    """Save in the background next to collectives of the default group, at different times on each rank."""
    total = torch.zeros(())
    for step in range(1, 4):
        saving = fpipe.save(folder, TWO_STAGES, params_of(step, rank), step=step, background=True, keep=2)
        for value in range(50):
            number = torch.tensor(float(value))
            dist.all_reduce(number)
            total += number
        if rank == step % 2:
            saving.result()
    assert float(total) == 3 * 2 * sum(range(50))
    return saved_value(folder, TWO_STAGES, rank)


def test_background_saves_run_next_to_collectives(pair: Processes, tmp_path: Path):
    assert pair.run(save_beside_collectives, tmp_path) == [(3, 3), (3, 3)]
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-2", "saved-3"]


def save_on_full_disk(rank: int, folder: Path) -> list[str]:
    """Return the errors of a save and a gather while one rank may write at most 100 kB a file."""
    fpipe.save(folder, TWO_STAGES, params_of(1, rank), step=1)
    fpipe.gather_state_dict(TWO_STAGES, params_of(1, rank), file=folder / "all.safetensors")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else limits[0], limits[1]))
    messages: list[str] = []
    try:
        with pytest.raises(OSError, match="File too large") as error_info:
            fpipe.save(folder, TWO_STAGES, params_of(2, rank), step=2)
        messages.append(str(error_info.value))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 0 else limits[0], limits[1]))
        with pytest.raises(OSError, match="File too large") as error_info:
            fpipe.gather_state_dict(TWO_STAGES, params_of(2, rank), file=folder / "all.safetensors")
        messages.append(str(error_info.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return messages


def test_a_full_disk_fails_on_all_ranks_and_keeps_the_old_files(pair: Processes, tmp_path: Path):
    messages, other_messages = pair.run(save_on_full_disk, tmp_path)
    assert messages == other_messages
    assert messages[0] == (
        f"{tmp_path}/.saving/__1_0.distcp could not be written: File too large; what {tmp_path} had before is whole."
    )
    file = tmp_path / "all.safetensors"
    assert messages[1] == f"{file} could not be written: File too large. What it held before is whole."
    assert saved_value(tmp_path, TWO_STAGES, 0) == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "all.safetensors", "saved-1"]
    assert all(leaf.eq(1).all() for leaf in load_file(file).values())


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def change_byte(file: Path, offset: int) -> None:
    file_bytes = bytearray(file.read_bytes())
    file_bytes[offset] ^= 64
    file.write_bytes(file_bytes)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), r"saved has no file \.metadata"),
    "empty metadata": (lambda folder: truncate(folder / ".metadata", 0), r"saved/\.metadata is damaged"),
    "half metadata": (lambda folder: truncate(folder / ".metadata", 300), r"saved/\.metadata is damaged"),
    "text": (lambda folder: (folder / ".metadata").write_text("step: 3"), r"saved/\.metadata is damaged"),
    "other pickle": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})),
        r"saved/\.metadata is damaged",
    ),
    "no data": (
        lambda folder: (folder / "saved-1/__0_0.distcp").unlink(),
        r"saved/saved-1/__0_0\.distcp is not there, which .*saved/\.metadata names\.$",
    ),
    "half data": (
        lambda folder: truncate(folder / "saved-1/__0_0.distcp", 3000),
        r"saved/saved-1/__0_0\.distcp is damaged, or of another save than .*saved/\.metadata: ",
    ),
    "one byte": (
        lambda folder: change_byte(folder / "saved-1/__0_0.distcp", 100_000),
        r"__0_0\.distcp is damaged, .*: params/0\.weight has another checksum than it was written with\.$",
    ),
    "empty data": (lambda folder: truncate(folder / "saved-1/__0_0.distcp", 0), r"__0_0\.distcp is damaged, or of"),
}


MODEL, _, _ = fpipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(1000, 50, bias=False)), 1)
LOADS: list[Callable[[Path], Any]] = [
    lambda folder: fpipe.load(folder, ONE_STAGE, params_of(0)),
    lambda folder: fpipe.load_params(MODEL, ONE_STAGE, folder, rank=0),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path: Path, damage: str):
    folder = tmp_path / "saved"
    fpipe.save(folder, ONE_STAGE, params_of(1), step=1)
    harm, sentence = DAMAGES[damage]
    harm(folder)
    for load in LOADS:
        with pytest.raises(ValueError, match=sentence) as error_info:
            load(folder)
        assert len(str(error_info.value).splitlines()) == 1


class Call:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def hide_in_bytes(folder: Path, call: Call) -> bytes:
    """Return metadata that declares the parameter as bytes, which torch unpickles."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    storage = next(candidate for index, candidate in metadata.storage_data.items() if index.fqn == NAME)
    (folder / "bytes").write_bytes(pickle.dumps(call))
    storage.relative_path, storage.offset, storage.length = "bytes", 0, (folder / "bytes").stat().st_size
    metadata.state_dict_metadata[NAME] = BytesStorageMetadata()
    return pickle.dumps(metadata)


def set_class_attribute(folder: Path, call: Call) -> bytes:
    """Return a pickle that sets an attribute of a class, which would outlast the load."""
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'harmed'\nI1\nstb."


HARMS: dict[str, Callable[[Path, Call], bytes]] = {
    "instead": lambda folder, call: pickle.dumps(call),
    "inside": lambda folder, call: pickle.dumps(Metadata({NAME: call})),  # type: ignore[dict-item]
    "torch's": lambda folder, call: pickle.dumps(Call(torch.load, str(folder / "saved-1/__0_0.distcp"))),
    "bytes": hide_in_bytes,
    "attributes": set_class_attribute,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_folder_runs_no_code(tmp_path: Path, harm: str):
    """Used to run code: torch's .metadata is a pickle, and load and load_params unpickled it."""
    folder, evidence = tmp_path / "saved", tmp_path / "ran"
    fpipe.save(folder, ONE_STAGE, params_of(1), step=1)
    metadata = HARMS[harm](folder, Call(os.mkdir, str(evidence)))
    (folder / ".metadata").write_bytes(metadata)
    for load in LOADS:
        with pytest.raises(ValueError, match=r"\.metadata is damaged|saved has no params|the source lacks"):
            load(folder)
    assert not evidence.exists()
    assert not hasattr(Metadata, "harmed")


def test_a_folder_that_names_a_file_outside_is_refused(tmp_path: Path):
    folder = tmp_path / "saved"
    fpipe.save(folder, ONE_STAGE, params_of(1), step=1)
    file = folder / ".metadata"
    for path in ("../secret", "/etc/passwd"):
        metadata = pickle.loads(file.read_bytes())
        for storage in metadata.storage_data.values():
            storage.relative_path = path
        file.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=f"names '{path}', which is outside of its folder"):
            fpipe.load(folder, ONE_STAGE, params_of(0))


def save_on_disk_full_once(rank: int, folder: Path) -> list[str]:
    """Fail a background save on rank 1, ask for its result on rank 0 alone, then save again on both."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else limits[0], limits[1]))
    try:
        saving = fpipe.save(folder, TWO_STAGES, params_of(1, rank), background=True)
        messages = [str(saving.exception(20))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    if rank == 0:
        with pytest.raises(OSError, match="File too large"):
            saving.result()
    with pytest.raises(OSError, match="File too large") as error_info:
        fpipe.save(folder, TWO_STAGES, params_of(2, rank))
    fpipe.save(folder, TWO_STAGES, params_of(2, rank), step=2)
    return [*messages, str(error_info.value)]


def test_a_failed_background_save_raises_on_all_ranks_at_the_next(pair: Processes, tmp_path: Path):
    """Used to send the rank that had seen the error into the next save alone, until the timeout."""
    messages = pair.run(save_on_disk_full_once, tmp_path)
    assert len({*messages[0], *messages[1]}) == 1
    assert saved_value(tmp_path, TWO_STAGES, 0) == (2, 2)
