"""Laws of nets: whatever its layers, a cut net has its own gradients or a known error, and a loss function may read the
rows of a batch."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import fpipe
from property_tests.strategies import max_examples
from property_tests.whole_models import WIDTH, Cut, ModelRecipe, Net, loss_and_metrics, model_recipes
from tests.own_autograd import eager_loss_and_grads

REFUSED = ("modules to cut after", "choose cuts= that keep it in one")


@max_examples(3)
@given(recipe=model_recipes(front="net"), stages=st.integers(1, 6))
def test_a_cut_net_has_its_own_gradients_or_a_known_error(recipe: ModelRecipe, stages: int) -> None:
    """`from_module` chooses the cuts by the costs of the net's blocks."""
    net = Net(recipe)
    assume(any(leaf.requires_grad for leaf in net.parameters()))
    inputs, target = Cut((6,)).drawn(6, 3, torch.Generator().manual_seed(recipe.seed), getattr(torch, recipe.dtype))
    loss = lambda y, target: loss_and_metrics("mean", y, target)[0]  # noqa: E731
    batch = inputs, target
    try:
        model, params, state = fpipe.from_module(net, stages, loss=loss, batch=batch)
    except ValueError as error:
        if any(reason in str(error) for reason in REFUSED):
            return
        raise
    assert len(model.stages) == stages
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(stages), fpipe.merge())(fpipe.program(model))
    if recipe.draws:  # seeded where its stages begin
        assert fpipe.verify(program, model, params, batch, state=state, key=1).bitwise
        return
    result = fpipe.build(program, model)(params, batch, state=state)
    expected_loss, expected_grads = eager_loss_and_grads(net, batch, 3, key=1, ends=(), loss=loss)
    grads = fpipe.join_params(model, result.grads)
    torch.testing.assert_close(result.loss, expected_loss)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, msg=name)
    expected_buffers = dict(net.named_buffers())
    buffers = {name: buffer for stage in result.state or () for name, buffer in stage.items()}
    assert [name for name in buffers if not torch.equal(buffers[name], expected_buffers[name])] == []


def loss_by_sizes(params: dict[str, Tensor], batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a loss that reads the numbers of rows of a table, of the batch, and of computed tensors."""
    (table, x), target = batch
    y = fpipe.boundary(torch.tanh(x @ params["w"]) / x.shape[0])
    pairs = (y[:, None] * table).reshape(-1, WIDTH)
    return pairs.square().sum() / x.shape[0] + pairs.shape[0] * table.shape[0] * target.mean()


@max_examples(4)
@given(
    example=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    count=st.integers(1, 3),
    part_rows=st.integers(1, 4),
    table_rows=st.integers(1, 5),
)
def test_leaves_of_a_batch_may_differ_in_rows(example: tuple[int, int], count: int, part_rows: int, table_rows: int):
    """Whatever rows the example has, a step whose microbatches read a table whole is the mean over microbatches."""

    def batch(rows: int, of_table: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        table, x = (torch.randn(size, WIDTH, dtype=torch.float64) for size in (of_table, rows))
        return (table, x), torch.randn(rows, dtype=torch.float64)

    params = {"w": torch.randn(WIDTH, WIDTH, dtype=torch.float64)}
    model, marked_params = fpipe.from_loss(loss_by_sizes, params, batch(*example))
    (table, x), target = batch(count * part_rows, table_rows if example[1] > 1 else 1)  # one row among many is fixed
    spec = (fpipe.Replicate(), fpipe.Chunk(0)), fpipe.Chunk(0)
    program = fpipe.chain(fpipe.split(count, spec=spec), fpipe.merge(outputs=False))(fpipe.program(model))
    parts = zip(x.split(part_rows), target.split(part_rows), strict=True)
    right = sum(loss_by_sizes(params, ((table, part), aim)) / count for part, aim in parts)
    torch.testing.assert_close(fpipe.build(program, model)(marked_params, ((table, x), target)).loss, right)
