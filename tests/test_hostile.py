"""Files and options from elsewhere that took all memory, all time or the stack, or passed and failed later."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app
from fpipe.cli.options import load_module
from fpipe.cli.programs import program_of
from fpipe.cli.tensor_files import read_tensors
from fpipe.interop import to_json
from fpipe.transforms.specs import spec_of

SPLIT = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(1))
TEXT = str(SPLIT)


def how(text: str) -> str:
    return TEXT.replace("{index=0, count=2}", f"{{{text}}}")


def nested(depth: int, opening: str, core: str, closing: str) -> str:
    return opening * depth + core + closing * depth


HEAD = '{"format": "fpipe.program", "inputs": [], "outputs": [],\n "ops": ['
TEXTS = {
    "an unrecognised microbatch": ("0F999999999 0B999999999", "the table does not name 0F0"),
    "an unrecognised stage": ("0F0,0B0\n999999999F0,999999999B0", "the table does not name 1F0"),
    "an unrecognised slice": ("0F0.99999999 0B0.99999999", "the table does not name 0F0.0"),
    "a diagonal": (" ".join(f"{n}F{n} {n}B{n}" for n in range(3000)), "the table does not name 0F1"),
    "a diagonal of torch's": (
        ",".join(f"{n}F{n},{n}B{n},{n}SEND_F{n}" for n in range(3000)),
        "the table does not name 0F1",
    ),
    "a long cell": ("0F0 " + "x" * 200_000, "'xxxxxxxxxxxxxxxxxxxx...' is a word of 200000 characters"),
    "a long cell of CSV": ("0F0,\n" + "x" * 200_000, "line 2: 'xxxxxxxxxxxxxxxxxxxx...' is a word of 200000"),
    "a long quoted cell": ('0F0,"' + "x " * 100_000 + '"', "field larger than field limit"),
    "a deep cell": (nested(400, "(", "0F0", ")"), "is not a cell"),
    "a PAIR in a PAIR": ("((0F0;0F1);0B0) 0B1", "'(0F0' is not a cell"),
    "a PAIR in a PAIR of a text": (
        nested(5000, "{ ", "y[0,0] = F[0,0] x", " }") + " @ 0",
        "line 1: '}' is not a value",
    ),
    "a PAIR of many": (
        "(" + ";".join(f"0F{n}" for n in range(100)) + ") " + " ".join(f"0B{n}" for n in range(100)),
        "a PAIR has two parts, at most 16; found 100.",
    ),
    "deep JSON": ('{"a": ' + nested(100_000, "[ ", "", "] ") + "}", "it nests too deeply"),
    "deep PAIRs of JSON": (
        HEAD + nested(200, '{"kind": "PAIR", "rank": 0, "parts": [', "", "]}") + "]}",
        "PAIR has no list 'reads'",
    ),
    "a wide number of JSON": (to_json(SPLIT).replace('"rank": 0', '"rank": ' + "9" * 5000), "a word of 5000"),
    "signs": (how("index=" + "- " * 100_000 + "1"), "is not a list of name=literal"),
    "attributes": (how("index=a" + " .b" * 100_000), "is not a list of name=literal"),
    "sums": (how("index=1" + " + 1" * 100_000), "is not a list of name=literal"),
    "brackets": (how("index=" + "( " * 100_000), "is not a list of name=literal"),
    "a wide number": (how("index=0, count=0x" + "f" * 90), "is not a list of name=literal"),
    "an infinite number": (how("index=0, count=1e999"), "is not a list of name=literal"),
    "junk before": (how("junk=99)(index=0, count=2"), "{junk=99)(index=0, count=2} is not a list"),
    "junk behind": (how("index=0, count=2)#"), "is not a list of name=literal"),
    "no end": (TEXT.replace("count=2}", "count=2"), "is not a list of name=literal"),
    "a spec that is no literal": (how("index=0, count=2, spec='((('"), "has a spec: '(((' is no Python literal"),
    "a spec that is no text": (how("index=0, count=2, spec=3"), "says spec=3, where str is wanted"),
    "an index of another type": (how("index=False, count=2"), "says index=False, where int is wanted"),
    "an index that is a float": (how("index=0.0, count=2"), "says index=0.0, where int is wanted"),
    "slices that are none": (TEXT.replace("count=2", "count=2, slices=999999999"), "but the program has 1 slices"),
    "one home thrice": (TEXT.replace("params[0] @ 0", "params[0] @ 0,0,0"), "params[0] names a home twice"),
    "a stage that is alone": (
        str(fpipe.program(1)).replace("[0", "[999999999"),
        "stage 0 is missing: stages are 0..999999999, and each has an op.",
    ),
    "a result that is alone": (
        TEXT.replace("grads[0] =", "grads[999999999] ="),
        "stage 1 is missing: stages are 0..999999999",
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
    "show zb_auto:memory_cap={[]:1}": "memory_cap is a number of microbatches, found '{[]:1}'",
    "show gpipe -m 100000000": "microbatches is a whole number, at most 20000; found 100000000.",
    "show gpipe -m 1" + "0" * 400: "microbatches is a whole number, at most 20000; found 1000",
    "show gpipe -p 100000000": "ranks is a whole number, at most 20000",
    "show gpipe -s 100000000": "into at most 500 forwards, stages times slices; found 2.5e+07.",
    "show gpipe:stages=1000000000": "stages is a whole number, at most 20000",
    "show gpipe -p 10 -s 2000 -m 20000": "are more than the 10000000 ops of a program",
    "show hanayo:waves=1000000000": "into at most 500 forwards, stages times slices; found 2e+09.",
    "show seq1f1b:slices=100000000": "into at most 500 forwards, stages times slices; found 1e+08.",
    "compare gpipe:stages=20000": "into at most 500 forwards, stages times slices; found 5000.",
    "search -p 4 -m 100000000": "microbatches is a whole number, at most 20000",
    "compare gpipe --costs F=1e308,B=1,W=1": "forward is a time in seconds, at least 0, at most 1.84e+19; found 1e",
    "robustness gpipe --jitter 1e308": "jitter is a share of an op's seconds, a number from 0 to 1000000",
    "robustness gpipe --samples 1000000000": "samples is a whole number, at most 20000",
}


@pytest.mark.parametrize(("words", "sentence"), OPTIONS.items(), ids=[words[:40] for words in OPTIONS])
def test_a_hostile_option_is_refused_in_a_sentence(words: str, sentence: str):
    found = CliRunner().invoke(app, words.split())
    assert found.exit_code in (1, 2)
    assert sentence in " ".join(found.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "text", ["1000000 hosts x 1000000 ranks", "9" * 5000 + " ranks", f"2 ranks; inside {'9' * 400}s"]
)
def test_a_hostile_cluster_is_refused_in_a_sentence(text: str):
    with pytest.raises(ValueError, match=r"cluster's ranks is a whole number|begins with its sizes|expected a latency"):
        fpipe.Cluster.parse(text)


def test_a_module_that_is_no_python_is_refused_with_its_line(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def step():\n    return (1,\n")
    with pytest.raises(ValueError, match=r"mine.py, line 2 is no Python: '\(' was never closed"):
        load_module(str(file))


def entry(**said: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **said}}


HEADERS = {
    "deep": b'{"a":' + b"[" * 100_000,
    "a list": [1],
    "a shape of truth": entry(shape=[True, 2]),
    "a shape of text": entry(shape="2"),
    "a shape of lists": entry(shape=[[2]]),
    "a wide shape": entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0]),
    "offsets of floats": entry(data_offsets=[0.0, 8.0]),
    "offsets below 0": entry(data_offsets=[-8, 0]),
    "three offsets": entry(data_offsets=[0, 4, 8]),
    "a list of dtypes": entry(dtype=["F32"]),
    "integers": entry(dtype="I32"),
    "nothing": {"w": None},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_hostile_header_of_safetensors_is_refused_in_a_sentence(header: Any, tmp_path: Path):
    file = tmp_path / "grads.safetensors"
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(8))
    with pytest.raises(ValueError, match=r"grads.safetensors (is no file in the safetensors format|holds 'w' as)"):
        read_tensors([str(file)])


def test_a_header_that_is_longer_than_its_file_is_refused(tmp_path: Path):
    """It was read as a file without tensors, whose gradients were then missed."""
    file = tmp_path / "grads.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ValueError, match="it has no such header"):
        read_tensors([str(file)])


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "integer": lambda: torch.arange(3),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_whose_numbers_cannot_be_compared_are_refused_by_name(made: Callable[[], torch.Tensor], tmp_path: Path):
    """A quantized one in two files ended the process."""
    file = tmp_path / "grads.pt"
    torch.save({"w": made()}, file)
    with pytest.raises(ValueError, match=r"grads.pt holds a .*tensor of .* under 'w'; wanted are tensors by name."):
        read_tensors([str(file), str(file)])
