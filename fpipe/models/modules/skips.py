"""Skips in an nn.Sequential: a value put aside by one child and taken up by a later one, named where it happens.

    Sequential(down, Stash("a"), inner, Pop("a", join), up)        -->        a goes from its stage to Pop's, past inner

`from_sequential` makes the value an output of its stage, which only the stages that take it up read. So it travels
once, from its rank to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fpipe.graphs.tracing.keep import keep
from fpipe.model import Source


class Stash(nn.Module):
    """Put the value that passes aside under a name; it passes on as it is.

    >>> Stash("early")
    Stash('early')
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra_repr(self) -> str:
        """The name."""
        return repr(self.name)

    def forward(self, x: Any) -> Any:
        """Only a stage puts values aside."""
        raise RuntimeError(
            f"{self} puts a value aside inside a stage of fpipe.from_sequential; for the whole net in one, "
            "stages=1 and fpipe.reference."
        )


class Pop(nn.Module):
    """Take a value up again: `join(x, value)` goes on, by default the pair `(x, value)`. Several may take one value up.

    Args:
        name: of the `Stash`.
        join: say `torch.add`, or a function that concatenates. It has no parameters; put a module behind it.

    >>> Pop("early")
    Pop('early')
    """

    def __init__(self, name: str, join: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        if isinstance(join, nn.Module):
            raise TypeError(f"the join of Pop({name!r}) is a function; put the module {type(join).__name__} behind it.")
        given: object = join
        if given is not None and not callable(given):
            raise TypeError(f"the join of Pop({name!r}) is a function f(x, value), found {given!r}.")
        self.name, self.join = name, join

    def extra_repr(self) -> str:
        """The name."""
        return repr(self.name)

    def forward(self, x: Any) -> Any:
        """Only a stage has the value."""
        raise RuntimeError(
            f"{self} takes a value up inside a stage of fpipe.from_sequential; for the whole net in one, stages=1 and "
            "fpipe.reference."
        )


class Skips(NamedTuple):
    """The skips of one stage.

    Attributes:
        takes: the names of its further inputs, and `same`, the names that its own input has too.
        gives: the names of its further outputs.
        keywords: whether its first child takes its input, a dict, as keywords.
    """

    takes: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    keywords: bool = False


def run_children(children: Mapping[str, nn.Module], skips: Skips, x: Any) -> Any:
    """Run children one after the other, with what the stage takes up and puts aside."""
    aside: dict[str, Any] = {}
    if skips.takes:
        x, *taken = x
        aside = dict(zip(skips.takes, taken, strict=True))
    aside |= dict.fromkeys(skips.same, x)
    keywords = skips.keywords
    for number, child in enumerate(children.values()):
        if isinstance(child, Stash):
            aside[child.name] = x
            continue
        x = keep(x) if number else x  # what enters a layer
        if isinstance(child, Pop):
            x = (x, aside[child.name]) if child.join is None else child.join(x, aside[child.name])
        elif keywords:
            if not isinstance(x, Mapping) or not all(isinstance(name, str) for name in x):  # pyright: ignore[reportUnknownVariableType]
                raise TypeError(
                    f"with keywords=True the inputs are a dict of what {type(child).__name__}.forward takes by name, "
                    f"found {type(x).__name__}."  # pyright: ignore[reportUnknownArgumentType]
                )
            x, keywords = child(**x), False
        else:
            x = child(x)
    return (x, *(aside[name] for name in skips.gives)) if skips.gives else x


def plan_skips(groups: Sequence[Mapping[str, nn.Module]]) -> tuple[list[Skips], list[Source | tuple[Source, ...]]]:
    """The skips of each stage, and what each takes; a ValueError for names that are not put aside, then taken up."""
    homes: dict[str, int] = {}  # the stage that puts it aside
    sources: dict[str, Source] = {}  # where other stages find it
    gives: list[list[str]] = [[] for _ in groups]
    skips: list[Skips] = []
    inputs: list[Source | tuple[Source, ...]] = []
    unread: dict[str, None] = {}
    for number, children in enumerate(groups):
        modules = [*children.values()]
        before: Source = number - 1 if number else "batch"
        takes: dict[str, Source] = {}
        for at, (path, child) in enumerate(children.items()):
            for name, module in child.named_modules():
                if name and isinstance(module, Stash | Pop):
                    raise ValueError(
                        f"{module} is inside {path!r} as {name!r}; it stands among the children of the Sequential "
                        "itself."
                    )
            if isinstance(child, Stash):
                if child.name in homes:
                    raise ValueError(f"Stash({child.name!r}) stands twice; a name is put aside once.")
                homes[child.name], unread[child.name] = number, None
                if all(isinstance(other, Stash) for other in modules[:at]):
                    sources[child.name] = before
                elif all(isinstance(other, Stash) for other in modules[at:]):
                    sources[child.name] = number
            elif isinstance(child, Pop):
                name = child.name
                if name not in homes:
                    raise ValueError(f"Pop({name!r}) takes up what no Stash({name!r}) before it puts aside.")
                unread.pop(name, None)
                home = homes[name]
                if home != number and name not in sources:
                    gives[home].append(name)
                    sources[name] = home, len(gives[home])
                if home != number:
                    takes[name] = sources[name]
        further: dict[str, Source] = {name: source for name, source in takes.items() if source != before}
        skips.append(Skips(tuple(further), tuple(name for name in takes if name not in further)))
        inputs.append((before, *further.values()) if further else before)
    for name in unread:
        raise ValueError(f"nobody takes up what Stash({name!r}) puts aside; leave it out, or add Pop({name!r}).")
    return [skip._replace(gives=tuple(own)) for skip, own in zip(skips, gives, strict=True)], inputs
