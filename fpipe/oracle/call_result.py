"""The tensors of a replayed call, and the choices of its routers, which are compared with the record.

scores [tokens, experts], recorded indices        -->        the tokens that went elsewhere, and by how much less
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class RecordedChoice:
    """The indices that a top-k took in the run, and the scores of the reference.

    Attributes:
        scores: the reference's scores.
        recorded, expected: the indices that the run took, and those of the reference's largest scores.
        dim: the dimension along which they are chosen.

    >>> import torch
    >>> scores = torch.tensor([[1.0, 3.0], [2.5, 2.0]])
    >>> choice = RecordedChoice(scores, recorded=torch.tensor([[1], [1]]), expected=torch.tensor([[1], [0]]), dim=1)
    >>> choice.differing_rows(), choice.shortfalls()
    (1, tensor([0.0000, 0.5000]))
    """

    scores: Tensor
    recorded: Tensor
    expected: Tensor
    dim: int

    def differing_rows(self) -> int:
        """Return in how many rows the run took other indices."""
        is_other = self.recorded.sort(self.dim).values != self.expected.sort(self.dim).values
        return int(is_other.any(self.dim).sum())

    def shortfalls(self) -> Tensor:
        """Return for each row by how much a recorded score is smaller than the one of its rank among the largest."""
        expected, recorded = (
            self.scores.gather(self.dim, indices).sort(self.dim).values for indices in (self.expected, self.recorded)
        )
        # Where masked scores, -inf, are taken by both, the difference is NaN.
        return (expected - recorded).nan_to_num(0.0).amax(self.dim)


@dataclass
class CallResult:
    """The tensors of a replayed call, in the order of the record.

    Attributes:
        outputs: the tensors that the call returns.
        child_inputs: the tensors that each child takes, by the child's number.
        child_grads: the gradient of each output of each child; None where none flows.
        input_grads: the gradient of each input.
        param_grads: the gradient of each parameter of the module, by its name in the net.
        choices: the top-k of the call's own code, in order.
        readers: for each child, the places that its outputs reach without passing another: other children, or -1 for
            the call's own outputs.
        flows: by the index of an output, the gradient that it has of another output or a child that reads it.
        eps: the machine epsilon of the coarsest result.
        has_grads: whether the backward could be replayed.
    """

    outputs: list[Tensor]
    child_inputs: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    child_grads: dict[int, list[Tensor | None]] = field(default_factory=dict[int, list[Tensor | None]])
    input_grads: list[Tensor | None] = field(default_factory=list[Tensor | None])
    param_grads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    choices: list[RecordedChoice] = field(default_factory=list[RecordedChoice])
    readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    flows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    eps: float = 0.0
    has_grads: bool = True

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by a name of their place, so that two replays can be compared."""
        rows = {
            **{f"output {i}": x for i, x in enumerate(self.outputs)},
            **{f"handed {child} {i}": x for child, xs in self.child_inputs.items() for i, x in enumerate(xs)},
            **{f"child {child} {i}": x for child, xs in self.child_grads.items() for i, x in enumerate(xs)},
            **{f"input {i}": x for i, x in enumerate(self.input_grads)},
            **{f"param {name}": x for name, x in self.param_grads.items()},
            **{f"scores {i}": choice.scores for i, choice in enumerate(self.choices)},
        }
        return {name: tensor for name, tensor in rows.items() if tensor is not None}
