"""The example on real digits, shortened: batch norm and dropout train in a pipeline as on a single device."""

import runpy
import sys
from functools import partial

import pytest
import torch

import fpipe


@pytest.fixture
def digits(monkeypatch):
    """Return the example, with microbatches of one size so that each stage is traced once.

    Its imports take a second.
    """
    from examples import digits

    monkeypatch.setattr(digits, "ROWS", 40)
    return digits


@pytest.mark.slow
def test_losses_parameters_buffers_and_answers_equal_those_of_plain_autograd(digits, capsys, tmp_path):
    with torch.random.fork_rng(devices=[]):
        is_equal = digits.run(epochs=1, rows=80, width=4, file=tmp_path / "digits.png")
    printed = capsys.readouterr().out
    assert is_equal, printed
    equal_lines = [line.strip() for line in printed.splitlines() if "every bit equal" in line]
    counts = ("2 losses", "18 parameters", "12 buffers", "297 answers")
    assert equal_lines == [f"{compared}: every bit equal" for compared in counts]
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_with_another_key_fails_the_comparison(digits, monkeypatch, capsys):
    monkeypatch.setattr(fpipe, "build", partial(fpipe.build, trace=False))
    monkeypatch.setattr(digits, "plain_backward", lambda *args, plain=digits.plain_backward: plain(*args[:2], 1))
    with torch.random.fork_rng(devices=[]):
        is_equal = digits.run(epochs=1, rows=40, width=2)
    assert not is_equal
    assert "1 losses: NOT equal" in capsys.readouterr().out


@pytest.mark.parametrize(("module", "package"), [("sklearn.datasets", "sklearn"), ("matplotlib.figure", "matplotlib")])
def test_a_missing_package_is_named_with_its_extra(digits, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=rf"needs {package}.*, which is missing: pip install scikit-learn matplotlib"):
        runpy.run_path(digits.__file__)


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_everything_is_equal(digits, is_equal, code, monkeypatch):
    monkeypatch.setattr(digits, "run", lambda epochs, file: is_equal)
    monkeypatch.setattr("sys.argv", ["digits.py"])
    assert digits.main() == code
