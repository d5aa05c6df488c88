"""fpipe: functional pipeline parallelism for PyTorch. A training step is a program, and a program is a value."""

import importlib
import pkgutil
import sys
import warnings
from types import FunctionType
from typing import TYPE_CHECKING, Any

import fpipe.limits as _limits
import fpipe.schedules.search_request as _search_request
from fpipe import schedules
from fpipe.check import check
from fpipe.model import Model, Stage
from fpipe.program import Input, Kind, Op, Output, Program, ProgramError, Value, pair, register_kind
from fpipe.schedules.compare import Comparison, compare
from fpipe.timing.amounts import register_cost
from fpipe.timing.balance import balance
from fpipe.timing.bounds import Bounds, bounds
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import chain, identity
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.communicate import communicate, free
from fpipe.transforms.data_parallel import data_parallel
from fpipe.transforms.merge import merge
from fpipe.transforms.offload import offload
from fpipe.transforms.place import place
from fpipe.transforms.reorder import reorder
from fpipe.transforms.shard import shard
from fpipe.transforms.slice_sequence import slice_sequence
from fpipe.transforms.specs import Chunk, Replicate, Sum, register_spec
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import forward_only, merge_backward, split_backward
from fpipe.transforms.steps import steps
from fpipe.transforms.training import program
from fpipe.transforms.update import update


def _order_by_cost(program: Program, request: _search_request.SearchRequest) -> Program:
    # The room `finding` imports schedules, so schedules cannot import it: it is put into their list from here, above
    # both, and imported at the first search.
    from fpipe.finding.by_cost import order_by_cost

    return order_by_cost(program, request)


_search_request.SEARCHES.append(_order_by_cost)

# torch warns at import where numpy is missing, which fpipe does not need.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

if TYPE_CHECKING:
    from fpipe import interop as interop
    from fpipe import testing as testing
    from fpipe.derived.custom_stage import custom_stage
    from fpipe.derived.deferred_batch_norm import deferred_batch_norm
    from fpipe.derived.freeze import evaluating, freeze
    from fpipe.derived.jvp import Dual, jvp, make_dual, unpack_dual
    from fpipe.derived.per_example import per_example
    from fpipe.derived.spread_vocabulary import spread_vocabulary
    from fpipe.finding.search import search
    from fpipe.finding.search_result import SearchResult
    from fpipe.graphs.linearize import Linearized, linearize
    from fpipe.graphs.tracing.collective_stage import exchange
    from fpipe.graphs.tracing.marks import boundary, keep
    from fpipe.meaning.from_functions import from_functions
    from fpipe.meaning.meaning import register_meaning
    from fpipe.meaning.optimizers.optimizer_state import optimizer_state
    from fpipe.meaning.optimizers.rules import register_update
    from fpipe.meaning.purity.fingerprint import StepChanged
    from fpipe.meaning.purity.keys import fold_in
    from fpipe.meaning.single_device.pack import pack
    from fpipe.meaning.single_device.pad import pad
    from fpipe.meaning.single_device.reference import reference
    from fpipe.meaning.single_device.result import Result
    from fpipe.meaning.step import Step
    from fpipe.measuring.length_costs import LengthCosts, fit_lengths
    from fpipe.measuring.profile import estimate, profile
    from fpipe.measuring.sizes import Sizes, sizes
    from fpipe.models.from_loss import from_loss
    from fpipe.models.from_module import from_module
    from fpipe.models.from_sequential import from_sequential
    from fpipe.models.modules.skips import Pop, Stash
    from fpipe.models.parameters.checkpoints import load, save
    from fpipe.models.parameters.first_values import shard_params
    from fpipe.models.parameters.gather import gather_state_dict
    from fpipe.models.parameters.grads import add_grads, assign_grads, clip_grads, global_norm
    from fpipe.models.parameters.load import init_params, load_params
    from fpipe.models.parameters.params import join_params, local_params, split_params
    from fpipe.oracle.compare_grads import compare_grads
    from fpipe.oracle.compare_run import compare_run
    from fpipe.oracle.compare_step import compare_step
    from fpipe.pictures.plot import plot
    from fpipe.pictures.style import Style
    from fpipe.planning.candidates import Candidates, Machine
    from fpipe.planning.plan import Plan, plan
    from fpipe.planning.plan_run import plan_run
    from fpipe.planning.run_plan import RunPlan
    from fpipe.recording.record_run import record_run
    from fpipe.runtimes.build import build
    from fpipe.runtimes.faults.fault_store import RankError
    from fpipe.verification.placements import check_placements
    from fpipe.verification.report import GradientMismatch, Report
    from fpipe.verification.verify import verify

# Public names that are imported at their first use. Those that run a model import torch, which takes twenty times as
# long as everything that writes and simulates a schedule; those that search, plan and draw take a third of that time.
# A type checker reads the imports above; tests/test_imports.py compares both lists.
_LAZY_NAMES = {
    "finding.search_result": ("SearchResult",),
    "finding.search": ("search",),
    "pictures.plot": ("plot",),
    "pictures.style": ("Style",),
    "planning.candidates": ("Candidates", "Machine"),
    "planning.plan": ("Plan", "plan"),
    "planning.plan_run": ("plan_run",),
    "planning.run_plan": ("RunPlan",),
    "graphs.tracing.marks": ("boundary", "keep"),
    "meaning.purity.keys": ("fold_in",),
    "graphs.linearize": ("Linearized", "linearize"),
    "derived.custom_stage": ("custom_stage",),
    "derived.deferred_batch_norm": ("deferred_batch_norm",),
    "derived.freeze": ("evaluating", "freeze"),
    "derived.spread_vocabulary": ("spread_vocabulary",),
    "graphs.tracing.collective_stage": ("exchange",),
    "meaning.from_functions": ("from_functions",),
    "models.from_loss": ("from_loss",),
    "models.from_module": ("from_module",),
    "models.from_sequential": ("from_sequential",),
    "models.parameters.checkpoints": ("load", "save"),
    "models.parameters.gather": ("gather_state_dict",),
    "models.parameters.grads": ("add_grads", "assign_grads", "clip_grads", "global_norm"),
    "derived.jvp": ("Dual", "jvp", "make_dual", "unpack_dual"),
    "models.parameters.load": ("init_params", "load_params"),
    "models.parameters.params": ("join_params", "local_params", "split_params"),
    "models.parameters.first_values": ("shard_params",),
    "derived.per_example": ("per_example",),
    "models.modules.skips": ("Pop", "Stash"),
    "meaning.optimizers.rules": ("register_update",),
    "meaning.optimizers.optimizer_state": ("optimizer_state",),
    "runtimes.build": ("build",),
    "meaning.meaning": ("register_meaning",),
    "meaning.purity.fingerprint": ("StepChanged",),
    "meaning.step": ("Step",),
    "measuring.length_costs": ("LengthCosts", "fit_lengths"),
    "measuring.profile": ("estimate", "profile"),
    "meaning.single_device.pack": ("pack",),
    "meaning.single_device.pad": ("pad",),
    "meaning.single_device.reference": ("reference",),
    "runtimes.faults.fault_store": ("RankError",),
    "meaning.single_device.result": ("Result",),
    "measuring.sizes": ("Sizes", "sizes"),
    "oracle.compare_grads": ("compare_grads",),
    "oracle.compare_run": ("compare_run",),
    "oracle.compare_step": ("compare_step",),
    "verification.placements": ("check_placements",),
    "recording.record_run": ("record_run",),
    "verification.report": ("GradientMismatch", "Report"),
    "verification.verify": ("verify",),
}
_MODULE_BY_NAME = {name: home for home, names in _LAZY_NAMES.items() for name in names}
__all__ = [
    "Bounds",
    "Candidates",
    "Chunk",
    "Cluster",
    "Comparison",
    "Costs",
    "Dual",
    "GradientMismatch",
    "Input",
    "Kind",
    "LengthCosts",
    "Linearized",
    "Machine",
    "Model",
    "Op",
    "Output",
    "Plan",
    "Pop",
    "Program",
    "ProgramError",
    "RankError",
    "Replicate",
    "Report",
    "Result",
    "RunPlan",
    "SearchResult",
    "Sizes",
    "Stage",
    "Stash",
    "Step",
    "StepChanged",
    "Style",
    "Sum",
    "Timeline",
    "Value",
    "add_grads",
    "assign_grads",
    "balance",
    "boundary",
    "bounds",
    "build",
    "chain",
    "check",
    "check_placements",
    "checkpoint",
    "clip_grads",
    "communicate",
    "compare",
    "compare_grads",
    "compare_run",
    "compare_step",
    "custom_stage",
    "data_parallel",
    "deferred_batch_norm",
    "estimate",
    "evaluating",
    "exchange",
    "fit_lengths",
    "fold_in",
    "forward_only",
    "free",
    "freeze",
    "from_functions",
    "from_loss",
    "from_module",
    "from_sequential",
    "gather_state_dict",
    "global_norm",
    "identity",
    "init_params",
    "interop",
    "join_params",
    "jvp",
    "keep",
    "linearize",
    "load",
    "load_params",
    "local_params",
    "make_dual",
    "merge",
    "merge_backward",
    "offload",
    "optimizer_state",
    "pack",
    "pad",
    "pair",
    "per_example",
    "place",
    "plan",
    "plan_run",
    "plot",
    "profile",
    "program",
    "record_run",
    "reference",
    "register_cost",
    "register_kind",
    "register_meaning",
    "register_spec",
    "register_update",
    "reorder",
    "save",
    "schedules",
    "search",
    "shard",
    "shard_params",
    "simulate",
    "sizes",
    "slice_sequence",
    "split",
    "split_backward",
    "split_params",
    "spread_vocabulary",
    "steps",
    "unpack_dual",
    "update",
    "verify",
]


# Inside, functions trust their arguments; here, at the door, they are checked.
_limits.check_public_functions(globals())


def _folders() -> set[str]:
    return {name for _, name, is_folder in pkgutil.iter_modules(__path__) if is_folder}


def __dir__() -> list[str]:
    """List the public names and folders; a folder that is not listed is imported where it is named."""
    public_folders = ("callbacks", "integrations", "testing")
    return sorted({*__all__, *public_folders, *(name for name in globals() if name.startswith("__"))})


# Hidden from type checkers, which would accept any name as an attribute of a module with __getattr__.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a lazy name, or a folder, at its first use."""
        if name in _MODULE_BY_NAME:
            attribute = getattr(importlib.import_module(f"fpipe.{_MODULE_BY_NAME[name]}"), name)
            is_open = isinstance(attribute, FunctionType) and attribute.__module__ != __name__
            attribute = _limits.checked(attribute) if is_open else attribute
        elif name in _folders():
            attribute = importlib.import_module(f"fpipe.{name}")
        else:
            if not name.startswith("_") and name in importlib.import_module("fpipe.schedules").names():
                raise AttributeError(f"module 'fpipe' has no attribute {name!r}: write fpipe.schedules.{name}")
            raise AttributeError(f"module 'fpipe' has no attribute {name!r}", name=name, obj=sys.modules["fpipe"])
        globals()[name] = attribute
        return attribute
