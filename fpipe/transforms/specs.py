"""Say how the leaves of a batch are cut, and those of the results joined, in words that a program can carry.

    {"x": Chunk(1), "table": Replicate()}        --> spec_text, spec_of -->        the same, out of a program's text

A spec is one of these, a function that has a name, a prefix tree of them, or what torch.distributed.pipelining has for
it.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import Any

from fpipe.limits import expression


@dataclass(frozen=True)
class Chunk:
    """The rows of a tensor are along this dimension.

    >>> import torch
    >>> from fpipe.meaning.single_device.microbatch import cut_along
    >>> cut_along({"x": torch.zeros(3, 8), "scale": 2.0}, Chunk(1))
    [1, None]
    """

    dim: int = 0

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise TypeError(f"Chunk(dim) names the dimension of the rows by a whole number, found {self.dim!r}.")


@dataclass(frozen=True)
class Replicate:
    """A leaf goes whole to every microbatch, and comes back the same from each.

    >>> import torch
    >>> from fpipe.meaning.single_device.microbatch import cut_along
    >>> batch = {"x": torch.zeros(4, 2), "table": torch.zeros(9)}
    >>> cut_along(batch, {"x": Chunk(), "table": Replicate()})
    [0, None]
    """


@dataclass(frozen=True)
class Sum:
    """How to join what is counted: the parts of all microbatches are added.

    >>> from fpipe.meaning.single_device.microbatch import join
    >>> join([{"right": 3}, {"right": 4}], spec=Sum())
    {'right': 7}
    """


def in_our_words(spec: Any) -> Chunk | Replicate | Sum:
    """Translate a spec; torch's TensorChunkSpec and _Replicate are known by their looks."""
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
    """Give a function a name, under which a program can carry it as a spec; a program itself is data.

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
        raise ValueError(f"a function or a reducer gets a name, found {spec!r}; other specs say what they are.")
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
    """A spec as a program carries it: text, so that the program stays hashable and its own text round-trips.

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
                return in_our_words(part)

    return repr(translate(spec))


def batch_spec_text(spec: Any) -> str:
    """The text of a spec for the batch: a tuple is the inputs' and the target's."""
    if isinstance(spec, tuple) and len(spec) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"a spec that is a tuple says the inputs' and the target's, two of them; found {spec!r}.")
    return spec_text(spec)


def _name_of(function: Any) -> _Named:
    for name, registered in _REGISTERED.items():
        if registered is function:
            return _Named(name)
    word = getattr(function, "__name__", type(function).__name__)
    raise ValueError(f"a program is data, so a function in it goes by a name: fpipe.register_spec(name, {word}).")


@functools.lru_cache
def spec_of(text: str | None) -> Any:
    """The spec that a text says.

    >>> spec_of("(Chunk(dim=1), Replicate())")
    (Chunk(dim=1), Replicate())
    """

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Tuple(elts=parts):
                return tuple(map(read, parts))
            case ast.List(elts=parts):
                return list(map(read, parts))
            case ast.Dict(keys=keys, values=values):
                return {ast.literal_eval(key): read(value) for key, value in zip(keys, values, strict=True) if key}
            case ast.Call(func=ast.Name(id="Chunk"), keywords=[ast.keyword(arg="dim", value=dim)]):
                return Chunk(ast.literal_eval(dim))
            case ast.Call(func=ast.Name(id="Replicate" | "Sum" as word)):
                return Sum() if word == "Sum" else Replicate()
            case ast.Call(func=ast.Name(id="Named"), args=[ast.Constant(value=name)]):
                if name not in _REGISTERED:
                    raise ValueError(f"no spec is called {name!r} here; say what it is by fpipe.register_spec.")
                return _REGISTERED[str(name)]
            case ast.Constant(value=None):
                return None
            case _:
                raise ValueError(f"{text!r} is not a spec of Chunk(dim=0) and Replicate().")

    try:
        return None if text is None else read(expression(text))
    except TypeError:  # a key that cannot be one, a dimension that is none
        raise ValueError(f"{text!r} is not a spec of Chunk(dim=0) and Replicate().") from None
