"""Hypothesis strategies that damage a valid file: bytes, or one value of the JSON inside it."""

import json
import struct
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["../../x", "<script>alert(1)</script>", "\ud800", "a" * 3000, 10**400]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
DEPTHS = st.sampled_from((50, 600, 1100, 100_000))


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """A slice of the bytes is replaced by others, removed, or repeated."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 64)))
    patch = draw(st.one_of(st.just(b""), st.just(data[start:stop] * 2), st.binary(max_size=16)))
    return data[:start] + patch + data[stop:]


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [found for key in keys for found in ((value, key), *list_places(value[key]))]


@st.composite
def damaged_json(draw: Any, text: str) -> str:
    """One value is replaced by any other, removed, or nested very deeply."""
    value = json.loads(text)
    places = list_places(value)
    if not places:
        return json.dumps(draw(VALUES))
    container, key = draw(st.sampled_from(places))
    change = draw(st.sampled_from(("replace", "replace", "remove", "nest", "copy")))
    if change == "remove":
        del container[key]
    elif change == "copy":
        other, name = draw(st.sampled_from(places))
        container[key] = json.loads(json.dumps(other[name]))
    else:
        container[key] = "~nest~" if change == "nest" else draw(VALUES)
    depth = draw(DEPTHS) if change == "nest" else 0
    return json.dumps(value).replace('"~nest~"', "[" * depth + "]" * depth)


@st.composite
def damaged(draw: Any, data: bytes, form: str) -> bytes:
    """A damaged copy of `data`; `form` is "json", "lines" (of JSON), "safetensors" or another."""
    if form == "bytes" or draw(st.booleans()):
        return draw(damaged_bytes(data))
    try:
        if form == "json":
            return draw(damaged_json(data.decode())).encode("utf-8", "surrogatepass")
        if form == "lines":
            lines = data.split(b"\n")
            at = draw(st.integers(0, len(lines) - 1))
            lines[at] = draw(damaged_json(lines[at].decode())).encode("utf-8", "surrogatepass")
            return b"\n".join(lines)
        if form == "safetensors":
            return draw(damaged_safetensors(data))
    except (ValueError, RecursionError, struct.error):  # the seed itself is no such file
        pass
    return draw(damaged_bytes(data))


@st.composite
def damaged_safetensors(draw: Any, data: bytes) -> bytes:
    """The header, or one JSON text of its metadata, is damaged; the numbers behind it stay."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__") or {}
    if metadata and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(metadata)))
        metadata[key] = draw(damaged_json(metadata[key]))
        text = json.dumps(header)
    else:
        text = draw(damaged_json(json.dumps(header)))
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + size :]
