"""The checksums that safetensors files of ckpttool carry: a flipped bit is an error, wherever it lies."""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import ckpttool
from ckpttool.errors import CkptError, CorruptError
from tests.support.damage import flip

KEY = "ckpttool.crc32"
EMBED = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
STATE = {
    "embed.weight": EMBED,
    "norm.weight": torch.arange(7, dtype=torch.bfloat16),
    "count": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "nothing": torch.zeros(0),
    "lm_head.weight": EMBED,
}
STORED = STATE.keys() - {"lm_head.weight"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    contents: dict[str, Any] = json.loads(data[8 : 8 + size])
    return contents


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a header says, and nothing else."""
    data, contents = path.read_bytes(), header(path)
    change(contents)
    text = json.dumps(contents).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + struct.unpack_from("<Q", data)[0] :])


def is_damaged(path: Path) -> bool:
    return any(finding.gravity == "damage" for finding in ckpttool.verify(path).findings)


def assert_state(actual: dict[str, Any], names: set[str] | Any = STATE) -> None:
    assert actual.keys() == set(names)
    assert all(torch.equal(actual[name], STATE[name]) and actual[name].dtype == STATE[name].dtype for name in names)


def test_key_has_the_crc_of_every_tensor(source: Path, tmp_path: Path) -> None:
    """By zlib, in the order of the bytes; and the library reads the file as one without the key."""
    path = tmp_path / "a.safetensors"
    ckpttool.convert(source, path)
    assert_state(safetensors.torch.load_file(path), STORED)
    contents, data = header(path), path.read_bytes()
    start = len(data) - sum(STATE[name].nbytes for name in STORED)
    metadata = contents.pop("__metadata__")
    version, _, sums = metadata[KEY].partition(":")
    order = sorted(contents, key=lambda name: (*contents[name]["data_offsets"], name))
    bytes_of = [data[start + begin : start + end] for begin, end in (contents[n]["data_offsets"] for n in order)]
    assert version == "1"
    crcs = struct.unpack(f">{1 + len(order)}I", base64.b64decode(sums))
    assert crcs[1:] == tuple(map(zlib.crc32, bytes_of))
    assert len(metadata[KEY]) < 6 * len(order) + 12


def test_cast_and_resumed_tensors_have_those_of_what_was_written(source: Path, tmp_path: Path) -> None:
    ckpttool.convert(source, tmp_path / "a.safetensors", dtype="float16", check=True, resume=True)
    result = ckpttool.verify(tmp_path / "a.safetensors")
    assert result.findings == []
    assert (result.checked_bytes, result.unchecked_bytes) == (40 * 3 * 2 + 7 * 2 + 8, 0)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["embed.weight"], EMBED.half())


def test_every_way_to_read_checks_them(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    ckpttool.convert(source, path)
    assert ckpttool.convert(path, tmp_path / "whole.pt").checked_bytes == sum(STATE[n].nbytes for n in STORED)
    begin = path.read_bytes().index(EMBED.numpy().tobytes())
    flip(path, begin + 17)
    message = r"tensor `embed.weight`.*CRC"
    for to in ("x.pt", "x.safetensors", "x"):
        with pytest.raises(CorruptError, match=message) as caught:
            ckpttool.convert(path, tmp_path / to, to="dcp" if to == "x" else None)
        assert f"another tool has rewritten them and kept `{KEY}`" in str(caught.value.hint)
        assert not (tmp_path / to).exists()
    with pytest.raises(CorruptError, match=message):
        ckpttool.reshard(path, tmp_path / "x", to_world=3)
    with ckpttool.open(path) as opened:
        assert torch.equal(opened["norm.weight"].torch(), STATE["norm.weight"])
        with pytest.raises(CorruptError, match=message):
            opened["embed.weight"].torch()
    (finding,) = ckpttool.verify(path).findings
    assert (finding.kind, finding.tensor) == ("checksum", "embed.weight")
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(40, 3)})
    with pytest.raises(CorruptError, match=message):
        ckpttool.load(path, model, strict=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [("norm.weight", "nosm.weight"), ('"lm_head.weight":"e', '"lm_heae.weight":"e'), ("[40,3]", "[ 3,40]")],
)
def test_header_that_has_changed(source: Path, tmp_path: Path, old: str, new: str) -> None:
    """A name, a tie and a shape that fits as well: the library reads all of them."""
    path = tmp_path / "a.safetensors"
    ckpttool.convert(source, path)
    assert path.read_bytes().count(old.encode()) == 1
    data = path.read_bytes().replace(old.encode(), new.encode())
    path.write_bytes(struct.pack("<Q", struct.unpack_from("<Q", data)[0] + len(new) - len(old)) + data[8:])
    safetensors.torch.load_file(path)
    with pytest.raises(CorruptError, match="the header has CRC"):
        ckpttool.convert(path, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="the header has CRC"):
        ckpttool.open(path)
    assert is_damaged(path)


def test_tie_in_the_index_that_has_changed(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    ckpttool.convert(source, folder, to="safetensors", max_shard_size=300)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for old, new in (('"lm_head.weight": "embed', '"lm_heae.weight": "embed'), ('"embed.weight",', '"embee.weight",')):
        assert text.count(old) == 1
        index.write_text(text.replace(old, new))
        for read in (ckpttool.open, lambda path: ckpttool.convert(path, tmp_path / "x.pt")):
            with pytest.raises(CorruptError, match="a name in it, or a tie, has changed") as caught:
                read(folder)
            assert KEY in str(caught.value.hint)
        assert is_damaged(folder)
    # Another spelling says the same.
    index.write_text(json.dumps(json.loads(text), sort_keys=True))
    ckpttool.convert(folder, tmp_path / "y.pt")
    assert_state(torch.load(tmp_path / "y.pt"))


def test_file_of_another_save(source: Path, tmp_path: Path) -> None:
    """An interrupted copy leaves files of two steps, each of which is whole."""
    later = EMBED + 1
    torch.save(STATE | {"embed.weight": later, "lm_head.weight": later}, tmp_path / "later.pt")
    for name in ("state", "later"):
        ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / name, to="safetensors", max_shard_size=300)
    mixed = sorted((tmp_path / "later").glob("*.safetensors"))[0]
    shutil.copy(mixed, tmp_path / "state")
    with pytest.raises(CorruptError, match=rf"`{mixed.name}` is from another save than the index"):
        ckpttool.convert(tmp_path / "state", tmp_path / "x.pt")


def test_state_file_that_has_changed(tmp_path: Path) -> None:
    torch.save({"model": STATE, "optim": {"state": {0: {"exp_avg": torch.ones(3)}}}, "lr": 0.5}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "a", to="safetensors")
    path = tmp_path / "a" / "ckpttool.json"
    text = path.read_text()
    for old, new in (('["lr"], "value": 0.5', '["lr"], "value": 0.1'), ('"lm_head.weight"]', '"lm_heae.weight"]')):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        with pytest.raises(CorruptError, match="something in it has changed") as caught:
            ckpttool.convert(tmp_path / "a", tmp_path / "b.pt")
        assert "remove the line `crc32`" in str(caught.value.hint)
    path.write_text(
        "".join(line for line in text.splitlines(True) if not line.startswith(('"crc32"', '"files"')))[:-6] + "]}"
    )
    ckpttool.convert(tmp_path / "a", tmp_path / "b.pt")
    assert_state(torch.load(tmp_path / "b.pt")["model"])


def test_state_file_whose_schema_has_changed(tmp_path: Path) -> None:
    """Without it the tensors would be a checkpoint of their own, and all else would be lost in silence."""
    torch.save({"model": STATE, "step": 3}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "a", to="safetensors")
    path = tmp_path / "a" / "ckpttool.json"
    data = path.read_bytes()
    for at in range(data.index(b"containers")):
        for bit in (0, 5):
            flip(path, at, bit)
            for use in (
                lambda: ckpttool.convert(tmp_path / "a", tmp_path / "b.pt"),
                lambda: ckpttool.open(path.parent),
            ):
                with pytest.raises(CkptError, match=r"ckpttool\.json"):
                    use()
            assert not (tmp_path / "b.pt").exists()
            path.write_bytes(data)
    for left in (b"", bytes(len(data))):  # as a machine that lost its power leaves a file
        path.write_bytes(left)
        with pytest.raises(CkptError, match=r"ckpttool\.json"):
            ckpttool.convert(tmp_path / "a", tmp_path / "b.pt")


def test_key_that_another_tool_has_kept(source: Path, tmp_path: Path) -> None:
    """The same tensors, written again with the old metadata, have the same checksums. Other values do not, and fewer
    tensors are nobody's damage."""
    path, again = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ckpttool.convert(source, path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, again, metadata)
    assert ckpttool.verify(again).unchecked_bytes == 0
    safetensors.torch.save_file({**tensors, "embed.weight": EMBED + 1}, again, metadata)
    assert is_damaged(again)
    safetensors.torch.save_file({"embed.weight": EMBED + 1}, again, metadata)
    (warning,) = ckpttool.inspect(again).warnings
    assert warning.kind == "unknown-checksums"
    result = ckpttool.convert(again, tmp_path / "c.safetensors")
    assert (result.checked_bytes, result.unchecked_bytes) == (0, EMBED.nbytes)
    assert any("nothing is checked" in note for note in result.notes)
    assert ckpttool.verify(tmp_path / "c.safetensors").unchecked_bytes == 0
    # As the documentation drops it.
    with_header(again, lambda contents: contents["__metadata__"].pop(KEY))
    assert ckpttool.inspect(again).warnings == []


@pytest.mark.parametrize("text", ["", "1:", "1:AAAA", "1:!", "x", "\ud83d", "1:" + "A" * 32 + "="])
def test_key_that_is_malformed(source: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.safetensors"
    ckpttool.convert(source, path)
    with_header(path, lambda contents: contents["__metadata__"].update({KEY: text}))
    try:
        warnings = ckpttool.inspect(path).warnings
    except CkptError:
        return
    assert [warning.kind for warning in warnings] == ["unknown-checksums"]


def test_key_is_no_metadata_of_the_user(source: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": EMBED}, tmp_path / "a.safetensors", {"format": "pt", "author": "me"})
    ckpttool.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert ckpttool.inspect(tmp_path / "b.safetensors").facts["metadata"] == {"format": "pt", "author": "me"}
    result = ckpttool.convert(tmp_path / "b.safetensors", tmp_path / "dcp", to="dcp")
    assert not any(KEY in note for note in result.notes)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "c.safetensors")
    assert header(tmp_path / "c.safetensors")["__metadata__"].keys() == {"format", KEY}


def test_flipped_bits(source: Path, tmp_path: Path) -> None:
    """Bits anywhere in a file, in an index or in a state file: what comes out is right, or nothing does."""
    torch.save({"model": STATE, "lr": 0.5}, tmp_path / "whole.pt")
    for name, path, how in (
        ("file", source, {}),
        ("several", source, {"to": "safetensors", "max_shard_size": 300}),
        ("state", tmp_path / "whole.pt", {"to": "safetensors"}),
    ):
        target = tmp_path / (name if how else f"{name}.safetensors")
        ckpttool.convert(path, target, **how)
    rng = random.Random(1)
    places = [
        path for path in sorted(tmp_path.rglob("*")) if path.suffix in (".safetensors", ".json") and path.is_file()
    ]
    silent = []
    for _ in range(60):
        path = rng.choice(places)
        top = path if path.parent == tmp_path else path.parent
        data = path.read_bytes()
        at = rng.randrange(len(data))
        flip(path, at, rng.randrange(8))
        (tmp_path / "out.pt").unlink(missing_ok=True)
        try:
            ckpttool.convert(top, tmp_path / "out.pt")
            found = torch.load(tmp_path / "out.pt")
            if top.name == "state":
                assert found.pop("lr") == 0.5
            assert_state(found.get("model", found))
        except CkptError:
            pass
        except AssertionError:
            silent.append((path.name, at))
        path.write_bytes(data)
    assert silent == []
