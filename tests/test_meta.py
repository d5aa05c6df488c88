"""Nets on meta: cut, sized, loaded by stage, and trained with the bits of plain autograd."""

import functools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.own_autograd import own_autograd
from tests.processes import Processes
from tests.refusals import refusals
from tests.toys import Toy


class Rotary(nn.Module):
    """A table that a constructor fills, which no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(1 / torch.arange(1.0, 9.0))


class Net(nn.Module):
    """A tied embedding, a rotary table, numbers and places that forward makes where its input is, and a mask that it
    makes where torch does, which was refused for being on another device than meta."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(11, 8), Rotary()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril()
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


ON_META: Any = tuple(half.to("meta") for half in ids())
ON_TWO = fpipe.Machine(ranks=2), fpipe.Candidates(microbatches=[2])


def cut(net: Any, ranks: int = 2) -> tuple[fpipe.Model, Any, fpipe.Program]:
    model, params, _ = fpipe.from_module(net, stages=2 if ranks < 4 else 4, loss=loss, example=ON_META)
    schedule = fpipe.schedules.one_f_one_b(ranks)
    return model, params, fpipe.chain(fpipe.split(2), schedule, fpipe.merge())(fpipe.program(model))


@functools.cache
def on_meta(ranks: int = 2) -> tuple[fpipe.Model, Any, fpipe.Program]:
    with torch.device("meta"):
        net = Net()
    return cut(net, ranks)


def whole(of_ranks: list[Any]) -> tuple[Any, ...]:
    """The parameters of all stages from those of each rank."""
    return tuple(next(one for one in stage if one is not None) for stage in zip(*of_ranks, strict=True))


def loaded(model: fpipe.Model, program: fpipe.Program, source: Any, **how: Any) -> tuple[Any, ...]:
    return whole([fpipe.load_params(model, program, source, rank=rank, **how) for rank in range(program.ranks)])


def real() -> Net:
    torch.manual_seed(1)
    return Net()


def assert_own(net: Net, found: dict[str, Any], each: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Gradients are plain autograd's, of one replica or the mean of several; a tied weight's are added otherwise."""
    for name, _ in net.named_parameters():
        right = sum(grads[name] for _, grads in each) / len(each)
        if name == "embed.weight":
            torch.testing.assert_close(found[name], right)
        else:
            assert torch.equal(found[name], right), name


def plain(net: Net, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return own_autograd(net, batch, 2, key=0, ends=(), loss=loss)


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_a_net_cut_on_meta_trains_with_the_bits_of_plain_autograd(runtime: Any):
    """It trained to nan behind a warning: what forward makes stayed on meta."""
    torch.set_num_threads(1)
    model, meta, program = on_meta()
    assert all(leaf.is_meta for stage in meta for leaf in stage.values())
    params = loaded(model, program, real().state_dict())
    result = fpipe.build(program, model, runtime=runtime)(params, ids())
    net, found = real(), fpipe.join_params(model, result.grads)
    right = plain(net, ids())
    assert torch.equal(result.loss, right[0])
    assert found["rotary.table"] is None
    assert_own(net, found, [right])


def test_sizes_on_meta_are_those_of_the_net():
    model, meta, program = on_meta()
    params = loaded(model, program, real().state_dict())
    found, expected = (fpipe.sizes(program, model, *given) for given in ((meta, ON_META), (params, ids())))
    assert (found.bytes, found.wire_bytes, found.peak) == (expected.bytes, expected.wire_bytes, expected.peak)


class Filled(Net):
    """A mask that a constructor fills on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5, 5, device="cpu").tril() / 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mask @ super().forward(ids)


def test_a_buffer_that_a_constructor_makes_on_the_cpu_is_a_constant_with_values():
    with torch.device("meta"):
        net = Filled()
    model, meta, program = cut(net)
    assert "mask" not in fpipe.join_params(model, meta)
    torch.manual_seed(1)
    expected, batch = Filled(), ids()
    params = loaded(model, program, expected.state_dict())
    result = fpipe.build(program, model)(params, batch)
    right = plain(expected, batch)
    assert torch.equal(result.loss, right[0])
    assert_own(expected, fpipe.join_params(model, result.grads), [right])
    with pytest.raises(ValueError, match=r"'mask' is a constant of stage 1.* has other values in the state_dict"):
        fpipe.load_params(model, program, {**expected.state_dict(), "mask": torch.ones(5, 5)}, rank=1)


def test_first_values_are_copies_of_what_has_values():
    """Those of a live net were moved to meta as well, and later init_params drew other ones."""
    live = nn.Linear(8, 8)
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(live, nn.Linear(8, 8)), 1)
    first = fpipe.init_params(model, fpipe.program(model), rank=0)[0]
    assert torch.equal(first["0.weight"], live.weight)
    assert first["0.weight"].data_ptr() != live.weight.data_ptr()
    model, _, _ = fpipe.from_sequential(nn.Sequential(live), 1)
    with pytest.warns(UserWarning, match=r"^init_params copies '0.weight' and 1 more: no parameter .* is on meta"):
        fpipe.init_params(model, fpipe.program(model), rank=0)


def test_parametrized_modules_have_first_values_by_init():
    """Torch refused to copy such a module, and said nothing of init=."""
    norm = nn.utils.parametrizations.weight_norm
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(norm(nn.Linear(8, 8))), 1)
    program = fpipe.program(model)
    with pytest.raises(ValueError, match=r"original0' is on meta.*to a ParametrizationList, which.*\(\)\. Say init="):
        fpipe.init_params(model, program, rank=0)
    first = fpipe.init_params(
        model, program, rank=0, init=lambda name, one: False if name == "0.bias" else one.normal_()
    )
    assert 0 < float(first[0]["0.bias"].abs().max()) <= 8**-0.5


class Zeroed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        nn.init.zeros_(self.bias)


def test_values_that_a_constructor_gives_parameters_are_not_lost_in_silence():
    with torch.device("meta"):
        model, _, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(8, 8), Zeroed()), 1)
    program = fpipe.schedules.gpipe(1)(fpipe.program(model))
    with pytest.warns(UserWarning, match=r"^'1.bias' has values by reset_parameters.* Give those by init="):
        fpipe.init_params(model, program, rank=0)
    first = fpipe.init_params(model, program, rank=0, init=lambda name, one: name == "1.bias" and one.zero_())
    assert not first[0]["1.bias"].any()


def saved(kind: str, named: dict[str, Tensor], folder: Path) -> Path:
    """The weights of a net in a file, several files, or a distributed checkpoint."""
    if kind == "checkpoint":
        with warnings.catch_warnings(action="ignore"):  # that it is saved by one process
            save(dict(named), checkpoint_id=folder / "step", no_dist=True)
        return folder / "step"
    if kind == "file":
        save_file(named, folder / "all.safetensors")
        return folder / "all.safetensors"
    names = [*named]
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: named[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in halves.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder if kind == "folder" else folder / "model.safetensors.index.json"


@pytest.mark.parametrize("kind", ["file", "index", "folder", "checkpoint"])
def test_files_give_the_parameters_of_the_state_dict(kind: str, tmp_path: Path):
    named = dict(real().state_dict())
    del named["head.weight"]  # as a file of transformers has tied weights
    model, _, program = on_meta()
    found = loaded(model, program, saved(kind, named, tmp_path))
    expected = loaded(model, program, real().state_dict())
    assert all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)


def test_a_rank_reads_the_bytes_of_its_own_stages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fpipe.models.parameters.sources import SafetensorsFile

    read: list[str] = []
    of_file = SafetensorsFile.read_tensor
    monkeypatch.setattr(SafetensorsFile, "read_tensor", lambda file, name: read.append(name) or of_file(file, name))
    model, _, program = on_meta()
    named = dict(real().state_dict())
    del named["head.weight"]
    mine = fpipe.load_params(model, program, saved("file", named, tmp_path), rank=1)
    assert mine[0] is None
    assert sorted(read) == sorted({*mine[1]} - {"rotary.table"})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_first_values_have_the_same_bits_on_any_number_of_ranks(ranks: int):
    alone, _, one = on_meta(1)
    expected = fpipe.join_params(alone, fpipe.init_params(alone, one, rank=0, seed=7))
    model, _, program = on_meta(ranks)
    of_ranks = [fpipe.init_params(model, program, rank=rank, seed=7) for rank in range(ranks)]
    found = fpipe.join_params(model, whole(of_ranks))
    other = fpipe.join_params(alone, fpipe.init_params(alone, one, rank=0, seed=8))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(other["head.bias"], expected["head.bias"])


def test_first_values_by_a_function_and_torchs_own_generator_stays_where_it_was():
    model, _, program = on_meta(1)

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


def given(**change: Any) -> Any:
    """Parameters of rank 0 out of a state_dict that was changed."""
    named = {name: one for name, one in {**real().state_dict(), **change}.items() if one is not None}
    model, _, program = on_meta()
    return fpipe.load_params(model, program, named, rank=0)


def by(call: Callable[..., Any], batch: Any = None, **how: Any) -> Any:
    """A reading of a program of a net on meta, and its parameters."""
    model, meta, program = on_meta()
    return call(program, model, meta, ids() if batch is None else batch, **how)


def step(program: Any, model: Any, params: Any, batch: Any, example: bool = False) -> Any:
    return fpipe.build(program, model, example=(params, batch) if example else None)(params, batch)


test_what_is_on_meta_or_has_no_place_is_refused_by_name = refusals(
    globals(),
    """
given(**{"head.bias": None})
    ValueError: the source lacks 'head.bias', a parameter of stage 1
given(extra=torch.zeros(1))
    ValueError: the state_dict has 'extra', which is no parameter or buffer of the net
given(**{"head.bias": torch.zeros(3)})
    ValueError: 'head.bias' has shape [11] in the net, and [3] in the state_dict
given(**{"head.bias": torch.zeros(11).half()})
    ValueError: 'head.bias' is torch.float32 in the net, and torch.float16
given(**{"head.bias": torch.zeros(11, device="meta")})
    ValueError: has a tensor on meta, without values under 'head.bias'
given(**{"head.weight": torch.zeros(11, 8)})
    ValueError: 'embed.weight' and 'head.weight' are one parameter of the net
fpipe.init_params(on_meta()[0], on_meta()[2], rank=0, seed="x")
    TypeError: seed is a whole number, found 'x'
fpipe.init_params(on_meta()[0], on_meta()[2], rank=0, init=3)
    TypeError: init= is a function of name and tensor, found 3
fpipe.load_params(Net(), on_meta()[2], {}, rank=0)
    TypeError: a Model is wanted
fpipe.load_params(on_meta()[0], on_meta()[2], 3, rank=0)
    TypeError: a source is a path, or a state_dict; found int
# They were read as nan, behind a warning.
by(step)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
by(step, example=True)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
by(fpipe.verify)
    ValueError: params[0]['embed.weight'] is on meta, without values: fpipe.load_params or fpipe.init_params
by(fpipe.profile, ON_META)
    ValueError: params[0]['embed.weight'] is on meta
by(lambda program, model, *given: fpipe.plan_run(model, *ON_TWO, example=given), ON_META)
    ValueError: say flops=, operations a second of a rank
by(fpipe.verify, ON_META)
    ValueError: batch[0] is on meta, without values: there is nothing to compare
""",
)


def test_a_net_on_meta_is_planned_by_operations():
    model, meta, _ = on_meta()
    machine, tried = fpipe.Machine(ranks=2, flops=1e9), fpipe.Candidates([2, 4], schedules=["gpipe"])
    found = fpipe.plan_run(model, machine, tried, example=(meta, ON_META))
    assert {(row.costs, row.fits) for row in found} == {("estimated", True)}
    assert found.best.makespan > 0


@pytest.mark.parametrize("norm", [False, True])
def test_buffers_on_meta_that_nothing_hands_in_are_refused_by_name(norm: bool):
    with torch.device("meta"):
        odd = nn.BatchNorm1d(8) if norm else Rotary()
        net = nn.Sequential(nn.Linear(8, 8), odd, nn.Linear(8, 8))
    odd.forward = odd.forward if norm else lambda x: x * odd.table
    model, _, state = fpipe.from_sequential(net, stages=1, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    params = fpipe.init_params(model, fpipe.schedules.gpipe(1)(program), rank=0)
    batch = torch.ones(4, 8), torch.ones(4, 8)
    name = r"state\[0\]\['1.running_mean'\]" if norm else r"net\['1.table'\]"
    with pytest.raises(ValueError, match=rf"{name} is on meta, without values: "):
        fpipe.build(program, model)(params, batch, **({"state": state} if norm else {}))


def normed() -> nn.Module:
    layers = {"first": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 8)}
    return Toy(lambda own, x: own.last(own.norm(own.first(x))), **layers)


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_the_state_of_a_net_on_meta_is_loaded_as_its_parameters_are(door: str):
    """A batch norm on meta had nothing that gave its statistics values."""
    torch.manual_seed(0)
    real, batch = normed(), (torch.randn(4, 8), torch.randn(4, 8))
    real(torch.randn(6, 8))  # statistics that are not the first ones
    with torch.device("meta"):
        net, example, how = normed(), (torch.empty(4, 8), torch.empty(4, 8)), {"loss": nn.functional.mse_loss}
    if door == "from_module":
        model, _, state = fpipe.from_module(net, 2, example=example, **how)
        saved = real.state_dict()
    else:
        model, _, state = fpipe.from_sequential(nn.Sequential(*net.children()), 2, example=example[0], **how)
        saved = nn.Sequential(*real.children()).state_dict()
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    params, own = loaded(model, program, saved), loaded(model, program, saved, of=state)
    assert [[*one] for one in own] == [[*one] for one in state]
    found = fpipe.build(program, model)(params, batch, state=own)
    for part in (slice(0, 2), slice(2, 4)):
        (nn.functional.mse_loss(real(batch[0][part]), batch[1][part]) * 0.5).backward()
    grads = [leaf for stage in found.grads for leaf in stage.values()]
    assert all(map(torch.equal, grads, [leaf.grad for leaf in real.parameters()]))
    now = {name.rpartition(".")[2]: leaf for name, leaf in found.state[0].items()}
    assert now.keys() == dict(real.norm.named_buffers()).keys()
    assert all(torch.equal(leaf, now[name]) for name, leaf in real.norm.named_buffers())
    first = whole([fpipe.init_params(model, program, rank, of=state) for rank in range(2)])
    assert sorted(float(leaf.sum()) for leaf in fpipe.tree.leaves(first)) == [0, 0, 8]
    with pytest.raises(ValueError, match="of= is the module state of all 2 stages; found 1"):
        fpipe.load_params(model, program, saved, rank=0, of=state[:1])


def sharded(rank: int, folder: str) -> list[Any]:
    """A net on meta, a checkpoint, shards: gradients of this process's stage whole again, and what is refused."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, meta, program = on_meta()
    program = fpipe.shard("dp", gather="use")(program)
    stage = mesh.get_local_rank("pp")
    mine = fpipe.load_params(model, program, folder, rank=stage)
    shards = fpipe.shard_params(mine, mesh["dp"])
    batch = tuple(half.chunk(2)[mesh.get_local_rank("dp")] for half in ids())
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch))
    grads = step(shards, batch).grads[stage]
    made = {name: one.full_tensor() for name, one in grads.items() if one is not None}
    local = fpipe.local_params(program, meta, stage)
    name = [*local[stage]][-1]
    one = tuple(own and {**own, name: local[stage][name]} for own in mine)
    with pytest.raises(ValueError, match=re.escape(f"reads shard[{stage}]['{name}'], and was handed None or a meta")):
        step(fpipe.shard_params(one, mesh["dp"]), batch)  # ends the run
    return [model.stages[stage].name, {name: one.tolist() for name, one in made.items()}]


def test_a_net_on_meta_trains_on_processes_with_none_for_other_ranks_stages(four: Processes, tmp_path: Path):
    """The example wanted meta tensors for the stages of other ranks: the net knows them."""
    torch.set_num_threads(1)
    folder = saved("checkpoint", dict(real().state_dict()), tmp_path)
    found = dict(four.each(sharded, str(folder)))
    grads = {name: torch.tensor(one) for own in found.values() for name, one in own.items()}
    halves = [tuple(half[2 * k : 2 * k + 2] for half in ids()) for k in range(2)]
    assert_own(real(), grads, [plain(real(), half) for half in halves])


def late() -> nn.Module:
    """A net whose layers are used in another order than they were made in."""
    layers = {"last": nn.Linear(4, 3), "first": nn.Linear(4, 4), "middle": nn.Linear(4, 4)}
    return Toy(lambda own, x: own.last(torch.tanh(own.middle(torch.tanh(own.first(x))))), **layers)


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_what_is_loaded_has_the_order_of_what_the_net_has(door: str):
    """A rank that had loaded its stages, and others that passed the net's own, were refused for their order."""
    net = late() if door == "from_module" else nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    batch, how = (torch.randn(4, 4), torch.randn(4, 3)), {"loss": nn.functional.mse_loss}
    if door == "from_module":
        model, params, _ = fpipe.from_module(net, 2, example=batch, **how)
    else:
        model, params, _ = fpipe.from_sequential(net, 2, **how)
    loaded = fpipe.load_params(model, fpipe.program(model), net.state_dict(), rank=0)
    assert [[*one] for one in loaded] == [[*one] for one in params]
