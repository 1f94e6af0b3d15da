"""Run directories: each producer's layout is found, converted and read back by upstream; runs list checkpoints."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.hang import no_hang
from support.paths import CHECKPOINTS, samples_of
from support.upstream_samples import path_of, reference
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpttool
from ckpttool import convert, inspect, producers
from ckpttool.catalogue.entries import Part
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.layout.optimizer.parse import shapes_of_moments
from ckpttool.producers import PRODUCERS, recognise, runs
from ckpttool.producers.open import open_at, open_source
from ckpttool.producers.runs import step_in
from ckpttool.serialization.dcp import completeness
from ckpttool.serialization.directory import Directory
from ckpttool.storage.local import LocalStore
from ckpttool.storage.stores import DirectoryEntry, locate

SAMPLES = samples_of("run")
TARGETS = ("torch", "dcp", "safetensors")


# What upstream makes of what we wrote ---------------------------------------------------------------------------------


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by dotted name, tensors as they are."""
    if isinstance(value, dict) and value:
        children: Any = value.items()
    elif isinstance(value, list) and any(isinstance(v, (dict, list, torch.Tensor)) for v in value):
        children = enumerate(value)
    else:
        return {name: value}
    made: dict[str, Any] = {}
    for key, child in children:
        made |= flat(child, f"{name}.{key}" if name else str(key))
    return made


def converted(path: str, to: str, folder: Path, shapes: str | None = None) -> dict[str, Any]:
    """`path` in another format, by dotted name, as upstream reads it; the tensors only for safetensors."""
    out = folder / ("out.pt" if to == "torch" else "out")
    convert(path, out, to=to, check=True, shapes=shapes)
    if to == "torch":
        return flat(torch.load(out, weights_only=False))
    if to == "dcp":
        state: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(state, dcp.FileSystemReader(out), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return flat(state)
    return {f"{file.stem}.{name}": t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_alike(found: Any, expected: Any, at: str) -> None:
    """Bit for bit, NaN and all."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (found, expected))
        assert torch.equal(a, b), at
    else:
        assert type(found) is type(expected), at
        assert repr(found) == repr(expected), at


# Samples --------------------------------------------------------------------------------------------------------------


def below(found: dict[str, Any], tail: str, wanted: str = "", unwanted: str = "\0") -> str | None:
    """What stands before `tail` in the shortest name that ends with it."""
    before = [n.removesuffix(tail) for n in found if n == tail or n.endswith(f".{tail}")]
    return min((p for p in before if wanted in p and unwanted not in p), key=len, default=None)


def expected(ref: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in what was converted, and the tensor of the reference. Wrappers and ids are as the framework saved them."""
    for suffix in ("", *(f"_{i}" for i in range(1, 9) if f"model_{i}" in ref)):
        model = ref[f"model{suffix}"]
        root = below(found, next(iter(model)), f"model{suffix}" if suffix else "", "optim")
        assert root is not None
        yield from ((f"{root}{name}", tensor) for name, tensor in model.items())
        if f"optim{suffix}" in ref:
            yield from _moments(ref[f"optim{suffix}"], found, suffix)


def _moments(optim: dict[str, Any], found: dict[str, Any], suffix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """State by name, or by the place of the parameter in the parameter groups."""
    names = [name for group in optim["param_groups"] for name in group["params"]]
    moment = next(iter(optim["state"][names[0]]))
    by_name = below(found, f"{names[0]}.{moment}", f"optimizer{suffix}" if suffix else "")
    root = by_name if by_name is not None else below(found, f"0.{moment}", f"optimizer{suffix}" if suffix else "")
    assert root is not None
    for i, name in enumerate(names):
        for moment, value in optim["state"][name].items():
            if isinstance(value, torch.Tensor):
                yield f"{root}{name if by_name is not None else i}.{moment}", value


@pytest.mark.sweep(3)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_converts_to_what_torch_gathered(name: str, to: str, tmp_path: Path) -> None:
    ref = reference(name)
    found = converted(path_of(name), to, tmp_path, _shapes(name, ref, tmp_path))
    count = 0
    for key, tensor in expected(ref, found):
        if key not in found and key.endswith("lm_head.weight"):
            embed = next(t for n, t in ref["model"].items() if "embed" in n)
            assert_alike(embed, tensor, "the tied one was left out")
            continue
        if key not in found and to == "safetensors" and key.endswith(".step"):
            # All parameters of a flat one share theirs: the file has it once.
            assert any(k.endswith(".step") and torch.equal(v, tensor) for k, v in found.items())
            continue
        assert key in found
        assert_alike(found[key], tensor, key)
        count += 1
    assert count >= 10
    if to != "safetensors":
        _check_objects(ref, found)


def _check_objects(ref: dict[str, Any], found: dict[str, Any]) -> None:
    for part, tail in (("scheduler", "last_epoch"), ("scheduler_1", "last_epoch"), ("scaler", "growth_factor")):
        if part in ref:
            root = below(found, tail, "_1" if part.endswith("_1") else "sc")
            assert root is not None
            for key, value in flat(ref[part]).items():
                assert_alike(found[root + key], value, key)
    held = [v for k, v in found.items() if "rng" in k and isinstance(v, torch.Tensor)]
    for rank, states in enumerate(ref.get("rng_by_rank", ())):
        for state in (v for v in flat(states).values() if isinstance(v, torch.Tensor)):
            assert any(v.dtype == state.dtype and torch.equal(v, state) for v in held), rank


def _shapes(name: str, ref: dict[str, Any], folder: Path) -> str | None:
    """Flat parameters of DINOv2 have no shapes, and nothing beside them that has."""
    if "dinov2" not in name:
        return None
    path = folder / "shapes.json"
    path.write_text(json.dumps([[n, list(t.shape)] for n, t in ref["model"].items()]))
    return str(path)


# The table -----------------------------------------------------------------------------------------------------------

PRODUCER_OF: dict[str, str | None] = {
    "run/lightning_log": None,  # a file, as any script saves one
    "run/accelerate": "accelerate",
    "run/trainer": "transformers Trainer",
    "run/hf_assets": "transformers",
    "run/lightning": "Lightning",
    "run/fabric": "Lightning",
    "run/composer": "Composer",
    "run/torchtitan": "torchtitan",
    "run/olmo_core": "OLMo-core",
    "run/olmo_unsharded": "OLMo",
    "run/verl": "verl",
    "run/torch_checkpointing": "torch_checkpointing",
    "run/dinov2": None,  # files of ranks, as any script saves them
}
every_row = pytest.mark.parametrize("row", PRODUCERS, ids=lambda row: row.name)


def producer_of(name: str) -> str | None:
    return next(producer for begin, producer in PRODUCER_OF.items() if name.startswith(begin))


def shelled(path: str, folder: Path) -> Path:
    """The same names and the same JSON, and nothing in the other files."""

    def copy(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes() if source.endswith((".json", ".yaml", ".txt")) else b"?")

    return Path(shutil.copytree(path, folder / Path(path).name, copy_function=copy))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_is_known_by_its_producer(name: str) -> None:
    assert inspect(path_of(name)).facts.get("producer") == producer_of(name)


@pytest.mark.parametrize("name", SAMPLES)
def test_names_and_small_json_are_all_that_is_looked_at(name: str, tmp_path: Path) -> None:
    there, shell = Directory(locate(path_of(name))), Directory(locate(str(shelled(path_of(name), tmp_path))))
    assert [recognise(x) for x in (there,)] == [recognise(x) for x in (shell,)]
    row = recognise(there)
    if row is not None:
        assert row.layout(there) == row.layout(shell)
    found, again = (runs.in_directory(x) for x in (there, shell))
    assert [(f.name, f.step, f.producer) for f in found] == [(f.name, f.step, f.producer) for f in again]


@every_row
def test_a_row_is_whole(row: producers.Producer) -> None:
    assert row.name
    assert [r.name for r in PRODUCERS].count(row.name) == 1
    page = (CHECKPOINTS.parents[1] / "docs" / "reference" / "producers.md").read_text()
    assert f"| {row.name} |" in page


@every_row
def test_a_row_knows_no_empty_directory(row: producers.Producer, tmp_path: Path) -> None:
    assert not row.recognise(Directory(locate(str(tmp_path))))


FILES = sorted(
    (name, str(file.relative_to(path_of(name))))
    for name in SAMPLES for file in Path(path_of(name)).rglob("*") if file.is_file()
)  # fmt: skip


def one_of_each_kind() -> Iterator[Any]:
    """The first of those that differ in a number only; the others take a long time."""
    seen = set()
    for name, file in FILES:
        kind = (name, re.sub(r"\d+", "0", file))
        yield pytest.param(name, file, marks=[pytest.mark.long] if kind in seen else [])
        seen.add(kind)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("name", "file"), FILES)
def test_a_file_that_is_gone_is_noticed_or_was_none_of_the_state(name: str, file: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path_of(name), tmp_path / "ckpt"))
    (copy / file).unlink()
    before = _untouched(name)
    try:
        after = inspect(copy)
    except CkptError:
        return
    if after.warnings == before.warnings and after.facts.get("assets") == before.facts.get("assets"):
        assert _optional(file)


@functools.cache
def _untouched(name: str) -> Any:
    return inspect(path_of(name))


def _optional(file: str) -> bool:
    """What is left only when there is one, or only tells the framework where to look, so nobody can miss it; and the
    generators of the last rank, where nothing else says how many there were."""
    names = r"scheduler|sampler|dl_state|scaler|custom_|training_args|_1\.|data\.pt|meta\.pt|huggingface/|_config\.json"
    names += r"|(random_states|rng_state)_3\."
    return bool(
        re.search(
            rf"{names}|last_checkpoint|latest_|metadata\.pkl|symlink|(checkpoint-2|checkpoint_0|step-4)/|\.(yaml|csv)",
            file,
        )
    )


# Runs ----------------------------------------------------------------------------------------------------------------


def saved(folder: Path, value: float = 1.0, world: int = 1) -> Path:
    """What accelerate leaves of a tiny model, made by torch and safetensors."""
    folder.mkdir(parents=True)
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    for rank in range(world):
        torch.save({"step": 1, "torch_manual_seed": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")
    return folder


def saved_dcp(folder: Path, value: float = 1.0) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.full((3,), value)}, "step": 1}, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_highest_step_is_taken_not_the_last_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 9, 100, 20):
        saved(run / f"checkpoint_{step}", float(step))
    found = runs.checkpoints(locate(str(run)))
    assert [(f.step, f.complete, f.producer) for f in found] == [(s, True, "accelerate") for s in (9, 10, 20, 100)]
    assert [f.nbytes for f in found] == [
        sum(f.stat().st_size for f in (run / f"checkpoint_{s}").iterdir()) for s in (9, 10, 20, 100)
    ]
    made = convert(run, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["model"]["weight"][0, 0] > 99
    assert any("using `checkpoint_100`" in note for note in made.notes)
    table = inspect(run).facts["run"]
    assert [row["name"] for row in table if row["taken"]] == ["checkpoint_100"]


def truncate(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"")


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("make", "spoil", "why"),
    [
        (saved_dcp, remove(".metadata"), "no `.metadata`: the save did not end"),
        (saved_dcp, lambda f: (f / ".metadata").rename(f / ".metadata.tmp"), "only `.metadata.tmp`"),
        (saved_dcp, truncate(".metadata"), "`.metadata` is empty"),
        (saved_dcp, truncate("__0_0.distcp"), "`__0_0.distcp` is empty"),
        (saved_dcp, remove("__0_0.distcp"), "`__0_0.distcp` is missing"),
        (saved, truncate("optimizer.bin"), "`optimizer.bin` is empty"),
        (lambda f: saved(f, world=3), remove("random_states_1.pkl"), "the file of rank 1 of 3 is missing"),
        (saved, lambda f: shutil.rmtree(f) or f.mkdir(), "an empty directory"),
        (saved, lambda f: [file.rename(f / f"{file.name}.part") for file in f.iterdir()], "no known format"),
    ],
)
def test_what_is_not_complete_is_passed_over(
    make: Callable[[Path], Path], spoil: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    make(tmp_path / "run" / "step-1")
    spoil(make(tmp_path / "run" / "step-2"))
    first, second = runs.checkpoints(locate(str(tmp_path / "run")))
    assert first.complete
    assert second.why_not is not None
    assert why in second.why_not
    made = convert(tmp_path / "run", tmp_path / "out.pt")
    assert made.notes[0] == "using `step-1`, the newest complete of the 2 checkpoints in the run"
    assert made.notes[1].startswith("`step-1` is opened; newer checkpoints are incomplete: `step-2`: ")


@pytest.mark.parametrize("name", ["tmp_step-2", ".step-2", "step-2.tmp", "step-2-incomplete", "tmp-checkpoint-2"])
def test_a_name_that_says_so_is_not_complete(name: str, tmp_path: Path) -> None:
    saved_dcp(tmp_path / "step-1")
    saved_dcp(tmp_path / name)
    assert [f.complete for f in runs.checkpoints(locate(str(tmp_path)))] == [True, False]


def test_nothing_complete_is_an_error_with_the_list(tmp_path: Path) -> None:
    for step in (1, 2):
        (saved_dcp(tmp_path / f"step-{step}") / ".metadata").unlink()
    with pytest.raises(ReadError) as caught:
        inspect(tmp_path)
    assert "none of its 2 checkpoints is complete: `step-1`: no `.metadata`" in caught.value.message
    assert caught.value.hint == f"name one to open it all the same: `{tmp_path / 'step-2'}`"


def test_the_first_of_the_trainers_generators_alone(tmp_path: Path) -> None:
    """Of one process the Trainer saves `rng_state.pth`, so that a number says that there were several."""
    folder = shutil.copytree(CHECKPOINTS / "run/trainer_w2/ckpt/checkpoint-4", tmp_path / "checkpoint-4")
    convert(folder, tmp_path / "whole.pt")
    (folder / "rng_state_1.pth").unlink()
    with pytest.raises(CorruptError, match=r"`rng_state_1\.pth` is missing"):
        convert(folder, tmp_path / "out.pt")


def test_an_incomplete_one_that_is_named_is_opened_all_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_1", world=3)
    (folder / "random_states_1.pkl").unlink()
    assert any("the file of rank 1 of 3 is missing" in str(w) for w in inspect(folder).warnings)
    with pytest.raises(CorruptError, match="the file of rank 1 of 3 is missing"):
        convert(folder, tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("checkpoint_7", 7),
        ("step-10", 10),
        ("step1000-unsharded", 1000),
        ("global_step_20", 20),
        ("ep3-ba40", 40),
        ("epoch=2-step=100.ckpt", 100),
        ("epoch_3", 3),
        ("iter_0000100", 100),
        ("250", 250),
        ("best", None),
        ("model-00001-of-00002.safetensors", None),
        ("pretrain2", None),
    ],
)
def test_the_step_in_a_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_a_pointer_to_another_step_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        saved_dcp(tmp_path / f"step-{step}")
    (tmp_path / "latest").write_text("step-1\n")
    assert any("`latest` names step 1, but step 2 is opened" in str(w) for w in inspect(tmp_path).warnings)
    (tmp_path / "latest").write_text("step-2")
    assert not any("latest" in str(w) for w in inspect(tmp_path).warnings)


def test_a_model_beside_the_checkpoints_of_its_run_is_what_is_opened(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint-1")
    (tmp_path / "config.json").write_text("{}")
    save_file({"final": torch.ones(2)}, tmp_path / "model.safetensors")
    catalogue = inspect(tmp_path)
    assert set(catalogue.entries) == {("final",)}
    assert [f["name"] for f in catalogue.facts["run"]] == ["checkpoint-1"]
    assert not any(f["taken"] for f in catalogue.facts["run"])
    assert str(catalogue.warnings[0]) == "the final model is opened; the directory also has `checkpoint-1`"


def test_checkpoints_of_one_file_each(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (5, 10):
        torch.save({"state_dict": {"w": torch.full((2,), float(step))}}, run / f"epoch=1-step={step}.ckpt")
    (run / "epoch=2-step=15.ckpt").touch()
    found = [(f.step, f.why_not) for f in runs.checkpoints(locate(str(run)))]
    assert found == [(5, None), (10, None), (15, "an empty file")]
    convert(run, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["state_dict"]["w"][0] == 10


def test_a_directory_of_other_things_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "logs").mkdir()
    assert runs.checkpoints(locate(str(tmp_path))) == []
    with pytest.raises(ReadError, match="contains no checkpoint of a known format"):
        inspect(tmp_path)


def test_a_long_run_is_listed_without_reading_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(tmp_path / "run" / "checkpoint_0", world=8)
    for step in range(1, 300):
        shutil.copytree(first, tmp_path / "run" / f"checkpoint_{step}", copy_function=os.link)
    monkeypatch.setattr("ckpttool.formats.detect.detect", None)
    monkeypatch.setattr("builtins.open", None)
    found = runs.checkpoints(locate(str(tmp_path / "run")))
    assert len(found) == 300
    assert all(f.complete for f in found)


def test_an_ordinary_checkpoint_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_dcp(tmp_path / "ckpt")
    listed: list[str] = []
    made = Directory.__init__
    monkeypatch.setattr(Directory, "__init__", lambda self, path: [listed.append(path), made(self, path)][1])
    with closing(open_at(locate(str(folder)))):
        assert listed == [str(folder)]


# Almost a producer's -------------------------------------------------------------------------------------------------


def test_without_an_optimizer_it_opens_with_a_warning(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_0")
    (folder / "optimizer.bin").unlink()
    catalogue = inspect(folder)
    assert catalogue.facts["producer"] == "accelerate"
    assert [str(w) for w in catalogue.warnings] == ["there is no optimizer in it"]


@pytest.mark.parametrize(("name", "warnings"), [("unet/model", []), ("ema", ["there is no model in it"])])
def test_a_model_that_a_hook_saves_in_a_folder_is_the_model(name: str, warnings: list[str], tmp_path: Path) -> None:
    """As the training scripts of diffusers do, with the model's average beside it."""
    folder = saved(tmp_path / "checkpoint_0")
    (folder / f"{name}.safetensors").parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder / f"{name}.safetensors")
    assert [str(w) for w in inspect(folder).warnings] == warnings


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_0")
    (folder / "notes.xyz").touch()
    assert "notes.xyz" in inspect(folder).facts["assets"]


def test_a_piece_that_cannot_be_read_leaves_the_others_to_be_seen(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_0")
    whole = (folder / "optimizer.bin").read_bytes()
    (folder / "optimizer.bin").write_bytes(whole[: len(whole) // 2])
    catalogue = inspect(folder)
    assert ("model", "weight") in catalogue.entries
    assert any(str(w).startswith("damaged: ") and "optimizer.bin" in str(w) for w in catalogue.warnings)
    with pytest.raises(CorruptError, match=re.escape("optimizer.bin")):
        convert(folder, tmp_path / "out.pt")


def test_a_step_directory_of_somebody_else_is_not_called_torchtitan(tmp_path: Path) -> None:
    assert "producer" not in inspect(saved_dcp(tmp_path / "step-10")).facts


@pytest.mark.parametrize("other", ["ema.safetensors", "sharded/ema.safetensors"])
def test_weights_beside_the_dcp_of_a_step_are_read(other: str, tmp_path: Path) -> None:
    """torchtitan saves a step in DCP or for transformers."""
    folder, average = saved_dcp(tmp_path / "step-10"), torch.full((3, 2), 7.0)
    (folder / other).parent.mkdir(exist_ok=True)
    save_file({"w": average}, folder / other)
    convert(folder, tmp_path / "all.pt")
    with ckpttool.open(tmp_path / "all.pt") as found:
        (name,) = (tensor.name for tensor in inspect(tmp_path / "all.pt").tensors if tensor.shape == (3, 2))
        assert torch.equal(found[name].torch(), average)


def test_two_models_of_verl_hang_under_their_names(tmp_path: Path) -> None:
    actor = Path(path_of("run/verl_fsdp2_w2")) / "global_step_3" / "actor"
    for role in ("actor", "critic"):
        shutil.copytree(actor, tmp_path / "global_step_3" / role)
    catalogue = inspect(tmp_path / "global_step_3")
    roots = {e.part.root for e in catalogue.entries.values() if e.part.kind in ("model", "optimizer")}
    assert roots == {(role, part) for role in ("actor", "critic") for part in ("model", "optim")}


@pytest.mark.parametrize(
    ("dtype", "factor", "is_copy"), [("bfloat16", 1, True), ("float32", 1, True), ("bfloat16", 2, False)]
)
def test_the_model_that_verl_saves_for_transformers(dtype: str, factor: int, is_copy: bool, tmp_path: Path) -> None:
    """`checkpoint.save_contents: [model, optimizer, extra, hf_model]`: a copy is told by its values, and not by its
    name; what is none is read, and so is an adapter."""
    run = Path(shutil.copytree(path_of("run/verl_fsdp2_w2"), tmp_path / "run")) / "global_step_3"
    with ckpttool.open(run) as ckpt:
        model = {name.removeprefix("model."): ckpt[name].torch() for name in ckpt if name.startswith("model.")}
    cast = {name: (tensor * factor).to(getattr(torch, dtype)).contiguous() for name, tensor in model.items()}
    save_file(cast, run / "actor" / "huggingface" / "model.safetensors")
    (run / "actor" / "lora_adapter").mkdir()
    save_file({"lora_A": torch.ones(2)}, run / "actor" / "lora_adapter" / "adapter_model.safetensors")
    catalogue = inspect(run)
    said = "superseded-file" in {warning.kind for warning in catalogue.warnings}
    read = {path[-1] for path in catalogue.entries if "huggingface" in path}
    assert (said, bool(read & model.keys())) == (is_copy, not is_copy)
    assert any(path[-1] == "lora_A" for path in catalogue.entries) and not catalogue.faults


def test_the_train_state_of_megatron_bridge_is_read(tmp_path: Path) -> None:
    saved_dcp(tmp_path / "iter_0000010")
    (tmp_path / "iter_0000010" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save(
        {"step": torch.tensor(10), "floating_point_operations_so_far": torch.ones(())},
        tmp_path / "iter_0000010" / "train_state.pt",
    )
    catalogue = inspect(tmp_path / "iter_0000010")
    assert catalogue.facts["producer"] == "Megatron Core"
    assert ("train_state", "floating_point_operations_so_far") in catalogue.entries


def test_random_states_that_end_too_early_are_missed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("run/accelerate_fsdp2_rankfiles_w4"), tmp_path / "ckpt"))
    (folder / "random_states_3.pkl").unlink()
    assert any("`random_states_2.pkl` is of 3 ranks, but 4 have written" in str(w) for w in inspect(folder).warnings)


def test_the_shapes_of_local_files_come_from_the_moments(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "a.w": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)},
            "b": {"exp_avg": torch.ones(1), "step": torch.tensor(1.0)},
        }
        groups = [{"lr": 0.1, "params": ["b", "a.w"]}]
        dcp.save({"optimizer": {"state": state, "param_groups": groups}}, checkpoint_id=tmp_path / "o", no_dist=True)
    options = shapes_of_moments(inspect(tmp_path / "o"))
    assert list((options.shapes or {}).items()) == [("b", (1,)), ("a.w", (2, 3))]
    assert options.ordered


def test_the_one_to_be_taken_is_looked_into_however_large_its_index_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_INDEX_READ", 0)
    for step in (1, 2):
        saved_dcp(tmp_path / f"step-{step}", float(step))
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    assert [f.complete for f in runs.checkpoints(locate(str(tmp_path)))] == [True, True]
    catalogue = inspect(tmp_path)
    assert [f["taken"] for f in catalogue.facts["run"]] == [True, False]
    said = "`step-1` is opened; newer checkpoints are incomplete: `step-2`: `__0_0.distcp` is missing"
    assert str(catalogue.warnings[0]) == said


@pytest.mark.parametrize("name", samples_of("dcp"))
def test_the_files_that_an_index_names_are_found_without_building_it(name: str) -> None:
    folder = Path(path_of(name))
    named = {n for index in folder.glob("*.metadata") for n in completeness.named_in(index.read_bytes())}
    assert named == {file.name for file in folder.glob("*.distcp")}
    assert completeness.why_not(Directory(locate(str(folder))), 1 << 20) is None


def test_steps_of_dinov2_in_one_directory(tmp_path: Path) -> None:
    sample = Path(path_of("run/dinov2_w2"))
    run = tmp_path / "run [1]"
    run.mkdir()
    for step in (3, 7, 9):
        for rank in (0, 1):
            shutil.copy(sample / f"model_0000003.rank_{rank}.pth", run / f"model_{step:07}.rank_{rank}.pth")
    (run / "model_0000009.rank_0.pth").unlink()
    found, gone = runs.checkpoints(locate(str(run))), "is missing, which the others have"
    assert [(f.step, f.why_not) for f in found] == [(3, None), (7, None), (9, f"`model_*.rank_*.pth` {gone}")]
    ref = reference("run/dinov2_w2")
    catalogue = inspect(run, shapes=_shapes("dinov2", ref, tmp_path))
    assert [f["name"] for f in catalogue.facts["run"] if f["taken"]] == ["model_0000007.rank_*.pth"]
    assert {f.name for f in catalogue.files} == {f"model_0000007.rank_{rank}.pth" for rank in (0, 1)}
    assert not catalogue.faults


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(path_of("run/trainer")) / "checkpoint-4", tmp_path / "checkpoint-4"))
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"][0]["loss"] = float("nan")
    (folder / "trainer_state.json").write_text(json.dumps(state))
    convert(folder, tmp_path / "out.pt", check=True)
    back = torch.load(tmp_path / "out.pt", weights_only=False)["trainer_state"]
    assert repr(back) == repr(state)


def test_json_that_is_cut_is_a_fault(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(path_of("run/trainer")) / "checkpoint-4", tmp_path / "checkpoint-4"))
    (folder / "trainer_state.json").write_text('{"global_step": 4, ')
    assert any("trainer_state.json` is not JSON" in str(w) for w in inspect(folder).warnings)
    with pytest.raises(CorruptError, match="is not JSON"):
        convert(folder, tmp_path / "out.pt")


def test_a_finished_trainer_run_is_its_last_model(tmp_path: Path) -> None:
    """`save_model` and `save_state` write into the directory that the checkpoints are in."""
    run = Path(shutil.copytree(path_of("run/trainer"), tmp_path / "run"))
    for name in ("model.safetensors", "config.json", "training_args.bin", "trainer_state.json"):
        shutil.copy(run / "checkpoint-4" / name, run / name)
    (run / "runs").mkdir()
    (run / "all_results.json").write_text("{}")
    catalogue = inspect(run)
    assert [str(w) for w in catalogue.warnings] == [
        "the final model is opened; the directory also has `checkpoint-4`, `checkpoint-2`",
        "there is no optimizer and no rng in it",
    ]
    assert {e.part.kind for e in catalogue.entries.values()} == {"model", "progress", "other"}


def torch_shards(folder: Path) -> dict[str, torch.Tensor]:
    """A model in the files that `save_pretrained(safe_serialization=False)` used to write."""
    state = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.full((1,), 7.0)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = {name: f"pytorch_model-0000{i + 1}-of-00003.bin" for i, name in enumerate(state)}
    for name, file in names.items():
        torch.save({name: state[name]}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return state


def test_a_model_of_torch_beside_itself_in_another_dtype(tmp_path: Path) -> None:
    """Both are in the older format: the one without a variant in its name is the model, under its own names."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"a": torch.ones(2).half()}, tmp_path / "pytorch_model.fp16.bin")
    catalogue = inspect(tmp_path)
    assert [*catalogue.entries] == [("a",)] and catalogue.tensor(("a",)).dtype.name == "float32"
    assert "`pytorch_model.fp16.bin` has the tensors of the model" in str(catalogue.warnings)


def test_an_asset_is_not_said_to_be_ignored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    catalogue = inspect(tmp_path)
    assert "training_args.bin" in catalogue.facts["assets"] and not catalogue.warnings


def test_a_model_in_several_torch_files(tmp_path: Path) -> None:
    state = torch_shards(tmp_path / "model")
    catalogue = inspect(tmp_path / "model")
    assert catalogue.facts["producer"] == "transformers"
    assert catalogue.facts["assets"] == ["config.json", "pytorch_model.bin.index.json"]
    convert(tmp_path / "model", tmp_path / "model.safetensors")
    back = load_file(tmp_path / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], t) for name, t in state.items())


def test_an_index_of_torch_files_names_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    torch_shards(tmp_path / "model")
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    text = json.loads(index.read_text())
    text["weight_map"]["gone"] = text["weight_map"]["a"]
    index.write_text(json.dumps(text))
    message = "`pytorch_model.bin.index.json` names `gone`, which its files do not have"
    assert [fault.message for fault in inspect(tmp_path / "model").faults] == [message]
    with pytest.raises(CorruptError, match=re.escape(message)):
        convert(tmp_path / "model", tmp_path / "model.safetensors")


def test_an_index_of_torch_files_is_copied_if_it_is_still_right(tmp_path: Path) -> None:
    torch_shards(tmp_path / "model")
    index = "pytorch_model.bin.index.json"
    torch.save({"state": {}, "param_groups": []}, tmp_path / "model" / "optimizer.pt")
    convert(tmp_path / "model", tmp_path / "whole", producer="same")
    assert (tmp_path / "whole" / index).read_bytes() == (tmp_path / "model" / index).read_bytes()
    convert(tmp_path / "model", tmp_path / "rest", producer="same", drop=["model"])
    assert sorted(os.listdir(tmp_path / "rest")) == ["config.json", "optimizer.pt"]
    for options in ({"rename": ["pytorch_model.a=pytorch_model.x"]}, {"exclude": ["pytorch_model.c"]}):
        with pytest.raises(UsageError, match=re.escape(f"`{index}` is copied as it is, and names")):
            convert(tmp_path / "model", tmp_path / "other", producer="same", **options)
        assert not (tmp_path / "other").exists()


def test_a_model_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    torch_shards(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CorruptError, match=re.escape("`pytorch_model-00002-of-00003.bin` is missing, but")):
        convert(tmp_path / "model", tmp_path / "model.safetensors")


def test_the_files_of_a_model_without_their_index(tmp_path: Path) -> None:
    folder, state = tmp_path / "run", {"a": torch.ones(2, 3), "b": torch.zeros(3)}
    folder.mkdir()
    for i, (name, tensor) in enumerate(state.items()):
        save_file({name: tensor}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    torch.save({"step": 1}, folder / "random_states_0.pkl")
    assert inspect(folder).facts["producer"] == "accelerate"
    convert(folder, tmp_path / "model.safetensors", only="model")
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[name], t) for name, t in state.items())
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert [str(warning) for warning in inspect(folder).warnings] == ["damaged: 1 of 2 files `model-*` are missing"]
    with pytest.raises(CorruptError, match=re.escape("1 of 2 files `model-*` are missing")):
        convert(folder, tmp_path / "all.pt")


def test_each_directory_of_a_run_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats, frameworks, runs and other tools look at one listing."""
    for step in (100, 200):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "model.pt")
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    listed, entries = list[str](), LocalStore.entries

    def counted(store: LocalStore, name: str) -> list[DirectoryEntry]:
        listed.append(name)
        return entries(store, name)

    monkeypatch.setattr(LocalStore, "entries", counted)
    open_source(str(tmp_path)).close()
    assert sorted(listed) == [str(tmp_path), str(tmp_path / "step-100"), str(tmp_path / "step-200")]


def test_an_adapter_of_torchtune_for_peft_alone(tmp_path: Path) -> None:
    """torchtune saves `adapter_model.pt` and the same for PEFT; one that is alone is read."""
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"lora": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    torch.save({"epochs_run": 1}, tmp_path / "recipe_state.pt")
    catalogue = inspect(tmp_path)
    assert catalogue.facts["producer"] == "torchtune"
    assert {"model.w", "adapter_model.lora"} <= {tensor.name for tensor in catalogue.tensors}


def test_verl_of_one_rank_saves_plain_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_1" / "actor"
    folder.mkdir(parents=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), folder / "optim_world_size_1_rank_0.pt")
    torch.save(
        {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}}, folder / "extra_state_world_size_1_rank_0.pt"
    )
    convert(tmp_path, tmp_path.parent / f"{tmp_path.name}.pt", check=True)
    back = torch.load(tmp_path.parent / f"{tmp_path.name}.pt")
    assert torch.equal(back["model"]["weight"], model.weight)
    assert torch.equal(back["optim"]["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert torch.equal(
        back["rng"]["rank0"]["cpu"] if "rank0" in back["rng"] else back["rng"]["cpu"], torch.get_rng_state()
    )


def test_two_worlds_of_verl_in_one_directory(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("run/verl_fsdp2_w2"), tmp_path / "run")) / "global_step_3" / "actor"
    for part in ("model", "optim", "extra_state"):
        shutil.copy(folder / f"{part}_world_size_2_rank_0.pt", folder / f"{part}_world_size_4_rank_0.pt")
    (found,) = runs.checkpoints(locate(str(tmp_path / "run")))
    assert not found.complete
    with pytest.raises(CkptError):
        convert(folder, tmp_path / "out.pt")


def test_a_directory_of_very_many_files_is_told_fast(tmp_path: Path) -> None:
    listing = Directory(locate(str(tmp_path)))
    listing.names = [".metadata", *(f"__0_{i}.distcp" for i in range(100_000))]
    with no_hang():
        assert recognise(listing) is None


@pytest.mark.parametrize("name", [n for n in SAMPLES if n.startswith(("run/accelerate", "run/trainer"))])
def test_keys_are_not_doubled(name: str) -> None:
    ref = reference(name)
    catalogue = inspect(path_of(name))
    tensors = {t.name.replace("module.", "") for t in catalogue.tensors}
    assert {f"model.{n}" for n in ref["model"]} - tensors <= {"model.lm_head.weight"}
    assert not any(n.startswith(("optimizer.optimizer", "model.model.model", "model_1.model")) for n in tensors)
    assert {e.path[1] for e in catalogue.entries.values() if e.path[0] == "optimizer"} == {"state", "param_groups"}


def test_of_two_formats_of_the_model_the_first_is_taken(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint_0")
    model = inspect(folder)
    state = {name: torch.full(model.tensor(("model", name)).shape, 1.0) for name in ("weight", "bias")}
    convert(folder, tmp_path / "before.pt")
    before = torch.load(tmp_path / "before.pt")["model"]
    torch.save(before, folder / "pytorch_model.bin")
    catalogue = inspect(folder)
    assert [str(w) for w in catalogue.warnings] == ["`pytorch_model.bin` has the tensors of `model`, and is not read"]
    assert catalogue.tensor(("model", "bias")).shape == (2,)
    # With other tensors it is a part of its own, or with other values.
    for other in (state | {"head": torch.ones(5)}, before | {"weight": before["weight"] + torch.eye(2, 3)}):
        torch.save(other, folder / "pytorch_model.bin")
        catalogue = inspect(folder)
        assert not catalogue.warnings and catalogue.tensor(("pytorch_model.bin", "weight")).shape == (2, 3)
        convert(folder, tmp_path / "out.pt", overwrite=True)
        written = torch.load(tmp_path / "out.pt")["pytorch_model.bin"]
        assert written.keys() == other.keys() and all(torch.equal(written[name], other[name]) for name in other)


def test_a_model_of_transformers_beside_its_average_is_the_model(tmp_path: Path) -> None:
    """The average was `model`, and the model `other`: `convert --only model` took the average."""
    state = {name: torch.full((2, 3), value) for value, name in enumerate(("a.weight", "b.weight"))}
    average = {name: tensor + 0.5 for name, tensor in state.items()}
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Net"]}')
    save_file(state, folder / "model.safetensors")
    torch.save(average, folder / "ema.pt")
    torch.save(state, folder / "pytorch_model.bin")
    catalogue = inspect(folder)
    assert {tensor.part for tensor in catalogue.tensors} == {Part("model", ("model",)), Part("model", ("ema",))}
    assert [str(w) for w in catalogue.warnings] == ["`pytorch_model.bin` has the tensors of `model`, and is not read"]
    convert(folder, tmp_path / "out.pt", only="model")
    written = torch.load(tmp_path / "out.pt")
    assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
    convert(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(whole["ema"][name], average[name]) for name in state)


def test_checkpoints_beside_a_model_are_no_parts_of_it(tmp_path: Path) -> None:
    """Whatever else lies there: the last model of a Trainer, in the directory of its run."""
    folder = Path(shutil.copytree(path_of("run/trainer"), tmp_path / "run"))
    (folder / "config.json").write_text('{"architectures": ["Net"]}')
    save_file({"a.weight": torch.ones(2, 3)}, folder / "model.safetensors")
    for beside in ({}, {"a.weight": torch.zeros(2, 3)}):
        if beside:
            torch.save(beside, folder / "ema.pt")
        names = {tensor.name for tensor in inspect(folder).tensors}
        assert names == ({"model.a.weight", "ema.a.weight"} if beside else {"a.weight"})


def test_a_twin_of_a_damaged_model_is_read(tmp_path: Path) -> None:
    """That the values cannot be compared is not evidence that they are the same, and not the end of `inspect`."""
    folder = shutil.copytree(CHECKPOINTS / "run/accelerate_fsdp2_sharded_w2/ckpt", tmp_path / "ckpt")
    names = [tensor.name for tensor in inspect(folder).tensors if tensor.part.kind == "model"]
    convert(folder, tmp_path / "model.pt", only="model")
    state = torch.load(tmp_path / "model.pt")
    torch.save(state.get("model", state), folder / "pytorch_model.bin")
    assert {tensor.path[0] for tensor in inspect(folder).tensors} == {
        "custom_checkpoint_0",
        "model",
        "optimizer",
        "rng",
    }
    (folder / "pytorch_model_fsdp_0/__1_0.distcp").unlink()
    catalogue = inspect(folder)
    assert any(warning.kind == "damaged" for warning in catalogue.warnings)
    roots = [tensor.path[0] for tensor in catalogue.tensors if tensor.part.kind == "model"]
    assert roots.count("model") == len(names) <= roots.count("pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("accelerate_fsdp2_sharded_w2/ckpt", "optimizer_0"),
        ("accelerate_fsdp2_sharded_w2/ckpt", "pytorch_model_fsdp_0"),
        ("trainer_fsdp2_w2/ckpt/checkpoint-4", "optimizer_0"),
        ("olmo_core_w2/ckpt/step3", "model_and_optim"),
    ],
)
def test_files_in_the_folders_of_a_framework_are_components(name: str, inner: str, tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "run" / name, tmp_path / Path(name).name)
    before = inspect(folder)
    torch.save({"shadow": {"w": torch.arange(3.0)}}, folder / inner / "extra.pt")
    (folder / inner / "notes.md").write_text("by hand")
    after = inspect(folder)
    assert len(after.tensors) == len(before.tensors) + 1
    assert f"{inner}/notes.md" in after.facts["assets"]
    convert(folder, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=False)[inner]["shadow"]["w"], torch.arange(3.0))
    # What is of no known format is an error there too.
    (folder / inner / "extra.pt").write_bytes(b"\x93unknown\0" * 9)
    with pytest.raises(CkptError, match=r"extra\.pt"):
        convert(folder, tmp_path / "none.pt")


# On the command line -------------------------------------------------------------------------------------------------


def ran(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "ckpttool", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_inspect_lists_the_run_first_and_json_has_it(tmp_path: Path) -> None:
    for step in range(1, 26):
        saved_dcp(tmp_path / f"step-{step}")
    (tmp_path / "step-25" / ".metadata").unlink()
    code, out, _ = ran("inspect", str(tmp_path))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}  25 checkpoints"
    assert "  5 before them, shown by -v" in lines
    assert re.search(r"(?m)^  step-24 +24 +[\d.]+ kB +dcp +shown below$", out)
    assert re.search(r"(?m)^  step-25 +25 +[\d.]+ kB +dcp +not complete: no `\.metadata`", out)
    assert str(tmp_path / "step-24") in lines
    assert "step-1 " in ran("inspect", str(tmp_path), "-v")[1]
    code, out, _ = ran("inspect", str(tmp_path), "--json")
    said = json.loads(out)
    assert said["schema"] == "ckpttool/inspect/2"
    assert [f["step"] for f in said["run"]] == list(range(1, 26))
    assert said["run"][-1] == {
        "name": "step-25", "path": str(tmp_path / "step-25"), "step": 25,
        "file_bytes": (tmp_path / "step-25" / "__0_0.distcp").stat().st_size, "producer": None, "format": "dcp",
        "complete": False, "why_not": "no `.metadata`: the save did not end", "taken": False,
    }  # fmt: skip


def test_no_complete_checkpoint_exits_with_the_list(tmp_path: Path) -> None:
    (saved_dcp(tmp_path / "step-1") / ".metadata").unlink()
    code, out, err = ran("inspect", str(tmp_path))
    assert (code, out) == (3, "")
    assert err.startswith(f"error: `{tmp_path}`: the one checkpoint in it is not complete: `step-1`: no `.metadata`")


def test_pieces_and_assets_in_json(tmp_path: Path) -> None:
    said = json.loads(ran("inspect", path_of("run/trainer"), "--json")[1])
    assert said["producer"] == "transformers Trainer"
    assert "config.json" in said["assets"]
    assert {m["path"]: (m["root"], m["format"]) for m in said["mounted"]} == {
        "model.safetensors": ("model", "safetensors"), "optimizer.pt": ("optimizer", "torch"),
        "rng_state.pth": ("rng", "torch"), "training_args.bin": ("training_args", "torch"),
        "scheduler.pt": ("scheduler", "torch"), "trainer_state.json": ("trainer_state", "json"),
    }  # fmt: skip


def test_a_conversion_names_the_assets(tmp_path: Path) -> None:
    made = convert(path_of("run/trainer"), tmp_path / "out.pt")
    assert made.notes[0] == "using `checkpoint-4`, the newest complete of the 2 checkpoints in the run"
    assert made.notes[1].startswith("not copied (not part of the state): `config.json`, ")


@pytest.mark.parametrize("below", ["checkpoint-4", "plain"])
def test_files_of_a_repository_are_no_assets(tmp_path: Path, below: str) -> None:
    """A clone, or a download, has files that say how git keeps the others."""
    run = tmp_path / below
    shutil.copytree(f"{path_of('run/trainer')}/checkpoint-4", run)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (run / name).unlink() if below == "plain" else None
    (run / ".git").mkdir()
    for name in (".gitattributes", ".gitignore", ".git/HEAD"):
        (run / name).write_text("*.safetensors filter=lfs\n")
    catalogue = inspect(run)
    assert "config.json" in catalogue.facts["assets"]
    assert not [name for name in catalogue.facts["assets"] if ".git" in name]
    made = convert(run, tmp_path / "out.pt")
    assert "not copied (not part of the state)" in "\n".join(made.notes) and ".git" not in "\n".join(made.notes)


# Names that say little ------------------------------------------------------------------------------------------------


def test_a_link_to_the_newest_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    for step in (1, 2):
        saved_dcp(tmp_path / f"step-{step}")
    (tmp_path / "last").symlink_to("step-2")
    assert [f.name for f in runs.checkpoints(locate(str(tmp_path)))] == ["step-1", "step-2"]
    assert not any("last" in str(w) for w in inspect(tmp_path).warnings)
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("step-1")
    assert any("`last` names step 1, but step 2 is opened" in str(w) for w in inspect(tmp_path).warnings)


def test_names_that_do_not_say_which_is_the_newest(tmp_path: Path) -> None:
    for name in ("best_acc", "best_loss"):
        saved_dcp(tmp_path / name)
    with pytest.raises(ReadError) as caught:
        inspect(tmp_path)
    assert caught.value.message == (
        f"`{tmp_path}` has 2 checkpoints, `best_acc`, `best_loss`, and nothing says which is the newest"
    )
    (tmp_path / "best_acc" / ".metadata").unlink()
    assert [f["name"] for f in inspect(tmp_path).facts["run"] if f["taken"]] == ["best_loss"]
    saved_dcp(tmp_path / "step-1")
    assert [f["name"] for f in inspect(tmp_path).facts["run"] if f["taken"]] == ["step-1"]


def test_a_last_step_for_transformers(tmp_path: Path) -> None:
    """torchtitan's last step may be a model of Hugging Face, sharded and consolidated."""
    shutil.copytree(Path(path_of("run/torchtitan_w2")) / "step-3", tmp_path / "step-3")
    shutil.copytree(path_of("hf/consolidated_w2"), tmp_path / "step-10")
    catalogue = inspect(tmp_path)
    assert [(f["name"], f["format"], f["taken"]) for f in catalogue.facts["run"]] == [
        ("step-3", "dcp", False), ("step-10", "safetensors", True)
    ]  # fmt: skip
    assert {e.part.kind for e in catalogue.entries.values()} == {"model"}


def test_an_adapter_alone(tmp_path: Path) -> None:
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert inspect(tmp_path).facts["assets"] == ["adapter_config.json"]


def test_deepspeed_that_contradicts_itself_is_a_fault_beside_the_rest(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(path_of("run/trainer")) / "checkpoint-4", tmp_path / "checkpoint-4"))
    (folder / "optimizer.pt").unlink()
    (folder / "global_step4").mkdir()
    torch.save({"module": {"w": torch.ones(2)}}, folder / "global_step4" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (fault,) = inspect(folder).faults
    assert "global_step4" in fault.message and fault.exit_code == 4


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("name", "file"), [*one_of_each_kind()])
def test_damage_ends_in_one_of_our_errors(name: str, file: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path_of(name), tmp_path / "ckpt"))
    whole = (copy / file).read_bytes()
    for spoilt in (whole[: len(whole) // 2], b"\x80\x02" + whole[5:100], b""):
        (copy / file).write_bytes(spoilt)
        try:
            runs.checkpoints(locate(str(copy)))
            inspect(copy)
        except CkptError as error:
            assert error.message
    (copy / file).unlink()
    (copy / file).mkdir()
    try:
        inspect(copy)
    except CkptError as error:
        assert error.message


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_broken_optimizer_does_not_stop_the_model(damage: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(path_of("run/accelerate_fsdp1_rankfiles_w2"), tmp_path / "run"))
    broken = folder / "optimizer_0_rank1.bin"
    if damage == "gone":
        broken.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[:3000])
    for flags in ({}, {"only": "optimizer"}, {"drop": "rng"}, {"only": ["model", "optimizer"]}):
        with pytest.raises(CkptError, match="optimizer_0_rank"):
            convert(str(folder), str(tmp_path / "out.pt"), **flags)  # type: ignore[arg-type]
    assert any("optimizer_0_rank" in str(text) for text in inspect(folder).warnings)
    convert(str(folder), str(tmp_path / "out.pt"), only="model", check=True)
    whole = reference("run/accelerate_fsdp1_rankfiles_w2")["model"]
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("path", sorted((CHECKPOINTS / "run").iterdir()), ids=lambda path: path.name)
def test_a_directory_above_a_run_opens_or_names_the_newest_checkpoint(path: Path) -> None:
    """What the hint names opens, and is the checkpoint that the run itself opens."""
    with closing(open_source(str(path / "ckpt"))) as source:
        expected = source.catalogue
    try:
        with closing(open_source(str(path))) as source:
            found = source.catalogue
    except ReadError as error:
        named = re.fullmatch("name one: `(.*)`", error.hint or "")
        assert named is not None and "not a checkpoint; found" in error.message
        with closing(open_source(named[1])) as source:
            found = source.catalogue
    if path.name == "hf_assets":
        # A folder without a step in its name is not a checkpoint of a run, but a part beside `reference.pt`.
        found.entries = {entry[1:]: value for entry, value in found.entries.items() if entry[0] == "ckpt"}
        found.files = [file for file in found.files if file.name.startswith("ckpt/")]
        for file in found.files:
            file.name = file.name.removeprefix("ckpt/")
    assert found.entries.keys() == expected.entries.keys()
    assert [f.name for f in found.own_files] == [f.name for f in expected.own_files]


def test_an_optimizer_under_another_name_is_not_missed(tmp_path: Path) -> None:
    """The row of OLMo calls it `optim`, and a part of its kind is an optimizer."""
    shutil.copytree(CHECKPOINTS / "run/olmo_unsharded_w2/ckpt", tmp_path / "ckpt")
    folder = next(path.parent for path in (tmp_path / "ckpt").rglob("optim.*"))
    (optim,) = folder.glob("optim.*")
    optim.rename(folder / f"adamw{optim.suffix}")
    assert "there is no optim" not in str(inspect(folder).warnings)
    (folder / f"adamw{optim.suffix}").unlink()
    assert "there is no optim in it" in str(inspect(folder).warnings)


@pytest.mark.parametrize("config", ["config.json", "notes.md"])
def test_an_index_of_torch_files_without_any_of_them(config: str, tmp_path: Path) -> None:
    """It was "no checkpoint of a known format"."""
    index = {"weight_map": {"w": "pytorch_model-00001-of-00002.bin", "v": "pytorch_model-00002-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / config).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CorruptError, match=r"pytorch_model-00001-of-00002\.bin` is missing, but `pytorch_model\.bin"):
        inspect(tmp_path)


@pytest.mark.parametrize("index", ["", '{"weight_map": {"w": "pyto', "[1]"])
def test_an_index_of_torch_files_that_is_none(index: str, tmp_path: Path) -> None:
    """Beside accelerate's files it was ignored."""
    folder = saved(tmp_path / "checkpoint_0")
    (folder / "model.safetensors").unlink()
    for number, name in ((1, "weight"), (2, "bias")):
        torch.save({name: torch.ones(2)}, folder / f"pytorch_model-0000{number}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(CorruptError, match=r"pytorch_model\.bin\.index\.json`"):
        convert(folder, tmp_path / "out.pt")


def test_a_large_index_of_torch_files_is_compared(tmp_path: Path) -> None:
    """One of more than 64 MiB was not: what it names and the files do not have went unsaid."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "config.json").write_text("{}")
    weight_map = dict.fromkeys(("w", "lost"), "pytorch_model-00001-of-00001.bin")
    with open(tmp_path / "pytorch_model.bin.index.json", "w") as file:
        file.write(json.dumps({"weight_map": weight_map})[:-1] + " " * (65 << 20) + "}")
    assert "names `lost`, which its files do not have" in str(inspect(tmp_path).faults)


def test_the_state_of_the_trainer_is_missed_beside_dcp(tmp_path: Path) -> None:
    """Without it the directory was called accelerate's, and whole."""
    folder = Path(shutil.copytree(Path(path_of("run/trainer_fsdp2_w2")) / "checkpoint-4", tmp_path / "checkpoint-4"))
    (folder / "trainer_state.json").unlink()
    with pytest.raises(CorruptError, match=r"`trainer_state\.json` is missing"):
        convert(folder, tmp_path / "out.pt")
