"""The encoder-decoder on a little real text: an output with many readers, tied embeddings, a counted loss."""

from functools import partial

import pytest
import torch

import fpipe
from examples import seq2seq


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(seq2seq, "ROWS", 12)
    monkeypatch.setattr(seq2seq, "LENGTH", 6)


@pytest.mark.slow
def test_every_step_and_the_final_parameters_are_plain_autograd_bit_by_bit(capsys):
    with torch.random.fork_rng(devices=[]):
        good = seq2seq.run(steps=2, width=8, samples=4)
    text = capsys.readouterr().out
    assert good, text
    assert "Loss and 31 gradients are bitwise equal at 2 of 2 steps, and so are the final parameters." in text
    assert "it reads" in text


def test_sums_in_another_order_are_detected(monkeypatch, capsys):
    monkeypatch.setattr(fpipe, "build", partial(fpipe.build, trace=False))
    monkeypatch.setattr(seq2seq, "MICROBATCHES", 5)  # by hand; the program has its 6
    with torch.random.fork_rng(devices=[]):
        good = seq2seq.run(steps=1, width=8, samples=4)
    assert not good
    assert "bitwise equal at 0 of 1 steps, but the final parameters are NOT." in capsys.readouterr().out


def test_the_encoders_output_is_one_value_with_a_reader_in_every_decoder_stage():
    model = fpipe.from_functions(
        seq2seq.STAGES, seq2seq.counted, inputs=seq2seq.INPUTS, ties=seq2seq.TIES, reduction="count"
    )
    ops = [str(op) for op in seq2seq.pipeline(model).ops]
    readers = [op for op in ops if "= F[" in op and " y[1,0] " in op]
    assert [op.split("= ")[1].split()[0] for op in readers] == ["F[2,0]", "F[3,0]", "F[4,0]"]
    assert sum("dy[1,0]" in op.split(" = ")[0] for op in ops) == 1


def test_the_inputs_are_the_text_without_vowels():
    inputs, target = seq2seq.batch_of(["an end"])
    assert seq2seq.letters(target[0]) == "an end"
    assert seq2seq.letters(inputs["source"][0][:6]) == "_n _nd"
    assert inputs["before"][0, :7].tolist() == [seq2seq.START, *target[0, :6].tolist()]


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_is_equal(good, code, monkeypatch):
    monkeypatch.setattr(seq2seq, "run", lambda steps: good)
    monkeypatch.setattr("sys.argv", ["seq2seq.py"])
    assert seq2seq.main() == code
