"""Run a stage as its code says: compiled functions as plain Python, and so the functions that an op calls.

    cond(p, lambda x: x @ w, f, [x])      -->      cond(p, lambda x, w: x @ w, lambda x, w: f(x), [x, w])

torch.cond, FlexAttention and their like let torch.compile find the tensors that a function closes over (here `w`), so
that these become operands with a gradient. A stage that is traced cannot be compiled inside, and a stage and its
definition must do the same. So fpipe finds them: the function runs once on fake tensors under a mode that sees every
tensor, and later runs with the operands in the place of what it closes over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.torch_internals import (
    ThreadFlag,
    index_ops_on_0d_tensors,
    on_fake_tensors,
    without_compiler,
    wrap_higher_order_op,
)


@contextmanager
def as_written() -> Generator[None]:
    """Run in this context what torch.compile made as plain Python, and hand what functions close over to their op."""
    _install()
    with _without_compiler(), _IS_ON.set_to(True):
        yield


_IS_ON = ThreadFlag()
_LOCK = threading.Lock()
_STACKS: list[ExitStack] = []
"""An entry for each open context; the first has the settings of the compiler to be put back."""


@contextmanager
def _without_compiler() -> Generator[None]:
    # The settings belong to the whole process, and threads may overlap as enter A, enter B, leave A, leave B.
    with _LOCK:
        _STACKS.append(ExitStack())
        if len(_STACKS) == 1:
            _STACKS[0].enter_context(without_compiler())
    try:
        yield
    finally:
        with _LOCK:
            if len(_STACKS) == 1:
                _STACKS[0].close()
            _STACKS.pop()


@cache
def _install() -> None:
    for name, lift in _LIFTS.items():
        wrap_higher_order_op(name, partial(_call_lifted, lift))


def _call_lifted(lift: Callable[..., Any], call: Callable[..., Any], *args: Any) -> Any:
    if not _IS_ON.value:
        return call(*args)
    # A branch or the step of a scan may return any pytree, but the op takes and returns a tuple of tensors.
    function = None
    if lift is _lift_cond:
        predicate, true_function, false_function, operands = args
        leaves, spec = tree.flatten(operands)
        function = _FlatFunction(true_function, spec)
        args = predicate, function, _FlatFunction(false_function, spec), tuple(leaves)
    elif lift is _lift_scan:
        function = _FlatFunction(args[0])
        args = function, *args[1:]
    # Below autograd torch calls the same op again, with functions that are lifted already.
    lifted_args = lift(*args)
    with _IS_ON.set_to(False):
        results = call(*lifted_args)
    return results if function is None else tree.unflatten(function.result_spec, results)


def _lift_flex_attention(*args: Any) -> Sequence[Any]:
    query, key, value, score_mod, block_mask, scale, options, *buffers = args
    index = partial(query.new_zeros, (), dtype=torch.int)
    score = query.new_zeros(())
    if any(buffers):
        return args
    # Both are mapped over single scores by torch.vmap, and index with 0-d tensors.
    with index_ops_on_0d_tensors():
        score_mod, score_tensors = _lift([score_mod], [score, *(index() for _ in range(4))])
        mask_mod, mask_tensors = _lift([block_mask[-1]], [index() for _ in range(4)])
    block_mask = (*block_mask[:-1], *mask_mod)
    return query, key, value, *score_mod, block_mask, scale, options, tuple(score_tensors), tuple(mask_tensors)


def _lift_cond(predicate: Any, true_function: Any, false_function: Any, operands: Any) -> Sequence[Any]:
    functions, tensors = _lift([true_function, false_function], operands)
    return predicate, *functions, (*operands, *tensors)


def _lift_while_loop(condition: Any, body: Any, carried: Any, operands: Any) -> Sequence[Any]:
    functions, tensors = _lift([condition, lambda *args: tuple(tree.leaves(body(*args)))], (*carried, *operands))
    return *functions, carried, (*operands, *tensors)


def _lift_scan(combine: Any, init: Any, xs: Any, operands: Any) -> Sequence[Any]:
    functions, tensors = _lift([combine], (*init, *(x[0] for x in xs), *operands))
    return *functions, init, xs, (*operands, *tensors)


def _lift_associative_scan(combine: Any, xs: Any, operands: Any) -> Sequence[Any]:
    slices = [x[0] for x in xs]
    functions, tensors = _lift([combine], (*slices, *slices, *operands))
    return *functions, xs, (*operands, *tensors)


_LIFTS = {
    "flex_attention": _lift_flex_attention,
    "cond": _lift_cond,
    "while_loop": _lift_while_loop,
    "scan": _lift_scan,
    "associative_scan": _lift_associative_scan,
}


def _lift(functions: Sequence[Callable[..., Any]], example: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return functions that take the tensors they close over as further arguments, and these tensors."""
    log = _TensorLog()
    for function in functions:
        on_fake_tensors(partial(log.run, function), example)
    tensors = [*log.outer_tensors.values()]

    def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            count = len(args) - len(tensors)
            # An op that the function calls is lifted in its turn.
            with _Substitution(tensors, args[count:]), _IS_ON.set_to(True):
                return function(*args[:count])

        return run

    return [*map(lifted, functions)], tensors


def _map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    def map_leaf(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree.tree_map(map_leaf, values)


class _FlatFunction:
    """A function of leaves to a tuple of leaves, which remembers the containers around its results.

    With `spec` the function takes its arguments in these containers.
    """

    def __init__(self, function: Callable[..., Any], spec: Any = None) -> None:
        self.function, self.spec = function, spec
        self.result_spec: Any = None

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Call the function on the leaves in their containers."""
        args = leaves if self.spec is None else tree.unflatten(self.spec, leaves)
        results, self.result_spec = tree.flatten(self.function(*args))
        return tuple(results)


class _TensorLog(TorchFunctionMode):
    """Collects the tensors that a function reads and that are neither arguments nor results of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outer_tensors: dict[int, Tensor] = {}
        # By id, with the tensor itself, so that no id is used twice.
        self.inner_tensors: dict[int, Tensor] = {}

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        _map_tensors(self._note_inner, args)
        with self:
            function(*args)

    def _note_inner(self, tensor: Tensor) -> Tensor:
        self.inner_tensors[id(tensor)] = tensor
        return tensor

    def _note_read(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.inner_tensors:
            self.outer_tensors[id(tensor)] = tensor
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _map_tensors(self._note_read, (args, kwargs or {}))
        return _map_tensors(self._note_inner, func(*args, **(kwargs or {})))


class _Substitution(TorchFunctionMode):
    """Replaces tensors by operands in the arguments of every call of torch."""

    def __init__(self, tensors: Sequence[Tensor], replacements: Sequence[Tensor]) -> None:
        super().__init__()
        self.replacement_by_id = dict(zip(map(id, tensors), replacements, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _map_tensors(self._replacement, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replacement(self, tensor: Tensor) -> Tensor:
        return self.replacement_by_id.get(id(tensor), tensor)
