"""Watch the choices of routers: the indices that each top-k takes, which rounding may change.

scores --topk--> values, indices        --choose(scores, indices, dim)-->        scores at the chosen indices, these
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOP_K = (torch.topk, Tensor.topk)


class ChoiceWatch(TorchFunctionMode):
    """A context in which a function decides what each `torch.topk` takes.

    Args:
        choose: from the scores, the indices of the largest ones and their dimension to the indices that count.

    >>> with ChoiceWatch(lambda scores, indices, dim: indices - 1):
    ...     print(*torch.tensor([3.0, 5.0, 7.0]).topk(2))
    tensor([5., 3.]) tensor([1, 0])
    """

    def __init__(self, choose: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # torch.compile traces this method, and its code must not depend on a record.
        if func not in _TOP_K or torch.compiler.is_compiling():
            return result
        arguments = dict(zip(("input", "k", "dim"), args, strict=False)) | (kwargs or {})
        scores, dim = arguments["input"], arguments.get("dim", -1)
        indices = self._choose(scores, result.indices, dim)
        if indices is result.indices:
            return result
        # The gradient of both is that of a gather.
        return torch.return_types.topk((scores.gather(dim, indices), indices))
