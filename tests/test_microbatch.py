"""Cutting a batch into microbatches and joining them again gives the batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe import tree
from fpipe.meaning.single_device import microbatch
from fpipe.meaning.single_device.microbatch import join
from tests.refusals import refusals
from tests.test_tree import Node, OptreeNode


def trees_equal(first_tree, other_tree):
    (tree_leaves, spec), (other_leaves, other_spec) = tree.flatten(first_tree), tree.flatten(other_tree)
    return spec == other_spec and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(tree_leaves, other_leaves, strict=True)
    )


def cut_all(batch, count, spec=None, **options):
    return [microbatch.cut(batch, index, count, spec, **options) for index in range(count)]


# Recipes of trees: "rows 3 x" is a tensor with n rows of that shape, anything else stands for itself.
shapes = st.lists(st.integers(0, 3), max_size=2)
leaves = st.one_of(
    st.builds(lambda shape: ("rows", shape), shapes),
    st.builds(lambda value: ("scalar", value), st.floats(-1e6, 1e6)),
    st.sampled_from([("plain", value) for value in (None, "word", 7, 2.5, True)]),
)
recipes = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.builds(lambda values: ("list", values), st.lists(children, max_size=3)),
        st.builds(lambda values: ("tuple", values), st.lists(children, max_size=3)),
        st.builds(lambda values: ("dict", values), st.dictionaries(st.sampled_from("zyxa"), children, max_size=3)),
    ),
    max_leaves=8,
)


def build_tree(recipe, n):
    kind, argument = recipe
    if kind == "rows":
        return torch.arange(float(n * torch.Size(argument).numel())).reshape(n, *argument)
    if kind == "scalar":
        return torch.tensor(argument)
    if kind == "plain":
        return argument
    if kind == "dict":
        return {key: build_tree(value, n) for key, value in argument.items()}
    return {"list": list, "tuple": tuple}[kind](build_tree(value, n) for value in argument)


@given(recipes, st.integers(1, 9), st.integers(1, 9))
def test_join_undoes_cut(recipe, count, extra_rows):
    n = count + extra_rows - 1
    batch = [torch.arange(n), build_tree(recipe, n)]
    parts = cut_all(batch, count)
    assert trees_equal(join([part for part, _ in parts], [size for _, size in parts]), batch)


@given(st.integers(1, 30), st.integers(1, 30))
def test_microbatches_are_views_as_torch_splits(n, size):
    x = torch.arange(n)
    for parts, expected in (
        (cut_all(x, size) if n >= size else [], x.tensor_split(size) if n >= size else ()),
        (cut_all(x, -(-n // size), size=size), x.split(size)),
    ):
        assert [(part.tolist(), length) for part, length in parts] == [(part.tolist(), len(part)) for part in expected]
        assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part, _ in parts)


def test_registered_nodes_are_cut_and_joined():
    for node_class in (Node, OptreeNode):
        parts = [part for part, _ in cut_all(node_class(torch.arange(5), "name"), 2)]
        assert [part.children[0].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
        joined = join(parts)
        assert type(joined) is node_class
        assert (joined.children[0].tolist(), joined.children[1]) == ([0, 1, 2, 3, 4], "name")


test_ambiguous_batches_are_refused = refusals(
    globals(),
    """
microbatch.count_batch_rows(([torch.zeros(4)], torch.zeros(3)))
    ValueError: inputs[0] has 4 rows, target has 3.
microbatch.count_batch_rows((torch.zeros(4), {"r": torch.zeros(3)}), label=("left", "right"))
    ValueError: left has 4 rows, right['r'] has 3.
microbatch.count_batch_rows((torch.tensor(1.0), "word"))
    ValueError: no leaf of the batch has rows: scalars, non-tensors
microbatch.count_batch_rows(torch.zeros(3), "rows")
    ValueError: 'rows' does not say how a leaf is cut or joined
join([[torch.tensor(1)], [torch.tensor(2)]])
    ValueError: outputs[0] is tensor(1) in microbatch 0 and tensor(2)
join([True, 1])
    ValueError: outputs is True in microbatch 0 and 1 in microbatch 1
join([])
    ValueError: nothing to join
""",
)
