"""Rank files: every sample against torch's own reference, sets found by any of their names, sets that are broken."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from same import assert_same, raw_bytes
from support.cli import run as run_command
from support.paths import CHECKPOINTS, samples_of
from support.simulated_ranks import as_rank, chunked, cut, mesh, save
from support.upstream_samples import path_of, reference
from support.weights_read import weights_in
from support.wrapped_state import Codes
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ckpttool import convert, inspect, reshard, show, verify
from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.formats.detect import detect
from ckpttool.formats.rankfiles import FORMAT
from ckpttool.formats.rankfiles import discover as sets
from ckpttool.storage.stores import locate
from ckpttool.text import rank_ranges

NAMES = [name for name in samples_of("rank") if (CHECKPOINTS / name / "ckpt").is_dir()]
pytestmark = pytest.mark.filterwarnings("ignore")


def source_of(path: str | Path, options: OpenOptions = NO_HINTS) -> Source:
    row = detect(locate(str(path)))
    assert row is FORMAT
    return row.open(locate(str(path)), options)


def is_flat(name: str) -> bool:
    """Whether the files have flat parameters, whose shapes somebody has to tell."""
    return any(mark in name for mark in ("_local_", "_flat_", "_dinov2_"))


def shapes(name: str, folder: Path) -> str | None:
    """For `--shapes`: the model as torch has it."""
    if not is_flat(name):
        return None
    torch.save(reference(name)["model"], folder / "shapes.pt")
    return str(folder / "shapes.pt")


def read(path: str | Path, *, sound: bool = True, options: OpenOptions = NO_HINTS) -> Catalogue:
    source = source_of(path, options)
    source.close()
    if sound:
        validate(source.catalogue)
    return source.catalogue


def elements(catalogue: Catalogue, tensor: Tensor) -> torch.Tensor:
    """The elements of a tensor, read without any of our own code; records are checked against their CRC."""
    size = tensor.dtype.itemsize
    made = np.zeros(tensor.shape, f"V{size}")
    for chunk in tensor.chunks:
        extent = chunk.extent
        data = Path(catalogue.files[extent.file].location).read_bytes()
        if extent.record is not None and extent.record.crc is not None:
            at = extent.record.offset
            assert zlib.crc32(data[at : at + extent.record.nbytes]) == extent.record.crc
        found = np.frombuffer(data[extent.offset : extent.offset + extent.nbytes], np.uint8)
        if extent.strides is not None:
            shape, steps = (*chunk.sizes, size), (*(s * size for s in extent.strides), 1)
            found = np.lib.stride_tricks.as_strided(found, shape, steps)
        assert not extent.codec
        place = (..., *(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)))
        made[place] = np.ascontiguousarray(found).reshape(-1).view(f"V{size}").reshape(chunk.sizes)
    kind, raw = getattr(torch, tensor.dtype.name), made.tobytes()
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(tensor.shape) if raw else torch.empty(tensor.shape)


def tree_of(catalogue: Catalogue) -> Any:
    return nesting.unflatten(catalogue, lambda e: elements(catalogue, e) if isinstance(e, Tensor) else e.value)


def plain(value: Any, *, text: bool = False) -> Any:
    """A tree of dicts, lists and detached tensors; with `text`, keys as DCP has them."""
    if isinstance(value, Mapping):
        return {str(key) if text else key: plain(v, text=text) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v, text=text) for v in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def expected_of(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What torch made of the same run; `optim_by_name` and `rng_by_rank` are other views of what is saved."""
    whole = reference(name)
    kept = {key: value for key, value in whole.items() if not key.endswith(("_by_name", "_by_rank"))}
    if "model" in kept and "model" not in found:
        kept |= kept.pop("model")  # the state dict itself was saved
    others = {"optim": "optimizer", "scheduler": "lr_scheduler"}
    kept = {key if key in found else others.get(key, key): value for key, value in kept.items()}
    # Frameworks have their own names for the rest, and places.
    return {key: value for key, value in kept.items() if key in found or key in ("model", "optim", "optimizer")}


def unwrapped(tree: Any) -> Any:
    """DDP's names are those of the module inside."""
    model = tree.get("model")
    if isinstance(model, dict) and all(key.startswith("module.") for key in model):
        return tree | {"model": {key.removeprefix("module."): value for key, value in model.items()}}
    return tree


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_what_torch_gathers(name: str) -> None:
    known = {key: tuple(tensor.shape) for key, tensor in reference(name)["model"].items()} if is_flat(name) else None
    found = read(path_of(name), options=OpenOptions(known))
    tree = unwrapped(plain(tree_of(found)))
    expected = plain(expected_of(name, tree))
    assert {"model"} <= expected.keys() or "embed.weight" in expected
    for key, value in expected.items():
        assert_same(tree[key], value, at=key)
    if "rng_by_rank" in reference(name) and "rng" in tree:
        assert all(f"rank{rank}" in tree["rng"] for rank in range(found.world_size))
    assert not found.faults and not [w for w in found.warnings if "not compared" in str(w)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_becomes_a_file(name: str, tmp_path: Path) -> None:
    convert(path_of(name), tmp_path / "out.pt", to="torch", shapes=shapes(name, tmp_path), check=True)
    tree = unwrapped(plain(torch.load(tmp_path / "out.pt", weights_only=False)))
    for key, value in plain(expected_of(name, tree)).items():
        assert_same(tree[key], value, at=key)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_becomes_dcp(name: str, tmp_path: Path) -> None:
    convert(path_of(name), tmp_path / "out", to="dcp", shapes=shapes(name, tmp_path), check=True)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    tree = unwrapped(plain(torch.load(tmp_path / "out.pt", weights_only=False), text=True))
    for key, value in plain(expected_of(name, tree), text=True).items():
        assert_same(tree[key], value, at=key)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_samples_model_becomes_safetensors(name: str, tmp_path: Path) -> None:
    known = shapes(name, tmp_path)
    convert(
        path_of(name), tmp_path / "out", to="safetensors", only=["model"], strip_wrappers=True, shapes=known, check=True
    )  # fmt: skip
    found = weights_in(tmp_path / "out")
    model = reference(name)["model"]
    assert found.keys() <= model.keys()
    for key, value in model.items():
        if key in found:
            assert_same(found[key], value.detach(), at=key)
        else:  # tied, and written once
            assert any(raw_bytes(value) == raw_bytes(other) for other in found.values()), key


@pytest.mark.parametrize("name", [n for n in NAMES if is_flat(n)])
def test_flat_parameters_need_shapes(name: str) -> None:
    found = read(path_of(name), sound=False)
    assert "flat parameters, and not the shapes" in found.faults[0].message
    assert "--shapes FROM" in str(found.faults[0].hint)
    assert len(found.faults) == 1
    with pytest.raises(UsageError):
        validate(found)


def test_a_flat_optimizer_alone_has_no_names() -> None:
    folder = path_of("rank/verl_fsdp1_w2")
    (error, *_) = read(f"{folder}/optim_*", sound=False).faults
    assert "no model is beside it" in error.message and error.exit_code == 2
    known = {key: tuple(tensor.shape) for key, tensor in reference("rank/verl_fsdp1_w2")["model"].items()}
    del known["lm_head.weight"], known["tokens_seen"], known["frozen"]
    alone = tree_of(read(f"{folder}/optim_*", options=OpenOptions(known)))
    assert_same(plain(alone), plain(reference("rank/verl_fsdp1_w2")["optim"]))


def test_an_optimizer_whose_state_has_one_dimension_is_not_flat(tmp_path: Path) -> None:
    # Adafactor keeps a row and a column for each matrix.
    optim = {"state": {0: {"row": torch.ones(13), "col": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    tree = tree_of(read(save(tmp_path / "run", 2, lambda rank: {"model": {"w": WHOLE}, "optim": optim})))
    assert_same(tree["optim"], optim)


def test_a_flat_optimizer_of_a_world_of_one_beside_normalisation(tmp_path: Path) -> None:
    """`use_orig_params=False` in a world of one: whole parameters, and one id for all of them."""

    def state(rank: int) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).state_dict()
        optim = {"state": {0: {"exp_avg": torch.arange(30.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        return {"model": model, "optim": optim}

    found = tree_of(read(save(tmp_path / "run", 1, state)))["optim"]["state"]
    assert [*found] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(found["0.bias"]["exp_avg"], torch.arange(15.0, 20.0))


@pytest.mark.parametrize(
    "name", ["rank/hsdp_w4", *(pytest.param(f"rank/{n}", marks=pytest.mark.long) for n in ("fsdp1_w2", "fsdp2_tp_w4"))]
)
def test_torch_is_not_needed(name: str, tmp_path: Path) -> None:
    code = (
        "import sys, ckpttool; ckpttool.convert(sys.argv[1], sys.argv[2], to='dcp', check=True); "
        "assert not {'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, path_of(name), tmp_path / "out"], check=True)


def test_what_is_said_of_a_set() -> None:
    found = read(path_of("rank/hsdp_w4"))
    assert found.facts["layout"] == "DTensor, mesh 2x2 (ddp, fsdp)"
    assert [(f.name, f.rank) for f in found.files] == [(f"rank{r}.pt", r) for r in range(4)]
    assert found.world_size == 4
    # Each box is on two ranks and kept once.
    assert {len(t.chunks) for t in found.tensors} <= {1, 2}


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem", "rank", "world", "numbered"),
    [
        ("model_world_size_4_rank_2.pt", "model", 2, 4, False),
        ("extra_state_world_size_16_rank_11.pt", "extra_state", 11, 16, False),
        ("rank0.pt", "", 0, None, False),
        ("rank_12.pth", "", 12, None, False),
        ("sharded_rank0.pt", "sharded", 0, None, False),
        ("pytorch_model_fsdp_rank3.bin", "pytorch_model_fsdp", 3, None, False),
        ("optimizer_0_rank1.bin", "optimizer_0", 1, None, False),
        ("model_0000002.rank_1.pth", "model_0000002", 1, None, False),
        ("ep0-ba100-rank0.pt", "ep0-ba100", 0, None, False),
        ("model-rank=3.pt", "model", 3, None, False),
        ("rank0_model.pt", "model", 0, None, False),
        ("model_rank_1_of_4.pt", "model", 1, 4, False),
        ("checkpoint_0.pt", "checkpoint", 0, None, True),
        ("0.pt", "", 0, None, True),
    ],
)  # fmt: skip
def test_names(name: str, stem: str, rank: int, world: int | None, numbered: bool) -> None:
    found = sets.member(locate(f"/run/{name}"))
    assert found is not None
    assert found[1:4] + found[5:] == (stem, rank, world, numbered)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001-of-00002.bin", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00.pt", "model.pt", "rank0.safetensors", "crank3x.pt", "rng_state_0.txt",
    ],
)  # fmt: skip
def test_other_peoples_names(name: str) -> None:
    assert sets.member(locate(f"/run/{name}")) is None


def test_any_name_of_a_set_will_do(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("rank/fsdp1_w4"), tmp_path / "run"))
    whole = described(read(folder))
    assert described(read(folder / "rank3.pt")) == whole
    assert described(read(f"{folder}/*.pt")) == whole
    assert described(read(f"{folder}/rank[0-3].pt")) == whole


def described(catalogue: Catalogue) -> list[Any]:
    return [
        (e.path, e.shape, [tuple(c) for c in e.chunks]) if isinstance(e, Tensor) else (e.path, repr(e.value))
        for e in catalogue.entries.values()
    ]


NAMES_THAT_SAY_LITTLE = [
    "rank_{rank}/model.pt", "{rank}/state.pt", "shard_{rank}_of_3.pt", "model-0000{rank}-of-00003.pt",
    "rank{rank}.pt.tar", "state_{rank}.tar", "{rank}_model.th", "node{rank}a.pt",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES_THAT_SAY_LITTLE)
def test_contents_say_whose_file_it_is(name: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": chunked(torch.arange(14.0).reshape(7, 2), rank, 3), "n": 1}

    folder, run = save(tmp_path / "ckpt", 3, state), tmp_path / "run"
    for rank in range(3):
        (run / name.format(rank=rank)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / f"rank{rank}.pt", run / name.format(rank=rank))
    by_folder = ["{rank}/" in name] * ("rank_" not in name)
    for way in (name.format(rank="*"), name.format(rank=1), *(() if any(by_folder) else ("",))):
        found = tree_of(read(str(run / way)))
        assert torch.equal(found["w"], torch.arange(14.0).reshape(7, 2))
        assert found["n"] == 1
    (run / name.format(rank=1)).unlink()
    with pytest.raises(CorruptError, match="no file of rank 1 of 3"):
        read(str(run / name.format(rank="*")))


def test_the_files_of_a_rank_in_a_directory_of_its_own(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": chunked(torch.arange(14.0).reshape(7, 2), rank, 2)}

    for rank, path in enumerate(sorted(save(tmp_path / "ckpt", 2, state).iterdir())):
        (tmp_path / f"run/rank_{rank}").mkdir(parents=True)
        shutil.copy(path, tmp_path / f"run/rank_{rank}/model.pt")
        torch.save({"seed": torch.full((3,), rank)}, tmp_path / f"run/rank_{rank}/rng.pt")
    found = tree_of(read(tmp_path / "run"))
    assert torch.equal(found["model"]["w"], torch.arange(14.0).reshape(7, 2))
    assert [found["rng"][f"rank{rank}"]["seed"].tolist() for rank in range(2)] == [[0] * 3, [1] * 3]
    assert [file.name for file in read(tmp_path / "run").files][:2] == ["rank_0/model.pt", "rank_0/rng.pt"]


def test_two_saves_whose_contents_are_of_the_same_ranks(tmp_path: Path) -> None:
    folder = save(tmp_path / "ckpt", 2, lambda rank: {"w": chunked(torch.ones(4, 2), rank, 2)}, "a-{rank}-of-2.pt")
    shutil.copy(folder / "a-1-of-2.pt", folder / "a-2-of-2.pt")
    with pytest.raises(CorruptError, match="both of rank 1"):
        source_of(folder)


def test_a_quoted_pattern_on_the_command_line(tmp_path: Path) -> None:
    pattern = f"{path_of('rank/fsdp2_w4')}/rank*.pt"
    ours = [sys.executable, "-m", "ckpttool"]
    shown = subprocess.run([*ours, "inspect", "--json", pattern], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["format"] == "rankfiles"
    subprocess.run([*ours, "convert", pattern, tmp_path / "out.pt"], capture_output=True, check=True)
    model = torch.load(tmp_path / "out.pt")["model"]
    assert_same(plain(model), plain(reference("rank/fsdp2_w4")["model"]))


@pytest.mark.parametrize("named", ["", "/*.pt", "/rank0.pt"])
def test_no_file_of_the_set_is_written_over(named: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("rank/fsdp1_w2"), tmp_path / "run"))
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    with pytest.raises(UsageError):
        convert(f"{folder}{named}", folder / "rank1.pt", to="torch", overwrite=True)
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before


def test_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="matches no files of ranks"):
        detect(locate(f"{tmp_path}/*.pt"))


def test_other_files_of_a_pattern_are_left_out_and_said(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("rank/fsdp1_w2"), tmp_path / "run"))
    torch.save({"a": 1}, folder / "config.pt")
    (folder / "config.json").write_text("{}")
    for way in (f"{folder}/*.pt", folder):
        assert any("config.pt" in str(w) for w in read(way).warnings)
        assert not any("config.json" in str(w) for w in read(way).warnings)
        assert len(read(way).files) == 2


def test_parts_are_mounted_under_their_names() -> None:
    row = detect(locate(path_of("rank/fsdp2_w2")))
    source = row.open(locate(path_of("rank/fsdp2_w2")))
    source.close()
    assert {path[0] for path in source.catalogue.entries} == {"model", "optim", "extra_state"}
    one = read(f"{path_of('rank/fsdp2_w2')}/model_world_size_2_rank_1.pt")
    assert ("embed.weight",) in one.entries and len(one.files) == 2


def test_two_saves_in_one_directory(tmp_path: Path) -> None:
    for world in (2, 4):
        save(tmp_path / "run", world, sharded(world), f"model_world_size_{world}_rank_{{rank}}.pt")
    with pytest.raises(ReadError, match="by 2 and by 4 ranks") as caught:
        read(tmp_path / "run")
    assert "world_size_4_rank_*" in str(caught.value.hint)
    assert read(tmp_path / "run" / "model_world_size_2_rank_1.pt").world_size == 2
    assert read(f"{tmp_path}/run/*_size_4_*").world_size == 4
    with pytest.raises(ReadError, match="by 2 and by 4 ranks"):
        read(f"{tmp_path}/run/*.pt")


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_families_of_rank_files_are_told_with_what_they_hold(command: str, tmp_path: Path) -> None:
    def sharded(rank: int) -> Any:
        return {"model": {"w": cut(WHOLE, mesh(2), Shard(0))}, "optim": {"state": {}, "param_groups": []}, "step": 3}

    def local(rank: int) -> Any:
        return {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    folder = save(tmp_path / "run", 2, sharded, "sharded_rank{rank}.pt")
    save(folder, 2, local, "local_optim_rank{rank}.pt")
    save(folder, 2, lambda rank: {"rng": torch.get_rng_state(), "epoch": 1}, "extra_rank{rank}.pt")
    words = [command, str(folder), *([str(tmp_path / "out.pt")] if command == "convert" else [])]
    result = run_command(*words)
    assert result.exit_code == 3 and not (tmp_path / "out.pt").exists()
    holds = {"sharded": "model, optim, step", "local_optim": "optimizer", "extra": "rng, epoch"}
    for name, held in holds.items():
        assert f"`{name}_rank*.pt` ({held})" in result.stderr
    commands = re.findall(r"`ckpttool inspect '([^']*)'`", result.stderr)
    assert {pattern.rpartition("/")[2] for pattern in commands} == {f"{name}_rank*.pt" for name in holds}
    for pattern in commands:
        assert run_command("inspect", pattern).exit_code == 0


@pytest.mark.parametrize("whole", ["both", "one"])
def test_whole_states_are_no_parts(whole: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"model": {"w": cut(WHOLE, mesh(2), Shard(0))}, "optim": {"state": {}, "param_groups": []}}

    folder = save(tmp_path / "run", 2, state)
    save(folder, 2, state if whole == "both" else lambda rank: {"w": WHOLE}, "full_rank{rank}.pt")
    with pytest.raises(ReadError, match=r"each a checkpoint: .*`rank\*\.pt` \(model, optim\)") as caught:
        read(folder)
    for pattern in ("full_rank*.pt", "rank*.pt"):
        assert f"`ckpttool inspect '{folder}/{pattern}'`" in str(caught.value.hint)
    assert read(f"{folder}/rank*.pt").entries and read(f"{folder}/full_rank*.pt").entries


def test_a_generator_beside_whole_states_is_a_part(tmp_path: Path) -> None:
    state = {"model": {"w": WHOLE}, "optim": {"state": {}, "param_groups": []}}
    folder = save(tmp_path / "run", 2, lambda rank: state)
    save(folder, 2, lambda rank: {"cpu": torch.full((4,), rank)}, "rng_rank{rank}.pt")
    assert {path[0] for path in read(folder).entries} == {"rng", "state"}


def test_a_file_of_no_rank_beside_a_set(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2))
    torch.save({"w": WHOLE}, folder / "full.pt")
    assert any(str(w).startswith("files that belong to no rank") and "full.pt" in str(w) for w in read(folder).warnings)


def test_several_steps_in_one_directory(tmp_path: Path) -> None:
    for step in (100, 200):
        save(tmp_path / "run", 2, sharded(2), f"ep0-ba{step}-rank{{rank}}.pt")
    with pytest.raises(ReadError, match="2 sets of rank files") as caught:
        read(tmp_path / "run")
    assert "ep0-ba200-rank*.pt" in str(caught.value.hint)


@pytest.mark.parametrize("names", [["epoch_0.pt", "epoch_1.pt"], ["pytorch_model-00001-of-00002.bin"], ["a.pt"]])
def test_ordinary_files_are_none_of_ours(names: list[str], tmp_path: Path) -> None:
    for i, name in enumerate(names):
        torch.save({"w": torch.full((4,), i), "b": torch.full((3,), i + 9)}, tmp_path / name)
    assert detect(locate(str(tmp_path / names[0]))).name == "torch"
    with pytest.raises(ReadError):
        detect(locate(str(tmp_path)))


@pytest.mark.parametrize("name", samples_of("torch"))
def test_samples_of_one_file_are_none_of_ours(name: str) -> None:
    assert not FORMAT.recognise(locate(path_of(name)))


def test_contents_are_believed_before_names(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2))
    (folder / "rank0.pt").rename(folder / "x")
    (folder / "rank1.pt").rename(folder / "rank0.pt")
    (folder / "x").rename(folder / "rank1.pt")
    found = read(folder)
    assert {f.name: f.rank for f in found.files} == {"rank0.pt": 1, "rank1.pt": 0}
    assert any("names and contents have different ranks" in str(w) for w in found.warnings)
    assert_same(tree_of(found)["model"]["w"], WHOLE)


def test_one_rank_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1, lambda rank: {"w": cut(WHOLE, mesh(1), Shard(0))}, "model.pt")
    assert_same(tree_of(read(folder / "model.pt"))["w"], WHOLE)


def test_all_ranks_saved_to_one_name(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2), "model.pt")
    with pytest.raises(CorruptError, match=r"`model\.pt` is the part of rank 1 of a checkpoint of 2 ranks") as caught:
        read(folder / "model.pt")
    assert "a name of its own" in str(caught.value.hint)


def test_epochs_that_all_ranks_saved_to_one_name_are_no_ranks(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2), "epoch_0.pt")
    save(folder, 2, sharded(2), "epoch_1.pt")
    assert [f.rank for f in read(folder, sound=False).files] == [1, 1]
    with pytest.raises(CorruptError, match=r"epoch_0\.pt.* is of rank 1: the number in its name is not a rank"):
        read(folder)


# Sets that are broken -------------------------------------------------------------------------------------------------

WHOLE = torch.arange(26.0).reshape(13, 2)
State = Callable[[int], Any]


def sharded(world: int, kind: str = "dtensor", **other: Any) -> State:
    """The state of a rank: a tensor in pieces, a buffer and a generator."""

    def state(rank: int) -> Any:
        w = cut(WHOLE, mesh(world), Shard(0)) if kind == "dtensor" else chunked(WHOLE, rank, world)
        return {"model": {"w": w, "b": torch.arange(3)}, "rng": {"torch": torch.full((4,), rank)}, **other}

    return state


both = pytest.mark.parametrize("kind", ["dtensor", "sharded"])


def fault(folder: Path | str) -> CkptError:
    """What stops everything but `inspect`, which still opens it."""
    catalogue = read(folder, sound=False)
    with pytest.raises(CkptError) as caught:
        validate(catalogue)
    with pytest.raises(CkptError):
        convert(folder, Path(str(folder)).parent / "never.pt", to="torch")
    return caught.value


@both
@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_missing_file(kind: str, gone: int, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 4, sharded(4, kind))
    (folder / f"rank{gone}.pt").unlink()
    error = fault(folder)
    assert f"no file of rank {gone} of 4" in error.message and "copy the missing files" in str(error.hint)


def test_a_missing_file_of_plain_ones(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 4, lambda rank: {"model": {"w": WHOLE}}, "model_world_size_4_rank_{rank}.pt")
    assert_same(tree_of(read(folder))["model"]["w"], WHOLE)
    (folder / "model_world_size_4_rank_3.pt").unlink()
    assert "no file of rank 3 of 4" in fault(folder).message


def test_a_missing_file_of_one_part(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("rank/fsdp2_w2"), tmp_path / "run"))
    (folder / "extra_state_world_size_2_rank_1.pt").unlink()
    catalogue = FORMAT.open(locate(str(folder))).catalogue
    assert "no file of `extra_state` of rank 1 of 2" in catalogue.faults[0].message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", ["model", "optim"])
@pytest.mark.parametrize("sample", ["rank/verl_fsdp1_w2", "rank/verl_fsdp1_orig_w2"])
def test_a_missing_file_of_one_part_beside_flat_pieces(sample: str, part: str, rank: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of(sample), tmp_path / "run"))
    (folder / f"{part}_world_size_2_rank_{rank}.pt").unlink()
    assert f"no file of `{part}` of rank {rank} of 2" in fault(folder).message


@both
def test_a_file_left_behind_by_more_ranks(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 3, sharded(3, kind))
    save(folder, 2, sharded(2, kind))
    error = fault(folder)
    assert "`rank2.pt` is of a save by 3 ranks, `rank0.pt`, `rank1.pt` by 2" in error.message


def test_a_plain_file_too_many(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2))
    torch.save({"model": {"b": torch.arange(3)}}, folder / "rank2.pt")
    assert "`rank2.pt` is of rank 2, but the checkpoint is of ranks 0-1" in fault(folder).message


@both
def test_the_same_rank_twice(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2, kind))
    shutil.copy(folder / "rank0.pt", folder / "rank1.pt")
    messages = [error.message for error in read(folder, sound=False).faults]
    assert "`rank0.pt` and `rank1.pt` are both of rank 0" in messages
    assert any("no file of rank 1 of 2" in m for m in messages)


@both
def test_ranks_that_disagree_on_a_shape(kind: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        whole = WHOLE if rank == 0 else torch.ones(14, 2)
        return {"w": cut(whole, mesh(2), Shard(0)) if kind == "dtensor" else chunked(whole, rank, 2)}

    error = fault(save(tmp_path / "run", 2, state))
    assert "ranks 0 and 1 disagree on `w`" in error.message
    assert "[13, 2] in `rank0.pt`" in error.message and "[14, 2] in `rank1.pt`" in error.message


def test_ranks_that_disagree_on_a_dtype(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16]
    error = fault(save(tmp_path / "run", 2, lambda r: {"w": cut(WHOLE.to(kinds[r]), mesh(2), Shard(0))}))
    assert "float32 [13, 2] in `rank0.pt`" in error.message and "bfloat16 [13, 2] in `rank1.pt`" in error.message


def test_a_tensor_in_pieces_here_and_whole_there(tmp_path: Path) -> None:
    state = sharded(2)
    folder = save(
        tmp_path / "run", 2, lambda r: state(r) if r == 0 else {**state(r), "model": {"w": WHOLE, "b": WHOLE}}
    )
    messages = [error.message for error in read(folder, sound=False).faults]
    assert any("disagree on `model.w`: a DTensor of float32 [13, 2]" in m for m in messages)
    assert any("disagree on `model.b`: int64 [3]" in m for m in messages)


@pytest.mark.parametrize("where", ["model", "optim"])
def test_a_replicated_tensor_that_differs(where: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        odd = torch.tensor(float(rank == 2))
        model = {"w": cut(WHOLE, mesh(3), Shard(0)), "b": odd if where == "model" else torch.ones(())}
        optim = {"state": {"w": {"step": odd if where == "optim" else torch.ones(())}}, "param_groups": [{"lr": 1.0}]}
        return {"model": model, "optim": optim}

    error = fault(save(tmp_path / "run", 3, state))
    if where == "model":
        assert "tensor `model.b` differs between ranks" in error.message
        assert "rank 2 (`rank2.pt`) from rank 0 (`rank0.pt`)" in error.message
    else:
        assert "0 on ranks 0-1 (`rank0.pt`, `rank1.pt`) and 1 on rank 2 (`rank2.pt`)" in error.message


MIXED: dict[str, tuple[str, Callable[[int], Any], str]] = {
    "step": ("step", lambda n: n, "`step` differs between ranks: 5 on rank 0 (`rank0.pt`) and 3 on rank 1"),
    "tensor": ("global_step", torch.tensor, "`global_step` differs between ranks: 5 on rank 0"),
    "inner": ("train_state", lambda n: {"epoch": 1, "step": n}, "`train_state.step` differs"),
    "scheduler": ("scheduler", lambda n: {"last_epoch": n, "_step_count": n + 1}, "`scheduler.last_epoch` differs"),
    "optimizer": (
        "optim",
        lambda n: {"state": {"w": {"step": torch.tensor(float(n))}}, "param_groups": [{"lr": 1.0, "params": ["w"]}]},
        "`optim.state.w.step` differs between ranks: 5 on rank 0 (`rank0.pt`) and 3 on rank 1 (`rank1.pt`)",
    ),
    "lr": (
        "optim",
        lambda n: {"state": {"w": {"step": torch.ones(())}}, "param_groups": [{"lr": n / 10, "params": ["w"]}]},
        "`optim.param_groups.0.lr` differs between ranks: 0.5 on rank 0",
    ),
}


@pytest.mark.parametrize("name", [*MIXED])
def test_files_of_two_saves_are_no_checkpoint(name: str, tmp_path: Path) -> None:
    key, of, said = MIXED[name]
    folder = save(tmp_path / "run", 2, lambda rank: {**sharded(2)(rank), key: of([5, 3][rank])})
    error = fault(folder)
    assert "the files are of two saves" in error.message and said in error.message
    assert "all files from one save" in str(error.hint) and "--exclude" not in str(error.hint)
    with pytest.raises(CorruptError, match="two saves"):
        convert(folder, tmp_path / "out.pt", to="torch", exclude=key + "*")


def test_what_ranks_count_for_themselves_is_kept_and_said(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        own = {"tokens_seen": 100 + rank, "dataloader": {"step": rank}, "best_loss": 0.5 + rank, "odd": {"step": rank}}
        return {**sharded(2)(rank), "step": 5, **own}

    found = read(save(tmp_path / "run", 2, state))
    tree = tree_of(found)
    assert tree["step"] == 5 and tree["tokens_seen"] == {"rank0": 100, "rank1": 101}
    assert any("kept for each: `tokens_seen`, `best_loss`, `odd.step`" in str(w) for w in found.warnings)


def test_what_differs_can_be_left_out(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        model: dict[str, Any] = {"w": cut(torch.arange(6.0), mesh(2), Shard(0)), "other": torch.ones(2)}
        return {"model": model | {f"layers.{i}.running_mean": torch.full((3,), 1.0 + rank) for i in range(4)}}

    folder = save(tmp_path / "ckpt", 2, state)
    with pytest.raises(CorruptError, match="differs between ranks") as caught:
        convert(str(folder), str(tmp_path / "out.pt"))
    flags = str(caught.value.hint).split("`--exclude '")[1:]
    assert len(flags) == 1
    with pytest.raises(CorruptError, match=r"layers\.1\.running_mean"):
        convert(str(folder), str(tmp_path / "out.pt"), exclude="model.layers.0.*")
    convert(str(folder), str(tmp_path / "out.pt"), exclude=flags[0].split("'")[0], check=True)
    found = torch.load(tmp_path / "out.pt")["model"]
    assert found.keys() == {"w", "other"}
    assert torch.equal(found["w"], torch.arange(6.0))


@pytest.mark.parametrize("case", ["optimizer", "many", "parameter", "replica", "all"])
def test_nobody_is_told_to_leave_out_what_two_saves_differ_in(case: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        odd, on = torch.full((3,), 1.0 + rank), mesh(2)
        model = {"w": WHOLE, "v": WHOLE + 1}
        optim = {"state": {"w": {"exp_avg": odd}}, "param_groups": [{"lr": 1.0, "params": ["w"]}]}
        return {
            "optimizer": lambda: {"model": {**model, "b": odd}, "optim": optim},
            "many": lambda: {"model": {**model, **{f"b{i}": odd for i in range(5)}}},
            "parameter": lambda: {"model": {**model, "norm.weight": odd}},
            "replica": lambda: {"model": {**model, "p": cut(odd, on, Replicate())}},
            "all": lambda: {"model": {"b": odd}},
        }[case]()

    hints = {str(error.hint) for error in read(save(tmp_path / "run", 2, state), sound=False).faults}
    assert hints == {"the files are not of one save: take all files from one save"}


def test_names_are_in_the_order_of_the_state(tmp_path: Path) -> None:
    first = {"model": {"w": WHOLE, **{f"b{i}": torch.ones(2) for i in range(30)}}}
    folder = save(tmp_path / "run", 2, lambda rank: first if rank == 0 else {"model": {"w": WHOLE}})
    found = read(folder, sound=False)
    assert "`model.b0`, `model.b1`, `model.b2` and 27 more" in found.faults[0].message
    assert any("`model.b0`, `model.b1`, `model.b2` and 27 more" in str(w) for w in found.warnings)


def test_a_hundred_tensors_that_differ_are_each_a_fault(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        differing = {f"b{i}": torch.full((1,), 1.0 + rank) for i in range(105)}
        return {"model": {"w": cut(torch.arange(6.0), mesh(2), Shard(0)), **differing}}

    folder = save(tmp_path / "ckpt", 2, state)
    damaged = [str(w) for w in inspect(folder).warnings if str(w).startswith("damaged: ")]
    assert len(damaged) == 2 and "100 tensors differ between ranks that should have the same: `model.b0`" in damaged[0]
    assert "`model.b2` and 97 more" in damaged[0] and "(`rank1.pt`)" in damaged[0]
    with pytest.raises(CorruptError, match="5 more tensors differ"):
        convert(str(folder), str(tmp_path / "out.pt"), exclude=[f"model.b{i}" for i in range(100)])


def test_an_optimizer_that_cannot_be_read_does_not_stop_the_model(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        # Two parameters of one size, one id: nobody can say which of them was trained.
        model = {name: chunked(torch.arange(12.0).reshape(6, 2), rank, 2) for name in ("a", "b")}
        groups = [{"lr": 0.1, "params": [0]}]
        raw = {"state": {0: {"exp_avg": torch.full((6,), 1.0 + rank)}}, "param_groups": groups}
        return {"model": model, "optim": raw, "step": 3}

    folder = save(tmp_path / "ckpt", 2, state)
    for flags in ({}, {"only": "optimizer"}, {"exclude": "step"}, {"to": "fsdp1"}):
        out = tmp_path / ("out" if "to" in flags else "out.pt")
        with pytest.raises(UsageError, match="more ways than one") as caught:
            convert(str(folder), str(out), **flags)  # type: ignore[arg-type]
        assert "`--drop optim`" in str(caught.value.hint)
    assert any("more ways than one" in str(text) for text in inspect(folder).warnings)
    assert show(str(folder), "model.a").shape == (6, 2)
    convert(str(folder), str(tmp_path / "out.pt"), drop="optim", check=True)
    found = torch.load(tmp_path / "out.pt")
    assert found["step"] == 3
    assert torch.equal(found["model"]["a"], torch.arange(12.0).reshape(6, 2))
    convert(str(folder), str(tmp_path / "fsdp1"), to="fsdp1", only="model")
    torch.save({"state": {"a": {"exp_avg": torch.ones(6, 2)}}, "param_groups": [{"params": ["a"]}]}, tmp_path / "o.pt")
    convert(str(folder), str(tmp_path / "both.pt"), optim_from=str(tmp_path / "o.pt"))
    assert torch.load(tmp_path / "both.pt")["optim"]["state"].keys() == {"a"}


@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Replicate(), Replicate())], ids=str)
def test_a_replica_that_differs(placements: Any, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        whole = WHOLE.clone()
        whole[12] += rank == 3
        return {"w": cut(whole, mesh(2, 2), *placements)}

    error = fault(save(tmp_path / "run", 4, state))
    assert "tensor `w` differs between ranks" in error.message and "rank 3 (`rank3.pt`)" in error.message


def test_equal_bytes_are_not_what_merges(tmp_path: Path) -> None:
    # All pieces are alike; only their placements say that they are four and not one.
    found = read(save(tmp_path / "run", 4, lambda r: {"w": cut(torch.ones(8, 2), mesh(4), Shard(0))}))
    assert_same(tree_of(found)["w"], torch.ones(8, 2))
    assert len(found.tensor(("w",)).chunks) == 4


def test_a_file_of_another_model(tmp_path: Path) -> None:
    states = [sharded(2), lambda rank: {"model": {"v": cut(WHOLE, mesh(2), Shard(0)), "b": torch.arange(3)}}]
    messages = [e.message for e in read(save(tmp_path / "run", 2, lambda r: states[r](r)), sound=False).faults]
    assert any("`rank1.pt`: rank 1 has no `model.w`" in m for m in messages)
    assert any("`rank0.pt`: rank 0 has no `model.v`" in m for m in messages)


def test_of_three_files_the_odd_one_is_named(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"model": {"v" if rank == 1 else "w": cut(WHOLE, mesh(3), Shard(0))}}

    with pytest.raises(CorruptError, match=r"`rank1.pt`: rank 1 has `model.v`, which other ranks do not have"):
        read(save(tmp_path / "run", 3, state))


def test_a_pattern_over_two_checkpoints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, 2, sharded(2))
    with pytest.raises(ReadError, match=r"a/rank0.pt` and `.*b/rank0.pt` are both of rank 0"):
        source_of(f"{tmp_path}/*/rank*.pt")


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_file_that_is_damaged(damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, sharded(2))
    data = (folder / "rank1.pt").read_bytes()
    (folder / "rank1.pt").write_bytes({"cut": data[: len(data) // 2], "empty": b"", "text": b"x" * 900}[damage])
    with pytest.raises((CorruptError, ReadError), match=r"rank1\.pt"):
        read(folder)


@pytest.mark.parametrize("cut_off", [0, 1])
def test_the_rest_is_shown_of_a_set_with_a_file_that_was_cut(cut_off: int, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 3, sharded(3))
    data = (folder / f"rank{cut_off}.pt").read_bytes()
    (folder / f"rank{cut_off}.pt").write_bytes(data[: len(data) // 2])
    found = inspect(folder)
    assert {"model.w", "model.b"} <= {tensor.name for tensor in found.tensors}
    assert len(found.faults) == 1 and f"rank{cut_off}.pt" in found.faults[0].message
    assert f"rank{cut_off}.pt" in fault(folder).message
    for rank in range(3):
        (folder / f"rank{rank}.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError, match=r"rank0\.pt"):
        inspect(folder)


# What ranks have in common, and what they have not --------------------------------------------------------------------


def test_what_is_each_ranks_own(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        rng = {"torch": torch.full((4,), rank), "cuda": [], "python": (3, (rank, 1), None)}
        return {
            "model": {"w": cut(WHOLE, mesh(3), Shard(0))},
            "rng": rng,
            "step": 7,
            "note": "same",
            "host": f"n{rank}",
        }

    tree = tree_of(read(save(tmp_path / "run", 3, state)))
    assert list(tree) == ["model", "rng", "step", "note", "host"]
    assert (tree["step"], tree["note"], tree["host"]) == (7, "same", {f"rank{r}": f"n{r}" for r in range(3)})
    for rank in range(3):
        own = tree["rng"][f"rank{rank}"]
        assert torch.equal(own["torch"], torch.full((4,), rank))
        assert own["python"] == (3, (rank, 1), None) and own["cuda"] == []


def test_lists_and_tensors_in_tuples_are_kept_for_each_rank(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"model": {"w": WHOLE}, "rng": [torch.full((4,), rank), 5], "odd": (torch.full((2,), rank), "x")}

    found = read(save(tmp_path / "run", 2, state))
    tree = tree_of(found)
    assert [tree["rng"][f"rank{r}"][0].tolist() for r in range(2)] == [[0] * 4, [1] * 4]
    assert tree["rng"]["rank1"][1] == 5
    links = [tree["odd"][f"rank{r}"][0] for r in range(2)]
    assert [elements(found, found.tensor(link.path)).tolist() for link in links] == [[0, 0], [1, 1]]


def test_what_some_ranks_have(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        first = {"optim": {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, "args": {"lr": 1}}
        rest: dict[str, Any] = {"optim": {}}
        return {"model": {"w": cut(WHOLE, mesh(3), Shard(0))}, **(first if rank == 1 else rest)}

    found = read(save(tmp_path / "run", 3, state))
    tree = tree_of(found)
    assert tree["optim"]["state"][0]["m"].tolist() == [1, 1] and tree["args"] == {"lr": 1}
    assert any("in the files of some ranks only" in str(w) for w in found.warnings)


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_state_of_one_rank_only(full: int, tmp_path: Path) -> None:
    whole = {
        "model": {"w": WHOLE, "b": torch.ones(2)},
        "optim": {"state": {"w": {"exp_avg": WHOLE}}, "param_groups": [{"lr": 1.0, "params": ["w"]}]},
        "step": 5,
    }
    hollow: dict[str, Any] = {"model": {}, "optim": {}, "step": 5}
    folder = save(tmp_path / "run", 3, lambda rank: whole if rank == full else hollow)
    others = rank_ranges({0, 1, 2} - {full})
    warned = [w for w in read(folder).warnings if f"is empty on {others}, and taken from `rank{full}.pt`" in str(w)]
    assert [str(w).split()[0] for w in warned] == ["`model`", "`optim`"]
    assert not any("some ranks only" in str(w) for w in read(folder).warnings)
    convert(folder, tmp_path / "out.pt", to="torch")
    assert_same(torch.load(tmp_path / "out.pt"), whole)


def test_what_differs_below_an_empty_model_is_a_fault(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 3, lambda rank: {"model": {"w": WHOLE + rank} if rank else {}, "step": 5})
    assert "tensor `model.w` differs between ranks" in fault(folder).message


def test_an_empty_model_beside_a_sharded_one_is_a_fault(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, lambda rank: sharded(2)(0) if rank == 0 else {"model": {}, "rng": {}})
    assert "has no `model.w`" in fault(folder).message


def test_ties_stay(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        w, b = cut(WHOLE, mesh(2), Shard(0)), torch.arange(3)
        return {"model": {"a": w, "b": b, "c": w, "d": b, "e": cut(WHOLE, mesh(2), Shard(0))}}

    found = read(save(tmp_path / "run", 2, state))
    assert find_aliases(found.tensors) == {("model", "c"): ("model", "a"), ("model", "d"): ("model", "b")}


def test_orders_strides_and_views(tmp_path: Path) -> None:
    big = torch.arange(40.0).reshape(4, 10)

    def state(rank: int) -> Any:
        turned = cut(torch.empty(10, 4), mesh(2), Shard(0))
        turned._local_tensor = big.chunk(2, dim=1)[rank].clone().t()
        part = big[:, 2:5]
        return {
            "z": turned,
            "a": part,
            "k": cut(torch.ones(1), mesh(2), Shard(0)),
            "none": cut(big[:0], mesh(2), Shard(0)),
        }

    found = read(save(tmp_path / "run", 2, state))
    assert list(found.entries) == [("z",), ("a",), ("k",), ("none",)]
    tree = tree_of(found)
    assert torch.equal(tree["z"], big.t()) and torch.equal(tree["a"], big[:, 2:5]) and tree["k"].tolist() == [1]
    assert tree["none"].shape == (0, 10)


def test_values_without_checksums_are_compared_by_reading(tmp_path: Path) -> None:
    def legacy(folder: str, values: list[float]) -> Path:
        (tmp_path / folder).mkdir()
        for rank, value in enumerate(values):
            state = {"model": {"w": torch.full((5,), value), "v": torch.full((4, 4), value).t()}}
            torch.save(state, tmp_path / folder / f"rank{rank}.pt", _use_new_zipfile_serialization=False)
        return tmp_path / folder

    assert_same(tree_of(read(legacy("same", [2.0, 2.0])))["model"]["v"], torch.full((4, 4), 2.0))
    assert "`model.w` differs" in fault(legacy("other", [2.0, 3.0])).message


def test_pipeline_stages_have_their_own_tensors(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        stage = mesh(2, 2)["b"]
        return {"model": {f"layers.{rank // 2}.w": cut(WHOLE + rank // 2, stage, Shard(0))}}

    tree = tree_of(read(save(tmp_path / "run", 4, state)))
    assert torch.equal(tree["model"]["layers.0.w"], WHOLE) and torch.equal(tree["model"]["layers.1.w"], WHOLE + 1)


def test_a_partial_tensor_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, lambda r: {"w": DTensor.from_local(WHOLE, mesh(2), [Partial()])})
    with pytest.raises(ReadError, match=r"rank0\.pt.*tensor `w`: a partial DTensor"):
        read(folder)


def test_shards_of_another_class_stop_only_what_uses_them(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        local = Codes(torch.full((2, 3), rank, dtype=torch.uint8), torch.ones(2))
        moment = cut(torch.zeros(4, 3), mesh(2), Shard(0))
        moment._local_tensor = local
        moments = {"state": {0: {"exp_avg": moment, "step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
        return {"model": {"w": cut(WHOLE, mesh(2), Shard(0))}, "optim": moments}

    folder = save(tmp_path / "run", 2, state)
    with pytest.raises(ReadError, match=r"tensor `optim\.state\.0\.exp_avg`: its local tensor is of class .*Codes"):
        convert(folder, tmp_path / "all.pt")
    convert(folder, tmp_path / "model.pt", drop="optimizer")
    assert_same(torch.load(tmp_path / "model.pt"), {"model": {"w": WHOLE}})
    report = verify(folder)
    assert report.verdict == "unread" and report.exit_code == 3
    assert report.message.endswith("cannot be read in full; what could be read is not damaged")


def test_dtensors_stay_dtensors_of_their_mesh(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 2, lambda r: {"model": {"w": cut(WHOLE, mesh(2), Shard(0))}})
    reshard(folder, tmp_path / "w3", to_world=3)
    convert(folder, tmp_path / "same", producer="same")
    for written, world in ((tmp_path / "w3", 3), (tmp_path / "same", 2)):
        with as_rank(1, world):
            tensor = torch.load(written / "rank1.pt", weights_only=False)["model"]["w"]
            assert tensor.device_mesh == mesh(world) and tensor.placements == (Shard(0),)
            assert torch.equal(tensor.to_local(), cut(WHOLE, mesh(world), Shard(0)).to_local())
    convert(folder, tmp_path / "fsdp1", to="fsdp1")
    assert inspect(tmp_path / "fsdp1").facts["layout"] == "FSDP1 ShardedTensor"


def test_dtensors_of_a_grid_are_written_over_one_dimension(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 4, lambda r: {"model": {"w": cut(WHOLE, mesh(2, 2), Replicate(), Shard(0))}})
    result = reshard(folder, tmp_path / "out", to_world=4)
    assert any("over a mesh of one dimension" in str(note) for note in result.notes)


def test_no_warning_is_lost() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(path_of("rank/fsdp1_w2"))
