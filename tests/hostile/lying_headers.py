# ruff: noqa: E501  (a table of lies, one to a line)
"""safetensors headers and JSON indexes that lie."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lies import READ, WEIGHTS, file, lie, saved

Table = dict[str, Any]


def honest() -> Table:
    return {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def spelt(text: bytes, payload: bytes = WEIGHTS, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def header(text: bytes, payload: bytes = WEIGHTS, **how: int) -> Callable[[Path], Path]:
    return file("model.safetensors", spelt(text, payload), **how)


def table(payload: bytes = WEIGHTS, **entries: Any) -> Callable[[Path], Path]:
    """A header with these entries instead of the honest one or beside it."""
    return header(json.dumps({**honest(), **entries}).encode(), payload)


def w(**fields: Any) -> Callable[[Path], Path]:
    """The one tensor with these fields changed."""
    made = {**honest()["w"], **fields}
    return table(w={k: v for k, v in made.items() if v is not None})


TEXT = json.dumps(honest()).encode()
DEEP = b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

for name, make, pattern in (
    ("a length of 2**64", file("model.safetensors", spelt(TEXT, length=2**64 - 1)), "not a checkpoint|header of"),
    ("a length past the end", file("model.safetensors", spelt(TEXT, length=10**6)), "header of 1000000 bytes"),
    ("a length of one byte less", file("model.safetensors", spelt(TEXT, length=len(TEXT) - 1)), "not JSON"),
    ("a length of a gibibyte in a hole", file("model.safetensors", spelt(TEXT, length=1 << 30), size=1 << 40), "not a checkpoint|header of"),
    ("the largest header, all holes", file("model.safetensors", spelt(TEXT, length=100_000_000), size=200_000_000), "not JSON"),
    ("a payload that is a hole", header(TEXT, size=1 << 40), "end at"),
    ("bytes behind the tensors", header(TEXT, WEIGHTS + b"more"), "end at"),
    ("a cut payload", header(TEXT, WEIGHTS[:10]), "truncated|ends at"),
    ("nested 200,000 deep", header(DEEP), "nested too deeply"),
    ("a value nested 200,000 deep in metadata", header(b'{"__metadata__":' + DEEP + b"}"), "nested too deeply"),
    ("a million lists", header(b'{"w":[' + b"[]," * 8_000_000 + b"[]]}"), "values|lists"),
    ("a million numbers", header(b'{"w":{"dtype":"F32","data_offsets":[0,24],"shape":[' + b"1000," * 9_000_000 + b"1]}}"), "values|dimensions"),
    ("one name twice", header(TEXT[:-1] + b"," + TEXT[1:]), "`w` twice"),
    ("one field twice", header(TEXT.replace(b'"F32"', b'"F32","dtype":"I32"')), "`dtype` twice"),
    ("one name twice, once escaped", header(TEXT[:-1] + b"," + TEXT[1:].replace(b'"w"', b'"\\u0077"')), "`w` twice"),
    ("NaN", w(shape=[float("nan")]), "NaN"),
    ("infinity", w(shape=[float("inf")]), "Infinity"),
    ("a size of 2**63", w(shape=[2**63, 0], data_offsets=[0, 0]), "size|overlaps|hole|end at"),
    ("a product of 2**128", w(shape=[2**64, 2**64]), "needs|size"),
    ("a size of 5,000 digits", header(TEXT.replace(b"[2, 3]", b"[" + b"9" * 5000 + b"]")), "digits"),
    ("a size of 4,000 digits, squared", header(TEXT.replace(b"[2, 3]", b"[" + b"9" * 4000 + b"," + b"9" * 4000 + b"]")), "size"),
    ("100,000 dimensions", w(shape=[1] * 100_000 + [6]), "dimensions"),
    ("a size of true", w(shape=[True, 6]), "shape"),
    ("a size of 2.0", w(shape=[2.0, 3]), "shape"),
    ("a size below zero", w(shape=[-2, -3]), "shape"),
    ("no shape", w(shape=None), "has no `shape`"),
    ("no offsets", w(data_offsets=None), "has no `data_offsets`"),
    ("three offsets", w(data_offsets=[0, 12, 24]), "data_offsets"),
    ("offsets backwards", w(data_offsets=[24, 0]), "data_offsets"),
    ("offsets below zero", w(data_offsets=[-24, 0]), "data_offsets"),
    ("offsets of 2**70", w(data_offsets=[2**70, 2**70 + 24]), "hole"),
    ("a dtype of nobody", w(dtype="F33"), "unknown dtype"),
    ("a dtype that is a list", w(dtype=["F32"]), "unknown dtype"),
    ("a tensor that is a number", table(x=3), "not an object"),
    ("two tensors of one range", table(x=honest()["w"]), "overlaps"),
    ("a tensor within another", table(x={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}), "overlaps"),
    ("metadata of numbers", table(__metadata__={"a": 1}), "__metadata__"),
    ("metadata that is a tensor", table(__metadata__=honest()["w"]), "__metadata__"),
    ("metadata that is text", table(__metadata__="x"), "__metadata__"),
    ("a name that talks to the terminal", table(**{"\x1b]0;owned\x07": 3}), r"\\x1b\]0;owned\\x07"),
    ("a name that turns the text around", table(**{"\u202ew": 3}), r"\\u202e"),
    ("a name of half a character", header(TEXT.replace(b'"w"', b'"\\ud800"') .replace(b"[0, 24]", b"[0, 25]")), "ud800|needs 24"),
    ("not UTF-8", header(b'{"\xff": 1}'), "UTF-8"),
    ("UTF-16", header("{".encode("utf-16-le") + b"}"), "not JSON|checkpoint"),
    ("a comment in JSON", header(b"{/* */}"), "not JSON"),
    ("a comma too many", header(TEXT[:-1] + b",}"), "not JSON"),
    ("a header and a second one", header(TEXT + TEXT), "not JSON"),
    ("no braces", header(b"[]      "), "checkpoint|begins with"),
    ("offsets of pieces that are text", table(__metadata__={"DCP_SHARDING_INFO": "{"}), "DCP_SHARDING_INFO"),
    ("offsets of pieces below zero", table(__metadata__={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [-1, 0]}})}), "DCP_SHARDING_INFO"),
    ("offsets of pieces of 2**70", table(__metadata__={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2**70, 0]}})}), "no offset in its `DCP_SHARDING_INFO`"),
    ("offsets of two pieces for one", table(__metadata__={"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [1, 0]}}'}), "twice"),
    ("offsets of pieces, eight million lists", table(__metadata__={"DCP_SHARDING_INFO": '{"w":[' + "[]," * 8_000_000 + "[]]}"}), "values"),
    ("offsets of pieces nested", table(__metadata__={"DCP_SHARDING_INFO": "[" * 100_000}), "DCP_SHARDING_INFO"),
):  # fmt: skip
    lie(f"safetensors: {name}", make, pattern, code=(READ, 4))


# Indexes --------------------------------------------------------------------------------------------------------------

GOOD = spelt(TEXT)


def index(weight_map: Any, *more: Callable[[Path], object], text: bytes | None = None) -> Callable[[Path], Path]:
    """A directory with an honest file `a.safetensors`, an honest one outside, and an index that says this."""

    def make(folder: Path) -> Path:
        path = folder / "ckpt"
        path.mkdir()
        (path / "a.safetensors").write_bytes(GOOD)
        (folder / "outside.safetensors").write_bytes(GOOD)
        for step in more:
            step(path)
        said = json.dumps({"metadata": {}, "weight_map": weight_map}).encode() if text is None else text
        (path / "model.safetensors.index.json").write_bytes(said)
        return path

    return make


def to(name: str, *more: Callable[[Path], object]) -> Callable[[Path], Path]:
    return index({"w": name}, *more)


OUT = "outside the checkpoint"
LINK = "a link that leaves"
for name, make, pattern in (
    ("a file above", to("../outside.safetensors"), OUT),
    ("a file above, the long way", to("x/../../outside.safetensors"), OUT),
    ("a file above, as on Windows", to("..\\outside.safetensors"), OUT),
    ("an absolute path", to("/etc/passwd"), OUT),
    ("an absolute path, as on Windows", to("\\\\server\\share"), OUT),
    ("a drive", to("C:\\x.safetensors"), OUT),
    ("a drive, relative", to("C:x.safetensors"), OUT),
    ("a URL", to("https://example.com/a.safetensors"), OUT),
    ("a URL of a file", to("file:///etc/passwd"), OUT),
    ("a URL of a store", to("s3://bucket/a.safetensors"), OUT),
    ("a path with a zero", to("a.safetensors\0"), OUT),
    ("no name", to(""), OUT),
    ("half a character", to("a\ud800.safetensors"), r"'a\\ud800.safetensors', which cannot be"),
    ("a path of 5,000 letters", to("a" * 5000), "too long|not there|cannot read"),
    ("the directory", to("."), "directory"),
    ("a directory", to("sub", lambda p: (p / "sub").mkdir()), "directory"),
    ("a pipe", to("pipe", lambda p: os.mkfifo(p / "pipe")), "pipe"),
    ("a device", to("zero", lambda p: (p / "zero").symlink_to("/dev/zero")), LINK),
    ("a link out", to("link", lambda p: (p / "link").symlink_to("../outside.safetensors")), LINK),
    ("a link to a link out", to("one", lambda p: ((p / "one").symlink_to("two"), (p / "two").symlink_to("/etc/passwd"))), LINK),
    ("a link to itself", to("loop", lambda p: (p / "loop").symlink_to("loop")), "link|symbolic|not there|cannot"),
    ("a directory that is a link out", to("up/outside.safetensors", lambda p: (p / "up").symlink_to("..")), LINK),
    ("a file that is not there", to("b.safetensors"), "not there"),
    ("a file that is a pickle", to("p.safetensors", lambda p: (p / "p.safetensors").write_bytes(saved())), "header"),
    ("a name that talks to the terminal", to("\x1b]0;owned\x07"), r"\\x1b"),
    ("a number for a file", to(3), "weight_map"),  # type: ignore[arg-type]
    ("a list for a file", to(["a.safetensors"]), "weight_map"),  # type: ignore[arg-type]
    ("a list for the map", index([]), "weight_map"),
    ("a tensor that the file has not", index({"w": "a.safetensors", "x": "a.safetensors"}), "`x`"),
    ("one name twice", index(None, text=b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'), "twice"),
    ("the map twice", index(None, text=b'{"weight_map": {}, "weight_map": {"w": "a.safetensors"}}'), "twice"),
    ("nested 200,000 deep", index(None, text=b'{"weight_map":' + DEEP + b"}"), "nested too deeply"),
    ("a list", index(None, text=b"[1]"), "weight_map"),
    ("not JSON", index(None, text=b"\x80\x02."), "UTF-8|not JSON"),
    ("empty", index(None, text=b""), "not JSON"),
):  # fmt: skip
    lie(f"index: {name}", make, pattern, code=(READ, 4))


def _hollow(folder: Path) -> Path:
    path = to("a.safetensors")(folder)
    with (path / "model.safetensors.index.json").open("r+b") as stream:
        stream.truncate(1 << 40)
    return path


def _hollow_within(folder: Path) -> Path:
    path = to("a.safetensors")(folder)
    with (path / "model.safetensors.index.json").open("r+b") as stream:
        stream.truncate(1 << 29)
    return path


lie("index: a tebibyte of zeros", _hollow, "bytes of JSON")
lie("index: half a gibibyte of zeros", _hollow_within, "not JSON|bytes of JSON")
