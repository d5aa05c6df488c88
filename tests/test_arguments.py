"""A wrong argument of a public function is named, with what its parameter takes and what came."""

import enum
import inspect
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import fpipe
from fpipe import callbacks, interop, schedules, testing
from tests.refusals import refusals
from tests.toys import linear, merged

CHECKED_CLASSES = (
    *(fpipe.Candidates, fpipe.Chunk, fpipe.Cluster, fpipe.Kind, fpipe.LengthCosts, fpipe.Machine, fpipe.Model),
    *(fpipe.Pop, fpipe.Stage, fpipe.Stash, fpipe.Style),
    *(callbacks.CSV, callbacks.Progress, callbacks.TensorBoard, callbacks.WandB, callbacks.Workload),
)
# Values that a parameter of an annotation refuses. Of others only `object()` is tried, which none allows.
WRONG_BY_ANNOTATION: dict[str, tuple[Any, ...]] = {
    "int": ("4", 4.5, None, [4], True),
    "float": ("4", None, [4.0], True),
    "bool": (1, "yes", None),
    "str": (3, None, ["dp"]),
    "Model": (3, "model", None, [], nn.Linear(1, 1)),
    "Program": (3, "program", None, [], fpipe.split(2)),
    "Sequence[Any]": (3, "params", None),
    "Callable[[Any, Any], Any]": (3, "loss", None, []),
}
UNCHECKED = ("Any", "object", "object | None")
# The engine's names in annotations of the core, which only type checkers import.
UNCHECKED_NAMES = ("DeviceMesh", "CheckBatch", "AuditSchedule", "torch.d", "tree.Spec")

MODEL = fpipe.from_functions([linear], nn.functional.mse_loss)
PROGRAM = merged(MODEL, 2)
PIPELINE = fpipe.chain(fpipe.split(2), fpipe.merge())
PARAMS, BATCH = ({"w": torch.eye(2)},), (torch.ones(2, 2), torch.ones(2, 2))


def public_functions() -> list[Callable[..., Any]]:
    modules = (fpipe, schedules, callbacks, interop, testing)
    functions = [getattr(module, name) for module in modules for name in module.__all__]
    return [*filter(inspect.isfunction, functions), *CHECKED_CLASSES]


def test_an_argument_of_a_wrong_kind_is_named_in_ten_words():
    lengths: list[int] = []
    for function in public_functions():
        for parameter in inspect.signature(function).parameters.values():
            annotation = str(parameter.annotation)
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not is_named or annotation in UNCHECKED or any(name in annotation for name in UNCHECKED_NAMES):
                continue
            for value in (object(), *WRONG_BY_ANNOTATION.get(annotation, ())):
                with pytest.raises(fpipe.limits.ArgumentError) as error_info:
                    function(**{parameter.name: value})
                assert str(error_info.value).startswith(f"{parameter.name} is "), function
                lengths.append(len(str(error_info.value).split()))
    assert len(lengths) > 1000
    assert statistics.median(lengths) <= 10


def test_a_checked_function_is_pickled_by_its_public_name():
    functions = (fpipe.build, fpipe.split, schedules.gpipe, schedules.from_table)
    assert pickle.loads(pickle.dumps(functions)) == functions


test_refusals = refusals(
    globals(),
    """
callbacks.CSV(3)
    TypeError: file is a string or a path; found 3.
callbacks.Progress(totl=3)
    TypeError: Progress() has no argument totl; did you mean total?
# Swapped arguments.
fpipe.save(PROGRAM, "folder", PARAMS)
    TypeError: folder is a string or a path; are folder and program swapped?
fpipe.save("folder", PARAMS, PROGRAM)
    TypeError: program is a Program; are program and params swapped?
fpipe.build(MODEL, PROGRAM)
    TypeError: program is a Program or a function; are program and model swapped?
fpipe.balance(2, [1, 2, 3])
    TypeError: costs is a list of numbers; are costs and parts swapped?
fpipe.clip_grads(1.0, PARAMS)
    TypeError: max_norm is a number; are max_norm and grads swapped?
# The way from what came to what is expected.
fpipe.plot(schedules.gpipe(2))
    TypeError: subject is a Program, a Timeline or a RunPlan; found a function. Apply the transform to a program,
fpipe.plot([PROGRAM, PROGRAM])
    TypeError: RunPlan; found a list. Several go one by one: plot(first, second).
fpipe.check(MODEL)
    TypeError: program is a Program; found a Model. fpipe.program(model) makes one.
fpipe.schedules.gpipe(PROGRAM)
    TypeError: gpipe() makes a transform; found a Program. Write gpipe(..)(program).
fpipe.merge(PROGRAM)
    TypeError: merge() makes a transform; found a Program. Write merge(..)(program).
fpipe.chain(PROGRAM, fpipe.merge())
    TypeError: chain() makes a transform; found a Program. Write chain(..)(program).
fpipe.chain([fpipe.split(2), fpipe.merge()])
    TypeError: transforms is a function; found a list. Several go one by one: chain(first, second).
fpipe.forward_only(3)
    TypeError: forward_only() has 1 arguments by position; it takes none.
fpipe.simulate(PROGRAM, {"F": 1})
    TypeError: costs is a Costs or a CostsOfLengths; found a dict. fpipe.Costs.per_rank(F=1, B=2) makes them.
schedules.gpipe(1)(nn.Linear(1, 1))
    TypeError: program is a Program; found a Linear. fpipe.from_module(net, ..) makes a model to cut.
fpipe.freeze(nn.Linear(1, 1), 0)
    TypeError: model is a Model; found a Linear. fpipe.from_module makes one of a net.
fpipe.program((MODEL, PARAMS, ()))
    TypeError: found a tuple. Of what a front end returns, the model is the first.
fpipe.from_sequential(nn.Linear(1, 1))
    TypeError: net is a Sequential; found a Linear. Use fpipe.from_module.
fpipe.from_sequential([nn.Linear(1, 1)])
    TypeError: net is a Sequential; found a list. nn.Sequential(*modules) makes one.
fpipe.from_module(nn.Linear, batch=BATCH)
    TypeError: found the class Linear.
fpipe.Cluster("2 ranks")
    TypeError: hosts is a whole number; found '2 ranks'. fpipe.Cluster.parse reads a text.
fpipe.shard_params(PARAMS, 2)
    TypeError: mesh is a DeviceMesh; found 2. torch.distributed.init_device_mesh makes one.
fpipe.update(torch.optim.SGD([torch.zeros(1)]))
    TypeError: An optimizer stays outside of a program.
fpipe.update(lambda p, g, s, lr: (p, s))
    TypeError: rule is a string or a class; found a function. fpipe.register_update gives a function a name.
# Elements, and arguments without a parameter.
fpipe.from_functions([linear, 3])
    TypeError: fns[1] is a function or a Stage; found 3.
fpipe.communicate(again={"y": 1})
    TypeError: again['y'] is a function; found 1.
fpipe.Program(PROGRAM.ops, PROGRAM.inputs, PROGRAM.outputs)
    TypeError: inputs[0] is an Input; found an Op.
fpipe.pair(PROGRAM.ops[0], "0B1")
    TypeError: parts is an Op; found '0B1'.
fpipe.save("folder", PROGRAM, PARAMS, step="3")
    TypeError: step is a number; found '3'.
fpipe.split(2, slice=2)
    TypeError: split() has no argument slice; did you mean slices?
fpipe.from_sequential(nn.Sequential(), 2, nn.functional.mse_loss)
    TypeError: from_sequential() has 3 arguments by position; pass by name: sizes, loss,
schedules.gpipe(2, 3)
    TypeError: gpipe() has 2 arguments by position; it takes ranks.
fpipe.Stage(*range(20))
    TypeError: Stage() has 20 arguments by position;
schedules.gpipe(int)
    TypeError: ranks is a whole number; found the class int.
# Words.
fpipe.merge(order="random")
    ValueError: order is 'microbatch' or 'schedule'; found 'random'.
fpipe.checkpoint("sometimes")
    ValueError: policy is 'always', 'except_last', 'never' or a function; found 'sometimes'.
""",
)


def test_numbers_of_numpy_are_numbers():
    """Used to pass the check of arguments, and be refused inside."""
    two = numpy.int64(2)
    schedule = schedules.hanayo(two, waves=numpy.int64(1))
    program = fpipe.chain(fpipe.split(two), schedule)(fpipe.program(numpy.int64(4)))
    assert str(program) == str(fpipe.chain(fpipe.split(2), schedules.hanayo(2, waves=1))(fpipe.program(4)))
    placed = fpipe.place(numpy.array([0, 1]), homes={numpy.int64(1): [two]})(fpipe.program(two))
    assert str(placed) == str(fpipe.place([0, 1], homes={1: [2]})(fpipe.program(2)))
    assert fpipe.simulate(PROGRAM, fpipe.Costs(numpy.float32(2))) == fpipe.simulate(PROGRAM, fpipe.Costs(2))
    with pytest.raises(ValueError, match=r"ranks is a whole number; found a Tensor\."):
        schedules.gpipe(torch.tensor(2))


def test_a_member_of_an_enum_of_strings_is_a_word():
    orders = enum.StrEnum("orders", {"SCHEDULE": "schedule", "RANDOM": "random"})
    program = fpipe.split(2)(fpipe.program(MODEL))
    assert str(fpipe.merge(order=orders.SCHEDULE)(program)) == str(fpipe.merge(order="schedule")(program))
    with pytest.raises(ValueError, match="order is 'microbatch' or 'schedule'"):
        fpipe.merge(order=orders.RANDOM)
