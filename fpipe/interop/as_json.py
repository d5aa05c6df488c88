"""Write programs as plain JSON, for tools that do not read fpipe's text, and read them back.

    {"format": "fpipe.program", "version": 1, "stages": 2, "microbatches": 4, "ranks": 2,
     "inputs":  [{"value": "params[0]", "homes": [0]}, ...],
     "ops":     [{"rank": 0, "kind": "F", "stage": 0, "microbatch": 0,
                  "reads": ["params[0]", "x[0,0]"], "writes": ["y[0,0]", "res[0,0]"]}, ...],
     "outputs": [{"name": "grads[0]", "value": "sum[0,3]", "homes": [0]}, ...]}

The ops stand in the program's one order, and a rank's schedule is its ops in this order. Values are written as in the
program's text. An op may also have a `slice` and `options` (name: value, as Python writes it), and a PAIR has `parts`,
its ops. The three sizes follow from the ops, and are there for readers.
"""

from __future__ import annotations

import json
from typing import Any

from fpipe.program import Op, Program, ProgramError, refuse_long_words


def to_json(program: Program) -> str:
    """Write a program as JSON, one op a line; `from_json` reads it back.

    >>> import fpipe
    >>> print(to_json(fpipe.program(1)).splitlines()[12])
      {"rank": 0, "kind": "B", "stage": 0, "microbatch": 0, "reads": ["params[0]", "res[0,0]"], "writes": ["g[0,0]"]}
    """
    sizes = {"stages": program.stages, "microbatches": program.microbatches, "ranks": program.ranks}
    outputs = [{"name": str(end.name), "value": str(end.value), "homes": list(end.homes)} for end in program.outputs]
    lists_by_name = {
        "inputs": [{"value": str(end.value), "homes": list(end.homes)} for end in program.inputs],
        "ops": [{"rank": op.rank, **_op_record(op)} for op in program.ops],
        "outputs": outputs,
    }
    # One op a line, so that a diff of two files shows the ops that differ.
    lines = [f'"{name}": {json.dumps(value)}' for name, value in {"format": FORMAT, "version": 1, **sizes}.items()]
    for name, records in lists_by_name.items():
        rows = "".join(f"\n  {json.dumps(record)}," for record in records)
        lines.append(f'"{name}": [{rows[:-1]}\n]')
    return "{" + ",\n".join(lines) + "}\n"


FORMAT = "fpipe.program"


def _op_record(op: Op) -> dict[str, Any]:
    if op.parts:
        return {"kind": op.kind, "parts": [_op_record(part) for part in op.parts]}
    indices = {"stage": op.stage, "microbatch": op.microbatch, "slice": op.slice}
    fields: dict[str, Any] = {"kind": op.kind, **{name: i for name, i in indices.items() if i is not None}}
    fields |= {"reads": list(map(str, op.reads)), "writes": list(map(str, op.writes))}
    return fields | ({"options": {name: repr(value) for name, value in op.options}} if op.options else {})


def from_json(text: str) -> Program:
    """Read a program from its JSON, and check it.

    Raises:
        ProgramError: the text is not JSON of a program (with the field that is wrong), or the program is not valid.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2))
    >>> from_json(to_json(program)) == program
    True
    >>> from_json('{"format": "fpipe.program"}')
    Traceback (most recent call last):
    fpipe.ops.ProgramError: this JSON is not a program: an entry lacks 'inputs'.
    """
    text = refuse_long_words(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProgramError(f"this is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except (ValueError, RecursionError):
        raise ProgramError("this is no JSON: it nests too deeply, or has a long number.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProgramError(f'this JSON is not a program: it says "format": "{FORMAT}" at the top.')
    # Back to the program's text, so that one parser checks both formats.
    try:
        lines = [f"{record['value']} @ {_homes(record)}" for record in document["inputs"]]
        lines += [f"{_equation(op)} @ {op['rank']}" for op in document["ops"]]
        lines += [f"{record['name']} = {record['value']} @ {_homes(record)}" for record in document["outputs"]]
    except KeyError as field:
        raise ProgramError(f"this JSON is not a program: an entry lacks {field}.") from None
    except (TypeError, AttributeError) as error:
        raise ProgramError(f"this is not JSON that to_json writes: {error}.") from None
    return Program.parse("\n".join(lines))


def _homes(record: Any) -> str:
    return ",".join(map(str, record["homes"]))


def _equation(op: Any) -> str:
    if "parts" in op:
        return f"{{ {' ; '.join(map(_equation, op['parts']))} }}"
    stage, microbatch, slice_index = (str(op.get(name, "")) for name in ("stage", "microbatch", "slice"))
    tail = "," * bool(microbatch or slice_index) + microbatch + "." * bool(slice_index) + slice_index
    reads, writes = (" ".join(map(str, op[name])) for name in ("reads", "writes"))
    settings = ", ".join(f"{name}={value}" for name, value in op.get("options", {}).items())
    return f"{writes or '_'} = {op['kind']}[{stage}{tail}] {reads}" + (f" {{{settings}}}" if settings else "")
