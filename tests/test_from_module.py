"""Any module, cut between its blocks: its own gradients, state, ties and skips, and what cannot be cut."""

import copy
import functools
import math
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe.tree import leaves
from tests.own_autograd import own_autograd
from tests.toys import Toy, merged, one_by_one, remembered

WIDTH = 8


class Block(nn.Module):
    """A residual block with whatever is asked for in the middle."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.middle = nn.Sequential(*middle)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding whose weight is the head's too, a table, blocks, and a skip from the first to the last."""

    def __init__(self, blocks: int = 4, *middle: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(*(one() for one in middle)) for _ in range(blocks))
        self.head.weight = self.embed.weight
        self.table: Tensor
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.embed(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x + skip) + torch.tensor(4.0)


class Statistics(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2 * WIDTH)


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, WIDTH)


def pipeline(model: fpipe.Model, microbatches: int = 4) -> fpipe.Program:
    stages = len(model.stages)
    return merged(model, microbatches, fpipe.schedules.zb_h1(stages))


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last() -> None:
    net = Net(4)
    model, _, _ = fpipe.from_module(net, 4, loss=F.mse_loss, example=rows())
    names = [stage.name for stage in model.stages]
    assert names == ["embed, blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]
    assert model.ties == (((0, "embed.weight"), (3, "embed.weight")),)
    assert model.inputs == ("batch", 0, 1, ((0, 1), 2))  # the skip passes by those between


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("kind", [Net, Twice])
def test_batch_norms_are_state_as_the_modules_have_it(kind: type[Net]) -> None:
    """Each of a norm's calls counts."""
    torch.manual_seed(0)
    net, batch, stages = kind(2, Statistics), rows(), 1 if kind is Twice else 2
    model, params, state = fpipe.from_module(net, stages, loss=F.mse_loss, example=batch)
    assert all(stage.update for stage in model.stages), "no output reads the statistics: updates come when they like"
    result = fpipe.build(pipeline(model), model)(params, batch, state=state)
    assert fpipe.verify(pipeline(model), model, params, batch, state=state).bitwise
    now = dict(one_by_one(net, batch)[0].named_buffers())
    assert [len(one) for one in result.state] == [6 // stages] * stages
    assert [name for name, held in remembered(result).items() if not torch.equal(held, now[name])] == []
    assert now["blocks.0.middle.0.num_batches_tracked"] == 8 // stages


def test_stages_are_balanced_by_costs_that_were_said_or_measured() -> None:
    """Of blocks by their paths, or by `profile` of the net with a stage for each block."""
    net, batch = Net(4), rows()
    said = {f"blocks.{at}": cost for at, cost in enumerate((5.0, 1.0, 1.0, 1.0))}
    measured = fpipe.Costs(forward=[2, 1, 1, 1], backward=[9, 1, 1, 1])
    for costs in (said, measured):
        model, _, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch, costs=costs)
        assert [stage.name for stage in model.stages] == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    fine, params, _ = fpipe.from_module(net, 4, loss=F.mse_loss, example=batch)
    measured = fpipe.profile(fpipe.split(2)(fpipe.program(fine)), fine, params, batch, repeats=1)
    model, _, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch, costs=measured)
    assert len(model.stages) == 2
    wrong(net, "costs= says nothing of block 'blocks.0'; the blocks are blocks.0, blocks.1,", costs={"blocks.1": 1.0})
    wrong(Net(3), "costs= has been measured for 4 stages, and the net has 3 blocks; profile the model", costs=measured)
    wrong(net, "costs has a number for each block by its path, or is fpipe.Costs; found list.", costs=[1.0])
    wrong(net, "costs= names 'blcks.9', which is no block; the blocks are blocks.0", costs={**said, "blcks.9": 1.0})


def test_a_model_prints_what_went_where() -> None:
    model, _, _ = fpipe.from_module(Masked(2, Statistics), 2, loss=F.mse_loss, example=rows())
    assert str(model).splitlines() == [
        "stage 0: embed, blocks.0",
        "    400 parameters (1.6 KiB), 50% of the operations, 3 buffers of state",
        "    takes float32[8, 8] of the batch",
        "stage 1: blocks.1, head",
        "    336 parameters (1.3 KiB), 50% of the operations, 3 buffers of state, embed.weight is that of stage 0",
        "    takes float32[8, 8] (256 B) of stage 0, float32[8, 8] (256 B) of stage 0",
        "    makes 2 tensors again, which follow from sizes and constants",
    ]


def test_cuts_name_the_modules_after_which_stages_end() -> None:
    model, _, _ = fpipe.from_module(Net(4), loss=F.mse_loss, example=rows(), cuts=["blocks.2", "embed"])
    assert [stage.name for stage in model.stages] == ["embed", "blocks.0 to blocks.2", "blocks.3, head"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"stages": 0}, "stages is a whole number, at least 1; found 0."),
        ({"stages": None}, "say how many stages, or cuts=[...] with the modules after which they end."),
        ({"stages": 99}, "make as many stages; found stages=99."),
        ({"cuts": ["block.2"]}, "cuts= names 'block.2', but no module of that path is called when the net runs; close"),
        ({"stages": 5, "cuts": ["embed"]}, "stages=5, but cuts= and the boundaries in forward make 2 stages"),
        ({"cuts": ["embed"], "costs": {"embed": 1.0}}, "costs= balances stages, and cuts= says where they end; leave"),
        ({"cuts": 3}, "cuts lists the paths of modules, as in ['encoder.layer.3']; found 3."),
        ({"example": ({"y": torch.ones(4, 8)},) * 2}, "the example is no call of Net.forward: missing a required"),
        ({"example": None}, "example is a batch (inputs, target), inputs a dict of keywords, a tuple of arguments"),
        ({"example": (torch.ones(4, WIDTH), None)}, "the example has no target for loss=; hand in example=(inputs,"),
        ({"loss": None}, "without loss= the net computes the loss of its inputs, labels among them"),
        ({"loss": None, "example": (torch.ones(4, WIDTH), None)}, "found a tensor of shape"),
        ({"loss": nn.MSELoss(reduction="none")}, "the loss is a 0-d tensor, found shape (4, 8); reduce it, for"),
        # It was said to do something that no trace captures: nan is not equal to nan.
        ({"example": (math.nan * rows()[0], rows()[1])}, "gives the loss nan on the example; take one whose loss"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(said: dict[str, Any], sentence: str) -> None:
    asked = {"stages": None if "cuts" in said else 2, "loss": F.mse_loss, "example": rows(4)} | said
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.from_module(Net(4), **asked)


def wrong(net: nn.Module, *sentences: str, **said: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(sentences[0])) as told:
        fpipe.from_module(net, 2, **({"loss": F.mse_loss, "example": rows(4)} | said))
    assert [sentence for sentence in sentences if sentence not in str(told.value)] == []


class Around(Net):
    """Calls its blocks in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class WithoutGradients(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = block(x).square().mean()
        return block(x) / (1 + scale)


class Masked(Around):
    """Makes a mask that all its blocks read."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH, WIDTH).tril()
        skip = x = self.embed(x)
        for block in self.blocks:
            x = block(x @ mask)
        return self.head(x + skip)


class Autocast(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = block(x)
        return y.float()


class InAutocast(Net):
    """All in one autocast context, which casts the tied weight once; what has no gradients inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embed(x)
            for block in self.blocks:
                with torch.no_grad():
                    scale = x.square().mean()
                x = block(x) / (1 + scale)
            return self.head(x).float()


@pytest.mark.parametrize("kind", [WithoutGradients, Autocast, InAutocast])
def test_blocks_keep_the_contexts_that_they_run_in(kind: type[Net]) -> None:
    """torch.export loses no_grad inside autocast; and of a weight that autocast casts once for two stages the gradients
    are added in its dtype, so that both were refused for something else."""
    torch.manual_seed(0)
    net, batch = kind(2), rows()
    model, params, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise
    found = fpipe.join_params(model, fpipe.build(pipeline(model), model)(params, batch).grads)
    for name, grad in own_autograd(net, batch, 4, key=0, ends=(), loss=F.mse_loss)[1].items():
        if name == "embed.weight":
            torch.testing.assert_close(found[name], grad, atol=1e-2 if kind is InAutocast else 1e-6, rtol=0)
        else:
            assert torch.equal(found[name], grad), name


class Marked(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        return fpipe.boundary(y) if block is self.blocks[0] else y


def test_a_boundary_in_the_forward_is_a_cut_too() -> None:
    model, params, _ = fpipe.from_module(Marked(4, nn.Dropout), 2, loss=F.mse_loss, example=rows())
    assert [stage.name for stage in model.stages] == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    assert fpipe.verify(pipeline(model), model, params, rows(), key=1).bitwise
    more, _, _ = fpipe.from_module(Marked(4), cuts=["blocks.2"], loss=F.mse_loss, example=rows())
    assert [stage.name for stage in more.stages] == ["embed, blocks.0", "blocks.1, blocks.2", "blocks.3, head"]
    wrong(Marked(4), "stages=2, but cuts= and the boundaries in forward make 3 stages", cuts=["blocks.2"])


class TwoTowers(nn.Module):
    """Takes keywords, and returns a dict with the loss among its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.right[0].requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0, *, labels: Tensor | None = None) -> dict[str, Any]:
        for block in self.left:
            a = block(a)
        for block in self.right:
            b = block(b)
        joint = a * b * scale
        return {"joint": joint, "loss": None if labels is None else F.mse_loss(joint, labels)}


def test_inputs_are_keywords_and_the_net_computes_the_loss() -> None:
    torch.manual_seed(0)
    net = TwoTowers()
    inputs = {"a": torch.randn(4, WIDTH), "b": torch.randn(4, WIDTH), "labels": torch.randn(4, WIDTH)}
    model, params, _ = fpipe.from_module(net, 4, example=inputs)
    turned = {name: inputs[name] for name in ("labels", "b", "a")}
    results = [fpipe.build(pipeline(model, 2), model)(params, (one, None)) for one in (inputs, turned)]
    assert torch.equal(results[0].loss, results[1].loss)
    assert fpipe.verify(pipeline(model, 2), model, params, (inputs, None)).bitwise
    frozen = {name for name, one in net.named_parameters() if not one.requires_grad}
    assert fpipe.join_params(model, params).keys() == dict(net.named_parameters()).keys() - frozen
    assert fpipe.split_params(model, net.state_dict())[0].keys() == params[0].keys()
    with pytest.raises(ValueError, match=re.escape("inputs was a dict with 'a', 'b', 'labels' when the net")):
        fpipe.build(pipeline(model, 2), model)(params, ({"a": inputs["a"], "b": inputs["b"]}, None))


class Judging(nn.Module):
    """Returns its outputs and the loss, as nanoGPT does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = TwoTowers(), how

    def forward(self, a: Tensor, b: Tensor, labels: Tensor) -> Any:
        made = self.net(a, b, labels=labels)
        joint, loss = made["joint"], made["loss"]
        return {"pair": (joint, loss), "rows": {"loss": loss.view(1)}, "two": (joint, [loss, loss + 1])}[self.how]


def test_the_only_number_that_a_net_returns_is_its_loss() -> None:
    torch.manual_seed(0)
    net, inputs = Judging("pair"), {name: torch.randn(4, WIDTH) for name in ("a", "b", "labels")}
    model, params, _ = fpipe.from_module(net, 2, example=inputs)
    assert fpipe.verify(pipeline(model, 2), model, params, (inputs, None)).bitwise
    for how, found in (
        ("rows", "a tensor of shape (1,), to be reduced, for instance"),
        ("two", "tuple with 2 numbers"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"as the one number among floats; found {found}")):
            fpipe.from_module(Judging(how), 2, example=inputs)


class Experts(nn.Module):
    """Runs each expert on the rows that chose it, however many these are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = torch.nonzero(chosen == number).flatten()
            made = made.index_add(0, own, expert(x[own]))
        return made


def test_experts_that_drop_no_row_are_cut() -> None:
    """The cost of an op whose rows depend on data was int(None)."""
    torch.manual_seed(0)
    model, params, _ = fpipe.from_module(nn.Sequential(Experts(), Experts()), 2, loss=F.mse_loss, example=rows(8))
    with pytest.warns(UserWarning, match="runs under autograd"):
        report = fpipe.verify(pipeline(model, 2), model, params, rows(8))
    assert report.bitwise


class Wrapper(nn.Module):
    """Hands on whatever it is given, as the modules of Lightning and PEFT do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoTowers()

    def forward(self, *args: Any, **said: Any) -> Any:
        return self.net(*args, **said)


def test_a_net_may_take_whatever_keywords_it_hands_on() -> None:
    """torch.export takes no open sizes of what **kwargs collects: it ended in an assertion about a tree_name."""
    torch.manual_seed(0)
    net, inputs = Wrapper(), {name: torch.randn(4, WIDTH) for name in ("a", "b", "labels")}
    model, params, _ = fpipe.from_module(net, 2, example=inputs)
    assert fpipe.verify(pipeline(model, 2), model, params, (inputs, None)).bitwise
    assert "forward" not in vars(net)


class Sliced(Around):
    """Calls parts of its lists, and has a module under two names, for which torch follows each path that is taken."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.tail = self.head

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks[:2], *self.blocks[-2:]):
            x = block(x)
        return self.head(x)


def shared() -> nn.Module:
    """A list that has one block several times, as a shared layer is written, and is not called to its end."""
    return Toy(
        lambda own, x: functools.reduce(lambda x, block: block(x), own.blocks[:3], x),
        blocks=nn.ModuleList([Block()] * 4),
    )


@pytest.mark.parametrize(
    ("make", "names"),
    [(shared, None), (lambda: Sliced(4), ["blocks.0", "blocks.1", "blocks.2", "blocks.3, head"])],
    ids=["a block several times", "parts of a list"],
)
def test_modules_out_of_a_part_of_a_list_have_their_own_paths(make: Any, names: list[str] | None) -> None:
    """Of 'blocks.slice(None, 2, None).0' there is no module: AttributeError, of nn.Module. named_children has a block
    that is there several times once: IndexError."""
    model, params, _ = fpipe.from_module(make(), 4 if names else 3, loss=F.mse_loss, example=rows())
    assert names in (None, [stage.name for stage in model.stages])
    assert fpipe.verify(pipeline(model), model, params, rows()).bitwise


def branches() -> nn.Module:
    """A block with lists of its own inside, as those of a GoogLeNet."""
    left, right = (nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)) for _ in range(2))
    return Toy(lambda own, x: torch.cat([own.left(x), own.right(x)], -1), left=left, right=right)


class Named(nn.Module):
    """Blocks whose names, and no list, say that they are alike: some at once, some in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.block_1, self.block_2 = Block(), Block()
        self.layer1, self.layer2 = nn.Sequential(Block()), nn.Sequential(Block(), Block())
        self.mixed3a, self.mixed3b = branches(), branches()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.block_2(self.block_1(self.stem(x)))))
        return self.mixed3b(self.mixed3a(x))


def test_blocks_whose_names_end_in_numbers_are_a_list() -> None:
    """The two layers of the stem were the blocks, so that all else was in the last stage; or the layers in branches."""
    model, _, _ = fpipe.from_module(Named(), 8, loss=F.mse_loss, example=rows())
    names = "stem", "block_1", "block_2", "layer1", "layer2.0", "layer2.1", "mixed3a", "mixed3b"
    assert tuple(stage.name for stage in model.stages) == names


def test_inputs_are_arguments_and_the_output_is_a_dict() -> None:
    """The reference took such an output, and a step ended in "unhashable type: 'list'"."""
    net = TwoTowers()
    batch = (torch.randn(4, WIDTH), torch.randn(4, WIDTH), 2.0), torch.randn(4, WIDTH)
    model, params, _ = fpipe.from_module(net, 2, loss=lambda y, t: F.mse_loss(y["joint"], t), example=batch)
    result = fpipe.reference(model, params, batch)
    assert torch.equal(result.outputs["joint"], net(*batch[0])["joint"])
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    assert fpipe.verify(program, model, params, batch).bitwise
    other = (*batch[0][:2], 3.0), batch[1]
    with pytest.raises(ValueError, match=re.escape("inputs[2] was 2.0 when the net was traced, found 3.0.")):
        fpipe.reference(model, params, other)
    double = (batch[0][0].double(), *batch[0][1:]), batch[1]
    words = "inputs[0] was float32 when the net was traced, found float64. Cast it, or call from_module again for"
    with pytest.raises(ValueError, match=re.escape(words)):
        fpipe.reference(model, params, double)


class Counted(Around):
    """Counts its calls, and keeps a mean by binding it anew, which no output reads."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x)


class Normed(Around):
    """Spectral norms in each stage, whose outputs read what their forwards write, and later stages these outputs."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        for module in (self.blocks[0].up, self.head):
            nn.utils.parametrizations.spectral_norm(module, n_power_iterations=2)  # pyright: ignore[reportArgumentType]


class Averaging(nn.Linear):
    """Reads a mean of its inputs, and binds it anew."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(like.in_features))

    def forward(self, input: Tensor) -> Tensor:
        before, self.mean = self.mean, 0.9 * self.mean + 0.1 * input.mean(0).detach()
        return super().forward(input - self.mean + before)


class Inside(Around):
    """Modules inside the net bind a buffer anew, of which torch.export says nothing: their state was lost."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        for block in self.blocks:
            block.up = Averaging(block.up)


@pytest.mark.parametrize("kind", [Counted, Normed, Inside])
def test_buffers_that_are_written_are_state(kind: type[Net]) -> None:
    torch.manual_seed(0)
    net, batch = kind(2), rows()
    model, params, state = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    before = {name: held.clone() for name, held in net.named_buffers()}
    program = merged(model, 4, fpipe.schedules.one_f_one_b(2))
    assert fpipe.verify(program, model, params, batch, state=state).bitwise
    written = remembered(fpipe.build(program, model)(params, batch, state=state))
    assert all(torch.equal(before[name], held) for name, held in net.named_buffers())
    now = dict(one_by_one(net, batch)[0].named_buffers())
    assert written.keys() == {name for name in now if not torch.equal(before[name], now[name])}
    assert [name for name, held in written.items() if not torch.equal(held, now[name])] == []


def test_a_step_is_built_in_the_mode_that_the_net_is_in() -> None:
    """One model trains and evaluates; a step itself goes on in its own mode, and says so."""
    net, batch = Net(2, nn.Dropout), rows()
    model, params, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    train = fpipe.build(pipeline(model), model)
    trained = train(params, batch, key=0).loss
    net.eval()
    with pytest.raises(ValueError, match=re.escape("was in training when the net was traced and is in eval now")):
        train(params, batch, key=0)
    program = fpipe.forward_only()(pipeline(model))
    assert torch.allclose(fpipe.build(program, model)(params, batch).loss, F.mse_loss(net(batch[0]), batch[1]))
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise
    net.train()
    assert torch.equal(train(params, batch, key=0).loss, trained)


def test_a_net_whose_state_is_another_in_eval_is_refused() -> None:
    net, batch = Net(2, Statistics), rows()
    model, params, state = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    net.eval()
    with pytest.raises(ValueError, match=re.escape("was in training when the net was traced and is in eval now")):
        fpipe.build(pipeline(model), model)(params, batch, state=state)
    model, params, _ = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise


def test_an_exported_program_is_a_door_too() -> None:
    torch.manual_seed(0)
    net, batch = Net(2, Statistics), rows()
    shapes = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(net, batch[:1], strict=False, dynamic_shapes=shapes)
    model, params, state = fpipe.from_module(exported, 2, loss=F.mse_loss, example=batch)
    same, own_params, own_state = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    found = fpipe.build(pipeline(model), model)(params, batch, state=state)
    right = fpipe.build(pipeline(same), same)(own_params, batch, state=own_state)
    assert [stage.name for stage in model.stages] == [stage.name for stage in same.stages]
    for one, other in ((found.grads, right.grads), (found.state, right.state)):
        assert [list(stage) for stage in one] == [list(stage) for stage in other]
        assert all(torch.equal(one[s][name], other[s][name]) for s in range(2) for name in one[s])


class Branching(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if x.sum() > 0 else x


class WritesInput(Around):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounds(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return Straight.apply(block(x))  # pyright: ignore[reportReturnType]


class Causal(nn.Module):
    """Hands torch's decoder a mask without saying that it is causal: torch then compares its values."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True), 2)

    def forward(self, x: Tensor, **said: bool) -> Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, x, tgt_mask=mask, **said).mean(-1)


class SaysSo(Causal):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, tgt_is_causal=True)


def test_a_module_of_torch_that_cannot_be_exported_is_said_with_its_line_too() -> None:
    detects = "tgt_is_causal = _detect_is_causal_mask(tgt_mask, tgt_is_causal, seq_len)"
    wrong(Causal(), detects, "in module 'decoder' (TransformerDecoder), at test_from_module.py:")
    model, _, _ = fpipe.from_module(SaysSo(), 2, loss=F.mse_loss, example=rows(4))
    assert [stage.name for stage in model.stages] == ["decoder.layers.0", "decoder.layers.1"]


class Peeks(nn.Module):
    """Decides by what it reads, in a method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.decided(x)

    def decided(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Differentiates(nn.Module):
    """Takes a derivative of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.tanh().sum())(x)


class Maps(nn.Module):
    """Computes row by row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.softmax(0))(x)


class Rebuilds(nn.Module):
    """Is another module from its first call on, as some of transformers are for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.Tanh):
            self.inner = nn.ReLU()
        return self.inner(x)


class Draws(nn.Module):
    """Draws from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator())


class WritesTable(nn.Module):
    """Writes what it closes over, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2 * WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table += 1
        return x + self.table


def test_what_cannot_be_exported_is_said_with_its_module_and_the_users_line() -> None:
    """Of an op only its name was said, and of what torch.export refuses the line without the module."""
    at = "), at test_from_module.py:"
    middle = "\n  in module 'blocks.0.middle.0' ("
    decides = f"{middle}Peeks{at}{line_of(Peeks.decided) + 1}, in decided: return x if x.sum() > 0 else -x"
    change = "Change the line below, or use from_loss with fpipe.boundary, or from_functions."
    branches = "in around: return block(x) if x.sum() > 0 else x"
    wrong(Branching(2), branches, f"{change}\n  at test_from_module.py:")
    with pytest.warns(UserWarning, match=re.escape(decides)):
        fpipe.from_module(Net(2, Peeks), 2, loss=F.mse_loss, example=rows(4))
    wrong(
        Net(2, Draws), f"{middle}Draws{at}{line_of(Draws.forward) + 1}, in forward: return x + torch.rand(x.shape, ge"
    )
    derives = f"{middle}Differentiates{at}{line_of(Differentiates.forward) + 1}, in forward: return torch.func.grad("
    wrong(
        Net(2, Differentiates),
        f"torch.autograd.grad or torch.func, which only from_functions can trace. {change}{derives}",
    )
    maps = f"{middle}Maps{at}{line_of(Maps.forward) + 1}, in <lambda>: return torch.vmap(lambda row: row.softmax(0))(x)"
    wrong(Net(2, Maps), f"write them for batches, as torch.einsum does, or use from_functions.{maps}")
    rebuilds = f"{middle}Rebuilds{at}{line_of(Rebuilds.forward) + 2}, in forward: self.inner = nn.ReLU()"
    once = "Run it on the example once before, so that it is what it will be"
    wrong(Net(2, Rebuilds), f"to 'inner', and computes something else the next time. {once}. {change}{rebuilds}")
    writes = f"{middle}WritesTable{at}{line_of(WritesTable.forward) + 1}, in forward: self.table += 1"
    wrong(Net(2, WritesTable), f"which is no buffer of its own; a stage is a pure function. Work on a copy.{writes}")
    wrong(WritesInput(2), f"at test_from_module.py:{line_of(WritesInput.forward) + 1}, in forward: return super().forw")
    shared = Net(2, Statistics)
    shared.blocks[1] = shared.blocks[0]
    place = (
        f"{middle}Statistics), at test_from_module.py:{line_of(Block.forward) + 1}, in forward: return x + self.down("
    )
    wrong(shared, f"in stages 0 and 1; choose cuts= that keep it in one.{place}")


class Points(Around):
    """Gives one of its modules another name as it runs."""

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        self.current = block
        return block(x)


def test_a_net_that_renames_its_own_modules_is_cut():
    """It was refused as one that changes itself."""
    model, params, _ = fpipe.from_module(Points(2), 2, loss=F.mse_loss, example=rows())
    assert fpipe.verify(pipeline(model), model, params, rows()).bitwise


def line_of(function: Any) -> int:
    return function.__code__.co_firstlineno


def test_a_gradient_that_the_trace_has_lost_is_refused() -> None:
    wrong(Rounds(2), "the stages give another gradient of")


class Listens(Around):
    """Registers hooks the first time that it runs, as models of transformers do, and says so on itself."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.seen: list[str] = []
            for block in self.blocks:
                block.register_forward_hook(lambda module, *_: self.seen.append(type(module).__name__))
        return super().forward(x)


def test_hooks_that_the_net_registers_as_it_is_exported_are_gone_after() -> None:
    """They stayed, while what the net had noted of them went: it registered all of them once more when it ran, and a
    mixture of experts counted each router twice in its loss."""
    net, batch = Listens(2), rows(4)
    fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    net(batch[0])
    assert net.seen == ["Block", "Block"]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (Net, r"from_module takes an nn\.Module, a function that makes one, .*; found the class Net; make one"),
        (F.relu, r"is called without arguments, and this one takes \(input: torch\.Tensor.*: bind them"),
        ([Net(2)], r"what torch\.export made; found list"),
    ],
)
def test_only_modules_are_cut(found: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        fpipe.from_module(found, 2, example=rows())


class Checkpointed(Around):
    """Recomputes its blocks by torch's old way, a backward within a backward."""

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)


class Remembers(Around):
    """Keeps what a block made in a plain attribute."""

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        self.last = block(x)
        return self.last


class Cumulative(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2 * WIDTH, momentum=None)


def test_what_a_graph_cannot_say_is_refused_with_the_way_out() -> None:
    """torch's own words came without the user's line, or only when a gradient was asked for."""
    line = "in around: return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)"
    wrong(Checkpointed(2), "no trace above autograd captures; say use_reentrant=False, or leave it out", line)
    registered = "self.last was assigned during export. Such attributes must be registered as buffers"
    wrong(Remembers(2), registered, "in around: self.last = block(x)")
    wrong(Net(2, Cumulative), "(momentum=None), a number that it reads from a buffer, which an export cannot; give it")


def test_statistics_of_a_graph_are_not_deferred() -> None:
    """The model came back as it was: its norms went on after each microbatch, and nobody said so."""
    model, _, _ = fpipe.from_module(Net(2, Statistics), 2, loss=F.mse_loss, example=rows())
    with pytest.raises(ValueError, match=re.escape("batch norm 'blocks.0.middle.0' is in the graph of a net")):
        fpipe.deferred_batch_norm(model)
    plain, _, _ = fpipe.from_module(Net(2), 2, loss=F.mse_loss, example=rows())
    assert fpipe.deferred_batch_norm(plain) == plain


def stepped(model: fpipe.Model, params: Any, state: Any, batch: Any) -> list[Tensor]:
    result = fpipe.build(pipeline(model), model)(params, batch, state=state, key=3)
    return leaves((result.loss, result.grads, result.state))


def test_a_copy_of_a_model_is_the_model() -> None:
    """It held closures and nodes of graphs: copy and pickle ended in an error of Python's or of fake tensors."""
    net, batch = Net(2, Statistics, nn.Dropout), rows()
    made = fpipe.from_module(net, 2, loss=F.mse_loss, example=batch)
    found = stepped(*made, batch)
    for model in (copy.deepcopy(made[0]), pickle.loads(pickle.dumps(made[0]))):
        assert str(model) == str(made[0])
        assert all(map(torch.equal, stepped(model, *made[1:], batch), found))


class InPlace(Net):
    """A block changes what the block before has made; as a whole that is nobody else's."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReadsMutated(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.blocks[1](self.blocks[0](x[:, :]))
        return self.head(y + x)


def test_a_stage_mutates_a_copy_of_what_it_is_handed() -> None:
    torch.manual_seed(0)
    net, batch = InPlace(4), rows()
    model, params, _ = fpipe.from_module(net, loss=F.mse_loss, example=batch, cuts=["embed", "blocks.1"])
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise
    written = (
        r"stage 2 reads what stage 0 computes .* and stage 1 writes in place .*\n  in module 'blocks.0.0' \(ReLU\), at"
    )
    with pytest.raises(ValueError, match=written):
        fpipe.from_module(ReadsMutated(2), loss=F.mse_loss, example=batch, cuts=["embed", "blocks.1"])
