"""Callbacks after each training step: CSV files, TensorBoard, Weights & Biases, a line of progress."""

from fpipe.callbacks.measurements import Workload, measure
from fpipe.callbacks.tracked_step import Callback, track
from fpipe.callbacks.writers import CSV, Progress, StepWriter, TensorBoard, WandB
from fpipe.limits import check_public_functions

__all__ = ["CSV", "Callback", "Progress", "StepWriter", "TensorBoard", "WandB", "Workload", "measure", "track"]
check_public_functions(globals())


def __dir__() -> list[str]:
    """Return the public names, without the modules that define them."""
    return __all__
