"""Time one local step of real models, against hand-written microbatched eager autograd.

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
from step import Step, against, floor, median_of, ratio, rounds_of
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from examples import demo, seq2seq
from fpipe import tree
from fpipe.meaning.purity.keys import make_seeder, thread_generator

MICROBATCHES = 8
Params = dict[str, Tensor]


def one_f_one_b(model: fpipe.Model, microbatches: int = MICROBATCHES) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(ranks=len(model.stages))
    return fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(outputs=False))(fpipe.program(model))


def pipelined_step(model: fpipe.Model, params: Any, batch: Any, **options: Any) -> Step:
    """Build a step that returns gradients, state and loss."""
    step = fpipe.build(one_f_one_b(model), model)

    def run() -> list[Tensor]:
        result = step(params, batch, **options)
        return [*tree.leaves(result.grads), *tree.leaves(result.state or ()), result.loss]

    return run


def eager_step(leaves: Sequence[Tensor], loss_of: Callable[[Any, Any], Any], batch: Any, counts: bool = False) -> Step:
    """Write the step by hand: microbatch after microbatch, gradients added up in `.grad`."""
    (inputs, target), structure = batch, tree.flatten(batch[0])[1]
    rows = len(target)

    def step() -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        pieces = zip(*(part.tensor_split(MICROBATCHES) for part in (*tree.leaves(inputs), target)), strict=True)
        count: Any = 0
        for *input_rows, target_rows in pieces:
            loss: Any = loss_of(tree.unflatten(structure, input_rows), target_rows)
            if counts:
                loss[0].backward()
                count = count + loss[1]
            else:
                (loss * (len(target_rows) / rows)).backward()
        return [leaf.grad / count for leaf in leaves] if counts else [leaf.grad for leaf in leaves]

    return step


def compare(name: str, steps: dict[str, Step], exact: bool, rounds: int, reach: float = 1.10) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for leaf, expected in zip(steps["fpipe"](), steps["eager"](), strict=False):
        torch.testing.assert_close(leaf, expected, **tolerance)
    steps |= {"floor": floor(steps["fpipe"])}
    times = rounds_of(steps, rounds)
    print(
        f"{name:34} eager {median_of(times, 'eager') * 1e3:7.2f} ms; of it: "
        f"fpipe {against(ratio(times, 'fpipe', 'eager'), reach)}, its ops alone {ratio(times, 'floor', 'eager'):.2f}",
        flush=True,
    )


def batch_norms(width: int = 16, rows: int = 4, size: int = 16) -> dict[str, Step]:
    """Build the steps of four convolutions with batch norms."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    net = nn.Sequential(*(block(width if n else 3) for n in range(4)))
    batch = torch.randn(rows * MICROBATCHES, 3, size, size), torch.randn(rows * MICROBATCHES, width, size, size)
    plain = copy.deepcopy(net)
    model, params, state = fpipe.from_sequential(net, stages=4, loss=F.mse_loss)
    leaves = list(plain.parameters())
    return {
        "eager": eager_step(leaves, lambda x, t: F.mse_loss(plain(x), t), batch),
        "fpipe": pipelined_step(model, params, batch, state=state),
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
    """Build the steps of four blocks between an embedding and the head that shares it."""

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
    return steps_of_functions(model, params, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def convolved(p: Params, x: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, p["w"], padding=1))


def down_level(p: Params, x: Tensor) -> Tensor:
    return convolved(p, F.max_pool2d(x, 2))


def bottom(p: Params, x: Tensor) -> Tensor:
    return F.interpolate(down_level(p, x), scale_factor=2)


def up_level(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    return F.interpolate(convolved(p, torch.cat(x, 1)), scale_factor=2)


def top(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    return F.conv2d(torch.cat(x, 1), p["w"], padding=1)


def u_net(width: int = 16, rows: int = 2, size: int = 32) -> dict[str, Step]:
    """Build the steps of a U-Net of two levels, each with a skip."""
    stages = (convolved, down_level, bottom, up_level, top)
    model = fpipe.from_functions(stages, loss=F.mse_loss, inputs=("batch", 0, 1, (2, 1), (3, 0)))
    channels = ((width, 3), (2 * width, width), (2 * width, 2 * width), (width, 4 * width), (3, 2 * width))
    params = tuple({"w": torch.randn(*pair, 3, 3) * (9 * pair[1]) ** -0.5} for pair in channels)
    shape = rows * MICROBATCHES, 3, size, size
    return steps_of_functions(model, params, (torch.randn(shape), torch.randn(shape)))


def encoder_decoder(rows: int = 6) -> dict[str, Step]:
    """Build the steps of the model of examples/seq2seq.py, on its text."""
    model = fpipe.from_functions(
        seq2seq.STAGES, seq2seq.counted, inputs=seq2seq.INPUTS, ties=seq2seq.TIES, reduction="count"
    )
    params = tuple(
        {name: torch.randn_like(leaf) / 8 for name, leaf in stage.items()} for stage in seq2seq.parameters(width=64)
    )
    return steps_of_functions(model, params, seq2seq.batch_of(seq2seq.phrases()[0][: rows * MICROBATCHES]))


def steps_of_functions(model: fpipe.Model, params: Sequence[Params], batch: Any) -> dict[str, Step]:
    """Build the steps of a model of functions: ours, and by hand with one leaf for each tied parameter."""
    leaves_by_stage = [{name: leaf.clone().requires_grad_() for name, leaf in stage.items()} for stage in params]
    params_by_stage = [dict(stage) for stage in leaves_by_stage]
    for (owner, name), *tied_leaves in model.ties:
        for stage, leaf in tied_leaves:
            params_by_stage[stage][leaf] = leaves_by_stage[owner][name]
    loss: Any = model.loss

    def loss_of(x: Any, target: Tensor) -> Any:
        values: list[Any] = []
        for stage, stage_input, p in zip(model.stages, model.inputs, params_by_stage, strict=True):
            sources = stage_input if isinstance(stage_input, tuple) else (stage_input,)
            arguments = [x if source == "batch" else values[source] for source in sources]
            values.append(stage.forward(p, tuple(arguments) if isinstance(stage_input, tuple) else arguments[0]))
        return loss(values[-1], target)

    by_hand = eager_step(tree.leaves(leaves_by_stage), loss_of, batch, counts=model.reduction == "count")
    return {"eager": by_hand, "fpipe": pipelined_step(model, params, batch)}


def compare_doors(rounds: int) -> None:
    """Compare the demo's GPT from a loss function with the same from a Sequential."""
    sizes = demo.Sizes()
    torch.manual_seed(0)
    net, batch = demo.gpt(sizes), next(demo.batches(sizes))
    model, params, _ = fpipe.from_sequential(net, stages=demo.RANKS, loss=demo.cross_entropy)
    starts = {stage.name.split(", ")[0] for stage in model.stages[1:]}

    def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        for name, child in net.named_children():
            marked_params = {leaf: params[f"{name}.{leaf}"] for leaf, _ in child.named_parameters()}
            x = torch.func.functional_call(child, marked_params, (fpipe.boundary(x) if name in starts else x,))
        return demo.cross_entropy(x, target)

    leaves = {name: leaf.detach() for name, leaf in net.named_parameters()}
    marked, marked_params = fpipe.from_loss(loss_fn, leaves, batch)
    steps = {"sequential": pipelined_step(model, params, batch), "loss": pipelined_step(marked, marked_params, batch)}
    for sequential_results, loss_results in pairwise(step() for step in steps.values()):
        assert all(torch.equal(a, b) for a, b in zip(sequential_results, loss_results, strict=True))
    times = rounds_of(steps, rounds)
    print(
        f"{'demo GPT, 4 stages':34} from_sequential {median_of(times, 'sequential') * 1e3:.2f} ms; "
        f"of it: from_loss {against(ratio(times, 'loss', 'sequential'), 1.05)}, every bit the same",
        flush=True,
    )
    model_and_params_by_door = {"sequential": (model, params), "loss": (marked, marked_params)}

    def build_of(name: str) -> Step:
        """Return a function that builds a step for a new copy of the model, which no trace knows."""
        built_model, built_params = model_and_params_by_door[name]
        program = one_f_one_b(built_model)
        return lambda: fpipe.build(program, replace(built_model), example=(built_params, batch))

    times = rounds_of({name: build_of(name) for name in model_and_params_by_door}, max(rounds // 5, 3))
    print(
        f"{'its build':34} from_sequential {median_of(times, 'sequential') * 1e3:.0f} ms; "
        f"of it: from_loss {against(ratio(times, 'loss', 'sequential'), 1.05)}",
        flush=True,
    )


def compare_dropout(rounds: int, stages: int = 8) -> None:
    """Measure what keys cost: dropout in each stage or in none, on tensors so small that only calls count."""

    def plain(p: Params, x: Tensor) -> Tensor:
        return x @ p["w"]

    def dropped(p: Params, x: Tensor) -> Tensor:
        return F.dropout(x @ p["w"], 0.5)

    params = tuple({"w": torch.randn(4, 4)} for _ in range(stages))
    batch = torch.randn(MICROBATCHES, 4), torch.randn(MICROBATCHES, 4)
    steps: dict[str, Step] = {}
    for name, stage in (("none", plain), ("dropout", dropped)):
        model = fpipe.from_functions([stage] * stages, F.mse_loss)
        steps[f"eager {name}"] = steps_of_functions(model, params, batch)["eager"]
        steps[f"fpipe {name}"] = pipelined_step(model, params, batch, **({"key": 1} if name == "dropout" else {}))
    times = rounds_of(steps, rounds)
    ops = stages * MICROBATCHES

    def cost(library: str) -> float:
        lowest = (min(took[f"{library} {variant}"] for took in times) for variant in ("dropout", "none"))
        return (next(lowest) - next(lowest)) / ops * 1e6

    generator = thread_generator("cpu")
    seeding = min(repeat(lambda: generator.manual_seed(7), number=10_000, repeat=5)) * 100
    seed = make_seeder(2, 3)
    folding = min(repeat(lambda: seed(1), number=10_000, repeat=5)) * 100
    print(
        f"{'dropout, for each F and its B':34} eager {cost('eager'):.2f} us more than none, fpipe {cost('fpipe'):.2f}; "
        f"so the key costs {against(cost('fpipe') - cost('eager'), 3.0)} us. The generator's manual_seed alone takes "
        f"{seeding:.2f} us, fold_in {folding:.2f} us"
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
    compare_doors(75 // share)
    compare_dropout(500 // share)


if __name__ == "__main__":
    main()
