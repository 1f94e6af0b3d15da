# ruff: noqa: E501  (a table of lies, one to a line)
"""safetensors headers and JSON indexes that lie."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.lying_files import READ, WEIGHTS, file, lie, saved

Table = dict[str, Any]


def honest() -> Table:
    return {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def spelt(text: bytes, payload: bytes = WEIGHTS, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


def header(text: bytes, payload: bytes = WEIGHTS, **how: int) -> Callable[[Path], Path]:
    return file("model.safetensors", spelt(text, payload), **how)


def table(payload: bytes = WEIGHTS, **entries: Any) -> Callable[[Path], Path]:
    """A header with these entries instead of the honest one or beside it, spelt as libraries do."""
    return header(json.dumps({**honest(), **entries}, separators=(",", ":")).encode(), payload)


def w(**fields: Any) -> Callable[[Path], Path]:
    """The one tensor with these fields changed."""
    made = {**honest()["w"], **fields}
    return table(w={k: v for k, v in made.items() if v is not None})


TEXT = json.dumps(honest()).encode()
DEEP = b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

for name, make, pattern in (
    ("a length of 2**64", file("model.safetensors", spelt(TEXT, length=2**64 - 1)), r"a header of \d+ bytes is more than the \d+ that safetensors allows"),
    ("a length past the end", file("model.safetensors", spelt(TEXT, length=10**6)), "header of 1000000 bytes"),
    ("a length of one byte less", file("model.safetensors", spelt(TEXT, length=len(TEXT) - 1)), "the header is not JSON: (?!a zero)"),
    ("a length of a gibibyte in a hole", file("model.safetensors", spelt(TEXT, length=1 << 30), size=1 << 40), r"a header of \d+ bytes is more than the \d+ that safetensors allows"),
    ("the largest header, all holes", file("model.safetensors", spelt(TEXT, length=100_000_000), size=200_000_000), "the header is not JSON: a zero at byte 65"),
    ("a payload that is a hole", header(TEXT, size=1 << 40), "end at"),
    ("bytes behind the tensors", header(TEXT, WEIGHTS + b"more"), "end at"),
    ("a cut payload", header(TEXT, WEIGHTS[:10]), "tensor `w` ends at byte 97, but the file ends at 83"),
    ("nested 200,000 deep", header(DEEP), "the header is not JSON that can be read: it is nested too deeply"),
    ("a value nested 200,000 deep in metadata", header(b'{"__metadata__":' + DEEP + b"}"), "the header is not JSON that can be read: it is nested too deeply"),
    ("a million lists", header(b'{"w":[' + b"[]," * 8_000_000 + b"[]]}"), r"the header has up to \d+ values, more than the \d+ that JSON of \d+ bytes"),
    ("a million numbers", header(b'{"w":{"dtype":"F32","data_offsets":[0,24],"shape":[' + b"1000," * 9_000_000 + b"1]}}"), r"the header has up to \d+ values, more than the \d+ that JSON of \d+ bytes"),
    ("one name twice", header(TEXT[:-1] + b"," + TEXT[1:]), "the header names `w` twice"),
    ("one field twice", header(TEXT.replace(b'"F32"', b'"F32","dtype":"I32"')), "`dtype` twice"),
    ("one name twice, once escaped", header(TEXT[:-1] + b"," + TEXT[1:].replace(b'"w"', b'"\\u0077"')), "the header names `w` twice"),
    ("NaN", w(shape=[float("nan")]), "NaN"),
    ("infinity", w(shape=[float("inf")]), "Infinity"),
    ("a size of 2**63", w(shape=[2**63, 0], data_offsets=[0, 0]), r"tensor `w`: a tensor with a size of 2\*\*63 or more"),
    ("a product of 2**128", w(shape=[2**64, 2**64]), r"tensor `w`: a tensor with a size of 2\*\*63 or more"),
    ("a product of 2**64", w(shape=[2**32, 2**32], data_offsets=[0, 0]), r"tensor `w`.*2\*\*58 elements or more"),
    ("a size of 5,000 digits", header(TEXT.replace(b"[2, 3]", b"[" + b"9" * 5000 + b"]")), "the header is not JSON that can be read: it has a number of thousands of digits"),
    ("a size of 4,000 digits, squared", header(TEXT.replace(b"[2, 3]", b"[" + b"9" * 4000 + b"," + b"9" * 4000 + b"]")), r"tensor `w`: a tensor with a size of 2\*\*63 or more"),
    ("100,000 dimensions", w(shape=[1] * 100_000 + [6]), r"a tensor of \d+ dimensions, more than 64"),
    ("a size of true", w(shape=[True, 6]), r"tensor `w`: its shape \[True, 6\] is not a list of sizes"),
    ("a size of 2.0", w(shape=[2.0, 3]), r"tensor `w`: its shape \[2\.0, 3\] is not a list of sizes"),
    ("a size below zero", w(shape=[-2, -3]), r"tensor `w`: its shape \[-2, -3\] is not a list of sizes"),
    ("a shape that is text", w(shape="23"), "tensor `w`: its shape .* is not a list of sizes"),
    ("another shape", w(shape=[2, 4]), r"float32 \[2, 4\] needs 32"),
    ("a dtype of another size", w(dtype="F16"), r"float16 \[2, 3\] needs 12"),
    ("half a byte", w(dtype="F4", shape=[47], data_offsets=[0, 24]), "tensor `w`: .*odd number of 4-bit values"),
    ("a shape of lists", w(shape=[[2], [3]]), r"tensor `w`: its shape \[\[2\], \[3\]\] is not a list of sizes"),
    ("no shape", w(shape=None), "has no `shape`"),
    ("no dtype", w(dtype=None), "has no `dtype`"),
    ("a hole before the tensor", header(json.dumps({"w": {**honest()["w"], "data_offsets": [4, 28]}}).encode(), bytes(4) + WEIGHTS), "it leaves a hole of 4 bytes after the header"),
    ("a hole behind the tensor", table(WEIGHTS + bytes(8), x={"dtype": "F32", "shape": [1], "data_offsets": [28, 32]}), "a hole of 4 bytes after `w`"),
    ("an offset of 0.0", w(data_offsets=[0.0, 24]), "are not a begin and an end"),
    ("not an offsets", w(data_offsets=None), "has no `data_offsets`"),
    ("three offsets", w(data_offsets=[0, 12, 24]), r"tensor `w`: its data_offsets \[0, 12, 24\] are not a begin and an end"),
    ("offsets backwards", w(data_offsets=[24, 0]), r"tensor `w`: its data_offsets \[24, 0\] are not a begin and an end"),
    ("offsets below zero", w(data_offsets=[-24, 0]), r"tensor `w`: its data_offsets \[-24, 0\] are not a begin and an end"),
    ("offsets of 2**70", w(data_offsets=[2**70, 2**70 + 24]), r"tensor `w` begins at byte \d+, not \d+: it leaves a hole of"),
    ("a dtype of nobody", w(dtype="F33"), "tensor `w`: unknown dtype `F33`"),
    ("a dtype that is a list", w(dtype=["F32"]), r"tensor `w`: unknown dtype `\['F32'\]`"),
    ("a tensor that is a number", table(x=3), "tensor `x`: its entry in the header is not an object"),
    ("two tensors of one range", table(x=honest()["w"]), "overlaps"),
    ("a tensor within another", table(x={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}), "overlaps"),
    ("metadata of numbers", table(__metadata__={"a": 1}), "__metadata__"),
    ("metadata that is a tensor", table(__metadata__=honest()["w"]), "__metadata__"),
    ("metadata that is text", table(__metadata__="x"), "__metadata__"),
    ("a name that talks to the terminal", table(**{"\x1b]0;owned\x07": 3}), r"\\x1b\]0;owned\\x07"),
    ("a name that turns the text around", table(**{"\u202ew": 3}), r"\\u202e"),
    ("a name of half a character", header(TEXT.replace(b'"w"', b'"\\ud800"')), r"the header has '\\ud800', half a character"),
    ("not UTF-8", header(b'{"\xff": 1}'), "the header is not UTF-8 at its byte 2"),
    ("UTF-16", header("{".encode("utf-16-le") + b"}"), "the header is not JSON: a zero at byte 1"),
    ("a comment in JSON", header(b"{/* */}"), "the header is not JSON: (?!a zero)"),
    ("a comma too many", header(TEXT[:-1] + b",}"), "the header is not JSON: (?!a zero)"),
    ("a header and a second one", header(TEXT + TEXT), "the header is not JSON: (?!a zero)"),
    ("no braces", header(b"[]      "), "unrecognised format"),
    ("offsets of pieces that are text", table(__metadata__={"DCP_SHARDING_INFO": "{"}), "its `DCP_SHARDING_INFO` is not JSON: (?!a zero)"),
    ("offsets of pieces below zero", table(__metadata__={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [-1, 0]}})}), r"tensor `w`: \[-1, 0\] is not an offset in its `DCP_SHARDING_INFO`"),
    ("offsets of pieces of 2**70", table(__metadata__={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2**70, 0]}})}), "not an offset in its `DCP_SHARDING_INFO`"),
    ("offsets of two pieces for one", table(__metadata__={"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [1, 0]}}'}), "its `DCP_SHARDING_INFO` names `w` twice"),
    ("offsets of pieces, eight million lists", table(__metadata__={"DCP_SHARDING_INFO": '{"w":[' + "[]," * 8_000_000 + "[]]}"}), r"the header has up to \d+ values, more than the \d+ that JSON of \d+ bytes"),
    *(
        (f"offsets of pieces, {info}", table(__metadata__={"DCP_SHARDING_INFO": info}), "DCP_SHARDING_INFO")
        for info in ("[]", "{}", '{"w": 1}', '{"w": {}}', '{"w": {"saved_offsets": 3}}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [0.0, 0]}}')
    ),
    ("offsets of pieces nested", table(__metadata__={"DCP_SHARDING_INFO": "[" * 100_000}), "its `DCP_SHARDING_INFO` is not JSON that can be read: it is nested too deeply"),
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
    ("half a character", to("a\ud800.safetensors"), r"'a\\ud800.safetensors', which is not a valid file name"),
    ("a path of 5,000 letters", to("a" * 5000), "file name too long|is not there, but the index names it"),
    ("the directory", to("."), "a directory, not a regular file"),
    ("a directory", to("sub", lambda p: (p / "sub").mkdir()), "a directory, not a regular file"),
    ("a pipe", to("pipe", lambda p: os.mkfifo(p / "pipe")), "pipe"),
    ("a device", to("zero", lambda p: (p / "zero").symlink_to("/dev/zero")), LINK),
    ("a link out", to("link", lambda p: (p / "link").symlink_to("../outside.safetensors")), LINK),
    ("a link to a link out", to("one", lambda p: ((p / "one").symlink_to("two"), (p / "two").symlink_to("/etc/passwd"))), LINK),
    ("a link to itself", to("loop", lambda p: (p / "loop").symlink_to("loop")), "cannot read: too many levels of symbolic links"),
    ("a directory that is a link out", to("up/outside.safetensors", lambda p: (p / "up").symlink_to("..")), LINK),
    ("a file that is not there", to("b.safetensors"), "not there"),
    ("a file that is a pickle", to("p.safetensors", lambda p: (p / "p.safetensors").write_bytes(saved())), r"a header of \d+ bytes ends at \d+, but the file ends at \d+"),
    ("a name that talks to the terminal", to("\x1b]0;owned\x07"), r"\\x1b"),
    ("a number for a file", to(3), "weight_map"),  # type: ignore[arg-type]
    ("a list for a file", to(["a.safetensors"]), "weight_map"),  # type: ignore[arg-type]
    ("a list for the map", index([]), "weight_map"),
    ("a tensor that the file has not", index({"w": "a.safetensors", "x": "a.safetensors"}), r"says that tensor `x` is in `a\.safetensors`, which does not have it"),
    ("one name twice", index(None, text=b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'), "names `w` twice"),
    ("the map twice", index(None, text=b'{"weight_map": {}, "weight_map": {"w": "a.safetensors"}}'), "names `weight_map` twice"),
    ("nested 200,000 deep", index(None, text=b'{"weight_map":' + DEEP + b"}"), "nested too deeply"),
    ("a list", index(None, text=b"[1]"), "weight_map"),
    ("no map", index(None, text=b'{"metadata": {}}'), "has no `weight_map`"),
    ("not JSON", index(None, text=b"\x80\x02."), "is not UTF-8 at its byte 0"),
    ("empty", index(None, text=b""), "is not JSON: (?!a zero)"),
):  # fmt: skip
    lie(f"index: {name}", make, pattern, code=(READ, 4))


def _hollow(size: int, folder: Path) -> Path:
    path = to("a.safetensors")(folder)
    with (path / "model.safetensors.index.json").open("r+b") as stream:
        stream.truncate(size)
    return path


lie("index: a tebibyte of zeros", partial(_hollow, 1 << 40), "bytes of JSON")
lie("index: half a gibibyte of zeros", partial(_hollow, 1 << 29), "is not JSON: a zero at byte 54")
