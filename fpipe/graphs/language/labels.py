"""Name what a graph reads and writes: a label is a word, and from the second on a port, such as `x:1`.

    what a part reads       params params:1 const    x x:1 carry state target rng    res    dy dy:1 dcarry dloss
    what it writes          y y:1 carry state loss count aux res                            g g:1 dx dx:1 dcarry wres

This is the one place that knows which word means what, and what graphs call a program's values.
"""

from __future__ import annotations

from functools import cache

from fpipe.program import Op, Value

GENERATORS = "rng"
"""The label of generators, one for each device, which a graph that draws random numbers reads."""

_PARAMETERS = ("params", "const")
_COTANGENTS = ("dy", "dcarry", "dloss")
_RESULTS = ("y", "loss", "count", "aux", "state", "carry")
_LASTING = ("ready", *_PARAMETERS, "dloss")
_GRADIENTS = {"params": "g", "x": "dx", "carry": "dcarry"}
_DIFFERENTIATED = {gradient: word for word, gradient in _GRADIENTS.items()}
_FORWARD = {"inputs": "x", "y": "x", "again": "x", "t": "target"}
_BACKWARD = {"params": "params", "res": "res", "wres": "wres", "dy": "dy", "dx": "dy", "dcarry": "dcarry"}
_NUMBERED = ("params", "x", "dy")


@cache
def label_at(word: str, port: int = 0) -> str:
    """The label of a port.

    >>> label_at("x"), label_at("x", 1)
    ('x', 'x:1')
    """
    return f"{word}:{port}" if port else word


@cache
def _parts(of: str) -> tuple[str, int]:
    word, _, port = of.partition(":")
    return word, int(port or 0)


def port_of(of: str) -> int:
    """Which it is of those with its word, the first 0."""
    return _parts(of)[1]


def variable(of: str, place: int | None = None) -> str:
    """The label, or a leaf in a place under it, as a name in Python.

    >>> variable("x:1"), variable("x:1", 0)
    ('x1', 'x1_0')
    """
    word = of.replace(":", "")
    return word if place is None else f"{word}_{place}"


def is_parameter(of: str) -> bool:
    """Whether it is of parameters or constants, which every part of a cut is given anew."""
    return _parts(of)[0] in _PARAMETERS


def is_input(of: str) -> bool:
    """Whether it is of one of a stage's inputs."""
    return _parts(of)[0] == "x"


def is_output(of: str) -> bool:
    """Whether it is of one of a stage's outputs."""
    return _parts(of)[0] == "y"


def is_result(of: str) -> bool:
    """Whether it is of what a forward gives: outputs, and all beside them."""
    return _parts(of)[0] in _RESULTS


def is_cotangent(of: str) -> bool:
    """Whether it is of a cotangent that a backward is given."""
    return _parts(of)[0] in _COTANGENTS


def is_gradient(of: str) -> bool:
    """Whether it is of gradients of parameters."""
    return _parts(of)[0] == "g"


def is_lasting(of: str) -> bool:
    """Whether the lists under it are for all calls of a step; those under others are emptied by their last reader."""
    return _parts(of)[0] in _LASTING


def cotangent_of(of: str) -> str:
    """The cotangent of a result, which a backward is given: `dy:1` of `y:1`."""
    return "d" + of


def result_of(of: str) -> str:
    """The result of which this is the cotangent."""
    return of.removeprefix("d")


def gradient_of(of: str) -> str | None:
    """The gradient, or cotangent, that a backward makes of what a forward reads; None where it makes none.

    >>> gradient_of("params:1"), gradient_of("x"), gradient_of("target")
    ('g:1', 'dx', None)
    """
    word, port = _parts(of)
    return label_at(_GRADIENTS[word], port) if word in _GRADIENTS else None


def differentiated(of: str) -> str:
    """The label of a forward's input of which a backward makes this gradient."""
    word, port = _parts(of)
    return label_at(_DIFFERENTIATED[word], port)


def total_of(of: str) -> str:
    """The sum that gradients are added to."""
    return label_at("total", _parts(of)[1])


def label_of(value: Value) -> str:
    """The label that graphs have for a value of a stage's op.

    >>> label_of(Value("y", 0, 0)), label_of(Value("g", 0, 0, port=1))
    ('y', 'g:1')
    """
    return label_at("y" if value.name == "again" else value.name, value.port)


def reads_of(op: Op) -> dict[str, Value]:
    """The values that an op of a stage reads, by label.

    >>> reads_of(Op("F", 1, 0, None, 0, (Value("params", 1), Value("y", 0, 0), Value("t", 1, 0)), ()))
    {'params': params[1], 'x': y[0,0], 'target': t[1,0]}
    """
    found: dict[str, Value] = {}
    counts: dict[str, int] = {}
    for value in op.reads:
        word = _FORWARD.get(value.name, value.name) if op.kind in "FR" else _BACKWARD.get(value.name)
        if word is None or word == "w":  # no graph reads a weight
            continue
        if word in _NUMBERED:
            counts[word] = counts.get(word, -1) + 1
        found[label_at(word, counts.get(word, 0))] = value
    return found
