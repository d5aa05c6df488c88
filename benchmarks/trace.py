"""Time how long a step takes to build: for eight equal stages, for one stage, and to linearize that stage alone.

    python benchmarks/trace.py [--quick]

Equal stages are traced once, so eight should cost little more than one. Each build is of a new model, and traces belong
to a model: its stage and its loss are traced anew. `linearize` traces the stage anew and has no loss, which is timed
alone: of its time nearly all is what torch's tracer takes for any function. Programs are made beforehand. The floor is
that tracer, make_fx, on the stage and its gradient: ops in a list, neither cut nor compiled.
"""

import argparse
from typing import Any

import torch
from step import Block, Case, Step, against, gpt, median_of, ratio, rounds_of
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fpipe

MICROBATCHES = 8


def build_step_of(case: Case, stages: int) -> Step:
    """Return a function that builds a step for the net's first blocks, each a stage."""
    net, x, target = case
    net = net[:stages]
    model, _, _ = fpipe.from_sequential(net, stages=stages, loss=F.mse_loss)
    pipeline = fpipe.chain(
        fpipe.split(MICROBATCHES), fpipe.schedules.one_f_one_b(ranks=stages), fpipe.merge(outputs=False)
    )
    program = pipeline(fpipe.program(model))

    def build() -> Any:
        new_model, params, _ = fpipe.from_sequential(net, stages=stages, loss=F.mse_loss)
        return fpipe.build(program, new_model, example=(params, (x, target)))

    return build


def linearize_block(case: Case) -> Step:
    """Return a function that linearizes the first block for one microbatch."""
    net, x, _ = case
    block, part = net[0], x.tensor_split(MICROBATCHES)[0]
    params = {name: parameter.detach() for name, parameter in block.named_parameters()}
    return lambda: fpipe.linearize(lambda p, y: torch.func.functional_call(block, p, y), params, part)


def trace_block(case: Case) -> Step:
    """Return a function that traces the first block and its gradient by torch's own tracer."""
    net, x, _ = case
    block, part = net[0], x.tensor_split(MICROBATCHES)[0]
    names, leaves = zip(*((name, leaf.detach()) for name, leaf in block.named_parameters()), strict=True)

    def gradient(x: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
        inputs = [leaf.detach().requires_grad_() for leaf in (x, *leaves)]
        y = torch.func.functional_call(block, dict(zip(names, inputs[1:], strict=True)), inputs[0])
        return [y, *torch.autograd.grad(y, inputs, dy)]

    return lambda: make_fx(gradient, tracing_mode="fake")(part, part, *leaves)


def trace_loss(case: Case) -> Step:
    """Return a function that traces the loss of one microbatch and its gradient by torch's own tracer."""
    y, target = (tensor.tensor_split(MICROBATCHES)[0] for tensor in case[1:])

    def gradient(y: Tensor, target: Tensor) -> list[Tensor]:
        output = y.detach().requires_grad_()
        loss = F.mse_loss(output, target)
        return [loss, *torch.autograd.grad(loss, [output])]

    return lambda: make_fx(gradient, tracing_mode="fake")(y, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, x, target = gpt()
    case = nn.Sequential(*(Block(64) for _ in range(8))), x, target
    steps = {
        "a step for 8 equal GPT stages, 8 microbatches": build_step_of(case, 8),
        "a step for 1 of the stages": build_step_of(case, 1),
        "linearize of 1 of them": linearize_block(case),
        "1 of them and its gradient by make_fx": trace_block(case),
        "the loss and its gradient by make_fx": trace_loss(case),
    }
    times = rounds_of(steps, 10 if quick else 50)
    eight_stages, one_stage, linearized, by_make_fx, _ = steps
    for name in steps:
        print(f"{name:46} {median_of(times, name) * 1e3:7.1f} ms")
    print(f"8 stages take {against(ratio(times, eight_stages, one_stage), 1.5)} of the time of 1")
    print(f"8 stages and the loss take {against(ratio(times, eight_stages, linearized), 1.5)} of the time of linearize")
    print(f"linearize takes {ratio(times, linearized, by_make_fx):.2f} of the time of make_fx")


if __name__ == "__main__":
    main()
