"""How long one local step of real models takes, against hand-written microbatched eager autograd.

    python benchmarks/models.py [--quick]

A net with batch norms, a GPT with tied embeddings, a U-Net with skips, and an encoder-decoder of which every decoder
stage attends to the encoder's output. One process, one thread, eight microbatches, 1F1B, a rank for each stage; rounds
and ratios are those of `benchmarks/step.py`, and so is the floor, the torch ops of our step in a row with nothing
around them. Gradients are compared first: bit by bit, but to rounding where stages meet in a parameter or an output,
since a pipeline adds up there in another order than one graph does.

Then the GPT of the demo, cut by the marks of `from_loss` and by `from_sequential`; and what it costs that random
numbers follow from a key.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from timeit import repeat
from typing import Any

import torch
from step import Step, floor, median_of, ratio, rounds_of, within
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from examples import demo, seq2seq
from fpipe import tree
from fpipe.meaning.stages.keys import make_seeder, thread_generator

MICROBATCHES = 8
Params = dict[str, Tensor]


def one_f_one_b(model: fpipe.Model, microbatches: int = MICROBATCHES) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(ranks=len(model.stages))
    return fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(outputs=False))(fpipe.program(model))


def ours(model: fpipe.Model, params: Any, batch: Any, **more: Any) -> Step:
    """Its gradients, what is left of the state, and the loss."""
    step = fpipe.build(one_f_one_b(model), model)

    def run() -> list[Tensor]:
        result = step(params, batch, **more)
        return [*tree.leaves(result.grads), *tree.leaves(result.state or ()), result.loss]

    return run


def eager(leaves: Sequence[Tensor], loss_of: Callable[[Any, Any], Tensor], batch: Any, counts: bool = False) -> Step:
    """Microbatch by microbatch, gradients added up in `.grad`."""
    (inputs, target), places = batch, tree.flatten(batch[0])[1]
    rows = len(target)

    def step() -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        pieces = zip(*(part.tensor_split(MICROBATCHES) for part in (*tree.leaves(inputs), target)), strict=True)
        count: Any = 0
        for *given, wanted in pieces:
            made: Any = loss_of(tree.unflatten(places, given), wanted)
            if counts:
                made[0].backward()
                count = count + made[1]
            else:
                (made * (len(wanted) / rows)).backward()
        return [leaf.grad / count for leaf in leaves] if counts else [leaf.grad for leaf in leaves]

    return step


def compare(name: str, steps: dict[str, Step], exact: bool, rounds: int, reach: float = 1.10) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for leaf, wanted in zip(steps["fpipe"](), steps["eager"](), strict=False):
        torch.testing.assert_close(leaf, wanted, **tolerance)
    steps |= {"floor": floor(steps["fpipe"])}
    found = rounds_of(steps, rounds)
    print(
        f"{name:34} eager {median_of(found, 'eager') * 1e3:7.2f} ms; of it: "
        f"fpipe {within(ratio(found, 'fpipe', 'eager'), reach)}, its ops alone {ratio(found, 'floor', 'eager'):.2f}",
        flush=True,
    )


def batch_norms(width: int = 16, rows: int = 4, size: int = 16) -> dict[str, Step]:
    """Convolutions; eager writes its buffers as it goes, ours are values."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    net = nn.Sequential(*(block(width if n else 3) for n in range(4)))
    batch = torch.randn(rows * MICROBATCHES, 3, size, size), torch.randn(rows * MICROBATCHES, width, size, size)
    plain = copy.deepcopy(net)
    model, params, state = fpipe.from_sequential(net, stages=4, loss=F.mse_loss)
    leaves = list(plain.parameters())
    return {
        "eager": eager(leaves, lambda x, t: F.mse_loss(plain(x), t), batch),
        "fpipe": ours(model, params, batch, state=state),
    }


def gpt_block(p: Params, x: Tensor, heads: int = 4) -> Tensor:
    width = x.shape[-1]
    qkv = F.linear(F.layer_norm(x, (width,), p["gain"], p["bias"]), p["qkv"])
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.split(width, dim=-1))
    x = x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), p["out"])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), p["up"])), p["down"])


def embed(p: Params, ids: Tensor) -> Tensor:
    return F.embedding(ids, p["embed"])


def tied_head(p: Params, x: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:]), p["embed"])


def tied_gpt(width: int = 64, length: int = 64, rows: int = 4) -> dict[str, Step]:
    """Four blocks between an embedding and the head that shares it."""

    def weights() -> Params:
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        norm = {"gain": torch.ones(width), "bias": torch.zeros(width)}
        return norm | {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}

    stages = (embed, *(gpt_block,) * 4, tied_head)
    ties = [[(0, "embed"), (5, "embed")]]
    model = fpipe.from_functions(stages, loss=demo.cross_entropy, ties=ties)
    params = ({"embed": torch.randn(256, width)}, *(weights() for _ in range(4)), {})
    ids = torch.randint(256, (rows * MICROBATCHES, length + 1))
    return functions(model, params, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def convolved(p: Params, x: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, p["w"], padding=1))


def down(p: Params, x: Tensor) -> Tensor:
    return convolved(p, F.max_pool2d(x, 2))


def bottom(p: Params, x: Tensor) -> Tensor:
    return F.interpolate(down(p, x), scale_factor=2)


def up(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    return F.interpolate(convolved(p, torch.cat(x, 1)), scale_factor=2)


def top(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    return F.conv2d(torch.cat(x, 1), p["w"], padding=1)


def u_net(width: int = 16, rows: int = 2, size: int = 32) -> dict[str, Step]:
    """Two levels down and up again, each with a skip."""
    stages = (convolved, down, bottom, up, top)
    model = fpipe.from_functions(stages, loss=F.mse_loss, inputs=("batch", 0, 1, (2, 1), (3, 0)))
    channels = ((width, 3), (2 * width, width), (2 * width, 2 * width), (width, 4 * width), (3, 2 * width))
    params = tuple({"w": torch.randn(*pair, 3, 3) * (9 * pair[1]) ** -0.5} for pair in channels)
    shape = rows * MICROBATCHES, 3, size, size
    return functions(model, params, (torch.randn(shape), torch.randn(shape)))


def encoder_decoder(rows: int = 6) -> dict[str, Step]:
    """That of examples/seq2seq.py, on its text."""
    model = fpipe.from_functions(
        seq2seq.STAGES, seq2seq.counted, inputs=seq2seq.INPUTS, ties=seq2seq.TIES, reduction="count"
    )
    params = tuple(
        {name: torch.randn_like(leaf) / 8 for name, leaf in own.items()} for own in seq2seq.parameters(width=64)
    )
    return functions(model, params, seq2seq.batch_of(seq2seq.phrases()[0][: rows * MICROBATCHES]))


def functions(model: fpipe.Model, params: Sequence[Params], batch: Any) -> dict[str, Step]:
    """A model of functions; by hand they are called one after the other on leaves that are tied as in Python."""
    own = [{name: leaf.clone().requires_grad_() for name, leaf in stage.items()} for stage in params]
    full = [dict(stage) for stage in own]
    for (owner, name), *others in model.ties:
        for stage, leaf in others:
            full[stage][leaf] = own[owner][name]
    loss: Any = model.loss

    def loss_of(x: Any, target: Tensor) -> Any:
        values: list[Any] = []
        for stage, entry, p in zip(model.stages, model.inputs, full, strict=True):
            taken = [x if at == "batch" else values[at] for at in (entry if isinstance(entry, tuple) else (entry,))]
            values.append(stage.forward(p, tuple(taken) if isinstance(entry, tuple) else taken[0]))
        return loss(values[-1], target)

    by_hand = eager(tree.leaves(own), loss_of, batch, counts=model.reduction == "count")
    return {"eager": by_hand, "fpipe": ours(model, params, batch)}


def two_ways(rounds: int) -> None:
    """The demo's GPT from a loss function and from a Sequential."""
    sizes = demo.Sizes()
    torch.manual_seed(0)
    net, batch = demo.gpt(sizes), next(demo.batches(sizes))
    model, params, _ = fpipe.from_sequential(net, stages=demo.RANKS, loss=demo.cross_entropy)
    starts = {stage.name.split(", ")[0] for stage in model.stages[1:]}

    def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        for name, child in net.named_children():
            own = {leaf: params[f"{name}.{leaf}"] for leaf, _ in child.named_parameters()}
            x = torch.func.functional_call(child, own, (fpipe.boundary(x) if name in starts else x,))
        return demo.cross_entropy(x, target)

    marked, own = fpipe.from_loss(loss_fn, {name: leaf.detach() for name, leaf in net.named_parameters()}, batch)
    steps = {"sequential": ours(model, params, batch), "loss": ours(marked, own, batch)}
    for one, other in pairwise(step() for step in steps.values()):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    found = rounds_of(steps, rounds)
    print(
        f"{'demo GPT, 4 stages':34} from_sequential {median_of(found, 'sequential') * 1e3:.2f} ms; "
        f"of it: from_loss {within(ratio(found, 'loss', 'sequential'), 1.05)}, every bit the same",
        flush=True,
    )
    of = {"sequential": (model, params), "loss": (marked, own)}

    def building(name: str) -> Step:
        """A build of a step for a model that is new each time."""
        made, leaves = of[name]
        program = one_f_one_b(made)
        return lambda: fpipe.build(program, replace(made), example=(leaves, batch))

    found = rounds_of({name: building(name) for name in of}, max(rounds // 5, 3))
    print(
        f"{'its build':34} from_sequential {median_of(found, 'sequential') * 1e3:.0f} ms; "
        f"of it: from_loss {within(ratio(found, 'loss', 'sequential'), 1.05)}",
        flush=True,
    )


def keyed_dropout(rounds: int, stages: int = 8) -> None:
    """What keys cost: dropout in each stage or in none, ours and by hand, on tensors so small that only calls count."""

    def plain(p: Params, x: Tensor) -> Tensor:
        return x @ p["w"]

    def dropped(p: Params, x: Tensor) -> Tensor:
        return F.dropout(x @ p["w"], 0.5)

    params = tuple({"w": torch.randn(4, 4)} for _ in range(stages))
    batch = torch.randn(MICROBATCHES, 4), torch.randn(MICROBATCHES, 4)
    steps: dict[str, Step] = {}
    for name, stage in (("none", plain), ("dropout", dropped)):
        model = fpipe.from_functions([stage] * stages, F.mse_loss)
        steps[f"eager {name}"] = functions(model, params, batch)["eager"]
        steps[f"fpipe {name}"] = ours(model, params, batch, key=1) if name == "dropout" else ours(model, params, batch)
    found = rounds_of(steps, rounds)
    ops = stages * MICROBATCHES

    def more(who: str) -> float:
        lowest = (min(took[f"{who} {what}"] for took in found) for what in ("dropout", "none"))
        return (next(lowest) - next(lowest)) / ops * 1e6

    generator = thread_generator("cpu")
    seed_stages = min(repeat(lambda: generator.manual_seed(7), number=10_000, repeat=5)) * 100
    seed = make_seeder(2, 3)
    folding = min(repeat(lambda: seed(1), number=10_000, repeat=5)) * 100
    print(
        f"{'dropout, for each F and its B':34} eager {more('eager'):.2f} us more than none, fpipe {more('fpipe'):.2f}; "
        f"so the key costs {within(more('fpipe') - more('eager'), 3.0)} us. The generator's manual_seed alone takes "
        f"{seed_stages:.2f} us, fold_in {folding:.2f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    share = 5 if parser.parse_args().quick else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.empty(31 << 20, dtype=torch.uint8)  # as benchmarks/step.py does, for the C library
    compare("batch norms, 4 x [16, 16, 16]", batch_norms(), True, 75 // share)
    compare("tied GPT, width 64, T=64, 4 rows", tied_gpt(), False, 75 // share)
    compare("U-Net, 2 x [3, 32, 32]", u_net(), True, 75 // share)
    compare("encoder-decoder, width 64, 6 rows", encoder_decoder(), False, 75 // share)
    two_ways(75 // share)
    keyed_dropout(500 // share)


if __name__ == "__main__":
    main()
