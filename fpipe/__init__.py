"""fpipe: functional pipeline parallelism for PyTorch. A training step is a program, and a program is a value."""

import importlib
from types import ModuleType

from fpipe import interop, schedules
from fpipe.check import check
from fpipe.graphs.keep import keep
from fpipe.graphs.keys import fold_in
from fpipe.graphs.linearize import Linearized, linearize
from fpipe.model import Model, Stage
from fpipe.models.custom import custom_stage
from fpipe.models.freeze import freeze
from fpipe.models.functions import from_functions
from fpipe.models.loss import from_loss
from fpipe.models.loss_graph import boundary
from fpipe.models.params import add_grads, assign_grads, global_norm, join_params, split_params
from fpipe.models.sequential import deferred_batch_norm, from_sequential
from fpipe.models.skips import Pop, Stash
from fpipe.pictures.plot import plot
from fpipe.program import Input, Kind, Op, Output, Program, ProgramError, Value, pair, register_kind
from fpipe.runtimes.build import build
from fpipe.runtimes.meaning import register_meaning
from fpipe.runtimes.profile import profile
from fpipe.runtimes.reference import reference
from fpipe.runtimes.result import Result
from fpipe.runtimes.sizes import Sizes, sizes
from fpipe.runtimes.verify import GradientMismatch, Report, verify
from fpipe.timing.average import average
from fpipe.timing.balance import balance
from fpipe.timing.bounds import Bounds, bounds
from fpipe.timing.costs import Costs, register_cost
from fpipe.timing.plan import Plan, plan
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
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
from fpipe.transforms.specs import Chunk, Replicate, Sum, register_spec
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import merge_backward, split_backward

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
