"""Run torch's own tracer, make_fx, on fake tensors, with the ops that run without it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx


def traced_by_torch(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors on fake ones; it may hold on to real ones (2.13: `make_fx`)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)


def calls_so_far() -> int:
    """How many ops the trace that is going on has seen (2.13: `get_proxy_mode`)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return sum(node.op == "call_function" for node in mode.tracer.graph.nodes)


@contextmanager
def unnoticed() -> Generator[None]:
    """Without what tells Python that make_fx watches: attention that wants no gradient runs as one op of its own, and
    would write its steps out instead (2.13: `_is_make_fx_tracing`). What make_fx's mode for functions notes is only for
    people to read (2.13: `_temp_remove_metadata_torch_function_mode`)."""
    from torch.fx.experimental import proxy_tensor
    from torch.nn.modules import activation

    watching: Any = proxy_tensor
    attention: Any = activation
    before, attention._is_make_fx_tracing = attention._is_make_fx_tracing, lambda: False
    try:
        with watching._temp_remove_metadata_torch_function_mode():
            yield
    finally:
        attention._is_make_fx_tracing = before


@contextmanager
def without_compiled_functions() -> Generator[None]:
    """A function of torch.compile refuses to run, as in make_fx: its kernels would read memory that is not there (a
    flag of a module up to 2.13, of a thread in 2.15)."""
    from torch.fx import _symbolic_trace

    place = getattr(_symbolic_trace, "_is_fx_tracing_tls", _symbolic_trace)
    name = "_is_fx_tracing_flag" if place is _symbolic_trace else "flag"
    before = getattr(place, name, False)
    setattr(place, name, True)
    try:
        yield
    finally:
        setattr(place, name, before)
