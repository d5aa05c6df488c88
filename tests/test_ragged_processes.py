"""Ranks learn numbers and lengths of microbatches from a header, and replicas may have unlike numbers."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.meaning.step import StepOptions
from fpipe.runtimes.audit import audits
from fpipe.runtimes.processes.replicas import Voters
from fpipe.runtimes.processes.step_header import refuse_varying_counts
from tests.processes import SOON, Processes, time_call
from tests.refusals import refusals
from tests.test_distributed import local_part, to_meta
from tests.test_lengths import LENGTHS, attend, by_hand, cross_entropy, documents, embed, make_params

OTHER_LENGTHS = (3, 8, 6, 2, 7, 4)
BATCHES = [(12, LENGTHS), (32, LENGTHS), (12, OTHER_LENGTHS), (32, LENGTHS)]
"""Tokens of a microbatch and lengths of the documents, of each step: 3, 1, 3 and again 1 microbatches."""
FIXED = [(12, LENGTHS), (12, OTHER_LENGTHS), (12, LENGTHS)]
"""Batches of three microbatches."""


def pass_on(p: Any, x: Any) -> Any:
    return x[0] + 0 * p["b"], x[1]


ONE_STAGE = fpipe.from_functions([lambda p, x: attend(p, embed(p, x))], cross_entropy, reduction="count")


def make_model(ranks: int) -> tuple[fpipe.Model, tuple[Any, ...]]:
    """Return a model of a stage for each rank, whose middle ones read neither inputs nor targets."""
    first_params, last_params = make_params()
    middle = ranks - 2
    stages = [embed, *[pass_on] * middle, attend]
    model = fpipe.from_functions(stages, cross_entropy, reduction="count")
    return model, (first_params, *({"b": torch.zeros(1)} for _ in range(middle)), last_params)


def program_of(model: fpipe.Model, count: int, *transforms: Any) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(len(model.stages))
    split = fpipe.split(count, presplit=True)
    return fpipe.chain(split, schedule, fpipe.merge(outputs=False), *transforms)(fpipe.program(model))


def sides_of(microbatches: list[Any], rank: int, ranks: int) -> Any:
    """Return the sides of a batch that a rank reads, and None for sides that it does not read."""
    inputs, target = map(list, zip(*microbatches, strict=True))
    if 0 < rank < ranks - 1:
        return None
    return (inputs, None) if rank == 0 else (None, target)


def train_on_sides(rank: int, ranks: int, batches: Sequence[tuple[int, tuple[int, ...]]], is_fixed: bool) -> list[bool]:
    """Train on ranks that are handed what they read alone; return whether each step is right."""
    model, params = make_model(ranks)
    example = params, fpipe.pack(documents(), tokens=12)
    program = program_of(model, 3) if is_fixed else lambda count: program_of(model, count)
    options = {"runtime": "distributed", "broadcast": True, "check_batch": "never"}
    step = fpipe.build(program, model, example=example, **options)
    local_params = local_part(program_of(model, 1), rank, params)
    outcomes = list[bool]()
    for seed, (tokens, lengths) in enumerate(batches):
        microbatches = fpipe.pack(documents(lengths, seed), tokens=tokens)
        result = step(local_params, sides_of(microbatches, rank, ranks))
        loss, grads = by_hand([microbatches])
        expected = dict(zip(("tokens", "positions", "w"), grads, strict=True))
        local_grads = {name: grad for stage in result.grads if stage is not None for name, grad in stage.items()}
        equal = [torch.equal(grad, expected[name]) for name, grad in local_grads.items() if name != "b"]
        outcomes.append(torch.equal(result.loss, loss) and all(equal))
    return outcomes


@pytest.mark.parametrize(
    "is_fixed",
    [False, pytest.param(True, marks=pytest.mark.deep)],
    ids=["any number", "fixed number"],
)
def test_ranks_that_read_no_batch_may_pass_none_whatever_the_lengths(trio: Processes, is_fixed: bool):
    """With a fixed number, a rank that was handed None used to wait for a message of other lengths."""
    batches = FIXED if is_fixed else BATCHES
    assert trio.run(train_on_sides, 3, batches, is_fixed) == [[True] * len(batches)] * 3


@pytest.mark.deep
def test_drawn_lengths_and_numbers_have_the_bits_of_plain_autograd(pair: Processes):
    """Of thirty steps about half are known, and often a number of microbatches is known with other lengths."""
    draws = Random(0)
    drawn_lengths = [tuple(draws.choices(range(1, 10), k=draws.randint(1, 7))) for _ in range(8)]
    batches = [(draws.choice([9, 14, 64]), draws.choice(drawn_lengths)) for _ in range(30)]
    assert pair.run(train_on_sides, 2, batches, False) == [[True] * 30] * 2


REPLICAS = [((12, LENGTHS), (32, LENGTHS)), ((32, OTHER_LENGTHS), (12, LENGTHS)), ((12, LENGTHS), (32, LENGTHS))]
"""Tokens of a microbatch and lengths of the documents, of each of two replicas, in each step."""


def train_replicas(rank: int, ranks: int, transform: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("dp", "pp"))
    replica, stage_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    model, params = make_model(ranks) if ranks == 2 else (ONE_STAGE, ({**make_params()[0], **make_params()[1]},))
    over_replicas = fpipe.data_parallel("dp") if transform == "data_parallel" else fpipe.shard("dp")

    def make_program(count: int) -> fpipe.Program:
        return program_of(model, count, over_replicas)

    local_params = local_part(make_program(1), stage_rank, params)
    example_params = params
    if transform == "shard":
        local_params = fpipe.shard_params(local_params, mesh["dp"])
        meta_params = fpipe.tree.tree_map(to_meta, params)
        pairs = zip(local_params, meta_params, strict=True)
        example_params = tuple(meta if local is None else local for local, meta in pairs)
    tokens, lengths = REPLICAS[0][replica]
    example = example_params, fpipe.pack(documents(lengths), tokens=tokens)
    step = fpipe.build(make_program, model, runtime="distributed", mesh=mesh, example=example, broadcast=True)
    wrong = list[str]()
    for number, settings in enumerate(REPLICAS):
        replicas = [fpipe.pack(documents(lengths, number), tokens=tokens) for tokens, lengths in settings]
        result = step(local_params, replicas[replica])
        loss, grads = by_hand(replicas)
        expected = dict(zip(("tokens", "positions", "w"), grads, strict=True))
        local_grads = {name: grad for stage in result.grads if stage is not None for name, grad in stage.items()}
        if transform == "shard":
            local_grads = {name: grad.full_tensor() for name, grad in local_grads.items()}
        wrong += [f"{name} {number}" for name, grad in local_grads.items() if not torch.equal(grad, expected[name])]
        wrong += [f"loss {number}"] * (not torch.equal(result.loss, loss)) + ["no gradients"] * (not local_grads)
    return wrong


@pytest.mark.parametrize("transform", ["data_parallel", "shard"])
def test_replicas_may_have_unlike_numbers_of_microbatches(four: Processes, transform: str):
    assert four.run(train_replicas, 2, transform) == [[]] * 4


def test_two_replicas_without_a_pipeline_may_have_unlike_numbers_too(pair: Processes):
    assert pair.run(train_replicas, 1, "data_parallel") == [[]] * 2


def update_replicas(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    params = ({**make_params()[0], **make_params()[1]},)
    leaves = [leaf.clone().requires_grad_() for leaf in params[0].values()]
    optimizer = torch.optim.AdamW(leaves, lr=0.1)

    def make_program(count: int) -> fpipe.Program:
        return program_of(ONE_STAGE, count, fpipe.data_parallel("dp"), fpipe.update("AdamW"))

    example = params, fpipe.pack(documents(), tokens=12)
    options = {"runtime": "distributed", "mesh": mesh, "donate": True}
    step = fpipe.build(make_program, ONE_STAGE, example=example, **options)
    opt = fpipe.optimizer_state(make_program(1), params)
    for settings in REPLICAS:
        replicas = [fpipe.pack(documents(lengths), tokens=tokens) for tokens, lengths in settings]
        stages = [dict(zip(params[0], leaves[:2], strict=False)), {"w": leaves[2]}]
        for leaf, grad in zip(leaves, by_hand(replicas, stages)[1], strict=True):
            leaf.grad = grad
        optimizer.step()
        result = step(params, replicas[rank], opt=opt, lr=0.1)
        params, opt = result.params, result.opt
    return all(map(torch.equal, params[0].values(), leaves))


def test_replicas_of_unlike_numbers_update_donated_parameters(pair: Processes):
    assert pair.run(update_replicas) == [True] * 2


def count_microbatches_of_replicas(rank: int) -> bool:
    def weigh(p: Any, x: Any, *, microbatch: int) -> Tensor:
        return attend(p, embed(p, x)) * (1 + microbatch)

    stage = fpipe.Stage(weigh, keywords=frozenset({"microbatch"}))
    model = fpipe.from_functions([stage], cross_entropy, reduction="count")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    params = ({**make_params()[0], **make_params()[1]},)
    step = fpipe.build(
        lambda count: program_of(model, count, fpipe.data_parallel("dp")),
        model,
        runtime="distributed",
        mesh=mesh,
        example=(params, fpipe.pack(documents(), tokens=12)),
        broadcast=True,
    )
    outcomes = list[bool]()
    for settings in REPLICAS:
        replicas = [fpipe.pack(documents(lengths), tokens=tokens) for tokens, lengths in settings]
        result = step(params, replicas[rank])
        # Indices go on from one replica to the next.
        totals = list[list[Tensor]]()
        index = 0
        for microbatches in replicas:
            terms = list[tuple[Tensor, Tensor]]()
            for inputs, target in microbatches:
                terms.append(cross_entropy(weigh(params[0], inputs, microbatch=index), target))
                index += 1
            totals.append([sum(column[1:], column[0]) for column in zip(*terms, strict=True)])
        (first_total, first_count), (second_total, second_count) = totals
        outcomes.append(torch.equal(result.loss, (first_total + second_total) / (first_count + second_count)))
    return all(outcomes)


def test_microbatches_are_counted_over_replicas_of_unlike_numbers(pair: Processes):
    """Replicas that counted from equal numbers would draw alike."""
    assert pair.run(count_microbatches_of_replicas) == [True] * 2


def hand_in_mistake(rank: int, mistake: str) -> str:
    def make_program(count: int) -> fpipe.Program:
        if mistake == "schedule" and count == 1 and rank == 1:
            split = fpipe.split(count, presplit=True)
            gpipe = fpipe.chain(split, fpipe.schedules.gpipe(2), fpipe.merge())
            return gpipe(fpipe.program(model))
        return program_of(model, count, *transforms)

    transforms, mesh, ranks = [], None, 2
    if mistake == "exchanges":
        mesh, ranks = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp")), 1
        transforms = [fpipe.shard("dp", scatter="microbatch")]
    model, params = make_model(2)
    if ranks == 1:
        model, params = ONE_STAGE, ({**params[0], **params[1]},)
    pipeline_rank = rank if ranks == 2 else 0
    local_params = local_part(program_of(model, 1), pipeline_rank, params)
    if mistake == "exchanges":
        local_params = fpipe.shard_params(local_params, mesh["dp"])
    three, single = fpipe.pack(documents(), tokens=12), fpipe.pack(documents(), tokens=32)
    example = local_params if ranks == 1 else params, three
    step = fpipe.build(make_program, model, runtime="distributed", mesh=mesh, example=example)
    unlike = three if rank == 0 else single
    batch = {"counts": unlike, "sides of counts": sides_of(unlike, rank, 2), "none": None}.get(mistake, single)
    return time_call(lambda: step(local_params, batch))[0]


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    {
        "counts": "rank 1 differs from rank 0 in its number of microbatches: 1 instead of 3.",
        "sides of counts": "rank 1 was handed 1 microbatches, and rank 0 3.",
        "none": "no rank was handed a batch.",
        "schedule": "rank 1 differs from rank 0 in its program",
        "exchanges": "1 microbatches exchange",
    }.items(),
)
def test_a_mistake_with_numbers_of_microbatches_is_named_on_all_ranks(pair: Processes, mistake: str, sentence: str):
    for outcome in pair.run(hand_in_mistake, mistake):
        assert outcome.startswith("ValueError: ")
        assert sentence in outcome


def disagree(rank: int, mistake: str) -> tuple[int, str, bool]:
    """Return how often ranks gather numbers in steps that are right, and how a step ends in which they differ."""
    model, params = make_model(2)
    three, single = (fpipe.pack(documents(), tokens=tokens) for tokens in (12, 32))
    others = fpipe.pack(documents(OTHER_LENGTHS), tokens=12)
    step = fpipe.build(
        lambda count: program_of(model, count),
        model,
        runtime="distributed",
        example=(params, three),
        check_batch="never",
    )
    gathers = list[Any]()
    gather = Voters.gather
    with patch.object(Voters, "gather", lambda *args: gathers.append(args) or gather(*args)):
        for batch in (three, single, three, single, others):
            step(params, batch)
    unlike = {
        "known counts": (three, single),
        "known lengths": (three, others),
        "a new count": (three, [*three, *three]),
        "a new length": (single, fpipe.pack(documents(OTHER_LENGTHS), tokens=32)),
        "two new counts": ([*three, *three], [*three, *single]),
        "a new length and a new count": (fpipe.pack(documents((4, 5, 6)), tokens=8), [*three, *three]),
        "a side": (three, sides_of(three, 1, 2)),
    }[mistake]
    error, seconds = time_call(lambda: step(params, unlike[rank]))
    return len(gathers), error, seconds < SOON


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    {
        "known counts": "not in the same step",
        "known lengths": "not in the same step",
        "a new count": "not in the same step",
        "a new length": "not in the same step",
        "two new counts": "differs from rank 0 in its number of microbatches: 4 instead of 6",
        "a new length and a new count": "differs from rank 0 in its number of microbatches: 6 instead of 3",
        "a side": "a rank was handed None, and both sides in the first step",
    }.items(),
)
def test_ranks_that_hold_both_sides_send_no_header_and_notice_where_they_differ(
    pair: Processes, mistake: str, sentence: str
):
    for gathers, error, is_soon in pair.run(disagree, mistake):
        assert (gathers, is_soon) == (1, True)
        assert sentence in error


def count_audits(rank: int) -> int:
    def double(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"])

    model = fpipe.from_functions([double] * 2, torch.nn.functional.mse_loss)
    params = tuple({"w": torch.eye(6)} for _ in range(2))
    batches = [(torch.ones(4, length, 6), torch.zeros(4, length, 6)) for length in range(8, 15)]
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", example=(params, batches[0]))
    with patch.object(audits, "_run_and_compare", wraps=vars(audits)["_run_and_compare"]) as audit:
        for batch in batches:
            step(params, batch)
    return audit.call_count


def test_audits_of_filled_lengths_go_on_from_those_before(pair: Processes):
    """Each new length used to begin with three audits. Here the first one does, and the open ones together."""
    assert pair.run(count_audits) == [4, 4]


def refuse(*axes: str, **options: bool) -> None:
    lane: Any = SimpleNamespace(groups=axes)
    refuse_varying_counts(lane, StepOptions(**options), lane)


test_refusals = refusals(
    globals(),
    """
refuse("ep")
    ValueError: stages exchange along an axis: build a program, not a function.
refuse(graph=True)
    ValueError: graph=True with replicas: build a program, not a function.
fpipe.build(lambda m: program_of(ONE_STAGE, m), ONE_STAGE, runtime="distributed")
    ValueError: runtime='distributed' needs example=(params, batch), for which meta tensors will do
""",
)
