"""Whatever modules are nested in which lists: cut between them, a net has its own gradients, or is refused in words;
and whatever the rows of a batch, a loss function keeps to them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fpipe
from property_tests.strategies import few
from tests.own_autograd import own_autograd
from tests.toys import Toy

WIDTH = 4


class Calls(nn.Module):
    """Calls its children one after the other, by a rule of its own."""

    def __init__(self, rule: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.rule, self.layers = rule, nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        first, seen = x, list[Tensor]()
        for layer in reversed(self.layers) if self.rule == "backwards" else self.layers:
            x = self.through(layer, x)
            seen.append(x)
        if self.rule == "skip":
            return x + first
        if self.rule == "all":
            return torch.stack(seen).mean(0)
        return self.layers[0](x) if self.rule == "twice" else x

    def through(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.rule == "residual":
            return x + layer(x)
        if self.rule == "recomputed" and not [*layer.buffers()]:  # under plain autograd these would be written twice
            return checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportReturnType]
        if self.rule == "scaled":
            with torch.no_grad():
                scale = layer(x).square().mean()
            return layer(x) / (1 + scale)
        return layer(x)


def both(own: Any, x: Tensor) -> Tensor:
    """A pair of values through two nets and back, as where a text is read beside an image."""
    made = {name: layer(x) for name, layer in own.pairs.items()}
    return made["one"] * torch.sigmoid(made["other"])


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def half_frozen() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return layer


def tied() -> nn.Module:
    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers)


def rows_that_read_each_other(own: Any, x: Tensor) -> Tensor:
    return own.heads(x, x, x, need_weights=False)[0]


def counts(own: Any, x: Tensor) -> Tensor:
    """Remembers how often it was called, and divides by it: by a copy, since autograd refuses to differentiate a call
    whose count the next one has written."""
    own.calls += 1
    return x / own.calls.clone()


def averages(own: Any, x: Tensor) -> Tensor:
    """Reads a mean of its inputs, and binds it anew, of which torch.export says nothing: its state was lost."""
    before, own.mean = own.mean, 0.9 * own.mean + 0.1 * x.mean(0).detach()
    return x - own.mean + before


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "frozen": frozen,
    "half frozen": half_frozen,
    "tied": tied,
    "attention": lambda: Toy(rows_that_read_each_other, heads=nn.MultiheadAttention(WIDTH, 2)),
    "counter": lambda: Toy(counts, calls=torch.zeros(())),
    "average": lambda: Toy(averages, mean=torch.zeros(WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
}
Recipe = str | tuple[str, list["Recipe"]]
RULES = st.sampled_from(("chain", "residual", "skip", "twice", "backwards", "all", "recomputed", "scaled", "both"))
RECIPES = st.recursive(
    st.sampled_from([*LEAVES]),
    lambda inner: st.tuples(RULES, st.lists(inner, min_size=2, max_size=3)),
    max_leaves=8,
)


def made(recipe: Recipe) -> nn.Module:
    if isinstance(recipe, str):
        return LEAVES[recipe]()
    rule, inner = recipe
    children = [*map(made, inner)]
    if rule == "both":
        return Toy(both, pairs=nn.ModuleDict({"one": children[0], "other": nn.Sequential(*children[1:])}))
    return Calls(rule, children)


REFUSED = ("modules to cut after", "choose cuts= that keep it in one")


@few(3)
@given(inner=st.lists(RECIPES, min_size=1, max_size=3), stages=st.integers(1, 4))
def test_a_cut_net_has_its_own_gradients_or_is_refused_in_words(inner: list[Recipe], stages: int) -> None:
    torch.manual_seed(0)
    net = Calls("chain", [nn.Linear(WIDTH, WIDTH), *map(made, inner), nn.Linear(WIDTH, WIDTH)]).double()
    batch = torch.randn(6, WIDTH).double(), torch.randn(6, WIDTH).double()
    try:
        model, params, state = fpipe.from_module(net, stages, loss=F.mse_loss, example=batch)
    except ValueError as error:
        if any(words in str(error) for words in REFUSED):
            return
        raise
    assert len(model.stages) == stages
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(stages), fpipe.merge())(fpipe.program(model))
    if any(isinstance(module, nn.Dropout) for module in net.modules()):  # seeded where its stages begin
        assert fpipe.verify(program, model, params, batch, state=state, key=1).bitwise
        return
    result = fpipe.build(program, model)(params, batch, state=state, key=1)
    loss, right = own_autograd(net, batch, 3, key=1, ends=(), loss=F.mse_loss)
    found = fpipe.join_params(model, result.grads)
    torch.testing.assert_close(result.loss, loss)
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
