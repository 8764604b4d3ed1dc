"""Valid data made invalid: bytes that flip and vanish, and JSON whose values become others.

`rng` decides everything: it is Hypothesis's in tests and libFuzzer's seed in hardening/fuzz.py.
"""

import copy
import json
import math
import random
import re
import struct
from typing import Any

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**53 + 1, 2**63,
    10**30, 10**400, math.nan, math.inf, -math.inf, "", " ", "0", "nan", "1e400", "a" * 3000, "\0",
    "\ud800", "\n", "\x1b[31m", "\u202e", "../../x", "/etc/passwd", "<script>alert(1)</script>",
    "</script>", "{{7*7}}", [], {}, [[]], [None], [0] * 3000, ["a", 1, None], {"": {}}, {"x": [1]},
]  # fmt: skip
DEPTHS = (50, 400, 600, 950, 1100, 100_000)
NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"99999999999999999999", b"1.5", b"", b"\xff", b"inf")
LENGTHS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**60, 2**64 - 1)
MISFITS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
Random = random.Random


def mutated(data: bytes, form: str, rng: Random) -> bytes:
    """One to three changes; a form that data no longer have leaves changes of bytes."""
    for _ in range(rng.randint(1, 3)):
        structured = form in FORMS and rng.random() < 0.75
        change = FORMS[form] if structured else _bytes
        try:
            data = change(data, rng)
        except (struct.error, ArithmeticError, *MISFITS):
            data = _bytes(data, rng)
    return data


def _bytes(data: bytes, rng: Random) -> bytes:
    out = bytearray(data or b"\0")
    at, other = rng.randrange(len(out)), rng.randrange(len(out))
    low, high = min(at, other), max(at, other)
    match rng.randrange(8):
        case 0:
            out[at] ^= 1 << rng.randrange(8)
        case 1:
            out[at] = rng.choice((0, 0x7F, 0x80, 0xFF, 0x22, 0x2C, 0x0A))
        case 2:
            del out[at:]
        case 3:
            del out[low : min(high, low + 64)]
        case 4:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
        case 5:
            out[at:at] = out[low : min(high, low + 256)]
        case 6:
            size = rng.choice((4, 8))
            number = rng.choice(LENGTHS) % 2 ** (8 * size)
            out[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        case _:
            out[at:at] = rng.choice((b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b'"'))
    return bytes(out)


def _text(data: bytes, rng: Random) -> bytes:
    """Of a table or a list: a cell becomes another, a line comes twice, goes or changes places."""
    if rng.random() < 0.5:
        cells = list(re.finditer(rb"[^,\s]+", data))
        cell = rng.choice(cells)
        new = rng.choice((*NUMBERS, rng.choice(cells).group(), b'"', b"a" * 3000, b"<script>"))
        return data[: cell.start()] + new + data[cell.end() :]
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines.insert(at, rng.choice(lines))
        case 1:
            del lines[at]
        case 2:
            rng.shuffle(lines)
        case _:
            lines[at] += rng.choice((b",", b",,,,", b" 1", b"\r", b"\0", b'"'))
    return b"\n".join(lines)


def _json(data: bytes, rng: Random) -> bytes:
    return changed(data.decode(), rng).encode("utf-8", "surrogatepass")


def changed(text: str, rng: Random) -> str:
    """One value of a JSON text becomes another; also what `json.dumps` would not write."""
    found = json.loads(text)
    kind = rng.randrange(12)
    if kind == 0:
        depth = rng.choice(DEPTHS)
        mark = '"~here~"'
        deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
        return json.dumps(_with(found, rng, "~here~")).replace(mark, deep, 1)
    if kind == 1:
        once = json.dumps(found)
        braces = [m.end() for m in re.finditer(r"\{", once)]
        key = rng.choice(re.findall(r'"(\w+)":', once) or ["x"])
        at = rng.choice(braces)
        return f'{once[:at]}"{key}": {json.dumps(rng.choice(NASTY))}, {once[at:]}'
    whole = rng.random() < 0.5
    value = copy.deepcopy(rng.choice(NASTY))  # it may become a part that is changed next
    return json.dumps(_with(found, rng, value), ensure_ascii=whole)


def _with(found: Any, rng: Random, value: Any) -> Any:
    """The same with one node replaced, removed, repeated, or replaced by another of its nodes."""
    places = list(_places(found))
    if not places:
        return value
    holder, key = rng.choice(places)
    match rng.randrange(6) if value != "~here~" else 5:
        case 0:
            del holder[key]
        case 1:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else value
        case 2 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 2:
            holder[str(value)[:50]] = holder.pop(key)
        case 3 if type(holder[key]) in (int, float):
            holder[key] = rng.choice((-holder[key], holder[key] + 1, holder[key] * 1e9, 0.5))
        case 3 if isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice((0, 2, 100)) or value
        case _:
            holder[key] = value
    return found


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(found: Any) -> Any:
    """Every value inside, by what holds it and where."""
    for key in list(_keys(found)) if isinstance(found, dict | list) else ():
        yield found, key
        yield from _places(found[key])


def _lines(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json(lines[at], rng)
    return b"\n".join(lines)


def _safetensors(data: bytes, rng: Random) -> bytes:
    """The header, or one of the JSON texts in its metadata; the numbers behind it stay."""
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + size].decode(), data[8 + size :]
    found = json.loads(header)
    told = found.get("__metadata__") or {}
    if told and rng.random() < 0.7:
        key = rng.choice(sorted(told))
        inner = changed(told[key], rng)
        told[key] = changed(inner, rng) if rng.random() < 0.2 else inner
        header = json.dumps(found)
    else:
        header = changed(header, rng)
    made = header.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        rest = rest[: rng.randrange(len(rest) + 1)]
    told_size = len(made) if rng.random() < 0.95 else rng.choice(LENGTHS)
    return struct.pack("<Q", told_size) + made + rest


FORMS = {"text": _text, "json": _json, "lines": _lines, "safetensors": _safetensors}
