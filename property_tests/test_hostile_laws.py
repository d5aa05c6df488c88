"""The law of untrusted files: whatever bytes a file has, reading it gives a program or raises a ValueError."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.cli.options import read_program
from fpipe.interop import to_json, torch_pipelining
from fpipe.program import Program
from property_tests.strategies import max_examples

MERGED = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(2))
PAIRED = fpipe.chain(
    fpipe.split(3),
    fpipe.schedules.from_table("0F0 0F1 (0F2;0B0) 0B1 0B2 \n 1F0 1B0 1F1 1B1 1F2 1B2"),
    fpipe.merge(),
    fpipe.communicate(cast="bfloat16"),
)(fpipe.program(2))
SLICED = fpipe.chain(fpipe.checkpoint(), fpipe.split(1, slices=2), fpipe.merge(fpipe.Chunk(1)))(fpipe.program(2))
FILES = (
    *map(str, (MERGED, PAIRED, SLICED)),
    *map(to_json, (MERGED, PAIRED, SLICED)),
    *(program.to_csv() for program in (MERGED, PAIRED, SLICED)),
    *(fpipe.plot(program) for program in (MERGED, SLICED)),
    torch_pipelining.to_csv(MERGED, format="compute_comms"),
    torch_pipelining.to_csv(PAIRED.parse(str(MERGED))),
)
PIECES = (
    *("0F999999999", "999999999", "-1", "1e999", "True", "None", "0x" + "f" * 50, "(" * 300, "[" * 3000, "-" * 900),
    *("- " * 20_000, "a.b.", "{", "}", " ; ", ";", ",", '"', "'", "#", ")", " @ ", " = ", ":", ">", "@9", "[0,0]"),
    *("\0", "\r", "\u2028", "\ud800", "é", "rank", "PAIR", "FREE", "SEND", "{spec='(((', index=[]}", '{"a":' * 2000),
)


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """Draw a valid file of one of the formats, with some pieces cut out, repeated, or replaced."""
    text = draw(st.sampled_from(FILES))
    for _ in range(draw(st.integers(1, 4))):
        start, length = draw(st.integers(0, len(text))), draw(st.sampled_from([0, 0, 1, 1, 2, 5, 40, 400]))
        piece = text[start : start + length]
        new = draw(st.sampled_from(PIECES) | st.just(piece * draw(st.integers(0, 40))) | st.text(max_size=4))
        text = text[:start] + new + text[start + length :]
    return text.encode(errors="surrogatepass")


@max_examples(150)
@given(mutated_files())
def test_a_file_is_the_program_of_its_text_or_raises_value_error(file_bytes: bytes):
    """Cells of 200 kB, deep nesting, wide numbers and 0F999999999 used to end in MemoryError or RecursionError."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        Path(file.name).write_bytes(file_bytes)
        try:
            program = read_program(file.name)
        except ValueError:
            return
    assert Program.parse(str(program)) == program
    assert fpipe.simulate(program).makespan > 0
    assert fpipe.plot(program)
