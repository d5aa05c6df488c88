"""Find the values that depend on one version of parameters alone, and compute them once for all ops that read them.

    0F0  0F1  0B0  0F2  0B1  0B2      -->      HOIST  0F0  0F1  0B0  0F2  0B1  0B2
                                               bf16 copies of the weights, from the first reader to the last

A version is what one op wrote: the arguments of the step, what an UPDATE or a RECV brought, or a GATHER for one use.
Ops of a rank that read the same version share one HOIST, an instruction just before the first of them. So nothing is
read before it has arrived, nor after an UPDATE has overwritten it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fpipe.graphs.compiling.code import OpenCode
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.compiling.hoist import hoisted_reads, hoisting_graph, param_storages
from fpipe.graphs.language.graph import Fact, Graph, Name
from fpipe.graphs.language.labels import is_parameter, reads_by_label
from fpipe.graphs.tracing.open_sizes import SizedGraph, SizeNumbers
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, StorageMap
from fpipe.runtimes.lowering.stage_calls import Coordinates


class Hoist(NamedTuple):
    """The values that ops compute from one version of parameters alone.

    Attributes:
        op: the HOIST, which reads the parameters and writes a value for each group.
        groups: the names of each group in the graph of the stage; the tensors of a group have their last reader in
            common.
        last_positions: the position of the last reader of each group.
        graph, run: what the HOIST computes, as a graph and as a function.
        numbers: the numbers for open sizes of the graph.
    """

    op: Op
    groups: tuple[tuple[Name, ...], ...]
    last_positions: tuple[int, ...]
    graph: Graph
    run: Callable[..., Any]
    numbers: SizeNumbers

    def values_read_last(self, position: int) -> Iterator[Value]:
        """Yield the values whose last reader is at a position."""
        pairs = zip(self.op.writes, self.last_positions, strict=True)
        return (value for value, last_position in pairs if last_position == position)

    def trees(self, trees: Mapping[Value, AbstractTree]) -> Iterator[tuple[Value, AbstractTree]]:
        """Yield the values that it writes with their abstract trees: views lie in the memory of the parameters."""
        facts, storages = self.graph.facts, StorageMap()
        storages.update((facts[name].storage, facts[name].storage) for name in self.graph.constants)
        for value, names in zip(self.op.reads, self.graph.reads.values(), strict=True):
            pairs = zip(names, trees[value].leaves, strict=True)
            storages.update((facts[name].storage, leaf.storage) for name, leaf in pairs if _is_read(name, leaf))
        for value, group in zip(self.op.writes, self.groups, strict=True):
            numbered_facts = (self.numbers.fact_of(self.graph, name) for name in group)
            yield value, AbstractTree(tuple(map(storages.translate, numbered_facts)))


def _is_read(name: Name | None, leaf: Any) -> bool:
    return name is not None and isinstance(leaf, Fact)


def find_hoists(
    ops: Sequence[Op],
    cuts: Mapping[Coordinates, Cut],
    numbers_by_cell: Mapping[Coordinates, SizeNumbers],
    parts: Mapping[int, Graph],
) -> tuple[dict[int, Hoist], dict[int, Hoist]]:
    """Find the hoists of a program.

    Args:
        ops: the ops of the program.
        cuts, numbers_by_cell: the cut of each stage, microbatch and slice, and the numbers for its open sizes.
        parts: the part of a stage's graph that an op runs, by the position of the op.

    Returns:
        Hoists by the positions of all their readers, and by the position of the first one.
    """
    # 1. The positions of the ops that share a version: on one rank, of one graph, sizes and cut, with the same
    #    parameters.
    positions_by_version = dict[tuple[Cut, SizeNumbers, int, tuple[Value, ...]], list[int]]()
    for position in parts:
        op = ops[position]
        cut, value_by_label = cuts[op[1:4]], {**reads_by_label(op), "const": Value("const", op.stage)}
        params = tuple(value_by_label[label] for label in cut.graph.reads if is_parameter(label))
        version = cut, numbers_by_cell[op[1:4]], op.rank, params
        positions_by_version.setdefault(version, []).append(position)
    # 2. What each of them reads, and so who reads a tensor last.
    by_reader, by_first_reader = dict[int, Hoist](), dict[int, Hoist]()
    for (cut, numbers, rank, params), positions in positions_by_version.items():
        names_by_position = {position: _hoisted_reads(cut, parts[position]) for position in positions}
        readers = [position for position in positions if names_by_position[position]]
        if not readers:
            continue
        groups_by_position = _group_by_last_reader(cut.graph, {k: names_by_position[k] for k in readers})
        groups = tuple(groups_by_position.values())
        number, stage = len(by_first_reader), ops[readers[0]].stage
        values = tuple(Value("hoisted", stage, number, port=port) for port in range(len(groups)))
        generate = partial(_generate_hoist, SizedGraph(cut.graph, numbers), groups)
        graph, code = cut.graph.compute_once((cut, "hoist", groups), generate)
        op = Op("HOIST", stage, number, None, rank, params, values)
        run, last_positions = code.with_numbers(numbers), tuple(groups_by_position)
        by_first_reader[readers[0]] = hoist = Hoist(op, groups, last_positions, graph, run, numbers)
        by_reader.update(dict.fromkeys(readers, hoist))
    return by_reader, by_first_reader


def _generate_hoist(example: SizedGraph, groups: Sequence[Sequence[Name]]) -> tuple[Graph, OpenCode]:
    hoisting = hoisting_graph(example.graph, groups)
    return hoisting, OpenCode(example._replace(graph=hoisting), "hoist")


def _hoisted_reads(cut: Cut, part: Graph) -> list[Name]:
    return part.compute_once((cut, "hoisted"), lambda: hoisted_reads(part, cut.values_of_params))


def _group_by_last_reader(graph: Graph, names_by_position: Mapping[int, Sequence[Name]]) -> dict[int, tuple[Name, ...]]:
    """Return the names of each group by the position of its last reader; tensors in one storage stay together."""
    names = dict.fromkeys(name for read_names in names_by_position.values() for name in read_names)
    # Views of parameters hold no memory of their own. One group of them is one list for an op to read.
    views = param_storages(graph)
    memory_by_name = {name: graph.facts[name].storage for name in names}
    memory_by_name |= {name: -1 for name, storage in memory_by_name.items() if storage in views}
    last_position: dict[int, int] = {}
    for position, read_names in names_by_position.items():
        last_position.update((memory_by_name[name], position) for name in read_names)
    groups: dict[int, tuple[Name, ...]] = {}
    for name, memory in memory_by_name.items():
        groups[last_position[memory]] = (*groups.get(last_position[memory], ()), name)
    return groups
