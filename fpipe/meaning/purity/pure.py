"""Raise Impure when a stage, a loss or an update writes memory that its call did not make.

    y = x * 2; y.add_(1)              fine: the call made y
    x.add_(1)                         refused before the write, on the line that does it
    self.mean = 0.9 * self.mean       refused where `mean` is a buffer that the call was not handed as state

A write is refused before it happens, so nothing has to be restored but the attributes of modules that a trace changed.
All other Python of a stage runs once, when the stage is traced, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.as_written import as_written
from fpipe.meaning.purity.attributes import (
    AttributeSnapshot,
    NamedModules,
    closed_over_tensors,
    modules_of,
    quote_user_line,
)
from fpipe.meaning.purity.write_guard import WriteGuard, storage_key
from fpipe.positional_stage import PositionalStage, net_stage_of
from fpipe.torch_internals import direct_members, is_leaf_write_error, is_subclass_creation_error, watch_bindings


class Impure(RuntimeError):
    """A stage or a loss writes memory that is not its own, so it is no pure function."""


@contextmanager
def pure(function: Any, label: str, args: Any = (), *, tracing: bool = False) -> Generator[WriteGuard]:
    """Watch a call of a stage, a loss or an update in this context, and raise if the call is impure.

    Args:
        function: what is called in the context.
        label: the function's name in errors.
        args: a pytree of tensors that the call may read and not write.
        tracing: whether the call runs on fake tensors; then attributes of modules are restored after it.

    Raises:
        Impure: the call writes memory that it did not make, or binds another tensor to a buffer's name.
        Untraceable: the call binds a tensor to a plain attribute that it reads, which a trace would lose.
    """
    function = net_stage_of(function) or function
    lock = function.lock if isinstance(function, PositionalStage) else nullcontext()
    # Ranks are threads that may share a module, and each swaps its own tensors into the module while it runs it.
    with lock:
        named_modules = modules_of(function)
        snapshot = AttributeSnapshot(named_modules, with_containers=tracing)
        # Fake tensors have no data that an assignment of .data could replace.
        storage_record = None if tracing else _StorageRecord(function, args)
        guard = WriteGuard(partial(_refuse_write, function, label, args))
        try:
            with as_written(), _refuse_rebinding(function, label, named_modules, guard), guard:
                yield guard
        except RuntimeError as error:
            # Autograd refuses a write to a leaf that wants a gradient before the guard sees the op.
            if is_leaf_write_error(error):
                raise Impure(_WRITES_ARGUMENT.format(label)) from error
            if is_subclass_creation_error(error):
                raise RuntimeError(
                    f"{label} makes a tensor of a class that torch does not make under a dispatch mode, such as "
                    f"causal_lower_right(..). Make it once, outside of the stage; {quote_user_line(error)}"
                ) from error
            raise
        finally:
            rebound_tensor = snapshot.describe_rebound_tensor(label, guard.storages_read)
            if tracing:
                snapshot.restore()
            swapped_tensor = None if storage_record is None else storage_record.restore_swapped()
        if swapped_tensor is not None:
            raise Impure(_ASSIGNS_DATA.format(label, swapped_tensor))
        if rebound_tensor is not None:
            raise (Untraceable if tracing else Impure)(rebound_tensor)


class _StorageRecord:
    """The storages of a module's tensors and of a call's arguments before the call.

    Assigning `tensor.data` gives a tensor another storage without any op that a dispatch mode would see, so the
    storages are compared after the call.
    """

    def __init__(self, function: Any, arguments: Any) -> None:
        named_tensors = function.named_tensors() if isinstance(function, PositionalStage) else ()
        self.module_tensors = [(path, tensor, tensor.detach(), storage_key(tensor)) for path, tensor in named_tensors]
        self.argument_tensors = [
            (tensor, storage_key(tensor)) for tensor in tree.leaves(arguments) if isinstance(tensor, Tensor)
        ]

    def restore_swapped(self) -> str | None:
        """Return a description of a tensor whose storage has changed, and give the module's tensors their old ones."""
        swapped = [
            (path, tensor, original)
            for path, tensor, original, recorded_key in self.module_tensors
            if storage_key(tensor) != recorded_key
        ]
        for _, tensor, original in swapped:
            tensor.data = original
        if swapped:
            return f"buffer or parameter {swapped[0][0]!r}"
        argument_is_swapped = any(storage_key(tensor) != key for tensor, key in self.argument_tensors)
        return "what it was given" if argument_is_swapped else None


def _refuse_rebinding(
    function: Any, label: str, named_modules: NamedModules, guard: WriteGuard
) -> AbstractContextManager[None]:
    """Refuse, in this context, that a module's tensor is replaced by another one.

    Only a tensor that the call made may be replaced: state is a copy that the step put into the module before.
    """
    path_by_id = {id(module): path for path, module in named_modules}

    def bind(module: nn.Module, name: str) -> None:
        registries = direct_members(module)
        replaced = registries.buffers.get(name, registries.parameters.get(name))
        # A module that the call makes registers its tensors in __init__.
        is_initialising = replaced is None and id(module) not in path_by_id
        if not is_initialising and not (replaced is not None and guard.may_write(storage_key(replaced))):
            path = path_by_id.get(id(module), type(module).__name__)
            tensor_path = f"{path}.{name}" if path else name
            is_module = isinstance(function, PositionalStage)
            raise Impure(foreign_write_message(label, "binds {} anew", tensor_path, is_module))

    return watch_bindings(bind)


_WRITES_ARGUMENT = (
    "{} writes what it was given in place; a stage and a loss are pure functions. Work on a copy, or use inplace=False."
)


_ASSIGNS_DATA = (
    "{} assigns the .data of {}, which no op tells of. Assign the buffer itself; from_sequential(..., batch=batch) "
    "finds it."
)


def _refuse_write(function: Any, label: str, arguments: Any, tensor: Tensor, op_overload: Any) -> None:
    key = storage_key(tensor)
    if any(key == storage_key(leaf) for leaf in tree.leaves(arguments) if isinstance(leaf, Tensor)):
        raise Impure(f"{_WRITES_ARGUMENT.format(label)} The op is {op_overload}.")
    is_module = isinstance(function, PositionalStage)
    named_tensors = function.named_tensors() if is_module else closed_over_tensors(function)
    path = next((tensor_path for tensor_path, owned in named_tensors if storage_key(owned) == key), None)
    raise Impure(foreign_write_message(label, f"writes {{}} in place ({op_overload})", path, is_module))


def foreign_write_message(label: str, deed: str, path: str | None, is_module: bool) -> str:
    """Return the sentence of an error about memory that a call did not make; `deed` has a {} for its name."""
    if is_module:
        subject = "its parameters or buffers" if path is None else f"buffer or parameter {path!r}"
        return (
            f"{label} {deed.format(subject)}. What a module remembers is state: cut the net by from_sequential(..., "
            f"batch=batch), or say state=[{path or 'name'!r}]. Or switch the writing off, say by .eval()."
        )
    subject = "a tensor" if path is None else repr(path)
    return (
        f"{label} {deed.format(subject)}, which it closes over; a stage and a loss are pure functions. Hand it in, "
        "among params or as state; of a module call .eval(), or cut the net by from_sequential."
    )
