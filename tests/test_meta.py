"""Nets on meta: cut, sized, loaded by stage, and trained with the bits of plain autograd."""

import json
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

import fpipe


class Rotary(nn.Module):
    """A table that a constructor fills, which no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(1 / torch.arange(1.0, 9.0))


class Net(nn.Module):
    """A tied embedding, a rotary table, a mask, numbers and places that forward makes where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(11, 8), Rotary()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril()
        turned = torch.cos(places[:, None] * self.rotary.table)
        x = self.embed(ids) * torch.tensor([0.5], device=ids.device)
        for block in self.blocks:
            x = x + mask @ torch.tanh(block(x) * turned)
        return self.head(x)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def ids(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(11, (4, 5)), torch.randint(11, (4, 5))


def cut(net: nn.Module | None = None, ranks: int = 2) -> tuple[fpipe.Model, Any, fpipe.Program]:
    if net is None:
        with torch.device("meta"):
            net = Net()
    example = tuple(half.to("meta") for half in ids())
    model, params, _ = fpipe.from_module(net, stages=2 if ranks < 4 else 4, loss=loss, example=example)
    schedule = fpipe.schedules.one_f_one_b(ranks)
    return model, params, fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))


def whole(of_ranks: list[Any]) -> tuple[Any, ...]:
    """The parameters of all stages from those of each rank."""
    return tuple(next(one for one in stage if one is not None) for stage in zip(*of_ranks, strict=True))


def loaded(model: fpipe.Model, program: fpipe.Program, source: Any, **how: Any) -> tuple[Any, ...]:
    return whole([fpipe.load_params(model, program, source, rank=rank, **how) for rank in range(program.ranks)])


def real() -> Net:
    torch.manual_seed(1)
    return Net()


def own_autograd(net: Net, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a plain loop; each use of the tied weight is summed over microbatches first."""
    head = net.embed.weight.detach().clone().requires_grad_()
    net.head.weight = nn.Parameter(head)
    total = torch.tensor(0.0)
    for part in range(2):
        rows = slice(2 * part, 2 * part + 2)
        one = loss(net(batch[0][rows]), batch[1][rows]) * 0.5
        one.backward()
        total = total + one.detach()
    grads = {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    grads["embed.weight"] = grads["embed.weight"] + grads.pop("head.weight")
    return total, grads


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_a_net_cut_on_meta_trains_with_the_bits_of_plain_autograd(runtime: Any):
    """It trained to nan behind a warning: what forward makes stayed on meta."""
    torch.set_num_threads(1)
    model, meta, program = cut()
    assert all(leaf.is_meta for stage in meta for leaf in stage.values())
    params = loaded(model, program, real().state_dict())
    result = fpipe.build(program, model, runtime=runtime)(params, ids())
    expected, grads = own_autograd(real(), ids())
    found = fpipe.join_params(model, result.grads)
    assert torch.equal(result.loss, expected)
    assert found.pop("rotary.table") is None
    assert all(torch.equal(found[name], grads[name]) for name in grads)


def test_sizes_on_meta_are_those_of_the_net():
    model, meta, program = cut()
    example: Any = tuple(half.to("meta") for half in ids())
    params = loaded(model, program, real().state_dict())
    found, expected = (fpipe.sizes(program, model, *given) for given in ((meta, example), (params, ids())))
    assert (found.bytes, found.wire, found.peak) == (expected.bytes, expected.wire, expected.peak)


def test_real_buffers_of_a_net_whose_parameters_alone_are_on_meta_stay_constants():
    net = Net()
    for module in net.modules():
        for name, one in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(one.detach().to("meta")))
    net.head.weight = net.embed.weight
    model, meta, program = cut(net)
    assert "rotary.table" not in fpipe.join_params(model, meta)
    params = loaded(model, program, real().state_dict())
    assert torch.equal(fpipe.build(program, model)(params, ids()).loss, own_autograd(real(), ids())[0])


def save_safetensors(named: dict[str, Tensor], path: Path) -> None:
    header, data = dict[str, Any](), b""
    for name, one in named.items():
        part = one.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": [*one.shape], "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def saved(kind: str, named: dict[str, Tensor], folder: Path) -> Path:
    """The weights of a net in a file, several files, or a distributed checkpoint."""
    if kind == "checkpoint":
        with warnings.catch_warnings(action="ignore"):  # that it is saved by one process
            save(dict(named), checkpoint_id=folder / "step", no_dist=True)
        return folder / "step"
    if kind == "file":
        save_safetensors(named, folder / "all.safetensors")
        return folder / "all.safetensors"
    names = [*named]
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_safetensors({name: named[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in halves.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder if kind == "folder" else folder / "model.safetensors.index.json"


@pytest.mark.parametrize("kind", ["file", "index", "folder", "checkpoint"])
def test_files_give_the_parameters_of_the_state_dict(kind: str, tmp_path: Path):
    named = dict(real().state_dict())
    del named["head.weight"]  # as a file of transformers has tied weights
    model, _, program = cut()
    found = loaded(model, program, saved(kind, named, tmp_path))
    expected = loaded(model, program, real().state_dict())
    assert all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)


def test_a_rank_reads_the_bytes_of_its_own_stages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fpipe.models.parameters.safetensors_file import SafetensorsFile

    read: list[str] = []
    of_file = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda file, name: read.append(name) or of_file(file, name))
    model, _, program = cut()
    named = dict(real().state_dict())
    del named["head.weight"]
    mine = fpipe.load_params(model, program, saved("file", named, tmp_path), rank=1)
    assert mine[0] is None
    assert sorted(read) == sorted({*mine[1]} - {"rotary.table"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head.bias": None}, "the source lacks 'head.bias', a parameter of stage 1"),
        ({"extra": torch.zeros(1)}, "the state_dict has 'extra', which is no parameter or buffer of the net"),
        ({"head.bias": torch.zeros(3)}, "'head.bias' has shape [11] in the net, and [3] in the state_dict"),
        ({"head.bias": torch.zeros(11).half()}, "'head.bias' is torch.float32 in the net, and torch.float16"),
        ({"head.bias": torch.zeros(11, device="meta")}, "has a tensor on meta, without values under 'head.bias'"),
        ({"head.weight": torch.zeros(11, 8)}, "'embed.weight' and 'head.weight' are one parameter of the net"),
    ],
)
def test_a_source_of_another_net_is_refused(change: dict[str, Any], sentence: str):
    model, _, program = cut()
    named = {name: one for name, one in {**real().state_dict(), **change}.items() if one is not None}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.load_params(model, program, named, rank=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_first_values_have_the_same_bits_on_any_number_of_ranks(ranks: int):
    alone, _, one = cut(ranks=1)
    expected = fpipe.join_params(alone, fpipe.init_params(alone, one, rank=0, seed=7))
    model, _, program = cut(ranks=ranks)
    of_ranks = [fpipe.init_params(model, program, rank=rank, seed=7) for rank in range(ranks)]
    found = fpipe.join_params(model, whole(of_ranks))
    other = fpipe.join_params(alone, fpipe.init_params(alone, one, rank=0, seed=8))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(other["head.bias"], expected["head.bias"])


def test_first_values_by_a_function_and_torchs_own_generator_stays_where_it_was():
    model, _, program = cut(ranks=1)

    def init(name: str, tensor: Tensor) -> Any:
        return False if name == "rotary.table" else tensor.normal_(std=0.02)

    before = torch.get_rng_state()
    found = fpipe.join_params(model, fpipe.init_params(model, program, rank=0, init=init))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found["rotary.table"], real().rotary.table)
    assert 0 < found["blocks.0.weight"].std() < 0.05


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8), persistent=False)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * self.scale + self.shift)


def test_a_leaf_that_nothing_gives_values_is_refused_by_name():
    with torch.device("meta"):
        net = Bare()
    model, _, program = cut(net, ranks=1)
    with pytest.raises(
        ValueError, match=r"'(scale|shift)' is on meta.* Bare, which has no reset_parameters\(\)\. Say init="
    ):
        fpipe.init_params(model, program, rank=0)
    with pytest.raises(ValueError, match=r"'shift' is on meta"):
        fpipe.load_params(model, program, Bare().state_dict(), rank=0)
    with pytest.raises(ValueError, match=r"init= leaves '(scale|embed.weight|shift)' as it is"):
        fpipe.init_params(model, program, rank=0, init=lambda name, tensor: None)
    params = loaded(model, program, Bare().state_dict(), init=lambda name, tensor: tensor.zero_())
    assert fpipe.verify(program, model, params, ids()).bitwise


def test_a_plain_attribute_on_meta_is_refused_where_the_net_is_cut():
    class Masked(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(8)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * self.mask[:1]

    with torch.device("meta"), pytest.raises(ValueError, match=r"'mask' is a tensor on meta.*register_buffer"):
        cut(Masked())
