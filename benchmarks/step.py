"""Time one local step, against hand-written microbatched eager autograd and torch's own pipeline runtime.

    python benchmarks/step.py [--quick]

Four stages, eight microbatches, one process, one thread. Each round runs every step once, in an order drawn anew; a
ratio is the median over rounds of the ratio within a round. The steps give the same gradients: ours bit for bit those
of the eager one.

The floor of a step is its own torch ops: a step is recorded op by op, and written as one Python function that calls
the same ops on the same tensors, one after the other, with no program, no slots and no stages around them.

Under autocast one more step casts the weights for each microbatch, as `build(hoist=False)` says: hoisting must pay.

Python's garbage collector is off while steps are timed, and runs in between. The C library is shown one large tensor
first, after which it keeps freed memory: before, each tensor of a MiB could be a new mapping, and the same eager step
took 26 or 36 ms by chance.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import tree
from fpipe.graphs.compiling.code import compile_graph
from fpipe.graphs.language.graph import Graph, Name, Node, fact_of_tensor

MICROBATCHES, STAGES = 8, 4
Step = Callable[[], Any]
Case = tuple[nn.Sequential, Tensor, Tensor]


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.perceptron = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(rows, length, width))
        return x + self.perceptron(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def mlp(width: int, rows: int) -> Case:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)))
    return net, torch.randn(rows * MICROBATCHES, width), torch.randn(rows * MICROBATCHES, width)


def gpt(width: int = 64, length: int = 64, rows: int = 4) -> Case:
    net = nn.Sequential(*(Block(width) for _ in range(4)))
    shape = (rows * MICROBATCHES, length, width)
    return net, torch.randn(shape), torch.randn(shape)


def eager(net: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype | None = None) -> Step:
    """Write a step without a library: forward and backward of each microbatch, gradients added up in `.grad`.

    It does not even add up its losses, as our step does.
    """

    def step() -> list[Tensor | None]:
        for parameter in net.parameters():
            parameter.grad = None
        for x_rows, target_rows in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.mse_loss(net(x_rows), target_rows)
            (loss * (len(x_rows) / len(x))).backward()
        return [parameter.grad for parameter in net.parameters()]

    return step


def pipelined(net: nn.Sequential, x: Tensor, target: Tensor, split: bool, **options: Any) -> Step:
    model, params, _ = fpipe.from_sequential(net, stages=STAGES, loss=F.mse_loss)
    pipeline = fpipe.chain(
        fpipe.split(MICROBATCHES),
        fpipe.split_backward() if split else fpipe.identity(),
        fpipe.schedules.one_f_one_b(ranks=STAGES),
        fpipe.merge(outputs=False),
    )
    step = fpipe.build(pipeline(fpipe.program(model)), model, **options)

    def run() -> list[Tensor]:
        result = step(params, (x, target))
        return [*tree.leaves(result.grads), result.loss]

    return run


def torchs_own(net: nn.Sequential, x: Tensor, target: Tensor, split: bool) -> Step:
    """Build a step of torch's pipeline runtime with all stages on this rank; it passes tensors on without sending."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    size = len(net) // STAGES
    parts = [net[start : start + size] for start in range(0, len(net), size)]
    stages: list[Any] = [PipelineStage(part, number, STAGES, x.device) for number, part in enumerate(parts)]
    kind = ScheduleInterleavedZeroBubble if split else ScheduleInterleaved1F1B
    schedule = kind(stages, MICROBATCHES, loss_fn=F.mse_loss)

    def step() -> list[Tensor | None]:
        for parameter in net.parameters():
            parameter.grad = None
        schedule.step(x, target=target, return_outputs=False)
        return [parameter.grad for parameter in net.parameters()]

    return step


class Tape(TorchDispatchMode):
    """Record every op that runs, as a list that can run again. A tensor that no op of the list wrote is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, Name] = {}
        self.values: list[Any] = []  # so that no id is given twice
        self.nodes: list[Node] = []
        self.facts: dict[Name, Any] = {}
        self.constants: dict[Name, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named_args, named_kwargs = (
            self.named(args),
            {keyword: self.named(value) for keyword, value in (kwargs or {}).items()},
        )
        output = func(*args, **(kwargs or {}))
        name = self.name(output)
        self.nodes.append(Node(name, func, named_args, named_kwargs))
        for index, part in enumerate(output) if isinstance(output, list | tuple) else ():
            self.nodes.append(Node(self.name(part), getitem, (name, index), {}))
        return output

    def name(self, value: Any) -> Name:
        name = self.names[id(value)] = Name(f"v_{len(self.values)}")
        self.values.append(value)
        if isinstance(value, Tensor):
            self.facts[name] = fact_of_tensor(value.detach(), {})
        return name

    def named(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self.named, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.names:
            self.constants[self.name(value)] = value
        return self.names[id(value)]


def floor(step: Step) -> Step:
    """Compile the torch ops of a step into one straight function."""
    step()  # the first one traces its stages
    with Tape() as tape:
        results = step()
    result_names = {"results": tuple(tape.names[id(leaf)] for leaf in results)}
    run = compile_graph(Graph(tuple(tape.nodes), tape.facts, tape.constants, {}, result_names))

    def replay() -> list[Tensor]:
        with torch.no_grad():
            return run()[0]

    for replayed, leaf in zip(replay(), results, strict=True):
        assert torch.equal(replayed, leaf)
    return replay


def rounds_of(steps: dict[str, Step], rounds: int) -> list[dict[str, float]]:
    for step in steps.values():
        for _ in range(5):
            step()
    order, chance = list(steps), random.Random(0)
    times: list[dict[str, float]] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(rounds):
        chance.shuffle(order)
        took: dict[str, float] = {}
        for name in order:
            start = time.perf_counter()
            steps[name]()
            took[name] = time.perf_counter() - start
        times.append(took)
        if number % 10 == 9:
            gc.collect()
    gc.enable()
    gc.unfreeze()
    return times


def median_of(times: Iterable[dict[str, float]], name: str) -> float:
    return statistics.median(took[name] for took in times)


def ratio(times: Iterable[dict[str, float]], numerator: str, denominator: str) -> float:
    return statistics.median(took[numerator] / took[denominator] for took in times)


def against(value: float, reach: float) -> str:
    return f"{value:.2f} ({'<=' if value <= reach else 'MORE than'} {reach:.2f})"


def compare(name: str, case: Case, reach: float, reach_split: float, rounds: int, torchs: bool) -> None:
    net, x, target = case
    steps: dict[str, Step] = {
        "eager": eager(net, x, target),
        "B": pipelined(net, x, target, False),
        "IW": pipelined(net, x, target, True),
    }
    steps |= {"floor": floor(pipelined(net, x, target, False, audit="never"))}  # the ops of an audit are none of these
    if torchs:
        steps |= {"torch": torchs_own(net, x, target, False), "torch IW": torchs_own(net, x, target, True)}
    plain = [leaf.clone() for leaf in steps["eager"]()]
    for kind, step in steps.items():
        for leaf, expected in zip(step(), plain, strict=False):
            torch.testing.assert_close(leaf, expected, **({} if kind.startswith("torch") else {"rtol": 0, "atol": 0}))
    times = rounds_of(steps, rounds)
    print(
        f"{name:28} eager {median_of(times, 'eager') * 1e3:7.2f} ms; of it: "
        f"fpipe {against(ratio(times, 'B', 'eager'), reach)}, its ops alone {ratio(times, 'floor', 'eager'):.2f}; "
        f"I and W of B {against(ratio(times, 'IW', 'B'), reach_split)}"
    )
    if torchs:
        print(
            f"{'':28} torch's pipelining {ratio(times, 'torch', 'eager'):.2f} of eager, with I and W "
            f"{ratio(times, 'torch IW', 'eager'):.2f}; fpipe with I and W {ratio(times, 'IW', 'eager'):.2f}"
        )


def measure_op_cost(rounds: int, stages: int = 8, microbatches: int = 64) -> None:
    """Measure the runtime's overhead for each op of a program, on stages that do nothing, in the fastest rounds.

    A time and no ratio follows the machine's clock, which wanders: the medians of two runs were 0.4 and 1.4 us.
    """
    model = fpipe.from_functions([lambda p, x: x] * stages, loss=lambda y, t: y.sum())
    pipeline = fpipe.chain(
        fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks=stages), fpipe.merge(outputs=False)
    )
    program = pipeline(fpipe.program(model))
    step = fpipe.build(program, model, audit="never")
    params, batch = ({},) * stages, (torch.randn(microbatches, 4), torch.randn(microbatches, 4))

    def run() -> list[Tensor]:
        return [step(params, batch).loss]

    times = rounds_of({"step": run, "floor": floor(run)}, rounds)
    seconds, bare = (min(took[name] for took in times) for name in ("step", "floor"))
    ops = len(program.ops)
    print(
        f"{stages} stages that do nothing, {microbatches} microbatches, {ops:,} ops: {seconds * 1e3:.2f} ms, its torch "
        f"ops alone {bare * 1e3:.2f} ms; between them {against((seconds - bare) / ops * 1e6, 1.0)} us for each op"
    )


def compare_autocast(name: str, case: Case, reach: float, rounds: int) -> None:
    """Compare a step under autocast with the eager one, and with a step that casts weights for each microbatch."""
    steps = {"eager": eager(*case, torch.bfloat16)}
    steps |= {
        label: pipelined(*case, False, autocast=torch.bfloat16, hoist=hoist)
        for label, hoist in (("fpipe", True), ("cast each time", False))
    }
    plain = [leaf.clone() for leaf in steps["eager"]()]
    for step in steps.values():
        for leaf, expected in zip(step(), plain, strict=False):
            torch.testing.assert_close(leaf, expected, rtol=0, atol=0)
    times = rounds_of(steps, rounds)
    print(
        f"{name:28} eager {median_of(times, 'eager') * 1e3:7.2f} ms; of it: "
        f"fpipe {ratio(times, 'fpipe', 'eager'):.2f}; "
        f"of a step that casts in each microbatch {against(ratio(times, 'fpipe', 'cast each time'), reach)}"
    )


def init_single_group() -> bool:
    """Create a process group of this one process, for torch's runtime; whether that worked."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except (AttributeError, RuntimeError, ValueError) as error:
        print(f"torch's pipelining is not measured: no process group here ({error})")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.empty(31 << 20, dtype=torch.uint8)  # more than 32 MiB would teach the C library nothing
    torchs = init_single_group()
    share = 5 if quick else 1
    compare("MLP, width 8, 1 row", mlp(8, 1), 1.10, 1.10, 600 // share, torchs)
    compare("MLP, width 512, 8 rows", mlp(512, 8), 0.92, 1.05, 150 // share, torchs)
    compare("MLP, width 512, 128 rows", mlp(512, 128), 1.00, 1.05, 40 // share, torchs)
    compare("GPT, width 64, T=64, 4 rows", gpt(), 1.05, 1.05, 75 // share, torchs)
    compare_autocast("MLP, width 512, autocast", mlp(512, 8), 1.00, 75 // share)
    compare_autocast("GPT, width 64, autocast", gpt(), 1.00, 40 // share)
    measure_op_cost(1000 // share)
    if torchs:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
