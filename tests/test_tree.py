from collections import OrderedDict, namedtuple

import optree
import torch
from torch.utils import _pytree

from fpipe import tree

Point = namedtuple("Point", "x y")


class Node:
    def __init__(self, *children):
        self.children = children


class OptreeNode(Node):
    pass


class Stranger(Node):
    pass


_pytree.register_pytree_node(Node, lambda node: (list(node.children), None), lambda children, _: Node(*children))
optree.register_pytree_node(
    OptreeNode, lambda node: (node.children, None), lambda _, children: OptreeNode(*children), namespace="torch"
)


def test_leaves_are_in_torchs_order():
    nested = {"b": 1, "a": [None, (2, {})], "c": Point(3, OrderedDict(z=4, y=5)), "e": Node(6, 7)}
    assert tree.leaves(nested) == _pytree.tree_leaves(nested) == [1, None, 2, 3, 4, 5, 6, 7]


def test_registered_classes_are_containers_and_others_are_leaves():
    stranger = Stranger(1)
    assert tree.leaves([Node(1), OptreeNode(2, 3), stranger]) == [1, 2, 3, stranger]


def test_dicts_of_another_order_meet_by_key():
    first, reordered = {"a": 1, "b": 2}, {"b": 20, "a": 10}
    assert tree.tree_map(lambda x, y: (x, y), first, reordered) == {"a": (1, 10), "b": (2, 20)}
    assert list(tree.in_order_of(first, reordered).items()) == [("a", 10), ("b", 20)]
    assert tree.first_difference(first, reordered) is None


def test_difference_names_the_first_place():
    assert tree.first_difference(({"a": 1, "b": 2},), ({"a": 1, "c": 2},)) == "[0]['b']"
    assert tree.first_difference([1], [1, 2]) == "[1]"
    assert tree.first_difference([1], [[1]]) == "[0]"


def test_paths_read_like_python():
    net = {"w": torch.zeros(1), "deep": [Point(1, None)]}
    assert [path for path, _ in tree.paths(net)] == ["['w']", "['deep'][0].x", "['deep'][0].y"]
    assert tree.paths(5) == [("", 5)]
