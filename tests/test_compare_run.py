"""A recorded run of a plain loop: right runs are never accused, and each mistake is named with its place."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app

mse = nn.functional.mse_loss


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def make_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3)).to(dtype)


class Loop:
    """A training loop with accumulation and a clip, in which a test changes a line."""

    steps = 1
    clip = 0.5

    def __init__(self, net: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
        self.batches = [(torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype)) for _ in range(self.steps)]

    def run(self, folder: Path) -> None:
        with fpipe.record_run(folder, net=self.net, optimizer=self.optimizer) as record:
            self.reduced = record.reduced
            self.train(record.step, record.microbatch, record.clipped)

    def train(self, step: Any, microbatch: Any, clipped: Callable[[Any], None]) -> None:
        for x, t in self.batches:
            with step((x, t), rule="AdamW", clip=self.clip, lr=0.01, weight_decay=0.1):
                for k, pair in enumerate(self.cut(x, t)):
                    with microbatch(pair):
                        self.backward(k, *pair)
                clipped(self.clip_grads())
                self.optimizer.step()
                self.zero_grad()

    def cut(self, x: Tensor, t: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [*zip(x.split(4), t.split(4), strict=True)]

    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        (mse(self.net(x), t) / 2).backward()

    def clip_grads(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class TwoSteps(Loop):
    steps = 2


def refusal(net: nn.Module, folder: Path) -> Any:
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(net, folder, loss=mse)
    report: Any = refused.value.report
    assert str(refused.value).startswith(f"{report.where}, {report.phase}")
    return report


def no_step(batch: Any, **update: Any) -> Any:
    return nullcontext()


def no_norm(norm: Any) -> None:
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_run_is_right(tmp_path: Path, dtype: torch.dtype):
    net = make_net(dtype)
    TwoSteps(copy.deepcopy(net), dtype).run(tmp_path)
    report = fpipe.compare_run(net, tmp_path, loss=mse)
    assert (report.where, report.phase, report.mistake) == (None, None, None)
    assert report.notes == ()
    assert len(report.leaves) > 100


def test_recording_changes_no_bit_and_leaves_no_hook(tmp_path: Path):
    nets, new_params = [make_net(), make_net()], list[dict[str, Tensor]]()
    for index, net in enumerate(nets):
        torch.manual_seed(1)
        loop = TwoSteps(net)
        if index:
            loop.run(tmp_path)
        else:
            loop.train(no_step, nullcontext, no_norm)
        new_params.append(net.state_dict())
    assert all(torch.equal(new_params[0][name], new_params[1][name]) for name in new_params[0])
    hooks = "_forward_hooks", "_forward_pre_hooks"
    assert not any(getattr(module, name) for module in nets[1].modules() for name in hooks)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank0-step{k}.safetensors" for k in range(2)]


class HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


class Halving(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(HalvedGradient.apply(input))


class CoarseLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input).float()


class TwiceBiased(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.bias


class WithoutSkip(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def set_class(module: str, kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net.get_submodule(module), "__class__", kind)


MODULE_MISTAKES: list[tuple[Callable[[nn.Module], None], str, str, str]] = [
    (lambda net: setattr(net.get_submodule("1.norm"), "eps", 1e-5), "1.norm", "forward", "its eps is 1e-05, not 1e-06"),
    (set_class("2.up", CoarseLinear), "2.up", "forward", "it computes in bfloat16"),
    (set_class("2.down", TwiceBiased), "2.down", "forward", "its bias is added 2 times"),
    (set_class("2", WithoutSkip), "2", "forward", "x the norm, its cosine with the right one"),
    (set_class("1.down", Halving), "1.down", "backward", "the gradient that it hands to 1.up is"),
]


@pytest.mark.parametrize(("change", "subject", "phase", "mistake"), MODULE_MISTAKES)
def test_a_wrong_module_is_named(
    tmp_path: Path, change: Callable[[nn.Module], None], subject: str, phase: str, mistake: str
):
    net = make_net()
    wrong_net = copy.deepcopy(net)
    change(wrong_net)
    Loop(wrong_net).run(tmp_path)
    report = refusal(net, tmp_path)
    assert (report.where, report.phase) == (subject, phase)
    assert mistake in report.mistake


class Overwriting(Loop):
    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(k, x, t)


class Dropping(Loop):
    def cut(self, x: Tensor, t: Tensor) -> list[tuple[Tensor, Tensor]]:
        return super().cut(x, t)[:-1]


class Mixing(Loop):
    def cut(self, x: Tensor, t: Tensor) -> list[tuple[Tensor, Tensor]]:
        return super().cut(x, t.flip(0))


class Weighing(Loop):
    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        ((k + 1) * mse(self.net(x), t)).backward()


class Undivided(Loop):
    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        mse(self.net(x), t).backward()


class Detaching(Loop):
    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        former = {name: None if p.grad is None else p.grad.clone() for name, p in self.net.named_parameters()}
        super().backward(k, x, t)
        if k == 1:
            for name, param in self.net.named_parameters():
                param.grad = former[name]


class KeepingGradients(TwoSteps):
    def zero_grad(self) -> None:
        pass


class ClippingEach(Loop):
    def clip_grads(self) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])
        for param in self.net.parameters():
            nn.utils.clip_grad_norm_(param, self.clip / 10)
        return norm


class Unclipped(Loop):
    def clip_grads(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])


class NormOfFirst(Loop):
    def clip_grads(self) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in [*self.net.parameters()][1:] if p.grad is not None])
        for param in self.net.parameters():
            assert param.grad is not None
            param.grad *= self.clip / (norm + 1e-6)
        return norm


class WithoutDecay(Loop):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.optimizer.param_groups[0]["weight_decay"] = 0.0


class OtherRate(Loop):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.optimizer.param_groups[0]["lr"] = 0.02


class Coupled(Loop):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)  # pyright: ignore[reportAttributeAccessIssue]


class StaleGradients(TwoSteps):
    def clip_grads(self) -> Tensor:
        norm = super().clip_grads()
        grads = [param.grad for param in self.net.parameters()]
        for param, grad in zip(self.net.parameters(), getattr(self, "stale", grads), strict=True):
            param.grad = grad
        self.stale = grads
        return norm


class Restoring(TwoSteps):
    def zero_grad(self) -> None:
        super().zero_grad()
        self.optimizer.state[next(iter(self.net.parameters()))]["step"] += 1


LOOP_MISTAKES: list[tuple[type[Loop], str, str, str]] = [
    (Overwriting, "0.weight", "accumulation", "microbatch 1 overwrites the gradients of those before"),
    (Dropping, "tensor 0 of the batch of rank 0", "batch", "4 of its 8 rows are in no microbatch"),
    (Mixing, "rank 0", "batch", "rows are combined with inputs, targets or masks of other rows"),
    (Weighing, "the loss", "loss", "the losses of the microbatches are 1, 2 x the reference's"),
    (Undivided, "the loss", "loss", "the losses of 2 microbatches are summed, not averaged"),
    (Detaching, "0.weight", "accumulation", "microbatch 1 adds nothing"),
    (KeepingGradients, "3.weight", "accumulation", "gradients of the step before are still in it"),
    (ClippingEach, "the clip", "clip", "each by a factor of its own"),
    (Unclipped, "the clip", "clip", "gradients are not clipped"),
    (NormOfFirst, "the norm", "norm", "0.weight is left out"),
    (WithoutDecay, "0.weight", "update", "there is no weight decay"),
    (OtherRate, "0.weight", "update", "the learning rate is 0.02, not 0.01"),
    (Coupled, "0.weight", "update", "it is Adam, not AdamW"),
    (StaleGradients, "0.weight", "update", "gradients of the step before are used"),
    (Restoring, "0.weight", "update", "its step is not that of AdamW"),
]


@pytest.mark.parametrize(("loop", "subject", "phase", "mistake"), LOOP_MISTAKES)
def test_a_wrong_loop_is_named(tmp_path: Path, loop: type[Loop], subject: str, phase: str, mistake: str):
    net = make_net()
    loop(copy.deepcopy(net)).run(tmp_path)
    report = refusal(net, tmp_path)
    assert (report.where, report.phase) == (subject, phase)
    assert mistake in report.mistake


class Head(nn.Module):
    """Attention of one head whose softmax runs in float32, over tokens."""

    softmax_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(7, 8), nn.Linear(8, 24), nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        weights = torch.softmax((8 * q @ k.mT).to(self.softmax_dtype), -1).float()
        return self.out(weights @ v)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def record_tokens(folder: Path, net: nn.Module, loss: Callable[..., Tensor] = token_loss, **options: Any) -> None:
    """Record two microbatches; in the first some targets are ignored."""
    torch.manual_seed(1)
    ids = torch.randint(0, 7, (4, 5))
    targets = ids.clone()
    targets[:2, 3:] = -100
    with fpipe.record_run(folder, net=net, **options) as record, record.step((ids, targets)):
        for pair in zip(ids.split(2), targets.split(2), strict=True):
            with record.microbatch(pair):
                (loss(net(pair[0]), pair[1]) / 2).backward()


def test_mistakes_over_tokens_are_named(tmp_path: Path):
    torch.manual_seed(0)
    nets = [Head() for _ in range(2)]
    plain_nets = copy.deepcopy(nets)
    nets[0].softmax_dtype = torch.bfloat16
    losses = token_loss, lambda logits, ids: token_loss(logits, ids.clamp(min=0))
    messages = "the net, forward of step 0: its softmax computes in bfloat16", "outputs count whose targets are ignored"
    for k in range(2):
        record_tokens(tmp_path / str(k), nets[k], losses[k])
        with pytest.raises(fpipe.GradientMismatch, match=messages[k]):
            fpipe.compare_run(plain_nets[k], tmp_path / str(k), loss=token_loss)


def test_losses_may_weigh_microbatches_by_their_targets(tmp_path: Path):
    record_tokens(tmp_path, Head(), lambda logits, ids: token_loss(logits, ids) * (ids >= 0).sum() / 8)
    assert fpipe.compare_run(Head(), tmp_path, loss=token_loss).notes == ()


class DividingAtTheEnd(Undivided):
    """Divides gradients by the number of microbatches, in the place of losses."""

    def clip_grads(self) -> Tensor:
        for param in self.net.parameters():
            assert param.grad is not None
            param.grad /= 2
        self.reduced()
        return super().clip_grads()


class ScalingLosses(DividingAtTheEnd):
    """Scales the loss against underflow, and unscales gradients before the clip."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        self.scaler.scale(mse(self.net(x), t) / 2).backward()

    def clip_grads(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        self.reduced()
        return Loop.clip_grads(self)

    def zero_grad(self) -> None:
        self.scaler.update()
        super().zero_grad()


class AddingSums(Loop):
    """Adds losses that are sums on purpose."""

    def backward(self, k: int, x: Tensor, t: Tensor) -> None:
        mse(self.net(x), t, reduction="sum").backward()


@pytest.mark.parametrize("loop", [DividingAtTheEnd, ScalingLosses, AddingSums])
def test_loops_that_add_losses_on_purpose_are_right(tmp_path: Path, loop: type[Loop]):
    net, loss = make_net(), partial(mse, reduction="sum") if loop is AddingSums else mse
    loop(copy.deepcopy(net)).run(tmp_path)
    assert fpipe.compare_run(net, tmp_path, loss=loss).notes == ()


class OwnLoss(nn.Module):
    """A net that returns its loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer, self.reduction = nn.Linear(6, 3), reduction

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return mse(self.layer(x), t, reduction=self.reduction)


@pytest.mark.parametrize(
    ("reduction", "divisor", "mistake"),
    [("mean", 2, None), ("sum", 1, None), ("mean", 1, "the losses of 2 microbatches are summed, not averaged")],
)
def test_losses_that_a_net_computes_are_judged_by_the_batch(
    tmp_path: Path, reduction: str, divisor: int, mistake: str | None
):
    torch.manual_seed(0)
    net, x, t = OwnLoss(reduction), torch.randn(8, 6), torch.randn(8, 3)
    with fpipe.record_run(tmp_path, net=net) as record, record.step((x, t)):
        for pair in zip(x.split(4), t.split(4), strict=True):
            with record.microbatch(pair):
                (net(*pair) / divisor).backward()
    if mistake is None:
        assert fpipe.compare_run(net, tmp_path).notes == ()
    else:
        assert refusal(net, tmp_path).mistake == mistake


def test_only_modules_of_a_pattern_are_recorded(tmp_path: Path):
    """Others are judged as a part of the module around them, so the gradients are complete."""
    record_tokens(tmp_path, Head(), modules=("q*",))
    report = fpipe.compare_run(Head(), tmp_path, loss=token_loss)
    leaves = [leaf.name for leaf in report.leaves]
    assert {name for name in leaves if "output 0" in name} == {
        "step 0: qkv, output 0",
        "step 0: the net, output 0",
        "step 0: gradient of output 0 of qkv",
    }
    assert "step 0: gradient of embed.weight after microbatch 1, rank 0" in leaves
    sentence = "All microbatches count the same, although their shares of the loss are 0.375, 0.625."
    assert report.notes == (sentence,)


def compile_part(net: nn.Sequential, part: str) -> nn.Module:
    """Compile a block, in a wrapper or in place, or the whole net."""
    if part == "wrapped block":
        net[2] = torch.compile(net[2], backend="eager")
    elif part == "block in place":
        net[2].compile(backend="eager")
    return torch.compile(net, backend="eager") if part == "net" else net


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile itself
@pytest.mark.parametrize(
    ("part", "unseen_module", "wrong_module"),
    [
        ("wrapped block", "2", "2"),
        ("block in place", "2", "the net"),
        pytest.param("net", "the net", "the net", marks=pytest.mark.deep),
    ],
)
def test_compiled_blocks_are_judged_as_a_whole(tmp_path: Path, part: str, unseen_module: str, wrong_module: str):
    """No hook runs in a compiled block: the call around its insides is judged, and a note says so."""
    net = make_net().eval()
    run_net = copy.deepcopy(net)
    run_net.get_submodule("2.norm").eps = 1e-3
    plain_net = copy.deepcopy(run_net)
    Loop(compile_part(run_net, part)).run(tmp_path)
    report = fpipe.compare_run(plain_net, tmp_path, loss=mse)
    assert report.notes == (f"Modules inside {unseen_module} are not seen: torch.compile runs no hooks in them.",)
    assert "step 0: gradient of 2.norm.weight after microbatch 1, rank 0" in {leaf.name for leaf in report.leaves}
    report = refusal(net, tmp_path)
    assert (report.where, report.phase) == (wrong_module, "forward")


def test_a_llama_of_transformers_is_judged_from_ten_lines(tmp_path: Path):
    """Used to count gradients twice, because an output class of transformers could not be built again."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=7, use_cache=False, **sizes))
    plain_net = copy.deepcopy(net)
    net.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    for name, trained_net in {"right": copy.deepcopy(plain_net), "wrong": net}.items():
        optimizer = torch.optim.AdamW(trained_net.parameters(), lr=0.01)
        ids = torch.randint(0, 7, (4, 5))
        with fpipe.record_run(tmp_path / name, net=trained_net, optimizer=optimizer) as record, record.step(ids):
            for part in ids.split(2):
                with record.microbatch(part):
                    (trained_net(input_ids=part, labels=part).loss / 2).backward()
            optimizer.step()
    assert fpipe.compare_run(plain_net, tmp_path / "right").where is None
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(plain_net, tmp_path / "wrong")
    sentence = "model.layers.1.input_layernorm, forward of step 0: its variance_epsilon is 0.001, not 1e-06."
    assert str(refused.value).splitlines()[0] == sentence


def test_damaged_records_are_refused(tmp_path: Path):
    net = make_net()
    TwoSteps(copy.deepcopy(net)).run(tmp_path)
    files = [tmp_path / f"rank0-step{k}.safetensors" for k in range(2)]
    with pytest.raises(ValueError, match="has a record of rank 0 already"):
        TwoSteps(net).run(tmp_path)
    with pytest.raises(ValueError, match="holds no record"):
        fpipe.compare_run(net, tmp_path / "other")
    with pytest.raises(ValueError, match=r"has a parameter '3\.weight', which the net lacks"):
        fpipe.compare_run(net[:3], tmp_path)
    file_bytes = files[0].read_bytes()
    files[0].write_bytes(file_bytes[:-10])
    with pytest.raises(ValueError, match="is no file in the safetensors format"):
        fpipe.compare_run(net, tmp_path)
    files[0].unlink()
    with pytest.raises(ValueError, match="lacks a tensor: an earlier file"):
        fpipe.compare_run(net, tmp_path)
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(ValueError, match="holds rank 0, step 1"):
        fpipe.compare_run(net, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_changed_tensors_and_headers_are_refused(tmp_path: Path, dtype: torch.dtype):
    """Used to end in a RuntimeError of torch or a KeyError, or to accuse the run."""
    file, net = tmp_path / "rank0-step0.safetensors", nn.Linear(2, 2)
    with fpipe.record_run(tmp_path, net=net) as record, record.step(), record.microbatch():
        net(torch.ones(2, 2)).sum().backward()
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, file, metadata)
    with pytest.raises(ValueError, match=r"is damaged: tensor .* has other numbers than were written"):
        fpipe.compare_run(net, tmp_path)
    save_file(tensors, file, metadata | {"fpipe": metadata["fpipe"].replace('"calls"', '"cells"')})
    with pytest.raises(ValueError, match="has a header that was changed after it was written"):
        fpipe.compare_run(net, tmp_path)


def test_a_missing_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    net = nn.Linear(2, 2)
    with fpipe.record_run(tmp_path, net=net, rank=0) as record, record.step():
        pass
    with pytest.raises(ValueError, match="lacks rank 1 of 2: copy its files there"):
        fpipe.compare_run(net, tmp_path)


def test_check_run_prints_the_verdict_with_an_exit_code(tmp_path: Path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom tests.test_compare_run import make_net\n"
        "def net_and_loss():\n    return make_net(), torch.nn.functional.mse_loss\n"
    )
    for loop, code, sentence in (
        (Loop, 0, "bitwise equal"),
        (WithoutDecay, 1, "there is no weight decay"),
    ):
        loop(make_net()).run(tmp_path / loop.__name__)
        result = CliRunner().invoke(
            app, ["check-run", str(tmp_path / loop.__name__), "--net", f"{script}:net_and_loss"]
        )
        assert result.exit_code == code
        assert sentence in result.output
