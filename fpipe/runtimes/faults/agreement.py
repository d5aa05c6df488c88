"""Say what the ranks of a step must agree on, in words that are the same on all that do.

    program, torch, settings, parameters        the example, each stage as it was traced, the loss, what is sent

Text is compared as it is, and lines by their hash; of these an error quotes the first that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.graphs.language.listing import held, listing
from fpipe.meaning.purity.ambient import ambient, autocast, settings
from fpipe.meaning.purity.sharded import local_of
from fpipe.model import Model
from fpipe.positional_stage import of_net
from fpipe.program import Program, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, Lowered
from fpipe.torch_internals import storage_of

About = Mapping[str, str | Sequence[str]]
"""By name what is to be the same among all who say it. What is behind a `|` in a name is not told."""


def of_build(program: Program, params: Any, options: Mapping[str, Any]) -> About:
    """Facts that are known before anything is traced; Untraceable if nothing can be under what is around."""
    ambient()
    known = [
        f"params{name}: {str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}"
        for name, leaf in tree.paths(params)
        if isinstance(leaf, Tensor)
    ]
    return {
        "program": str(program).splitlines(),
        "torch": torch.__version__,
        **around(),
        "options": ", ".join(f"{word}={value}" for word, value in options.items()),
        "parameters": known,
    }


def around() -> About:
    """Settings that choose ops and kernels."""
    return {"number of threads": str(torch.get_num_threads()), "autocast": autocast(), "settings": settings()}


def of_inputs(program: Program, trees: Mapping[Value, AbstractTree]) -> list[str]:
    """Avals of a step's inputs, whatever memory they are in."""
    values = [value for value, _ in program.inputs]
    return [f"{value}: {_looks(leaf)}" for value in values for leaf in trees[value].leaves]


def of_stages(
    model: Model, lowered: Lowered, device: torch.device, given: Sequence[str], replica: int = 0
) -> dict[str, Sequence[str]]:
    """Each stage and the loss as they were traced, and the tensors that their code holds on to.

    Hardware of other kinds may trace to other ops, and so may replicas with other numbers of rows, or in stages that
    ask for the microbatch's: those compare that are alike. Parameters and buffers of a net are not compared number by
    number, as a rank needs only its own.
    """
    around = [_hardware(device), *given]
    found: dict[str, Sequence[str]] = {}
    for stage in [*range(len(model.stages)), None]:
        who = "loss" if stage is None else f"stage {stage}"
        asks = stage is not None and "microbatch" in model.stages[stage].asks
        alike = f"|{_hash([*around, f'replica {replica}'] if asks else around)}"
        graphs = lowered.graphs.get(stage, ())
        lines = [line for graph in graphs for line in listing(graph)]
        lines += [f"reduction {model.reduction!r}"] if stage is None else []
        net = None if stage is None else of_net(model.stages[stage].forward)
        loaded = {storage_of(local_of(leaf)) for leaf in net.constants()} if net else set[int]()
        own = [leaf for graph in graphs for leaf in graph.constants.values() if storage_of(leaf) not in loaded]
        data = held([*own, *(net.literals_now() if net else ())])
        found[who + alike] = lines
        if data is not None:
            found[f"tensors held by {who}{alike}"] = data
    return found


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """The first lines that are not the same.

    >>> first_difference(["a", "b"], ["a", "c", "d"]), first_difference(["a"], ["a", "b"])
    (('b', 'c'), ('nothing', 'b'))
    """
    at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(one), len(other)) if at is None else at
    return one[at] if at < len(one) else "nothing", other[at] if at < len(other) else "nothing"


def way_out(name: str) -> str:
    """Words for ranks that differ in something, by its name: how they come to agree; none where that is plain."""
    if not name.startswith("batch"):
        return ""
    return (
        " A DataLoader that shuffles needs the same seed on all ranks: generator=torch.Generator().manual_seed(0). A "
        "rank that reads no batch may pass None, and check_batch='never' compares nothing."
    )


def as_sent(about: About) -> dict[str, str | list[str]]:
    """Agreements in few words: the hash of lines."""
    return {name: of if isinstance(of, str) else [_hash(of)] for name, of in about.items()}


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type


def _looks(leaf: Any) -> str:
    return f"{leaf.aval} with strides {[*leaf.aval.stride]}" if isinstance(leaf, Fact) else repr(leaf)
