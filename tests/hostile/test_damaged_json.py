"""JSON beside the tensors, at random and honest but for one value: a clear error or none, and never a bug.

What a command may say of them: 3 and 4 for a file that cannot be read or is damaged, 2 for a file that the user named.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import damage, remnants
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.operations.verify import verify
from ckpttool.storage.crc import crc32

_WORDS = ["path", "file", "name", "value", "kind", "dtype", "shape", "$tuple", "$dict", "$call", "$int", "$float", "w"]
_WORDS += ["files", "sizes", "tensors", "sha256", "weight_map", "metadata", "..", "model", "\ud800", "0" * 64, "1e999"]
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308]),
    st.sampled_from(_WORDS),
)
JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*at, key))


def _replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return value


def spoiled(honest: Any) -> st.SearchStrategy[Any]:
    """Random JSON, and the honest JSON with a value anywhere in it replaced by such."""
    places = sorted(_places(honest), key=len)
    return st.tuples(st.sampled_from(places), JSON).map(lambda pair: _replaced(honest, *pair))


def _state(folder: Path) -> Path:
    """A training state with what `ckpttool.json` has a spelling for."""
    step = torch.tensor(3.0)
    raw = {
        "z": torch.ones(2, dtype=torch.complex128),
        "betas": (0.9, float("nan")),
        7: {1, 2},
        "shape": torch.Size([2]),
    }
    raw["pair"] = (torch.ones(2), 1)
    saved = {"model": {"w": torch.ones(3, 2), "v": step}, "optim": {"state": {0: {"step": step}}}, "extra": raw}
    torch.save(saved, folder / "state.pt")
    ckpttool.convert(folder / "state.pt", folder / "ckpt", to="safetensors")
    return folder / "ckpt"


def _checkpoint(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(CHECKPOINTS / name / "ckpt", folder / "ckpt"))


def _with_manifest(folder: Path) -> Path:
    path = damage.save_dcp(folder / "ckpt", {"model": {"w": torch.ones(3, 2)}, "step": 3})
    verify(path, write_manifest=path / "integrity.json")
    return path


# The file whose JSON is spoiled, and what makes the checkpoint that it lies in.
BESIDE: dict[str, Callable[[Path], Path]] = {
    "ckpttool.json": _state,
    "model.safetensors.index.json": _checkpoint("safetensors/indexed"),
    "integrity.json": _with_manifest,
    "config.json": _checkpoint("hf/llama"),
    "fsdp_config.json": _checkpoint("rank/verl_fsdp1_w1"),
    "checkpoint-4/trainer_state.json": _checkpoint("run/trainer"),
    "checkpoint-4/config.json": _checkpoint("run/trainer"),
    "step3/.metadata.json": _checkpoint("run/olmo_core_w2"),
    "step3/config.json": _checkpoint("run/olmo_core_w2"),
}

_QUICK = settings(max_examples=8, derandomize=True)


# What no operation reads strictly: a config that says nothing is left aside.
_LENIENT = ("config.json", "trainer_state.json", ".metadata.json")


# `export` asks transformers for the model of each config, in a process of its own.
_SLOW = ("config.json", "checkpoint-4/config.json", "checkpoint-4/trainer_state.json")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in _SLOW else []) for n in BESIDE])
def test_beside_the_tensors(name: str, tmp_path: Path) -> None:
    path = BESIDE[name](tmp_path)
    honest = json.loads((path / name).read_text())
    refused = 0

    @_QUICK
    @given(spoiled(honest))
    def check(value: Any) -> None:
        nonlocal refused
        (path / name).write_text(json.dumps(value))
        for words in (["inspect", "--json"], ["verify"], ["convert", "-n", "--to", "dcp"], ["export", "-n"]):
            wanted = (0, 1, 3, 4, 5) if words[0] != "export" else (0, 2, 3, 4, 5)
            done = run(*words, str(path), *([str(tmp_path / "out")] if "-n" in words else []))
            assert done.exit_code in wanted, (words, done.output, done.exception)
            refused += done.exit_code == 4

    check()
    assert refused or name.endswith(_LENIENT)


_SHAPES = [["w", [3, 2]], ["v", [2]]]
_KEY_MAP = {"name": "mine", "needs": ["w"], "never": ["x"], "rules": [{"from": "w", "to": ["a", "b"], "split": 0}]}
_KEY_MAP["rules"] += [{"from": "v.{n}", "to": "m.{n}.v", "stack": True}, {"from": "u", "drop": True}]  # type: ignore[operator]
_MANIFEST = {"algorithm": "sha256", "files": {".metadata": "0" * 64}, "sizes": {".metadata": 3}}
_MANIFEST |= {"tensors": [{"name": "model.w", "dtype": "float32", "shape": [3, 2], "sha256": "0" * 64}]}  # type: ignore[dict-item]
# What a user names on the command line: the JSON of an honest one, and the words before the checkpoint.
NAMED: dict[str, tuple[Any, list[str]]] = {
    "shapes": (_SHAPES, ["inspect", "--shapes"]),
    "key map": (_KEY_MAP, ["export", "-n", "--no-strict", "--map"]),
    "manifest": (_MANIFEST, ["verify", "--manifest"]),
}


def _unsummed(file: Path) -> dict[str, Any]:
    """The JSON of a file without the checksum of itself, which whoever changes it leaves out."""
    return {key: value for key, value in json.loads(file.read_text()).items() if key != "crc32"}


@pytest.mark.parametrize("value", [{"$tensor": [["w"]]}, {"$storage": ["model", {"w": 1}]}, {"$tensor": "w"}])
def test_a_list_in_place_of_a_key(value: Any, tmp_path: Path) -> None:
    file = (path := _state(tmp_path)) / "ckpttool.json"
    state = _unsummed(file)
    assert any("$tensor" in json.dumps(entry) for entry in state["entries"]), "no object refers to a tensor"
    file.write_text(json.dumps(state | {"entries": [*state["entries"], {"path": ["x"], "value": value}]}))
    done = run("inspect", str(path))
    assert (done.exit_code, "a malformed `$" in done.output) == (4, True), done.output


def test_a_number_that_python_reads_as_infinity(tmp_path: Path) -> None:
    file = (path := _state(tmp_path)) / "ckpttool.json"
    state = _unsummed(file)
    entries = [*state["entries"], {"path": ["x"], "value": 12345}]
    file.write_text(json.dumps(state | {"entries": entries}).replace("12345", "1e999"))
    done = run("inspect", str(path))
    assert (done.exit_code, "`x`: a number that is too large" in done.output) == (4, True), done.output


@pytest.mark.parametrize("what", NAMED)
def test_named_by_the_user(what: str, tmp_path: Path) -> None:
    honest, words = NAMED[what]
    path = damage.save_dcp(tmp_path / "ckpt", {"model": {"w": torch.ones(3, 2)}, "step": 3})
    file = tmp_path / "named.json"
    refused = 0

    @_QUICK
    @given(spoiled(honest))
    def check(value: Any) -> None:
        nonlocal refused
        file.write_text(json.dumps(value))
        done = run(*words, str(file), str(path), *([str(tmp_path / "out")] if "-n" in words else []))
        assert done.exit_code in (0, 1, 2, 3, 4, 5), (done.output, done.exception)
        refused += done.exit_code in (2, 4)

    check()
    assert refused


def test_the_journal_of_a_killed_run(tmp_path: Path) -> None:
    """Its lines have a checksum, so they must lie with one that fits."""
    path = damage.save_dcp(tmp_path / "ckpt", {"model": {"w": torch.ones(300, 200)}, "step": 3})
    honest = [{"host": "h", "boot": "b", "pid": 1}, {"plan": "9f"}, [0, 0, 70000, 1, 0, 0, 0, [[0, 0, 0, 70000, 2]]]]

    @_QUICK
    @given(spoiled(honest))
    def check(value: Any) -> None:
        texts = [json.dumps(line).encode() for line in (value if isinstance(value, list) else [value])]
        shutil.rmtree(tmp_path / ".out.partial-0123456789ab", ignore_errors=True)
        place = remnants.plant(tmp_path)
        own = [remnants.line(remnants.owner(place))] * random.randrange(2)
        journal = place / "journal"
        journal.write_bytes(b"".join([*own, *(b"%08x %s\n" % (crc32(text), text) for text in texts)]))
        done = run("convert", "--to", "dcp", "--resume", "--overwrite", str(path), str(tmp_path / "out"))
        assert done.exit_code == 0, (done.output, done.exception)

    check()
