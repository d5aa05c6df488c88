"""fpipe: functional pipeline parallelism for PyTorch. A training step is a program, and a program is a value."""

import importlib
from types import ModuleType

from fpipe import interop, schedules
from fpipe.average import average
from fpipe.balance import balance
from fpipe.bounds import Bounds, bounds
from fpipe.check import check
from fpipe.costs import Costs, register_cost
from fpipe.custom import custom_stage
from fpipe.freeze import freeze
from fpipe.functions import from_functions
from fpipe.kept import keep
from fpipe.keys import fold_in
from fpipe.linearize import Linearized, linearize
from fpipe.loss_graph import boundary
from fpipe.marked import from_loss
from fpipe.models import Model, Stage
from fpipe.modules import deferred_batch_norm, from_sequential
from fpipe.params import add_grads, assign_grads, global_norm, join_params, split_params
from fpipe.plan import Plan, plan
from fpipe.plot import plot
from fpipe.profile import profile
from fpipe.program import Input, Kind, Op, Output, Program, ProgramError, Value, pair, register_kind
from fpipe.reference import reference
from fpipe.result import Result
from fpipe.runtimes.build import build
from fpipe.runtimes.meaning import register_meaning
from fpipe.runtimes.sizes import Sizes, sizes
from fpipe.simulate import simulate
from fpipe.skips import Pop, Stash
from fpipe.specs import Chunk, Replicate, Sum, register_spec
from fpipe.timeline import Timeline
from fpipe.training import program
from fpipe.transforms.chain import chain, identity
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.communicate import communicate
from fpipe.transforms.forward_only import forward_only
from fpipe.transforms.free import free
from fpipe.transforms.merge import merge
from fpipe.transforms.offload import offload
from fpipe.transforms.place import place
from fpipe.transforms.reorder import reorder
from fpipe.transforms.slice_sequence import slice_sequence
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import merge_backward, split_backward
from fpipe.verify import GradientMismatch, Report, verify

__all__ = [
    "Bounds",
    "Chunk",
    "Costs",
    "GradientMismatch",
    "Input",
    "Kind",
    "Linearized",
    "Model",
    "Op",
    "Output",
    "Plan",
    "Pop",
    "Program",
    "ProgramError",
    "Replicate",
    "Report",
    "Result",
    "Sizes",
    "Stage",
    "Stash",
    "Sum",
    "Timeline",
    "Value",
    "add_grads",
    "assign_grads",
    "average",
    "balance",
    "boundary",
    "bounds",
    "build",
    "chain",
    "check",
    "checkpoint",
    "communicate",
    "custom_stage",
    "deferred_batch_norm",
    "fold_in",
    "forward_only",
    "free",
    "freeze",
    "from_functions",
    "from_loss",
    "from_sequential",
    "global_norm",
    "identity",
    "interop",
    "join_params",
    "keep",
    "linearize",
    "merge",
    "merge_backward",
    "offload",
    "pair",
    "place",
    "plan",
    "plot",
    "profile",
    "program",
    "reference",
    "register_cost",
    "register_kind",
    "register_meaning",
    "register_spec",
    "reorder",
    "schedules",
    "simulate",
    "sizes",
    "slice_sequence",
    "split",
    "split_backward",
    "split_params",
    "verify",
]


def __getattr__(name: str) -> ModuleType:
    """`fpipe.testing` is imported when it is first asked for: it needs hypothesis, which is an extra."""
    if name == "testing":
        return importlib.import_module("fpipe.testing")
    raise AttributeError(f"module 'fpipe' has no attribute {name!r}")
