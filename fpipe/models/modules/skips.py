"""Skip connections in an nn.Sequential: one child stashes a value under a name, a later child pops it.

    Sequential(down, Stash("a"), inner, Pop("a", join), up)        -->        a goes from its stage to Pop's, past inner

`from_sequential` makes the value an output of its stage, which only the stages that pop it read. So it travels once,
from its rank to theirs, and not through the stages between (torchgpipe's portals do the same).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fpipe.graphs.tracing.marks import keep
from fpipe.limits import checked_init
from fpipe.model import Source


class _NamedSkip(nn.Module):
    """An end of a skip, which runs only as a part of a stage."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra_repr(self) -> str:
        """Return the name, for the module's repr."""
        return repr(self.name)

    def forward(self, x: Any) -> Any:
        """Raise RuntimeError: a skip needs fpipe.from_sequential, which runs the stages of its two ends."""
        raise RuntimeError(
            f"{self} runs only inside a stage of fpipe.from_sequential. For the whole net use stages=1 and "
            "fpipe.reference."
        )


@checked_init
class Stash(_NamedSkip):
    """Stash the value that passes, under a name, and pass it on unchanged.

    >>> Stash("early")
    Stash('early')
    """


@checked_init
class Pop(_NamedSkip):
    """Pop a stashed value: `join(x, value)` goes on, by default the pair `(x, value)`. Several may pop one value.

    Args:
        name: of the `Stash`.
        join: say `torch.add`, or a function that concatenates. It has no parameters; put a module behind it.

    >>> Pop("early")
    Pop('early')
    """

    def __init__(self, name: str, join: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__(name)
        if isinstance(join, nn.Module):
            raise TypeError(f"the join of Pop({name!r}) is a function; put the module {type(join).__name__} behind it.")
        self.join = join


class Skips(NamedTuple):
    """The skips of one stage.

    Attributes:
        popped: the names of its inputs after the first.
        popped_input: the names of stashed values that are its first input itself.
        stashed: the names of its outputs after the first.
        inputs_are_keywords: whether its first child takes its input, a dict, as keywords.
    """

    popped: tuple[str, ...] = ()
    popped_input: tuple[str, ...] = ()
    stashed: tuple[str, ...] = ()
    inputs_are_keywords: bool = False


def run_children(children: Mapping[str, nn.Module], skips: Skips, x: Any) -> Any:
    """Run the children of a stage in order, with the values that they stash and pop."""
    value_by_name: dict[str, Any] = {}
    if skips.popped:
        x, *popped_values = x
        value_by_name = dict(zip(skips.popped, popped_values, strict=True))
    value_by_name |= dict.fromkeys(skips.popped_input, x)
    pass_keywords = skips.inputs_are_keywords
    for index, child in enumerate(children.values()):
        if isinstance(child, Stash):
            value_by_name[child.name] = x
            continue
        # fpipe.checkpoint(grain="layer") keeps what enters a layer. The stage's input is kept without a mark.
        x = keep(x) if index else x
        if isinstance(child, Pop):
            x = (x, value_by_name[child.name]) if child.join is None else child.join(x, value_by_name[child.name])
        elif pass_keywords:
            if not isinstance(x, Mapping) or not all(isinstance(name, str) for name in x):  # pyright: ignore[reportUnknownVariableType]
                raise TypeError(
                    f"with keywords=True the inputs are a dict of what {type(child).__name__}.forward takes by name, "
                    f"found {type(x).__name__}."  # pyright: ignore[reportUnknownArgumentType]
                )
            x, pass_keywords = child(**x), False
        else:
            x = child(x)
    return (x, *(value_by_name[name] for name in skips.stashed)) if skips.stashed else x


def plan_skips(groups: Sequence[Mapping[str, nn.Module]]) -> tuple[list[Skips], list[Source | tuple[Source, ...]]]:
    """Return the skips of each stage and the sources of its inputs.

    Raises:
        ValueError: a name is stashed twice, popped before it is stashed, never popped, or inside a nested module.
    """
    # One walk over all children in order. A stashed value is identified by its source, the port that carries it to
    # other stages. A value that passes a stage boundary anyway needs no port of its own:
    #     stage k: [Stash("a"), ..]     a is the stage's input, which is the output of stage k - 1 (or the batch)
    #     stage k: [.., Stash("a")]     a is the stage's output, port 0
    #     stage k: [.., Stash("a"), ..] a gets the next free port of stage k once a later stage pops it
    stage_by_stash: dict[str, int] = {}
    source_by_name: dict[str, Source] = {}
    stashed_by_stage: list[list[str]] = [[] for _ in groups]
    skips: list[Skips] = []
    input_by_stage: list[Source | tuple[Source, ...]] = []
    unpopped: dict[str, None] = {}
    for stage, children in enumerate(groups):
        modules = [*children.values()]
        previous: Source = stage - 1 if stage else "batch"
        popped: dict[str, Source] = {}
        for index, (path, child) in enumerate(children.items()):
            # 1. Refuse a Stash or Pop inside of another module, where no boundary of stages can lie.
            for name, module in child.named_modules():
                if name and isinstance(module, Stash | Pop):
                    raise ValueError(
                        f"{module} is inside {path!r} as {name!r}; make it a child of the Sequential itself."
                    )
            # 2. Give a stashed value its source, if a boundary has it anyway.
            if isinstance(child, Stash):
                if child.name in stage_by_stash:
                    raise ValueError(f"Stash({child.name!r}) stands twice; give each a name of its own.")
                stage_by_stash[child.name], unpopped[child.name] = stage, None
                if all(isinstance(sibling, Stash) for sibling in modules[:index]):
                    source_by_name[child.name] = previous
                elif all(isinstance(sibling, Stash) for sibling in modules[index:]):
                    source_by_name[child.name] = stage
            # 3. Connect a popped value; from another stage it comes through a port.
            elif isinstance(child, Pop):
                name = child.name
                if name not in stage_by_stash:
                    raise ValueError(f"Pop({name!r}) has no Stash({name!r}) before it.")
                unpopped.pop(name, None)
                home = stage_by_stash[name]
                if home != stage and name not in source_by_name:
                    stashed_by_stage[home].append(name)
                    source_by_name[name] = home, len(stashed_by_stage[home])
                if home != stage:
                    popped[name] = source_by_name[name]
        # 4. List the stage's inputs. The previous stage's main output is the first one already.
        received: dict[str, Source] = {name: source for name, source in popped.items() if source != previous}
        skips.append(Skips(tuple(received), tuple(name for name in popped if name not in received)))
        input_by_stage.append((previous, *received.values()) if received else previous)
    for name in unpopped:
        raise ValueError(f"Stash({name!r}) is never popped; leave it out, or add Pop({name!r}).")
    return [
        stage_skips._replace(stashed=tuple(names)) for stage_skips, names in zip(skips, stashed_by_stage, strict=True)
    ], input_by_stage
