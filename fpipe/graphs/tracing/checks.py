"""Keep in a trace the looks at data by which an op raises, though its fake tensors have none.

    L = cholesky(A)          --> trace -->   L, info = cholesky_ex(A); _linalg_check_errors(info)
    one_hot(labels, 4)       --> trace -->   _assert_async(all(labels < 4)); eq(labels, arange(4))

The first is torch's own; `one_hot` leaves its look out where there is nothing to look at.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fpipe.torch_private.dispatch import kernel_instead

_aten: Any = torch.ops.aten


def with_checks() -> AbstractContextManager[None]:
    """Meanwhile `one_hot` looks at its labels by an op of its own, which a trace keeps."""
    return kernel_instead("one_hot", _one_hot)


def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    if self.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    if num_classes < 1:
        raise RuntimeError("num_classes should be positive")
    _aten._assert_async.msg((self >= 0).all(), "Class values must be non-negative.")
    _aten._assert_async.msg((self < num_classes).all(), "Class values must be smaller than num_classes.")
    return (self.unsqueeze(-1) == torch.arange(num_classes, device=self.device)).to(torch.int64)
