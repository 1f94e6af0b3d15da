"""Bare pickles: what pickle.load makes of them is what the catalogue has; what is not a complete pickle is an error."""

from __future__ import annotations

import argparse
import collections
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import bits

import ckpttool
from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats import pickles
from ckpttool.formats.detect import detect
from ckpttool.storage.stores import locate

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
TABLE = np.arange(5000, dtype=np.float32).reshape(50, 100)
ARRAYS: dict[str, Any] = {
    "large": TABLE,
    "small": np.arange(3),
    "fortran": np.asfortranarray(TABLE),
    "big endian": TABLE.astype(">f4"),
    "no elements": np.zeros((0, 3)),
    "no dimensions": np.array(7, dtype=np.uint16),
    "booleans": np.array([True, False]),
    "complex": np.array([1 + 2j, 3]).astype(">c8"),
    "half": np.ones(4, np.float16),
    "frozen": np.frombuffer(b"abcd" * 2000, np.uint8),
    "strided": TABLE[::2, ::3],
}
TENSORS: dict[str, Any] = {
    "t": torch.arange(2000.0).view(20, 100).t(),
    "bf": torch.ones(2, dtype=torch.bfloat16),
    "part": torch.arange(100)[10:20],
    "empty": torch.empty(0, 4),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}
LAYER = torch.nn.Linear(3, 4)


def written(value: Any, folder: Path, protocol: int = 4) -> Path:
    path = folder / "state"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def catalogue(path: Path) -> Catalogue:
    return pickles.FORMAT.open(locate(str(path))).catalogue


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_are_tensors_and_values_are_values(protocol: int, tmp_path: Path) -> None:
    values = {"step": 7, "lr": 0.5, "name": "run", "none": None, "list": [1, (2, "x")], "b": b"x" * 9000, "few": b"y"}
    values |= {"rng": random.getstate(), "array": bytearray(b"z" * 9000), "set": {1, b"a" * 300}, (1, 2): "key"}
    path = written({"arrays": ARRAYS, **values}, tmp_path, protocol)
    assert detect(locate(str(path))) is pickles.FORMAT
    with ckpttool.open(path) as checkpoint:
        for name, expected in ARRAYS.items():
            array = checkpoint[f"arrays.{name}"].numpy()
            assert array.shape == expected.shape and array.dtype == expected.dtype.newbyteorder("=")
            assert np.array_equal(array, expected)
        objects = {entry.path: entry.value for entry in checkpoint.catalogue.objects}
    found = {key: objects[key,] for key in values if (key,) in objects}
    assert found == values
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in values.items()}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_and_modules_of_torch(protocol: int, tmp_path: Path) -> None:
    state = {**TENSORS, "parameter": torch.nn.Parameter(torch.ones(3)), "layer": LAYER, "dtype": torch.float32}
    path = written(state, tmp_path, protocol)
    expected = {**TENSORS, "parameter": torch.ones(3), "layer.weight": LAYER.weight, "layer.bias": LAYER.bias}
    with ckpttool.open(path) as checkpoint:
        assert {tensor.name for tensor in checkpoint.catalogue.tensors} == expected.keys()
        for name, tensor in expected.items():
            actual = checkpoint[name].torch()
            assert (actual.dtype, actual.shape) == (tensor.dtype, tensor.shape)
            assert bits(actual).tobytes() == bits(tensor.detach()).tobytes(), name


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_lie_where_the_file_has_their_bytes(protocol: int, tmp_path: Path) -> None:
    path = written({"a": TABLE, "again": TABLE, "small": np.arange(3), "t": torch.ones(2000)}, tmp_path, protocol)
    content = path.read_bytes()
    found = catalogue(path)
    assert [file.name for file in found.files] == ["state"]
    for name, expected in {"a": TABLE, "again": TABLE, "small": np.arange(3), "t": np.ones(2000, np.float32)}.items():
        [chunk] = found.tensors[name].chunks
        assert content[chunk.extent.offset :][: chunk.extent.nbytes] == expected.tobytes()
    assert found.tensors["a"].chunks[0].extent == found.tensors["again"].chunks[0].extent


def test_arrays_in_objects_are_embedded(tmp_path: Path) -> None:
    state = {
        "namespace": argparse.Namespace(steps=1, table=TABLE),
        "deque": collections.deque([TABLE[:2], 1]),
        "objects": np.array([{}, TABLE], dtype=object),
        "numpy": np.random.RandomState(0),
        "generator": np.random.default_rng(0),
    }
    names = {t.name for t in catalogue(written(state, tmp_path)).tensors if t.embedded}
    assert {"namespace.state.table", "deque.0", "objects.state.4.1", "generator.args.0.state.1.state.2"} <= names
    assert any(name.startswith("numpy.") for name in names)


def test_what_no_tensor_has_stays_an_object(tmp_path: Path) -> None:
    state = {"text": np.array(["ab", "c"]), "time": np.array(["2020"], "M8[s]"), "scalar": np.float64(0.5)}
    state["record"] = np.zeros(900, [("a", "f4"), ("b", "i8")])
    found = catalogue(written(state, tmp_path))
    assert not found.tensors and {entry.name for entry in found.objects} == state.keys()
    ckpttool.convert(tmp_path / "state", tmp_path / "out.pt")
    back = torch.load(tmp_path / "out.pt", weights_only=False)
    assert all(np.array_equal(back[name], value) for name, value in state.items())


def test_a_large_array_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written({"replay": np.zeros(1 << 24, np.uint8), "after": 1}, tmp_path)
    from ckpttool.storage import files

    read: list[int] = []
    plain = files.Pool.read
    monkeypatch.setattr(files.Pool, "read", lambda *args: read.append(args[-1]) or plain(*args))  # type: ignore[func-returns-value]
    found = catalogue(path)
    assert found.tensors["replay"].shape == (1 << 24,) and found.objects["after"].value == 1
    assert sum(read) < 1 << 20


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_begins_with_a_large_array_is_recognised(protocol: int, tmp_path: Path) -> None:
    state = {"replay": np.arange(1 << 17, dtype=np.float32), "after": np.ones(2)}
    path = written(state, tmp_path, protocol)
    ckpttool.convert(str(path), str(tmp_path / "out.pt"))
    back = torch.load(tmp_path / "out.pt")
    assert all(np.array_equal(back[name], value) for name, value in state.items())


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-300],
    "cut in the array": lambda data: data[:8000],
    "two": lambda data: data + pickle.dumps(2),
    "something behind": lambda data: data + b"x",
    "a persistent id": lambda data: pickle.dumps(("x",))[:-1] + b"Q.",
    "a shape that is larger": lambda data: data.replace(b"K2Kd\x86", b"K3Kd\x86"),
    "bytes as a key": lambda data: pickle.dumps({b"k" * 9000: 1}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_whole_pickle_is_an_error(kind: str, tmp_path: Path) -> None:
    data = pickle.dumps({"a": TABLE, "step": 1, "text": "x" * 300})
    changed = BROKEN[kind](data)
    assert changed != data
    path = tmp_path / "state.pkl"
    path.write_bytes(changed)
    with pytest.raises(CorruptError) as caught:
        pickles.FORMAT.open(locate(str(path)))
    assert "state.pkl" in str(caught.value)
    with pytest.raises(CkptError):
        ckpttool.inspect(path)


@pytest.mark.parametrize(
    "text", [b"I like this run.", b"Notes of run 7.\nNothing else.", b".", b"{}.x", b"", b"print(1).", b"\x80\x04"]
)
def test_prose_is_no_pickle(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(text)
    assert not pickles.FORMAT.recognise(locate(str(tmp_path / "notes")))


def test_pickles_are_no_target(tmp_path: Path) -> None:
    path = written({"step": 1, "w": TABLE}, tmp_path)
    with pytest.raises(CkptError, match="there is no format `pickle`"):
        ckpttool.convert(path, tmp_path / "out", to="pickle")
    with pytest.raises(CkptError, match="cannot infer the output format"):
        ckpttool.convert(path, tmp_path / "out.pkl")
