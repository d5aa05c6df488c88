"""Every kernel of `tests.kernels` through two front doors, against plain autograd and against its row of the page."""

import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fpipe
from docs.kernels import PAGE, row_of
from fpipe import tree
from property_tests.bits import is_same_gradient
from tests.kernels import KERNELS, LENGTH, WIDTH, causal, causal_attention
from tests.toys import Toy

ROWS = {line.split(" | ")[0].removeprefix("| "): f"{line}\n" for line in PAGE.read_text().splitlines()}


# Each is like another row.
DEEP = """scaled_dot_product_attention, causal; scaled_dot_product_attention, float mask; torch.func.jvp; save_on_cpu
FlexAttention, score_mod; FlexAttention, BlockMask of a closure; while_loop; associative_scan; custom_op with
a block after block.compile(); a function of torch.compile; int8 weight with __torch_dispatch__
frozen int8 weight and; triton_op; grouped_mm; torch.func.grad; scan, captured"""
IS_DEEP = {name: any(name.startswith(start.strip()) for start in re.split(r"[;\n]", DEEP)) for name in KERNELS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * is_deep) for name, is_deep in IS_DEEP.items()]
)
def test_a_kernel_runs_as_its_row_says(name: str) -> None:
    assert row_of(name) == ROWS[name], "run `make kernels-page`"


def test_no_row_has_other_bits() -> None:
    assert "other bits" not in PAGE.read_text()


def test_no_row_is_refused_in_words_of_torch_alone() -> None:
    refusals = re.findall(r"refused: ([^|]*)", PAGE.read_text())
    assert all(sentence.startswith("stage 1 (1) makes a tensor of a class") for sentence in refusals)


def run_under_math(module: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        for block in module.blocks:
            x = block(x)
    return x


def test_sdpa_kernel_around_blocks_is_kept() -> None:
    """Used to be lost: stages ran another kernel, with other bits and without a word."""
    torch.manual_seed(0)
    blocks = [Toy(causal_attention, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    net, batch = Toy(run_under_math, blocks=nn.ModuleList(blocks)), (torch.randn(4, LENGTH, WIDTH),) * 2
    model, params, _ = fpipe.from_module(net, 2, loss=F.mse_loss, batch=batch)
    result = fpipe.build(fpipe.program(model), model)(params, batch)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    grads = fpipe.join_params(model, result.grads)
    assert all(is_same_gradient(grads[name], param.grad) for name, param in net.named_parameters())


def set_flag(module: Any, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return module.inner(x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_flag_of_kernels_is_refused_by_name() -> None:
    net = nn.Sequential(Toy(set_flag, inner=nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    batch = (torch.randn(4, WIDTH),) * 2
    with pytest.raises(ValueError, match="the net sets deterministic_algorithms as it runs, which no trace keeps"):
        fpipe.from_module(net, 2, loss=F.mse_loss, batch=batch)


def test_a_block_mask_in_the_batch_is_refused_with_a_way_out() -> None:
    """Its function takes the index of a row in the whole batch, and no split knows which tensors it reads."""
    mask = flex_attention.create_block_mask(causal, 4, None, LENGTH, LENGTH, device="cpu")
    model = fpipe.from_functions([lambda p, x: x[0] * p["w"]], loss=F.mse_loss)
    batch = ((torch.ones(4, WIDTH), mask), torch.ones(4, WIDTH))
    with pytest.raises(TypeError, match="Make it in the stage, by create_block_mask on tensors of the"):
        fpipe.build(fpipe.program(model), model)(({"w": torch.ones(WIDTH)},), batch)


def test_a_copied_model_finds_its_functions() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), KERNELS["autograd.Function: gradient reversal"]())
    batch = (torch.randn(4, WIDTH),) * 2
    model, params, _ = fpipe.from_module(net, cuts=["0"], loss=F.mse_loss, batch=batch)
    expected = fpipe.build(fpipe.program(model), model)(params, batch)
    copy = pickle.loads(pickle.dumps(model))
    del model
    result = fpipe.build(fpipe.program(copy), copy)(params, batch)
    assert all(map(torch.equal, tree.leaves(result.grads), tree.leaves(expected.grads)))


def recompute(module: Any, x: Tensor) -> Any:
    factor = 2 if x.sum() > 0 else 3
    return checkpoint(lambda y: module.a(module.b(y).sin()) * factor, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_a_checkpoint_in_an_opaque_module_recomputes_with_the_parameters_of_the_step() -> None:
    """Used to recompute with the parameters of the net: wrong gradients without a word, once a step had others."""
    torch.manual_seed(0)
    block = Toy(recompute, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
    net, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), block), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    model, params, _ = fpipe.from_module(net, cuts=["0"], loss=F.mse_loss, batch=batch)
    next_params = tuple({name: leaf * 1.5 for name, leaf in stage.items()} for stage in params)
    result = fpipe.build(fpipe.program(model), model)(next_params, batch)
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(1.5)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    grads = fpipe.join_params(model, result.grads)
    assert all(is_same_gradient(grads[name], param.grad) for name, param in net.named_parameters())
