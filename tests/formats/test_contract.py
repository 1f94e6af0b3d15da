"""What every format must do: the same cases for each row of the table of formats.

A new format gets its tests by its row, a sample, and if it holds less than a whole training state, by what it refuses.
What is special to one is in its own file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import bits
from support.paths import CHECKPOINTS as SAMPLE_FOLDER
from support.upstream_samples import path_of

import ckpttool
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Tensor
from ckpttool.catalogue.protocols import Format, SinkOptions
from ckpttool.errors import CkptError, CorruptError, LossError, OverwriteError, ReadError, StorageError, UsageError
from ckpttool.formats import CHECKPOINTS, FORMATS
from ckpttool.formats.detect import detect
from ckpttool.storage.stores import locate

WRITABLE = [row for row in CHECKPOINTS if row.create]
every_format = pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
every_sink = pytest.mark.parametrize("row", WRITABLE, ids=lambda row: row.name)
# A checkpoint of each format that its own library wrote.
SAMPLES = {
    "torch": "torch/full", "dcp": "dcp/fsdp2_w4", "safetensors": "safetensors/single", "rankfiles": "rank/fsdp2_w2",
    "deepspeed": "deepspeed/zero3_w3/saved/global_step2",
}  # fmt: skip
TABLE = np.arange(6000.0).reshape(2, -1)


def _yaml(path: Path) -> None:
    path.write_text("step: 7\n" + "".join(f"group{n}: {{lr: 0.{n + 1}}}\n" for n in range(9)) + "last: [1, 2]\n")


def _archive(path: Path) -> None:
    torch.save({"model": {"table": torch.from_numpy(TABLE)}, "step": 7}, path.parent / "model.pt")
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent / "model.pt", "model.pt")
    (path.parent / "model.pt").unlink()


def _map(path: Path) -> None:
    described = {path.stem: {"dtype": "torch.float64", "shape": [*TABLE.shape], "is_nested": False}}
    (path.parent / "meta.json").write_text(json.dumps(described))
    TABLE.tofile(path)


# Those that lie beside one, as their own libraries write them.
BESIDE: dict[str, Callable[[Path], object]] = {
    "pickle": lambda path: path.write_bytes(pickle.dumps({"step": 7, "table": TABLE})),
    "memmap": _map,
    "npz": lambda path: np.savez(path.open("wb"), table=TABLE, step=np.array(7)),
    "npy": lambda path: np.save(path.open("wb"), TABLE),
    "json": lambda path: path.write_text(json.dumps({"step": 7, "groups": [{"lr": 0.1}]})),
    "yaml": _yaml,
    "archive": _archive,
}


def sample(row: Format, folder: Path) -> Path:
    """A checkpoint of a format, in its own folder below `folder` if it is written now."""
    if row.name in SAMPLES:
        path = SAMPLE_FOLDER / SAMPLES[row.name]
        return path if row.name == "deepspeed" else Path(path_of(SAMPLES[row.name]))
    path = folder / "sample" / ("state.memmap" if row.name == "memmap" else "state")
    path.parent.mkdir()
    BESIDE[row.name](path)
    return path


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
STATES: dict[str, Any] = {
    "plain": {
        "model": {"embed.weight": torch.arange(12.0).view(4, 3), "norm.bias": torch.tensor([1.0, -0.0])},
        "step": 7,
    },
    "dtypes": {
        "model": {
            str(dtype).removeprefix("torch."): torch.arange(6).to(dtype)
            for dtype in DTYPES
        },
        "step": 1,
    },
    "not numbers": {"model": {"w": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324])}, "step": 1},
    "nothing": {"model": {}},
    "values alone": {"epoch": 3, "best": 0.1, "name": "run 7", "on": True, "none": None, "list": [1, [2, "x"], {}]},
    "no dimensions": {"model": {"scale": torch.tensor(2.5), "count": torch.tensor(3)}, "step": 1},
    "no bytes": {
        "model": {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(2, 0, 5), "w": torch.ones(2)},
        "step": 1,
    },
    "unicode names": {
        "model": {"модель.層.weight": torch.ones(3), "émbed 🙂": torch.zeros(2, 2), "a b/c": torch.ones(1)}, "шаг": 1,
    },
    "strides": {"model": {"t": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(20.0)[3:9]}, "step": 1},
    "a model alone": {"embed.weight": torch.arange(6.0).view(2, 3), "norm.bias": torch.ones(2)},
    "lists": {"model": {"w": torch.ones(2)}, "history": [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]},
}  # fmt: skip
# The states that a format refuses instead of holding them; it holds their models.
REFUSED: dict[str, frozenset[str]] = {}


def refuses(row: Format, name: str = "plain") -> bool:
    return name in REFUSED.get(row.name, ())


def held(row: Format, name: str = "plain") -> Any:
    """A state that the format holds."""
    return STATES[name]["model"] if refuses(row, name) else STATES[name]


def only(row: Format) -> dict[str, Any]:
    """The options by which a whole training state becomes one that the format holds."""
    return {"only": ["model"]} if refuses(row) else {}


def tied() -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3)
    return {"model": {"embed.weight": weight, "head.weight": weight, "other": torch.ones(2)}, "step": 1}


def saved(state: Any, folder: Path) -> Path:
    """The state as torch writes it."""
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


def large(folder: Path) -> Path:
    """A state of 2 MiB in 16 tensors."""
    return saved({"model": {f"{i}.weight": torch.full((1 << 15,), float(i)) for i in range(16)}, "step": 1}, folder)


def content(path: Path) -> dict[str, str]:
    """A checksum of each file of a checkpoint."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def flat(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Leaves by their paths; empty containers are leaves."""
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    leaves: dict[tuple[Any, ...], Any] = {}
    for key, child in items:
        leaves |= flat(child, (*path, key))
    return leaves if leaves else {path: value}


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal bit by bit, with the same paths, shapes and dtypes."""
    left, right = flat(actual), flat(expected)
    assert left.keys() == right.keys()
    for path, value in right.items():
        if isinstance(value, torch.Tensor):
            assert (left[path].dtype, left[path].shape) == (value.dtype, value.shape), path
            assert bits(left[path]).tobytes() == bits(value).tobytes(), path
        else:
            assert left[path] == value and type(left[path]) is type(value), path


def back(path: Path, folder: Path) -> Any:
    """What torch reads of a checkpoint that was converted to a file of torch.save."""
    ckpttool.convert(path, folder / "back.pt", to="torch", check=True)
    return torch.load(folder / "back.pt", weights_only=True)


# Round trips ----------------------------------------------------------------------------------------------------------


@every_sink
@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_exactly(row: Format, name: str, tmp_path: Path) -> None:
    source, out = saved(STATES[name], tmp_path), tmp_path / "out"
    if refuses(row, name):
        with pytest.raises(LossError) as caught:
            ckpttool.convert(source, out, to=row.target)
        leaves = [".".join(map(str, path)) for path in flat(STATES[name])]
        assert any(leaf in f"{caught.value} {caught.value.facts}" for leaf in leaves)
        assert os.listdir(tmp_path) == ["source.pt"]
        return
    done = ckpttool.convert(source, out, to=row.target, check=True)
    assert done.format == row.name and done.checked_bytes == done.payload_bytes
    assert_equal(back(out, tmp_path), STATES[name])


@every_sink
def test_tied_tensors_stay_tied_and_are_stored_once(row: Format, tmp_path: Path) -> None:
    expected = tied()["model"] if refuses(row) else tied()
    source, out = saved(expected, tmp_path), tmp_path / "out"
    done = ckpttool.convert(source, out, to=row.target, check=True)
    assert done.payload_bytes == 6 * 4 + 2 * 4
    state = back(out, tmp_path)
    assert_equal(state, expected)
    model = state.get("model", state)
    assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr() != model["other"].data_ptr()


@every_sink
@pytest.mark.parametrize("world", [2, 3, 5])
def test_any_number_of_ranks_reads_as_one(row: Format, world: int, tmp_path: Path) -> None:
    source, out = saved(held(row), tmp_path), tmp_path / "out"
    if not row.chunked:
        with pytest.raises(UsageError, match="to_world"):
            ckpttool.convert(source, out, to=row.target, to_world=world)
        assert os.listdir(tmp_path) == ["source.pt"]
        return
    ckpttool.convert(source, out, to=row.target, to_world=world, check=True)
    assert_equal(back(out, tmp_path), held(row))


@every_sink
def test_the_same_source_makes_the_same_bytes(row: Format, tmp_path: Path) -> None:
    source = saved(held(row), tmp_path)
    for folder in ("a", "b"):
        ckpttool.convert(source, tmp_path / folder / "out", to=row.target)
    assert content(tmp_path / "a" / "out") == content(tmp_path / "b" / "out")


# Reading --------------------------------------------------------------------------------------------------------------


@every_format
def test_a_checkpoint_is_recognised_by_its_format(row: Format, tmp_path: Path) -> None:
    assert detect(locate(str(sample(row, tmp_path)))) is row


@every_sink
def test_what_is_written_is_recognised_and_whole(row: Format, tmp_path: Path) -> None:
    source, out = saved(held(row), tmp_path), tmp_path / "out"
    ckpttool.convert(source, out, to=row.target)
    assert detect(locate(str(out))) is row
    report = ckpttool.verify(out)
    assert report.whole and report.exit_code == 0


@every_format
def test_a_checkpoint_is_only_read(row: Format, tmp_path: Path) -> None:
    path = sample(row, tmp_path)
    before = content(path)
    with ckpttool.open(path) as checkpoint:
        assert len(checkpoint) > 0
    # A lone array has no name, which DCP needs.
    ckpttool.convert(path, tmp_path / "out", to="torch" if row.name in ("npy", "memmap") else "dcp")
    assert content(path) == before


@every_format
def test_a_file_that_was_cut_is_refused_by_name(row: Format, tmp_path: Path) -> None:
    """The largest file of the checkpoint, after half of its bytes: nothing is written, and the file is named."""
    source = sample(row, tmp_path)
    files = [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file())
    largest = max(files, key=lambda file: file.stat().st_size)
    for file in files:
        copy = tmp_path / "in" / (file.relative_to(source) if source.is_dir() else file.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        copy.write_bytes(data[: len(data) // 2] if file == largest else data)
    with pytest.raises((CorruptError, ReadError)) as caught:
        ckpttool.convert(tmp_path / "in" / ("" if source.is_dir() else source.name), tmp_path / "out", to="torch")
    assert largest.name in str(caught.value)
    assert not {*os.listdir(tmp_path)} - {"in", "sample"}


@every_format
def test_a_tensor_that_is_not_there_is_refused_by_name(row: Format, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.such\.weight"):
        ckpttool.show(sample(row, tmp_path), "no.such.weight")


# Writing --------------------------------------------------------------------------------------------------------------


@every_sink
def test_what_cannot_be_held_is_refused_by_name(row: Format, tmp_path: Path) -> None:
    """An object of no standard type comes back as it was, or is refused before anything is written."""
    source = saved({"model": {"w": torch.ones(2)}, "odd": {"thing": {1 + 2j, 3j}}}, tmp_path)
    try:
        ckpttool.convert(source, tmp_path / "out", to=row.target, check=True)
    except LossError as error:
        assert "odd.thing" in str(error) or "odd.thing" in str(error.facts)
        assert os.listdir(tmp_path) == ["source.pt"]
        return
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="torch")
    assert torch.load(tmp_path / "back.pt", weights_only=False)["odd"]["thing"] == {1 + 2j, 3j}


@every_sink
def test_a_destination_is_overwritten_only_when_asked(row: Format, tmp_path: Path) -> None:
    source, out = saved(held(row), tmp_path), tmp_path / "out"
    ckpttool.convert(source, out, to=row.target)
    before = content(out)
    other = {"w": torch.ones(5)} if refuses(row) else {"model": {"w": torch.ones(5)}, "step": 2}
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(OverwriteError, match="out"):
        ckpttool.convert(tmp_path / "other.pt", out, to=row.target)
    assert content(out) == before
    ckpttool.convert(tmp_path / "other.pt", out, to=row.target, overwrite=True)
    assert_equal(back(out, tmp_path), other)


@every_sink
def test_a_sink_is_never_laid_over_a_file(row: Format, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    assert row.create is not None
    planned = Catalogue(row.name)
    planned.add(Tensor(("w",), dtype("float32"), (), Chunks.placed([(((), ()), 0)])))
    with pytest.raises(CkptError):
        row.create(locate(str(tmp_path / "a")), planned, SinkOptions())
    assert (tmp_path / "a").read_bytes() == b"mine"


@every_sink
def test_a_plan_writes_nothing_and_says_what_would_be(row: Format, tmp_path: Path) -> None:
    source, out, root = path_of("torch/full"), tmp_path / "out", "" if refuses(row) else "model."
    options: dict[str, Any] = {
        "to": row.target, "rename": [f"{root}layers={root}h"], "dtype": ["float16"], "drop": ["rng"], **only(row),
    }  # fmt: skip
    plan = ckpttool.convert(source, out, dry_run=True, **options)
    assert os.listdir(tmp_path) == []
    done = ckpttool.convert(source, out, **options)
    assert plan.dry_run and not done.dry_run
    for name in (
        "files",
        "tensor_count",
        "object_count",
        "payload_bytes",
        "file_bytes",
        "renamed",
        "cast",
        "ties",
        "dropped",
        "notes",
    ):
        assert getattr(plan, name) == getattr(done, name), name
    sizes = {path.name: path.stat().st_size for path in out.rglob("*")} or {"out": out.stat().st_size}
    assert {Path(name).name: size for name, size in done.files}.items() <= sizes.items() or row.name == "torch"
    state = torch.load(source, weights_only=False)
    assert ("model.layers.0.gate", f"{root}h.0.gate") in done.renamed
    assert {name for name, *_ in done.cast} == {
        root + name.replace("layers.", "h.") for name, tensor in state["model"].items()
        if tensor.is_floating_point() and tensor.dtype != torch.float16
    }  # fmt: skip
    assert done.ties == [(f"{root}lm_head.weight", f"{root}embed.weight")]
    assert done.dropped and (only(row) or all(name.startswith("rng") for name in done.dropped))
    assert done.memory_bytes is None and plan.memory_bytes


@every_sink
@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError("no space")], ids=["cancelled", "failed"])
@pytest.mark.parametrize("source", ["dcp/fsdp2_w4", "torch/full"])
def test_nothing_is_left_when_it_stops_halfway(
    row: Format, tmp_path: Path, source: str, error: type[BaseException] | BaseException
) -> None:
    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises((KeyboardInterrupt, StorageError)):
        ckpttool.convert(path_of(source), tmp_path / "out", to=row.target, progress=stop, **only(row))
    assert os.listdir(tmp_path) == []


@every_sink
def test_a_killed_run_is_continued(row: Format, tmp_path: Path) -> None:
    """A run that was killed leaves no destination; `resume` completes it to the bytes of an undisturbed run."""
    source, folder = large(tmp_path), tmp_path / "there"
    ckpttool.convert(source, tmp_path / "whole" / "out", to=row.target, **only(row))
    folder.mkdir()
    child = os.fork()
    if not child:

        def kill(done: int, total: int) -> None:
            if done:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            ckpttool.convert(source, folder / "out", to=row.target, resume=True, threads=1, progress=kill, **only(row))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (folder / "out").exists() and os.listdir(folder)
    ckpttool.convert(source, folder / "out", to=row.target, resume=True, check=True, **only(row))
    assert os.listdir(folder) == ["out"]
    assert content(folder / "out") == content(tmp_path / "whole" / "out")


def test_formats_have_a_sample_and_names_of_their_own() -> None:
    assert SAMPLES.keys() | BESIDE.keys() == {row.name for row in FORMATS}
    names = [row.target for row in FORMATS]
    assert len(names) == len(set(names)) and all(row.title for row in FORMATS)
    with pytest.raises(CkptError, match="there is no format `no-such-format`"):
        ckpttool.convert(path_of("torch/full"), "never", to="no-such-format")
