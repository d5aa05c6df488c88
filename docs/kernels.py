"""Write docs/kernels.md from the kernels of tests/kernels.py: `make kernels-page`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.kernels import DOORS, KERNELS, outcome

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Kernels

*Reference.* For whoever trains a model with more than plain layers: attention kernels, Python with a gradient of its own, compiled blocks, quantized weights. Each row is a block inside a net of three stages under ZB-H1. `tests/test_kernels.py` compares loss and gradients with plain autograd on the CPU; `make kernels-page` writes the table.

- *bitwise*: plain autograd's bits, and the stage is traced.
- *one operation*: `from_module` keeps the module's Python as one operation of its stage; a warning names the reason and the line. The stage is traced even so, unless the row says *under autograd*, with the reason of the warning; then its `W` computes nothing.
- *refused*: the error, which quotes the line.

FlexAttention has no backward on the CPU, which its rows switch on. On a GPU only `compile=True` fuses it.

| kernel | `from_functions`, `from_sequential` | `from_module` |
|---|---|---|
"""  # noqa: E501


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    PAGE.write_text(HEAD + "".join(map(row_of, KERNELS)))
    print(f"wrote {PAGE}")


def row_of(name: str) -> str:
    """Return the row of a kernel: how each front door runs it."""
    cells = [outcome(KERNELS[name], door).replace("\n", " ").replace("|", "\\|") for door in DOORS]
    return f"| {name} | {cells[0]} | {'same' if cells[1] == cells[0] else cells[1]} |\n"


if __name__ == "__main__":
    main()
