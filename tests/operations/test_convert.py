"""What the commands do, as functions: every sample into every format and back, every keyword, every figure."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import threading
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import same
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.checkpoints import bits, within
from support.folders import contents
from support.upstream_readers import plain
from support.upstream_samples import original, path_of, reference
from support.work import Calls

import ckpttool
from ckpttool.errors import CkptError, CorruptError, LossError, ReadError, StorageError, UsageError
from ckpttool.storage.files import Pool

FULL, MODEL, DDP = (path_of(name) for name in ("torch/full", "torch/model", "torch/ddp"))
SHARDED = path_of("dcp/fsdp2_w4")


def assert_same(found: Any, expected: Any, *, ordered: bool = True) -> None:
    same.assert_same(plain(found, ordered=ordered), plain(expected, ordered=ordered))


# Every sample into every format and back ------------------------------------------------------------------------------


def test_patterns_match_the_names_of_the_source(tmp_path: Path) -> None:
    of_source = [t.name for t in ckpttool.inspect(FULL).tensors if t.part.kind == "model"]
    for pattern in ("model.norm.weight", "norm.weight"):
        done = ckpttool.convert(FULL, tmp_path / "x.safetensors", only="model", tensors=pattern, dry_run=True)
        assert done.tensor_count == 1, pattern
    done = ckpttool.convert(FULL, tmp_path / "x.safetensors", only="model", exclude="model.layers.*", dry_run=True)
    left = {name for name in done.dropped if name in of_source}
    assert left == {name for name in of_source if name.startswith("model.layers.")}
    exported = ckpttool.export(FULL, tmp_path / "x", exclude="model.layers.*", dry_run=True)
    assert left == {name for name in exported.dropped if name in of_source}
    with pytest.raises(UsageError, match='`tensors="absent"` matches nothing') as caught:
        ckpttool.convert(FULL, tmp_path / "x.safetensors", only="model", tensors="absent", dry_run=True)
    (example,) = re.findall(r"names here are like `(.*?)`", str(caught.value.hint))
    assert example in of_source
    with pytest.raises(UsageError, match=r"matches nothing") as caught:
        ckpttool.convert(FULL, tmp_path / "x.safetensors", only="model", tensors="norm.weigth", dry_run=True)
    assert "did you mean `model.norm.weight`" in str(caught.value.hint)


@pytest.mark.parametrize("sink", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize("name", ["torch/full", "torch/layouts", "dcp/fsdp2_w4", "dcp/zstd_w2", "safetensors/indexed"])
def test_the_same_source_gives_the_same_bytes(tmp_path: Path, name: str, sink: str) -> None:
    outputs = []
    for i, (threads, memory) in enumerate([(1, None), (4, 48 << 20), (2, None)]):
        folder = tmp_path / str(i)
        ckpttool.convert(path_of(name), str(folder / "out"), to=sink, threads=threads, max_memory=memory)
        outputs.append(contents(folder))
    assert outputs[0] == outputs[1] == outputs[2]


# Keywords -------------------------------------------------------------------------------------------------------------


def converted(tmp_path: Path, src: str = FULL, **options: Any) -> Any:
    """What torch reads of a conversion to torch."""
    out = tmp_path / "out.pt"
    ckpttool.convert(src, str(out), overwrite=True, **options)
    return torch.load(out, weights_only=False)


def test_only_and_drop(tmp_path: Path) -> None:
    saved = original("torch/full")
    assert_same(converted(tmp_path, only=["model"]), saved["model"])
    assert_same(converted(tmp_path, only=["optim"]), saved["optim"])
    two = converted(tmp_path, only=["model", "scheduler"])
    assert_same(two, {key: saved[key] for key in ("model", "scheduler")})
    rest = converted(tmp_path, drop=["optimizer", "rng"])
    assert_same(rest, {key: value for key, value in saved.items() if key not in ("optim", "rng")})
    with pytest.raises(UsageError, match="there is no part `dataloader`"):
        converted(tmp_path, only=["dataloader"])
    with pytest.raises(UsageError, match="nothing is left to write"):
        converted(tmp_path, only=["model"], drop=["model"])
    for pattern in ({"tensors": ["w"]}, {"exclude": ["w"]}):
        with pytest.raises(UsageError, match="nothing is left to write"):
            converted(tmp_path, only=["model"], drop=["model"], **pattern)


def test_tensors_and_exclude(tmp_path: Path) -> None:
    saved = original("torch/full")["model"]
    found = converted(tmp_path, only=["model"], tensors=["*.weight"], exclude=["*.norm.*", r"re:layers\.1\..*"])
    assert_same(found, type(found)((k, v) for k, v in saved.items() if k.endswith(".weight") and ".norm." not in k
                                   and "layers.1." not in k))  # fmt: skip
    for flag in ("tensors", "exclude"):
        with pytest.raises(UsageError, match=rf'`{flag}="nothing\*"` matches nothing'):
            converted(tmp_path, only=["model"], **{flag: ["nothing*"]})
    with pytest.raises(UsageError, match="nothing is left to write"):
        converted(tmp_path, only=["model"], exclude=["*"])


def test_a_tie_that_the_format_does_not_keep_is_counted_and_said(tmp_path: Path) -> None:
    """safetensors reserves the name `format` in the metadata that lists second names of tied tensors."""
    weight = torch.arange(6.0)
    torch.save({"a": weight, "format": weight}, tmp_path / "tied.pt")
    result = ckpttool.convert(tmp_path / "tied.pt", tmp_path / "tied.safetensors")
    assert (result.ties, result.payload_bytes, result.checked_bytes + result.unchecked_bytes) == ([], 48, 48)
    assert result.notes == ["stored separately, not tied: `format`"]
    assert safetensors.torch.load_file(tmp_path / "tied.safetensors").keys() == {"a", "format"}


def test_tied_tensors_stay_tied_and_outlive_each_other(tmp_path: Path) -> None:
    found = converted(tmp_path, only=["model"])
    assert found["embed.weight"].data_ptr() == found["lm_head.weight"].data_ptr()
    alone = converted(tmp_path, only=["model"], exclude=["*embed.weight"])
    assert torch.equal(alone["lm_head.weight"], found["embed.weight"])


def test_rename(tmp_path: Path) -> None:
    saved = original("torch/full")
    found = converted(tmp_path, rename=["model.layers=model.h", "step=global_step", r"re:(.*)\.exp_avg=\1.m"])
    assert list(found["model"]) == [k.replace("layers.", "h.") for k in saved["model"]]
    assert found["global_step"] == saved["step"]
    assert list(found["optim"]["state"]) == list(saved["optim"]["state"])
    assert torch.equal(found["optim"]["state"][0]["m"], saved["optim"]["state"][0]["exp_avg"])
    with pytest.raises(UsageError, match="would both be called"):
        converted(tmp_path, rename=["model.embed.weight=model.norm.weight"])


def test_the_optimizer_of_a_dcp_checkpoint_follows(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("model.layers=model.h  # as in GPT-2\n")
    found = converted(tmp_path, SHARDED, rename=f"@{tmp_path}/rules")
    names = [name for name in found["model"] if name.startswith("h.")]
    assert names and not any("layers" in name for name in (*found["model"], *found["optim"]["state"]))
    assert set(names) & set(found["optim"]["state"])
    assert set(found["optim"]["state"]) <= {p for g in found["optim"]["param_groups"] for p in g["params"]}


def test_strip_wrappers(tmp_path: Path) -> None:
    assert_same(converted(tmp_path, DDP, strip_wrappers=True), reference("torch/ddp"), ordered=False)


def test_strip_prefix(tmp_path: Path) -> None:
    expected = {k.removeprefix("module."): v for k, v in original("torch/ddp").items()}
    for prefix in ("module", "module."):
        assert_same(converted(tmp_path, DDP, strip_prefix=prefix), expected, ordered=False)
    with pytest.raises(UsageError, match="no tensor of a model has this prefix"):
        converted(tmp_path, DDP, strip_prefix="modul")


def test_dtype(tmp_path: Path) -> None:
    saved = original("torch/full")
    found = converted(tmp_path, dtype=torch.bfloat16, check=True)
    assert_same(found["model"], type(saved["model"])(
        (k, v.bfloat16() if v.is_floating_point() else v) for k, v in saved["model"].items()))  # fmt: skip
    assert_same(found["optim"], saved["optim"])
    found = converted(tmp_path, dtype=["*.exp_avg=float8_e4m3fn", "model.embed.weight=float64"], check=True)
    state = saved["optim"]["state"][0]
    assert np.array_equal(bits(found["optim"]["state"][0]["exp_avg"]), bits(state["exp_avg"].to(torch.float8_e4m3fn)))
    assert torch.equal(found["model"]["embed.weight"], saved["model"]["embed.weight"].double())
    # The tied head was not named: it stays as it was, and needs bytes of its own now.
    assert_same(found["model"]["lm_head.weight"], saved["model"]["lm_head.weight"])


def test_max_shard_size(tmp_path: Path) -> None:
    made = ckpttool.convert(MODEL, str(tmp_path / "out"), to="safetensors", max_shard_size=2000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        part = safetensors.torch.load_file(path)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 2000
        assert {index["weight_map"][name] for name in part} == {path.name}
        found |= part
    saved = original("torch/model")
    assert all(np.array_equal(bits(t), bits(saved[name])) for name, t in found.items())
    assert set(saved) - set(found) == {name for name, _ in made.ties}
    with pytest.raises(UsageError, match='cannot be used with `to="torch"`'):
        ckpttool.convert(MODEL, str(tmp_path / "x.pt"), max_shard_size=2000)
    with pytest.raises(UsageError, match="is one file"):
        ckpttool.convert(MODEL, str(tmp_path / "x.safetensors"), max_shard_size=2000)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_to_world(tmp_path: Path, ranks: int) -> None:
    ckpttool.convert(FULL, str(tmp_path / "out"), to="dcp", to_world=ranks, check=True)
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    split = 0
    for name, tensor in original("torch/full")["model"].items():
        found = [tensor[within((tuple(c.offsets), tuple(c.sizes)))] for c in stored[f"model.{name}"].chunks]
        assert all(map(torch.equal, found, tensor.chunk(ranks) if len(found) > 1 else [tensor]))
        split += len(found) > 1
    assert split > 5 or ranks == 1
    with pytest.raises(UsageError, match="a number of ranks"):
        ckpttool.convert(FULL, str(tmp_path / "x"), to="dcp", to_world=0)
    with pytest.raises(UsageError, match='cannot be used with `to="torch"`'):
        ckpttool.convert(FULL, str(tmp_path / "x"), to="torch", to_world=2)


def test_parts_from_elsewhere(tmp_path: Path) -> None:
    saved, other = original("torch/full"), original("dcp/fsdp2_w4")
    found = converted(tmp_path, model_from=SHARDED, check=True)
    assert_same(found["model"], other["model"], ordered=False)
    assert_same({k: v for k, v in found.items() if k != "model"}, {k: v for k, v in saved.items() if k != "model"})
    found = converted(tmp_path, optim_from=SHARDED, model_from=SHARDED, check=True)
    assert_same(found["optim"], other["optim"], ordered=False)
    # A bare model gets a key when something comes beside it.
    found = converted(tmp_path, MODEL, optim_from=FULL, check=True)
    assert_same(found["optim"], saved["optim"])
    assert_same(found["model"], original("torch/model"), ordered=False)
    with pytest.raises(UsageError, match="has no part of kind optimizer, and one is needed"):
        converted(tmp_path, optim_from=MODEL)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_part_from_elsewhere_beside_parameters_at_the_root(tmp_path: Path, kind: str) -> None:
    def optimizer(value: float) -> dict[str, Any]:
        state = {name: {"exp_avg": torch.full((2,), value)} for name in "wb"}
        return {"state": state, "param_groups": [{"params": ["w", "b"]}]}

    mine: dict[str, Any] = {"w": torch.zeros(2), "b": torch.zeros(2), "optimizer": optimizer(0), "step": 3}
    other = {"net": {"w": torch.ones(2)}, "opt": optimizer(1)}
    torch.save(mine, tmp_path / "mine.pt")
    torch.save(other, tmp_path / "other.pt")
    from_other = {f"{kind}_from": str(tmp_path / "other.pt")}
    found = converted(tmp_path, str(tmp_path / "mine.pt"), check=True, **from_other)
    model = other["net"] if kind == "model" else {"w": mine["w"], "b": mine["b"]}
    optim = other["opt"] if kind == "optim" else mine["optimizer"]
    assert_same(found, {"model": model, "optimizer": optim, "step": 3}, ordered=False)
    made = ckpttool.convert(str(tmp_path / "mine.pt"), str(tmp_path / "again.pt"), **from_other)
    assert made.dropped == (["w", "b"] if kind == "model" else [])
    assert f"{'model' if kind == 'model' else 'optimizer'} taken from `{tmp_path / 'other.pt'}`" in made.notes


def test_links_follow_a_part_from_elsewhere(tmp_path: Path) -> None:
    extra = (torch.ones(2), {"deep": torch.zeros(3)})
    torch.save({"model": {"w": torch.zeros(1)}, "step": 3}, tmp_path / "mine.pt")
    torch.save({"net": {"w": torch.ones(1), "extra": extra}, "step": 4}, tmp_path / "other.pt")
    found = converted(tmp_path, str(tmp_path / "mine.pt"), model_from=str(tmp_path / "other.pt"), check=True)
    assert_same(found, {"model": {"w": torch.ones(1), "extra": extra}, "step": 3})


def test_a_list_with_something_left_out(tmp_path: Path) -> None:
    layers = [torch.full((2,), float(i)) for i in range(3)]
    torch.save({"layers": layers}, tmp_path / "in.pt")
    found = converted(tmp_path, str(tmp_path / "in.pt"), exclude=["layers.1"], check=True)
    assert_same(found, {"layers": [layers[0], layers[2]]})


def test_a_part_that_is_one_value(tmp_path: Path) -> None:
    assert_same(converted(tmp_path, only=["progress"]), {"step": original("torch/full")["step"]})


def test_the_format_is_told_by_the_suffix(tmp_path: Path) -> None:
    for name, told in (("a.pt", "torch"), ("a.pth", "torch"), ("a.safetensors", "safetensors")):
        assert ckpttool.convert(MODEL, str(tmp_path / name)).format == told
    with pytest.raises(UsageError, match="cannot infer the output format from"):
        ckpttool.convert(MODEL, str(tmp_path / "a"))
    with pytest.raises(UsageError, match="there is no format `torhc`") as caught:
        ckpttool.convert(MODEL, str(tmp_path / "a"), to="torhc")
    assert caught.value.hint == "did you mean `torch`?"


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = ckpttool.convert(FULL, str(tmp_path / "a.pt"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (made.payload_bytes, made.payload_bytes)
    assert seen == sorted(seen)


def test_max_memory_has_a_floor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="less than the 48MiB that are always needed"):
        ckpttool.convert(FULL, str(tmp_path / "a.pt"), max_memory=1 << 20)


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
def test_check_finds_a_bit_that_was_written_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    write, done = Pool.write_all, []

    def wrong(pool: Pool, path: str, pieces: Iterable[tuple[int, bytes | memoryview]]) -> None:
        pieces = [*pieces]
        offset, data = pieces[0]
        if not done and threading.current_thread() is not threading.main_thread():
            done.append(True)
            pieces[0] = offset, bytes([data[0] ^ 1]) + bytes(data[1:])
        write(pool, path, pieces)

    monkeypatch.setattr(Pool, "write_all", wrong)
    with pytest.raises(CorruptError, match="was not written as it was read"):
        ckpttool.convert(MODEL, str(tmp_path / "out"), to=to, check=True)
    assert done
    assert os.listdir(tmp_path) == []


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match=r"needs .* kB, but 1.00 kB are free"):
        ckpttool.convert(FULL, str(tmp_path / "out.pt"))
    assert os.listdir(tmp_path) == []


def test_swapped_paths_are_told(tmp_path: Path) -> None:
    """Whatever DST would be written as, the error is about SRC, which is not there."""
    for verb in (ckpttool.convert, ckpttool.reshard, ckpttool.export, ckpttool.repair):
        with pytest.raises(ReadError, match=r"`.*out.pt`: no such file or directory, but `.*` exists") as caught:
            verb(tmp_path / "out.pt", FULL, **({"to_world": 2} if verb is ckpttool.reshard else {}))
        assert "swapped" in str(caught.value.hint)


def test_directories_that_are_made_are_told(tmp_path: Path) -> None:
    planned = ckpttool.convert(FULL, tmp_path / "a" / "b" / "out.pt", dry_run=True)
    assert f"would create the directory `{tmp_path / 'a' / 'b'}`" in planned.notes and os.listdir(tmp_path) == []
    made = ckpttool.convert(FULL, tmp_path / "a" / "b" / "out.pt")
    assert f"created the directory `{tmp_path / 'a' / 'b'}`" in made.notes


def test_what_one_file_of_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(LossError, match="would be lost") as caught:
        ckpttool.convert(FULL, str(tmp_path / "out.safetensors"))
    assert "step" in caught.value.facts["lost"]
    assert "--only model" in str(caught.value.hint)
    assert os.listdir(tmp_path) == []


def test_what_cannot_hold_a_state_is_not_recommended_for_it(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(LossError, match="a DCP state is a dict") as caught:
        ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "out"), to="dcp")
    assert "`--to torch` keeps everything" in str(caught.value.hint) and "dcp" not in str(caught.value.hint)


# Figures --------------------------------------------------------------------------------------------------------------


SHOWN = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "int64", "int16", "uint8",
         "complex64")  # fmt: skip


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in SHOWN], ids=SHOWN)
@pytest.mark.parametrize("tile", [64, 8 << 20])
def test_show_is_what_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tile: int
) -> None:
    monkeypatch.setattr("ckpttool.transfer.read.TILE", tile)
    real = dtype if dtype.is_complex or dtype.is_floating_point else torch.float32
    values = (torch.randn((13, 17), dtype=torch.complex64 if dtype.is_complex else None) * 20).to(real).to(dtype)
    odd = dtype.is_floating_point and dtype not in (torch.float8_e4m3fn,)
    if odd:
        flat = values.view(-1).float()
        flat[3], flat[50], flat[51], flat[52] = float("nan"), float("inf"), float("-inf"), float("nan")
        values = flat.to(dtype).view(13, 17)
    torch.save({"m": values.t()}, tmp_path / "a.pt")
    shown = ckpttool.show(str(tmp_path / "a.pt"), "m")
    wide = values.t().to(torch.complex128).abs() if dtype.is_complex else values.t().double()
    finite = wide[torch.isfinite(wide)]
    assert (shown.name, shown.dtype, shown.shape) == ("m", str(dtype).removeprefix("torch."), (17, 13))
    assert (shown.nans, shown.infs) == ((2, 2) if odd else (0, 0))
    assert (shown.min, shown.max) == pytest.approx((finite.min().item(), finite.max().item()))
    assert (shown.mean, shown.norm) == pytest.approx((finite.mean().item(), finite.norm().item()))
    first = values.t().reshape(-1)[:8].to(torch.complex128 if dtype.is_complex else torch.float64).tolist()
    assert shown.values == pytest.approx(first, nan_ok=True)


@pytest.mark.filterwarnings("error")
def test_show_of_numbers_whose_squares_are_too_large(tmp_path: Path) -> None:
    values = torch.tensor([1e300, -1e300, 3e200], dtype=torch.float64)
    torch.save({"m": values}, tmp_path / "a.pt")
    shown = ckpttool.show(str(tmp_path / "a.pt"), "m")
    assert shown.norm == pytest.approx(1e300 * math.sqrt(2))
    assert shown.mean == pytest.approx(values.mean().item())


@pytest.mark.parametrize("name", ["uint4", "int4", "uint1", "int7"])
def test_show_has_no_figures_of_parts_of_a_byte(tmp_path: Path, name: str) -> None:
    # torch reads these, but its `save` knows no storage class for them.
    torch.save({"m": torch.ones(6, dtype=torch.uint16)}, tmp_path / "wide.pt")
    with zipfile.ZipFile(tmp_path / "wide.pt") as wide, zipfile.ZipFile(tmp_path / "a.pt", "w") as made:
        for item in wide.namelist():
            made.writestr(item, wide.read(item).replace(b"torch\nuint16\n", f"torch\n{name}\n".encode()))
    assert torch.load(tmp_path / "a.pt")["m"].dtype == getattr(torch, name)
    shown = ckpttool.show(str(tmp_path / "a.pt"), "m")
    assert (shown.dtype, shown.shape, shown.nbytes) == (name, (6,), 6)
    assert (shown.values, shown.min, shown.mean, shown.nans) == ([], None, None, None)


def test_show_says_where_a_tensor_lies() -> None:
    name, shown = "model.embed.weight", ckpttool.show(SHARDED, "model.embed.weight")
    stored = dcp.FileSystemReader(SHARDED).read_metadata().state_dict_metadata[name]
    expected = [(i, f"__{i}_0.distcp", tuple(c.offsets), tuple(c.sizes)) for i, c in enumerate(stored.chunks)]
    assert shown.chunks == expected
    saved = original("dcp/fsdp2_w4")["model"]["embed.weight"].double()
    assert shown.norm == pytest.approx(saved.norm().item())
    assert shown.nbytes == saved.numel() * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["torch/dtypes", "torch/quantized", "torch/layouts"])
def test_show_has_something_to_say_of_every_tensor(name: str) -> None:
    for tensor in ckpttool.inspect(path_of(name)).tensors:
        shown = ckpttool.show(path_of(name), tensor.name)
        assert shown.shape == tensor.shape
        assert shown.mean is None or math.isfinite(shown.mean)


@pytest.mark.parametrize("name", ["torch/full", "dcp/fsdp2_w4"])
def test_show_finds_a_flipped_bit(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "ckpt"
    shutil.copytree(path_of(name), copy) if Path(path_of(name)).is_dir() else shutil.copyfile(path_of(name), copy)
    with ckpttool.open(copy) as source:
        tensor = next(t for t in source.catalogue.tensors if t.name == "model.layers.0.up.weight")
        extent = source._source.resolve(tensor, tensor.chunks[-1])
        file = Path(source.catalogue.files[extent.file].location)
    assert ckpttool.show(copy, tensor.name).nans == 0
    data = bytearray(file.read_bytes())
    data[extent.offset + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"tensor `model.layers.0.up.weight`: bytes .* have CRC"):
        ckpttool.show(copy, tensor.name)


def test_show_knows_the_nearest_names() -> None:
    with pytest.raises(UsageError, match=r"there is no tensor `embed\.weight`") as caught:
        ckpttool.show(FULL, "embed.weight")
    assert "`model.embed.weight`" in str(caught.value.hint)


def test_inspect_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = Pool.read_into

    def read(self: Pool, file: Any, offset: int, buffer: Any) -> None:
        assert memoryview(buffer).nbytes <= 8, "only a counter that is a tensor may be read"
        read_into(self, file, offset, buffer)

    monkeypatch.setattr(Pool, "read_into", read)
    for name in ("torch/full", "dcp/fsdp2_w4", "safetensors/indexed"):
        catalogue = ckpttool.inspect(path_of(name))
        assert list(catalogue.tensors)
        assert all(entry.part.kind for entry in catalogue.entries.values())


def test_errors_travel_between_processes() -> None:
    error = CorruptError("`a`: wrong", hint="try b", file="a", found=1)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, CkptError)
    assert (type(again), again.message, again.hint, again.facts) == (CorruptError, "`a`: wrong", "try b", error.facts)


def test_remarks_that_have_no_place_are_told(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt", "title": "x"})
    for to, told in (("torch", True), ("dcp", True), ("safetensors", False)):
        notes = ckpttool.convert(tmp_path / "a.safetensors", tmp_path / f"to-{to}", to=to).notes
        assert [("`title`" in note, "`format`" in note) for note in notes] == [(True, False)] * told


def test_attributes_of_a_state_dict_that_say_something_are_told(tmp_path: Path) -> None:
    for name, module in (("plain", torch.nn.Linear(2, 2)), ("norm", torch.nn.BatchNorm1d(2))):
        torch.save(module.state_dict(), tmp_path / f"{name}.pt")
    notes = {
        name: ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors").notes
        for name in ("plain", "norm")
    }
    assert notes["plain"] == []  # every module is of version 1, which is what it is without them
    assert "_metadata" in notes["norm"][0]
    assert ckpttool.convert(tmp_path / "norm.pt", tmp_path / "again.pt").notes == []


def test_values_too_large_for_their_new_dtype_are_counted(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.tensor([1e5, 1.0, -7e4]), "b": torch.ones(3), "c": torch.tensor([math.inf])}, tmp_path / "s.pt"
    )
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64"):
        made = ckpttool.convert(tmp_path / "s.pt", tmp_path / f"{dtype}.pt", dtype=f"*={dtype}")
        expected = torch.load(tmp_path / "s.pt")["a"].to(getattr(torch, dtype)).float()
        n = int((~expected.isfinite()).sum())
        assert n == 2 or dtype != "float16"
        counted = f"{n} values of 1 tensors"
        if dtype == "float8_e4m3fn":
            # Without an infinity: what is larger becomes the largest number, and so does infinity.
            assert expected.tolist() == [448, 1, -448]
            counted = "3 values of 2 tensors"
        assert [note.startswith(counted) for note in made.notes] == [True] * (n > 0 or dtype == "float8_e4m3fn")


def test_arguments_as_people_pass_them_from_python(tmp_path: Path) -> None:
    made = ckpttool.convert(FULL, tmp_path / "out", to="safetensors", only="model", max_shard_size="2kB")
    assert len(made.files) > 2
    with pytest.raises(UsageError, match='`max_shard_size="many"` is not a size'):
        ckpttool.convert(FULL, tmp_path / "other", to="safetensors", max_shard_size="many")


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("out.safetensors", {"to": "torch"}, "out.pt`; `ckpttool convert --to safetensors` writes such a file"),
        ("out.gguf", {"to": "torch"}, "out.pt`; `convert_hf_to_gguf.py` of llama.cpp makes one"),
        ("out.pt", {"to": "dcp"}, "out.pt/` to keep the name; `ckpttool convert --to torch` writes such a file"),
        ("out.ckpt", {"to": "safetensors"}, "out.ckpt/` to keep the name"),
        ("out.safetensors", {"producer": "trainer"}, "out`, or `"),
    ],
)
def test_a_name_with_the_suffix_of_another_format_is_refused(
    name: str, options: dict[str, str], hint: str, tmp_path: Path
) -> None:
    """By the suffix, others choose how to read a file: a pickle called `x.safetensors` was written with a warning."""
    with pytest.raises(UsageError, match="has the suffix of another kind of file") as raised:
        ckpttool.convert(FULL, tmp_path / name, **options)
    assert hint in str(raised.value.hint) and list(tmp_path.iterdir()) == []


def test_a_name_with_the_suffix_of_the_source_is_not_refused(tmp_path: Path) -> None:
    """Scripts of NeRF call what torch.save writes `100000.tar`, and read it by that name."""
    (tmp_path / "100000.tar").write_bytes(Path(FULL).read_bytes())
    for name, options in (("same.tar", {"producer": "same"}), ("torch.tar", {"to": "torch"})):
        ckpttool.convert(tmp_path / "100000.tar", tmp_path / name, **options)
        assert ckpttool.diff(FULL, tmp_path / name).same
    with pytest.raises(UsageError, match="has the suffix of another kind of file"):
        ckpttool.convert(tmp_path / "100000.tar", tmp_path / "out.zip", to="torch")


def test_a_slash_says_that_a_directory_may_have_the_suffix_of_a_file(tmp_path: Path) -> None:
    ckpttool.convert(MODEL, f"{tmp_path}/epoch=3.ckpt/", to="dcp")
    assert (tmp_path / "epoch=3.ckpt/.metadata").is_file()


@pytest.mark.parametrize("name", ["sub.pt", "a/b.pt"])
def test_nothing_is_written_into_another_checkpoint(name: str, tmp_path: Path) -> None:
    ckpttool.convert(MODEL, tmp_path / "dcp", to="dcp")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"is inside the checkpoint `.*/dcp`") as raised:
        ckpttool.convert(MODEL, tmp_path / "dcp" / name, dry_run=name == "sub.pt")
    assert raised.value.hint == f"write it next to that: `{tmp_path / Path(name).name}`"
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ".metadata").mkdir()  # of another program
    ckpttool.convert(MODEL, tmp_path / "beside.pt")


def test_directories_made_for_nothing_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise StorageError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "write_all", fail)
        with pytest.raises(StorageError):
            ckpttool.convert(FULL, tmp_path / "a" / "b" / "out", to="dcp")
    assert list(tmp_path.iterdir()) == []
    ckpttool.convert(FULL, tmp_path / "a" / "b" / "out", to="dcp")
    assert (tmp_path / "a" / "b" / "out" / ".metadata").is_file()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"only": ["modle"]}, "did you mean `model`"),
        ({"to": "pth"}, "did you mean `torch`"),
        ({"dtype": ["bfp16"]}, "did you mean `bfloat16`"),
    ],
)
def test_what_was_meant(tmp_path: Path, given: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(FULL, tmp_path / "out.pt", **given)
    assert hint in str(caught.value.hint)


def test_an_optimizer_of_another_model_is_told(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "model.pt")
    state = {"state": {"w": {"m": torch.ones(2)}, "v": {"m": torch.ones(2)}}, "param_groups": [{"params": ["w", "v"]}]}
    torch.save({"optim": state}, tmp_path / "optim.pt")
    made = ckpttool.convert(tmp_path / "model.pt", tmp_path / "out.pt", optim_from=str(tmp_path / "optim.pt"))
    assert any("1 parameters that the model does not have: `v`" in note for note in made.notes)


def test_every_missing_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "ckpt")
    for rank in (1, 2):
        (tmp_path / "ckpt" / f"__{rank}_0.distcp").unlink()
    with pytest.raises(CorruptError, match=r"2 files are missing \(`__1_0.distcp`, `__2_0.distcp`\)"):
        ckpttool.convert(tmp_path / "ckpt", tmp_path / "out.pt")


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("sink", ["torch", "safetensors", "dcp"])
def test_one_of_several_state_dicts_by_its_place(tmp_path: Path, kind: type[list[Any]], sink: str) -> None:
    """`torch.save((model.state_dict(), optimizer.state_dict()), path)`: a part is named by its place."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path, out, back = tmp_path / "pair.pt", tmp_path / "out", tmp_path / "back.pt"
    torch.save(kind([model.state_dict(), optimizer.state_dict()]), path)
    for number, expected in enumerate([model.state_dict(), optimizer.state_dict()]):
        ckpttool.convert(path, out, to=sink, only=str(number), overwrite=True, check=True)
        ckpttool.convert(out, back, to="torch", overwrite=True)
        assert_same(torch.load(back), expected, ordered=sink == "torch")
    ckpttool.convert(path, back, only="optimizer", overwrite=True)
    assert_same(torch.load(back), optimizer.state_dict())
    with pytest.raises(UsageError, match="there is no part `2`"):
        ckpttool.convert(path, back, only="2", overwrite=True)


@pytest.mark.parametrize(("suffix", "to", "most"), [("pt", "safetensors", 770), ("safetensors", "pt", 595)])
def test_what_a_tensor_costs(suffix: str, to: str, most: int, tmp_path: Path) -> None:
    """In calls of functions, which are the same on every machine: 100,000 tensors are no rarity."""
    counts = []
    for n in (200, 500):
        source, target = tmp_path / f"{n}.{suffix}", tmp_path / f"{n}-out.{to}"
        tensors = {f"layers.{i}.w": torch.full((4,), float(i)) for i in range(n)}
        if suffix == "pt":
            torch.save(tensors, source)
        else:
            save_file(tensors, source)
        ckpttool.convert(source, target)  # what is imported and computed once
        calls = Calls()
        with calls:
            ckpttool.convert(source, target, overwrite=True)
        counts.append(calls.count)
    assert (counts[1] - counts[0]) / 300 < most
