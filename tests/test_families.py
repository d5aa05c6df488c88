"""Families of transformers at four stages: loss, gradients and state are the net's own, with dropout drawn by a key."""

from pathlib import Path

import pytest
import torch

from tests.families import FAMILIES
from tests.own_autograd import assert_cut_equals_net

hf = pytest.importorskip("transformers")
IN_CI = ("GPT2", "Whisper", "ResNet")


@pytest.mark.filterwarnings("ignore:.* holds -100")  # as its own autograd, microbatch by microbatch, has it
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]
)
def test_a_family_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    net, batch = family.make(hf), family.batch()
    assert_cut_equals_net(net, batch, family.ends, family.loss, (family.rounds.path,) if family.rounds else ())


def test_the_page_lists_the_families_that_are_tested() -> None:
    page = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "`" in line]
    listed_ends = {row[0].removeprefix("| "): row[2] for row in rows}
    ends = {name: ", ".join(f"`{end}`" for end in family.ends) for name, family in FAMILIES.items()}
    assert listed_ends == ends, "run `make families-page`"
