"""`ckpttool.stats` of whole checkpoints, against torch and numpy, and what it finds."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import run
from support.paths import CHECKPOINTS, all_samples

import ckpttool
from ckpttool.analysis.statistics.elements import FRACTIONS, Statistics
from ckpttool.analysis.statistics.places import place_of
from ckpttool.analysis.statistics.results import CONDITION
from ckpttool.catalogue import conditions
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import CorruptError, UsageError
from ckpttool.operations.inspect import inspect
from ckpttool.transfer.numbers import has_numbers

EVERYDAY = {*("dcp/fsdp2_w4", "dcp/dtypes", "torch/full", "torch/quantized", "rank/fsdp1_w4", "safetensors/sharded")}
OTHERS = ["bitsandbytes_nf4", "compressed_tensors_nvfp4_pack", "megatron_torch_dist_tp2", "peft_dora", "torchao_int8"]
DCP = CHECKPOINTS / "dcp/fsdp2_w4/ckpt"
Array = np.ndarray[Any, Any]


@pytest.mark.parametrize(
    "sample", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.long) for name in all_samples()]
)
def test_the_samples(sample: str) -> None:
    path = next((CHECKPOINTS / sample).glob("ckpt*"))
    try:
        compare(path)
    except CorruptError as error:  # shards of some ranks are in no file
        assert sample == "dcp/unflattened_w2" and "flatten_state_dict=True" in str(error.hint)
    except UsageError as error:
        assert "--shapes" in str(error.hint)
        compare(path, str(path.with_name("reference.pt")))


def test_state_of_numbered_parameters_is_grouped_by_their_names(tmp_path: Path) -> None:
    """The same state, once under ids and once under names, is in the same groups; without the model it is in none."""
    file = CHECKPOINTS / "torch/full/ckpt.pt"
    by_id, by_name = (
        {(row.moment, row.kind, row.layer, row.statistics.numel) for row in ckpttool.stats(path).tensors if row.moment}
        for path in (file, DCP)
    )
    assert by_id == by_name
    ckpttool.convert(file, tmp_path / "optimizer.pt", only="optimizer")
    assert {(row.kind, row.layer) for row in ckpttool.stats(tmp_path / "optimizer.pt").tensors} == {("*", "")}
    printed = run("stats", str(tmp_path / "optimizer.pt"))
    assert printed.exit_code == 0 and "by layer" not in printed.stdout


@pytest.mark.long
@pytest.mark.parametrize("sample", OTHERS)
def test_samples_of_other_tools(sample: str) -> None:
    compare(CHECKPOINTS / "other" / sample)


def compare(path: Path, shapes: str | None = None) -> None:
    """Compare every statistic of every tensor with numpy's of the whole tensor in float64."""
    found = ckpttool.stats(path, shapes=shapes)
    rows = {row.name: row for row in found.tensors}
    with ckpttool.open(path, shapes=shapes) as checkpoint:
        assert [row.name for row in found.tensors] == [tensor.name for tensor in checkpoint.catalogue.tensors]
        for tensor in checkpoint.catalogue.tensors:
            statistics = rows[tensor.name].statistics
            assert statistics.numel == tensor.numel
            if not tensor.numel or not (has_numbers(tensor.dtype) or tensor.dtype.kind == "bool"):
                assert statistics == Statistics(numel=tensor.numel)
                continue
            whole = checkpoint[tensor.name].torch()
            compare_counts(statistics, whole)
            values = wide(whole)
            compare_figures(statistics, values[np.isfinite(values)])


def compare_counts(found: Statistics, whole: torch.Tensor) -> None:
    values = wide(whole)
    magnitudes = np.abs(values[np.isfinite(values)])
    assert found.zeros == (magnitudes == 0).sum()
    assert found.nans == np.isnan(values).sum()
    assert (found.positive_infs, found.negative_infs) == ((values == np.inf).sum(), (values == -np.inf).sum())
    if whole.is_floating_point() and whole.dtype != torch.float8_e8m0fnu:
        smallest = torch.finfo(whole.dtype).smallest_normal
        assert found.subnormals == ((magnitudes > 0) & (magnitudes < smallest)).sum()


def compare_figures(found: Statistics, finite: Array) -> None:
    if not finite.size:
        assert (found.min, found.mean, found.quantiles) == (None, None, None)
        return
    largest = np.abs(finite).max()
    assert (found.min, found.max, found.absmax) == (finite.min(), finite.max(), largest)
    l2 = np.linalg.norm(finite / (largest or 1.0)) * largest  # whose squares may be no float64
    expected = {
        "mean": (finite.mean(), 1e-15 * largest),
        "std": (finite.std(), 1e-12 * largest),
        "rms": (l2 / math.sqrt(finite.size), 0),
        "l1": (np.abs(finite).sum(), 0),
        "l2": (l2, 0),
    }
    if finite.std() > 1e-6 * largest:
        with np.errstate(invalid="ignore"):
            kurtosis = ((finite - finite.mean()) ** 4).mean() / finite.var() ** 2 - 3
        if np.isfinite(kurtosis):
            expected["kurtosis"] = kurtosis, 1e-9
        else:
            assert found.kurtosis is None  # the fourth powers are too small, or too large, for a float64
    for name, (value, least) in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=max(least, 1e-300)), name
    assert found.quantiles is not None and found.quantile_error is not None
    ordered = np.sort(finite)
    for fraction, quantile in zip(FRACTIONS, found.quantiles.values(), strict=True):
        at = ordered[max(1, math.ceil(fraction * len(ordered))) - 1]
        assert quantile == pytest.approx(at, rel=found.quantile_error, abs=2.0**-126 if found.quantile_error else 0)


def wide(tensor: torch.Tensor) -> Array:
    """Return the elements as float64, complex ones as their magnitudes; numpy reads what torch casts."""
    if tensor.is_complex():
        return np.abs(tensor.to(torch.complex128).numpy()).reshape(-1)
    values: Array = tensor.to(torch.float64).numpy().reshape(-1)
    return values


def test_groups_are_of_all_their_elements() -> None:
    found = ckpttool.stats(DCP)
    with ckpttool.open(DCP) as checkpoint:
        for by, part, moment, name in (
            ("kind", "model", "", "layers.*.qkv.weight"),
            ("layer", "model", "", "layers.1"),
            ("part", "optimizer (optim)", "exp_avg", "optimizer (optim)"),
        ):
            group = next(
                group
                for group in found.by(by)
                if (group.part, group.moment, group.name, group.dtype) == (part, moment, name, "float32")
            )
            members = [
                checkpoint[tensor.name].torch().to(torch.float64).flatten()
                for tensor in checkpoint.catalogue.tensors
                if str(tensor.part) == part
                and (place := place_of(tensor)).moment == moment
                and name in (place.kind, place.layer, place.part)
                and tensor.dtype.name == "float32"
            ]
            values = torch.cat(members).numpy()
            assert (group.tensor_count, group.statistics.numel) == (len(members), len(values))
            assert group.statistics.rms == pytest.approx(math.sqrt((values**2).mean()), rel=1e-12)
            assert group.statistics.kurtosis == pytest.approx(
                ((values - values.mean()) ** 4).mean() / values.var() ** 2 - 3, rel=1e-9
            )
            assert group.statistics.quantiles is not None
            median = np.sort(values)[math.ceil(len(values) / 2) - 1]
            assert group.statistics.quantiles["p50"] == pytest.approx(median, rel=1 / 256)


def test_the_updates_of_adam() -> None:
    rows = {row.name: row for row in ckpttool.stats(DCP).tensors}
    with ckpttool.open(DCP) as checkpoint:
        name = "optim.state.layers.0.qkv.weight"
        m, v = (checkpoint[f"{name}.{moment}"].torch().to(torch.float64) for moment in ("exp_avg", "exp_avg_sq"))
        ratio = m.abs() / (v.sqrt() + 1e-8)
    update = rows[f"{name}.exp_avg"].update
    assert update is not None and rows[f"{name}.exp_avg_sq"].update is None
    assert update.mean == pytest.approx(float(ratio.mean()), rel=1e-12)
    assert update.rms == pytest.approx(float(ratio.square().mean().sqrt()), rel=1e-12)
    assert update.max == float(ratio.max())


def test_updates_of_numbers_that_are_not_finite_do_not_count(tmp_path: Path) -> None:
    m, v = torch.tensor([1.0, float("nan"), -3.0, 2.0]), torch.tensor([4.0, 1.0, float("nan"), 1.0])
    state = {"w": {"exp_avg": m, "exp_avg_sq": v}, "c": {"exp_avg": m * 1j, "exp_avg_sq": v * 1j}}
    torch.save({"optimizer": {"state": state, "param_groups": []}}, tmp_path / "x.pt")
    rows = {row.name: row.update for row in ckpttool.stats(tmp_path / "x.pt").tensors}
    update = rows["optimizer.state.w.exp_avg"]
    assert update is not None and (update.mean, update.max) == pytest.approx((1.25, 2.0), rel=1e-7)
    assert rows["optimizer.state.c.exp_avg"] is None


def test_large_tensors_are_divided_and_sums_do_not_depend_on_threads(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = torch.randn(3000, 1501, generator=torch.Generator().manual_seed(1)) + 3
    values[2999, 1500] = float("nan")
    save_file({"w": values, "b": values.to(torch.bfloat16).T.contiguous()}, tmp_path / "x.safetensors")
    one, four = (ckpttool.stats(tmp_path / "x.safetensors", threads=threads) for threads in (1, 4))
    assert [row.statistics for row in one.tensors] == [row.statistics for row in four.tensors]
    assert [row.columns for row in one.tensors] == [row.columns for row in four.tensors]
    row = next(row for row in one.tensors if row.name == "w")
    finite = values.double()[values.isfinite()]
    assert row.statistics.nans == 1 and row.statistics.mean == pytest.approx(float(finite.mean()), rel=1e-13)
    assert row.columns is not None and row.columns.count == 1501
    assert row.columns.max == float(finite.abs().max())


def test_tied_tensors_are_read_once() -> None:
    found = ckpttool.stats(CHECKPOINTS / "torch/full/ckpt.pt")
    tied = [row for row in found.tensors if row.tied_to is not None]
    assert tied and all(row.statistics.numel for row in tied)
    assert found.numel == sum(row.statistics.numel for row in found.tensors if row.tied_to is None)


def test_the_second_look_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_CACHE", str(tmp_path / "cache"))
    state = model()
    plant("nan")(state)
    torch.save(state, tmp_path / "x.pt")
    first = ckpttool.stats(tmp_path / "x.pt", spectral=True)
    assert not first.cached and len(list((tmp_path / "cache/stats").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("ckpttool.analysis.statistics.collect", None)
        second = ckpttool.stats(tmp_path / "x.pt", spectral=True)
    assert second.cached and second.read_bytes == 0
    assert (second.tensors, second.groups, second.findings) == (first.tensors, first.groups, first.findings)
    # Another selection, another question and a file that changed are read.
    assert not ckpttool.stats(tmp_path / "x.pt", tensors="*.up.weight", spectral=True).cached
    assert not ckpttool.stats(tmp_path / "x.pt").cached
    assert not ckpttool.stats(tmp_path / "x.pt", spectral=True, cache=False).cached
    torch.save(state, tmp_path / "x.pt")
    assert not ckpttool.stats(tmp_path / "x.pt", spectral=True).cached
    # What is damaged in the cache is read again.
    for damaged in (b"{", b"[" * 100_000, b"[]", b"null", b'{"tensors": {"a": 1}, "groups": []}'):
        for kept in (tmp_path / "cache/stats").iterdir():
            kept.write_bytes(damaged)
        assert not ckpttool.stats(tmp_path / "x.pt", spectral=True).cached


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CKPTTOOL_CACHE", str(tmp_path / "file"))
    assert not ckpttool.stats(DCP).cached and not ckpttool.stats(DCP).cached


def test_singular_values(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 40, generator=generator))[0] for n in (300, 90))
    values = 10.0 * 0.7 ** torch.arange(40)
    bad = torch.ones(8, 9)
    bad[3, 3] = float("inf")
    torch.save({"w": left @ torch.diag(values) @ right.T, "zero": torch.zeros(5, 6), "bad": bad}, tmp_path / "x.pt")
    rows = {row.name: row for row in ckpttool.stats(tmp_path / "x.pt", spectral=True).tensors}
    spectrum = rows["w"].spectrum
    assert spectrum is not None and rows["zero"].spectrum is None and rows["bad"].spectrum is None
    assert spectrum.singular_values == pytest.approx(values[:4].tolist(), rel=1e-3)
    assert spectrum.stable_rank == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-3)


def test_steps_of_a_run(tmp_path: Path) -> None:
    assert run("samples", str(tmp_path / "try")).exit_code == 0
    path = str(tmp_path / "try/run7")
    found = ckpttool.stats(path, steps="all")
    assert [one.step for one in found.steps] == [500, 1000]
    assert found.tensors == ckpttool.stats(f"{path}/step-1000").tensors
    done = run("stats", path, "--steps", "500,1000", "--no-cache")
    assert "step 500  step 1000" in done.stdout
    assert run("stats", path, "--steps", "500", "--spectral", "--json").exit_code == 0
    for wrong in ("7", "every"):
        done = run("stats", path, "--steps", wrong)
        assert done.exit_code == 2 and "the complete ones are 500, 1000" in done.stderr
    assert run("stats", f"{path}/step-1000", "--steps", "all").exit_code == 2


# Findings -----------------------------------------------------------------------------------------------------------


def model() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in range(6):
        state[f"layers.{layer}.up.weight"] = torch.randn(32, 16, generator=generator) * 0.02
        for expert in range(4):
            name = f"layers.{layer}.experts.{expert}.down.weight"
            state[name] = torch.randn(16, 16, generator=generator) * 0.02
    optimizer = {
        name: {
            "exp_avg": torch.randn(value.shape, generator=generator) * 1e-3,
            "exp_avg_sq": torch.rand(value.shape, generator=generator) * 1e-6 + 1e-9,
        }
        for name, value in state.items()
    }
    groups = [{"lr": 1e-3, "eps": 1e-8, "params": [*state]}]
    return {"model": state, "optimizer": {"state": optimizer, "param_groups": groups}}


def plant(change: str) -> Callable[[dict[str, Any]], str]:
    def planted(state: dict[str, Any]) -> str:
        weights, moments = state["model"], state["optimizer"]["state"]
        if change in ("nan", "inf"):
            weights["layers.2.up.weight"][3, 4] = float(change)
            return "model.layers.2.up.weight"
        if change == "dead":
            weights["layers.3.experts.1.down.weight"].mul_(1e-6)
            return "model.layers.3.experts.1.down.weight"
        if change == "magnitude":
            weights["layers.4.up.weight"].mul_(40)
            return "model.layers.4.up.weight"
        if change == "zeros":
            weights["layers.5.up.weight"].zero_()
            return "model.layers.5.up.weight"
        moments["layers.1.up.weight"]["exp_avg"].zero_()
        return "optimizer.state.layers.1.up.weight.exp_avg"

    return planted


@pytest.mark.parametrize("kind", ["nan", "inf", "dead", "magnitude", "zeros", "moments"])
def test_what_is_planted_is_found_and_named(tmp_path: Path, kind: str) -> None:
    state = model()
    name = plant(kind)(state)
    torch.save(state, tmp_path / "x.pt")
    found = ckpttool.stats(tmp_path / "x.pt").findings
    # A weight of zeros is dead too.
    assert [finding.names for finding in found if finding.kind == kind] == [[name]]
    assert {finding.names[0] for finding in found} == {name}
    assert f"`{name}`" in next(finding.message for finding in found if finding.kind == kind)


def test_a_rank_with_more_bytes_is_found_and_named(tmp_path: Path) -> None:
    # 4 MB on each of four ranks, and 1.3 MB more on one: 31 % more than the others.
    torch.save({"model": {"sharded": torch.randn(4096, 1024), "whole": torch.ones(325_000)}}, tmp_path / "x.pt")
    ckpttool.reshard(tmp_path / "x.pt", tmp_path / "x", to_world=4, replicate="*whole")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "x").glob("*.distcp")}
    largest = max(sizes, key=lambda name: sizes[name])
    (found,) = ckpttool.stats(tmp_path / "x").findings
    assert (found.kind, found.names) == ("rank", ["model.whole"])
    assert found.message.startswith(f"rank {largest[2]} has 5.50 MB, 31 % more than the median of 4 ranks, 4.20 MB")
    ckpttool.reshard(tmp_path / "x.pt", tmp_path / "even", to_world=4, shard="*whole")
    assert ckpttool.stats(tmp_path / "even").findings == []


def test_nothing_is_found_in_a_sound_checkpoint(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "x.pt")
    assert ckpttool.stats(tmp_path / "x.pt").findings == []
    for sample in ("dcp/fsdp2_w4/ckpt", "dcp/hsdp_w4/ckpt", "torch/full/ckpt.pt"):
        assert ckpttool.stats(CHECKPOINTS / sample).findings == [], sample


# Conditions and the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nan > 0", False),
        ("nan>0 or absmax>1e4", True),
        ("not nan and rms < 1", None),
        ("1 < absmax <= 2e4 and not (rms > 3)", True),
        ("kurtosis > -1", False),
        ("min < -5", True),
        ("name == '*.w' and dtype != 'float32' and absmax > 1", True),
        ("name == 'w'", False),
    ],
)
def test_conditions(text: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(UsageError):
            conditions.condition(text, CONDITION, "--where")
        return
    values = {"nan": 0, "absmax": 1e4 + 1, "rms": 2.0, "kurtosis": None, "min": -6.0, "name": "a.w", "dtype": "int8"}
    assert conditions.condition(text, CONDITION, "--where")(values) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan >",
        "__import__('os')",
        "nan.real > 0",
        "nan > 'x'",
        "name > 'x'",
        "nan == name",
        "rsm > 1",
        "nan > 0 if 1 else 2",
        "(" * 900,
    ],
)
def test_what_is_no_condition_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="fail_on"):
        conditions.condition(text, CONDITION, "--fail-on")


def test_fail_on(tmp_path: Path) -> None:
    state = model()
    plant("nan")(state)
    torch.save(state, tmp_path / "x.pt")
    done = run("stats", str(tmp_path / "x.pt"), "--fail-on", "nan > 0 or absmax > 1e4")
    assert done.exit_code == 1 and "is true of 1 tensor: `model.layers.2.up.weight`" in done.stdout
    assert run("stats", str(tmp_path / "x.pt"), "--fail-on", "absmax > 1e4").exit_code == 0
    done = run("stats", str(tmp_path / "x.pt"), "--fail-on", "absmx > 1e4")
    assert done.exit_code == 2 and "`absmax`" in done.stderr


def test_lists(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "x.pt")
    lines = run("stats", str(tmp_path / "x.pt"), "--csv", "--only", "model").stdout.splitlines()
    assert len(lines) == 31 and lines[0].split(",")[:4] == ["name", "part", "moment", "layer"]
    names = [line.split()[0] for line in run("stats", str(tmp_path / "x.pt"), "--sort", "rms").stdout.splitlines()[8:]]
    assert names[0].startswith("model.layers.") and len(names) == 21
    done = run("stats", str(tmp_path / "x.pt"), "--where", "absmax > 0.07", "--tensors", "*.up.weight")
    assert all(".up.weight" in line for line in done.stdout.splitlines()[8:])
    assert run("stats", str(tmp_path / "x.pt"), "--json").exit_code == 0
    assert run("stats", str(tmp_path / "x.pt"), "--sort", "size").exit_code == 2


def test_options(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "x.pt")
    path = str(tmp_path / "x.pt")
    done = run("stats", path, "--each", "--drop", "optimizer", "--exclude", "*.experts.*", "--threads", "1")
    assert len(done.stdout.splitlines()) == 14 and "experts" not in done.stdout
    assert len(run("stats", path, "--sort", "std", "-v").stdout.splitlines()) > 60
    assert run("stats", path, "--quiet").stdout == ""
    assert run("stats", path, "--shapes", path, "--only", "model", "-q").exit_code == 0
    done = run("stats", path, "--tensors", "nothing")
    assert done.exit_code == 2 and "no tensor matches" in done.stderr


def test_places() -> None:
    catalogue = inspect(DCP)
    places = {place_of(tensor) for tensor in catalogue.tensors}
    assert ("optimizer (optim)", "exp_avg", "layers.1", "layers.*.qkv.weight", "") in places
    tensor = catalogue.tensors[0]
    experts = Tensor(("layers", "3", "experts", "17", "w"), tensor.dtype, (), tensor.chunks)
    assert place_of(experts)[2:] == ("layers.3", "layers.*.experts.*.w", "17")


def test_an_optimizer_that_was_pickled_whole(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    torch.save(optimizer, tmp_path / "a.pt")
    found = ckpttool.stats(tmp_path / "a.pt")
    assert sum(row.statistics.numel for row in found.tensors) == 3 + 1 + 3 + 3


def test_only_zeros_are_a_hundred_percent(tmp_path: Path) -> None:
    """And neither `1e+02%` nor what is rounded to it."""
    most = torch.zeros(1000)
    most[0] = 1
    torch.save({"all": torch.zeros(4), "most": most, "half": torch.tensor([0.0, 1.0])}, tmp_path / "a.pt")
    lines = [line.split() for line in run("stats", str(tmp_path / "a.pt"), "--each").stdout.splitlines()]
    shares = {line[0]: [word for word in line if "%" in word] for line in lines if line}
    assert (shares["all"], shares["most"], shares["half"]) == (["100%"], [">99%"], ["50%"])


def test_names_are_whole_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended in `…`, beside a column of nothing."""
    from ckpttool.reports.statistics import blocks
    from ckpttool.reports.terminal import Terminal

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    names = [f"model.layers.0.{name}_layernorm_of_the_attention.weight" for name in ("input", "post_attention")]
    torch.save({name: torch.randn(64, 64) for name in names}, tmp_path / "a.pt")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    result = ckpttool.stats(tmp_path / "a.pt", cache=False)
    for is_list in (False, True):
        screen = Screen()
        Terminal(screen).blocks(blocks(result, is_list=is_list))
        text = screen.getvalue()
        assert "…" not in text and "post_attention_" in text and max(map(len, text.splitlines())) <= 80
        assert is_list or " tensors  elements" not in text
