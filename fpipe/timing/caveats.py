"""Name what a schedule's time and memory leave out: parameters that are held twice, moves that take no time."""

from __future__ import annotations

from fpipe.program import PARAMETERS, Program
from fpipe.timing.costs import Costs, computing


def caveats(program: Program, costs: Costs) -> str:
    """Caveats of a program under some costs, in the few words that a row of a table has room for.

    >>> import fpipe
    >>> program = {name: fpipe.schedules.about(name).program(2, 4) for name in ("chimera", "roundpipe", "pipe_offload")}
    >>> caveats(program["chimera"], Costs()), caveats(program["roundpipe"], Costs())
    ('parameters on 2 ranks', 'free host transfers')
    >>> caveats(program["pipe_offload"], Costs()), caveats(program["pipe_offload"], Costs(offload=0.1))
    ('free offload', '')
    """
    found: list[str] = []
    homes = {end.value: end.homes for end in program.inputs if end.value.name in PARAMETERS}
    replicas = max(map(len, homes.values()), default=1)
    if replicas > 1:
        found.append(f"parameters on {replicas} ranks")
    kinds = {op.kind for op in program.ops}
    if "OFFLOAD" in kinds and not (costs.offload or costs.host_bandwidth):
        found.append("free offload")
    moved = next((kind for kind in ("GATHER", "REDUCE") if kind in kinds), None)  # between replicas
    if moved and not any(op.kind == moved and costs.seconds(op) for op in program.ops):
        found.append(f"free {moved.lower()}")
    working = computing(program)
    trips = [(value, home, rank) for value, where in homes.items() for home in {*where} - working for rank in working]
    if trips and not any(costs.latency(home, rank) or costs.carrying(value, home, rank) for value, home, rank in trips):
        found.append("free host transfers")
    return "; ".join(found)
