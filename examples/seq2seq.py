"""Train an encoder-decoder to put the vowels back into English text, as a pipeline and by plain autograd."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fpipe
from fpipe import tree

RANKS, MICROBATCHES, SEED, ROWS, LENGTH, HEADS = 3, 6, 0, 36, 16, 4
LETTERS = "_abcdefghijklmnopqrstuvwxyz "
PAD, START, END, SPECIAL = 0, 1, 2, 3  # SPECIAL tokens come before the letters
VOWEL = re.compile("[aeiou]")
ABOUT = f"""\
An encoder reads phrases of Python's own documentation without their vowels, a decoder writes them out. Every stage of
the decoder attends to the encoder's output: one value, three readers. The embedding of letters is tied between encoder,
decoder and head. The loss counts what is not padding. It is trained twice from the same start, as a program for {RANKS}
ranks with two stages each, and by plain autograd.
"""
Params = dict[str, Tensor]
Memory = tuple[Tensor, Tensor]  # the encoder's output [rows, length, width], and where its text is no padding
Batch = tuple[dict[str, Tensor], Tensor]


# The model: six stages, f(params, x).


def normal(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def embedded(p: Params, text: Tensor) -> Tensor:
    return F.embedding(text, p["letter"]) + p["place"][: text.shape[1]]


def perceptron(p: Params, x: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(normal(x), p["up"])), p["down"])


def encode(p: Params, x: Memory) -> Memory:
    h, mask = x
    q, k, v = F.linear(normal(h), p["qkv"]).chunk(3, -1)
    return perceptron(p, h + F.linear(attention(q, k, v, attn_mask=mask), p["out"])), mask


def encode_first(p: Params, x: dict[str, Tensor]) -> Memory:
    return encode(p, (embedded(p, x["source"]), (x["source"] != PAD)[:, None, None]))


def decode(p: Params, x: tuple[Tensor, Memory]) -> Tensor:
    h, (memory, mask) = x
    q, k, v = F.linear(normal(h), p["qkv"]).chunk(3, -1)
    h = h + F.linear(attention(q, k, v, is_causal=True), p["out"])
    k, v = F.linear(normal(memory), p["kv"]).chunk(2, -1)
    return perceptron(p, h + F.linear(attention(F.linear(normal(h), p["q"]), k, v, attn_mask=mask), p["across"]))


def decode_first(p: Params, x: tuple[dict[str, Tensor], Memory]) -> Tensor:
    return decode(p, (embedded(p, x[0]["before"]), x[1]))


def head(p: Params, h: Tensor) -> Tensor:
    return F.linear(normal(h), p["letter"])


def counted(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of all letters, and their number."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"), (
        target != PAD
    ).sum()


STAGES = (encode_first, encode, decode_first, decode, decode, head)
INPUTS = ("batch", 0, ("batch", 1), (2, 1), (3, 1), 4)
TIES = (((0, "letter"), (2, "letter"), (5, "letter")), ((0, "place"), (2, "place")))


def parameters(width: int) -> tuple[Params, ...]:
    """Draw each stage's parameters, a tied leaf in its first stage. At first a block adds nothing to its input."""

    def weight(out_width: int, in_width: int) -> Tensor:
        return torch.randn(out_width, in_width) * in_width**-0.5

    def block(**widths: int) -> Params:
        params = {"qkv": weight(3 * width, width), "out": torch.zeros(width, width)}
        params |= {name: weight(out_width, width) for name, out_width in widths.items()}
        return params | {"up": weight(4 * width, width), "down": torch.zeros(width, 4 * width)}

    tables = {"letter": torch.randn(SPECIAL + len(LETTERS), width) / 8, "place": torch.randn(LENGTH + 1, width) / 8}
    decoders = (block(q=width, kv=2 * width) | {"across": torch.zeros(width, width)} for _ in range(3))
    return (tables | block(), block(), *decoders, {})


def pipeline(model: fpipe.Model, microbatches: int = MICROBATCHES) -> fpipe.Program:
    """Build the training step: interleaved 1F1B."""
    schedule = fpipe.schedules.interleaved(ranks=RANKS)
    return fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(outputs=False))(fpipe.program(model))


# The same by plain autograd.


def through(params: tuple[Params, ...], x: dict[str, Tensor]) -> Tensor:
    memory = encode(params[1], encode_first(params[0], x))
    h = decode_first(params[2], (x, memory))
    for p in params[3:5]:
        h = decode(p, (h, memory))
    return head(params[5], h)


def untied(params: tuple[Params, ...]) -> tuple[Params, ...]:
    """Return each stage's parameters with tied leaves filled in."""
    full = tuple(dict(p) for p in params)
    for (owner, name), *tied_leaves in TIES:
        for stage, leaf in tied_leaves:
            full[stage][leaf] = full[owner][name]
    return full


def plain_backward(params: tuple[Params, ...], batch: Batch) -> tuple[Tensor, tuple[Params, ...]]:
    """Return loss and gradients. A tied parameter's gradients are added by stage, after all microbatches."""
    full = tuple({name: leaf.detach().requires_grad_() for name, leaf in p.items()} for p in untied(params))
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    pieces = zip(*(part.tensor_split(MICROBATCHES) for part in (*batch[0].values(), batch[1])), strict=True)
    for *inputs, target in pieces:
        loss, count = counted(through(full, dict(zip(batch[0], inputs, strict=True))), target)
        loss.backward()
        losses.append(loss.detach())
        counts.append(count)
    grads = tuple({name: leaf.grad for name, leaf in p.items()} for p in full)
    for (owner, name), *tied_leaves in TIES:
        for stage, leaf in tied_leaves:
            grads[owner][name] = grads[owner][name] + grads[stage].pop(leaf)
    count = sum(counts[1:], counts[0])
    mean_loss = sum(losses[1:], losses[0]) / count
    return mean_loss, tuple({name: grad / count for name, grad in p.items()} for p in grads)


# What is learned.


def phrases() -> tuple[list[str], list[str]]:
    """Cut the documentation into phrases of at most LENGTH letters, as a training and a test set."""
    lines, line = [], ""
    for word in re.findall("[a-z]+", "\n".join(topics.values()).lower()):
        if len(line) + len(word) >= LENGTH:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()[:LENGTH]
    test_count = len(lines) // 20
    return lines[test_count:], lines[:test_count]


def numbers(text: str) -> Tensor:
    return torch.tensor([SPECIAL + LETTERS.index(letter) for letter in text])


def letters(tokens: Tensor) -> str:
    ends = [*tokens.tolist(), END]
    return "".join(LETTERS[number - SPECIAL] if number >= SPECIAL else "?" for number in ends[: ends.index(END)])


def batch_of(texts: list[str]) -> Batch:
    """Return phrases without vowels, the decoder's earlier letters, and the next letters as target, all padded."""

    def padded(rows: list[Tensor]) -> Tensor:
        return torch.stack([F.pad(row, (0, LENGTH + 1 - len(row))) for row in rows])

    target_rows = [numbers(text) for text in texts]
    inputs = {
        "source": padded([numbers(VOWEL.sub("_", text)) for text in texts]),
        "before": padded([F.pad(row, (1, 0), value=START) for row in target_rows]),
    }
    return inputs, padded([F.pad(row, (0, 1), value=END) for row in target_rows])


def batches(texts: list[str]) -> Iterator[Batch]:
    chance = torch.Generator().manual_seed(SEED)
    while True:
        yield batch_of([texts[index] for index in torch.randint(len(texts), (ROWS,), generator=chance).tolist()])


@torch.no_grad()
def write(params: tuple[Params, ...], texts: list[str]) -> list[str]:
    """Write out phrases without vowels, each time with the likeliest letter."""
    inputs, _ = batch_of(texts)
    full, tokens = untied(params), torch.full((len(texts), 1), START)
    memory = encode(full[1], encode_first(full[0], inputs))
    for _ in range(LENGTH):
        h = decode_first(full[2], ({"before": tokens}, memory))
        for p in full[3:5]:
            h = decode(p, (h, memory))
        tokens = torch.cat([tokens, head(full[5], h[:, -1:]).argmax(-1)], 1)
    return [letters(row) for row in tokens[:, 1:]]


def vowels_right(guesses: list[str], texts: list[str]) -> float:
    pairs = [pair for a, b in zip(guesses, texts, strict=True) for pair in zip(a.ljust(LENGTH), b, strict=False)]
    is_right = [a == b for a, b in pairs if VOWEL.match(b)]
    return sum(is_right) / len(is_right)


def same_bits(actual: Any, expected: Any) -> bool:
    pairs = zip(tree.leaves(actual), tree.leaves(expected), strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def run(steps: int, width: int = 48, samples: int = 200) -> bool:
    """Run the example; return whether everything is equal bit by bit."""
    model = fpipe.from_functions(STAGES, counted, inputs=INPUTS, ties=TIES, reduction="count")
    print(ABOUT)
    print(fpipe.plot(pipeline(model, 4)))
    step = fpipe.build(pipeline(model), model)
    torch.manual_seed(SEED)
    params = parameters(width)
    plain = tuple({name: leaf.clone() for name, leaf in p.items()} for p in params)
    leaves, plain_leaves = ([leaf for p in stage_params for leaf in p.values()] for stage_params in (params, plain))
    adam, plain_adam = torch.optim.AdamW(leaves), torch.optim.AdamW(plain_leaves)
    learn, test = phrases()
    equal, start = 0, time.perf_counter()
    print(f"\n{'step':>5}{'pipelined loss':>17}{'plain loss':>15}{'same bits':>11}{'vowels right':>14}{'s':>6}  writes")
    for number, batch in zip(range(1, steps + 1), batches(learn), strict=False):
        for optimizer in (adam, plain_adam):  # a short warm-up, then down to zero
            optimizer.param_groups[0]["lr"] = 8e-3 * min(number / 20, 1 - (number - 1) / steps)
        result = step(params, batch)
        fpipe.assign_grads(params, result.grads)
        adam.step()
        loss, grads = plain_backward(plain, batch)
        fpipe.assign_grads(plain, grads)
        plain_adam.step()
        is_equal = same_bits((result.loss, result.grads), (loss, grads))
        equal += is_equal
        if number % max(1, steps // 10) == 0 or number == 1:
            guesses = write(params, test[:samples])
            print(
                f"{number:>5}{result.loss:>17.7f}{loss:>15.7f}{'yes' if is_equal else 'NO':>11}"
                f"{vowels_right(guesses, test[:samples]):>14.1%}{time.perf_counter() - start:>6.0f}  {guesses[0]}",
                flush=True,
            )
    params_are_equal = same_bits(params, plain)
    print(f"\nLoss and {len(leaves)} gradients are bitwise equal at {equal} of {steps} steps, ", end="")
    print("and so are the final parameters.\n" if params_are_equal else "but the final parameters are NOT.\n")
    print(f"{'it reads':<{LENGTH + 2}}{'it writes':<{LENGTH + 2}}it was (phrases that it has not seen)")
    for text, guess in zip(test[:12], write(params, test[:12]), strict=True):
        print(f"{VOWEL.sub('_', text):<{LENGTH + 2}}{guess:<{LENGTH + 2}}{text if guess != text else '='}")
    return params_are_equal and equal == steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is at least 1, found {steps}")
    torch.set_num_threads(1)  # bits are promised for one number of threads
    return 0 if run(steps) else 1


if __name__ == "__main__":
    sys.exit(main())
