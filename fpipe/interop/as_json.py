"""A program as plain JSON, for tools that do not read our text: all it says, and nothing else.

    {"format": "fpipe.program", "version": 1, "stages": 2, "microbatches": 4, "ranks": 2,
     "inputs":  [{"value": "params[0]", "homes": [0]}, ...],
     "ops":     [{"rank": 0, "kind": "F", "stage": 0, "microbatch": 0,
                  "reads": ["params[0]", "x[0,0]"], "writes": ["y[0,0]", "res[0,0]"]}, ...],
     "outputs": [{"name": "grads[0]", "value": "sum[0,3]", "homes": [0]}, ...]}

The ops stand in the program's one order; a rank's schedule is what it has of them. Values are written as in the
program's text. An op may also have a `slice`, a `how` (name: value, as Python writes it), and a PAIR has `parts`, its
ops. The three sizes follow from the ops; they stand there for who reads it.
"""

from __future__ import annotations

import json
from typing import Any

from fpipe.program import Op, Program, ProgramError, readable, the_program


def to_json(program: Program) -> str:
    """Write a program as JSON, one op a line; `from_json` reads it back.

    >>> import fpipe
    >>> print(to_json(fpipe.program(1)).splitlines()[12])
      {"rank": 0, "kind": "B", "stage": 0, "microbatch": 0, "reads": ["params[0]", "res[0,0]"], "writes": ["g[0,0]"]}
    """
    the_program(program)
    sizes = {"stages": program.stages, "microbatches": program.microbatches, "ranks": program.ranks}
    outputs = [{"name": str(end.name), "value": str(end.value), "homes": list(end.homes)} for end in program.outputs]
    lists = {
        "inputs": [{"value": str(end.value), "homes": list(end.homes)} for end in program.inputs],
        "ops": [{"rank": op.rank, **_fields(op)} for op in program.ops],
        "outputs": outputs,
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in {"format": FORMAT, "version": 1, **sizes}.items()]
    for name, items in lists.items():
        rows = "".join(f"\n  {json.dumps(item)}," for item in items)
        lines.append(f'"{name}": [{rows[:-1]}\n]')
    return "{" + ",\n".join(lines) + "}\n"


FORMAT = "fpipe.program"


def _fields(op: Op) -> dict[str, Any]:
    if op.parts:
        return {"kind": op.kind, "parts": [_fields(part) for part in op.parts]}
    place = {"stage": op.stage, "microbatch": op.microbatch, "slice": op.slice}
    fields: dict[str, Any] = {"kind": op.kind, **{name: number for name, number in place.items() if number is not None}}
    fields |= {"reads": list(map(str, op.reads)), "writes": list(map(str, op.writes))}
    return fields | ({"how": {name: repr(value) for name, value in op.how}} if op.how else {})


def from_json(text: str) -> Program:
    """Read a program back from its JSON; it is checked as it enters.

    Raises:
        ProgramError: the text is not such JSON (with the field), or the program means nothing.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2))
    >>> from_json(to_json(program)) == program
    True
    >>> from_json('{"format": "fpipe.program"}')
    Traceback (most recent call last):
    fpipe.ops.ProgramError: this JSON is not a program: something in it has no 'inputs', as to_json writes it.
    """
    if not isinstance(text, str | bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"from_json takes the text that to_json made, found {type(text).__name__}.")
    text = readable(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProgramError(f"this is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except (ValueError, RecursionError):
        raise ProgramError("this is no JSON that is read: it nests too deeply, or has a number too long.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ProgramError(f'this JSON is not a program: it says "format": "{FORMAT}" at the top.')
    try:
        lines = [f"{end['value']} @ {_homes(end)}" for end in found["inputs"]]
        lines += [f"{_equation(op)} @ {op['rank']}" for op in found["ops"]]
        lines += [f"{end['name']} = {end['value']} @ {_homes(end)}" for end in found["outputs"]]
    except KeyError as missing:
        raise ProgramError(
            f"this JSON is not a program: something in it has no {missing}, as to_json writes it."
        ) from None
    except (TypeError, AttributeError) as error:
        raise ProgramError(f"this JSON is not a program as to_json writes it: {error}.") from None
    return Program.parse("\n".join(lines))


def _homes(end: Any) -> str:
    return ",".join(map(str, end["homes"]))


def _equation(op: Any) -> str:
    """Write an op as the program's text has it, without its rank."""
    if "parts" in op:
        return f"{{ {' ; '.join(map(_equation, op['parts']))} }}"
    stage, microbatch, piece = (str(op.get(name, "")) for name in ("stage", "microbatch", "slice"))
    tail = "," * bool(microbatch or piece) + microbatch + "." * bool(piece) + piece
    reads, writes = (" ".join(map(str, op[name])) for name in ("reads", "writes"))
    how = ", ".join(f"{name}={value}" for name, value in op.get("how", {}).items())
    return f"{writes or '_'} = {op['kind']}[{stage}{tail}] {reads}" + (f" {{{how}}}" if how else "")
