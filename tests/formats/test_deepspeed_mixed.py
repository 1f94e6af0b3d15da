"""Directories of DeepSpeed in which files of two saves, of two ranks or of two layers are mixed, or one is missing.

The saves are real ones (`samples/checkpoints/deepspeed`). `unnamed` files are written through a buffer, so that torch
does not call the archive like the file: then what is in it has to show whose it is.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from formats.test_deepspeed import RUNS, Classes, change, converted, copied, optim, require_same
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.flat.pipeline_stages import Lack, PipelineStage, lacking

MODEL = "mp_rank_00_model_states.pt"


def weights(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def layer(number: int) -> str:
    return f"layer_{number:02d}-model_states.pt"


def unnamed(file: Path, by: Callable[[Any], Any] = lambda tree: tree) -> None:
    """Save a file again through a buffer, changed in place or to what comes back."""
    with mock.patch.dict(sys.modules):
        tree = torch.load(file, weights_only=False, pickle_module=Classes)
        changed = by(tree)
        with file.open("wb") as buffer:
            torch.save(tree if changed is None else changed, buffer)


def all_unnamed(path: Path) -> None:
    for file in path.rglob("*.pt"):
        unnamed(file)


def swap(path: Path, one: str, other: str) -> None:
    for source, to in ((one, "x"), (other, one), ("x", other)):
        (path / source).rename(path / to)


def copy(path: Path, one: str, other: str) -> None:
    shutil.copy(path / one, path / other)


def moved(tree: Any) -> Any:
    """Add to each number of a tree that is of no step, as in a save of another run."""
    if isinstance(tree, torch.Tensor):
        return tree + 0.25 if tree.is_floating_point() and tree.ndim else tree
    if isinstance(tree, dict):
        return type(tree)((key, moved(value)) for key, value in tree.items())
    return [*map(moved, tree)] if isinstance(tree, list) else tree


def of_another_run(path: Path, *names: str) -> None:
    for name in names:
        unnamed(path / name, moved)


def require_refused(path: Path, text: str, folder: Path, **options: Any) -> None:
    """An error of each command that reads, which `inspect` shows."""
    with pytest.raises(CkptError, match=text) as caught:
        ckpttool.convert(path, folder / "refused.pt", **options)
    assert caught.value.hint and not (folder / "refused.pt").exists()
    done = run("verify", str(path))
    assert done.exit_code in (CorruptError.exit_code, ReadError.exit_code), done.stdout


# Layers of a pipeline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "text"),
    [
        ([0], r"`mp_rank_01_.*` trains parameters of \[13, 5\] .*: one of `layer_00-.*`, `layer_05-.*` is missing"),
        ([1], r"no file of a layer has the buffer `1\.seen`"),
        ([3], r"no file of a layer has the buffer `3\.seen`"),
        ([4], r"`mp_rank_01_.*` trains parameters of \[5\] that no .* has: `layer_04-model_states\.pt` is missing"),
        ([3, 4], r"no file of a layer has the buffer `3\.seen`"),
    ],
)
def test_a_layer_without_zero_that_is_missing(gone: list[int], text: str, tmp_path: Path) -> None:
    path = copied("pipeline_zero0_w2", tmp_path)
    for number in gone:
        (path / layer(number)).unlink()
    require_refused(path, text, tmp_path, drop=["optimizer"])


def test_layers_whose_buffers_nothing_names(tmp_path: Path) -> None:
    """By what the optimizers train alone; a layer without parameters is not missed."""
    path = copied("pipeline_zero0_w2", tmp_path)
    for file in path.glob("mp_rank_*"):
        change(file, lambda tree: tree.update(buffer_names=[]))
    for number in (1, 3, 4):
        (path / layer(number)).rename(tmp_path / "away")
        require_refused(path, rf"`mp_rank_01_.*` trains .*`layer_0{number}-model", tmp_path, drop=["optimizer"])
        (tmp_path / "away").rename(path / layer(number))
    whole = converted(path, tmp_path, drop=["optimizer"])
    (path / layer(2)).unlink()
    (tmp_path / "out.pt").unlink()
    require_same(converted(path, tmp_path, drop=["optimizer"])["model"], whole["model"])
    said = run("verify", "--json", str(path)).stdout
    assert "no file names the layers after layer 4: one that trains nothing would not be missed" in said


def test_layers_of_another_shape_or_with_others_names(tmp_path: Path) -> None:
    for name, options in (("pipeline_zero0_w2", {"drop": ["optimizer"]}), ("pipeline_zero1_w4", {})):
        path = copied(name, tmp_path / name)
        copy(path, layer(3), layer(1))
        require_refused(path, rf"`{layer(1)}` was saved as `{layer(3)}`|is not that of", tmp_path, **options)
        shutil.rmtree(path)
    path = copied("pipeline_zero0_w2", tmp_path / "shape")
    unnamed(path / layer(4), lambda tree: {key: value[:-1] for key, value in tree.items()})
    require_refused(path, r"trains parameters of \[5\] that no file", tmp_path, drop=["optimizer"])
    path = copied("pipeline_zero1_w4", tmp_path / "extra")
    copy(path, layer(4), layer(5))
    unnamed(path / layer(5))
    require_refused(
        path, r"`tied_modules\.embed\.weight` in `layer_05.*` has \[5\], but `param_shapes` \[13, 5\]", tmp_path
    )
    (path / "layer_99999999999-model_states.pt").write_bytes(b"")
    require_refused(path, "is of a layer that cannot be", tmp_path)


def test_what_the_layers_lack() -> None:
    """Tied parameters have one state in two stages, and are in a layer of either."""
    square, line, table = (5, 5), (5,), (13, 5)
    tied = (table, "tied")
    stages = [PipelineStage([tied, (square, "a"), (line, "b")], 0, {1}), PipelineStage([tied, (line, "c")], 0, set())]
    layers = {0: [table], 1: [square, line, line], 3: [line]}
    assert lacking(layers, stages) is None
    assert lacking({1: layers[1], 3: layers[3], 4: [table]}, stages) is None
    assert lacking({0: layers[0], 1: layers[1]}, stages) == Lack(1, [line])
    assert lacking({1: layers[1], 3: layers[3]}, stages) == Lack(1, [table])
    assert lacking({}, stages) == Lack(0, [line, square])
    # Those of which nothing but the count is known.
    counted = [PipelineStage([], 2, set()), PipelineStage([], 6, set())]
    assert lacking(layers, counted) == Lack(1, []) and lacking({**layers, 4: [line]}, counted) is None


# Ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("zero2_w3", optim(0), optim(1)),
        ("zero2_round_robin_w3", optim(1), optim(2)),
        ("zero3_w3", optim(0), optim(1)),
        ("zero3_w3", weights(0), weights(1)),
        ("experts_zero2_w4", *(f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in (0, 2))),
    ],
)
def test_files_of_ranks_under_others_names(name: str, one: str, other: str, tmp_path: Path) -> None:
    """torch calls an archive like the file that it saves to."""
    path = copied(name, tmp_path)
    swap(path, one, other)
    with pytest.raises(CkptError) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    assert f"`{one}` was saved as `{other}`" in str(caught.value)
    assert run("verify", str(path)).exit_code == CorruptError.exit_code


def _reversed(tree: Any) -> None:
    for group in tree["param_shapes"]:
        items = [*group.items()][::-1]
        group.clear()
        group.update(items)


def _turned(tree: Any) -> None:
    tree["param_shapes"][0]["up.weight"] = torch.Size((5, 7))


@pytest.mark.parametrize(
    ("name", "by", "text"),
    [
        ("zero2_w3", lambda d: swap(d, optim(0), optim(1)), "`embed.weight` does not go on from the end of rank 0"),
        ("zero2_w3", lambda d: copy(d, optim(0), optim(1)), "the partitions have 92 of 65|does not go on"),
        ("zero2_round_robin_w3", lambda d: swap(d, optim(0), optim(1)), "is not that of .*, rounded"),
        ("zero2_round_robin_w3", lambda d: copy(d, optim(0), optim(1)), "has the same weights as `.*_0_mp"),
        ("zero2_w3", lambda d: of_another_run(d, optim(1)), f"in `{MODEL}` is not that of `{optim(1)}`, rounded"),
        ("zero1_w2", lambda d: of_another_run(d, optim(0), optim(1)), f"in `{MODEL}` is not that of `{optim(0)}`"),
        ("zero2_w3", lambda d: of_another_run(d, MODEL), f"in `{MODEL}` is not that of `{optim(0)}`, rounded"),
        ("zero2_w3", lambda d: unnamed(d / MODEL, _reversed), "before .* comes after it in `param_shapes`|go on"),
        ("zero2_w3", lambda d: unnamed(d / MODEL, _turned), r"has \[7, 5\], but `param_shapes` \[5, 7\]"),
        ("zero3_w3", lambda d: copy(d, optim(0), optim(1)), f"`{optim(1)}` has the same weights as `{optim(0)}`"),
        ("zero3_w3", lambda d: copy(d, weights(0), weights(1)), f"`{weights(1)}` has the same frozen parameters as"),
        (
            "zero3_w3",
            lambda d: [unnamed(f, lambda t: t["param_shapes"].reverse()) for f in d.glob("*model_states.pt")],
            "has 46 elements of group 0, but `param_shapes` 10 of each rank",
        ),
        (
            "zero3_w3",
            lambda d: change(d / optim(0), lambda t: t["ds_config"].update(train_batch_size=99), whole=True),
            f"`{weights(0)}` and `{optim(0)}` have another `ds_config`",
        ),
        (
            "zero2_w3",
            lambda d: [change(f, lambda t: t["base_optimizer_state"]["param_groups"].pop()) for f in d.glob("*opt*")],
            r"`param_groups` have the groups \[0\], but `param_shapes` 2",
        ),
    ],
)  # fmt: skip
def test_files_of_two_saves_or_ranks(name: str, by: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    all_unnamed(path)
    by(path)
    require_refused(path, text, tmp_path)


def test_what_zero_3_does_not_show(tmp_path: Path) -> None:
    """It has no weights twice: other steps may be those of a run that has not loaded its optimizer, so it is said."""
    path = copied("zero3_w3", tmp_path)
    for file in path.glob("*model_states.pt"):
        unnamed(file, lambda tree: tree.update(global_steps=7))
    text = f"`{weights(0)}` is of step 7, and the optimizer in `{optim(0)}` of step 2: either the run has not loaded"
    assert any(text in str(warning) for warning in ckpttool.inspect(path).warnings)
    done = run("verify", str(path))
    assert done.exit_code == 0 and "of step 7" in done.stdout


def test_pieces_that_are_one_number_each_are_of_no_rank(tmp_path: Path) -> None:
    """Of weights that are all zero, all ranks have the same."""
    path = copied("zero3_w3", tmp_path)
    for rank in range(3):
        change(path / optim(rank), lambda state: [line.data.zero_() for line in state["fp32_flat_groups"]])
    assert not ckpttool.inspect(path).faults


def test_a_file_that_is_written_is_called_what_it_is(tmp_path: Path) -> None:
    ckpttool.convert(RUNS / "zero3_w3" / "saved", tmp_path / "out", producer="deepspeed:zero3", to_world=3)
    path = tmp_path / "out" / "global_step2"
    for file in path.glob("*.pt"):
        assert zipfile.ZipFile(file).namelist()[0] == f"{file.stem}/data.pkl"
    swap(path, optim(0), optim(1))
    require_refused(path, f"`{optim(0)}` was saved as `{optim(1)}`", tmp_path)


def test_weights_that_are_no_numbers_are_not_compared(tmp_path: Path) -> None:
    """What a diverged run saves is not rounded alike by all processors."""
    path = copied("zero2_w3", tmp_path)
    for rank in range(3):
        change(
            path / optim(rank),
            lambda s: [line.data.fill_(float("nan")) for line in s["single_partition_of_fp32_groups"]],
        )
    assert not ckpttool.inspect(path).faults


# Experts -------------------------------------------------------------------------------------------------------------


def expert(number: int) -> str:
    return f"layer_0_expert_{number}_mp_rank_00_model_states.pt"


def _added(tree: Any, number: int) -> None:
    tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.add_(number)


def with_experts_apart(folder: Path) -> Path:
    """The sample, in whose run no expert was trained, with a number added to the weights of each: its own. Of four, the
    even ranks have the first two, one each."""
    path = copied("experts_zero2_w4", folder)
    for rank, number in enumerate((0, 2, 1, 3)):
        unnamed(path / optim(rank), partial(_added, number=number))
    whole = converted(RUNS / "experts_zero2_w4" / "saved", folder)["model"]
    for number in range(4):
        rounded = {n: (v + number).bfloat16() for n, v in whole.items() if f"_experts.{number}." in n}
        torch.save(rounded, path / expert(number))
    (folder / "out.pt").unlink()
    return path


def test_each_expert_is_its_own(tmp_path: Path) -> None:
    whole = converted(RUNS / "experts_zero2_w4" / "saved", tmp_path)["model"]
    (tmp_path / "out.pt").unlink()
    path = with_experts_apart(tmp_path)
    found = converted(path, tmp_path)["model"]
    for name, value in whole.items():
        number = int(name.split("_experts.")[1][0]) if "_experts." in name else 0
        assert found[name].equal(value + number), name
    done = ckpttool.convert(path, tmp_path / "universal", producer="deepspeed:universal")
    assert any("load it with `ep_size=1`" in note for note in done.notes)
    for number in range(4):
        name = f"moe.deepspeed_moe.experts.deepspeed_experts.{number}.weight"
        fp32 = torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=False)["param"]
        assert fp32.equal(whole[name] + number)


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (lambda d: swap(d, optim(0), optim(2)), "does not go on from the end|is not that of"),
        (lambda d: swap(d, optim(0), optim(1)), "go on|is not that of|belongs to no parameter|in the same elements"),
        (lambda d: copy(d, optim(1), optim(3)), "elements|same weights|does not go on"),
        (lambda d: of_another_run(d, optim(2)), f"is not that of `{optim(2)}`, rounded"),
        (lambda d: of_another_run(d, expert(1)), f"`.*experts.1.weight` in `{expert(1)}` is not that of"),
        (lambda d: copy(d, expert(0), expert(1)), "no file of an expert has .*experts.1."),
        (lambda d: (d / expert(3)).unlink(), "no file of an expert has .*experts.3."),
    ],
)
def test_experts_of_two_saves(by: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    path = with_experts_apart(tmp_path)
    all_unnamed(path)
    by(path)
    require_refused(path, text, tmp_path)


# Universal -----------------------------------------------------------------------------------------------------------

THEIRS_2 = CHECKPOINTS / "other" / "deepspeed_universal" / "global_step2_universal"
THEIRS_3 = RUNS / "universal_zero3_w3" / "saved" / "global_step2_universal"


def _value(change_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def by(tree: Any) -> Any:
        return {**tree, "param": change_of(tree["param"])} if isinstance(tree, dict) else change_of(tree)

    return by


def _folder(path: Path) -> Path:
    names = ("up.weight", "layers.0.weight")
    return next(path / "zero" / name for name in names if (path / "zero" / name).exists())


def _without(*kinds: str) -> Callable[[Path], None]:
    return lambda d: [(_folder(d) / f"{kind}.pt").unlink() for kind in kinds] and None


def _changed(kind: str, by: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda d: unnamed(_folder(d) / f"{kind}.pt", by)


def _other_optimizer(path: Path) -> None:
    (_folder(path) / "exp_avg_sq.pt").unlink()
    (_folder(path) / "exp_avg.pt").rename(_folder(path) / "momentum_buffer.pt")


def _more_state(path: Path) -> None:
    copy(_folder(path), "exp_avg.pt", "more.pt")
    unnamed(_folder(path) / "more.pt")


def _common(by: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda d: unnamed(d / "zero" / "optimizer_state.pt", lambda tree: by(tree) and None)


def _models(by: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda d: [unnamed(file, by) for file in d.glob("*model_states.pt")] and None


@pytest.mark.parametrize("source", [THEIRS_2, THEIRS_3], ids=["ZeRO 2", "ZeRO 3"])
@pytest.mark.parametrize(
    ("by", "text"),
    [
        (_without("exp_avg"), "has no `exp_avg.pt`"),
        (_without("exp_avg", "exp_avg_sq"), "has no `exp_avg.pt`, `exp_avg_sq.pt`"),
        (_without("fp32"), "has no `fp32.pt`"),
        (lambda d: shutil.rmtree(_folder(d)), "has no `fp32.pt`"),
        (_other_optimizer, "has no `exp_avg.pt`, `exp_avg_sq.pt`"),
        (_more_state, "has more files than others of its group: `more.pt`"),
        (_changed("fp32", _value(lambda value: value + 1)), "fp32.pt` is not what|is not that of `zero/.*fp32.pt`"),
        (_changed("fp32", _value(lambda value: value.half())), "has float16 .* in `fp32.pt`, as others|is not what"),
        (_changed("exp_avg", _value(lambda value: value[:-1])), "but `param_shapes`"),
        (_changed("exp_avg_sq", _value(lambda value: value.half())), "in `exp_avg_sq.pt`, as others|is not what"),
        (lambda d: shutil.copytree(_folder(d), d / "zero" / "extra"), "`zero/extra` belongs to no parameter that"),
        (lambda d: swap(d / "zero", "norm.weight", "norm.bias"), "is not what|is not that of"),
        (_models(lambda tree: tree["param_shapes"].reverse()), "of other parameters|but `param_shapes` 10 of each"),
        (_models(lambda tree: tree["param_shapes"][0].update({"norm": torch.Size((9, 9))})), "norm` has no|other|but"),
        (_models(lambda tree: tree.update(dp_world_size=1)), "partitions of|more ranks than 1"),
        (_common(lambda tree: tree["param_groups"].pop()), "the groups"),
    ],
)  # fmt: skip
def test_a_universal_checkpoint_of_two_saves(
    source: Path, by: Callable[[Path], Any], text: str, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(source, tmp_path / source.name))
    by(path)
    require_refused(path, text, tmp_path)


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (_without("step"), "has no `step.pt`"),
        (_changed("step", lambda step: step + 2), "`zero/layers.0.weight/step.pt` has another step than others"),
        (
            lambda d: unnamed(d / "zero" / "optimizer_state.pt", lambda t: t.pop("param_groups") and None),
            "has no `param",
        ),
        (_models(moved), "is not that of `zero/.*/fp32.pt`, rounded"),
    ],
)
def test_a_universal_checkpoint_of_zero_2(by: Callable[[Path], Any], text: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(THEIRS_2, tmp_path / THEIRS_2.name))
    by(path)
    require_refused(path, text, tmp_path)


def test_moments_of_zero_3_are_compared_with_those_of_the_first_rank(tmp_path: Path) -> None:
    path = Path(shutil.copytree(THEIRS_3, tmp_path / THEIRS_3.name))
    unnamed(path / "zero" / "up.weight" / "exp_avg.pt", lambda value: value + 1)
    require_refused(path, "`zero/up.weight/exp_avg.pt` is not what `zero/optimizer_state.pt` has of `up.we", tmp_path)
    path = Path(shutil.copytree(THEIRS_3, tmp_path / "b" / THEIRS_3.name))
    copy(path / "zero" / "up.weight", "exp_avg_sq.pt", "exp_avg.pt")
    require_refused(path, "`zero/up.weight/exp_avg.pt` was saved as `exp_avg_sq.pt`|is not what", tmp_path)


def test_what_ckpttool_writes_may_differ_within_a_group(tmp_path: Path) -> None:
    """A run of PyTorch may have other steps, and parameters without state."""
    state: Any = {n: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": torch.tensor(s)} for n, s in
                  (("a", 4.0), ("b", 3.0))}  # fmt: skip
    groups = [{"lr": 0.1, "params": ["a", "b", "c"]}]
    model = dict.fromkeys("abc", torch.arange(3.0))
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": 4}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", producer="deepspeed:universal", check=True)
    found = converted(tmp_path / "out", tmp_path)["optimizer"]["state"]
    assert [float(found[name]["step"]) for name in "ab"] == [4.0, 3.0] and not found.get("c")
    (tmp_path / "out" / "zero" / "a" / "exp_avg.pt").unlink()
    require_refused(tmp_path / "out", "`zero/a` has (no `exp_avg.pt`|more)", tmp_path)
