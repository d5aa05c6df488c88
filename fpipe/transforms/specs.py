"""Define specs, which say how leaves of a batch are cut and leaves of results joined, as objects and as text.

    {"x": Chunk(1)}        --> spec_text -->        "{'x': Chunk(dim=1)}"        --> spec_of -->        {"x": Chunk(1)}

A program carries a spec as text, so that it stays hashable and its own text can be parsed. A spec is a Chunk,
Replicate or Sum, a registered function, torch.distributed.pipelining's TensorChunkSpec or _Replicate, or a prefix tree
of them.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import Any

from fpipe.limits import checked_init, parse_expression


@checked_init
@dataclass(frozen=True)
class Chunk:
    """A leaf is cut into rows along this dimension.

    >>> import torch
    >>> from fpipe.meaning.single_device.microbatch import cut_dims
    >>> cut_dims({"x": torch.zeros(3, 8), "scale": 2.0}, Chunk(1))
    [1, None]
    """

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """A leaf goes whole to every microbatch, and comes back equal from each.

    >>> import torch
    >>> from fpipe.meaning.single_device.microbatch import cut_dims
    >>> batch = {"x": torch.zeros(4, 2), "table": torch.zeros(9)}
    >>> cut_dims(batch, {"x": Chunk(), "table": Replicate()})
    [0, None]
    """


@dataclass(frozen=True)
class Sum:
    """A leaf of a result is the sum of the leaves of all microbatches, as for counts.

    >>> from fpipe.meaning.single_device.microbatch import join
    >>> join([{"right": 3}, {"right": 4}], spec=Sum())
    {'right': 7}
    """


def as_spec(spec: Any) -> Chunk | Replicate | Sum:
    """Convert a spec to one of this library; torch's are recognised by attributes, without importing torch."""
    instance = spec() if isinstance(spec, type) else spec
    if instance is None or isinstance(instance, Chunk | Replicate | Sum):
        return instance or Chunk()
    if hasattr(instance, "split_dim"):
        return Chunk(instance.split_dim)
    if type(instance).__name__ == "_Replicate":
        return Replicate()
    raise ValueError(f"{spec!r} does not say how a leaf is cut or joined: say Chunk(dim), Replicate() or a function.")


_REGISTERED: dict[str, Any] = {}


def register_spec(name: str, spec: Any) -> Any:
    """Give a function a name by which a program, which is data, can carry it as a spec.

    Args:
        name: under which it stands in the program's text.
        spec: for `split` a function of a leaf that says `Chunk(dim)` or `Replicate()`. For `merge` a function of the
            list of a leaf's parts that joins them, or torch's `_CustomReducer`.

    Returns:
        The function itself, to hand to `split` or `merge`.

    Raises:
        ValueError: the name is taken by another.

    >>> import fpipe, torch
    >>> first = register_spec("first", lambda parts: parts[0])
    >>> program = fpipe.merge(first)(fpipe.split(2)(fpipe.program(1)))
    >>> print(*(op for op in program.ops if op.kind == "MERGE"))
    loss outputs = MERGE[0] loss[0,0] loss[0,1] w[0,0] w[0,1] y[0,0] y[0,1] {spec="Named('first')"} @ 0
    """
    if not _is_function(spec):
        raise ValueError(f"only functions and reducers need a name, found {spec!r}.")
    if _REGISTERED.setdefault(name, spec) is not spec:
        raise ValueError(f"another spec is called {name!r} already; take another name.")
    return spec


def _is_function(spec: Any) -> bool:
    return (callable(spec) or hasattr(spec, "reduce_fn")) and not isinstance(spec, type)


class _Named(str):
    """The name of a registered function, in the text of a spec."""

    def __repr__(self) -> str:
        return f"Named({str(self)!r})"


def spec_text(spec: Any) -> str:
    """Return a spec as text, which keeps a program hashable and its own text parseable.

    >>> spec_text({"x": Chunk(1), "n": Replicate()})
    "{'x': Chunk(dim=1), 'n': Replicate()}"
    """

    def translate(part: Any) -> Any:
        match part:
            case tuple():
                return tuple(map(translate, part))
            case list():
                return [*map(translate, part)]
            case dict():
                return {key: translate(value) for key, value in part.items()}
            case None:
                return None
            case _ if _is_function(part):
                return _name_of(part)
            case _:
                return as_spec(part)

    return repr(translate(spec))


def batch_spec_text(spec: Any) -> str:
    """Return the text of a spec for the batch; a tuple has one spec for the inputs and one for the target."""
    if isinstance(spec, tuple) and len(spec) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"a tuple of specs has two, for inputs and target; found {spec!r}.")
    return spec_text(spec)


def _name_of(function: Any) -> _Named:
    for name, registered in _REGISTERED.items():
        if registered is function:
            return _Named(name)
    function_name = getattr(function, "__name__", type(function).__name__)
    raise ValueError(f"a function in a program needs a name: fpipe.register_spec(name, {function_name}).")


@functools.lru_cache
def spec_of(text: str | None) -> Any:
    """Return the spec that a text describes; it reads literals and these names alone, and evaluates nothing.

    >>> spec_of("(Chunk(dim=1), Replicate())")
    (Chunk(dim=1), Replicate())
    """

    def parse_node(node: ast.expr) -> Any:
        match node:
            case ast.Tuple(elts=parts):
                return tuple(map(parse_node, parts))
            case ast.List(elts=parts):
                return list(map(parse_node, parts))
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {ast.literal_eval(key): parse_node(value) for key, value in pairs if key}
            case ast.Call(func=ast.Name(id="Chunk"), keywords=[ast.keyword(arg="dim", value=dim)]):
                return Chunk(ast.literal_eval(dim))
            case ast.Call(func=ast.Name(id="Replicate" | "Sum" as class_name)):
                return Sum() if class_name == "Sum" else Replicate()
            case ast.Call(func=ast.Name(id="Named"), args=[ast.Constant(value=name)]):
                if name not in _REGISTERED:
                    raise ValueError(f"no spec is called {name!r}; add it by fpipe.register_spec.")
                return _REGISTERED[str(name)]
            case ast.Constant(value=None):
                return None
            case _:
                raise ValueError(f"{text!r} is not a spec of Chunk(dim=0) and Replicate().")

    try:
        return None if text is None else parse_node(parse_expression(text))
    except TypeError:  # an unhashable key, a dimension that is no whole number
        raise ValueError(f"{text!r} is not a spec of Chunk(dim=0) and Replicate().") from None
