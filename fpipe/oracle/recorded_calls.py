"""The calls of a recorded microbatch, as a tree, and the calls that the reference can replay.

calls with their parents, a net        -->        for each call: is it judged, is it a stub in its parent's replay
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fpipe.oracle.recorded_step import RecordedStep
from fpipe.recording.record_files import hashes_of, is_plain

Call = dict[str, Any]


class RecordedCalls:
    """The calls of a microbatch on one rank, by their number in the order of the forward.

    Attributes:
        partial_modules: the modules of which this rank has some parts only.
        is_judged: for each call whether the reference can replay it.
        has_stub: for each call whether its recorded output stands for it in the replay of the call around it.
        roots: how many calls stand in no other: with a pipeline, one for each microbatch.
        are_whole: whether gradients of parameters can be complete, since every call is replayed.
    """

    def __init__(self, net: nn.Module, rank: RecordedStep, microbatch: int) -> None:
        recorded = rank.header["microbatches"][microbatch]
        calls: list[Call] = recorded["calls"]
        self._calls, self._choices = calls, recorded["choices"]
        self._modules, self.partial_modules = dict(net.named_modules()), rank.partial_modules(net)
        self.is_judged = [self._can_judge(call) for call in calls]
        # An output that cannot be built again is judged, but has no stub. A module of which this rank has some parts
        # has one: its parent is judged given its output.
        self.has_stub = [
            (is_judged or call["module"] in self.partial_modules) and is_plain(call["output"])
            for call, is_judged in zip(calls, self.is_judged, strict=True)
        ]
        # A pipeline may run its stages once more without a backward, to learn their shapes.
        self.roots = sum(call["parent"] is None and any(call["grads"].values()) for call in calls)
        # The root of a pipeline's stage only calls its layers.
        unjudged = [number for number, is_judged in enumerate(self.is_judged) if not is_judged]
        with_params = [i for i in unjudged if [*self._modules.get(calls[i]["module"], net).parameters(recurse=False)]]
        self.are_whole = all(self.judged_around(i) and not self.has_stub[i] for i in with_params)
        # A module without hooks is replayed as a part of one around it, which a pipeline's stage may not have.
        judged_modules = {call["module"] for call, is_judged in zip(calls, self.is_judged, strict=True) if is_judged}
        self.are_whole &= all(judged_modules.intersection(_modules_around(name)) for name in rank.before)

    def __getitem__(self, number: int) -> Call:
        return self._calls[number]

    def __len__(self) -> int:
        return len(self._calls)

    def children_of(self, number: int) -> list[int]:
        """Return the calls whose recorded outputs stand for them in the replay of a call."""
        return [i for i in range(number + 1, len(self._calls)) if self.has_stub[i] and self._parent(i) == number]

    def choices_in(self, number: int) -> Iterator[str]:
        """Yield the hashes of what each top-k took in a call, and in the calls in it that no stub stands for."""
        for choice in self._choices:
            line = self.calls_around(choice["call"])
            if number in line and not any(self.has_stub[i] for i in line[: line.index(number)]):
                yield choice["indices"]

    def calls_around(self, number: int | None) -> list[int]:
        """Return a call and all calls around it, from the inside."""
        line = list[int]()
        while number is not None:
            line.append(number)
            number = self._calls[number]["parent"]
        return line

    def judged_around(self, number: int) -> list[int]:
        """Return the judged calls among a call and those around it, up to a module that is split over ranks."""
        line = list[int]()
        for ancestor in self.calls_around(number):
            if self.is_judged[ancestor]:
                line.append(ancestor)
            elif self.has_stub[ancestor] and ancestor != number:
                break
        return line

    def _can_judge(self, call: Call) -> bool:
        # A generator of another device draws other numbers than this one.
        is_known = (
            call["module"] in self._modules
            and call["module"] not in self.partial_modules
            and not call["draws_on_device"]
        )
        return is_known and is_plain(module_call(call)["args"]) and is_plain(module_call(call)["kwargs"])

    def _parent(self, number: int) -> int | None:
        """Return the nearest judged call around a call, None if a stub hides it."""
        line = self.judged_around(number)
        return next((ancestor for ancestor in line if ancestor != number), None)


def module_call(call: Call) -> Call:
    """Return a call as its module sees it, inside of hooks that turn parts into DTensors and back."""
    return call.get("inner", call)


def _modules_around(param: str) -> list[str]:
    """Return the names of the modules that have a parameter, from the outside.

    >>> _modules_around("blocks.0.weight")
    ['', 'blocks', 'blocks.0']
    """
    names = param.split(".")[:-1]
    return [".".join(names[:depth]) for depth in range(len(names) + 1)]


def input_hashes(call: Call) -> list[str]:
    """Return the hashes of the tensors that a call takes, by position and then by keyword."""
    return [*hashes_of(call["args"]), *hashes_of(call["kwargs"])]
