"""Programs in the formats of others: tables of torch, Megatron-LM and Primus, torch's runtime, and JSON."""

from fpipe.interop import torch_pipelining
from fpipe.interop.as_json import from_json, to_json
from fpipe.interop.schedule_tables import to_megatron, to_primus
from fpipe.limits import check_public_functions

__all__ = ["from_json", "to_json", "to_megatron", "to_primus", "torch_pipelining"]
check_public_functions(globals())


def __dir__() -> list[str]:
    return __all__
