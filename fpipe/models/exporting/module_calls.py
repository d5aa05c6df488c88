"""Find the calls of modules in an exported graph, the blocks that repeat among them, and where to cut after which.

wte  wpe  h.0  h.1  h.2  ln_f        -->        blocks h.0, h.1, h.2, each the nodes from its first to its last
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fpipe.meaning.purity.attributes import Attributes
from fpipe.models.tracing.boundary import next_stage, seeding
from fpipe.models.tracing.export_net import call_of, without_cache
from fpipe.torch_private.fx import NO_MODULE


@dataclass(eq=False)
class Call:
    """One call of a module: its path, its class, and the positions of its first and its last node in the graph.

    Attributes:
        trains: whether the module has parameters.
        number: how many calls of the same module come before it.
        children: the calls that it makes, in order.
    """

    path: str
    kind: str
    start: int
    end: int
    number: int = 0
    trains: bool = True
    children: list[Call] = field(default_factory=list["Call"])

    def all(self) -> Iterator[Call]:
        """The call, and all that are made in it."""
        yield self
        for child in self.children:
            yield from child.all()


def calls_of(nodes: Sequence[fx.Node], params: Iterable[str]) -> Call:
    """The call of the whole net, by what each node says of the modules that it is in; `params` are its parameters."""
    training = {name[:dot] for name in params for dot, letter in enumerate(name) if letter == "."}
    root = Call("", "", 0, len(nodes) - 1)
    calls: dict[str, Call] = {}
    for position, node in enumerate(nodes):
        caller = root
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if not path or path == NO_MODULE:
                continue
            if key not in calls:
                calls[key] = Call(path, kind, position, position, int(key.partition("@")[2] or 0), path in training)
                caller.children.append(calls[key])
            caller = calls[key]
            caller.end = position
    return root


def blocks_of(root: Call, least: int) -> list[Call]:
    """The outermost blocks that repeat, such as the layers of a ModuleList; where these are less than `least`, those
    inside them, and at last the modules that are called.

    >>> chain = [Call(f"net.{at}", "Linear", at, at) for at in range(3)]
    >>> [call.path for call in blocks_of(Call("", "", 0, 2, children=[Call("net", "", 0, 2, children=chain)]), 2)]
    ['net.0', 'net.1', 'net.2']
    """
    for inner in (_repeated, attrgetter("children")):
        blocks = inner(root) or [root]
        while len(blocks) < least:
            finer = [block for call in blocks for block in (inner(call) or [call])]
            if finer == blocks:
                break
            blocks = finer
        if len(blocks) >= least:
            break
    return blocks


def _repeated(call: Call) -> list[Call]:
    """The outermost blocks inside a call that repeat: children of one list of which two are of one class, and the calls
    of one module that has parameters. Of a list by names only, as layer1 to layer4 of a ResNet, they are what its
    Sequentials have inside."""
    lists = Counter((_list_of(child), child.kind) for child in call.children)
    repeating = {place for (place, _), times in lists.items() if times > 1 and place is not None}
    many = Counter(child.path for child in call.children if child.trains)
    blocks: list[Call] = []
    for child in call.children:
        repeats = _list_of(child) in repeating or many[child.path] > 1
        is_sequential = child.kind == "torch.nn.modules.container.Sequential"
        opened = is_sequential and not child.path.rpartition(".")[2].isdigit()
        inside = [] if repeats and not opened else _repeated(child)
        blocks += inside or ([child] if repeats else [])
    return blocks


def _list_of(call: Call) -> str | None:
    """The list that a module is in, by its name (3, encoder_layer_3, inception4b); conv3, which calls none, is not."""
    above, _, name = call.path.rpartition(".")
    word = _NUMBER.sub("", name)
    return f"{above}.{word}" if word != name and (not word or call.children) else None


_NUMBER = re.compile(r"\d+[a-z]?$")


def ends_of(root: Call, paths: Sequence[str]) -> list[Call]:
    """The last call of each of these modules, or in one of these lists of modules; a ValueError names close ones."""
    calls = [call for call in root.all() if call.path]
    ends: list[Call] = []
    for path in paths:
        inside = [call for call in calls if call.path == path or call.path.startswith(f"{path}.")]
        if not inside:
            near = get_close_matches(path, [*dict.fromkeys(call.path for call in calls)], 3, 0.5)
            hint = f"; close to it are {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"cuts= names {path!r}, but no module of that path is called when the net runs{hint}.")
        ends.append(max(inside, key=lambda call: (call.end, -len(call.path))))
    return ends


def in_words(root: Call, start: int, end: int) -> str:
    """The outermost calls that lie wholly in a part of the graph, in words; where none does, those it has parts of.

    >>> in_words(Call("", "", 0, 3, children=[Call(f"h.{at}", "Block", at, at) for at in range(4)]), 1, 3)
    'h.1 to h.3'
    """
    calls = [*_inside(root, start, end)] or [*_partly(root, start, end)]
    rows = groupby(dict.fromkeys(call.path for call in calls), lambda path: path.rpartition(".")[0])
    words: list[str] = []
    for above, group in rows:
        paths = list(group)
        numbered = above and len(paths) > 2 and all(path.rpartition(".")[2].isdigit() for path in paths)
        words += [f"{paths[0]} to {paths[-1]}"] if numbered else paths
    return ", ".join(words)


def _inside(call: Call, start: int, end: int) -> Iterable[Call]:
    for child in call.children:
        if start <= child.start and child.end <= end:
            yield child
        elif child.start <= end and child.end >= start:
            yield from _inside(child, start, end)


def _partly(call: Call, start: int, end: int) -> Iterable[Call]:
    for child in call.children:
        if child.start <= end and child.end >= start:
            yield from [*_partly(child, start, end)] or [child]


class NetFunction:
    """The loss of a net as a function of its parameters by name, and a batch; nothing of the net changes. Random
    numbers are those of its stages, which end after the calls `ends`."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Any], ends: Sequence[Call]) -> None:
        self.net, self.loss, self.ends = net, loss, ends

    def __call__(self, params: Mapping[str, Tensor], batch: Any, key: int | None, microbatch: int) -> Any:
        """The result of the loss; the random numbers are those of a step's microbatch."""
        inputs, target = batch
        args, kwargs = call_of(inputs)
        buffers = {name: held.detach().clone() for name, held in self.net.named_buffers()}
        attributes = Attributes([*self.net.named_modules()], contents=True)
        try:
            with nullcontext() if key is None else seeding(key, microbatch), without_cache(self.net), self._ending():
                made = torch.func.functional_call(self.net, {**buffers, **params}, args, kwargs)
        finally:
            attributes.restore()
        return self.loss(made, target)

    @contextmanager
    def _ending(self) -> Generator[None]:
        """Let the next stage begin where the calls end."""
        calls = Counter[str]()
        wanted = {(call.path, call.number) for call in self.ends}

        def ended(path: str, *_: Any) -> None:
            if (path, calls[path]) in wanted:
                next_stage()
            calls[path] += 1

        with ExitStack() as hooks:
            for path in {call.path for call in self.ends}:
                hook = self.net.get_submodule(path).register_forward_hook(partial(ended, path))
                hooks.callback(hook.remove)
            yield
