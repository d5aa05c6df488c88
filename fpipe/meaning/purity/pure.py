"""Refuse what a pure function does not do: write memory that its call neither made nor was handed as state.

    y = x * 2; y.add_(1)              fine: the call made y
    x.add_(1)                         refused before the write, on the line that does it
    self.mean = 0.9 * self.mean       the same, where it is a buffer

So there is nothing to restore, but for what a trace leaves in attributes of modules. The other Python of a stage runs
once, when the stage is traced, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import Attributes, Modules, closed_over, modules_of
from fpipe.meaning.purity.own_memory import OwnMemory, memory
from fpipe.positional_stage import PositionalStage, of_net
from fpipe.torch_internals import held_by, is_write_to_leaf, told_of_bindings


class Impure(RuntimeError):
    """A stage or a loss does what no pure function does."""


@contextmanager
def pure(function: Any, who: str, given: Any = (), *, tracing: bool = False) -> Generator[OwnMemory]:
    """While it lasts a stage, an update or a loss runs, which may not write what it is `given`.

    If `tracing`, it runs on fake tensors, and attributes of modules are restored.

    Raises:
        Impure: it writes other memory than its own, or binds another tensor in the place of a buffer.
        Untraceable: it binds a tensor to a plain attribute that it reads, which is lost in a trace.
    """
    function = of_net(function) or function
    lock = function.lock if isinstance(function, PositionalStage) else nullcontext()
    with lock:  # another thread swaps the tensors of modules while it runs them
        modules = modules_of(function)
        attributes = Attributes(modules, contents=tracing)
        held = None if tracing else _Held(function, given)
        mode = OwnMemory(partial(_refuse, function, who, given))
        try:
            with _bound(function, who, modules, mode), mode:
                yield mode
        except RuntimeError as error:
            if is_write_to_leaf(error):  # autograd was faster
                raise Impure(_GIVEN.format(who)) from error
            raise
        finally:
            changed = attributes.changed_tensor(who, mode.read)
            if tracing:
                attributes.restore()
            swapped = None if held is None else held.swapped()
        if swapped is not None:
            raise Impure(_DATA.format(who, swapped))
        if changed is not None:
            raise (Untraceable if tracing else Impure)(changed)


class _Held:
    """The memory of a module's tensors and of what it is given: no op writes it where one assigns a .data."""

    def __init__(self, function: Any, given: Any) -> None:
        own = function.named_tensors() if isinstance(function, PositionalStage) else ()
        self.own = [(name, one, one.detach(), memory(one)) for name, one in own]
        self.given = [(one, memory(one)) for one in tree.leaves(given) if isinstance(one, Tensor)]

    def swapped(self) -> str | None:
        """Describe a tensor that has other memory now, and give the module's tensors theirs again."""
        moved = [(name, one, before) for name, one, before, place in self.own if memory(one) != place]
        for _, one, before in moved:
            one.data = before
        if moved:
            return f"buffer or parameter {moved[0][0]!r}"
        return "what it was given" if any(memory(one) != place for one, place in self.given) else None


def _bound(function: Any, who: str, modules: Modules, mode: OwnMemory) -> AbstractContextManager[None]:
    """Meanwhile a module's tensor is bound anew only where the one before is the call's own, as state is that
    functional_call has put there."""
    known = {id(module): path for path, module in modules}

    def bind(module: nn.Module, name: str) -> None:
        held = held_by(module)
        before = held.buffers.get(name, held.parameters.get(name))
        new = before is None and id(module) not in known  # its __init__ may run
        if not new and not (before is not None and mode.is_own(memory(before))):
            path = known.get(id(module), type(module).__name__)
            whole = f"{path}.{name}" if path else name
            raise Impure(refused(who, "binds {} anew", whole, isinstance(function, PositionalStage)))

    return told_of_bindings(bind)


_GIVEN = (
    "{} writes what it was given in place; a stage and a loss are pure functions. Work on a copy, or use inplace=False."
)


_DATA = (
    "{} assigns the .data of {}, which no op tells of; a stage and a loss are pure functions. Of a buffer, assign the "
    "tensor itself: then it is state, and from_sequential(..., example=inputs) finds it."
)


def _refuse(function: Any, who: str, given: Any, tensor: Tensor, op: Any) -> None:
    """Raise for a write, and name the tensor."""
    place = memory(tensor)
    if any(place == memory(leaf) for leaf in tree.leaves(given) if isinstance(leaf, Tensor)):
        raise Impure(f"{_GIVEN.format(who)} The op is {op}.")
    of_module = isinstance(function, PositionalStage)
    named = function.named_tensors() if of_module else closed_over(function)
    found = next((name for name, one in named if memory(one) == place), None)
    raise Impure(refused(who, f"writes {{}} in place ({op})", found, of_module))


def refused(who: str, does: str, name: str | None, of_module: bool) -> str:
    """The sentence for memory that is not the function's own: `does` is what it does to {}."""
    if of_module:
        what = "its parameters or buffers" if name is None else f"buffer or parameter {name!r}"
        return (
            f"{who} {does.format(what)}. What a module remembers is state: cut the net by from_sequential(..., "
            f"example=inputs), or say state=[{name or 'name'!r}]. Or switch the writing off, say by .eval()."
        )
    what = "a tensor" if name is None else repr(name)
    return (
        f"{who} {does.format(what)}, which it closes over; a stage and a loss are pure functions. Hand it in, among "
        "params or as state; of a module call .eval(), or cut the net by from_sequential."
    )
