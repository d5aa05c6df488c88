"""Name the ops that torch's functional collectives are in a graph."""

from __future__ import annotations

from typing import Any

import torch

C10D: Any = torch.ops._c10d_functional
"""The ops of collectives (2.11 to 2.15: `torch.ops._c10d_functional`)."""
C10D_AUTOGRAD: Any = torch.ops._c10d_functional_autograd
"""Those that torch before 2.13 traces where there is a gradient (2.11: `torch.ops._c10d_functional_autograd`)."""
