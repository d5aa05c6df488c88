"""Whatever layers a net has, its blocks are cut between, it has its own gradients, or it is refused in words; and
whatever the rows of a batch, a loss function keeps to them."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from property_tests.strategies import few
from property_tests.whole_models import WIDTH, Cut, Net, Whole, judged, wholes
from tests.own_autograd import own_autograd

REFUSED = ("modules to cut after", "choose cuts= that keep it in one")


@few(3)
@given(whole=wholes(front="net"), stages=st.integers(1, 6))
def test_a_cut_net_has_its_own_gradients_or_is_refused_in_words(whole: Whole, stages: int) -> None:
    """Where its stages end says `from_module`, by what the net's blocks cost."""
    net = Net(whole)
    assume(any(leaf.requires_grad for leaf in net.parameters()))
    inputs, target = Cut((6,)).drawn(6, 3, torch.Generator().manual_seed(whole.seed), getattr(torch, whole.dtype))
    loss = lambda y, target: judged("mean", y, target)[0]  # noqa: E731
    batch = inputs, target
    try:
        model, params, state = fpipe.from_module(net, stages, loss=loss, example=batch)
    except ValueError as error:
        if any(words in str(error) for words in REFUSED):
            return
        raise
    assert len(model.stages) == stages
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(stages), fpipe.merge())(fpipe.program(model))
    if whole.draws:  # seeded where its stages begin
        assert fpipe.verify(program, model, params, batch, state=state, key=1).bitwise
        return
    result = fpipe.build(program, model)(params, batch, state=state)
    right_loss, right = own_autograd(net, batch, 3, key=1, ends=(), loss=loss)
    found = fpipe.join_params(model, result.grads)
    torch.testing.assert_close(result.loss, right_loss)
    for name, grad in right.items():
        torch.testing.assert_close(found[name], grad, msg=name)
    now = dict(net.named_buffers())
    assert [name for one in result.state or () for name in one if not torch.equal(one[name], now[name])] == []


def both_sizes(params: dict[str, Tensor], batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    """A loss that asks for the rows of a table and of the batch, also of what it computes."""
    (table, x), target = batch
    y = fpipe.boundary(torch.tanh(x @ params["w"]) / x.shape[0])
    pairs = (y[:, None] * table).reshape(-1, WIDTH)
    return pairs.square().sum() / x.shape[0] + pairs.shape[0] * table.shape[0] * target.mean()


@few(4)
@given(
    example=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    count=st.integers(1, 3),
    each=st.integers(1, 4),
    table_rows=st.integers(1, 5),
)
def test_each_leaf_of_a_batch_has_rows_of_its_own(example: tuple[int, int], count: int, each: int, table_rows: int):
    """Whatever the rows of the example, a step whose microbatches take a table whole is the function of each."""

    def batch(rows: int, of_table: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        table, x = (torch.randn(size, WIDTH, dtype=torch.float64) for size in (of_table, rows))
        return (table, x), torch.randn(rows, dtype=torch.float64)

    params = {"w": torch.randn(WIDTH, WIDTH, dtype=torch.float64)}
    model, own = fpipe.from_loss(both_sizes, params, batch(*example))
    (table, x), target = batch(count * each, table_rows if example[1] > 1 else 1)  # one row among many is fixed
    spec = (fpipe.Replicate(), fpipe.Chunk(0)), fpipe.Chunk(0)
    program = fpipe.chain(fpipe.split(count, spec=spec), fpipe.merge(outputs=False))(fpipe.program(model))
    parts = zip(x.split(each), target.split(each), strict=True)
    right = sum(both_sizes(params, ((table, part), aim)) / count for part, aim in parts)
    torch.testing.assert_close(fpipe.build(program, model)(own, ((table, x), target)).loss, right)
