"""The two engines of `ckpttool reshard` on real processes: equal checkpoints with equal boxes, whatever is in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import unusual_state
from support.paths import ROOT
from support.torchrun import Once, forked, forked_launcher
from support.upstream_readers import path_of
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpttool
from ckpttool.catalogue import typed_json
from ckpttool.catalogue.entries import Tensor
from ckpttool.producers.open import open_source
from ckpttool.storage.stores import locate
from ckpttool.training.read import Reader

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
SECONDS = 300

Case = dict[str, Any]

TP = ["*.up.weight=tp:0", "*.down.weight=tp:1"]
ONTO: dict[str, dict[str, Any]] = {
    "w2": {"to_world": 2},
    "tp2": {"to_mesh": "tp=2", "placements": TP},
    "ddp2": {"to_mesh": "replicate=2"},
    "w3": {"to_world": 3},
    "w4": {"to_world": 4},
    "hsdp": {"to_mesh": "replicate=2,shard=2"},
    "tp": {"to_mesh": "shard=2,tp=2", "placements": TP},
    "like tp": {"like": path_of("dcp/fsdp2_tp_w4")},
    "w8": {"to_world": 8},
    "hsdp tp": {"to_mesh": "replicate=2,shard=2,tp=2", "placements": TP},
}
WORLDS = {"w2": 2, "tp2": 2, "ddp2": 2, "w3": 3, "w8": 8, "hsdp tp": 8}
SAMPLES = {"dcp": "dcp/fsdp2_w4", "tp": "dcp/fsdp2_tp_w4", "torch": "torch/full", "safetensors": "safetensors/indexed"}
ODD = {"odd": unusual_state.whole, "ids": unusual_state.numbered, "sgd": unusual_state.with_momentum}

BRIEF = [
    ("odd", "w2"), ("ids", "tp2"), ("sgd", "ddp2"), ("ranks", "w2"), ("safetensors", "tp2"), ("odd", "ddp2"),
    ("odd", "tp"), ("odd", "hsdp"), ("dcp", "w4"), ("tp", "like tp"), ("safetensors", "hsdp"),
]  # fmt: skip
LONG = [
    (source, onto)
    for source in (*SAMPLES, *ODD, "ranks", "odd dcp")
    for onto in ("w2", "tp2", "ddp2", "w4", "hsdp", "tp")
    if (source, onto) not in BRIEF
] + [("odd dcp", "w3"), ("odd", "w8"), ("tp", "hsdp tp")]  # fmt: skip


def flags_of(source: str, onto: str) -> dict[str, Any]:
    flags = dict(ONTO[onto])
    if "placements" in flags and source in ("ids", "safetensors"):
        flags["placements"] = ["*embed.weight=tp:1"]
    return {**flags, "to": "dcp"} if source == "ranks" else flags


@pytest.fixture(scope="session")
def sources(once: Once) -> dict[str, str]:
    def make(folder: Path) -> None:
        for name, state in ODD.items():
            torch.save(state(), folder / f"{name}.pt")
        ckpttool.reshard(folder / "odd.pt", folder / "odd dcp", to_world=3)
        torch.save({"model": {"w": torch.empty(4, 2, dtype=torch.bits8)}}, folder / "packed.pt")
        for n in (0.0, 1.0):
            model = {f"w{i}": torch.full((100, 40), n) for i in range(5)}
            torch.save({"model": model, "extra": torch.full((7,), n)}, folder / "state.pt")
            ckpttool.convert(folder / "state.pt", folder / f"{n}", to="dcp", to_world=2)
        shutil.copytree(folder / "0.0", folder / "mixed")
        shutil.copy(folder / "1.0/__1_0.distcp", folder / "mixed")

    folder = once("engine-sources", make)
    found = {name: path_of(sample) for name, sample in SAMPLES.items()} | {"ranks": path_of("rank/fsdp1_w2")}
    found |= {name: str(folder / f"{name}.pt") for name in (*ODD, "packed")}
    return found | {name: str(folder / name) for name in ("odd dcp", "0.0", "mixed")}


@pytest.fixture(scope="session")
def launched(once: Once) -> Callable[[str, int, list[Case]], tuple[Path, dict[str, Any]]]:
    """`launched(name, world, cases)`: where the cases were written, and what rank 0 says of each, in one launch."""

    def get(name: str, world: int, cases: list[Case]) -> tuple[Path, dict[str, Any]]:
        def make(folder: Path) -> None:
            told = [{**case, "out": str(folder / str(i))} for i, case in enumerate(cases)]
            (folder / "cases.json").write_text(json.dumps(told))
            script = Path(__file__).with_name("reshard_on_ranks.py")
            output = forked(world, script, folder / "cases.json", folder / "said.json")
            assert (folder / "said.json").exists(), output

        folder = once(f"engines-{name}-{world}", make)
        return folder, json.loads((folder / "said.json").read_text())

    return get


Launched = Callable[[str, int, list[Case]], tuple[Path, dict[str, Any]]]


def cases_of(name: str, world: int, sources: dict[str, str]) -> list[Case]:
    """What the ranks of a world do in their one launch."""
    pairs = [pair for pair in (BRIEF if name == "brief" else LONG) if WORLDS.get(pair[1], 4) == world]
    cases = [
        {"name": f"{s} {o}", "source": sources[s], "flags": {**flags_of(s, o), "engine": "mesh", "check": True}}
        for s, o in pairs
    ]
    if (name, world) != ("brief", 2):
        return cases
    for choice, (flags, _) in CHOICES.items():
        given = {key: value for key, value in flags.items() if key not in ("source", "free")}
        source = sources[flags["source"]] if "source" in flags else W4
        cases.append({"name": choice, "source": source, "free": flags.get("free"), "flags": given})
    flags = {"to_world": 2, "engine": "mesh"}
    return cases + [{"name": name, "source": sources[name], "flags": flags} for name in ("0.0", "mixed")]


@pytest.fixture(scope="session")
def on_ranks(sources: dict[str, str], launched: Launched) -> Callable[[str, int], tuple[dict[str, Path], Any]]:
    """`on_ranks(name, world)`: where each case was written, and what rank 0 says of it."""

    def get(name: str, world: int) -> tuple[dict[str, Path], dict[str, Any]]:
        cases = cases_of(name, world, sources)
        folder, said = launched(name, world, cases)
        return {case["name"]: folder / str(i) for i, case in enumerate(cases)}, said

    return get


OnRanks = Callable[[str, int], tuple[dict[str, Path], dict[str, Any]]]


def check_case(source: str, onto: str, sources: dict[str, str], on_ranks: OnRanks, name: str, tmp_path: Path) -> None:
    written, said = on_ranks(name, WORLDS.get(onto, 4))
    there = said[f"{source} {onto}"]
    assert isinstance(there, dict), there
    assert there["engine"] == "mesh"
    made = ckpttool.reshard(sources[source], tmp_path / "bytes", engine="bytes", **flags_of(source, onto))
    same = ("checked_bytes", "unchecked_bytes", "tensor_count", "object_count", "payload_bytes", "ties", "dropped")
    same += ("policies", "world_size", "mesh")
    assert {key: there[key] for key in same} == {key: json.loads(json.dumps(getattr(made, key))) for key in same}
    assert_equal(tmp_path / "bytes", written[f"{source} {onto}"])


@pytest.mark.parametrize(("source", "onto"), BRIEF)
def test_the_engines_agree(source: str, onto: str, sources: dict[str, str], on_ranks: OnRanks, tmp_path: Path) -> None:
    check_case(source, onto, sources, on_ranks, "brief", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("source", "onto"), LONG)
def test_the_engines_agree_on_everything(
    source: str, onto: str, sources: dict[str, str], on_ranks: OnRanks, tmp_path: Path
) -> None:
    check_case(source, onto, sources, on_ranks, "all", tmp_path)


@pytest.mark.gpu
def test_the_engines_agree_on_gpus(gpus: int, sources: dict[str, str], launched: Launched, tmp_path: Path) -> None:
    meshes: dict[str, dict[str, Any]] = {"1-D": {"to_world": gpus}}
    if gpus % 2 == 0:
        half = gpus // 2
        meshes["hsdp"] = {"to_mesh": f"replicate=2,shard={half}"}
        meshes["tp"] = {"to_mesh": f"shard={half},tp=2", "placements": TP}
    pairs = [(source, mesh) for source in ("odd", "dcp", "sgd") for mesh in meshes]
    cases = [
        {"name": f"{s} {m}", "source": sources[s], "flags": {**meshes[m], "engine": "mesh", "check": True}}
        for s, m in pairs
    ]
    folder, said = launched("gpus", gpus, cases)
    for number, (source, mesh) in enumerate(pairs):
        there = said[f"{source} {mesh}"]
        assert isinstance(there, dict), there
        assert re.fullmatch(r"asked for, on \w+", there["why"]), "not on a GPU"
        made = tmp_path / f"{source} {mesh}"
        ckpttool.reshard(sources[source], made, engine="bytes", **meshes[mesh])
        assert_equal(made, folder / str(number))


def assert_equal(one: Path, other: Path) -> None:
    """Names and paths, dtypes, shapes, boxes, values, ties, objects, containers; and what torch itself reads."""
    with closing(open_source(str(one))) as a, closing(open_source(str(other))) as b:
        assert list(a.catalogue.entries) == list(b.catalogue.entries)
        assert a.catalogue.containers == b.catalogue.containers
        cut = 0
        for path, entry in a.catalogue.entries.items():
            found = b.catalogue.entries[path]
            assert type(entry) is type(found), path
            if not isinstance(entry, Tensor) or not isinstance(found, Tensor):
                assert spelt(entry) == spelt(found), path
                continue
            for what in ("dtype", "shape", "part", "embedded", "alias"):
                assert getattr(entry, what) == getattr(found, what), (path, what)
            assert boxes_of(entry) == boxes_of(found), path
            cut += len(entry.chunks) > 1
            assert torch.equal(raw(Reader(a).whole(entry)), raw(Reader(b).whole(found))), path
        assert cut or not any("shard" in str(p) for p in (one, other))
    ours, theirs = by_torch(one), by_torch(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(raw(value), raw(theirs[name])), name
        else:
            assert repr(value) == repr(theirs[name]), name


def boxes_of(tensor: Tensor) -> list[Any]:
    return sorted(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))


def spelt(entry: Any) -> str:
    return json.dumps(typed_json.encode(entry.value, name=entry.name))


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def by_torch(path: Path) -> dict[str, Any]:
    """The state as DCP gives it without a process group, one dict by full names."""
    state: dict[str, Any] = {}
    _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {".".join(map(str, where)): value for value, where in leaves(state, ())}


def leaves(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*where, key))
    elif isinstance(value, list) and any(isinstance(v, (dict, torch.Tensor)) for v in value):
        for i, below in enumerate(value):
            yield from leaves(below, (*where, i))
    else:
        yield value, where


# Files of another save -----------------------------------------------------------------------------------------------


def test_a_file_of_another_save(sources: dict[str, str], on_ranks: OnRanks) -> None:
    """All ranks together read it, each a share of its records; rank 0 alone what torch does not save. Only the manifest
    of the source tells."""
    written, said = on_ranks("brief", 2)
    mixed, whole = Path(sources["mixed"]), written["0.0"]
    assert isinstance(said["0.0"], dict), said
    listed = json.loads((mixed / "integrity.json").read_text())["crc32"]["__1_0.distcp"]
    found = f"{zlib.crc32((mixed / '__1_0.distcp').read_bytes()):08x}"
    assert f"__1_0.distcp` has CRC-32 {found}, but {listed} in the manifest beside it" in str(said["mixed"])
    assert whole.exists() and not written["mixed"].exists()
    # What torch writes is counted as it passes; the file of what it does not save is not.
    crcs = {path.name: f"{zlib.crc32(path.read_bytes()):08x}" for path in whole.glob("*.distcp")}
    rest = "__0_1.distcp"
    assert len(crcs) == 3 and json.loads((whole / "integrity.json").read_text())["crc32"] == {**crcs, rest: None}


# The choice -----------------------------------------------------------------------------------------------------------

W4 = path_of("dcp/fsdp2_w4")
CHOICES: dict[str, tuple[dict[str, Any], Any]] = {
    "as many as ranks": ({"to_world": 2}, ("bytes", "the default")),
    "bytes": ({"to_world": 2, "engine": "bytes"}, ("bytes", "asked for")),
    "mesh": ({"to_world": 2, "engine": "mesh"}, ("mesh", "asked for")),
    "planned": ({"to_world": 2, "engine": "mesh", "dry_run": True}, ("mesh", "asked for")),
    "another order": (
        {"to_mesh": "shard=1,replicate=2", "engine": "mesh"},
        "UsageError: `--engine mesh`: FSDP2 takes the dimensions of a mesh in the order",
    ),
    "packed": (
        {"to_world": 2, "source": "packed", "engine": "mesh"},
        "UsageError: `--engine mesh`: tensor `model.w` is bits8, which does not travel",
    ),
    "more ranks": (
        {"to_world": 4, "engine": "mesh"},
        "UsageError: `--engine mesh`: 2 processes for 4 ranks | `torchrun --nproc-per-node 4 -m ckpttool reshard ...`",
    ),
    "rank files": (
        {"to_world": 2, "to": "fsdp1", "engine": "mesh"},
        "UsageError: `--engine mesh`: DCP saves it, and fsdp1 is not DCP's | `--engine bytes` writes it",
    ),
    "little memory": (
        {"to_world": 2, "engine": "mesh", "free": 1 << 20},
        "UsageError: `--engine mesh`: the state does not fit: 2 x 5",
    ),
    "a rule for nothing": (
        {"to_mesh": "shard=1,tp=2", "engine": "mesh", "placements": ["*.wq=tp:0"]},
        "UsageError: `--placements *.wq=tp:0` matches nothing",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_engine_is_chosen_and_said(name: str, on_ranks: OnRanks) -> None:
    written, said = on_ranks("brief", 2)
    expected, there, out = CHOICES[name][1], said[name], written[name]
    if isinstance(expected, str):
        assert isinstance(there, str) and there.startswith(expected), there
        assert not out.exists()
        return
    assert isinstance(there, dict), there
    assert (there["engine"], there["why"][: len(expected[1])]) == expected
    assert out.exists() == (name != "planned")


def test_a_process_alone_has_no_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ckpttool.errors import UsageError

    with pytest.raises(UsageError, match='`engine="mesh"`: not under torchrun') as caught:
        ckpttool.reshard(W4, tmp_path / "out", to_world=2, engine="mesh")
    assert caught.value.hint is not None and "torchrun --nproc-per-node 2 -m ckpttool reshard" in caught.value.hint
    with pytest.raises(UsageError, match="there is no engine `meshes`") as caught:
        ckpttool.reshard(W4, tmp_path / "out", to_world=2, engine="meshes")
    assert list(tmp_path.iterdir()) == []


# What goes wrong ------------------------------------------------------------------------------------------------------

FAILING = """
import os, signal, sys, time
import torch
from ckpttool.training.reshard_engine import {module} as module
from ckpttool.__main__ import main
from ckpttool.errors import StorageError
from ckpttool.transfer import processes
how, rank = sys.argv.pop(1), os.environ["RANK"]
real = module.{function}
def failing(*arguments):
    if how == "dies":
        processes._LEAVE = 0.5  # nobody reads what rank 0 would say
    if rank == os.environ["FAILING"]:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise StorageError("the disk of this node is full", hint="make room")
        if how == "is full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if how == "is wrong":
            raise ValueError("a mistake of ours")
    return real(*arguments)
module.{function} = failing
main()
"""
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
WHERE = {"loading": ("engine", "_fill_optimizer"), "saving": ("engine", "_save"), "making": ("engine", "MetaModel")}


@pytest.mark.parametrize(
    ("how", "where", "rank", "expected"),
    [
        ("dies", "loading", 1, ("error: lost touch with another rank", "terminated, nothing was written")),
        *(
            pytest.param(how, where, rank, expected, marks=pytest.mark.long)
            for where in WHERE
            for how, rank, expected in (
                ("is full", 1, tuple(f"error: rank 1: {kind}{FULL}" for kind in ("", "OutOfMemoryError: "))),
                ("dies", 0, ()),
                ("dies", 2, ("error: lost touch with another rank", "terminated, nothing was written")),
                ("raises", 0, ("error: the disk of this node is full",)),
                ("raises", 2, ("error: the disk of this node is full",)),
                ("is wrong", 0, ("bug: ValueError: a mistake of ours",)),
                ("is wrong", 2, ("bug: ", "error: rank 2: ValueError: a mistake of ours")),
            )
        ),
    ],
)
def test_a_rank_that_fails_takes_all_with_it(
    tmp_path: Path, how: str, where: str, rank: int, expected: tuple[str, ...]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(module=WHERE[where][0], function=WHERE[where][1]))
    out = tmp_path / "there" / "out"
    world = max(2, rank + 1)
    launcher = forked_launcher() if (how, rank) == ("dies", 1) else [*TORCHRUN, "--nproc-per-node"]
    command = [*launcher, world, script, how, "reshard", W4, out, "--to-world", world]
    running = subprocess.Popen(
        [*map(str, command), "--engine", "mesh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAILING": str(rank), "COLUMNS": "200"},
    )  # fmt: skip
    printed, err = ended(running)
    said = [line for line in err.splitlines() if line.startswith(("error: ", "bug: ", "terminated"))]
    assert running.returncode and not printed
    assert not out.exists()
    if expected:
        assert len(said) == 1 and said[0].startswith(expected), err[-3000:]
        assert not out.parent.exists()
    else:
        assert said == []  # who would have spoken is dead


def test_a_rank_that_fails_need_not_end_for_others_to_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 goes only once rank 0 has said what went wrong, and rank 0 is in a collective with it before that."""
    script = tmp_path / "staying.py"
    script.write_text(
        "import os, time\nfrom ckpttool.transfer import processes\nfrom ckpttool.cli import error_messages\n"
        "said, telling = os.environ['SAID'], error_messages.ErrorPrinter.failed\n"
        "def noting(report, error):\n"
        "    code = telling(report, error)\n"
        "    os.environ['RANK'] == '0' and open(said, 'w').close()\n"
        "    return code\n"
        "def waiting():\n"
        "    while not os.path.exists(said):\n"
        "        time.sleep(0.05)\n"
        "error_messages.ErrorPrinter.failed, processes.wait_to_be_ended = noting, waiting\n"
        + FAILING.format(module="engine", function="_fill_optimizer")
    )
    monkeypatch.setenv("FAILING", "1")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    err = forked(2, script, "raises", "reshard", W4, tmp_path / "out", "--to-world", "2", "--engine", "mesh")
    assert (tmp_path / "said").exists() and "error: the disk of this node is full" in err, err


def ended(running: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed. One that hangs is ended, and all its ranks."""
    try:
        return running.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        running.terminate()
        said = running.communicate()
        raise AssertionError(f"it hangs:\n{said}") from None


@pytest.mark.long
def test_a_signal_to_torchrun_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\nfrom ckpttool.training.reshard_engine import engine\n"
                      "from ckpttool.__main__ import main\n"
                      "engine._save = lambda *arguments: time.sleep(600)\nmain()\n")  # fmt: skip
    out = tmp_path / "there" / "out"
    command = [*TORCHRUN, "--nproc-per-node", "2", script, "reshard", W4, out, "--to-world", "2", "--engine", "mesh"]
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while time.monotonic() < until and not list(tmp_path.glob("there/.out.partial-*/new/*/rest/.metadata")):
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, err = ended(running)
    assert [line for line in err.splitlines() if line.startswith("terminated")] == ["terminated, nothing was written"]
    assert not out.parent.exists()


@pytest.mark.long
def test_there_and_back_again(tmp_path: Path) -> None:
    before = Path(W4)
    for world in (8, 3, 4):
        out = tmp_path / str(world)
        command = [*TORCHRUN, "--nproc-per-node", str(world), "-m", "ckpttool", "reshard", before, out]
        done = subprocess.run(
            [*map(str, command), "--to-world", str(world), "--engine", "mesh", "--json"], cwd=ROOT, check=False,
            capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert json.loads(done.stdout)["engine"] == "mesh", done.stderr[-3000:]
        before = out
    ckpttool.reshard(W4, tmp_path / "bytes", to_world=4)
    assert_equal(tmp_path / "bytes", before)


def test_what_torch_saves_otherwise_is_refused(tmp_path: Path) -> None:
    """The index is not believed to be what was laid out; it is compared."""
    from ckpttool.errors import CorruptError
    from ckpttool.formats.dcp import combine as joining
    from ckpttool.layout import rechunk as chunking
    from ckpttool.layout import select as layout

    torch.save({"model": {"w": torch.arange(12.0).reshape(4, 3)}}, tmp_path / "w.pt")
    dcp.save({"model.w": torch.arange(12.0).reshape(4, 3)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with closing(open_source(str(tmp_path / "w.pt"))) as source:
        laid = layout.start(source.catalogue)
        with pytest.raises(CorruptError, match=r"tensor `model\.w` was not saved by torch as planned"):
            joining.join(locate(str(tmp_path / "saved")), chunking.over_world(laid, 2), None)
        joining.join(locate(str(tmp_path / "saved")), chunking.over_world(laid, 1), None)
    with closing(open_source(str(tmp_path / "saved"))) as source:
        assert [tensor.path for tensor in source.catalogue.tensors] == [("model", "w")]
