"""Collect the claims that the ranks of a step must agree on, as text that is equal on all ranks that agree.

    at the build: program, torch, settings, parameters; then the example, each traced stage, the loss, the messages
    in a step: the tensors of the batch, since ranks that shuffle differently train on a batch that nobody has

Short claims are compared as text, and lists of lines by their hash; an error quotes the first line that differs. A
graph is a line for each op. Left out is what may differ between processes that agree: names, devices, groups, memory.

    y = tanh(x @ w)        -->        op 0: aten.mm.default(x[0], params[0])   op 1: aten.tanh.default(%0)   y: %1"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from fpipe import tree
from fpipe.graphs.language.graph import Fact, Graph, Name, aval_of_tensor
from fpipe.meaning.purity.ambient import ambient_key, describe_autocast, describe_settings
from fpipe.meaning.purity.sharded import is_collective, local_shard
from fpipe.model import Model
from fpipe.positional_stage import net_stage_of
from fpipe.program import Program, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, Lowered
from fpipe.runtimes.lowering.shard_shapes import Share, is_share
from fpipe.torch_internals import OpOverload, schema_arguments, storage_of

Claims = Mapping[str, str | Sequence[str]]
"""Text or lines by name, equal on all processes that make a claim of that name.

Processes that may rightly differ, such as on other hardware, use other names: the part behind a `|`, which errors omit.
"""


def claims_of_build(program: Program, params: Any, options: Mapping[str, Any]) -> Claims:
    """State the program, the settings and the shapes of the parameters, before anything is traced."""
    # Raises Untraceable under a mode, such as a TorchFunctionMode, in which nothing can be traced.
    ambient_key()
    parameters = [
        f"params{name}: {str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}"
        for name, leaf in tree.paths(params)
        if isinstance(leaf, Tensor)
    ]
    return {
        "program": str(program).splitlines(),
        "torch": torch.__version__,
        **claims_of_settings(),
        "options": ", ".join(f"{option}={setting}" for option, setting in options.items()),
        "parameters": parameters,
    }


def claims_of_settings() -> Claims:
    """State the settings of torch that choose ops and kernels."""
    threads = str(torch.get_num_threads())
    return {"number of threads": threads, "autocast": describe_autocast(), "settings": describe_settings()}


def describe_inputs(program: Program, trees: Mapping[Value, AbstractTree]) -> list[str]:
    """State the avals and strides of a step's inputs."""

    def describe_leaf(leaf: Any) -> str:
        return f"{leaf.aval} with strides {[*leaf.aval.stride]}" if isinstance(leaf, Fact) else repr(leaf)

    return [f"{value}: {describe_leaf(leaf)}" for value, _ in program.inputs for leaf in trees[value].leaves]


def claims_of_stages(
    model: Model, lowered: Lowered, device: torch.device, input_lines: Sequence[str], replica: int = 0
) -> dict[str, Sequence[str]]:
    """State the traces of all stages and of the loss, and the tensors that their code holds on to."""
    # A name ends with the circumstances of a trace: other hardware may trace to other ops, and so may replicas with
    # other numbers of rows, or in stages that ask for the microbatch's index.
    circumstances = [_hardware(device), *input_lines]
    claims: dict[str, Sequence[str]] = {}
    for stage in [*range(len(model.stages)), None]:
        name = "loss" if stage is None else f"stage {stage}"
        depends_on_replica = stage is not None and "microbatch" in model.stages[stage].keywords
        suffix = f"|{_hash([*circumstances, f'replica {replica}'] if depends_on_replica else circumstances)}"
        graphs = [sized_graph.filled() for sized_graph in lowered.graphs.get(stage, ())]
        lines = [line for graph in graphs for line in lines_of_graph(graph)]
        lines += [f"reduction {model.reduction!r}"] if stage is None else []
        net = None if stage is None else net_stage_of(model.stages[stage].forward)
        # A rank needs the data of its own parameters and buffers only, so those of a net are not compared here.
        net_storages = {storage_of(local_shard(leaf)) for leaf in net.constants()} if net else set[int]()
        leaves = [leaf for graph in graphs for leaf in graph.constants.values()]
        constants = [leaf for leaf in leaves if storage_of(leaf) not in net_storages]
        tensor_lines = describe_constants([*constants, *(net.literal_constants() if net else ())])
        claims[name + suffix] = lines
        if tensor_lines is not None:
            claims[f"tensors held by {name}{suffix}"] = tensor_lines
    return claims


def claims_of_batch(batch: Any) -> dict[str, str]:
    """State each tensor of a batch with the hash of its data; leaves without data make no claim.

    >>> import torch
    >>> claims_of_batch((torch.ones(2), None))
    {'batch[0]': 'float32[2]: 1.0, 1.0 (hash 80b8fd6d)'}
    """
    tensors = [(name, leaf) for name, leaf in tree.paths(batch) if isinstance(leaf, Tensor)]
    lines_by_path = [(name, describe_constants([leaf])) for name, leaf in tensors]
    return {f"batch{name}": tensor_lines[0] for name, tensor_lines in lines_by_path if tensor_lines}


def claims_of_start(
    program: Program, model: Model, rank: int, params: Any, optim_state: Any, share: Share | None
) -> dict[str, str]:
    """State the parameters, constant buffers and optimizer state of a rank's stages, by hashes of their data.

    Replicas, and ranks that have the same stage, must start from equal parameters. A shard is compared among the
    replicas that keep the same part.
    """
    stages = {value.stage or 0 for value, homes in program.inputs if value.name == "params" and rank in homes}
    leaf_by_name = dict[str, Any]()
    for stage in sorted(stages):
        for name, per_stage in (("params", params), ("opt", optim_state)):
            paths = tree.paths(per_stage[stage]) if per_stage else ()
            leaf_by_name |= {f"{name}[{stage}]{path}": leaf for path, leaf in paths if isinstance(leaf, Tensor)}
        net = net_stage_of(model.stages[stage].forward)
        constants = net.constants() if net else []
        # A net keeps its frozen parameters and constant buffers itself: replicas that drew them by other seeds would
        # train different models.
        frozen = [leaf for leaf in constants if isinstance(leaf, Parameter)]
        buffers = [leaf for leaf in constants if not isinstance(leaf, Parameter)]
        for name, leaves in (("frozen", frozen), ("buffers", buffers)):
            leaf_by_name |= {f"{name}[{stage}][{index}]": leaf for index, leaf in enumerate(leaves)}
    claims = dict[str, str]()
    for name, leaf in leaf_by_name.items():
        suffix = f"|part {share.number}" if share is not None and is_share(leaf, share.axis) else ""
        claims |= {f"{name}{suffix}": line for line in describe_constants([leaf]) or ()}
    return claims


def claims_of_update(optim: tuple[Any, Sequence[Any], Any] | None) -> dict[str, str]:
    """State the numbers of an update: learning rates, other numbers of the rule, and the loss scale."""
    if optim is None:
        return {}
    _, rates, scale = optim
    claims = dict[str, str]()
    for step, rate in enumerate(rates):
        suffix = f" of step {step}" if len(rates) > 1 else ""
        numbers = rate if isinstance(rate, Mapping) else {} if rate is None else {"lr": rate}
        claims |= {f"{name}{suffix}": str(number.item()) for name, number in numbers.items()}
    if scale is not None:
        claims |= {"scale": str(scale[0].item()), "finite steps behind its scale": str(scale[1].item())}
    return claims


def digest_claims(claims: Mapping[str, str]) -> int:
    """Return a hash of claims that fits an int64; 0 if there are none."""
    # 7 bytes: always positive, so that it travels in the tensor of a vote.
    return int.from_bytes(hashlib.sha256(repr(claims).encode()).digest()[:7]) if claims else 0


def first_unequal_lines(lines: Sequence[str], expected: Sequence[str]) -> tuple[str, str]:
    """Return the first pair of lines that differ.

    >>> first_unequal_lines(["a", "b"], ["a", "c", "d"]), first_unequal_lines(["a"], ["a", "b"])
    (('b', 'c'), ('nothing', 'b'))
    """
    pairs = zip_longest(lines, expected, fillvalue="nothing")
    return next(pair for pair in pairs if pair[0] != pair[1])


def advice_on(name: str) -> str:
    """Return how ranks come to agree on a claim of this name; empty where that is plain."""
    if name.startswith(("params[", "opt[", "frozen[", "buffers[")):
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


def hash_lines(claims: Claims) -> dict[str, str | list[str]]:
    """Replace the lines of claims by their hash."""
    return {name: claim if isinstance(claim, str) else [_hash(claim)] for name, claim in claims.items()}


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type


def lines_of_graph(graph: Graph) -> Iterator[str]:
    """Yield a line for each op of a graph, and for each label that it writes.

    Tensors that it reads are named by label and index, constants by number (`describe_constants` describes them), and
    the result of an op by the number of the op.
    """
    names: dict[Any, str] = {
        name: f"{label}[{index}]" for label, leaves in graph.reads.items() for index, name in enumerate(leaves)
    }
    names |= {name: f"held[{index}]" for index, name in enumerate(graph.constants)}
    names |= {node.name: f"%{index}" for index, node in enumerate(graph.nodes)}
    yield from (f"op {index}: {_call(*node[1:], names)}" for index, node in enumerate(graph.nodes))
    for label, leaves in graph.writes.items():
        yield f"{label}: {', '.join(_text(leaf, names) for leaf in leaves)}"


def describe_constants(tensors: Iterable[Any]) -> list[str] | None:
    """Return a line for each tensor, with its first numbers and a hash; None if a tensor has no data here.

    >>> describe_constants([torch.ones(2)])
    ['float32[2]: 1.0, 1.0 (hash 80b8fd6d)']
    """
    lines: list[str] = []
    for tensor in map(local_shard, tensors):
        if tensor.is_meta:
            return None
        # Lazy conjugation and negation are carried out first, so that equal numbers have equal bytes.
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        digest = hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()[:8]
        start_text = ", ".join(str(x) for x in flat[:_NUMBERS_SHOWN].tolist()) + ", .." * (len(flat) > _NUMBERS_SHOWN)
        lines.append(f"{aval_of_tensor(tensor)}: {start_text} (hash {digest})")
    return lines


_NUMBERS_SHOWN = 4


def _call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """Write an op with its arguments. Process groups are left out: each process names them otherwise."""
    named_args = [("", value) for value in args] + [(f"{keyword}=", value) for keyword, value in kwargs.items()]
    if is_collective(op):
        schema_pairs = zip((argument.name for argument in schema_arguments(op)), named_args, strict=False)
        named_args = [named_arg for name, named_arg in schema_pairs if name not in ("group_name", "src")]
    op_name = str(op) if isinstance(op, OpOverload) else str(getattr(op, "__name__", type(op).__name__))
    return f"{op_name}({', '.join(prefix + _text(value, names) for prefix, value in named_args)})"


def _text(argument: Any, names: Mapping[Any, str]) -> str:
    if isinstance(argument, Name):
        return names.get(argument, "?")
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_text(child, names) for child in argument)}]"
    if isinstance(argument, torch.device):
        return "device"
    if isinstance(argument, fx.GraphModule):
        return " ".join(argument.code.split())
    if isinstance(argument, Tensor):
        return str(aval_of_tensor(argument))
    return repr(argument) if isinstance(argument, _PLAIN) else type(argument).__name__


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.layout | torch.memory_format | Enum | None
