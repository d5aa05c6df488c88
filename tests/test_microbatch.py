import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from fpipe import tree
from fpipe.single_device.joining import join
from fpipe.single_device.microbatch import cut, rows
from fpipe.transforms.specs import Chunk, Replicate
from tests.test_tree import Node, OptreeNode


def same(one, other):
    (ones, spec), (others, other_spec) = tree.flatten(one), tree.flatten(other)
    return spec == other_spec and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def cuts(whole, count, spec=None, **more):
    return [cut(whole, index, count, spec, **more) for index in range(count)]


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
def test_sizes_are_those_of_tensor_split(n, count):
    if n >= count:
        x = torch.arange(n)
        assert [part.tolist() for part, _ in cuts(x, count)] == [part.tolist() for part in x.tensor_split(count)]


@given(st.integers(1, 30), st.integers(1, 30))
def test_microbatches_of_a_size_are_those_of_split(n, size):
    x = torch.arange(n)
    found = cuts(x, -(-n // size), size=size)
    assert [part.tolist() for part, _ in found] == [part.tolist() for part in x.split(size)]
    assert [length for _, length in found] == [len(part) for part in x.split(size)]


def test_microbatches_are_views_of_the_batch():
    x = torch.zeros(7, 2)
    part, size = cut(x, 3, 4)
    assert size == 1
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_registered_nodes_are_cut_and_joined():
    for kind in (Node, OptreeNode):
        parts = [part for part, _ in cuts(kind(torch.arange(5), "name"), 2)]
        assert [part.children[0].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
        whole = join(parts)
        assert type(whole) is kind
        assert (whole.children[0].tolist(), whole.children[1]) == ([0, 1, 2, 3, 4], "name")


@pytest.mark.parametrize(
    "spec",
    [
        (Replicate(), Chunk(1), Replicate()),
        (Replicate, Chunk(-2), None),
        (_Replicate, TensorChunkSpec(1), _Replicate()),
    ],
)
def test_a_spec_is_a_prefix_of_the_batch(spec):
    whole = (torch.tensor(3.0), [torch.arange(24.0).reshape(3, 4, 2), torch.arange(12.0).reshape(3, 4, 1)], 42)
    parts = [part for part, _ in cuts(whole, 3, spec)]
    assert [tuple(part[1][0].shape) for part in parts] == [(3, 2, 2), (3, 1, 2), (3, 1, 2)]
    assert same(join(parts, spec=spec), whole)


def test_a_spec_may_be_a_function():
    whole = {"x": torch.arange(4), "table": torch.arange(9)}
    (part, _), _ = cuts(whole, 2, lambda leaf: Replicate() if len(leaf) == 9 else Chunk())
    assert (len(part["x"]), len(part["table"])) == (2, 9)
    assert join([1, 2, 3], spec=sum) == 6
    assert join([torch.tensor(1.0), torch.tensor(2.0)], spec=_CustomReducer(torch.tensor(0.0), torch.add)) == 3


def test_scalars_are_a_mean_weighted_by_rows():
    assert join([torch.tensor(1.0), torch.tensor(4.0)], [2, 1]) == 2
    assert join([torch.tensor(1.0), torch.tensor(4.0)]) == 2.5


REFUSED = {
    "inputs[0] has 4 rows, target has 3.": lambda: rows(([torch.zeros(4)], torch.zeros(3))),
    "left has 4 rows, right['r'] has 3.": lambda: rows((torch.zeros(4), {"r": torch.zeros(3)}), what=("left", "right")),
    "no leaf of the batch has rows: scalars, non-tensors": lambda: rows((torch.tensor(1.0), "word")),
    "'rows' does not say how a leaf is cut or joined": lambda: rows(torch.zeros(3), "rows"),
    "outputs[0] is tensor(1) in microbatch 0 and tensor(2)": lambda: join([[torch.tensor(1)], [torch.tensor(2)]]),
    "outputs is True in microbatch 0 and 1 in microbatch 1": lambda: join([True, 1]),
    "there is nothing to join": lambda: join([]),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_ambiguous_is_refused(sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        REFUSED[sentence]()
