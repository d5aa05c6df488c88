"""The example on real digits, shortened: batch norm and dropout train in a pipeline as on one device."""

import runpy
import sys
from functools import partial

import pytest
import torch

import fpipe


@pytest.fixture
def digits(monkeypatch):
    """The example, whose imports take a second, with microbatches of one size, so that each stage is traced once."""
    from examples import digits

    monkeypatch.setattr(digits, "ROWS", 40)
    return digits


@pytest.mark.slow
def test_losses_parameters_buffers_and_answers_are_those_of_plain_autograd(digits, capsys, tmp_path):
    with torch.random.fork_rng(devices=[]):
        good = digits.run(epochs=1, rows=80, width=4, file=tmp_path / "digits.png")
    text = capsys.readouterr().out
    assert good, text
    found = [line.strip() for line in text.splitlines() if "every bit equal" in line]
    counts = ("2 losses", "18 parameters", "12 buffers", "297 answers")
    assert found == [f"{what}: every bit equal" for what in counts]
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_with_another_key_fails_it(digits, monkeypatch, capsys):
    monkeypatch.setattr(fpipe, "build", partial(fpipe.build, trace=False))
    monkeypatch.setattr(digits, "plain_backward", lambda *args, plain=digits.plain_backward: plain(*args[:2], 1))
    with torch.random.fork_rng(devices=[]):
        good = digits.run(epochs=1, rows=40, width=2)
    assert not good
    assert "1 losses: NOT equal" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "missing"), [("sklearn.datasets", "sklearn"), ("matplotlib.figure", "matplotlib")])
def test_what_is_missing_is_named_and_how_to_get_it(digits, name, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}.*, which is missing: pip install 'fpipe\[examples\]'"):
        runpy.run_path(digits.__file__)


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_is_equal(digits, good, code, monkeypatch):
    monkeypatch.setattr(digits, "run", lambda epochs, file: good)
    monkeypatch.setattr("sys.argv", ["digits.py"])
    assert digits.main() == code
