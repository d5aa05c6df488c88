"""Sizes -> Transform: the schedules people say by name, and tables of your own."""

from fpipe.limits import check_public_functions
from fpipe.schedules.basic import eager_1f1b, gpipe, one_f_one_b, pipedream, pipedream_2bw
from fpipe.schedules.interleaved import group_interleaved, interleaved, interleaved_zb, kimi_k2, looped_bfs, seq1f1b
from fpipe.schedules.notations import from_generator, from_table
from fpipe.schedules.offloading import bpipe, pipe_offload
from fpipe.schedules.overlap import interleaved_overlap, one_f_one_b_overlap
from fpipe.schedules.priority import RankState, from_priority
from fpipe.schedules.registry import Schedule, about, get, names, register
from fpipe.schedules.round_robin import roundpipe
from fpipe.schedules.searched import v_half, v_min, zb_auto, zbv
from fpipe.schedules.two_ends import dualpipe, dualpipev
from fpipe.schedules.waves import chimera, hanayo, one_f_one_b_v
from fpipe.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "RankState",
    "Schedule",
    "about",
    "bpipe",
    "chimera",
    "dualpipe",
    "dualpipev",
    "eager_1f1b",
    "from_generator",
    "from_priority",
    "from_table",
    "get",
    "gpipe",
    "group_interleaved",
    "hanayo",
    "interleaved",
    "interleaved_overlap",
    "interleaved_zb",
    "kimi_k2",
    "looped_bfs",
    "names",
    "one_f_one_b",
    "one_f_one_b_overlap",
    "one_f_one_b_v",
    "pipe_offload",
    "pipedream",
    "pipedream_2bw",
    "register",
    "roundpipe",
    "seq1f1b",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
check_public_functions(globals())


def __dir__() -> list[str]:
    """The public names, and not the modules that they come from."""
    return __all__
