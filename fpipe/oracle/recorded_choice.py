"""Compare the choices of a router, which its top-k took in the run, with the reference's scores.

scores [tokens, experts], recorded indices        -->        the tokens that went elsewhere, and by how much less
"""

from __future__ import annotations

from dataclasses import dataclass

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
