"""Note what a forward does to a buffer whose numbers it does not read, and do it later to the buffer as it is then.

    F:  self.count += 1                           tape: add 1 to the first
        self.mean.lerp_(x.mean(0), 0.1)                 move the second towards what F noted, a tenth of the way
    U:  count, mean = replayed(tape, (count, mean), noted)

While a forward runs, a stand-in is in the buffer's place: what is done to it goes on the tape, and what else takes part
is noted. So an update costs what it costs in the module, and all that it needs is what the forward has computed anyway.
A stand-in whose numbers are asked for says so: they are those of another microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.ambient import Casts, casting, casts, plainly
from fpipe.graphs.graph import storage_of

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class Made(NamedTuple):
    """One of the buffers, which come first, or of the results of steps, in their order."""

    at: int


class Given(NamedTuple):
    """One of the tensors that were noted."""

    at: int


class Step(NamedTuple):
    """A call: the leaves of its arguments, the containers around them if they are more than a tuple, and the casts
    that it ran under."""

    function: Any
    leaves: tuple[Any, ...]
    spec: Any
    casts: Casts


@dataclass(frozen=True)
class Tape:
    """What was done, and what is then in the place of each buffer. To pytrees it is a leaf."""

    steps: tuple[Step, ...]
    new: tuple[Made | Given, ...]


def replayed(tape: Tape, buffers: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The buffers after what a tape says; those handed in stay as they are.

    >>> recorder = Recorder(["count"])
    >>> (count,) = recorder.stand_ins([torch.zeros(())])
    >>> count += torch.tensor(2.0)
    >>> tape, given = recorder.finished([count])
    >>> replayed(tape, [torch.tensor(40.0)], given)
    [tensor(42.)]
    """
    values: list[Any] = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        for function, leaves, spec, around in tape.steps:
            args: Any = [
                values[leaf.at] if type(leaf) is Made else given[leaf.at] if type(leaf) is Given else leaf
                for leaf in leaves
            ]
            args, kwargs = (args, _NONE) if spec is None else tree.unflatten(spec, args)
            if around == casts():
                made = function(*args, **kwargs)
            else:
                with plainly(), casting(around):
                    made = function(*args, **kwargs)
            values += [made] if isinstance(made, Tensor) else _tensors(made)
    return [values[ref.at] if isinstance(ref, Made) else given[ref.at].clone() for ref in tape.new]


def updated_with(
    others: Callable[..., dict[str, Any]],
    names: Sequence[str],
    state: Mapping[str, Any],
    seen: tuple[Any, Tape, Sequence[Tensor]],
    **counted: int,
) -> dict[str, Any]:
    """A module state after what a forward noted: of these buffers on a tape, of the others for an update of theirs."""
    noted, tape, given = seen
    new = dict(zip(names, replayed(tape, [state[name] for name in names], given), strict=True))
    rest = others({name: held for name, held in state.items() if name not in new}, noted, **counted)
    new |= rest
    return {name: new[name] for name in (*state, *(name for name in rest if name not in state)) if name in new}


_NONE: dict[str, Any] = {}


def _tensors(made: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(made) if isinstance(leaf, Tensor)]


class Recorder:
    """Makes stand-ins for buffers, and notes what is done to them.

    Args:
        names: what errors call the buffers.
        copying: whether what is noted may be written before the forward ends, so that it has to be copied.
        who: how errors call the forward.
    """

    def __init__(self, names: Sequence[str], copying: bool = False, who: str = "a forward") -> None:
        self.names, self.copying, self.who = names, copying, who
        self.steps: list[Step] = []
        self.given: list[Tensor] = []
        self.versions: list[tuple[Tensor, int]] = []
        self.lent: set[Any] = set()  # the memory of copies that stands for another tensor's
        self.count = 0

    def stand_ins(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        """Tensors like the buffers, each on a copy, to be put in their places."""
        pairs = zip(buffers, self.names, strict=True)
        return [self._stand_in(buffer.detach().clone(), frozenset([name])) for buffer, name in pairs]

    def _stand_in(self, copy: Tensor, names: frozenset[str]) -> StandIn:
        made = StandIn(Inside(copy, self, self.count, names))
        self.count += 1
        return made

    def finished(self, new: Sequence[Any]) -> tuple[Tape, list[Tensor]]:
        """The tape, and what it needs; `new` is what is in the buffers' place now."""
        for one, version in self.versions:
            if one._version != version:
                raise RuntimeError(
                    f"{self.who} changed a tensor in place that the update of its buffers {self._all()} reads, and the "
                    "code of its modules does not show that it does. Copy the tensor before it is changed."
                )
        return Tape(tuple(self.steps), tuple(map(self._ref, new))), self.given

    def refuse_in(self, made: Any, what: str) -> None:
        """A RuntimeError if a stand-in, or what was computed from one, is among the leaves of something."""
        read = next((leaf for leaf in tree.leaves(made) if isinstance(leaf, StandIn)), None)
        if read is not None:
            self.refuse(read.inside.names, what)

    def refuse(self, names: Iterable[str], what: str) -> None:
        """The forward reads what it was seen not to read."""
        name = min(names)
        short = name.rpartition(".")[2]
        raise RuntimeError(
            f"{self.who} reads buffer {name!r}, which it also writes ({what}), and the code of its modules does not "
            f"show that it does. Read it in the forward itself, as in f(self.{short}): then forwards keep to their "
            "order."
        )

    def _all(self) -> str:
        return ", ".join(map(repr, self.names))

    def _ref(self, one: Any) -> Made | Given:
        return Made(one.inside.at) if isinstance(one, StandIn) else self._noted(one)

    def _noted(self, one: Tensor) -> Given:
        self.given.append(one.detach().clone() if self.copying else one.detach())
        if not self.copying:
            self.versions.append((one, one._version))
        return Given(len(self.given) - 1)

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do something to the copies, and note it."""
        leaves, spec = tree.flatten((args, kwargs))
        taken = [leaf for leaf in leaves if isinstance(leaf, StandIn)]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, StandIn)]
        versions = [leaf._version for leaf in others]
        names = frozenset[str]().union(*(one.inside.names for one in taken))
        word = _word(function)
        if word == "data =" and others:
            function = _lend
            self.versions += [(one, one._version) for one in others if self.copying]
        held = [(one.inside.copy, one.inside.copy._version) for one in taken]
        # What is noted is noted before: an op may write it.
        refs = () if word in _METADATA else tuple(self._leaf(leaf) for leaf in leaves)
        with _C.DisableTorchFunctionSubclass(), torch.no_grad():
            copies = [leaf.inside.copy if isinstance(leaf, StandIn) else leaf for leaf in leaves]
            plain_args, plain_kwargs = tree.unflatten(spec, copies)
            made = function(*plain_args, **plain_kwargs)
        if word in _METADATA:
            return made
        if draws_numbers(word):
            self.refuse(names, f"{word} draws random numbers by it")
        if versions != [leaf._version for leaf in others]:
            self.refuse(names, f"{word} writes it into another tensor")
        if function is _lend:
            self.lent.add(storage_of(held[0][0]))
        elif any(copy._version != version and storage_of(copy) in self.lent for copy, version in held):
            self.refuse(names, f"{word} writes the memory of what its .data was assigned, too")
        if not all(isinstance(leaf, Tensor | NoneType) for leaf in tree.leaves(made)):
            self.refuse(names, f"{word} asks for its numbers")
        plain = not kwargs and len(args) == len(leaves) and all(map(is_, args, leaves))
        self.steps.append(Step(function, refs, None if plain else spec, casts()))
        return tree.tree_map(partial(self._result, taken, names), made)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, StandIn):
            return Made(leaf.inside.at)
        return self._noted(leaf) if isinstance(leaf, Tensor) else leaf

    def _result(self, taken: Sequence[StandIn], names: frozenset[str], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = self._stand_in(leaf, names)
        # What was done in place gives the tensor that it was given.
        return next((one for one in taken if one.inside.copy is leaf), made)


class Inside(NamedTuple):
    """What a stand-in is: a copy that everything is done to, who notes it, which value it is, of which buffers."""

    copy: Tensor
    recorder: Recorder
    at: int
    names: frozenset[str]


class StandIn(Tensor):
    """A tensor in a buffer's place, or what was computed from one."""

    inside: Inside

    @staticmethod
    def __new__(cls: type[StandIn], inside: Inside) -> StandIn:  # noqa: D102
        make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
        like = inside.copy
        made = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        made.inside = inside
        return made

    def __init__(self, inside: Inside) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever Python does to it is done by who notes it."""
        return _first((args, kwargs)).recorder.record(func, tuple(args), kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes here has gone past that."""
        one = _first((args, kwargs))
        return one.recorder.refuse(one.names, f"{func} reads it")


def copy_of(one: Tensor) -> Tensor:
    """What everything is done to that is done to a stand-in; another tensor is itself."""
    return one.inside.copy if isinstance(one, StandIn) else one


def _first(given: Any) -> Inside:
    return next(leaf.inside for leaf in tree.leaves(given) if isinstance(leaf, StandIn))


def _word(function: Any) -> str:
    """What a function is called, or the attribute that it gets, or sets ("data =")."""
    name = getattr(function, "__name__", type(function).__name__)
    if name not in ("__get__", "__set__"):
        return name
    return getattr(function.__self__, "__name__", name) + " =" * (name == "__set__")


def _lend(buffer: Tensor, value: Tensor) -> None:
    """Assign the .data of a buffer, but for the memory: what is done to the buffer must not reach the value."""
    _DATA.__set__(buffer, value.clone())


_DATA: Any = Tensor.data  # a trace watches that of its tensors


def draws_numbers(word: str) -> bool:
    """Whether a function of torch with this name draws random numbers: done again, it would draw others."""
    return word.startswith(("rand", "rrelu", "bernoulli", "fractional_max_pool")) or word in _DRAW or "dropout" in word


_DRAW = frozenset(
    (
        *("normal", "multinomial", "binomial", "poisson", "gumbel_softmax", "svd_lowrank", "pca_lowrank"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "multi_head_attention_forward"),
        *("normal_", "uniform_", "cauchy_", "exponential_", "geometric_", "log_normal_", "trunc_normal_", "sparse_"),
        *("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "orthogonal_"),
    )
)
# What Python may know of a tensor without its numbers.
_METADATA = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize", "nbytes", "_version"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "names", "grad_fn"),
        *("size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "element_size", "__len__"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg", "get_device"),
        *("is_inference", "is_same_size", "has_names", "grad", "is_tensor"),
    )
)
