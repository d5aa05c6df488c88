"""Turn a stage into four functions with everything between them in the open: forward, backward, and its two halves.

    y = f(params, x)    --> linearize -->    y, res = forward(params, x)
                                             dx, dparams = backward(params, res, dy)
                                             dx, wres = backward_input(params, res, dy)
                                             dparams = backward_weight(params, wres)

The four do what plain autograd does, op by op, so their bits are its bits. `res` and `wres` are lists of the tensors
that the next function reads and no others. Who reads one for the last time hands it over: with `last=True` the list is
emptied, so that each tensor is gone right after the op that reads it last, as inside autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from fpipe import tree
from fpipe.graphs.compiling.code import compiled, source
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Graph, Name, aval
from fpipe.graphs.tracing.stage_call import Spec, StageCall, wanting, wants
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.meaning.purity.ambient import Untraceable, raw_ops
from fpipe.meaning.purity.sharded import local_of, sharded_as
from fpipe.model import Model, Stage
from fpipe.positional_stage import PositionalStage


@dataclass(frozen=True)
class Linearized:
    """A stage as four functions; printed, their text.

    Attributes:
        traced: the stage and its gradient as a graph, and how it is cut.

    >>> import fpipe, torch
    >>> one = fpipe.linearize(lambda params, x: x * params, torch.ones(2), torch.ones(2))
    >>> print(str(one).split("\\n\\n")[0])
    def forward(params, x):
        [params_0] = params
        [x_0] = x
        x.clear()
        mul = aten_mul(x_0, params_0)
        return [mul], [x_0]
    """

    traced: Cut
    specs: Mapping[str, Spec]

    def forward(self, params: Any, x: Any) -> tuple[Any, list[Tensor]]:
        """The output, and what the backward reads: `y, res`."""
        y, res = self._run("forward", params, x=x)
        return tree.unflatten(self.specs["y"], y), res

    def backward(self, params: Any, res: list[Tensor], dy: Any, *, last: bool = False) -> tuple[Any, Any]:
        """The gradients of the input and of the parameters: `dx, dparams`. None where there is none.

        Args:
            params: as `forward` was handed them.
            res: what `forward` left.
            dy: the gradient of the output.
            last: whether nobody reads `res` again. Then the list is emptied, and no tensor in it outlives the op that
                reads it last, unless somebody else has it; the most that is alive meanwhile is what autograd has alive
                inside its own backward. Otherwise `res` stays as it is, and may be read again.
        """
        dx, dparams = self._run("backward", params, dy=dy, res=_handed(res, "res", last))
        return tree.unflatten(self.specs["x"], dx), self._of_params(params, dparams)

    def backward_input(
        self, params: Any, res: list[Tensor], dy: Any, *, last: bool = False
    ) -> tuple[Any, list[Tensor]]:
        """The gradient of the input, and what is left for the parameters': `dx, wres`. `last` as in `backward`: then
        only what is in `wres` is alive afterwards."""
        dx, wres = self._run("backward_input", params, dy=dy, res=_handed(res, "res", last))
        return tree.unflatten(self.specs["x"], dx), wres

    def backward_weight(self, params: Any, wres: list[Tensor], *, last: bool = False) -> Any:
        """The gradients of the parameters. `last`: nobody reads `wres` again, and it is emptied."""
        (dparams,) = self._run("backward_weight", params, wres=_handed(wres, "wres", last))
        return self._of_params(params, dparams)

    def _of_params(self, params: Any, found: Sequence[Any]) -> Any:
        """Gradients in the containers of the parameters, sharded as these are."""
        return tree.unflatten(self.specs["params"], map(sharded_as, tree.leaves(params), found))

    def _run(self, name: str, params: Any, **given: Any) -> Any:
        kept = ("res", "wres")  # lists already, and perhaps to be emptied
        lists = {"params": tree.leaves(params)}
        lists |= {label: value if label in kept else tree.leaves(value) for label, value in given.items()}
        for label, names in self.graphs[name].reads.items():
            if label in ("params", "x", "dy"):
                self._check(name, label, names, lists[label])
        with raw_ops():
            lists["params"] = [*map(local_of, lists["params"])]
            return self._functions[name](*lists.values())

    def _check(self, name: str, label: str, names: Sequence[Name | None], leaves: Sequence[Any]) -> None:
        """A ValueError for tensors that the graph is not for: its views and sizes are those it was traced with."""
        if len(leaves) != len(names):
            raise ValueError(f"{name} takes {len(names)} leaves as {label}, found {len(leaves)}.")
        for place, (wanted, leaf) in enumerate(zip(names, leaves, strict=True)):
            if wanted is None:
                continue
            known = self.traced.graph.facts[wanted].aval
            found = aval(leaf) if isinstance(leaf, Tensor) else None
            if (
                found is None
                or found[:3:2] != known[:3:2]
                or (label in ("params", "x") and found.stride != known.stride)
            ):
                shown = type(leaf).__name__ if found is None else f"{found} with strides {found.stride}"
                raise ValueError(
                    f"{name} was traced for {known} with strides {known.stride} as leaf {place} of {label}, found "
                    f"{shown}. Linearize the function for these tensors too."
                )

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        """The graph of each function, by its name."""
        cut = self.traced
        return {
            "forward": cut.forward(["y", "res"]),
            "backward": cut.backward(),
            "backward_input": cut.backward_input(),
            "backward_weight": cut.backward_weight(),
        }

    @cached_property
    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {name: compiled(graph, name) for name, graph in self.graphs.items()}

    def __str__(self) -> str:
        return "\n\n".join(source(graph, name) for name, graph in self.graphs.items())


def _handed(tensors: list[Tensor], what: str, last: bool) -> list[Tensor]:
    """The list itself if it may be emptied."""
    if last and not isinstance(tensors, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"last=True empties {what}: hand in the list itself, found {type(tensors).__name__}.")
    return tensors if last else [*tensors]


def linearize(function: Callable[[Any, Any], Any], params: Any, x: Any) -> Linearized:
    """Forward, backward, input gradient and weight gradient of a stage function, each a list of torch ops.

    Args:
        function: `f(params, x) -> y`.
        params: a pytree of tensors, which may be on the meta device; those with floating dtypes get gradients.
        x: the same for the input.

    Returns:
        `Linearized`: functions for tensors of these shapes, dtypes and strides, and their text.

    Raises:
        TypeError: it is no function.
        ValueError: it cannot be traced; why.

    >>> import fpipe, torch
    >>> params, x = {"w": torch.ones(3, 2)}, torch.ones(4, 3)
    >>> one = fpipe.linearize(lambda params, x: (x @ params["w"]).relu(), params, x)
    >>> y, res = one.forward(params, x)
    >>> dx, wres = one.backward_input(params, res, torch.ones(4, 2))
    >>> one.backward_weight(params, wres)
    {'w': tensor([[4., 4.],
            [4., 4.],
            [4., 4.]])}
    >>> print(str(one).split("\\n\\n")[3])
    def backward_weight(params, wres):
        [x_0, threshold_backward] = wres
        wres.clear()
        t = aten_t(x_0); del x_0
        mm_1 = aten_mm(t, threshold_backward); del t, threshold_backward
        return [mm_1],
    """
    if isinstance(function, nn.Module):
        raise TypeError(
            f"linearize takes a function f(params, x), found a module ({type(function).__name__}). Hand in "
            "`lambda params, x: torch.func.functional_call(module, params, (x,))` and its named parameters."
        )
    by_name = partial(function) if isinstance(function, PositionalStage) else function
    model = Model((Stage(by_name),), None, ("batch",))
    traces = Traces(model)
    leaves = {"params": tree.flatten(params), "x": tree.flatten(x)}
    reads = tuple((label, tuple(map(wanting, found))) for label, (found, _) in leaves.items())
    specs = {label: spec for label, (_, spec) in leaves.items()}
    call = StageCall(0, reads, tuple(specs.items()), starts=("x",))
    try:
        outline = traces.outline(call)
        dy = tuple(leaf._replace(wants=False) if wants(leaf) else None for leaf in outline.avals("y"))
        every = tuple(range(len(dict(reads)["x"])))
        graph = traces.graph(call, {"dy": dy})
        if graph.drawn_on:
            raise Untraceable("it draws random numbers, for which only a step has a key")
        return Linearized(Cut(graph, (("dx", every),)), {**specs, **outline.specs})
    except Untraceable as error:
        raise ValueError(f"this function cannot be written down as torch ops: {error}") from error
