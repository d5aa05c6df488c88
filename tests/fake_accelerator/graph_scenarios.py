"""Steps of one graph on the fake accelerator: each scenario returns the checker's reports and the bits that differ.

All results are looked at after the last step, when later replays have had the chance to write into them.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe.meaning.optimizers.rule_names import RULES
from fpipe.tree import leaves, tree_map
from tests.fake_accelerator import Graph, reports_of
from tests.fake_accelerator.captures import captured_of, new_ones
from tests.fake_accelerator.scenarios import PARTS, WIDTH, batch_of, differing_bits, net_of, pipeline_of, squares

DEVICE = "fake:0"
STEPS = 6
REPLAYS = STEPS - 2  # two steps warm up
Batch = tuple[Tensor, Tensor]
GPIPE = pipeline_of(fpipe.schedules.gpipe(1))


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """Yield the list of the numbers of graphs that are replayed, one entry a replay."""
    replayed, replay = list[int](), Graph.replay

    def replay_and_count(graph: Graph) -> None:
        replayed.append(graph.number)
        replay(graph)

    Graph.replay = replay_and_count
    try:
        yield replayed
    finally:
        Graph.replay = replay


def count_mistakes(replayed: Sequence[int], replays: int, graphs: int) -> list[str]:
    """Report another number of replays or of graphs than expected."""
    counts = len(replayed), len({*replayed})
    return [] if counts == (replays, graphs) else [f"replays and graphs: {counts}, not {(replays, graphs)}"]


def on_device(tensors: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(DEVICE), tensors)


def batches_of(count: int = STEPS) -> list[Batch]:
    return [on_device(tuple(tensor * (k + 1) for tensor in batch_of())) for k in range(count)]


def cut(net: nn.Sequential, pipeline: fpipe.Transform, **options: Any) -> tuple[fpipe.Model, fpipe.Program, Any]:
    model, params, _ = fpipe.from_sequential(net, stages=len(net), loss=squares, **options)
    return model, pipeline(fpipe.program(model)), params


def losses_of(net: nn.Sequential, batch: Batch, seeds: Callable[[int, int], int] | None = None) -> Iterator[Tensor]:
    """Yield the loss of each microbatch, run through the blocks under plain autograd."""
    generator = torch.get_device_module(DEVICE).default_generators[0]
    for number, (x, target) in enumerate(zip(*(tensor.tensor_split(PARTS) for tensor in batch), strict=True)):
        for stage, block in enumerate(net):
            if seeds is not None:
                generator.manual_seed(seeds(stage, number))
            x = block(x)
        yield squares(x, target)


def grads_by_autograd(net: nn.Sequential, batch: Batch, seeds: Callable[[int, int], int] | None = None) -> list[Tensor]:
    net.zero_grad()
    for loss in losses_of(net, batch, seeds):
        (loss * (1 / PARTS)).backward()
    return [param.grad for param in net.parameters() if param.grad is not None]


def same_as_autograd(pipeline: fpipe.Transform = GPIPE, **options: Any) -> list[str]:
    """Update the parameters in place between steps, so that the graph reads them where they are."""
    net, twin = on_device(net_of(2)), on_device(net_of(2))
    model, program, params = cut(net, pipeline)
    step, batches = fpipe.build(program, model, graph=True, **options), batches_of()
    results, expected = list[Any](), list[Any]()

    def run() -> None:
        for batch in batches:
            results.append(step(params, batch).grads)
            for param in leaves(params):
                param.mul_(0.9)

    with counted_replays() as replayed:
        reports = reports_of(run)
    for batch in batches:
        expected.append(tree_map(Tensor.clone, grads_by_autograd(twin, batch)))
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(0.9)
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def on_streams_in_turn() -> list[str]:
    """Call steps from streams that do not wait for each other: one step's results are copied before the next replay."""
    model, program, params = cut(on_device(net_of(2)), GPIPE)
    step, batches, results = fpipe.build(program, model, graph=True, audit="never"), batches_of(), list[Any]()

    def run() -> None:
        for batch in batches:
            with torch.Stream(DEVICE):
                results.append(step(params, batch).grads)
        torch.accelerator.synchronize(0)

    reports = reports_of(run)
    expected = [fpipe.reference(model, params, batch, microbatches=PARTS).grads for batch in batches]
    return reports + differing_bits(leaves(results), leaves(expected))


def in_another_thread() -> list[str]:
    """Hand a step on to another thread, which captures it after two steps of its own."""
    model, program, params = cut(on_device(net_of(2)), GPIPE)
    step, batches, results = fpipe.build(program, model, graph=True, audit="never"), batches_of(), list[Any]()

    def run_steps(batches: Sequence[Batch]) -> None:
        for batch in batches:
            results.append(step(params, batch).grads)

    def run() -> None:
        run_steps(batches[:2])
        thread = threading.Thread(target=run_steps, args=(batches[2:],))
        thread.start()
        thread.join()

    with counted_replays() as replayed:
        reports = reports_of(run)
    expected = [fpipe.reference(model, params, batch, microbatches=PARTS).grads for batch in batches]
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS - 2, 1)


def drawn(pipeline: fpipe.Transform, audit: Any = "never") -> list[str]:
    """Draw other numbers in each step, and the same ones in an F and its R."""
    net = on_device(nn.Sequential(*(nn.Sequential(*block, nn.Dropout(0.3), nn.Linear(8, 8)) for block in net_of(2))))
    model, program, params = cut(net, pipeline)
    step, batch, results = fpipe.build(program, model, graph=True, audit=audit), batches_of(1)[0], list[Any]()

    def run() -> None:
        for key in range(STEPS):
            results.append(step(params, batch, key=key).grads)

    with counted_replays() as replayed:
        reports = reports_of(run)
    expected = [
        [grad.clone() for grad in grads_by_autograd(net, batch, partial(fpipe.fold_in, key))] for key in range(STEPS)
    ]
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def turn_weights(net: nn.Module) -> nn.Module:
    """Lay each matrix out by columns, as an einsum's gradient is not."""
    for param in net.parameters():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data
    return net


def updated(
    rule: str,
    donate: bool = False,
    moves: bool = False,
    turned: bool = False,
    restarts: bool = False,
    **settings: Any,
) -> list[str]:
    """Train by a rule, with a learning rate that falls; once copies of the parameters, or a new state, are passed."""
    clip = settings.pop("clip", None)
    net, twin = ((turn_weights(net) if turned else net) for net in (on_device(net_of(2)), on_device(net_of(2))))
    pipeline = fpipe.chain(GPIPE, fpipe.update(rule, clip=clip, **settings))
    model, program, params = cut(net, pipeline)
    step, batches = fpipe.build(program, model, graph=True, audit="never", donate=donate), batches_of()
    opt, results, expected = fpipe.optimizer_state(program, params), list[Any](), list[Any]()
    rates = [0.1 / (k + 1) for k in range(STEPS)]

    def run() -> None:
        nonlocal params, opt
        for k, batch in enumerate(batches):
            if moves and k == REPLAYS:
                results.append(params)
                params, opt = tree_map(Tensor.clone, (params, opt))
            if restarts and k == REPLAYS:
                opt = fpipe.optimizer_state(program, params)
            result = step(params, batch, opt=opt, lr=rates[k])
            params, opt = result.params, result.opt
            results.append(tree_map(Tensor.clone, params) if donate else params)

    with counted_replays() as replayed:
        reports = reports_of(run)
    optimizer_params, rate = [*twin.parameters()], torch.zeros((), device=DEVICE, requires_grad=rule == "SGD")
    # By torch's foreach kernels these compute with a rate on the device, which those of single parameters read.
    kernels: dict[str, Any] = {"foreach": rule in ("RMSprop", "Adadelta")}
    kernels |= {} if rule == "SGD" else {"capturable": True}

    def make_optimizer() -> torch.optim.Optimizer:
        return getattr(torch.optim, rule)(optimizer_params, lr=rate, **settings, **kernels)

    with torch.no_grad():
        rate.fill_(rates[0])
    optimizer = make_optimizer()
    for k, batch in enumerate(batches):
        if moves and k == REPLAYS:
            expected.append(expected[-1])
        if restarts and k == REPLAYS:
            optimizer = make_optimizer()
        grads_by_autograd(twin, batch)
        if clip is not None:
            nn.utils.clip_grad_norm_(optimizer_params, clip, foreach=False)
        with torch.no_grad():
            rate.fill_(rates[k])
        optimizer.step()
        expected.append([param.detach().clone() for param in optimizer_params])
    # Donated leaves that come from elsewhere are read where they are, once they have come from there twice.
    counts = (REPLAYS - 1, 2) if moves and donate else (REPLAYS, 1)
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, *counts)


def new_params() -> list[str]:
    """Hand in new tensors as parameters after some replays, which leave the former ones unchanged."""
    model, program, params = cut(on_device(net_of(2)), GPIPE)
    step, batch, results = fpipe.build(program, model, graph=True, audit="never"), batches_of(1)[0], list[Any]()
    versions = [params if k < REPLAYS else tree_map(lambda leaf, k=k: leaf * k, params) for k in range(2 * STEPS)]
    copies = tree_map(Tensor.clone, versions)

    def run() -> None:
        for version in versions:
            results.append(step(version, batch).grads)

    with counted_replays() as replayed:
        reports = reports_of(run)
    expected = [fpipe.reference(model, version, batch, microbatches=PARTS).grads for version in versions]
    reports += differing_bits(leaves(versions), leaves(copies))
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, 2 * STEPS - 2, 2)


def two_signatures() -> list[str]:
    """Replay two graphs in turn, which share their memory, and look at the results of both later."""
    model, program, params = cut(on_device(net_of(2)), pipeline_of(fpipe.checkpoint(), fpipe.schedules.gpipe(1)))
    step, results = fpipe.build(program, model, graph=True, audit="never"), list[Any]()
    batches = [tuple(tensor[: 16 - 4 * (k % 2)] for tensor in batch) for k, batch in enumerate(batches_of(2 * STEPS))]

    def run() -> None:
        for batch in batches:
            results.append(step(params, batch))

    with counted_replays() as replayed:
        reports = reports_of(run)
    expected = [fpipe.reference(model, params, batch, microbatches=PARTS) for batch in batches]
    pairs = [[(result.loss, result.grads) for result in side] for side in (results, expected)]
    pools = {torch.ops.fake_accelerator.pool_of(number) for number in replayed}
    reports += [] if len(pools) == 1 else [f"the graphs have {len(pools)} pools"]
    return reports + differing_bits(*map(leaves, pairs)) + count_mistakes(replayed, 2 * REPLAYS, 2)


def normed() -> list[str]:
    """Hand running statistics from step to step."""
    net = on_device(nn.Sequential(nn.Linear(WIDTH, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, WIDTH))))
    batches, results, expected = batches_of(), list[Any](), list[Any]()
    model, params, first_state = fpipe.from_sequential(net, stages=2, loss=F.mse_loss, batch=(batches[0][0], None))
    step = fpipe.build(GPIPE(fpipe.program(model)), model, graph=True, audit="never")

    def run() -> None:
        state = first_state
        for batch in batches:
            results.append(step(params, batch, state=state))
            state = results[-1].state

    with counted_replays() as replayed:
        reports = reports_of(run)
    state = first_state
    for batch in batches:
        expected.append(fpipe.reference(model, params, batch, microbatches=PARTS, state=state))
        state = expected[-1].state
    pairs = [[(result.loss, result.grads, result.state) for result in side] for side in (results, expected)]
    return reports + differing_bits(*map(leaves, pairs)) + count_mistakes(replayed, REPLAYS, 1)


def constants_changed() -> list[str]:
    """Change a number on the host and a tensor on the device, which a stage holds, between replays."""
    factor, offset = torch.tensor(1.5), torch.zeros(WIDTH, device=DEVICE)
    model = fpipe.from_functions([lambda p, x: x * p["w"] * factor + offset], squares)
    params, batch, results = on_device(({"w": torch.full((WIDTH,), 0.5)},)), batches_of(1)[0], list[Any]()
    step, changes = fpipe.build(GPIPE(fpipe.program(model)), model, graph=True, audit="never"), range(2 * STEPS)

    def change(k: int) -> None:
        if k % 4 == 0:
            factor.fill_(1.5 + k // 4)
        offset.fill_(k)

    def run() -> None:
        for k in changes:
            change(k)
            results.append(step(params, batch).grads)

    with counted_replays() as replayed:
        reports = reports_of(run)
    expected = list[Any]()
    for k in changes:
        change(k)
        expected.append(fpipe.reference(model, params, batch, microbatches=PARTS).grads)
    # A step behind a change of the number runs without a graph, and the next one captures again.
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, 2 * STEPS - 4, 3)


def with_aux() -> list[str]:
    """Return metrics, a loss of a stage, and the gradients of the inputs."""

    def weighed(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * p["w"], (p["w"] * x).square().mean()

    def judged(y: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        return squares(y, target), {"worst": (y - target).abs().amax(1)}

    stages = [lambda p, x: x * p["w"], weighed, lambda p, x: x + p["w"]]
    model = fpipe.from_functions(stages, judged, aux=True, aux_losses=[1])
    params = on_device(tuple({"w": torch.full((WIDTH,), factor)} for factor in (0.5, 2.0, 1.0)))
    program, batches = GPIPE(fpipe.program(model, input_grads=True)), batches_of()
    step, results = fpipe.build(program, model, graph=True, audit="never"), list[Any]()

    def run() -> None:
        for batch in batches:
            results.append(step(params, batch))

    with counted_replays() as replayed:
        reports = reports_of(run)
    plain_step = fpipe.build(program, model, trace=False)
    expected = [plain_step(params, batch) for batch in batches]
    pairs = [
        [(result.loss, result.grads, result.aux, result.input_grads) for result in side] for side in (results, expected)
    ]
    return reports + differing_bits(*map(leaves, pairs)) + count_mistakes(replayed, REPLAYS, 1)


def scaled(donate: bool) -> list[str]:
    """Train under a loss scale that overflows in some steps, which change no parameter."""
    growth = {"growth_factor": 4.0, "growth_interval": 1}
    pipeline = fpipe.chain(GPIPE, fpipe.update("AdamW", loss_scale=growth))
    model, program, params = cut(on_device(net_of(2)), pipeline)
    step = fpipe.build(program, model, graph=True, audit="never", donate=donate)
    opt, scale, results, flags = fpipe.optimizer_state(program, params), 2.0**127, list[Any](), list[Tensor]()
    batches, net, expected = batches_of(), on_device(net_of(2)), list[Any]()
    batches[3] = batches[3][0], batches[3][1] * 1e4

    def run() -> None:
        nonlocal params, opt, scale
        for batch in batches:
            result = step(params, batch, opt=opt, lr=0.1, scale=scale)
            params, opt, scale = result.params, result.opt, result.scale
            results.append(tree_map(Tensor.clone, params))
            flags.append(result.valid)

    with counted_replays() as replayed:
        reports = reports_of(run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1, device=DEVICE), foreach=False, capturable=True)
    for batch, flag in zip(batches, flags, strict=True):
        grads_by_autograd(net, batch)
        if flag:
            optimizer.step()
        expected.append([param.detach().clone() for param in net.parameters()])
    reports += [] if len({*map(bool, flags[2:])}) == 2 else [f"no scale overflowed, or each did: {flags}"]
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def two_steps(donate: bool) -> list[str]:
    """Run two training steps in each replay, with a learning rate for each."""
    model, program, params = cut(on_device(net_of(2)), fpipe.chain(GPIPE, fpipe.update("AdamW"), fpipe.steps(2)))
    step = fpipe.build(program, model, graph=True, audit="never", donate=donate)
    opt, results, batches, twin = fpipe.optimizer_state(program, params), list[Any](), batches_of(), net_of(2)

    def run() -> None:
        nonlocal params, opt
        for batch in batches:
            result = step(params, [batch, batches[0]], opt=opt, lr=[0.1, 0.05])
            params, opt = result.params, result.opt
            results.append(tree_map(Tensor.clone, params))

    with counted_replays() as replayed:
        reports = reports_of(run)
    net, rate, expected = on_device(twin), torch.zeros((), device=DEVICE), list[Any]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False, capturable=True)
    for batch in batches:
        for step_batch, number in ((batch, 0.1), (batches[0], 0.05)):
            grads_by_autograd(net, step_batch)
            rate.fill_(number)
            optimizer.step()
        expected.append([param.detach().clone() for param in net.parameters()])
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


@contextmanager
def registered(apply: Callable[..., Any]) -> Iterator[str]:
    """Register an update rule for the body; yield its name."""
    fpipe.register_update("OwnRule", apply)
    try:
        yield "OwnRule"
    finally:
        RULES.pop("OwnRule")


def failed() -> list[str]:
    """Let the second capture fail, and go on with the same step once its cause is gone."""
    reads_rate, steps = False, range(2 * STEPS)

    def look_at_rate(param: Tensor, grad: Tensor, state: Any, lr: Tensor, decay: Tensor) -> tuple[Tensor, Any]:
        return param * decay - (float(lr) if reads_rate else lr) * grad, state

    with registered(look_at_rate) as rule:
        model, program, params = cut(on_device(net_of(2)), fpipe.chain(GPIPE, fpipe.update(rule)))
        step = fpipe.build(program, model, graph=True, audit="never", donate=True)
        opt, twin, failures = fpipe.optimizer_state(program, params), net_of(2), list[str]()
        batches = [tuple(tensor[: 12 + 4 * (k < STEPS)] for tensor in batches_of()[k % STEPS]) for k in steps]

        def run() -> None:
            nonlocal params, reads_rate
            for k, batch in enumerate(batches):
                numbers, reads_rate = {"lr": 0.125, "decay": 0.5**k}, k >= STEPS and not failures
                try:
                    params = step(params, batch, opt=opt, lr=numbers).params
                except RuntimeError as error:
                    reads_rate = False
                    failures.extend([str(error), *error.__notes__])
                    params = step(params, batch, opt=opt, lr=numbers).params

        with counted_replays() as replayed:
            reports = reports_of(run)
    net = on_device(twin)
    for k, batch in enumerate(batches):
        for param, grad in zip(net.parameters(), grads_by_autograd(net, batch), strict=True):
            param.data = param.data * 0.5**k - 0.125 * grad
    is_said = len(failures) == 3 and failures[1].startswith("in UPDATE") and "captured" in failures[2]
    reports += [] if is_said else [f"the failure was reported as {failures}"]
    return reports + differing_bits(leaves(params), [*net.parameters()]) + count_mistakes(replayed, 2 * REPLAYS, 2)


def outlived() -> list[str]:
    """Let a rule keep tensors of a graph that is gone when parameters move, and capture again."""
    outlasting, results = list[Tensor](), list[Any]()

    def keep_grad(param: Tensor, grad: Tensor, state: Any, lr: Tensor) -> tuple[Tensor, Any]:
        outlasting.append(grad * 2)
        return param - lr * grad, state

    with registered(keep_grad) as rule:
        model, program, params = cut(on_device(net_of(2)), fpipe.chain(GPIPE, fpipe.update(rule)))
        step, opt = fpipe.build(program, model, graph=True, audit="never"), fpipe.optimizer_state(program, params)
        copies, batches = tree_map(Tensor.clone, params), batches_of()

        def run() -> None:
            for k, batch in enumerate(batches):
                results.append(step(params if k < REPLAYS else copies, batch, opt=opt, lr=0.125).params)

        with counted_replays() as replayed:
            reports = reports_of(run)
    net = on_device(net_of(2))
    expected = [
        [param - 0.125 * grad for param, grad in zip(net.parameters(), grads_by_autograd(net, batch), strict=True)]
        for batch in batches
    ]
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 2)


def next_to_garbage() -> list[str]:
    """Let a rule drop graphs in cycles while a step is captured, and many objects, which start a collection."""
    graphs = [[captured_of(new_ones().neg)] for _ in range(STEPS)]

    def drop_graph(param: Tensor, grad: Tensor, state: Any, lr: Tensor) -> tuple[Tensor, Any]:
        if torch.get_device_module(DEVICE).is_current_stream_capturing() and graphs:
            cycle: list[Any] = [graphs.pop()]
            cycle.append(cycle)
            del cycle
            _ = [[] for _ in range(10 * gc.get_threshold()[0])]
        return param - lr * grad, state

    with registered(drop_graph) as rule:
        model, program, params = cut(on_device(net_of(2)), fpipe.chain(GPIPE, fpipe.update(rule)))
        step, opt = fpipe.build(program, model, graph=True, audit="never"), fpipe.optimizer_state(program, params)
        with counted_replays() as replayed:
            reports = reports_of(lambda: [step(params, batch, opt=opt, lr=0.1) for batch in batches_of()])
    return reports + count_mistakes(replayed, REPLAYS, 1)


GRAPH_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "a graph on streams in turn": on_streams_in_turn,
    "a graph of another thread": in_another_thread,
    "a graph next to garbage": next_to_garbage,
    "a graph that draws": partial(drawn, GPIPE),
    "a graph": partial(same_as_autograd, audit="never"),
    "a graph of 1F1B with recomputation, next to audits": partial(
        same_as_autograd, pipeline_of(fpipe.checkpoint(), fpipe.schedules.one_f_one_b(1))
    ),
    "a graph that draws, next to audits": partial(drawn, GPIPE, audit="always"),
    "a graph that draws twice": partial(drawn, pipeline_of(fpipe.checkpoint(), fpipe.schedules.gpipe(1))),
    "a graph that updates": partial(updated, "AdamW", clip=1.0, weight_decay=0.1),
    "a graph that updates turned weights": partial(updated, "AdamW", turned=True, clip=1.0),
    "a graph that updates turned weights in place": partial(updated, "Adam", donate=True, turned=True),
    "a graph that updates in place": partial(updated, "AdamW", donate=True, clip=1.0),
    "a graph of SGD": partial(updated, "SGD", donate=True, momentum=0.9),
    "a graph of NAdam": partial(updated, "NAdam", donate=True, weight_decay=0.1, decoupled_weight_decay=True),
    "a graph of NAdam that starts again": partial(updated, "NAdam", restarts=True, momentum_decay=0.1),
    "a graph of ASGD": partial(updated, "ASGD", donate=True, weight_decay=0.1, lambd=0.01, t0=2.0),
    "a graph of ASGD that starts again": partial(updated, "ASGD", restarts=True),
    "a graph of Rprop": partial(updated, "Rprop", donate=True, step_sizes=(1e-3, 1.0)),
    "a graph of Rprop that starts again": partial(updated, "Rprop", restarts=True),
    "a graph of RMSprop": partial(updated, "RMSprop", donate=True, centered=True, momentum=0.9, weight_decay=0.1),
    "a graph of RMSprop without momentum": partial(updated, "RMSprop", maximize=True),
    "a graph of Adadelta": partial(updated, "Adadelta", donate=True, weight_decay=0.1),
    "a graph with copied parameters": partial(updated, "Adamax", moves=True),
    "a graph whose donated parameters move": partial(updated, "RAdam", donate=True, moves=True),
    "a graph with other parameters": new_params,
    "two graphs": two_signatures,
    "a graph with state": normed,
    "a graph with metrics and gradients of inputs": with_aux,
    "a graph with constants that change": constants_changed,
    "a graph with a loss scale": partial(scaled, donate=False),
    "a graph with a loss scale, in place": partial(scaled, donate=True),
    "a graph of two steps": partial(two_steps, donate=False),
    "a graph of two steps, in place": partial(two_steps, donate=True),
    "a failed capture": failed,
    "a graph whose tensors outlive it": outlived,
}
"""Scenarios in order: first those that are the only one to notice some missing call."""
