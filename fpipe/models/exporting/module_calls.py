"""Find the calls of modules in an exported graph, and the repeating blocks among them, after which nets are cut.

wte  wpe  h.0  h.1  h.2  ln_f        -->        blocks h.0, h.1, h.2, each with the positions of its first and last node
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fpipe.graphs.tracing.marks import next_stage, seed_stages
from fpipe.models.exporting.export_net import call_arguments, without_cache
from fpipe.models.exporting.net_graph import without_checkpoints
from fpipe.torch_private.fx import NO_MODULE


@dataclass(eq=False)
class ModuleCall:
    """One call of a module: its path, its class, and the positions of its first and its last node in the graph.

    Attributes:
        has_params: whether the module has parameters.
        call_index: how many calls of the same module come before it.
        children: the calls that it makes, in order.
    """

    path: str
    kind: str
    start: int
    end: int
    call_index: int = 0
    has_params: bool = True
    children: list[ModuleCall] = field(default_factory=list["ModuleCall"])

    def walk(self) -> Iterator[ModuleCall]:
        """Yield this call and all calls inside it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


def module_calls_of(nodes: Sequence[fx.Node], params: Iterable[str]) -> ModuleCall:
    """Return the tree of module calls, from the module stack of each node; `params` are the names of parameters."""
    paths_with_params = {name[:dot] for name in params for dot, letter in enumerate(name) if letter == "."}
    root = ModuleCall("", "", 0, len(nodes) - 1)
    calls: dict[str, ModuleCall] = {}
    for position, node in enumerate(nodes):
        caller = root
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if not path or path == NO_MODULE:
                continue
            # A key tells calls of one module apart: torch.export appends `@1` to that of the second.
            if key not in calls:
                calls[key] = ModuleCall(
                    path, kind, position, position, int(key.partition("@")[2] or 0), path in paths_with_params
                )
                caller.children.append(calls[key])
            caller = calls[key]
            caller.end = position
    return root


def split_into_blocks(root: ModuleCall, min_blocks: int) -> list[ModuleCall]:
    """Return the outermost repeating blocks of a net, such as the layers of a ModuleList.

    Where these are fewer than `min_blocks`, they are split into the repeating blocks inside them. Where even that gives
    too few, the net is split into the modules that it calls, level by level.

    >>> layers = [ModuleCall(f"net.{index}", "Linear", index, index) for index in range(3)]
    >>> root = ModuleCall("", "", 0, 2, children=[ModuleCall("net", "", 0, 2, children=layers)])
    >>> [call.path for call in split_into_blocks(root, 2)]
    ['net.0', 'net.1', 'net.2']
    """
    # First by repeating blocks, then by all children, each as deep as needed.
    for split in (_repeating_blocks, attrgetter("children")):
        blocks = split(root) or [root]
        while len(blocks) < min_blocks:
            finer = [block for call in blocks for block in (split(call) or [call])]
            if finer == blocks:
                break
            blocks = finer
        if len(blocks) >= min_blocks:
            break
    return blocks


def _repeating_blocks(call: ModuleCall) -> list[ModuleCall]:
    """Return the outermost repeating blocks inside a call."""
    # Repeating are children of one list of which two have one class, and several calls of one module with parameters. A
    # Sequential that is a list member by its name only, as layer1 to layer4 of a ResNet, is unpacked: its blocks count.
    list_counts = Counter((_list_name(child), child.kind) for child in call.children)
    repeating = {list_name for (list_name, _), count in list_counts.items() if count > 1 and list_name is not None}
    call_counts = Counter(child.path for child in call.children if child.has_params)
    blocks: list[ModuleCall] = []
    for child in call.children:
        repeats = _list_name(child) in repeating or call_counts[child.path] > 1
        is_sequential = child.kind == "torch.nn.modules.container.Sequential"
        is_unpacked = is_sequential and not child.path.rpartition(".")[2].isdigit()
        inner_blocks = [] if repeats and not is_unpacked else _repeating_blocks(child)
        blocks += inner_blocks or ([child] if repeats else [])
    return blocks


def _list_name(call: ModuleCall) -> str | None:
    """Return the list that a module is in by its name: 3, encoder_layer_3, inception4b, but no leaf like conv3."""
    parent, _, name = call.path.rpartition(".")
    stem = _NUMBER.sub("", name)
    return f"{parent}.{stem}" if stem != name and (not stem or call.children) else None


_NUMBER = re.compile(r"\d+[a-z]?$")


def last_calls_of(root: ModuleCall, paths: Sequence[str]) -> list[ModuleCall]:
    """Return the last call of each of these modules or lists of modules, or raise ValueError with similar paths."""
    calls = [call for call in root.walk() if call.path]
    last_calls: list[ModuleCall] = []
    for path in paths:
        matching_calls = [call for call in calls if call.path == path or call.path.startswith(f"{path}.")]
        if not matching_calls:
            similar_paths = get_close_matches(path, [*dict.fromkeys(call.path for call in calls)], 3, 0.5)
            hint = f"; close to it are {', '.join(map(repr, similar_paths))}" if similar_paths else ""
            raise ValueError(f"cuts= names {path!r}, but no module of that path is called when the net runs{hint}.")
        # The call that ends last; of calls that end at one node, the outermost.
        last_calls.append(max(matching_calls, key=lambda call: (call.end, -len(call.path))))
    return last_calls


def describe_calls(root: ModuleCall, start: int, end: int) -> str:
    """Name the outermost calls that lie in a part of the graph; where none does, the calls that overlap with it.

    >>> blocks = [ModuleCall(f"h.{index}", "Block", index, index) for index in range(4)]
    >>> describe_calls(ModuleCall("", "", 0, 3, children=blocks), 1, 3)
    'h.1 to h.3'
    """
    calls = [*_calls_within(root, start, end)] or [*_calls_overlapping(root, start, end)]
    groups = groupby(dict.fromkeys(call.path for call in calls), lambda path: path.rpartition(".")[0])
    descriptions: list[str] = []
    for parent, group in groups:
        paths = list(group)
        is_numbered = parent and len(paths) > 2 and all(path.rpartition(".")[2].isdigit() for path in paths)
        descriptions += [f"{paths[0]} to {paths[-1]}"] if is_numbered else paths
    return ", ".join(descriptions)


def _calls_within(call: ModuleCall, start: int, end: int) -> Iterable[ModuleCall]:
    for child in call.children:
        if start <= child.start and child.end <= end:
            yield child
        elif child.start <= end and child.end >= start:
            yield from _calls_within(child, start, end)


def _calls_overlapping(call: ModuleCall, start: int, end: int) -> Iterable[ModuleCall]:
    for child in call.children:
        if child.start <= end and child.end >= start:
            yield from [*_calls_overlapping(child, start, end)] or [child]


class NetFunction:
    """The loss of a net as a pure function of its parameters by name, and a batch.

    The random numbers are those of the stages, which end after the calls `end_calls`.
    """

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Any], end_calls: Sequence[ModuleCall]) -> None:
        self.net, self.loss, self.end_calls = net, loss, end_calls

    def __call__(self, params: dict[str, Tensor], batch: Any, key: int | None, microbatch: int) -> Any:
        """Return the loss of a batch, with the random numbers of a step's microbatch, or torch's own without a key.

        Buffers among the parameters are replaced by what the net makes of them; others of the net are not written.
        """
        inputs, target = batch
        args, kwargs = call_arguments(inputs)
        buffers = {name: buffer.detach().clone() for name, buffer in self.net.named_buffers()}
        tensors = {**buffers, **params}
        # A checkpoint calls modules again in the backward, when functional_call has put their own parameters back.
        with (
            nullcontext() if key is None else seed_stages(key, microbatch),
            without_cache(self.net),
            self._advance_stages(),
            without_checkpoints(),
        ):
            output = torch.func.functional_call(self.net, tensors, args, kwargs)
        # A net may assign new tensors to its buffers, which torch puts into the dict that it was handed.
        params.update((name, tensors[name]) for name in params if name in buffers)
        return self.loss(output, target)

    @contextmanager
    def _advance_stages(self) -> Generator[None]:
        """Switch to the random numbers of the next stage after each call that ends a stage."""
        # A module may be called several times, and a stage ends after one of these calls.
        call_counts = Counter[str]()
        stage_ends = {(call.path, call.call_index) for call in self.end_calls}

        def after_call(path: str, *_: Any) -> None:
            if (path, call_counts[path]) in stage_ends:
                next_stage()
            call_counts[path] += 1

        with ExitStack() as hooks:
            for path in {call.path for call in self.end_calls}:
                hook = self.net.get_submodule(path).register_forward_hook(partial(after_call, path))
                hooks.callback(hook.remove)
            yield
