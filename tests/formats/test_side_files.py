"""Files that scripts write beside a checkpoint: what NumPy, json and yaml read of them is what the catalogue has, and
what is written is read by them again."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints import bits

import ckpttool
from ckpttool.catalogue.protocols import Format, SinkOptions, Source
from ckpttool.errors import CkptError, ReadError
from ckpttool.formats import FORMATS, by_suffix, options
from ckpttool.formats.detect import detect
from ckpttool.layout import select
from ckpttool.storage.stores import locate
from ckpttool.transfer import execute, plan

ROWS = {row.name: row for row in FORMATS if row.component_only}
TABLE = np.arange(5000, dtype=np.float32).reshape(50, 100)
ARRAYS: dict[str, Any] = {
    "a": TABLE,
    "fortran": np.asfortranarray(TABLE),
    "big": TABLE.astype(">f8"),
    "none": np.zeros((3, 0), np.int64),
    "scalar": np.array(True),
    "half": np.ones(3, np.float16),
    "keys/µ": np.arange(4, dtype=np.uint32),
}


def opened(path: Path, row: Format | None = None) -> Source:
    found = detect(locate(str(path)))
    assert row is None or found is row
    return found.open(locate(str(path)))


def written_again(path: Path, target: Path) -> None:
    """The file in its own format again, by the writer of its row."""
    row = detect(locate(str(path)))
    with closing(row.open(locate(str(path)))) as source:
        planned = select.start(source.catalogue)
        assert row.create is not None and not row.losses(planned, str(target))
        sink = row.create(locate(str(target)), planned, SinkOptions(one_file=True))
        total = sum(tensor.nbytes for tensor in sink.catalogue.tensors)
        done = execute.transfer(plan.plan(sink.catalogue), source, sink.catalogue, total=total)
        sink.finish(done.crcs)


def same(left: Any, right: Any) -> bool:
    return bool(
        left.dtype == right.dtype.newbyteorder("=") and left.shape == right.shape and np.array_equal(left, right)
    )


# NumPy ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_arrays(save: Callable[..., None], tmp_path: Path) -> None:
    path, again = tmp_path / "state", tmp_path / "again.npz"
    with path.open("wb") as file:
        save(file, **ARRAYS)
    assert detect(locate(str(path))) is ROWS["npz"]
    with ckpttool.open(path) as checkpoint:
        assert [tensor.path for tensor in checkpoint.catalogue.tensors] == [(name,) for name in ARRAYS]
        assert all(same(checkpoint[name].numpy(), array) for name, array in ARRAYS.items())
    ckpttool.convert(path, tmp_path / "out.pt", check=True)
    back = torch.load(tmp_path / "out.pt")
    assert all(same(back[name].numpy(), array) for name, array in ARRAYS.items())
    written_again(path, again)
    assert zipfile.ZipFile(again).testzip() is None
    with np.load(again) as loaded:
        assert loaded.files == [*ARRAYS] and all(same(loaded[name], array) for name, array in ARRAYS.items())
    assert ckpttool.verify(again).exit_code == 0


def test_a_flipped_bit_of_an_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    np.savez(path, a=TABLE, b=np.ones(9))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CkptError, match="CRC"):
        ckpttool.convert(path, tmp_path / "out.pt")


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, tmp_path: Path) -> None:
    path, again = tmp_path / "state", tmp_path / "again"
    with path.open("wb") as file:
        np.save(file, ARRAYS[name])
    assert detect(locate(str(path))) is ROWS["npy"]
    ckpttool.convert(path, tmp_path / "out.pt", check=True)
    assert same(torch.load(tmp_path / "out.pt").numpy(), ARRAYS[name])
    written_again(path, again)
    assert same(np.load(again), ARRAYS[name])


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.array([{}, 1], dtype=object), "objects"),
        (np.array(["ab"]), "<U2"),
        (np.zeros(2, [("a", "f4")]), "no tensor has"),
        (np.zeros(2, "M8[s]"), "M8"),
    ],
)
def test_arrays_that_no_tensor_is_are_named(array: Any, why: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", good=TABLE, odd=array)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ReadError, match=why) as caught:
            ckpttool.open(tmp_path / name)
        assert name in str(caught.value) and ("odd" in str(caught.value) or name == "a.npy")


# Documents ------------------------------------------------------------------------------------------------------------

STATE: dict[str, Any] = {
    "step": 4000,
    "best": float("inf"),
    "lr": 1e-05,
    "name": "run 7: é",
    "on": True,
    "none": None,
    "rng": list(range(600)),
    "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}],
    "nested": {"a": {"b": {}}, "empty": []},
}


@pytest.mark.parametrize("name", ["json", "yaml"])
def test_documents(name: str, tmp_path: Path) -> None:
    path, again = tmp_path / "state", tmp_path / "again"
    path.write_text(json.dumps(STATE) if name == "json" else yaml.safe_dump(STATE, sort_keys=False))
    load = json.loads if name == "json" else yaml.safe_load
    assert detect(locate(str(path))) is ROWS[name]
    with ckpttool.open(path) as checkpoint:
        values = {entry.name: entry.value for entry in checkpoint.catalogue.objects}
    assert values["step"] == 4000 and values["param_groups.1.lr"] == 0.2 and values["rng"] == STATE["rng"]
    ckpttool.convert(path, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt") == load(path.read_text()) == STATE
    written_again(path, again)
    assert load(again.read_text()) == STATE and list(load(again.read_text())) == list(STATE)


@pytest.mark.parametrize("text", ["4000\n", "0.25", "-3"])
def test_a_text_that_is_one_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "step_file.txt").write_text(text)
    source = opened(tmp_path / "step_file.txt", ROWS["json"])
    assert [entry.value for entry in source.catalogue.objects] == [json.loads(text)]
    ckpttool.convert(tmp_path / "step_file.txt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt") == json.loads(text)
    assert ckpttool.inspect(tmp_path / "step_file.txt") and ckpttool.verify(tmp_path / "step_file.txt").exit_code == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"architectures": ["Llama"], "hidden_size": 8}',
        '{"metadata": {}, "weight_map": {"a": "b"}}',
        "model_type: llama\n",
        "step_4000\n",
        "Trained for 3 epochs: it went well.\nThen it stopped.\n",
        "loss: 0.5\nloss: 0.4\n",
        "import torch\nx = {1: 2}\n",
        "# Title\n\n- one\n- two\n",
        "a line: with words\n",
        '{"a": 1, "a": 2}',
        '{"error": "not found"}',
        "note: wait\n",
        "",
    ],
)
def test_prose_logs_and_configurations_are_no_documents(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert not any(row.recognise(locate(str(tmp_path / "file"))) for row in FORMATS)
    with pytest.raises(ReadError):
        ckpttool.inspect(tmp_path / "file")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases"),
        (MERGES, "aliases"),
        ("a: &a [*a]", "holds itself"),
        ("[" * 2000, "nested|not YAML"),
        ("a: " + "1:" * 100_000 + "1", "number"),
        ("a: !!python/object/apply:os.system [id]", "tag"),
        ("a: !mine 1", "tag"),
        ("a: 1\na: 2", "twice"),
        ("a: !!int ''", "not YAML"),
        ("x" * (1 << 20 | 1), "bytes"),
    ],
)
def test_hostile_yaml_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert not ROWS["yaml"].recognise(locate(str(tmp_path / "file.yaml")))
    with pytest.raises(CkptError, match=why):
        ROWS["yaml"].open(locate(str(tmp_path / "file.yaml")))


# Pickles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_written_again(protocol: int, tmp_path: Path) -> None:
    path, again = tmp_path / "state", tmp_path / "again"
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "bf": torch.ones(3, dtype=torch.bfloat16)}
    tensors |= {"empty": torch.empty(0, 2), "bools": torch.tensor([True, False])}
    state = {"arrays": ARRAYS, "tied": ARRAYS["a"], "tensors": tensors, "rng": (1, (2, 3), None), "set": {1, 2}}
    state |= {"ordered": OrderedDict(b=1, a=2), "args": argparse.Namespace(w=TABLE[:3], x=1), "b": b"x" * 5000}
    path.write_bytes(pickle.dumps(state, protocol=protocol))
    written_again(path, again)
    loaded = pickle.loads(again.read_bytes())
    assert list(loaded) == list(state) and loaded["tied"] is loaded["arrays"]["a"]
    for name, array in ARRAYS.items():
        assert type(loaded["arrays"][name]) is np.ndarray and same(loaded["arrays"][name], array)
    for name, tensor in tensors.items():
        back = loaded["tensors"][name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back).tobytes() == bits(tensor).tobytes()
    assert same(loaded["args"].w, TABLE[:3]) and loaded["args"].x == 1
    assert all(loaded[key] == state[key] for key in ("rng", "set", "ordered", "b"))
    assert ckpttool.diff(path, again).exit_code == 0


# The table ------------------------------------------------------------------------------------------------------------


def test_side_files_are_no_targets(tmp_path: Path) -> None:
    for row in ROWS.values():
        assert f"--to {row.target}`" not in options(FORMATS)
        assert by_suffix(f"x.{row.name}") is None
        with pytest.raises(CkptError, match=f"there is no format `{row.target}`"):
            ckpttool.convert(tmp_path / "x", tmp_path / "y", to=row.target)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.create], ids=lambda row: row.name)
def test_losses_name_what_a_format_cannot_store(row: Format, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.bfloat16), "odd": {"x": {1, 2j}}, 3: (1, 2)}, tmp_path / "a.pt")
    planned = select.start(opened(tmp_path / "a.pt").catalogue)
    lost = {loss.name for loss in row.losses(planned, "x")}
    assert lost == (set() if row.name == "pickle" else {"w", "odd.x", "3"})


@pytest.mark.parametrize("name", ["json", "yaml"])
@pytest.mark.parametrize("levels", [34, 3])
def test_documents_do_not_repeat_what_is_shared_without_end(name: str, levels: int, tmp_path: Path) -> None:
    value: Any = [1.5]
    for _ in range(levels):
        value = [value, value]
    torch.save({"shared": value}, tmp_path / "a.pt")
    planned = select.start(opened(tmp_path / "a.pt").catalogue)
    lost = [loss.name for loss in ROWS[name].losses(planned, "x")]
    assert lost == (["shared"] if levels > 20 else [])
