"""Programs in the formats of others: torch's pipeline tables and runtime, and JSON."""

from fpipe.interop import torch_pipelining
from fpipe.interop.as_json import from_json, to_json

__all__ = ["from_json", "to_json", "torch_pipelining"]


def __dir__() -> list[str]:
    return __all__
