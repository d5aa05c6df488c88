"""Documents of any length are packed or padded, and a step takes any number of microbatches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.graphs.compiling import inductor
from fpipe.graphs.compiling.code import compile_graph
from tests.refusals import refusals

LENGTHS = (5, 2, 9, 4, 4, 7, 1)
VOCABULARY, WIDTH = 11, 4


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return a document for each length, and its next tokens as labels; the last label does not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    return [(row, torch.cat([row[1:], torch.tensor([-100])])) for row in tokens]


def embed(p, x):
    """Embed tokens and positions; each token reads the ones before it in its document."""
    y = p["tokens"][x["input_ids"]] + p["positions"][x["position_ids"]]
    same_document = x["document_ids"][:, :, None] == x["document_ids"][:, None, :]
    mask = same_document & same_document.new_ones(same_document.shape[1:]).tril()
    return y, torch.softmax((y @ y.mT).masked_fill(~mask, float("-inf")), -1)


def attend(p, x):
    y, weights = x
    return torch.tanh(weights @ y @ p["w"])


def cross_entropy(logits, target):
    """Return the total over the labels that count, and their number."""
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != -100).sum()


def make_params() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"tokens": (VOCABULARY, WIDTH), "positions": (max(LENGTHS), WIDTH)}
    embeddings = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return embeddings, {"w": torch.randn(WIDTH, VOCABULARY, generator=generator)}


MODEL = fpipe.from_functions([embed, attend], cross_entropy, reduction="count")


def program_of(count: int, *transforms: Any) -> fpipe.Program:
    split = fpipe.split(count, presplit=True)
    schedule = fpipe.schedules.one_f_one_b(2)
    return fpipe.chain(split, schedule, fpipe.merge(outputs=False), *transforms)(fpipe.program(MODEL))


def by_hand(replicas: list[list[Any]], stages: Any = None) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients of plain autograd: totals of all microbatches, divided by the count of all tokens."""
    totals = list[list[Tensor]]()
    for microbatches in replicas:
        sums: list[Tensor] = []
        for inputs, target in microbatches:
            params = [
                {name: leaf.detach().clone().requires_grad_() for name, leaf in stage.items()}
                for stage in stages or make_params()
            ]
            total, count = cross_entropy(attend(params[1], embed(params[0], inputs)), target)
            leaves = [leaf for stage in params for leaf in stage.values()]
            terms = [total.detach(), count, *torch.autograd.grad(total, leaves)]
            sums = [a + b for a, b in zip(sums, terms, strict=True)] if sums else terms
        totals.append(sums)
    loss, count, *grads = [sum(terms[1:], terms[0]) for terms in zip(*totals, strict=True)]
    return loss / count, [grad / count for grad in grads]


def is_equal(result: fpipe.Result, expected: tuple[Tensor, list[Tensor]]) -> bool:
    grads = [leaf for stage in result.grads for leaf in stage.values()]
    return torch.equal(result.loss, expected[0]) and all(map(torch.equal, grads, expected[1]))


# Packing


def test_packed_documents_are_whole_and_apart():
    rows = documents()
    microbatches = fpipe.pack(rows, tokens=12)
    packed = list[int]()
    for inputs, target in microbatches:
        borders = inputs["cu_seqlens"].tolist()
        assert borders[-1] == inputs["input_ids"].shape[1] <= 12
        for start, end in pairwise(borders):
            (document,) = {*inputs["document_ids"][0, start:end].tolist()}
            assert torch.equal(inputs["input_ids"][0, start:end], rows[document][0])
            assert torch.equal(target[0, start:end], rows[document][1])
            assert inputs["position_ids"][0, start:end].tolist() == [*range(end - start)]
            packed.append(document)
    assert sorted(packed) == [*range(len(rows))]


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_microbatches_are_few_and_balanced(multiple: int):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (200,), generator=generator).tolist()
    microbatches = fpipe.pack([torch.zeros(length) for length in lengths], tokens=1000, multiple=multiple)
    sizes = [len(inputs["input_ids"][0]) for inputs in microbatches]
    assert sum(sizes) == sum(lengths)
    # Short rows come last, and fill what the long ones have left uneven.
    assert max(sizes) - min(sizes) <= 3
    fewest = -(-sum(lengths) // 1000)
    assert len(sizes) == -(-fewest // multiple) * multiple


def test_rows_may_be_dicts_without_targets():
    rows = [{"input_ids": torch.ones(n), "weights": torch.full((n, 2), float(n))} for n in (3, 2)]
    (pair,) = fpipe.pack([(row, None) for row in rows], tokens=5)
    (alone,) = fpipe.pack(rows, tokens=5)
    assert pair[1] is None
    assert [*alone] == [*pair[0]] == ["input_ids", "weights", "cu_seqlens", "position_ids", "document_ids"]
    assert alone["weights"][0, :, 0].tolist() == [3, 3, 3, 2, 2]


# Any number of microbatches


@pytest.mark.parametrize("options", [{}, {"runtime": "threads"}, {"trace": False}], ids=["local", "threads", "walk"])
def test_a_step_takes_any_number_of_microbatches(options: dict[str, Any]):
    counts = list[int]()

    def make_program(count: int) -> fpipe.Program:
        counts.append(count)
        return program_of(count)

    step = fpipe.build(make_program, MODEL, **options)
    for tokens in (12, 32, 9, 12):
        microbatches = fpipe.pack(documents(), tokens=tokens)
        result = step(make_params(), microbatches)
        assert is_equal(result, by_hand([microbatches]))
    assert counts == [3, 1, 4]


def test_donated_parameters_are_updated_by_steps_of_any_number_of_microbatches():
    def updating(count: int) -> fpipe.Program:
        return program_of(count, fpipe.update("AdamW"))

    step = fpipe.build(updating, MODEL, donate=True)
    params = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in make_params())
    opt = fpipe.optimizer_state(updating(1), params)
    leaves = [leaf.clone().requires_grad_() for stage in make_params() for leaf in stage.values()]
    optimizer = torch.optim.AdamW(leaves, lr=0.1)
    for seed, tokens in enumerate((12, 32, 9)):
        microbatches = fpipe.pack(documents(seed=seed), tokens=tokens)
        # The loop by hand starts from the fixed parameters, so hand it the present ones.
        stages = [dict(zip(("tokens", "positions"), leaves[:2], strict=True)), {"w": leaves[2]}]
        expected = by_hand([microbatches], stages)
        for leaf, grad in zip(leaves, expected[1], strict=True):
            leaf.grad = grad
        optimizer.step()
        result = step(params, microbatches, opt=opt, lr=0.1)
        params, opt = result.params, result.opt
        assert torch.equal(result.loss, expected[0])
        assert all(map(torch.equal, [leaf for stage in params for leaf in stage.values()], leaves))


def test_an_example_builds_its_number_of_microbatches():
    counts = list[int]()
    fpipe.build(
        lambda m: (counts.append(m), program_of(m))[1], MODEL, example=(make_params(), fpipe.pack(documents(), 12))
    )
    assert counts == [3]


# Padding


@pytest.mark.parametrize("buckets", [8, 2**0.5, [10, 30]])
def test_padded_microbatches_have_one_length_and_the_same_loss(buckets: Any):
    microbatches = fpipe.pack(documents(), tokens=12)
    padded, masks, waste = fpipe.pad(microbatches, to=buckets)
    lengths = {inputs["input_ids"].shape[1] for inputs, _ in padded}
    assert len(lengths) == 1
    assert waste == 3 * lengths.pop() / sum(LENGTHS) - 1
    for (inputs, target), (old_inputs, old_target), mask in zip(padded, microbatches, masks, strict=True):
        assert torch.equal(inputs["input_ids"][mask], old_inputs["input_ids"][0])
        assert torch.equal(target[mask], old_target[0])
        assert target[~mask].tolist() == [-100] * int((~mask).sum())
        assert inputs["cu_seqlens"][-1] == inputs["input_ids"].shape[1]
    step = fpipe.build(program_of, MODEL)
    assert torch.allclose(step(make_params(), padded).loss, step(make_params(), microbatches).loss)


def test_a_spec_says_what_is_padded():
    batch = ({"x": torch.ones(2, 3, 5), "table": torch.ones(4, 9)}, torch.ones(2, 3))
    spec = {"x": fpipe.Chunk(2), "table": fpipe.Replicate()}, fpipe.Replicate()
    padded, mask, _ = fpipe.pad(batch, 8, spec=spec)
    assert padded[0]["x"].shape == mask.shape == (2, 3, 8)
    assert padded[0]["table"] is batch[0]["table"]


ROWS = [torch.ones(length) for length in (3, 2)]
STEP = fpipe.build(program_of, MODEL)


test_refusals = refusals(
    globals(),
    """
fpipe.pack(ROWS, tokens=2)
    ValueError: row 0 has 3 tokens, not 1 to 2: cut it.
fpipe.pack([], tokens=2)
    ValueError: there are no rows to pack.
fpipe.pack(ROWS, tokens=0)
    ValueError: tokens is a whole number, at least 1; found 0.
fpipe.pack(ROWS, tokens=3, multiple=4)
    ValueError: 2 rows cannot fill 4 microbatches, a multiple of 4.
fpipe.pack([(torch.ones(3), torch.ones(2))], tokens=3)
    ValueError: row 0 has several lengths: {'[0]': 3, '[1]': 2}.
fpipe.pack([torch.ones(3), torch.ones(3, 2)], tokens=3)
    ValueError: row 1 has other names, dtypes or widths than row 0.
fpipe.pack([[1, 2]], tokens=3)
    TypeError: a row is a tensor, dict or pair; found list.
fpipe.pack([{"x": [1, 2]}], tokens=3)
    TypeError: row 0['x'][0] is no tensor with a length: 1.
fpipe.pack([{"position_ids": ROWS[0]}], tokens=3)
    ValueError: a row has 'position_ids', which pack adds.
fpipe.pad((torch.ones(2, 3), torch.ones(2)), to=[1, 2])
    ValueError: the batch has length 3, above to=2.
fpipe.pad((torch.ones(2, 3), torch.ones(2, 4)), to=8)
    ValueError: inputs has length 3, target 4: say Replicate() in spec=.
fpipe.pad((torch.ones(2), torch.ones(2)), to=8)
    ValueError: no tensor has that dimension: say dim= or spec=.
fpipe.pad((torch.ones(2, 3), None), to=1.0)
    ValueError: to is a whole number, a float above 1 or a list of lengths; found 1.0.
STEP(make_params(), documents()[0])
    ValueError: a batch is a list of pairs (inputs, target); found tuple.
STEP(make_params(), [])
    ValueError: the batch has no microbatches.
fpipe.build(lambda m: program_of(2), MODEL)(make_params(), fpipe.pack(documents(), 12))
    ValueError: the function made a program of 2 microbatches, not 3.
fpipe.build(lambda m: fpipe.split(m)(fpipe.program(MODEL)), MODEL)(make_params(), fpipe.pack(documents(), 12))
    ValueError: the program cuts the batch: say split(m, presplit=True).
""",
)


# Captures and compilations


def test_buckets_are_compiled_once_and_a_new_length_runs_uncompiled(monkeypatch: pytest.MonkeyPatch):
    compiled_sizes = list[int]()

    def compile_graph_of(graph: Any, name: str) -> Any:
        compiled_sizes.append(len(graph.nodes))
        return compile_graph(graph, name[0])

    monkeypatch.setattr(inductor, "_compile_by_inductor", compile_graph_of)
    model = fpipe.from_functions([lambda p, x: torch.tanh(x * p["w"])], lambda y, t: (y - t).square().mean())
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, compile=True, audit="never")
    counts = list[int]()
    for length in (3, 4, 7, 8, 5, 20, 1):
        batch, *_ = fpipe.pad((torch.ones(2, length), torch.ones(2, length)), to=4)
        params = ({"w": torch.tensor(2.0)},)
        assert torch.equal(step(params, batch).loss, fpipe.reference(model, params, batch, microbatches=2).loss)
        counts.append(len(compiled_sizes))
    # Lengths 4 4 8 8 8 20 4: 8 is compiled at its second step, and 20 never.
    assert [graphs // counts[0] for graphs in counts] == [1, 1, 1, 2, 2, 2, 2]
