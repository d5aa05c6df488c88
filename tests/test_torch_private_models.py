"""Private parts of torch that cut models: each message says what breaks without them."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fpipe import torch_internals
from fpipe.torch_private import fx as private
from fpipe.torch_private.dispatch import without_checkpoints

AUTO_ROWS = ({0: torch.export.Dim.AUTO},)


class EveryContext(nn.Module):
    """Run in each context that a trace records, and branch on the number of rows."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
        return {"y": y.float() * scale if x.shape[0] > 2 else y}


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(EveryContext(), (torch.ones(4, 4),), strict=False, dynamic_shapes=AUTO_ROWS)


def row_size() -> Any:
    """Return the symbolic number of rows of an exported net."""
    (placeholder,) = exported().graph.find_nodes(op="placeholder")
    return placeholder.meta["val"].shape[0]


def test_contexts_are_nodes_of_a_trace() -> None:
    targets = {node.target for node in private.trace_above_autograd(EveryContext(), [torch.ones(4, 4)]).graph.nodes}
    expected = {private.SET_GRAD, private.ENTER_AUTOCAST, private.EXIT_AUTOCAST}
    assert expected <= targets, "no_grad and autocast are other nodes in a trace: cut stages would run without them"


def test_a_branch_on_a_number_that_is_computed_ends_a_trace() -> None:
    x = private.make_fake(private.open_fake_mode(), torch.ones(4), rows_are_open=True)
    with pytest.raises(private.undecided_branch_error()):
        assert x.sum() > 0, "a trace goes on where Python branches on data: from_loss would cut one of the two"


class BranchOnFoundRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.where(x[:, 0] > 0)
        assert private.depends_on_data(rows.shape[0]), "a size that depends on data is not told from an open one"
        assert not private.depends_on_data(x.shape[0]), "an open size is taken to depend on data"
        return x if len(rows) == 0 else x * 2


def test_an_export_that_depends_on_data_is_recognized() -> None:
    with pytest.raises(Exception, match="data-dependent") as error_info:
        torch.export.export(BranchOnFoundRows(), (torch.ones(4, 4),), strict=False, dynamic_shapes=AUTO_ROWS)
    assert private.is_data_dependence(error_info.value), "an export ends in another error where Python looks at data"
    assert not private.is_data_dependence(ValueError())


def test_contexts_are_calls_of_graphs_in_an_export() -> None:
    targets = {node.target: node for node in exported().graph.nodes}
    assert targets.keys() >= private.GRAPH_CALLS.keys(), "an export says no_grad and autocast in another way"
    for call, count in private.GRAPH_CALLS.items():
        body = targets[call].args[count]
        assert isinstance(body, fx.Node), f"{call} has another number of settings before the graph that it calls"
        assert body.op == "get_attr", f"{call} has another number of settings before the graph that it calls"


def test_vmap_is_recognized_in_an_export() -> None:
    class Maps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(torch.sin)(x)

    nodes = torch.export.export(Maps(), (torch.ones(4, 4),), strict=False).graph.nodes
    assert any(map(private.is_of_vmap, nodes)), "vmap is other nodes in an export: it would be cut, not refused"


def test_an_exported_call_has_its_pytrees() -> None:
    inputs, output = private.call_trees(exported(), ["x"], ["y"])
    assert (inputs, output) == ((("x",), {}), {"y": "y"}), "an exported program has other specs of its call"


def test_a_tensor_in_a_plain_attribute_is_an_error_of_an_export() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x + 1
            return self.kept

    with pytest.raises(Exception, match="assigned during export") as error_info, private.silence_export():
        torch.export.export(Keeps(), (torch.ones(4),), strict=False)
    assert isinstance(error_info.value, UserWarning), (
        "torch warns in other words of a tensor that a net keeps: none is seen"
    )


def test_an_open_size_has_an_expression_and_a_number() -> None:
    size = row_size()
    assert private.sympy_expression(size).is_Symbol, "an open size has no symbol at node.expr"
    assert private.example_number(size) == 4, "an open size has not its number in the example at node.hint"
    assert private.evaluate_expression(2 * private.sympy_expression(size), {private.sympy_expression(size): 3}) == 6, (
        "sympy_interp computes no expression of sizes any more"
    )
    assert not private.has_floor(private.sympy_expression(size)), "a symbol is taken for a quotient that is rounded"


def test_leaves_with_as_many_rows_have_symbols_of_their_own() -> None:
    mode = private.open_fake_mode()
    first_leaf, second_leaf = (private.make_fake(mode, torch.ones(4, 4), rows_are_open=True) for _ in range(2))
    symbols = {str(private.sympy_expression(open_leaf.shape[0])) for open_leaf in (first_leaf, second_leaf)}
    assert len(symbols) == 2, "two leaves share a symbol: a table with as many rows as the batch would be split"
    assert first_leaf.shape[1] == 4, "sizes that are not rows are open too"
    assert private.make_fake(mode, torch.ones(4), rows_are_open=False).shape[0] == 4, "fixed rows are open"


def test_branches_on_sizes_are_guards() -> None:
    size = row_size()
    guards = {str(guard) for guard in private.guards_of(private.shape_env_of(size))}
    assert guards == {f"{private.sympy_expression(size)} > 2"}, (
        "a function's own conditions on rows are not found by place"
    )


def test_a_graph_is_pickled_with_its_fake_tensors() -> None:
    graph = fx.Graph()
    (placeholder,) = exported().graph.find_nodes(op="placeholder")
    x = graph.node_copy(placeholder)
    graph.output(graph.call_function(torch.ops.aten.sin.default, (x,)))
    loaded = private.load_graph(private.dump_graph(fx.GraphModule(nn.Module(), graph)))
    assert torch.equal(loaded(torch.ones(2, 4)), torch.ones(2, 4).sin()), "a pickled graph computes something else"
    (copied,) = loaded.graph.find_nodes(op="placeholder")
    assert torch_internals.is_fake(copied.meta["val"]), "a pickled graph has lost the fake tensors of its trace"


def test_checkpoints_are_switched_off() -> None:
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    def refuse() -> Any:
        raise ValueError("reentrant")

    x = torch.ones(2, requires_grad=True)
    with without_checkpoints(refuse):
        y: Any = checkpoint(run, x, use_reentrant=False)
        with pytest.raises(ValueError, match="reentrant"):
            checkpoint(run, x, use_reentrant=True)
    y.sum().backward()
    assert len(calls) == 1, "checkpoint looks its functions up elsewhere: a trace would recompute, and lose gradients"
