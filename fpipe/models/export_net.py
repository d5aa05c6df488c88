"""Export a module as one graph of torch's operations above autograd, whose nodes say which module they come from.

net(**inputs)        --> torch.export -->        wte  add  h.0: layer_norm, linear, ...  h.1: ...  lm_head: linear

Rows stay symbolic, and so does the second dimension of integers, the length of a sequence, where the net allows it.
"""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from fpipe import tree
from fpipe.graphs.attributes import Attributes
from fpipe.graphs.symbols import in_words
from fpipe.models.boundary import marking
from fpipe.models.known_modules import refuse_impure, refuse_wrapped
from fpipe.models.trace_loss import NoGenerators


def export_net(net: nn.Module, inputs: Any) -> ExportedProgram:
    """The module as an exported program, in the mode that it is in; it stays as it is.

    Args:
        net: any module that torch.export takes.
        inputs: an example: a dict of keywords, a tuple or list of arguments, or the one argument.

    Raises:
        ValueError: what cannot be exported, by module and line.
    """
    refuse_unexportable(net)
    args, kwargs = tree.tree_map(_at_least_two(inputs), call_of(inputs))
    shapes: Any = tree.tree_map(_open_dims, (args, kwargs))
    attributes = Attributes([*net.named_modules()], type(net).__name__, every=True)
    try:
        with torch.enable_grad(), NoGenerators("the net"), marking(), without_cache(net), _quiet():
            return torch.export.export(net, args, kwargs, strict=False, dynamic_shapes=shapes[1] or shapes[0])
    except Exception as error:
        raise ValueError(_reason(net, error)) from error
    finally:
        attributes.put_back()


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keywords of a call on inputs.

    >>> call_of({"ids": 1}), call_of((1, 2)), call_of(1)
    (((), {'ids': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), {str(name): one for name, one in inputs.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return (tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)), {}  # pyright: ignore[reportUnknownArgumentType]


@contextmanager
def without_cache(net: nn.Module) -> Generator[None]:
    """Meanwhile models of transformers make no cache of keys and values, which is for generating text."""
    configs = {id(one): one for module in net.modules() if (one := getattr(module, "config", None)) is not None}
    caching = [one for one in configs.values() if getattr(one, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def refuse_unexportable(net: nn.Module) -> None:
    """A ValueError for a module whose graph would not be what it does."""
    for path, module in net.named_modules():
        refuse_wrapped(path, module)
        refuse_impure(path, module)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is not initialised yet (a lazy module); run the net once on an example.")


def _at_least_two(inputs: Any) -> Any:
    """Doubles the rows of an example of one row: its trace would hold for one row only."""
    leaves = [leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    single = all(len(leaf) == 1 for leaf in leaves)

    def doubled(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if single and isinstance(leaf, Tensor) and leaf.ndim else leaf

    return doubled


def _open_dims(leaf: Any) -> Any:
    """Which sizes of a leaf may be others later."""
    if not isinstance(leaf, Tensor):
        return None
    sequence = leaf.ndim == 2 and not leaf.is_floating_point() and not leaf.is_complex()
    return dict.fromkeys(range(min(leaf.ndim, 2 if sequence else 1)), torch.export.Dim.AUTO)


@contextmanager
def _quiet() -> Generator[None]:
    """Without the graph that torch prints where an export ends in an error. A tensor that a module remembers in a plain
    attribute is an error, but for the lists that an RNN has of its weights."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("error", "The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? \S*_flat_weights", UserWarning)
            yield
    finally:
        log.disabled = before


def _reason(net: nn.Module, error: Exception) -> str:
    """Why a net cannot be exported: the module, torch's words, and the user's line."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
    return (
        f"{type(net).__name__} cannot be exported, so there is nothing to cut: {type(error).__name__}: "
        f"{in_words(said)}{_where(error)}. Change that line, or use from_loss with fpipe.boundary, or from_functions."
    )


def _where(error: Exception) -> str:
    """The innermost line of the net's own code, outside of torch and of this package; and of the forward of a module of
    torch's that it calls, for what that one takes, such as the word `tgt_is_causal` beside a mask."""
    torchs = Path(torch.__file__).parent
    ours = Path(__file__).parents[1], torchs
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at, one in enumerate(frames) if not any(Path(one.filename).is_relative_to(home) for home in ours)]
    if not own:
        return ""
    modules = torchs / "nn" / "modules"
    called = [one for one in frames[own[-1] :] if one.name == "forward" and Path(one.filename).parent == modules]
    lines = [
        f"at {Path(one.filename).name}:{one.lineno}, in {one.name}: {one.line}"
        for one in (frames[own[-1]], *called[-1:])
    ]
    return f" ({'; which calls torch '.join(lines)})"
