"""The check of every argument of a public function, and limits on the length, nesting and numbers of texts.

A program, a table or an option may come from an untrusted source. Whatever exceeds a limit is refused before anything
is built from it, so that no text takes all memory, all time or the whole stack of its reader.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TextIO, TypeVar, Union, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")

LONGEST_TEXT = 2**28  # characters of a file: a program of a million ops has 10**8
LONGEST_WORD = 1_000  # characters between spaces and commas: a cell, a value, a literal
LARGEST_SIZE = 20_000  # ranks, stages, microbatches, slices: each alone makes a program that is slow to print
MOST_OPS_OF_A_SHARE = 500  # of one kind, into which a schedule by name cuts a rank's share of a microbatch
MOST_OPS = 10_000_000  # of a program that is split; a million take 11 s and 1.3 GiB
MOST_PARTS = 16  # of a PAIR; hardware overlaps two
LARGEST_NUMBER = 2**64  # in a literal, of seconds or of bytes


def check_whole_number(name: str, number: object, *, minimum: int = 1, maximum: float = LARGEST_SIZE) -> int:
    """Return a whole number if it is within limits, else raise ValueError.

    >>> check_whole_number("ranks", 10**8)
    Traceback (most recent call last):
    ValueError: ranks is a whole number, at most 20000; found 100000000.
    """
    number = as_plain(number)
    if type(number) is not int or number < minimum:
        raise ValueError(f"{name} is a whole number, at least {minimum}; found {number!r}.")
    if number > maximum:
        raise ValueError(f"{name} is a whole number, at most {maximum}; found {shortened(repr(number), 30)}.")
    return number


def refuse_too_many_ops(forwards: int, microbatches: int) -> None:
    """Raise ValueError if the forwards and backwards alone exceed the ops of a program, before any is made."""
    ops = 2 * forwards
    if ops * check_whole_number("microbatches", microbatches) > MOST_OPS:
        raise ValueError(f"{microbatches} microbatches of {ops} ops are more than the {MOST_OPS} ops of a program.")


def read_text(stream: TextIO, name: str) -> str:
    """Read a text up to the longest that is accepted; a device such as /dev/zero has no end.

    >>> import io
    >>> read_text(io.StringIO("0F0 0B0"), "table.txt")
    '0F0 0B0'
    """
    text = stream.read(LONGEST_TEXT + 1)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{name} has more than {LONGEST_TEXT} characters, which no program needs.")
    return text


def shortened(text: str, max_length: int = 200) -> str:
    """Return the beginning of a text, as errors quote it."""
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def parse_expression(text: str) -> ast.expr:
    """Parse a Python expression from an untrusted text; nothing is evaluated.

    >>> ast.unparse(parse_expression("{'dim': 1}"))
    "{'dim': 1}"
    >>> parse_expression("(" * 1000)
    Traceback (most recent call last):
    ValueError: '((((((((((((((((((((...' is no Python literal, or nests too deeply.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two are the parser's own limits
        raise ValueError(f"{shortened(text, 20)!r} is no Python literal, or nests too deeply.") from None
    # 10**400 as an int would raise OverflowError wherever it meets a float; `not <` catches nan as well.
    for node in ast.walk(tree):
        number = node.value if isinstance(node, ast.Constant) else 0
        if isinstance(number, int | float | complex) and not abs(number) < LARGEST_NUMBER:
            raise ValueError(f"a number in {shortened(text)!r} is beyond {LARGEST_NUMBER:.3g}.")
    return tree


class ArgumentError(TypeError, ValueError):
    """An argument of a kind, or a word, that its parameter does not allow."""


def check_public_functions(names: dict[str, Any]) -> None:
    """Let each function in `__all__` of a package, given by its globals, check its arguments."""
    package = names["__name__"]
    functions = {name: names[name] for name in names["__all__"] if isinstance(names.get(name), types.FunctionType)}
    names.update({name: checked(f, package) for name, f in functions.items() if f.__module__ != package})


def checked(
    function: Callable[P, R], package: str = "fpipe", report: Callable[[Exception, Any, Any], None] | None = None
) -> Callable[P, R]:
    """Return a public function that refuses, by name, an argument that its annotation does not allow.

    Inside, functions trust their arguments. Annotations are read at the first call, so that an import costs nothing.
    `report` is called with the error, the arguments by position and those by name before the error is raised.

    >>> checked(check_whole_number)("ranks", 2, maximun=3)
    Traceback (most recent call last):
    fpipe.limits.ArgumentError: check_whole_number() has no argument maximun; did you mean maximum?
    """

    @wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            _parameters_of(function).check(args, kwargs)
        except ArgumentError as error:
            if report is not None:
                report(error, args, kwargs)
            raise
        inner_function: Any = function
        plain_kwargs = {name: as_plain(argument) for name, argument in kwargs.items()}
        return inner_function(*map(as_plain, args), **plain_kwargs)

    # pickle looks a function up by module and name, and takes it only if it finds the same object.
    door.__module__, door.__qualname__ = package, function.__name__
    return door


def as_plain(argument: Any) -> Any:
    """Return a whole number of numpy as an int, as programs and their texts have it, and anything else unchanged."""
    return int(argument) if isinstance(argument, Integral) and not isinstance(argument, bool) else argument


def checked_init(cls: type[R]) -> type[R]:
    """Let a class check the arguments of its constructor."""
    initialise: Any = cls.__init__
    cls.__init__ = checked(initialise, cls.__module__)
    return cls


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a function: annotations by name, and the names that a call may give by position or keyword."""

    function: str
    annotations: Mapping[str, Any]
    positional: Sequence[str]
    keywords: Sequence[str]
    args: str | None
    kwargs: str | None
    makes_transform: bool

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ArgumentError at the first argument that no parameter allows."""
        # A parameter of any kind, as in merge(outputs), would take a program too, and say later that it is no spec.
        if self.makes_transform and any(type(argument).__name__ == "Program" for argument in args):
            raise ArgumentError(
                f"{self.function}() makes a transform; found a Program. Write {self.function}(..)(program)."
            )
        extra_args = args[len(self.positional) :]
        if extra_args and self.args is None:
            by_name = ", ".join(name for name in self.keywords if name not in (*self.positional, *kwargs))
            # Python hands a constructor the object itself, which its caller did not write.
            positional = [name for name in self.positional if name != "self"]
            remedy = f"pass by name: {by_name}." if by_name else f"it takes {', '.join(positional) or 'none'}."
            count = len(positional) + len(extra_args)
            raise ArgumentError(f"{self.function}() has {count} arguments by position; {remedy}")
        by_position = dict(zip(self.positional, args, strict=False))
        arguments = (*by_position.items(), *((self.args, argument) for argument in extra_args), *kwargs.items())
        for name, argument in arguments:
            parameter = name if name in self.annotations else self.kwargs
            if parameter is None:
                close = difflib.get_close_matches(str(name), self.keywords, n=1, cutoff=0.4)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(self.keywords)}."
                raise ArgumentError(f"{self.function}() has no argument {name}; {hint}")
            if not is_allowed(argument, self.annotations[parameter]):
                self._refuse_swapped(parameter, by_position)
                raise argument_error(str(name), self.annotations[parameter], argument)

    def _refuse_swapped(self, name: str, arguments: Mapping[str, object]) -> None:
        """Raise ArgumentError if this argument and a peer would both be allowed once they were exchanged."""
        for peer, argument in arguments.items() if name in arguments else ():
            is_swapped = is_allowed(arguments[name], self.annotations[peer]) and peer not in (name, "self")
            if is_swapped and is_allowed(argument, self.annotations[name]):
                raise ArgumentError(f"{name} is {_describe(self.annotations[name])}; are {name} and {peer} swapped?")


@cache
def _parameters_of(function: Callable[..., Any]) -> _Parameters:
    names = vars(sys.modules[inspect.unwrap(function).__module__])
    signature = inspect.signature(function)
    parameters = signature.parameters.values()

    def names_of(*kinds: object) -> list[str]:
        return [param.name for param in parameters if param.kind in kinds]

    by_position, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return _Parameters(
        function.__qualname__.removesuffix(".__init__"),
        {param.name: _evaluate(param.annotation, names) for param in parameters},
        names_of(by_position),
        names_of(by_position, by_keyword),
        *(
            next(iter(names_of(kind)), None)
            for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ),
        makes_transform=str(signature.return_annotation) == "Transform",
    )


def _evaluate(annotation: object, names: dict[str, Any]) -> Any:
    """Return the type that an annotation writes; a name that only type checkers import allows everything."""
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def is_allowed(argument: object, annotation: Any) -> bool:
    """Whether an annotation allows an argument, and each part of a list or dict.

    A number is what converts to it, such as one of numpy, and no bool; a list may stand for a tuple.

    >>> is_allowed([1, "2"], Sequence[int]), is_allowed(2, float | None), is_allowed(True, int)
    (False, True, False)
    """
    if get_origin(annotation) in _UNIONS:
        return any(is_allowed(argument, alternative) for alternative in _alternatives(annotation, argument))
    if get_origin(annotation) is Literal:
        # A word may be a member of an enum of strings; True is no 1.
        return any(
            isinstance(argument, type(value)) and isinstance(argument, bool) is isinstance(value, bool)
            for value in get_args(annotation)
            if argument == value
        )
    if annotation is int or annotation is float:
        if isinstance(argument, bool | type):
            return False  # the class float has the methods of its numbers
        return isinstance(argument, Integral) if annotation is int else hasattr(argument, "__float__")
    return _is_of_kind(argument, annotation) and all(
        is_allowed(part, part_annotation) for _, part, part_annotation in _parts(argument, annotation)
    )


def _alternatives(annotation: Any, argument: object) -> Sequence[Any]:
    """Return the parts of a union that an argument may be: a dict is a list of its keys only where no dict is meant."""
    parts = get_args(annotation) if get_origin(annotation) in _UNIONS else (annotation,)
    return [part for part in parts if isinstance(argument, Mapping) and get_origin(part) is Mapping] or parts


_UNIONS = (Union, types.UnionType)
_LISTS = (Iterable, Collection, Sequence)


def _is_of_kind(argument: Any, annotation: Any) -> bool:
    """Whether an argument is of the class of an annotation, whatever its parts are."""
    kind, parameters = type(None) if annotation is None else get_origin(annotation) or annotation, get_args(annotation)
    is_checked = isinstance(kind, type) and kind not in (Any, inspect.Parameter.empty)
    if not is_checked or getattr(kind, "_is_protocol", False) > getattr(kind, "_is_runtime_protocol", False):
        return True  # a type variable, a forward reference
    if issubclass(kind, Iterable) and isinstance(argument, str | Mapping):
        return isinstance(argument, kind) and (isinstance(argument, Mapping) or kind not in _LISTS)
    if kind is tuple or kind is list:
        has_length = Ellipsis in parameters or kind is list or not parameters
        return isinstance(argument, tuple | list) and (has_length or len(argument) == len(parameters))  # pyright: ignore[reportUnknownArgumentType]
    # An array of numpy is no Sequence.
    are_numbers = parameters in ((int,), (float,)) and hasattr(argument, "__array__")
    return isinstance(argument, kind) or are_numbers


def _parts(argument: Any, annotation: Any) -> Iterator[tuple[object, object, Any]]:
    """Return index, part and the part's annotation for a list or dict. An iterator would be used up."""
    kind, parameters = get_origin(annotation), get_args(annotation)
    if not parameters or not isinstance(kind, type) or not isinstance(argument, Sequence | Set | Mapping):
        return iter(())
    if isinstance(argument, Mapping) and issubclass(kind, Mapping):
        return ((key, part, parameters[1]) for key, part in argument.items())
    if kind is tuple and Ellipsis not in parameters:
        return ((i, *pair) for i, pair in enumerate(zip(argument, parameters, strict=True)))
    return ((i, part, parameters[0]) for i, part in enumerate(argument) if issubclass(kind, Iterable))


def argument_error(name: str, annotation: Any, argument: object) -> ArgumentError:
    """Return the error about an argument, or the first of its parts, that an annotation does not allow."""
    for alternative in _alternatives(annotation, argument):
        parts = _parts(argument, alternative) if _is_of_kind(argument, alternative) else ()
        for index, part, part_annotation in parts:
            if not is_allowed(part, part_annotation):
                return argument_error(f"{name}[{index!r}]", part_annotation, part)
    return ArgumentError(
        f"{name} is {_describe(annotation)}; found {_describe_argument(argument)}.{_remedy(name, annotation, argument)}"
    )


def _describe(annotation: Any) -> str:
    """Return the kinds of argument that an annotation allows, in words.

    >>> _describe(Literal["host", "disk"] | Callable[[int], bool] | Sequence[int] | None)
    "'host', 'disk', a function or a list of whole numbers"
    """
    # None is left out: it is what a caller leaves out.
    nouns = [noun for noun in dict.fromkeys(_nouns(annotation)) if noun != "None"] or ["None"]
    return " or ".join(filter(None, (", ".join(nouns[:-1]), nouns[-1])))


def _nouns(annotation: Any) -> list[str]:
    kind, parameters = get_origin(annotation) or annotation, get_args(annotation)
    if kind in _UNIONS:
        return [noun for alternative in parameters for noun in _nouns(alternative)]
    if kind is Literal:
        return list(map(repr, parameters))
    if kind in _NOUNS or not isinstance(kind, type) or not issubclass(kind, Iterable) or not parameters:
        is_pair = kind is tuple and len(parameters) == 2 and Ellipsis not in parameters
        return ["a pair" if is_pair else _NOUNS.get(kind) or _with_article(getattr(kind, "__name__", str(kind)))]
    # "a list of Costs", and not of Costss.
    is_plain = isinstance(parameters[0], type) and parameters[0] not in (Any, object)
    return [f"a list of {_describe(parameters[0]).partition(' ')[2].rstrip('s')}s" if is_plain else "a list"]


_NOUNS: dict[Any, str] = {
    None: "None",
    types.NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a tuple",
    type: "a class",
    Callable: "a function",
    PathLike: "a path",
    Path: "a path",
    Mapping: "a dict",
}


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _describe_argument(argument: object) -> str:
    if argument is None or isinstance(argument, bool | int | float | str):
        return shortened(repr(argument), 40)
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    return "a function" if inspect.isroutine(argument) else _with_article(type(argument).__name__)


def is_transform(argument: object) -> bool:
    """Whether an argument is a transform, whose parameter has the name `program`."""
    return inspect.isfunction(argument) and [*inspect.signature(argument).parameters][:1] == ["program"]


# The way from an argument to what a parameter of this annotation or name takes. Some of the classes are of torch.
_REMEDIES: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("Program", is_transform, "Apply the transform to a program, such as fpipe.program(model)."),
    ("Program", lambda argument: type(argument).__name__ == "Model", "fpipe.program(model) makes one."),
    ("Program", lambda argument: hasattr(argument, "state_dict"), "fpipe.from_module(net, ..) makes a model to cut."),
    (
        "Timeline",
        lambda argument: isinstance(argument, list | tuple),
        "Several go one by one: plot(first, second).",
    ),
    ("transforms", lambda argument: isinstance(argument, list | tuple), "Several go one by one: chain(first, second)."),
    ("Costs", lambda argument: isinstance(argument, dict), "fpipe.Costs.per_rank(F=1, B=2) makes them."),
    ("Model", lambda argument: hasattr(argument, "state_dict"), "fpipe.from_module makes one of a net."),
    ("Model", lambda argument: isinstance(argument, tuple), "Of what a front end returns, the model is the first."),
    ("Sequential", lambda argument: hasattr(argument, "state_dict"), "Use fpipe.from_module."),
    ("Sequential", lambda argument: isinstance(argument, list), "nn.Sequential(*modules) makes one."),
    ("params", lambda argument: True, "fpipe.split_params(model, net.state_dict()) makes them."),
    ("hosts", lambda argument: isinstance(argument, str), "fpipe.Cluster.parse reads a text."),
    ("Callback", lambda argument: True, "It has a method on_step(result, seconds)."),
    ("DeviceMesh", lambda argument: True, "torch.distributed.init_device_mesh makes one."),
    ("type", lambda argument: hasattr(argument, "param_groups"), "An optimizer stays outside of a program."),
    ("type", inspect.isroutine, "fpipe.register_update gives a function a name."),
)


def _remedy(name: str, annotation: Any, argument: object) -> str:
    """Return the sentence, behind a space, that leads from an argument to what its parameter takes, or ""."""
    kinds = [name, *(getattr(get_origin(kind) or kind, "__name__", "") for kind in (annotation, *get_args(annotation)))]
    sentences = (sentence for kind, applies, sentence in _REMEDIES if kind in kinds and applies(argument))
    return "".join(f" {sentence}" for sentence in [*sentences][:1])
