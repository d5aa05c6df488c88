"""The demo at a tiny size reports equal results, and fails when something differs."""

import io

import pytest
import torch
from rich.console import Console

import fpipe
from examples import demo

TINY = demo.Sizes(width=16, heads=2, context=8, rows=10, steps=3, sample=5)


def run_demo(sizes: demo.Sizes) -> tuple[bool, str]:
    file = io.StringIO()
    with torch.random.fork_rng(devices=[]):
        good = demo.run(Console(file=file, width=110, highlight=False, markup=False, emoji=False), sizes)
    return good, file.getvalue()


def test_every_program_and_every_step_of_the_training_is_bitwise_plain_autograd():
    good, text = run_demo(TINY)
    assert good, text
    assert "bitwise equal at 3 of 3 steps, and so are the final parameters." in text
    headline, _, *lines_to_try = text[text.index("12 of 12") :].splitlines()
    assert headline == "12 of 12 programs bitwise equal to plain autograd"
    assert [line.strip() for line in lines_to_try[1:]] == list(demo.TRY)
    assert max(map(len, text.splitlines())) <= 110


def test_a_gradient_that_is_off_by_one_bit_fails_the_demo(monkeypatch):
    join_params = fpipe.join_params

    def one_bit_off(*args):
        grads = join_params(*args)
        last_name = list(grads)[-1]
        return {**grads, last_name: torch.nextafter(grads[last_name], torch.tensor(float("inf")))}

    monkeypatch.setattr(fpipe, "join_params", one_bit_off)
    monkeypatch.setattr(demo, "PROGRAMS", demo.PROGRAMS[:2])
    good, text = run_demo(TINY)
    assert not good
    assert "\n0 of 2 programs bitwise equal to plain autograd\n" in text


def test_a_training_that_differs_fails_the_demo(monkeypatch):
    monkeypatch.setattr(demo, "PROGRAMS", [])
    monkeypatch.setattr(fpipe, "assign_grads", lambda params, grads: None)
    good, text = run_demo(TINY)
    assert not good
    assert "bitwise equal at 1 of 3 steps, but the final parameters are NOT." in text


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_is_equal(good, code, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda console, sizes: good)
    monkeypatch.setattr("sys.argv", ["demo.py"])
    assert demo.main() == code


def test_the_lines_to_try_next_run(capsys):
    namespace = {"fpipe": fpipe}
    for line in demo.TRY:
        exec(line, namespace)
    grid, time = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert grid.startswith("rank 0 | 0F0 0F1")
    assert time.startswith("makespan 9,")
