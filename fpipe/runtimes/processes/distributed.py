"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all of it, so nothing is asked while a step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.graphs.tracing.lru_cache import LRUCache
from fpipe.meaning.inputs_and_results import Keys, check_call, optim_of
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable, refuse_odd_modes
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.purity.user_lines import line_of
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.stages.memory_layout import is_strided
from fpipe.meaning.walk import Step
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Output, Program, Value, parts_of
from fpipe.runtimes.faults.agreement import About, around, of_build
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.rank_error import LostRank
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.lowering.prepared import GONE
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.untraced import UNDER_AUTOGRAD, Untraced
from fpipe.runtimes.processes.elsewhere import Elsewhere
from fpipe.runtimes.processes.exchange_lane import ExchangeLane, over_mesh
from fpipe.runtimes.processes.message_order import messages, results_last
from fpipe.runtimes.processes.peer_errors import PeerErrors
from fpipe.runtimes.processes.prepared_rank import PreparedRank, end_of
from fpipe.runtimes.processes.process_mesh import group_of, refuse_other_size, replicas_of
from fpipe.runtimes.processes.replicas import reduced_last
from fpipe.runtimes.processes.same_batch import CheckBatch, digest, is_compared, of_batch
from fpipe.runtimes.processes.transfers import Transfers
from fpipe.transforms.communicate import with_transfers

Given = tuple[Any, Any, Any, Any]


def distributed(
    program: Program,
    model: Model,
    checked: Callable[[], tuple[Any, Any, Any]],
    *,
    mesh: DeviceMesh | None,
    example: Any,
    timeout: float | None,
    broadcast: bool,
    record: bool,
    check_finite: bool,
    loss_scale: float,
    compile: bool,
    check_batch: CheckBatch,
    trace: bool,
    donate: bool,
) -> Step:
    """A step of one rank, `step(params, batch, *, state=None, key=None, opt=None, lr=None, scale=None) -> Result`,
    called by all ranks alike.

    The arguments are those of `build`, and `checked` refuses them or gives the example: it is called when there is a
    way to tell the other ranks.
    """
    group = group_of(program, mesh)
    rank = group.rank()
    device = next(
        (leaf.device for leaf in tree.leaves(example) if isinstance(leaf, Tensor) and not leaf.is_meta),
        torch.get_default_device(),
    )
    watchdog = Watchdog()
    meeting = Meeting([dist.get_process_group_ranks(group)], rank, group, timeout, watchdog)
    replicas = replicas_of(program, mesh, group, meeting, device, watchdog)
    peer_errors = PeerErrors(rank, meeting, replicas)
    model, axes = over_mesh(model, mesh)
    lane = ExchangeLane(axes, device, meeting)
    signatures, known = Signatures(model), LRUCache[Any, PreparedRank](_MOST)
    lost, numbers = list[str](), count(1)

    def prepared(given: Given, key: Keys) -> PreparedRank:
        more: Any = {"loss_scale": loss_scale, "compile": compile, "home": device, "watch_saved": record}
        more["donate"] = donate
        untraced = Untraced({} if trace else dict.fromkeys(range(len(model.stages)), "trace=False"))
        while True:
            try:
                made = PreparedRank(
                    rank, group, transfers, replicas, lane, program, model, *given, key, untraced, **more
                )
                break
            except Untraceable as error:
                if error.stage is None and isinstance(error.__cause__, ValueError):  # refused, whoever runs it
                    raise error.__cause__ from None
                if error.stage is None or error.stage in untraced.stages:
                    why = untraced.with_words(error)
                    place = f"\n  {line}" if (line := line_of(error)) else ""
                    raise ValueError(
                        f"{why}. In processes a stage is traced, or runs on zeros first: write it so that one of the "
                        f"two works, or say runtime='threads' or 'local'.{place}"
                    ) from error
                untraced.stages[error.stage] = str(error)
        here = {op.stage for op in parts_of(program.ops) if op.kind == "F" and op.rank == rank}
        for stage, why in untraced.surprises() if trace else ():
            if stage in here:
                warnings.warn(f"{UNDER_AUTOGRAD}: {why}", stacklevel=4)
        return made

    def agreed(where: str, what: str, made: PreparedRank, key: Keys, more: About) -> PreparedRank:
        about = {what: made.given_as, **more, "key": str(key), **made.stages, "messages": made.messages}
        meeting.agree(where, about)
        if compile:
            compiled = f"{where}, compiled"
            try:
                made.compile()
            except BaseException as error:
                peer_errors.refuse(error, compiled)
                raise
            meeting.agree(compiled, {}, patience=_COMPILING)
        made.number = made.number or transfers.know(made.layouts)
        return made

    def one_step(number: int, own: Given, more: Sequence[Any], key: Any) -> Result:
        refuse_odd_modes()
        key = check_call(program, more, key)
        if any(stage.moved() for stage in of_nets):
            check_params(model, _filled(own[0], shapes[0]))
        params, batch, state = (_filled(one, of) for one, of in zip(own[:3], shapes, strict=False))
        optim = own[3] and (_filled(own[3][0], shapes[3][0]), *own[3][1:])
        given = params, batch, state, optim
        leaves, containers = tree.flatten(given)
        signature = signatures.of(leaves, containers, homes=repeat(device))
        made = known.get(signature)
        new = made is None or number == 1  # at the first step the key is new
        made = made or prepared(given, key)
        handed = of_batch(own[1]) if is_compared(check_batch, number) else None
        if new or (handed is not None and group.size() > 1):
            transfers.meet()
            alike = {**around(), **(handed or {})}
            if new:
                known[signature] = agreed(f"step {number}", "arguments", made, key, alike)
            else:
                meeting.agree(f"step {number}", alike)
            transfers.begin()  # all have met: who fails from here on does so in all messages of the step
        if number == 1:
            lane.agree("step 1", made.exchanged)
        if number == 1 and replicas is not None:
            peer_errors.everyone.agree("step 1", {"key": str(key)})
        made.refuse_missing(leaves)
        made.step, made.step_batch = number, digest(handed or {})
        made.step_key = hash(key) if isinstance(key, tuple) else key
        result = made.run(leaves, given[2], key, record=told, check_finite=check_finite)
        if result.loss is None and has_loss:
            result = replace(result, loss=Elsewhere(has_loss[0]))
        return result if own[2] is None else replace(result, state=_own(result.state, own[2]))

    def step(
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *more: Any,
        state: Sequence[Any] | None = None,
        key: Any = None,
        opt: Sequence[Any] | None = None,
        lr: Any = None,
        scale: Any = None,
    ) -> Result:
        if lost:
            raise LostRank(f"{lost[0]}; start all ranks again.")
        number = next(numbers)
        watchdog.begin(number)
        transfers.begin()
        if replicas is not None:
            replicas.begin(exchanges)
        with watchdog.ctrl_c:
            try:
                return one_step(number, (params, batch, state, optim_of(program, opt, lr, scale)), more, key)
            except BaseException as error:
                if donate:
                    error.add_note(GONE)
                said = peer_errors.fail(error, transfers, f"step {number}", *([end_of(number)] if record else []))
                lane.fail(said, f"step {number}")
                if peer_errors.lost(error):
                    lost.append(said)
                    if isinstance(error, RuntimeError):
                        raise LostRank(said) from error.__cause__ or error
                if first.lowered.collective:  # what it did not come to, others would take its next step's for
                    lost.append(f"{said.rstrip('.')}; collectives inside stages are no longer in step")
                raise
            finally:
                watchdog.end()

    try:
        params, *more = checked()
        shapes: Given = (*tree.tree_map(_without_data, (_of_all(model, params), *more)), None)
        shapes = (*shapes[:3], example_optim(program, shapes[0]))
        told = program if record else None
        refuse_other_size(group, program, mesh)
        program = reduced_last(results_last(with_transfers(_told(program, broadcast))))
        has_loss = [rank for end in program.outputs if end.name == Value("loss") for rank in end.homes]
        of_nets = [one.forward for one in model.stages if isinstance(one.forward, PositionalStage)]
        options = {
            "record": record,
            "check_finite": check_finite,
            "loss_scale": float(loss_scale),
            "compile": compile,
            "check_batch": check_batch,
            "trace": trace,
            "donate": donate,
        }
        peer_errors.everyone.agree(_BUILDING, of_build(program, shapes[0], options))
        try:
            transfers = Transfers(messages(program), rank, group, meeting, device)
        except RuntimeError:
            meeting.agree(_TRACED, {})  # who does not come to that either is to blame
            raise
        first = prepared(shapes, None)
        lane.agree(_TRACED, first.exchanged)
        agreed(_TRACED, "example", first, None, {})
        if replicas is not None:
            peer_errors.everyone.agree(_TRACED, first.stages, patience=_COMPILING * compile)
    except BaseException as error:
        lane.refuse(peer_errors.refuse(error, _BUILDING, _TRACED), _TRACED, "step 1")
        peer_errors.everyone.let_read(_BUILDING, _TRACED)
        raise
    groups = transfers.groups + ([] if replicas is None else replicas.groups) + [axis.group for axis in axes.values()]
    watchdog.start(transfers, [*peer_errors.boards, *lane.boards], groups)
    exchanges = first.exchanges
    known[signatures.of(*tree.flatten(shapes), homes=repeat(device))] = first
    return step


_BUILDING = "building the step"
_TRACED = "building the step, after the trace"
_COMPILING = 1800.0


_MOST = 128


def _told(program: Program, broadcast: bool) -> Program:
    """The program whose loss rank 0 gets too, or with `broadcast` every rank, and all whether their step is valid."""
    ranks = tuple(range(program.ranks))
    merged = sum(end.name.name == "loss" for end in program.outputs) <= program.steps

    def homes(end: Output) -> tuple[int, ...]:
        if end.name.name in ("valid", "scale") or (broadcast and end.name.name in ("loss", "aux")):
            return ranks
        return tuple(sorted({0, *end.homes})) if end.name.name == "loss" and merged else end.homes

    ends = tuple(end._replace(homes=homes(end)) for end in program.outputs)
    return Program.trusted(program.inputs, program.ops, ends)


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_sharded(leaf) or not is_strided(leaf):
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")  # a shard may be a view


def _of_all(model: Model, params: Any) -> Any:
    """Parameters of an example, those of the net itself in place of None: stages that are at home on other ranks."""
    if not isinstance(params, tuple | list) or len(params) != len(model.stages):
        return params
    nets = [stage.forward if isinstance(stage.forward, PositionalStage) else None for stage in model.stages]
    return tuple(
        {names[0]: getattr(*net.home_of(names[0])) for names in model.living(number)} if one is None and net else one
        for number, (one, net) in enumerate(zip(params, nets, strict=True))
    )


def _filled(given: Any, example: Any) -> Any:
    """Arguments of a step, with the example's in place of None: those that are at home on other ranks."""
    if given is None or not isinstance(given, tuple | list) or len(given) != len(example or ()):
        return example if given is None else given
    return type(example)(one if mine is None else mine for mine, one in zip(given, example, strict=True))


def _own(found: Any, handed: Sequence[Any]) -> Any:
    """The state, None where this rank was handed none."""
    return None if found is None else tuple(a if b is not None else None for a, b in zip(found, handed, strict=True))
