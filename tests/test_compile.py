"""Stages compiled by inductor give autograd's gradients to rounding, and equal stages are compiled once."""

import io
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import fpipe
from fpipe.graphs.compiling.add import add_into_sums
from fpipe.graphs.compiling.code import compile_graph
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.language.graph import Graph, Name, Node, aval_of_tensor, fact_in_own_storage
from fpipe.tree import leaves
from tests.processes import Processes
from tests.test_hoist import CastCounter

MSE = nn.functional.mse_loss
pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler on the CPU"),
    pytest.mark.filterwarnings("error"),  # also warnings of torch about itself, which other tests ignore
]
ROWS = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, -2, 64).view(8, 8)


def layers(count: int, middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *([middle] if middle else [])) for _ in range(count)]
    return nn.Sequential(*blocks)


def two_stages() -> tuple[fpipe.Program, fpipe.Model, tuple[dict[str, torch.Tensor], ...]]:
    model, params, _ = fpipe.from_sequential(layers(2), stages=2, loss=MSE)
    return fpipe.chain(fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model)), model, params


def zero_bubble(model: fpipe.Model, ranks: int = 2) -> fpipe.Program:
    return fpipe.chain(
        fpipe.split(2), fpipe.checkpoint("always"), fpipe.split_backward(), fpipe.schedules.zb_h1(ranks), fpipe.merge()
    )(fpipe.program(model))


def is_close(actual: fpipe.Result, expected: fpipe.Result) -> bool:
    leaf_lists = (leaves((result.loss, result.grads, result.state or ())) for result in (actual, expected))
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*leaf_lists, strict=True))


def test_a_compiled_step_gives_gradients_and_statistics_of_autograd_to_rounding(capsys: pytest.CaptureFixture[str]):
    """Used to raise KeyError 'factor_0': an updating forward takes the weight of a batch, which is no tensor."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    model, params, state = fpipe.from_sequential(net, sizes=[3, 1], loss=MSE)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    result = fpipe.build(program, model, compile=True, runtime="threads")(params, ROWS, state=state)
    # A torch built for CUDA adds a line where there is no GPU.
    assert re.search(r"^fpipe compiled 6 graphs in \d+\.\d s\n\Z", capsys.readouterr().err, re.MULTILINE)
    assert is_close(result, fpipe.reference(model, params, ROWS, microbatches=2, state=state))
    local_result = fpipe.build(program, model, compile=True)(params, ROWS, state=state)
    assert capsys.readouterr().err == ""  # what is compiled is compiled
    assert all(map(torch.equal, leaves(local_result.grads), leaves(result.grads)))


def test_sums_accumulate_products_in_place():
    """Inductor used to copy the sum, add the product, and copy it back."""
    a, b, g, total = (Name(name) for name in ("a_0", "b_0", "g_0", "total_0"))
    facts = {name: fact_in_own_storage(aval_of_tensor(torch.ones(24, 24))) for name in (a, b, g, total)}
    product = Node(g, torch.ops.aten.mm.default, (a, b), {})
    graph = add_into_sums(Graph((product,), facts, {}, {"a": (a,), "b": (b,)}, {"g": (g,)}), ["g"], None, exact=False)
    kernel = Kernel(graph, "W of stage 0")
    kernel.compile()
    left, right, buffer = torch.rand(24, 24), torch.rand(24, 24), torch.rand(24, 24)
    expected = buffer + left @ right
    with profile() as profiler:
        ((returned,),) = kernel([left], [right], [buffer])
    assert returned is buffer
    torch.testing.assert_close(returned, expected)
    assert "aten::copy_" not in {event.key for event in profiler.key_averages()}


def compile_on_rank(rank: int) -> str:
    """Build a compiled step on this rank and return the line that reports it."""
    program, model, params = two_stages()
    with redirect_stderr(io.StringIO()) as stderr:
        step = fpipe.build(program, model, compile=True, runtime="distributed", example=(params, ROWS))
    result = step(fpipe.local_params(program, params), ROWS)
    torch.testing.assert_close(
        result.grads[rank], fpipe.reference(model, params, ROWS).grads[rank], rtol=1e-5, atol=1e-6
    )
    return stderr.getvalue().split(" in ")[0]


@pytest.mark.deep
def test_each_process_compiles_its_own_graphs(pair: Processes):
    assert pair.run(compile_on_rank) == ["fpipe compiled 2 graphs"] * 2


@pytest.mark.deep
def test_split_backward_checkpoint_dropout_and_compile_go_together(capsys: pytest.CaptureFixture[str]):
    """torch 2.13's own runtime refuses the first three with a compiled stage."""
    model, params, _ = fpipe.from_sequential(layers(2, nn.Dropout(0.5)), stages=2, loss=MSE)
    program = zero_bubble(model)
    step = fpipe.build(program, model, compile=True)
    expected = fpipe.build(program, model)(params, ROWS, key=3)
    assert is_close(step(params, ROWS, key=3), expected)
    assert "fpipe compiled" in capsys.readouterr().err
    assert not torch.equal(step(params, ROWS, key=4).loss, expected.loss)
    threads = fpipe.build(program, model, compile=True, runtime="threads")
    assert is_close(threads(params, ROWS, key=3), expected)
    assert "fpipe compiled" not in capsys.readouterr().err  # what is compiled is compiled


@pytest.mark.deep
def test_equal_stages_are_compiled_once(capsys: pytest.CaptureFixture[str]):
    def compile_and_report(count: int) -> str:
        model, params, _ = fpipe.from_sequential(layers(count), stages=count, loss=MSE)
        result = fpipe.build(zero_bubble(model, count), model, compile=True)(params, ROWS)
        assert is_close(result, fpipe.reference(model, params, ROWS, microbatches=2))
        return capsys.readouterr().err.split(" in ")[0]

    assert compile_and_report(3) == compile_and_report(5) != ""


SCRIPT = """
import torch, fpipe
from torch._dynamo.utils import counters
torch.set_num_threads(1)
model, params, _ = fpipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), stages=1,
                                         loss=torch.nn.functional.mse_loss)
program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
fpipe.build(program, model, compile=True)(params, (torch.ones(2, 3), torch.ones(2, 3)))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.deep
def test_a_second_process_reuses_the_compile_cache(tmp_path):
    def run() -> list[int]:
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": "."},
        )
        return [*map(int, process.stdout.split())]

    misses, hits = run()
    assert misses > 0 == hits
    assert run() == [0, misses]


def random_graph(op: object, *numbers: float) -> Graph:
    """Return a graph of one op that draws random numbers for a matrix it reads."""
    x, y, rng = Name("x_0"), Name("y_0"), Name("rng_cpu")
    facts = dict.fromkeys((x, y), fact_in_own_storage(aval_of_tensor(torch.ones(2, 2))))
    return Graph((Node(y, op, (x, *numbers), {"generator": rng}),), facts, {}, {"x": (x,), "rng": (rng,)}, {"y": (y,)})


def test_compiled_stages_read_casts_of_a_step():
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(8, 8)), stages=1, loss=MSE)
    program = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))(fpipe.program(model))
    options: Any = {"autocast": torch.bfloat16, "audit": "never"}  # an audit casts by the definition
    steps = [fpipe.build(program, model, compile=compile, **options) for compile in (True, False)]
    compiled, plain = (step(params, ROWS) for step in steps)
    pairs = zip(leaves(compiled.grads), leaves(plain.grads), strict=True)
    for grad, expected in pairs:
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.02)
    with CastCounter() as counter:
        steps[0](params, ROWS)
    assert [counter.count_by_address[leaf.data_ptr()] for leaf in leaves(params)] == [1, 1]


def test_audits_of_compiled_code_allow_for_the_rounding_of_autocast():
    """A sum in another order rounds to another bfloat16: with one of three nets the gradient of the bias did."""
    for seed in range(8):
        torch.manual_seed(seed)
        model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(8, 1)), stages=1, loss=MSE)
        step = fpipe.build(fpipe.program(model), model, compile=True, autocast=torch.bfloat16, audit="always")
        assert step(params, (torch.randn(16, 8), torch.randn(16, 1))).loss > 0


def test_random_numbers_that_depend_on_computed_values_are_not_compiled():
    """Compiled code takes no generator, so all random numbers are drawn before it runs."""
    graph = random_graph(torch.ops.aten.bernoulli.default)
    with pytest.raises(RuntimeError, match="compile=True takes no bernoulli\\.default, whose random numbers depend"):
        Kernel(graph, "F of stage 0").compile()
    assert compile_graph(graph)([torch.ones(2, 2)], [torch.Generator()])[0][0].sum() == 4
