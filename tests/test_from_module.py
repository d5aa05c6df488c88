"""Any module is cut between its blocks: its own gradients, state, ties and skips, and errors for bad cuts."""

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
from tests.own_autograd import eager_loss_and_grads
from tests.refusals import refusals
from tests.toys import Block, Toy, merged, run_unsplit, state_by_name

WIDTH = 8


class Net(nn.Module):
    """A net with an embedding tied to the head, a table, blocks, and a skip from first to last."""

    def __init__(self, blocks: int = 4, *middle: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, *(make_layer() for make_layer in middle)) for _ in range(blocks))
        self.head.weight = self.embed.weight
        self.table: Tensor
        self.register_buffer("table", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.embed(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x + skip) + torch.tensor(4.0)


def batch_norm(**options: Any) -> nn.Module:
    return nn.BatchNorm1d(2 * WIDTH, **options)


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, WIDTH)


def cut_net(net: Any, stages: int | None = 2, **options: Any) -> Any:
    return fpipe.from_module(net, stages, **({"loss": F.mse_loss, "batch": rows(4)} | options))


def pipeline(model: fpipe.Model, microbatches: int = 4) -> fpipe.Program:
    return merged(model, microbatches, fpipe.schedules.zb_h1(len(model.stages)))


def stage_names(model: fpipe.Model) -> list[str]:
    return [stage.name for stage in model.stages]


def test_embeddings_are_in_the_first_stage_and_the_head_in_the_last() -> None:
    model, _, _ = cut_net(Net(4), 4)
    assert stage_names(model) == ["embed, blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]
    assert model.ties == (((0, "embed.weight"), (3, "embed.weight")),)
    assert model.inputs == ("batch", 0, 1, ((0, 1), 2))  # the skip goes past the stages in between


BLOCK_COSTS = {f"blocks.{index}": cost for index, cost in enumerate((5.0, 1.0, 1.0, 1.0))}
MEASURED = fpipe.Costs(forward=[2, 1, 1, 1], backward=[9, 1, 1, 1])


def test_stages_are_balanced_by_given_or_measured_costs() -> None:
    """Costs are given for blocks by path, or measured by `profile` of the net with a stage for each block."""
    net, batch = Net(4), rows()
    for costs in (BLOCK_COSTS, MEASURED):
        assert stage_names(cut_net(net, costs=costs)[0]) == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    fine, params, _ = cut_net(net, 4)
    measured = fpipe.profile(fpipe.split(2)(fpipe.program(fine)), fine, params, batch, repeats=1)
    assert len(cut_net(net, costs=measured)[0].stages) == 2


def test_a_model_prints_its_stages_and_their_contents() -> None:
    model, _, _ = cut_net(Masked(2, batch_norm), batch=rows())
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
    """A net that calls its blocks through a method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call_block(block, x)
        return self.head(x)

    def call_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Masked(Around):
    """A net that makes a mask, which all blocks read."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH, WIDTH).tril()
        skip = x = self.embed(x)
        for block in self.blocks:
            x = block(x @ mask)
        return self.head(x + skip)


class InAutocast(Net):
    """A net in one autocast context, which casts the tied weight once, and with a scale computed under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embed(x)
            for block in self.blocks:
                with torch.no_grad():
                    scale = x.square().mean()
                # An op that autocast casts, and that refuses mixed dtypes: its operations used to be counted outside.
                x = F.prelu(block(x) / (1 + scale), self.embed.weight[0, :1])
            return self.head(x).float()


def test_blocks_keep_their_autocast_and_no_grad_contexts() -> None:
    """Used to be refused with a wrong reason: torch.export loses no_grad inside autocast, and adds the gradients of a
    weight that autocast casts once in the cast dtype.
    """
    torch.manual_seed(0)
    net, batch = InAutocast(2), rows()
    model, params, _ = cut_net(net, batch=batch)
    actual_grads = fpipe.join_params(model, fpipe.build(pipeline(model), model)(params, batch).grads)
    for name, grad in eager_loss_and_grads(net, batch, 4, key=0, ends=(), loss=F.mse_loss)[1].items():
        if name == "embed.weight":
            torch.testing.assert_close(actual_grads[name], grad, atol=1e-2, rtol=0)
        else:
            assert torch.equal(actual_grads[name], grad), name


class Marked(Around):
    def call_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        return fpipe.boundary(y) if block is self.blocks[0] else y


def test_stages_end_at_named_modules_and_at_boundaries() -> None:
    model, _, _ = cut_net(Net(4), None, cuts=["blocks.2", "embed"])
    assert stage_names(model) == ["embed", "blocks.0 to blocks.2", "blocks.3, head"]
    model, params, _ = cut_net(Marked(4, nn.Dropout))
    assert stage_names(model) == ["embed, blocks.0", "blocks.1 to blocks.3, head"]
    assert fpipe.verify(pipeline(model), model, params, rows(), key=1).bitwise
    model, _, _ = cut_net(Marked(4), None, cuts=["blocks.2"])
    assert stage_names(model) == ["embed, blocks.0", "blocks.1, blocks.2", "blocks.3, head"]


class TwoTowers(nn.Module):
    """A net that takes keywords, and returns a dict with its loss."""

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


def test_inputs_may_be_keywords_and_the_net_may_compute_the_loss() -> None:
    torch.manual_seed(0)
    net, inputs = TwoTowers(), keywords()
    model, params, _ = fpipe.from_module(net, 4, batch=inputs)
    step = fpipe.build(pipeline(model, 2), model)
    reordered = {name: inputs[name] for name in ("labels", "b", "a")}
    loss, reordered_loss = (step(params, (ordered_inputs, None)).loss for ordered_inputs in (inputs, reordered))
    assert torch.equal(loss, reordered_loss)
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert fpipe.join_params(model, params).keys() == dict(net.named_parameters()).keys() - frozen
    assert fpipe.split_params(model, net.state_dict())[0].keys() == params[0].keys()
    with pytest.raises(ValueError, match=re.escape("inputs was a dict with 'a', 'b', 'labels' when the net")):
        step(params, ({"a": inputs["a"], "b": inputs["b"]}, None))


def test_one_tensor_may_be_the_example_of_several_inputs() -> None:
    """Used to trace one input for both, so that steps read the ids where they were handed labels, as in the page."""
    torch.manual_seed(0)
    net, inputs, rows = TwoTowers(), keywords(), torch.randn(4, WIDTH)
    model, params, _ = fpipe.from_module(net, 2, batch=dict.fromkeys(inputs, rows))
    loss = fpipe.build(pipeline(model, 2), model)(params, (inputs, None)).loss
    torch.testing.assert_close(loss, net(**inputs)["loss"])


class LossAmongOutputs(nn.Module):
    """A net that passes its arguments on, and returns outputs and loss together, as nanoGPT does."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.net, self.output = TwoTowers(), output

    def forward(self, *args: Any, **keyword_args: Any) -> Any:
        outputs = self.net(*args, **keyword_args)
        joint, loss = outputs["joint"], outputs["loss"]
        return {"pair": (joint, loss), "rows": {"loss": loss.view(1)}, "two": (joint, [loss, loss + 1])}[self.output]


def test_the_only_number_that_a_net_returns_is_its_loss() -> None:
    """Used to end in an assertion of torch.export about a tree_name, which takes no open sizes inside **kwargs."""
    torch.manual_seed(0)
    net, inputs = LossAmongOutputs("pair"), keywords()
    model, params, _ = fpipe.from_module(net, 2, batch=inputs)
    assert fpipe.verify(pipeline(model, 2), model, params, (inputs, None)).bitwise
    assert "forward" not in vars(net)


class Sliced(Around):
    """A net that calls slices of its list, has a module under two names, and renames one as it runs.

    torch follows each path that is taken.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.tail = self.head

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks[:2], *self.blocks[-2:]):
            self.current = block
            x = block(x)
        return self.head(x)


def shared_block_list() -> nn.Module:
    """Return a net that lists one block several times, as a shared layer, and does not call the list to its end."""
    return Toy(
        lambda module, x: functools.reduce(lambda x, block: block(x), module.blocks[:3], x),
        blocks=nn.ModuleList([Block(WIDTH)] * 4),
    )


def two_branches() -> nn.Module:
    """Return a block with inner lists, as in a GoogLeNet."""
    left, right = (nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)) for _ in range(2))
    return Toy(lambda module, x: torch.cat([module.left(x), module.right(x)], -1), left=left, right=right)


def in_place_blocks() -> nn.Module:
    """Return a net whose blocks write, in place, an activation that no other block reads."""
    blocks = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))


class Named(nn.Module):
    """A net whose blocks are alike by name, without a list: some bare, some in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.block_1, self.block_2 = Block(WIDTH), Block(WIDTH)
        self.layer1, self.layer2 = nn.Sequential(Block(WIDTH)), nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.mixed3a, self.mixed3b = two_branches(), two_branches()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.block_2(self.block_1(self.stem(x)))))
        return self.mixed3b(self.mixed3a(x))


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        # Used to end in IndexError: named_children lists a shared block once.
        (shared_block_list, ["blocks.0", "blocks.1", "blocks.2"]),
        (in_place_blocks, ["0", "1", "2", "3"]),
        # Used to end in AttributeError: no module has the path 'blocks.slice(None, 2, None).0'.
        (lambda: Sliced(4), ["blocks.0", "blocks.1", "blocks.2", "blocks.3, head"]),
        # The two layers of the stem were the blocks, so that all else was in the last stage; or layers in branches.
        (Named, ["stem", "block_1", "block_2", "layer1", "layer2.0", "layer2.1", "mixed3a", "mixed3b"]),
    ],
)
def test_blocks_are_found_in_lists_slices_and_by_name(make: Any, stages: list[str]) -> None:
    model, params, _ = cut_net(make(), len(stages))
    assert make is shared_block_list or stage_names(model) == stages
    assert fpipe.verify(pipeline(model), model, params, rows()).bitwise


def test_inputs_may_be_arguments_and_the_output_a_dict() -> None:
    """Used to end in "unhashable type: 'list'" in a step, though the reference took such an output."""
    net = TwoTowers()
    batch = (torch.randn(4, WIDTH), torch.randn(4, WIDTH), 2.0), torch.randn(4, WIDTH)
    model, params, _ = cut_net(net, loss=lambda y, t: F.mse_loss(y["joint"], t), batch=batch)
    assert torch.equal(fpipe.reference(model, params, batch).outputs["joint"], net(*batch[0])["joint"])
    assert fpipe.verify(merged(model, 2), model, params, batch).bitwise
    for wrong_inputs, message in (
        ((*batch[0][:2], 3.0), "inputs[2] was 2.0 when the net was traced, found 3.0."),
        ((batch[0][0].double(), *batch[0][1:]), "inputs[0] was float32 when the net was traced, found float64. Cast i"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            fpipe.reference(model, params, (wrong_inputs, batch[1]))


def update_mean(module: Any, x: Tensor) -> Tensor:
    old_mean, module.mean = module.mean, 0.9 * module.mean + 0.1 * x.mean(0).detach()
    return x - module.mean + old_mean


@pytest.mark.parametrize(
    "make",
    [
        lambda: Toy(update_mean, mean=torch.zeros(2 * WIDTH)),  # torch.export says nothing of what modules inside bind
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2 * WIDTH, 2 * WIDTH)),
    ],
    ids=["bound anew", "spectral norm"],
)
def test_buffers_that_modules_inside_read_and_write_are_state(make: Any) -> None:
    net, batch = Net(2, make), rows()
    model, params, state = cut_net(net, batch=batch)
    result = fpipe.build(merged(model, 4), model)(params, batch, state=state)
    assert all(state)
    unsplit_net = run_unsplit(net, batch)[0]
    assert [
        name for name, buffer in state_by_name(result).items() if not torch.equal(buffer, unsplit_net.get_buffer(name))
    ] == []


def test_a_step_is_built_in_the_mode_of_the_net() -> None:
    """One model trains and evaluates; a step stays in its mode, and refuses a net in another."""
    net, batch = Net(2, nn.Dropout), rows()
    model, params, _ = cut_net(net, batch=batch)
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
    net, batch = Net(2, batch_norm), rows()
    model, params, state = cut_net(net, batch=batch)
    net.eval()
    with pytest.raises(ValueError, match=re.escape("was in training when the net was traced and is in eval now")):
        fpipe.build(pipeline(model), model)(params, batch, state=state)
    model, params, _ = cut_net(net, batch=batch)
    assert fpipe.verify(pipeline(model), model, params, batch).bitwise


def step_leaves(model: fpipe.Model, params: Any, state: Any, batch: Any) -> list[Tensor]:
    result = fpipe.build(pipeline(model), model)(params, batch, state=state, key=3)
    return leaves((result.loss, result.grads, result.state))


def test_exported_programs_and_copies_of_a_model_give_the_same_step() -> None:
    """Used to fail in copy and pickle: a model held closures and nodes of graphs."""
    torch.manual_seed(0)
    net, batch = Net(2, batch_norm, nn.Dropout), rows()
    shapes = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(net, batch[:1], strict=False, dynamic_shapes=shapes)
    model_and_state = cut_net(net, batch=batch)
    expected = step_leaves(*model_and_state, batch)
    for model in (
        cut_net(exported, batch=batch)[0],
        copy.deepcopy(model_and_state[0]),
        pickle.loads(pickle.dumps(model_and_state[0])),
    ):
        assert str(model) == str(model_and_state[0])
        assert all(map(torch.equal, step_leaves(model, *model_and_state[1:], batch), expected))


def causal_decoder(says_causal: bool) -> nn.Module:
    """Return a decoder that is handed a causal mask; unless told that it is causal, torch compares its values."""

    def decoded(module: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return module.decoder(x, x, tgt_mask=mask, tgt_is_causal=says_causal or None).mean(-1)

    return Toy(decoded, decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True), 2))


def test_a_torch_module_that_cannot_be_exported_is_named_with_its_line() -> None:
    messages = (
        "tgt_is_causal = _detect_is_causal_mask(tgt_mask, tgt_is_causal, seq_len)",
        "in module 'decoder' (TransformerDecoder), at test_from_module.py:",
    )
    with pytest.raises(ValueError, match=re.escape(messages[0])) as error_info:
        cut_net(causal_decoder(False))
    assert messages[1] in str(error_info.value)
    assert stage_names(cut_net(causal_decoder(True))[0]) == ["decoder.layers.0", "decoder.layers.1"]


def branch_on_data(module: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def rebuild_module(module: Any, x: Tensor) -> Tensor:
    module.inner = nn.ReLU()
    return module.inner(x)


def draw_unkeyed(module: Any, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.Generator())


def write_constant(module: Any, x: Tensor) -> Tensor:
    module.table += 1
    return x + module.table


def toy_with(forward: Any) -> nn.Module:
    return Toy(forward, inner=nn.Tanh(), table=nn.Parameter(torch.zeros(2 * WIDTH), requires_grad=False))


def net_with_shared_norm() -> nn.Module:
    net = Net(2, batch_norm)
    net.blocks[1] = net.blocks[0]
    return net


CHANGE = "Change the line below, or use from_loss with fpipe.boundary, or from_functions."


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        # As some of transformers are for short sequences.
        (rebuild_module, "Run it on the batch once before. " + CHANGE),
        (draw_unkeyed, "draws from a generator of its own (rand), which is in no key; draw without it. " + CHANGE),
        (write_constant, "which is no buffer of its own. Work on a copy."),
    ],
)
def test_an_export_error_names_the_module_and_the_users_line(forward: Any, message: str) -> None:
    """Used to name only the op, and for an error of torch.export the line without the module."""
    line = forward.__code__.co_firstlineno + 1
    code = f"{line}, in {forward.__name__}: {linecache.getline(__file__, line).strip()}"
    with pytest.raises(ValueError, match=re.escape(message)) as error_info:
        cut_net(Net(2, lambda: toy_with(forward)))
    assert str(error_info.value).endswith(f"\n  in module 'blocks.0.middle.0' (Toy), at test_from_module.py:{code}")


class Listens(Around):
    """A net that registers hooks in its first forward, as models of transformers do, and notes that it did."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.seen: list[str] = []
            for block in self.blocks:
                block.register_forward_hook(lambda module, *_: self.seen.append(type(module).__name__))
        return super().forward(x)


def test_hooks_registered_during_export_are_removed() -> None:
    """Used to leave the hooks and lose the note: the net registered them again, and a mixture of experts counted each
    router twice in its loss.
    """
    net, batch = Listens(2), rows(4)
    cut_net(net, batch=batch)
    net(batch[0])
    assert net.seen == ["Block", "Block"]


def net_calling(function: Any) -> nn.Module:
    net = Around(2)
    vars(net)["call_block"] = function
    return net


class WritesInput(Around):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def reads_mutated() -> nn.Module:
    """Return a net in which one module writes the output of another, and a third reads it."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "last")}
    middle = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    return Toy(lambda module, x: module.last(module.middle((h := module.first(x))[:, :]) + h), **layers, middle=middle)


test_wrong_arguments_are_refused_in_one_sentence = refusals(
    globals(),
    """
cut_net(Net(4), 0)
    ValueError: stages is a whole number, at least 1; found 0.
cut_net(Net(4), None)
    ValueError: say how many stages, or cuts=[...] with the modules after which they end.
cut_net(Net(4), 99)
    ValueError: make as many stages; found stages=99.
cut_net(Net(4), None, cuts=["block.2"])
    ValueError: cuts= names 'block.2', but no module of that path is called when the net runs; close
cut_net(Net(4), 5, cuts=["embed"])
    ValueError: stages=5, but cuts= and the boundaries in forward make 2 stages
cut_net(Marked(4), cuts=["blocks.2"])
    ValueError: stages=2, but cuts= and the boundaries in forward make 3 stages
cut_net(Net(4), None, cuts=["embed"], costs={"embed": 1.0})
    ValueError: costs= balances stages, and cuts= says where they end; leave
cut_net(Net(4), costs={"blocks.1": 1.0})
    ValueError: costs= says nothing of block 'blocks.0'; the blocks are blocks.0, blocks.1,
cut_net(Net(3), costs=MEASURED)
    ValueError: costs= has been measured for 4 stages, and the net has 3 blocks; profile the model of
cut_net(Net(4), costs={**BLOCK_COSTS, "blcks.9": 1.0})
    ValueError: costs= names 'blcks.9', which is no block; the blocks are blocks.0
cut_net(Net(4), batch=({"y": torch.ones(4, 8)},) * 2)
    ValueError: the batch is no call of Net.forward: missing a required
cut_net(Net(4), batch=None)
    ValueError: batch is (inputs, target), its inputs a dict, a tuple or the one argument
cut_net(Net(4), batch=(torch.ones(4, WIDTH), None))
    ValueError: the batch has no target for loss=; say batch=(inputs,
cut_net(Net(4), loss=None)
    ValueError: without loss= the net computes the loss, and the target is not read. Hand in batch=(inputs, None)
cut_net(LossAmongOutputs("rows"), loss=None, batch=keywords())
    ValueError: or as the one number; found a tensor of shape (1,), to be reduced, for instance
cut_net(LossAmongOutputs("two"), loss=None, batch=keywords())
    ValueError: or as the one number; found tuple with 2 numbers
cut_net(net_calling(lambda block, x: block(x) if x.sum() > 0 else x))
    ValueError: Change the line below, or use from_loss with fpipe.boundary, or from_functions. at test_from_module.py:
cut_net(WritesInput(2))
    ValueError: the net writes 'x' in place (aten.add_.Tensor), which is no buffer of its own. Work on a copy.
    at test_from_module.py:
cut_net(net_with_shared_norm())
    ValueError: is written, and stages 0 and 1 use it; choose cuts= that keep it in one. in module 'blocks.0.middle.0'
    (BatchNorm1d), at toys.py:
cut_net(Net(2, lambda: batch_norm(momentum=None)))
    ValueError: has momentum=None, which no export supports; give it a momentum, or
# A stage writes into a copy of its input, so a later stage would read the old numbers.
cut_net(reads_mutated(), None, cuts=["first", "middle"])
    ValueError: stage 2 reads what stage 0 computes (linear) and stage 1 writes in place (aten.relu_.default). Compute a
    new tensor instead. in module 'middle.0' (ReLU), at
# Used to return the model unchanged, in silence: its norms were updated after each microbatch.
fpipe.deferred_batch_norm(cut_net(Net(2, batch_norm))[0])
    ValueError: batch norm 'blocks.0.middle.0' is in the graph of a net
""",
)


def test_a_module_that_branches_on_data_is_named_with_its_line() -> None:
    with pytest.warns(
        UserWarning, match=r"in module 'blocks.0.middle.0' \(Toy\), at .*return x if x.sum\(\) > 0 else -x"
    ):
        cut_net(Net(2, lambda: toy_with(branch_on_data)))


def test_without_batch_norms_nothing_is_deferred() -> None:
    model, _, _ = cut_net(Net(2))
    assert fpipe.deferred_batch_norm(model) == model


def double_long(module: Any, ids: Tensor) -> Tensor:
    rows = module.embed(ids)
    return module.head(rows * 2 if ids.shape[1] > 8 else rows).mean((1, 2))


@pytest.mark.filterwarnings("ignore:this step was traced again")
def test_a_branch_on_a_length_is_met_at_each_new_length() -> None:
    """Used to be passed over from the third length on: the branch of the example ran, with another loss."""
    net = Toy(double_long, embed=nn.Embedding(9, WIDTH), head=nn.Linear(WIDTH, WIDTH))
    batches = [(torch.randint(9, (4, length)), torch.randn(4)) for length in (6, 7, 12)]
    model, params, _ = fpipe.from_module(net, cuts=["embed"], loss=F.mse_loss, batch=batches[0])
    step = fpipe.build(fpipe.program(model), model)
    assert all(torch.equal(step(params, batch).loss, F.mse_loss(net(batch[0]), batch[1])) for batch in batches[:2])
    with pytest.raises(ValueError, match=r"another branch for sizes 12 than .*: inputs.shape\[1\] <= 8 is false"):
        step(params, batches[2])
