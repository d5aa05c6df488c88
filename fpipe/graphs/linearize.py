"""Turn a stage into four functions of explicit values: forward, backward, and the two halves of the backward.

    y = f(params, x)    --> linearize -->    y, res = forward(params, x)
                                             dx, dparams = backward(params, res, dy)
                                             dx, wres = backward_input(params, res, dy)
                                             dparams = backward_weight(params, wres)

The four do what plain autograd does, op by op, so their bits are its bits. `res` and `wres` are lists of exactly the
tensors that the next function reads. With `last=True` a function empties the list that it reads, so that each tensor is
gone right after the op that reads it last, as inside autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from fpipe import tree
from fpipe.graphs.compiling.code import compile_graph, source
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Graph, Name, aval_of_tensor
from fpipe.graphs.tracing.stage_call import Spec, StageCall, aval_wants_grad, aval_with_grad
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.meaning.purity.ambient import Untraceable, raw_ops
from fpipe.meaning.purity.sharded import as_dtensor_like, local_shard
from fpipe.model import Model, Stage
from fpipe.positional_stage import PositionalStage


@dataclass(frozen=True)
class Linearized:
    """A stage as four functions; printed, their text.

    Attributes:
        traced: the stage and its gradient as a graph, and how it is cut.
        specs: the containers of params, x and y.

    >>> import fpipe, torch
    >>> scale = fpipe.linearize(lambda params, x: x * params, torch.ones(2), torch.ones(2))
    >>> print(str(scale).split("\\n\\n")[0])
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
        """Return the output, and the tensors that the backward reads: `y, res`."""
        y, res = self._run("forward", params, x=x)
        return tree.unflatten(self.specs["y"], y), res

    def backward(self, params: Any, res: list[Tensor], dy: Any, *, last: bool = False) -> tuple[Any, Any]:
        """Return the gradients of the input and of the parameters: `dx, dparams`. None where there is none.

        Args:
            params: as `forward` was handed them.
            res: the residuals that `forward` returned.
            dy: the gradient of the output.
            last: whether nobody reads `res` again. Then the list is emptied, and no tensor in it outlives the op that
                reads it last, unless somebody else has it; the peak is that of autograd's own backward. Otherwise `res`
                stays as it is, and may be read again.
        """
        dx, dparams = self._run("backward", params, dy=dy, res=_consumable(res, "res", last))
        return tree.unflatten(self.specs["x"], dx), self._like_params(params, dparams)

    def backward_input(
        self, params: Any, res: list[Tensor], dy: Any, *, last: bool = False
    ) -> tuple[Any, list[Tensor]]:
        """Return the gradient of the input, and the tensors that `backward_weight` reads: `dx, wres`.

        `last` as in `backward`: afterwards only the tensors in `wres` are alive.
        """
        dx, wres = self._run("backward_input", params, dy=dy, res=_consumable(res, "res", last))
        return tree.unflatten(self.specs["x"], dx), wres

    def backward_weight(self, params: Any, wres: list[Tensor], *, last: bool = False) -> Any:
        """Return the gradients of the parameters. `last`: nobody reads `wres` again, and it is emptied."""
        (dparams,) = self._run("backward_weight", params, wres=_consumable(wres, "wres", last))
        return self._like_params(params, dparams)

    def _like_params(self, params: Any, gradients: Sequence[Any]) -> Any:
        """Return gradients in the containers of the parameters, sharded as these are."""
        return tree.unflatten(self.specs["params"], map(as_dtensor_like, tree.leaves(params), gradients))

    def _run(self, name: str, params: Any, **arguments: Any) -> Any:
        # Residuals are lists already, and the very lists: they may have to be emptied.
        list_labels = ("res", "wres")
        lists = {"params": tree.leaves(params)}
        lists |= {label: value if label in list_labels else tree.leaves(value) for label, value in arguments.items()}
        for label, names in self.graphs[name].reads.items():
            if label in ("params", "x", "dy"):
                self._check(name, label, names, lists[label])
        with raw_ops():
            lists["params"] = [*map(local_shard, lists["params"])]
            return self._functions[name](*lists.values())

    def _check(self, name: str, label: str, names: Sequence[Name | None], leaves: Sequence[Any]) -> None:
        """Raise ValueError for tensors that the graph was not traced for, since it has their sizes and views."""
        # A cotangent may have other strides: autograd takes those too.
        if len(leaves) != len(names):
            raise ValueError(f"{name} takes {len(names)} leaves as {label}, found {len(leaves)}.")
        for leaf_index, (leaf_name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if leaf_name is None:
                continue
            expected = self.traced.graph.facts[leaf_name].aval
            actual = aval_of_tensor(leaf) if isinstance(leaf, Tensor) else None
            has_fixed_strides = label in ("params", "x")
            has_same_strides = actual is not None and (not has_fixed_strides or actual.stride == expected.stride)
            if actual is None or actual[:3:2] != expected[:3:2] or not has_same_strides:
                actual_text = type(leaf).__name__ if actual is None else f"{actual} with strides {actual.stride}"
                raise ValueError(
                    f"{name} was traced for {expected} with strides {expected.stride} as leaf {leaf_index} of {label}, "
                    f"found {actual_text}. Linearize again."
                )

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        """Return the graph of each function, by its name."""
        cut = self.traced
        return {
            "forward": cut.forward(["y", "res"]),
            "backward": cut.backward(),
            "backward_input": cut.backward_input(),
            "backward_weight": cut.backward_weight(),
        }

    @cached_property
    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {name: compile_graph(graph, name) for name, graph in self.graphs.items()}

    def __str__(self) -> str:
        return "\n\n".join(source(graph, name) for name, graph in self.graphs.items())


def _consumable(tensors: list[Tensor], label: str, last: bool) -> list[Tensor]:
    if last and not isinstance(tensors, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"last=True empties {label}: hand in the list itself, found {type(tensors).__name__}.")
    return tensors if last else [*tensors]


def linearize(function: Callable[[Any, Any], Any], params: Any, x: Any) -> Linearized:
    """Write a stage function as four lists of torch ops: forward, backward, input gradient and weight gradient.

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
    >>> layer = fpipe.linearize(lambda params, x: (x @ params["w"]).relu(), params, x)
    >>> y, res = layer.forward(params, x)
    >>> dx, wres = layer.backward_input(params, res, torch.ones(4, 2))
    >>> layer.backward_weight(params, wres)
    {'w': tensor([[4., 4.],
            [4., 4.],
            [4., 4.]])}
    >>> print(str(layer).split("\\n\\n")[3])
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
            "`lambda params, x: torch.func.functional_call(module, params, (x,))`."
        )
    # Wrapped, a stage of a net is a plain function of its named parameters.
    stage_function = partial(function) if isinstance(function, PositionalStage) else function
    model = Model((Stage(stage_function),), None, ("batch",))
    traces = Traces(model)
    leaves = {"params": tree.flatten(params), "x": tree.flatten(x)}
    reads = tuple((label, tuple(map(aval_with_grad, label_leaves))) for label, (label_leaves, _) in leaves.items())
    specs = {label: spec for label, (_, spec) in leaves.items()}
    call = StageCall(0, reads, tuple(specs.items()), autograd_leaves=("x",))
    try:
        outline = traces.outline(call)
        dy = tuple(leaf._replace(wants_grad=False) if aval_wants_grad(leaf) else None for leaf in outline.avals("y"))
        all_leaves = tuple(range(len(dict(reads)["x"])))
        graph = traces.graph(call, {"dy": dy}).graph
        if graph.generator_devices:
            raise Untraceable("it draws random numbers, for which only a step has a key")
        return Linearized(Cut(graph, (("dx", all_leaves),)), {**specs, **outline.specs})
    except Untraceable as error:
        raise ValueError(f"this function cannot be written down as torch ops: {error}") from error
