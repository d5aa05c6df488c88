"""Name the arguments and results of graphs by labels: a base name, with a port from the second on, such as `x:1`.

    a part reads       params params:1 const    x x:1 carry state target rng    res    dy dy:1 dcarry dloss
    and writes         y y:1 carry state loss count aux res                            g g:1 dx dx:1 dcarry wres
    or, in a step,     hoisted hoisted:1, which are computed from parameters, in their place

Only this file knows the meaning of each label, and the labels of a program's values.
"""

from __future__ import annotations

from functools import cache

from fpipe.program import Op, Value

GENERATORS = "rng"
"""The label of generators, one for each device, which a graph that draws random numbers reads."""

# Base names by meaning.
_PARAMETERS = ("params", "const")
_COTANGENTS = ("dy", "dcarry", "dloss")
_RESULTS = ("y", "loss", "count", "aux", "state", "carry")
_KEPT_ALL_STEP = ("hoisted", *_PARAMETERS, "dloss")
_GRADIENT_OF_INPUT = {"params": "g", "x": "dx", "carry": "dcarry"}
_INPUT_OF_GRADIENT = {gradient: base for base, gradient in _GRADIENT_OF_INPUT.items()}
# The base name for a value that a forward or a backward reads; a value without one, such as a weight, no graph reads.
_FORWARD = {"inputs": "x", "y": "x", "again": "x", "t": "target"}
_BACKWARD = {"params": "params", "res": "res", "wres": "wres", "dy": "dy", "dx": "dy", "dcarry": "dcarry"}
_BASES_WITH_PORTS = ("params", "x", "dy")


@cache
def label_at(base: str, port: int = 0) -> str:
    """Return the label of a port of a base name.

    >>> label_at("x"), label_at("x", 1)
    ('x', 'x:1')
    """
    return f"{base}:{port}" if port else base


@cache
def _split_label(label: str) -> tuple[str, int]:
    base, _, port = label.partition(":")
    return base, int(port or 0)


def hoisted_label(number: int) -> str:
    """Return the label of a group of values that are computed from parameters once for many calls."""
    return label_at("hoisted", number)


def port_of(label: str) -> int:
    """Return the port of a label, 0 for the first with its base name."""
    return _split_label(label)[1]


def variable_name(label: str, leaf_index: int | None = None) -> str:
    """Return a label, or a leaf under it, as a name in Python.

    >>> variable_name("x:1"), variable_name("x:1", 0)
    ('x1', 'x1_0')
    """
    base = label.replace(":", "")
    return base if leaf_index is None else f"{base}_{leaf_index}"


def is_parameter(label: str) -> bool:
    """Whether a label is of parameters or constants, which each part of a cut reads directly."""
    return _split_label(label)[0] in _PARAMETERS


def is_input(label: str) -> bool:
    """Whether a label is of an input of the stage."""
    return _split_label(label)[0] == "x"


def is_output(label: str) -> bool:
    """Whether a label is of an output of the stage."""
    return _split_label(label)[0] == "y"


def is_result(label: str) -> bool:
    """Whether a label is of a result of a forward: an output, the loss, state and so on."""
    return _split_label(label)[0] in _RESULTS


def is_cotangent(label: str) -> bool:
    """Whether a label is of a cotangent that a backward reads."""
    return _split_label(label)[0] in _COTANGENTS


def is_gradient(label: str) -> bool:
    """Whether a label is of gradients of parameters."""
    return _split_label(label)[0] == "g"


def is_kept_all_step(label: str) -> bool:
    """Whether the lists under a label serve all calls of a step; functions empty all other lists that they read."""
    return _split_label(label)[0] in _KEPT_ALL_STEP


def cotangent_of(label: str) -> str:
    """Return the cotangent of a result, which a backward reads: `dy:1` of `y:1`."""
    return "d" + label


def result_of(label: str) -> str:
    """Return the result that a cotangent belongs to."""
    return label.removeprefix("d")


def gradient_of(label: str) -> str | None:
    """Return the gradient or cotangent that a backward writes for an input of the forward; None if it writes none.

    >>> gradient_of("params:1"), gradient_of("x"), gradient_of("target")
    ('g:1', 'dx', None)
    """
    base, port = _split_label(label)
    return label_at(_GRADIENT_OF_INPUT[base], port) if base in _GRADIENT_OF_INPUT else None


def differentiated_label(label: str) -> str:
    """Return the input of the forward that a gradient or cotangent is of."""
    base, port = _split_label(label)
    return label_at(_INPUT_OF_GRADIENT[base], port)


def total_of(label: str) -> str:
    """Return the label of the sum that gradients are added to."""
    return label_at("total", _split_label(label)[1])


def label_of(value: Value) -> str:
    """Return the label that graphs have for a value of a stage's op.

    >>> label_of(Value("y", 0, 0)), label_of(Value("g", 0, 0, port=1))
    ('y', 'g:1')
    """
    return label_at("y" if value.name == "again" else value.name, value.port)


def reads_by_label(op: Op) -> dict[str, Value]:
    """Return the values that an op of a stage reads, by label.

    >>> reads_by_label(Op("F", 1, 0, None, 0, (Value("params", 1), Value("y", 0, 0), Value("t", 1, 0)), ()))
    {'params': params[1], 'x': y[0,0], 'target': t[1,0]}
    """
    value_by_label: dict[str, Value] = {}
    last_port_by_base: dict[str, int] = {}
    for value in op.reads:
        base = _FORWARD.get(value.name, value.name) if op.kind in "FR" else _BACKWARD.get(value.name)
        if base is None or base == "w":
            continue
        if base in _BASES_WITH_PORTS:
            last_port_by_base[base] = last_port_by_base.get(base, -1) + 1
        value_by_label[label_at(base, last_port_by_base.get(base, 0))] = value
    return value_by_label
