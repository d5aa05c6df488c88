"""Write docs/kernels.md from the kernels of tests/kernels.py: `make kernels-page`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.kernels import DOORS, KERNELS, outcome

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Kernels

*Reference.* What happens to more than plain layers. Each row is a block in a net of three stages under ZB-H1, compared with plain autograd on the CPU by `tests/test_kernels.py`; `make kernels-page` writes the table.

- *bitwise*: plain autograd's bits, and the stage is traced.
- *one operation*: `from_module` keeps the module's Python as one operation of its stage, and a warning says why and where. The stage is traced, unless it runs *under autograd*.
- *under autograd*: the reason of a warning; the stage's `W` computes nothing.
- *refused*: the error, with the line.

Torch has no backward of FlexAttention on the CPU; the rows switch its check off.

| kernel | `from_functions`, `from_sequential` | `from_module` (=: the same) |
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
    return f"| {name} | {cells[0]} | {'=' if cells[1] == cells[0] else cells[1]} |\n"


if __name__ == "__main__":
    main()
