"""Say what the ranks of a step must agree on, in words that are the same on all that do.

    program, torch, settings, parameters        the example, each stage as it was traced, the loss, what is sent
    in a step: the tensors of the batch, since ranks that shuffle differently train on a batch that nobody has

Text is compared as it is, and lines by their hash; of these an error quotes the first that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.graphs.language.listing import held, listing
from fpipe.meaning.purity.ambient import ambient, autocast, settings
from fpipe.meaning.purity.sharded import local_of
from fpipe.model import Model
from fpipe.positional_stage import of_net
from fpipe.program import Program, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, Lowered
from fpipe.runtimes.lowering.shards import Share, is_share
from fpipe.torch_internals import storage_of

About = Mapping[str, str | Sequence[str]]
"""Facts by name that must be the same among all who state them. An error omits what is behind a `|` in a name."""


def of_build(program: Program, params: Any, options: Mapping[str, Any]) -> About:
    """State what is known before anything is traced; raise Untraceable under a mode that no trace can be made in."""
    ambient()
    parameters = [
        f"params{name}: {str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}"
        for name, leaf in tree.paths(params)
        if isinstance(leaf, Tensor)
    ]
    return {
        "program": str(program).splitlines(),
        "torch": torch.__version__,
        **around(),
        "options": ", ".join(f"{word}={value}" for word, value in options.items()),
        "parameters": parameters,
    }


def around() -> About:
    """State the settings that choose ops and kernels."""
    return {"number of threads": str(torch.get_num_threads()), "autocast": autocast(), "settings": settings()}


def of_inputs(program: Program, trees: Mapping[Value, AbstractTree]) -> list[str]:
    """State the avals of a step's inputs, whatever memory they are in."""

    def words(leaf: Any) -> str:
        return f"{leaf.aval} with strides {[*leaf.aval.stride]}" if isinstance(leaf, Fact) else repr(leaf)

    return [f"{value}: {words(leaf)}" for value, _ in program.inputs for leaf in trees[value].leaves]


def of_stages(
    model: Model, lowered: Lowered, device: torch.device, inputs: Sequence[str], replica: int = 0
) -> dict[str, Sequence[str]]:
    """State each stage and the loss as they were traced, and the tensors that their code holds on to.

    Hardware of other kinds may trace to other ops, and so may replicas with other numbers of rows, or in stages that
    ask for the microbatch's: their facts have other names. Parameters and buffers of a net are not compared number by
    number, as a rank needs only its own.
    """
    circumstances = [_hardware(device), *inputs]
    facts: dict[str, Sequence[str]] = {}
    for stage in [*range(len(model.stages)), None]:
        name = "loss" if stage is None else f"stage {stage}"
        asks = stage is not None and "microbatch" in model.stages[stage].asks
        suffix = f"|{_hash([*circumstances, f'replica {replica}'] if asks else circumstances)}"
        graphs = lowered.graphs.get(stage, ())
        lines = [line for graph in graphs for line in listing(graph)]
        lines += [f"reduction {model.reduction!r}"] if stage is None else []
        net = None if stage is None else of_net(model.stages[stage].forward)
        loaded = {storage_of(local_of(leaf)) for leaf in net.constants()} if net else set[int]()
        constants = [leaf for graph in graphs for leaf in graph.constants.values() if storage_of(leaf) not in loaded]
        data = held([*constants, *(net.literals_now() if net else ())])
        facts[name + suffix] = lines
        if data is not None:
            facts[f"tensors held by {name}{suffix}"] = data
    return facts


def of_batch(batch: Any) -> dict[str, str]:
    """State each tensor of a batch with the hash of its data; not those without data, or None in place of one.

    >>> import torch
    >>> of_batch((torch.ones(2), None))
    {'batch[0]': 'float32[2]: 1.0, 1.0 (hash 80b8fd6d)'}
    """
    leaves = [(name, leaf) for name, leaf in tree.paths(batch) if isinstance(leaf, Tensor)]
    lines = [(name, held([leaf])) for name, leaf in leaves]
    return {f"batch{name}": line[0] for name, line in lines if line}


def of_start(
    program: Program, model: Model, rank: int, params: Any, optim_state: Any, share: Share | None
) -> dict[str, str]:
    """State the parameters of a rank's stages, frozen ones too, and their optimizer's state, by hashes of their data.

    Replicas, and ranks that have the same stage, start from the same. Of parameters that replicas share out, those
    agree that have the same part.
    """
    stages = {value.stage or 0 for value, homes in program.inputs if value.name == "params" and rank in homes}
    leaves = dict[str, Any]()
    for stage in sorted(stages):
        for name, per_stage in (("params", params), ("opt", optim_state)):
            paths = tree.paths(per_stage[stage]) if per_stage else ()
            leaves |= {f"{name}[{stage}]{path}": leaf for path, leaf in paths if isinstance(leaf, Tensor)}
        net = of_net(model.stages[stage].forward)
        constants = net.constants() if net else []
        frozen = [leaf for leaf in constants if isinstance(leaf, Parameter)]
        leaves |= {f"frozen[{stage}][{index}]": leaf for index, leaf in enumerate(frozen)}
    facts = dict[str, str]()
    for name, leaf in leaves.items():
        suffix = f"|part {share.number}" if share is not None and is_share(leaf, share.axis) else ""
        facts |= {f"{name}{suffix}": line for line in held([leaf]) or ()}
    return facts


def of_optim(optim: tuple[Any, Sequence[Any], Any] | None) -> dict[str, str]:
    """State the numbers of an update: learning rates, other numbers of the rule, and the loss scale."""
    if optim is None:
        return {}
    _, rates, scale = optim
    facts = dict[str, str]()
    for step, rate in enumerate(rates):
        suffix = f" of step {step}" if len(rates) > 1 else ""
        numbers = rate if isinstance(rate, Mapping) else {} if rate is None else {"lr": rate}
        facts |= {f"{name}{suffix}": str(number.item()) for name, number in numbers.items()}
    if scale is not None:
        facts |= {"scale": str(scale[0].item()), "finite steps behind its scale": str(scale[1].item())}
    return facts


def digest(facts: Mapping[str, str]) -> int:
    """Return facts as a number; 0 if there are none."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7]) if facts else 0


def first_difference(lines: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    """Return the first lines that differ.

    >>> first_difference(["a", "b"], ["a", "c", "d"]), first_difference(["a"], ["a", "b"])
    (('b', 'c'), ('nothing', 'b'))
    """
    pairs = zip_longest(lines, expected, fillvalue="nothing")
    return next(pair for pair in pairs if pair[0] != pair[1])


def way_out(name: str) -> str:
    """Return words on how ranks come to agree on a fact; none where that is plain."""
    if name.startswith(("params[", "opt[", "frozen[")):
        return (
            " Replicas start from the same numbers: make the net behind torch.manual_seed(0), load one checkpoint, or "
            "send those of replica 0 to all by torch.distributed.broadcast."
        )
    if name == "parameters":
        return " An example has the parameters of all stages: on meta, those that a rank does not hold."
    if not name.startswith("batch"):
        return ""
    return (
        " A DataLoader that shuffles needs the same seed on all ranks: generator=torch.Generator().manual_seed(0). A "
        "rank that reads no batch may pass None, and check_batch='never' compares nothing."
    )


def as_sent(about: About) -> dict[str, str | list[str]]:
    """Shorten facts: lines to their hash."""
    return {name: fact if isinstance(fact, str) else [_hash(fact)] for name, fact in about.items()}


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
