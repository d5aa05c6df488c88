"""Cutting and joining trees: one undoes the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe import tree
from fpipe.meaning.single_device import microbatch
from fpipe.meaning.single_device.microbatch import join
from tests.refusals import refusals
from tests.test_tree import Node, OptreeNode


def same(one, other):
    (ones, spec), (others, other_spec) = tree.flatten(one), tree.flatten(other)
    return spec == other_spec and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def cuts(whole, count, spec=None, **more):
    return [microbatch.cut(whole, index, count, spec, **more) for index in range(count)]


# Recipes of trees: "rows 3 x" is a tensor with n rows of that shape, anything else stands for itself.
shapes = st.lists(st.integers(0, 3), max_size=2)
leaves = st.one_of(
    st.builds(lambda shape: ("rows", shape), shapes),
    st.builds(lambda value: ("scalar", value), st.floats(-1e6, 1e6)),
    st.sampled_from([("plain", value) for value in (None, "word", 7, 2.5, True)]),
)
recipes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda found: ("list", found), st.lists(inner, max_size=3)),
        st.builds(lambda found: ("tuple", found), st.lists(inner, max_size=3)),
        st.builds(lambda found: ("dict", found), st.dictionaries(st.sampled_from("zyxa"), inner, max_size=3)),
    ),
    max_leaves=8,
)


def built(recipe, n):
    kind, what = recipe
    if kind == "rows":
        return torch.arange(float(n * torch.Size(what).numel())).reshape(n, *what)
    if kind == "scalar":
        return torch.tensor(what)
    if kind == "plain":
        return what
    if kind == "dict":
        return {key: built(value, n) for key, value in what.items()}
    return {"list": list, "tuple": tuple}[kind](built(value, n) for value in what)


@given(recipes, st.integers(1, 9), st.integers(1, 9))
def test_join_undoes_cut(recipe, count, more):
    n = count + more - 1
    whole = [torch.arange(n), built(recipe, n)]
    parts = cuts(whole, count)
    assert same(join([part for part, _ in parts], [size for _, size in parts]), whole)


@given(st.integers(1, 30), st.integers(1, 30))
def test_microbatches_are_views_as_torch_splits(n, size):
    x = torch.arange(n)
    for each, right in (
        (cuts(x, size) if n >= size else [], x.tensor_split(size) if n >= size else ()),
        (cuts(x, -(-n // size), size=size), x.split(size)),
    ):
        assert [(part.tolist(), length) for part, length in each] == [(part.tolist(), len(part)) for part in right]
        assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part, _ in each)


def test_registered_nodes_are_cut_and_joined():
    for kind in (Node, OptreeNode):
        parts = [part for part, _ in cuts(kind(torch.arange(5), "name"), 2)]
        assert [part.children[0].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
        whole = join(parts)
        assert type(whole) is kind
        assert (whole.children[0].tolist(), whole.children[1]) == ([0, 1, 2, 3, 4], "name")


test_what_is_ambiguous_is_refused = refusals(
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
    ValueError: there is nothing to join
""",
)
