"""Write docs/families.md from the tested families: `make families-page`. Times are this machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fpipe
from tests.families import FAMILIES, Family
from tests.own_autograd import call_net, disable_caches, eager_loss_and_grads, split_batch

PAGE = Path(__file__).with_suffix(".md")
PARTS, KEY, ROUNDS = 2, 3, 9

HEAD = """# Families

*Reference.* Which families of transformers `from_module` cuts at four stages, and how their gradients compare with their own. The models are tiny (four blocks, width 32, four rows in two microbatches), with random weights, dropout, and padded rows if the family has a mask. `make families` compares loss, gradients and state with the net's own under plain autograd, for ZB-H1 with checkpoint. `make families-page` writes this page.

- *gradients*: bitwise the net's own, or all but the named ones. If several stages read one value (a tied parameter, an encoder's output), plain autograd adds its gradients (`aten.add`) in another order.
- *build*: seconds of `from_module`, with torch's export.
- *step against eager*: time of ZB-H1 in one process, divided by that of plain autograd; the least of nine, on one CPU thread. Tensors this small time the calls, not the arithmetic.

RWKV is bitwise too. Funnel is, except before the output of its first block, which two stages read.

| family | model | stages end after | gradients | build, s | step against eager |
|---|---|---|---|---|---|
"""  # noqa: E501


class Row(NamedTuple):
    """The measurements of a family."""

    model: str
    gradients: str
    build: float
    ratio: float


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    lines: list[str] = []
    for name, family in FAMILIES.items():
        row = measure(family)
        lines.append(
            f"| {name} | `{row.model}` | {ends_of(family)} | {row.gradients} | {row.build:.1f} | {row.ratio:.2f} |\n"
        )
        print(lines[-1], end="", flush=True)
    PAGE.write_text("".join([HEAD, *lines]))
    print(f"wrote {PAGE}")


def ends_of(family: Family) -> str:
    """The modules after which stages end, in words."""
    return ", ".join(f"`{end}`" for end in family.ends)


def measure(family: Family) -> Row:
    """A row of the table."""
    import transformers

    torch.manual_seed(0)
    net, batch = family.make(transformers), family.batch()
    build, (model, params, state) = timed(lambda: fpipe.from_module(net, 4, batch=batch, loss=family.loss))
    net_state = state if any(state) else None
    schedule = fpipe.chain(fpipe.split(PARTS), fpipe.schedules.zb_h1(4), fpipe.merge())
    step = fpipe.build(schedule(fpipe.program(model)), model)
    grads = fpipe.join_params(model, step(params, batch, state=net_state, key=KEY).grads)
    disable_caches(net)
    _, expected_grads = eager_loss_and_grads(net, batch, PARTS, key=KEY, ends=family.ends, loss=family.loss)
    rounded = [name for name, grad in expected_grads.items() if not torch.equal(grads[name], grad)]
    runs = (lambda: step(params, batch, state=net_state, key=KEY), lambda: run_eager(net, batch, family.loss))
    times = [[timed(run)[0] for run in runs] for _ in range(ROUNDS)]
    fastest_step, fastest_eager = map(min, zip(*times, strict=True))
    return Row(type(net).__name__, describe_gradients(model, family, rounded), build, fastest_step / fastest_eager)


def run_eager(net: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> None:
    """A step under plain autograd."""
    net.zero_grad()
    for (inputs, target), _ in split_batch(batch, PARTS):
        output = call_net(net, inputs)
        ((output.loss if loss is None else loss(output, target)) / PARTS).backward()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what comes of it."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def describe_gradients(model: fpipe.Model, family: Family, names: list[str]) -> str:
    """Which gradients are other ones in their last bits."""
    tied = {name for tie in model.ties for _, name in tie}
    phrases = [f"`{name}`, tied" for name in names if name in tied]
    phrases = phrases if len(phrases) < 3 else [f"{len(phrases)} tied parameters"]
    untied = [name for name in names if name not in tied]
    if untied:
        if family.rounds is None or not all(name.startswith(family.rounds.path) for name in untied):
            raise AssertionError(f"nothing says why these gradients are not bitwise the net's own: {untied}")
        phrases.append(family.rounds.reason)
    return f"to rounding: {', and '.join(phrases)}" if phrases else "bitwise"


if __name__ == "__main__":
    main()
