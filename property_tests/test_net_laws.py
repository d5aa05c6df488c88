"""Whatever modules are nested in which lists: cut between them, a net has its own gradients, or is refused in words."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fpipe

WIDTH = 4


class Calls(nn.Module):
    """Calls its children one after the other, by a rule of its own."""

    def __init__(self, rule: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.rule, self.layers = rule, nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            y = layer(x)
            x = x + y if self.rule == "residual" else y
        if self.rule == "skip":
            x = x + first
        return self.layers[0](x) if self.rule == "twice" else x


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
}
Recipe = str | tuple[str, list["Recipe"]]
RULES = st.sampled_from(("chain", "residual", "skip", "twice"))
RECIPES = st.recursive(
    st.sampled_from([*LEAVES]),
    lambda inner: st.tuples(RULES, st.lists(inner, min_size=2, max_size=3)),
    max_leaves=8,
)


def made(recipe: Recipe) -> nn.Module:
    return LEAVES[recipe]() if isinstance(recipe, str) else Calls(recipe[0], [*map(made, recipe[1])])


@settings(max_examples=max(1, settings().max_examples // 6))
@given(inner=st.lists(RECIPES, min_size=1, max_size=3), stages=st.integers(1, 4))
def test_a_cut_net_has_its_own_gradients_or_is_refused_in_words(inner: list[Recipe], stages: int) -> None:
    torch.manual_seed(0)
    net = Calls("chain", [nn.Linear(WIDTH, WIDTH), *map(made, inner), nn.Linear(WIDTH, WIDTH)])
    batch = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    try:
        model, params, state = fpipe.from_module(net, stages, loss=F.mse_loss, example=batch)
    except ValueError as error:
        if "modules to cut after" in str(error) or "choose cuts= that keep it in one" in str(error):
            return
        raise
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(stages), fpipe.merge())(fpipe.program(model))
    # It compares with the net under plain autograd too.
    assert fpipe.verify(program, model, params, batch, state=state, key=1).bitwise
    assert len(model.stages) == stages
