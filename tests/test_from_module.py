"""Any module, cut between its blocks: its own gradients, state, ties and skips, and what cannot be cut."""

import copy
import functools
import linecache
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
from tests.refusals import refusals
from tests.toys import Block, Toy, merged, one_by_one, remembered

WIDTH = 8


class Net(nn.Module):
    """An embedding whose weight is the head's too, a table, blocks, and a skip from the first to the last."""

    def __init__(self, blocks: int = 4, *middle: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, *(one() for one in middle)) for _ in range(blocks))
        self.head.weight = self.embed.weight
        self.table: Tensor
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.embed(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x + skip) + torch.tensor(4.0)


def statistics(**how: Any) -> nn.Module:
    return nn.BatchNorm1d(2 * WIDTH, **how)


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, WIDTH)


def cut(net: Any, stages: int | None = 2, **said: Any) -> Any:
    return fpipe.from_module(net, stages, **({"loss": F.mse_loss, "example": rows(4)} | said))


def pipeline(model: fpipe.Model, microbatches: int = 4) -> fpipe.Program:
    return merged(model, microbatches, fpipe.schedules.zb_h1(len(model.stages)))


def names(model: fpipe.Model) -> list[str]:
    return [stage.name for stage in model.stages]


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last() -> None:
    model, _, _ = cut(Net(4), 4)
    assert names(model) == ["embed, blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]
    assert model.ties == (((0, "embed.weight"), (3, "embed.weight")),)
    assert model.inputs == ("batch", 0, 1, ((0, 1), 2))  # the skip passes by those between


SAID = {f"blocks.{at}": cost for at, cost in enumerate((5.0, 1.0, 1.0, 1.0))}
MEASURED = fpipe.Costs(forward=[2, 1, 1, 1], backward=[9, 1, 1, 1])


def test_stages_are_balanced_by_costs_that_were_said_or_measured() -> None:
    """Of blocks by their paths, or by `profile` of the net with a stage for each block."""
    net, batch = Net(4), rows()
    for costs in (SAID, MEASURED):
        assert names(cut(net, costs=costs)[0]) == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    fine, params, _ = cut(net, 4)
    measured = fpipe.profile(fpipe.split(2)(fpipe.program(fine)), fine, params, batch, repeats=1)
    assert len(cut(net, costs=measured)[0].stages) == 2


def test_a_model_prints_what_went_where() -> None:
    model, _, _ = cut(Masked(2, statistics), example=rows())
    assert str(model).splitlines() == [
        "stage 0: embed, blocks.0",
        "    400 parameters (1.6 KiB), 50% of the operations, 3 buffers of state",
        "    takes float32[8, 8] of the batch",
        "stage 1: blocks.1, head",
        "    336 parameters (1.3 KiB), 50% of the operations, 3 buffers of state, embed.weight is that of stage 0",
        "    takes float32[8, 8] (256 B) of stage 0, float32[8, 8] (256 B) of stage 0",
        "    makes 2 tensors again, which follow from sizes and constants",
    ]


class Around(Net):
    """Calls its blocks in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)

    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Masked(Around):
    """Makes a mask that all its blocks read."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH, WIDTH).tril()
        skip = x = self.embed(x)
        for block in self.blocks:
            x = block(x @ mask)
        return self.head(x + skip)


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


def test_blocks_keep_the_contexts_that_they_run_in() -> None:
    """torch.export loses no_grad inside autocast; and of a weight that autocast casts once for two stages the gradients
    are added in its dtype, so that both were refused for something else."""
    torch.manual_seed(0)
    net, batch = InAutocast(2), rows()
    model, params, _ = cut(net, example=batch)
    found = fpipe.join_params(model, fpipe.build(pipeline(model), model)(params, batch).grads)
    for name, grad in own_autograd(net, batch, 4, key=0, ends=(), loss=F.mse_loss)[1].items():
        if name == "embed.weight":
            torch.testing.assert_close(found[name], grad, atol=1e-2, rtol=0)
        else:
            assert torch.equal(found[name], grad), name


class Marked(Around):
    def around(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        return fpipe.boundary(y) if block is self.blocks[0] else y


def test_cuts_name_modules_after_which_stages_end_and_a_boundary_in_the_forward_is_one() -> None:
    model, _, _ = cut(Net(4), None, cuts=["blocks.2", "embed"])
    assert names(model) == ["embed", "blocks.0 to blocks.2", "blocks.3, head"]
    model, params, _ = cut(Marked(4, nn.Dropout))
    assert names(model) == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    assert fpipe.verify(pipeline(model), model, params, rows(), key=1).bitwise
    model, _, _ = cut(Marked(4), None, cuts=["blocks.2"])
    assert names(model) == ["embed, blocks.0", "blocks.1, blocks.2", "blocks.3, head"]


class TwoTowers(nn.Module):
    """Takes keywords, and returns a dict with the loss among its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block(WIDTH) for _ in range(2)) for _ in range(2))
        self.right[0].requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0, *, labels: Tensor | None = None) -> dict[str, Any]:
        for block in self.left:
            a = block(a)
        for block in self.right:
            b = block(b)
        joint = a * b * scale
        return {"joint": joint, "loss": None if labels is None else F.mse_loss(joint, labels)}


def keywords() -> dict[str, Tensor]:
    return {name: torch.randn(4, WIDTH) for name in ("a", "b", "labels")}


def test_inputs_are_keywords_and_the_net_computes_the_loss() -> None:
    torch.manual_seed(0)
    net, inputs = TwoTowers(), keywords()
    model, params, _ = fpipe.from_module(net, 4, example=inputs)
    step = fpipe.build(pipeline(model, 2), model)
    turned = {name: inputs[name] for name in ("labels", "b", "a")}
    one, other = (step(params, (each, None)).loss for each in (inputs, turned))
    assert torch.equal(one, other)
    frozen = {name for name, one in net.named_parameters() if not one.requires_grad}
    assert fpipe.join_params(model, params).keys() == dict(net.named_parameters()).keys() - frozen
    assert fpipe.split_params(model, net.state_dict())[0].keys() == params[0].keys()
    with pytest.raises(ValueError, match=re.escape("inputs was a dict with 'a', 'b', 'labels' when the net")):
        step(params, ({"a": inputs["a"], "b": inputs["b"]}, None))


class Judging(nn.Module):
    """Takes whatever it hands on, and returns its outputs and the loss, as nanoGPT does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = TwoTowers(), how

    def forward(self, *args: Any, **said: Any) -> Any:
        made = self.net(*args, **said)
        joint, loss = made["joint"], made["loss"]
        return {"pair": (joint, loss), "rows": {"loss": loss.view(1)}, "two": (joint, [loss, loss + 1])}[self.how]


def test_the_only_number_that_a_net_returns_is_its_loss_and_it_may_take_what_keywords_it_hands_on() -> None:
    """torch.export takes no open sizes of what **kwargs collects: it ended in an assertion about a tree_name."""
    torch.manual_seed(0)
    net, inputs = Judging("pair"), keywords()
    model, params, _ = fpipe.from_module(net, 2, example=inputs)
    assert fpipe.verify(pipeline(model, 2), model, params, (inputs, None)).bitwise
    assert "forward" not in vars(net)


class Sliced(Around):
    """Calls parts of its lists, has a module under two names, for which torch follows each path that is taken, and
    gives one of its modules another name as it runs."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.tail = self.head

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks[:2], *self.blocks[-2:]):
            self.current = block
            x = block(x)
        return self.head(x)


def shared() -> nn.Module:
    """A list that has one block several times, as a shared layer is written, and is not called to its end."""
    return Toy(
        lambda own, x: functools.reduce(lambda x, block: block(x), own.blocks[:3], x),
        blocks=nn.ModuleList([Block(WIDTH)] * 4),
    )


def branches() -> nn.Module:
    """A block with lists of its own inside, as those of a GoogLeNet."""
    left, right = (nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)) for _ in range(2))
    return Toy(lambda own, x: torch.cat([own.left(x), own.right(x)], -1), left=left, right=right)


def in_place() -> nn.Module:
    """A block changes what the block before has made; as a whole that is nobody else's."""
    blocks = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))


class Named(nn.Module):
    """Blocks whose names, and no list, say that they are alike: some at once, some in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.block_1, self.block_2 = Block(WIDTH), Block(WIDTH)
        self.layer1, self.layer2 = nn.Sequential(Block(WIDTH)), nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.mixed3a, self.mixed3b = branches(), branches()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.block_2(self.block_1(self.stem(x)))))
        return self.mixed3b(self.mixed3a(x))


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        # named_children has a block that is there several times once: IndexError.
        (shared, ["blocks.0", "blocks.1", "blocks.2"]),
        (in_place, ["0", "1", "2", "3"]),
        # Of 'blocks.slice(None, 2, None).0' there is no module: AttributeError, of nn.Module.
        (lambda: Sliced(4), ["blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]),
        # The two layers of the stem were the blocks, so that all else was in the last stage; or layers in branches.
        (Named, ["stem", "block_1", "block_2", "layer1", "layer2.0", "layer2.1", "mixed3a", "mixed3b"]),
    ],
)
def test_blocks_are_found_in_lists_parts_of_lists_and_by_their_names(make: Any, stages: list[str]) -> None:
    model, params, _ = cut(make(), len(stages))
    assert make is shared or names(model) == stages
    assert fpipe.verify(pipeline(model), model, params, rows()).bitwise


def test_inputs_are_arguments_and_the_output_is_a_dict() -> None:
    """The reference took such an output, and a step ended in "unhashable type: 'list'"."""
    net = TwoTowers()
    batch = (torch.randn(4, WIDTH), torch.randn(4, WIDTH), 2.0), torch.randn(4, WIDTH)
    model, params, _ = cut(net, loss=lambda y, t: F.mse_loss(y["joint"], t), example=batch)
    assert torch.equal(fpipe.reference(model, params, batch).outputs["joint"], net(*batch[0])["joint"])
    assert fpipe.verify(merged(model, 2), model, params, batch).bitwise
    for odd, words in (
        ((*batch[0][:2], 3.0), "inputs[2] was 2.0 when the net was traced, found 3.0."),
        ((batch[0][0].double(), *batch[0][1:]), "inputs[0] was float32 when the net was traced, found float64. Cast i"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            fpipe.reference(model, params, (odd, batch[1]))


def averages(own: Any, x: Tensor) -> Tensor:
    before, own.mean = own.mean, 0.9 * own.mean + 0.1 * x.mean(0).detach()
    return x - own.mean + before


@pytest.mark.parametrize(
    "make",
    [
        lambda: Toy(averages, mean=torch.zeros(2 * WIDTH)),  # torch.export says nothing of what modules inside bind
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2 * WIDTH, 2 * WIDTH)),
    ],
    ids=["bound anew", "spectral norm"],
)
def test_buffers_that_modules_inside_read_and_write_are_state(make: Any) -> None:
    """It was lost."""
    net, batch = Net(2, make), rows()
    model, params, state = cut(net, example=batch)
    result = fpipe.build(merged(model, 4), model)(params, batch, state=state)
    assert all(state)
    now = one_by_one(net, batch)[0]
    assert [name for name, one in remembered(result).items() if not torch.equal(one, now.get_buffer(name))] == []


def test_a_step_is_built_in_the_mode_that_the_net_is_in() -> None:
    """One model trains and evaluates; a step itself goes on in its own mode, and says so."""
    net, batch = Net(2, nn.Dropout), rows()
    model, params, _ = cut(net, example=batch)
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
    net, batch = Net(2, statistics), rows()
    model, params, state = cut(net, example=batch)
    net.eval()
    with pytest.raises(ValueError, match=re.escape("was in training when the net was traced and is in eval now")):
        fpipe.build(pipeline(model), model)(params, batch, state=state)
    model, params, _ = cut(net, example=batch)
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise


def stepped(model: fpipe.Model, params: Any, state: Any, batch: Any) -> list[Tensor]:
    result = fpipe.build(pipeline(model), model)(params, batch, state=state, key=3)
    return leaves((result.loss, result.grads, result.state))


def test_an_exported_program_is_a_door_too_and_a_copy_of_a_model_is_the_model() -> None:
    """A model held closures and nodes of graphs: copy and pickle ended in an error of Python's or of fake tensors."""
    torch.manual_seed(0)
    net, batch = Net(2, statistics, nn.Dropout), rows()
    shapes = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(net, batch[:1], strict=False, dynamic_shapes=shapes)
    made = cut(net, example=batch)
    found = stepped(*made, batch)
    for model in (
        cut(exported, example=batch)[0],
        copy.deepcopy(made[0]),
        pickle.loads(pickle.dumps(made[0])),
    ):
        assert str(model) == str(made[0])
        assert all(map(torch.equal, stepped(model, *made[1:], batch), found))


def causal(said: bool) -> nn.Module:
    """Hands torch's decoder a mask, and may say that it is causal; torch else compares its values."""

    def decoded(own: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return own.decoder(x, x, tgt_mask=mask, tgt_is_causal=said or None).mean(-1)

    return Toy(decoded, decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True), 2))


def test_a_module_of_torch_that_cannot_be_exported_is_said_with_its_line_too() -> None:
    words = (
        "tgt_is_causal = _detect_is_causal_mask(tgt_mask, tgt_is_causal, seq_len)",
        "in module 'decoder' (TransformerDecoder), at test_from_module.py:",
    )
    with pytest.raises(ValueError, match=re.escape(words[0])) as told:
        cut(causal(False))
    assert words[1] in str(told.value)
    assert names(cut(causal(True))[0]) == ["decoder.layers.0", "decoder.layers.1"]


def peeks(own: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def differentiates(own: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.tanh().sum())(x)


def maps(own: Any, x: Tensor) -> Tensor:
    return torch.vmap(torch.tanh)(x)


def rebuilds(own: Any, x: Tensor) -> Tensor:
    own.inner = nn.ReLU()
    return own.inner(x)


def draws(own: Any, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.Generator())


def writes(own: Any, x: Tensor) -> Tensor:
    own.table += 1
    return x + own.table


def toy(does: Any) -> nn.Module:
    return Toy(does, inner=nn.Tanh(), table=nn.Parameter(torch.zeros(2 * WIDTH), requires_grad=False))


def with_one_norm() -> nn.Module:
    net = Net(2, statistics)
    net.blocks[1] = net.blocks[0]
    return net


CHANGE = "Change the line below, or use from_loss with fpipe.boundary, or from_functions."


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (differentiates, f"torch.autograd.grad or torch.func, which only from_functions can trace. {CHANGE}"),
        (maps, "write them for batches, as torch.einsum does, or use from_functions."),
        # As some of transformers are for short sequences.
        (rebuilds, "Run it on the example once before, so that it is what it will be. " + CHANGE),
        (draws, "draws from a generator of its own (rand), which is in no key; draw without it. " + CHANGE),
        (writes, "which is no buffer of its own. Work on a copy."),
    ],
)
def test_what_cannot_be_exported_is_said_with_its_module_and_the_users_line(does: Any, words: str) -> None:
    """Of an op only its name was said, and of what torch.export refuses the line without the module."""
    line = does.__code__.co_firstlineno + 1
    code = f"{line}, in {does.__name__}: {linecache.getline(__file__, line).strip()}"
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        cut(Net(2, lambda: toy(does)))
    assert str(told.value).endswith(f"\n  in module 'blocks.0.middle.0' (Toy), at test_from_module.py:{code}")


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
    cut(net, example=batch)
    net(batch[0])
    assert net.seen == ["Block", "Block"]


def around(function: Any) -> nn.Module:
    """A net that calls its blocks so."""
    net = Around(2)
    vars(net)["around"] = function
    return net


class WritesInput(Around):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def reads_mutated() -> nn.Module:
    """What one module has made another writes, and a third reads."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")}
    middle = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    return Toy(lambda own, x: own.last(own.middle((h := own.first(x))[:, :]) + h), **layers, middle=middle)


test_what_cannot_be_is_said_in_a_sentence = refusals(
    globals(),
    """
cut(Net(4), 0)
    ValueError: stages is a whole number, at least 1; found 0.
cut(Net(4), None)
    ValueError: say how many stages, or cuts=[...] with the modules after which they end.
cut(Net(4), 99)
    ValueError: make as many stages; found stages=99.
cut(Net(4), None, cuts=["block.2"])
    ValueError: cuts= names 'block.2', but no module of that path is called when the net runs; close
cut(Net(4), 5, cuts=["embed"])
    ValueError: stages=5, but cuts= and the boundaries in forward make 2 stages
cut(Marked(4), cuts=["blocks.2"])
    ValueError: stages=2, but cuts= and the boundaries in forward make 3 stages
cut(Net(4), None, cuts=["embed"], costs={"embed": 1.0})
    ValueError: costs= balances stages, and cuts= says where they end; leave
cut(Net(4), None, cuts=3)
    ValueError: cuts lists the paths of modules, as in ['encoder.layer.3']; found 3.
cut(Net(4), costs={"blocks.1": 1.0})
    ValueError: costs= says nothing of block 'blocks.0'; the blocks are blocks.0, blocks.1,
cut(Net(3), costs=MEASURED)
    ValueError: costs= has been measured for 4 stages, and the net has 3 blocks; profile the model of
cut(Net(4), costs=[1.0])
    ValueError: costs has a number for each block by its path, or is fpipe.Costs; found list.
cut(Net(4), costs={**SAID, "blcks.9": 1.0})
    ValueError: costs= names 'blcks.9', which is no block; the blocks are blocks.0
cut(Net(4), example=({"y": torch.ones(4, 8)},) * 2)
    ValueError: the example is no call of Net.forward: missing a required
cut(Net(4), example=None)
    ValueError: example is a batch (inputs, target), its inputs a dict, a tuple or the one argument
cut(Net(4), example=(torch.ones(4, WIDTH), None))
    ValueError: the example has no target for loss=; hand in example=(inputs,
cut(Net(4), loss=None)
    ValueError: without loss= the net computes the loss of its inputs, labels among them
cut(Net(4), loss=None, example=(torch.ones(4, WIDTH), None))
    ValueError: found a tensor of shape
cut(Judging("rows"), loss=None, example=keywords())
    ValueError: as the one number among floats; found a tensor of shape (1,), to be reduced, for instance
cut(Judging("two"), loss=None, example=keywords())
    ValueError: as the one number among floats; found tuple with 2 numbers
cut(Net)
    TypeError: from_module takes an nn.Module, or what torch.export made; found the class Net; make one
cut(F.relu)
    TypeError: from_module takes an nn.Module, or what torch.export made; found function.
cut([Net(2)])
    TypeError: what torch.export made; found list
cut(around(lambda block, x: block(x) if x.sum() > 0 else x))
    ValueError: Change the line below, or use from_loss with fpipe.boundary, or from_functions. at test_from_module.py:
cut(WritesInput(2))
    ValueError: the net writes 'x' in place (aten.add_.Tensor), which is no buffer of its own. Work on a copy.
    function. Work on a copy. at test_from_module.py:
cut(with_one_norm())
    ValueError: in stages 0 and 1; choose cuts= that keep it in one. in module 'blocks.0.middle.0' (BatchNorm1d), at
    toys.py:
cut(Net(2, lambda: statistics(momentum=None)))
    ValueError: has momentum=None, which no export supports; give it a momentum, or
# A stage mutates a copy of what it is handed; what is between is read as it was.
cut(reads_mutated(), None, cuts=["first", "middle"])
    ValueError: stage 2 reads what stage 0 computes (linear) and stage 1 writes in place (aten.relu_.default). Compute a
    new tensor instead. in module 'middle.0' (ReLU), at
# The model came back as it was: its norms went on after each microbatch, and nobody said so.
fpipe.deferred_batch_norm(cut(Net(2, statistics))[0])
    ValueError: batch norm 'blocks.0.middle.0' is in the graph of a net
""",
)


def test_a_module_that_looks_at_data_is_named_with_its_line() -> None:
    with pytest.warns(
        UserWarning, match=r"in module 'blocks.0.middle.0' \(Toy\), at .*return x if x.sum\(\) > 0 else -x"
    ):
        cut(Net(2, lambda: toy(peeks)))


def test_without_batch_norms_nothing_is_deferred() -> None:
    model, _, _ = cut(Net(2))
    assert fpipe.deferred_batch_norm(model) == model
