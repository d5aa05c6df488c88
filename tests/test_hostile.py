"""Hostile files and options that used to exhaust memory, time or the stack, or passed and failed later."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app
from fpipe.cli.options import load_module, program_of
from fpipe.interop import to_json
from fpipe.transforms.specs import spec_of

SPLIT = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(1))
TEXT = str(SPLIT)


def with_how(text: str) -> str:
    return TEXT.replace("{index=0, count=2}", f"{{{text}}}")


def nest(depth: int, opening: str, core: str, closing: str) -> str:
    return opening * depth + core + closing * depth


TEXTS = {
    "an unrecognised microbatch": ("0F999999999 0B999999999", "the table does not name 0F0"),
    "a diagonal": (" ".join(f"{n}F{n} {n}B{n}" for n in range(3000)), "the table does not name 0F1"),
    "a long cell": ("0F0 " + "x" * 200_000, "'xxxxxxxxxxxxxxxxxxxx...' is a word of 200000 characters"),
    "a long quoted cell": ('0F0,"' + "x " * 100_000 + '"', "field larger than field limit"),
    "a deep cell": (nest(400, "(", "0F0", ")"), "is not a cell"),
    "a PAIR in a PAIR": ("((0F0;0F1);0B0) 0B1", "'(0F0' is not a cell"),
    "a PAIR of many": (
        "(" + ";".join(f"0F{n}" for n in range(100)) + ") " + " ".join(f"0B{n}" for n in range(100)),
        "a PAIR has two parts, at most 16; found 100.",
    ),
    "deep JSON": ('{"a": ' + nest(100_000, "[ ", "", "] ") + "}", "it nests too deeply"),
    "a wide number of JSON": (to_json(SPLIT).replace('"rank": 0', '"rank": ' + "9" * 5000), "a word of 5000"),
    "signs": (with_how("index=" + "- " * 100_000 + "1"), "is not a list of name=literal"),
    "a wide number": (with_how("index=0, count=0x" + "f" * 90), "is not a list of name=literal"),
    "junk before": (with_how("junk=99)(index=0, count=2"), "{junk=99)(index=0, count=2} is not a list"),
    "a spec that is no literal": (with_how("index=0, count=2, spec='((('"), "has a spec: '(((' is no Python literal"),
    "a spec that is no text": (with_how("index=0, count=2, spec=3"), "says spec=3, where str is wanted"),
    "an index of another type": (with_how("index=False, count=2"), "says index=False, where int is wanted"),
    "slices that are none": (TEXT.replace("count=2", "count=2, slices=999999999"), "but the program has 1 slices"),
    "one home thrice": (TEXT.replace("params[0] @ 0", "params[0] @ 0,0,0"), "params[0] names a home twice"),
    "a stage that is alone": (
        str(fpipe.program(1)).replace("[0", "[999999999"),
        "stage 0 is missing: stages are 0..999999999, and each has an op.",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), TEXTS.values(), ids=TEXTS.keys())
def test_a_hostile_text_is_refused_in_a_sentence(text: str, sentence: str):
    with pytest.raises(fpipe.ProgramError) as error:
        program_of(text)
    assert sentence in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("text", ["(((", "- " * 9999 + "1", "{[]: Chunk(dim=0)}", "Chunk(dim='a')"])
def test_a_hostile_spec_is_refused_in_a_sentence(text: str):
    with pytest.raises(ValueError, match="is no"):
        spec_of(text)


OPTIONS = {
    "show one_f_one_b:ranks=9999999": "one_f_one_b has no option 'ranks'; it has: stages.",
    "show hanayo -o microbatches=3": "hanayo has no option 'microbatches'; it has: waves, stages.",
    "check /dev/zero": "/dev/zero has more than 268435456 characters, which no program needs.",
    "plan run -p 20000 -m 20000": "no schedule serves 20000 ranks and these microbatches.",
    "plan run gpipe --model os:getpid": "--model returns (model, params, batch) or (model, params, batch, state)",
    "plan run gpipe --model json:loads": "--model is a function without arguments: missing a required argument: 's'.",
    "plan run gpipe --model sys:exc_info": "model is a Model; found None.",
    "plan run gpipe --model .:step": "'.' is a relative name; say package.module, or the path of a .py file.",
    "show zb_auto:memory_cap={[]:1}": "memory_cap is a number; found '{[]:1}'",
    "show gpipe -m 100000000": "microbatches is a whole number, at most 20000; found 100000000.",
    "show gpipe -s 100000000": "stages times slices on a rank is at most 500, found 2.5e+07.",
    "show gpipe -p 10 -s 2000 -m 20000": "are more than the 10000000 ops of a program",
    "show seq1f1b:slices=100000000": "stages times slices on a rank is at most 500, found 1e+08.",
    "compare gpipe:stages=20000": "stages times slices on a rank is at most 500, found 5000.",
    "compare gpipe --costs F=1e308,B=1,W=1": "forward is a time in seconds, at least 0, at most 1.84e+19; found 1e",
}


@pytest.mark.parametrize(("command", "sentence"), OPTIONS.items(), ids=[command[:40] for command in OPTIONS])
def test_a_hostile_option_is_refused_in_a_sentence(command: str, sentence: str):
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code in (1, 2)
    assert sentence in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "text", ["1000000 hosts x 1000000 ranks", "9" * 5000 + " ranks", f"2 ranks; inside {'9' * 400}s"]
)
def test_a_hostile_cluster_is_refused_in_a_sentence(text: str):
    with pytest.raises(ValueError, match=r"cluster's ranks is a whole number|begins with its sizes|expected a latency"):
        fpipe.Cluster.parse(text)


def test_a_module_with_a_syntax_error_is_refused_with_its_line(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def step():\n    return (1,\n")
    with pytest.raises(ValueError, match=r"mine.py, line 2 is no Python: '\(' was never closed"):
        load_module(str(file))
