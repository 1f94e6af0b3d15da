"""Directories of no framework: each file is read, listed as an asset, or named in an error."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.analysis.describe.summary import summarise
from ckpttool.catalogue.models import models
from ckpttool.errors import CkptError, CorruptError, LossError, ReadError, UsageError
from ckpttool.formats.documents import reader
from ckpttool.serialization import strict_json


def saved(folder: Path, *, ranks: int = 2) -> Path:
    """Write what scripts write for a step, one file for each part."""
    folder.mkdir(parents=True)
    model, average = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save(average.state_dict(), folder / "ema.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    for rank in range(ranks):
        torch.save({"torch": torch.get_rng_state(), "python": random.getstate(), "of": rank}, folder / f"rng_{rank}.pt")
    (folder / "state.json").write_text(json.dumps({"step": 100, "best_loss": 2.25}))
    (folder / "config.json").write_text("{}")
    (folder / "train.log").write_text("step 100 loss 2.25\n")
    return folder


def kinds(path: Path) -> dict[str, set[str]]:
    """The roots of the parts of each kind."""
    found: dict[str, set[str]] = {}
    for entry in ckpttool.inspect(path).entries.values():
        found.setdefault(entry.part.kind, set()).add(".".join(map(str, entry.part.root)))
    return found


def test_each_file_is_a_part(tmp_path: Path) -> None:
    opened = ckpttool.inspect(saved(tmp_path / "step_100"))
    assert kinds(tmp_path / "step_100") == {
        "model": {"model", "ema"},
        "optimizer": {"optimizer"},
        "scheduler": {"scheduler"},
        "rng": {"rng"},
        "progress": {"state"},
    }
    assert opened.facts["assets"] == ["config.json", "train.log"]
    assert ("rng", "rank1", "torch") in opened.entries and not opened.faults
    weight = torch.load(tmp_path / "step_100" / "ema.pt")["weight"]
    with ckpttool.open(tmp_path / "step_100") as ckpt:
        assert ckpt["ema.weight"].torch().equal(weight)


def cut(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:900])


def unknown(folder: Path) -> None:
    (folder / "buffer.dat").write_bytes(bytes(range(128, 256)))


def replay(folder: Path) -> None:
    (folder / "replay.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def dangling(folder: Path) -> None:
    (folder / "teacher.pt").symlink_to(folder / "gone.pt")


def empty(folder: Path) -> None:
    (folder / "teacher.pt").touch()


def below(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    unknown(folder / "a" / "b")


@pytest.mark.parametrize("spoil", [cut, unknown, replay, pipe, dangling, empty, below])
def test_what_cannot_be_read_is_an_error(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """Of every command but `inspect`, unless `--only` leaves it out."""
    folder = saved(tmp_path / "step_100")
    spoil(folder)
    with pytest.raises((CorruptError, ReadError)):
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")
    assert not (tmp_path / "out.pt").exists()
    assert len(ckpttool.inspect(folder).faults) == 1
    ckpttool.convert(folder, tmp_path / "model.pt", to="torch", only="model")
    expected, found = torch.load(folder / "model.pt"), torch.load(tmp_path / "model.pt")
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def test_a_framework_does_not_know_all(tmp_path: Path) -> None:
    """`checkpoint-4/ema.pt` of a callback of the Trainer, beside what the Trainer writes."""
    folder = saved(tmp_path / "checkpoint-4")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    opened = ckpttool.inspect(folder)
    assert opened.facts["producer"] == "transformers Trainer"
    assert {"ema", "model"} <= kinds(folder)["model"] and not opened.faults


@pytest.mark.parametrize("name", ["runs", "logs", "wandb"])
@pytest.mark.parametrize("framework", ["Trainer", "torchtune"])
def test_state_among_logs_is_read(framework: str, name: str, tmp_path: Path) -> None:
    """What a framework does not read itself: state in the folder of the logs was left out without a word."""
    folder = saved(tmp_path / "checkpoint-4")
    if framework == "Trainer":
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    else:
        torch.save({"weight": torch.ones(3)}, folder / "model-00001-of-00001.bin")
        (folder / "model.pt").rename(folder / "adapter_model.pt")
    before = {entry.name for entry in ckpttool.inspect(folder).entries.values()}
    logs = folder / name / "Feb14_12-00-00_host"
    logs.mkdir(parents=True)
    for log in ("events.out.tfevents.1.host.2.0", "run-1.wandb", "media.bin2"):
        (logs / log).write_bytes(bytes(range(256)))
    for log in ("config.yaml", "summary.json", "output.log", "requirements.txt"):
        (logs / log).write_text('{"step": 3}')
    catalogue = ckpttool.inspect(folder)
    assert {entry.name for entry in catalogue.entries.values()} == before and not catalogue.faults
    assert len([asset for asset in catalogue.facts["assets"] if asset.startswith(f"{name}/")]) == 7
    torch.save({"weight": torch.full((3,), 7.0)}, logs / "best.pt")
    ckpttool.convert(folder, tmp_path / "whole.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "whole.pt")[name]["Feb14_12-00-00_host"]["weight"], torch.full((3,), 7.0))
    (logs / "best.pt").write_bytes(b"no checkpoint" * 99)
    with pytest.raises(CkptError, match=r"best\.pt"):
        ckpttool.convert(folder, tmp_path / "other.pt", to="torch")


@pytest.mark.parametrize("name", ["optimizer.pth.tar", "optimizer.th", "optimizer.pkl", "optimizer"])
@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_state_of_any_suffix_beside_a_pretrained_model(name: str, weights: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    torch.save(model.state_dict(), tmp_path / weights) if weights[-3:] == "bin" else save_file(
        model.state_dict(), tmp_path / weights
    )
    torch.save({"state": {0: {"exp_avg": torch.ones(3, 4)}}, "param_groups": [{"params": [0, 1]}]}, tmp_path / name)
    for asset in ("config.json", "LICENSE", "NOTICE", "tokenizer.json"):
        (tmp_path / asset).write_text("{}")
    opened = ckpttool.inspect(tmp_path)
    assert {entry.part.kind for entry in opened.entries.values()} == {"model", "optimizer"}
    assert {*opened.facts["assets"]} == {"config.json", "LICENSE", "NOTICE", "tokenizer.json"}


def test_what_is_not_taken_of_a_tuple_is_named(tmp_path: Path) -> None:
    torch.save((torch.nn.Linear(2, 3).state_dict(), torch.nn.Linear(3, 1).state_dict()), tmp_path / "pair.pt")
    result = ckpttool.convert(tmp_path / "pair.pt", tmp_path / "one.pt", to="torch", only="0")
    assert result.dropped == ["1.weight", "1.bias"]


def test_folders_are_parts_of_a_step(tmp_path: Path) -> None:
    """W4: the folders of a step were taken for checkpoints of a run, of which the last was converted."""
    step = tmp_path / "step_2"
    for name in ("model", "optimizer", "trainer"):
        (step / name).mkdir(parents=True)
        torch.save({"weight": torch.ones(3)}, step / name / "x.pt")
    (step / "data_reader").mkdir()
    for rank in range(2):
        torch.save({"position": rank}, step / "data_reader" / f"dp_0{rank}.pt")
    names = {entry.name for entry in ckpttool.inspect(step).entries.values()}
    assert {"model.weight", "optimizer.weight", "trainer.weight"} <= names
    assert {"data_reader.rank0.position", "data_reader.rank1.position"} <= names


def test_files_of_ranks_beside_whole_files(tmp_path: Path) -> None:
    """W5 and W7: they were taken for all that there is, and random states for tensors that should agree."""
    for rank in range(2):
        torch.save(torch.randint(0, 255, (5056,), dtype=torch.uint8), tmp_path / f"rng_{rank}.pt")
    torch.save({"model": {"weight": torch.ones(3)}}, tmp_path / "state.pt")
    opened = ckpttool.inspect(tmp_path)
    names = {entry.name for entry in opened.entries.values()}
    assert names == {"state.model.weight", "rng.rank0", "rng.rank1"} and not opened.faults


def test_files_of_ranks_that_differ_beside_whole_files(tmp_path: Path) -> None:
    step = saved(tmp_path / "step_100", ranks=0)
    for rank in (0, 1):
        torch.save({"order": torch.arange(6) + rank, "position": rank}, step / f"dataloader_rank_{rank}.pth")
    opened = ckpttool.inspect(step)
    assert not opened.faults and {("model", "weight"), ("dataloader", "rank1", "order")} <= opened.entries.keys()


def test_what_a_rank_has_of_its_own_is_opened_by_itself(tmp_path: Path) -> None:
    """Points of each rank, as gsplat saves them."""
    for rank in (0, 1):
        torch.save({"splats": {"means": torch.ones(5 + rank, 3)}, "step": 9}, tmp_path / f"ckpt_9_rank{rank}.pt")
    opened = ckpttool.inspect(tmp_path / "ckpt_9_rank1.pt")
    assert not opened.faults and opened.entries["splats", "means"].shape == (6, 3)


def test_a_model_beside_its_configuration_is_of_no_framework(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "config.yaml").write_text("lr: 0.1")
    opened = ckpttool.inspect(tmp_path)
    assert (opened.facts.get("producer"), opened.format, opened.warnings) == (None, "torch", [])


def test_states_of_epochs_beside_the_last_weights(tmp_path: Path) -> None:
    """As kohya-ss writes them with `--save_state`."""
    for epoch in (1, 2):
        saved(tmp_path / f"lora-{epoch:06d}-state")
    torch.save({"weight": torch.ones(2)}, tmp_path / "lora.pt")
    taken = [one["name"] for one in ckpttool.inspect(tmp_path).facts["run"] if one["taken"]]
    assert taken == ["lora-000002-state"]


def test_a_suffix_of_tokenizers_says_nothing(tmp_path: Path) -> None:
    step = saved(tmp_path / "step_100")
    torch.save({"weight": torch.ones(2)}, step / "critic.model")
    (step / "source.spm").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\xff")
    opened = ckpttool.inspect(step)
    assert ("critic", "weight") in opened.entries and "source.spm" in opened.facts["assets"]


def test_side_files_of_other_kinds(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "replay.pkl").write_bytes(pickle.dumps({"seen": np.arange(5), "position": 3}))
    np.savez(tmp_path / "normalizer.npz", mean=np.ones(3), count=np.array(7))
    (tmp_path / "notes.yaml").write_text("step: 12\nlr: 0.1\n")
    with ckpttool.open(tmp_path) as ckpt:
        assert ckpt["replay.seen"].numpy().tolist() == [0, 1, 2, 3, 4]
        assert ckpt["normalizer.mean"].numpy().tolist() == [1, 1, 1]
        assert ckpt["notes.step"] == 12 and ckpt["replay.position"] == 3


def test_the_same_files_again(tmp_path: Path) -> None:
    """From DCP, which has the names of the state and not those of the files."""
    folder = saved(tmp_path / "step_100")
    save_file({"codes": torch.arange(4)}, folder / "codes.safetensors")
    ckpttool.convert(folder, tmp_path / "dcp", to="dcp")
    ckpttool.convert(tmp_path / "dcp", tmp_path / "again", producer=str(folder), check=True)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in ("model.pt", "ema.pt", "optimizer.pt", "scheduler.pt", "rng_0.pt", "rng_1.pt"):
        found, expected = (torch.load(path / name, weights_only=False) for path in (tmp_path / "again", folder))
        assert str(found) == str(expected), name
    assert load_file(tmp_path / "again" / "codes.safetensors")["codes"].tolist() == [0, 1, 2, 3]
    assert json.loads((tmp_path / "again" / "state.json").read_text()) == {"step": 100, "best_loss": 2.25}
    torch.optim.AdamW(torch.nn.Linear(4, 3).parameters()).load_state_dict(torch.load(tmp_path / "again/optimizer.pt"))


def test_what_lies_in_folders_of_any_name_is_state(tmp_path: Path) -> None:
    """`logs/`, `original/` and their like are those of frameworks in directories of frameworks only."""
    folder = saved(tmp_path / "step_100")
    for name in ("logs", "runs", "original"):
        (folder / name).mkdir()
        (folder / name / "state.json").write_text('{"tokens_seen": 7}')
    catalogue = ckpttool.inspect(folder)
    assert not any("state.json" in asset for asset in catalogue.facts.get("assets", ()))
    assert {catalogue.entries[(name, "tokens_seen")].value for name in ("logs", "runs", "original")} == {7}


def test_several_models_are_asked_for_by_name(tmp_path: Path) -> None:
    source = tmp_path / "pair"
    source.mkdir()
    for name, size in (("netG", 3), ("netD", 5)):
        torch.save(torch.nn.Linear(size, 2).state_dict(), source / f"{name}.pth")
    with pytest.raises(UsageError, match="there are 2 models: `netD`, `netG`"):
        ckpttool.convert(source, tmp_path / "out.pt", to="torch", only="model")
    ckpttool.convert(source, tmp_path / "out.pt", to="torch", only="netG")
    assert torch.load(tmp_path / "out.pt")["weight"].shape == (2, 3)


def test_an_average_is_not_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step_100")
    (folder / "model.pt").rename(folder / "weights.pt")
    ckpttool.convert(folder, tmp_path / "out.pt", to="torch", only="model")
    assert torch.load(tmp_path / "out.pt")["weight"].equal(torch.load(folder / "weights.pt")["weight"])


@pytest.mark.parametrize(
    "names", [("G_{}.pth", "D_{}.pth"), ("{:06}_nets.ckpt", "{:06}_optims.ckpt"), ("g_{:08}", "do_{:08}")]
)
def test_files_of_a_step_beside_others(names: tuple[str, str], tmp_path: Path) -> None:
    for step in (100, 200):
        for name in names:
            torch.save({"weight": torch.full((2,), float(step))}, tmp_path / name.format(step))
    torch.save({"weight": torch.zeros(2)}, tmp_path / "best.pth")
    (run,) = {one["name"]: one for one in ckpttool.inspect(tmp_path).facts["run"] if one["taken"]}.values()
    assert run["step"] == 200
    with ckpttool.open(tmp_path) as ckpt:
        assert [tensor.torch().tolist() for tensor in ckpt.tensors()] == [[200, 200], [200, 200]]
    with ckpttool.open(run["path"]) as ckpt:
        assert len([*ckpt.tensors()]) == 2
    # A save that did not end.
    (tmp_path / names[1].format(200)).unlink()
    with ckpttool.open(tmp_path) as ckpt:
        assert [tensor.torch().tolist() for tensor in ckpt.tensors()] == [[100, 100], [100, 100]]
        assert any("is missing, which the others have" in warning for warning in ckpt.warnings)


def test_errors_name_the_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step_100")
    unknown(folder)
    with pytest.raises(CkptError, match=r"buffer.dat`: unrecognised format: .* that begin with 80 81 82 83") as error:
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")
    assert error.value.hint == "it may hold training state; `--only` leaves it out"
    (folder / "buffer.dat").write_bytes(gzip.compress(b"replay"))
    with pytest.raises(CkptError, match=r"buffer.dat`: compressed with gzip"):
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        (".DS_Store", b"\0\0\0\x01Bud1"),
        ("module", b"\x7fELF\x02\x01"),
        ("samples", b"\xff\xd8\xff\xe0"),
        ("__pycache__/train.cpython-311.pyc", b"\xa7\r\r\n"),
    ],
)
def test_what_cannot_hold_state_is_an_asset(name: str, head: bytes, tmp_path: Path) -> None:
    """`.DS_Store` in a copy of a checkpoint was an error."""
    folder = saved(tmp_path / "step_100")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(head + bytes(range(256)))
    opened = ckpttool.inspect(folder)
    assert name in opened.facts["assets"] and not opened.faults


def test_state_beside_the_folders_of_a_run_is_of_the_newest(tmp_path: Path) -> None:
    """As torchtune saves it: an optimizer that each epoch writes again, which was left out with a warning."""
    run = tmp_path / "run"
    run.mkdir()
    for epoch in (0, 1):
        (run / f"epoch_{epoch}").mkdir()
        (run / f"epoch_{epoch}" / "config.json").write_text("{}")
        save_file({"w": torch.full((3,), float(epoch))}, run / f"epoch_{epoch}" / "model.safetensors")
    (run / "recipe_state").mkdir()
    optimizer = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"optimizer": optimizer, "epochs_run": 2}, run / "recipe_state" / "recipe_state.pt")
    (run / "average").mkdir()
    save_file({"w": torch.zeros(3)}, run / "average" / "model.safetensors")
    ckpttool.convert(run, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["epoch_1"]["w"], torch.ones(3)) and found["recipe_state"]["epochs_run"] == 2
    assert torch.equal(found["recipe_state"]["optimizer"]["state"]["w"]["exp_avg"], torch.ones(3))
    assert any(
        "not opened, as they are of no step: `average/`" in str(warning) for warning in ckpttool.inspect(run).warnings
    )
    # That of an epoch which is not complete is not of the one before it.
    (run / "epoch_2").mkdir()
    names = {entry.name for entry in ckpttool.inspect(run).entries.values()}
    assert names == {"w"}


def test_files_of_epochs_and_batches_are_checkpoints_each(tmp_path: Path) -> None:
    """As AllenNLP names them: of the second epoch, nothing was read and nothing said."""
    for epoch, batch in ((0, 0), (0, 50), (1, 0)):
        stem = f"e{epoch}_b{batch}"
        torch.save({"w": torch.full((3,), float(epoch + batch))}, tmp_path / f"model_state_{stem}.th")
        torch.save({"optimizer": {"state": {0: {"m": torch.ones(3)}}}}, tmp_path / f"training_state_{stem}.th")
    for epoch in (0, 1):
        (tmp_path / f"metrics_epoch_{epoch}.json").write_text(json.dumps({"epoch": epoch}))
    catalogue = ckpttool.inspect(tmp_path)
    assert [row["name"] for row in catalogue.facts["run"]] == [f"*_state_{s}.th" for s in ("e0_b0", "e0_b50", "e1_b0")]
    assert {file.name for file in catalogue.files} == {"model_state_e1_b0.th", "training_state_e1_b0.th"}


def test_safetensors_files_of_different_names_are_parts_that_keep_them(tmp_path: Path) -> None:
    """Their tensors were one model, which `--producer same` wrote as `model.safetensors`."""
    folder = tmp_path / "saved"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "policy.safetensors")
    save_file({"v": torch.zeros(2)}, folder / "critic.safetensors")
    assert {tensor.name for tensor in ckpttool.inspect(folder).tensors} == {"policy.w", "critic.v"}
    ckpttool.convert(folder, tmp_path / "same", producer="same")
    assert {path.name for path in (tmp_path / "same").glob("*.safetensors")} == {path.name for path in folder.iterdir()}
    assert torch.equal(load_file(tmp_path / "same" / "policy.safetensors")["w"], torch.ones(3))


def mapped(folder: Path, **tensors: torch.Tensor) -> None:
    """Write tensors as `TensorDict.memmap` of tensordict 0.15 does."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"shape": [], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    for name, one in tensors.items():
        dtype, shape = str(one.dtype), [*one.shape]
        said[name] = {"device": "cpu", "shape": shape, "dtype": dtype, "is_nested": False}  # type: ignore[assignment]
        (folder / f"{name}.memmap").write_bytes(one.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    (folder / "meta.json").write_text(json.dumps(said))


def test_what_describes_memory_maps_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was parsed for each map, which took time that grows with the square of their number."""
    folder = saved(tmp_path / "step_100")
    mapped(folder / "replay", **{f"field{i}": torch.ones(2) for i in range(20)})
    parsed: list[str] = []
    parse = strict_json.parse

    def noted(data: bytes, what: str, **hooks: Any) -> Any:
        parsed.extend([] if hooks else [what])  # with hooks as a document of its own
        return parse(data, what, **hooks)

    monkeypatch.setattr(strict_json, "parse", noted)
    assert len([one for one in ckpttool.inspect(folder).tensors if one.name.startswith("replay.")]) == 20
    assert len([what for what in parsed if "meta.json" in what]) == 1


def test_memory_maps_of_tensordict_are_read(tmp_path: Path) -> None:
    """They were an error that named them."""
    folder = saved(tmp_path / "step_100")
    tensors = {"obs": torch.randn(5, 3), "act": torch.arange(5).bfloat16(), "done": torch.tensor([True, False])}
    mapped(folder / "replay", **tensors)
    mapped(folder / "replay" / "next", **tensors)
    ckpttool.convert(folder, tmp_path / "dcp", to="dcp")
    ckpttool.convert(tmp_path / "dcp", tmp_path / "again", producer=str(folder))
    for path in (folder, tmp_path / "dcp", tmp_path / "again"):
        with ckpttool.open(path) as opened:
            assert all(torch.equal(opened[f"replay.next.{name}"].torch(), one) for name, one in tensors.items())
            assert not opened.catalogue.faults
    for path in sorted((folder / "replay").rglob("*.memmap")):
        assert (tmp_path / "again" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    with pytest.raises(LossError, match=r"replay\.obs"):
        ckpttool.convert(folder, tmp_path / "cast", producer="same", dtype="replay.obs=float16")
    with (folder / "replay" / "obs.memmap").open("r+b") as stream:
        stream.truncate(59)
    with pytest.raises(CorruptError, match="59 bytes of elements"):
        ckpttool.convert(folder, tmp_path / "cut", to="dcp")


def test_a_memory_map_that_is_missing_is_damage(tmp_path: Path) -> None:
    """What `meta.json` describes and is not there was left out without a word; of nothing there may be no file."""
    folder = saved(tmp_path / "step_100")
    mapped(folder / "replay", obs=torch.randn(5, 3), act=torch.ones(5), done=torch.ones(5), none=torch.ones(0, 3))
    (folder / "replay" / "none.memmap").unlink()
    ckpttool.convert(folder, tmp_path / "whole", to="dcp")
    (folder / "replay" / "act.memmap").unlink()
    with ckpttool.open(folder) as opened:
        (fault,) = opened.catalogue.faults
    assert "act.memmap` is missing" in fault.message
    with pytest.raises(CorruptError, match=r"act\.memmap` is missing"):
        ckpttool.convert(folder, tmp_path / "out", to="dcp")


@pytest.mark.parametrize("said", ['{"obs": 3}', '{"obs": {"dtype": "torch.int8", "shape": [-1]}}', "{", "[1]", "{}"])
def test_a_memory_map_that_nothing_describes_is_an_error(said: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "step_100")
    (folder / "obs.memmap").write_bytes(b"A" * 8)
    (folder / "meta.json").write_text(said)
    with pytest.raises(CkptError, match=r"memory map, of which no|an array of the shape|meta.json` is not JSON"):
        ckpttool.convert(folder, tmp_path / "out", to="dcp")


@pytest.mark.parametrize(("name", "value"), [("mask.dat", 1), ("obs.memmap", 65), ("n/obs.memmap", 0)])
def test_elements_of_one_byte_are_no_text(name: str, value: int, tmp_path: Path) -> None:
    """A mask without zeros, or a memory map of tensordict, was listed as an asset and left out."""
    folder = saved(tmp_path / "step_100")
    (folder / name).parent.mkdir(exist_ok=True)
    np.full(5000, value, np.uint8).tofile(folder / name)
    with pytest.raises(ReadError, match="a memory map, of which no" if name.endswith("p") else "unrecognised format"):
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")
    report = ckpttool.verify(folder)
    assert (report.verdict, report.exit_code) == ("unread", 3)
    assert "cannot be read in full" in report.message and name in str(report.findings)


@pytest.mark.parametrize("name", ["notes.txt", "slurm-12.out"])
def test_lines_with_a_control_character_are_a_text(name: str, tmp_path: Path) -> None:
    """A bell, or what a process leaves that is killed: it was an error."""
    folder = saved(tmp_path / "step_100")
    (folder / name).write_bytes(b"step 1, loss 0.3\n" * 50 + b"\0\0\x1a done \x07\n" + b"step 2, loss 0.2\n" * 50)
    opened = ckpttool.inspect(folder)
    assert name in opened.facts["assets"] and not opened.faults


@pytest.mark.parametrize("name", ["vocab.txt", "best.lock", "LICENSE", "log/tb.log"])
@pytest.mark.parametrize("how", ["torch", "npz", "pickle"])
def test_a_checkpoint_called_as_an_asset_is_read(name: str, how: str, tmp_path: Path) -> None:
    """NumPy's files and pickles were assets."""
    folder = saved(tmp_path / "step_100")
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("wb") as stream:
        if how == "torch":
            torch.save({"moved": torch.arange(5)}, stream)
        elif how == "npz":
            np.savez(stream, moved=np.arange(5))
        else:
            pickle.dump({"moved": np.arange(5)}, stream)
    with ckpttool.open(folder) as ckpt:
        assert [tensor.name for tensor in ckpt.tensors() if tensor.name.endswith("moved")]


LEFT = "{}.tmp {}.part {}.incomplete {}.crdownload {}.tmp.4242 {}.0a1b2c3d.partial tmp_{} {}~ .{}.swp .{}.Ab3dE6"


@pytest.mark.parametrize("name", LEFT.split())
def test_what_an_interrupted_save_left_is_read_if_it_is_all_there_is(name: str, tmp_path: Path) -> None:
    """`optimizer.pt.tmp` alone was left out without a word, and so it was beside `optimizer.pt`. `model.pt.partial` was
    an error, or a second model."""
    folder, left = saved(tmp_path / "step_100"), name.format("optimizer.pt")
    expected = ckpttool.inspect(folder).entries
    (folder / left).write_bytes((folder / "optimizer.pt").read_bytes()[:1500])
    opened = ckpttool.inspect(folder)
    assert opened.entries.keys() == expected.keys() and not opened.faults  # of a save before this one
    made = ckpttool.convert(folder, tmp_path / "out", to="dcp")
    assert all(any(f"`{left}` is not read" in str(one) for one in said) for said in (opened.warnings, made.notes))
    (folder / "optimizer.pt").unlink()
    with pytest.raises((CorruptError, ReadError), match=re.escape(left)):
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")


def test_a_download_that_did_not_end_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Nothing says which file it would have been."""
    folder = saved(tmp_path / "step_100")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a81f.incomplete").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ReadError, match=r"a81f\.incomplete") as caught:
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")
    assert "download that did not finish" in str(caught.value.hint)


def test_what_an_interrupted_save_left_beside_the_file_of_a_framework_is_said(tmp_path: Path) -> None:
    """It was taken for another component, which is damaged."""
    folder = shutil.copytree(CHECKPOINTS / "run/trainer_w2/ckpt/checkpoint-4", tmp_path / "checkpoint-4")
    expected = ckpttool.inspect(folder).entries
    (folder / "optimizer.pt.tmp").write_bytes((folder / "optimizer.pt").read_bytes()[:1500])
    opened = ckpttool.inspect(folder)
    assert opened.entries.keys() == expected.keys() and not opened.faults
    assert any("`optimizer.pt.tmp` is not read" in str(warning) for warning in opened.warnings)


@pytest.mark.parametrize("name", LEFT.split())
@pytest.mark.parametrize("is_indexed", [False, True])
def test_what_an_interrupted_copy_left_beside_one_model_is_said(name: str, is_indexed: bool, tmp_path: Path) -> None:
    state = torch.nn.Linear(4, 3).state_dict()
    if is_indexed:
        dcp.save(state, checkpoint_id=tmp_path / "model")
    else:
        (tmp_path / "model").mkdir()
        save_file(state, tmp_path / "model" / "model.safetensors")
    whole = "__0_0.distcp" if is_indexed else "model.safetensors"
    (tmp_path / "model" / name.format(whole)).write_bytes(b"\xff\xfe" * 99)
    opened = ckpttool.inspect(tmp_path / "model")
    assert opened.entries.keys() == {("weight",), ("bias",)} and not opened.faults
    assert any(name.format(whole) in str(warning) for warning in opened.warnings)


@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.parametrize("name", ["rng_{}.pt", "rng_state_{}.pth", "loader_state_{}.pt"])
def test_a_rank_among_others_that_is_missing_makes_no_steps_of_them(name: str, gone: int, tmp_path: Path) -> None:
    """`rng_0.pt rng_2.pt` were two checkpoints of a run, of which the last was opened."""
    folder = tmp_path / "saved"
    folder.mkdir()
    torch.save(torch.nn.Linear(4, 3).state_dict(), folder / "model.pt")
    for rank in range(4):
        torch.save({"state": torch.full((9,), rank)}, folder / name.format(rank))
    (folder / name.format(gone)).unlink()
    with pytest.raises(CorruptError, match=rf"the file of rank {gone} of 4 is missing"):
        ckpttool.convert(folder, tmp_path / "out.pt", to="torch")
    assert "run" not in ckpttool.inspect(folder).facts


@pytest.mark.parametrize(("first", "is_said"), [(0, False), (1, True)])
def test_generators_of_ranks_without_the_first_are_said(first: int, is_said: bool, tmp_path: Path) -> None:
    """`rng_1.pt rng_2.pt` may count from 1, or lack that of rank 0."""
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "model.pt")
    for rank in (first, first + 1):
        torch.save(torch.get_rng_state(), tmp_path / f"rng_{rank}.pt")
    opened = ckpttool.inspect(tmp_path)
    assert any("no file of rank 0" in str(warning) for warning in opened.warnings) == is_said
    assert not opened.faults


def test_integers_alone_are_no_model(tmp_path: Path) -> None:
    torch.save({"indices": torch.randperm(50), "seed": torch.tensor(3)}, tmp_path / "dataloader.pt")
    assert {entry.part.kind for entry in ckpttool.inspect(tmp_path).entries.values()} == {"other"}


def test_models_that_were_copied_out_of_a_training_state_are_models(tmp_path: Path) -> None:
    """They were damaged, as two that say that they are of a state; an optimizer lacks more than tensors."""
    model, average = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "ema": average.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "all.pt")
    ckpttool.convert(tmp_path / "all.pt", tmp_path / "state", to="safetensors")
    (tmp_path / "state" / "ckpttool.json").unlink()
    with pytest.raises(CorruptError, match=r"`ckpttool\.json` is missing"):
        ckpttool.convert(tmp_path / "state", tmp_path / "out", to="dcp")
    (tmp_path / "state" / "optimizer.safetensors").unlink()
    ckpttool.convert(tmp_path / "state", tmp_path / "out", to="dcp")
    with ckpttool.open(tmp_path / "out") as opened:
        assert {entry.part.kind for entry in opened.catalogue.entries.values()} == {"model"}
        assert len([*opened.tensors()]) == 4


@pytest.mark.parametrize("keys", [("online_model", "ema_model"), ("module", "ema"), ("student", "teacher")])
@pytest.mark.parametrize("root", [None, "state"])
def test_the_average_in_a_state_is_not_counted(keys: tuple[str, str], root: str | None, tmp_path: Path) -> None:
    """The parameters of `online_model.` and of `ema_model.`, as ema-pytorch keeps both, were added up."""
    both = torch.nn.ModuleDict({key: torch.nn.Linear(4, 3) for key in keys})
    both.register_buffer("initted", torch.tensor(True))
    torch.save({root: both.state_dict(), "step": 3} if root else both.state_dict(), tmp_path / "a.pt")
    (model,) = models(ckpttool.inspect(tmp_path / "a.pt")).counted
    assert sum(tensor.numel for tensor in model.parameters()) == 15


def test_a_folder_is_the_root_of_a_file_only_if_nothing_else_lies_in_it(tmp_path: Path) -> None:
    """The model below the folder of an optimizer was a part of the optimizer: `--drop optimizer` left it out."""
    folder = saved(tmp_path / "step_100", ranks=0)
    (folder / "trainer" / "net" / "last").mkdir(parents=True)
    (folder / "optimizer.pt").rename(folder / "trainer" / "optimizer.pt")
    (folder / "model.pt").rename(folder / "trainer" / "net" / "last" / "model.pt")
    assert kinds(folder)["optimizer"] == {"trainer.optimizer"}
    assert kinds(folder)["model"] == {"trainer.net", "ema"}


@pytest.mark.parametrize("name", [".model.pt", "model.pt.tmp", "model.pt~", "tmp_model.pt"])
def test_what_is_called_as_if_it_had_not_ended_and_holds_something_else(name: str, tmp_path: Path) -> None:
    """Whole, and of other entries than what it would have replaced: it is read. A copy, or a part of one, is not."""
    model, optimizer = {"w": torch.ones(4)}, {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    step = tmp_path / "step"
    step.mkdir()
    torch.save(model, step / "model.pt")
    torch.save(optimizer, step / name)
    ckpttool.convert(step, tmp_path / "out.pt")
    assert "0.5" in str(torch.load(tmp_path / "out.pt", weights_only=True))
    for data in ((step / "model.pt").read_bytes(), (step / name).read_bytes()[:300]):
        (step / name).write_bytes(data)
        (warning,) = ckpttool.inspect(step).warnings
        assert name in warning.text and warning.kind == "left-out"


@pytest.mark.parametrize("name", ["tmp_model", "model.tmp"])
@pytest.mark.parametrize("is_dcp", [False, True])
def test_a_folder_that_is_called_as_if_it_had_not_ended_and_holds_something_else(
    name: str, is_dcp: bool, tmp_path: Path
) -> None:
    def save(state: dict[str, object], folder: Path) -> None:
        dcp.save(state, checkpoint_id=folder) if is_dcp else torch.save(state, folder / "a.pt")

    step = tmp_path / "step"
    for folder, state in (("model", {"w": torch.ones(4)}), (name, {"rho": torch.ones(2), "step": 7})):
        (step / folder).mkdir(parents=True)
        save(state, step / folder)
    ckpttool.convert(step, tmp_path / "out.pt")
    assert "7" in str(torch.load(tmp_path / "out.pt", weights_only=True))
    assert not [one for one in ckpttool.verify(step).findings if one.kind == "remains"]  # `repair` leaves these out
    assert not ckpttool.repair(step, tmp_path / "repaired").done
    shutil.rmtree(step / name)
    (step / name).mkdir()
    save({"w": torch.ones(4)}, step / name)
    (warning,) = ckpttool.inspect(step).warnings
    assert name in warning.text and warning.kind == "left-out"


def test_a_model_with_an_optimizer_of_another_library_in_a_file_called_model(tmp_path: Path) -> None:
    """The state of fastai's optimizer was counted as parameters of the model: 147, of 49."""
    states = [{"grad_avg": torch.ones(4, 3), "step": 1}, {"grad_avg": torch.ones(3), "step": 1}]
    state = {"model": torch.nn.Linear(4, 3).state_dict(), "opt": {"state": states, "hypers": [{"lr": 0.1}]}}
    for name in ("model_a.pth", "actor.pth"):
        torch.save(state, tmp_path / name)
    parts = {"model": {"model_a.model", "actor.model"}, "optimizer": {"model_a.opt", "actor.opt"}}
    assert kinds(tmp_path) == parts
    assert all(sum(t.numel for t in one.parameters()) == 15 for one in models(ckpttool.inspect(tmp_path)).counted)


def test_tensors_have_the_name_that_a_document_beside_them_has_too(tmp_path: Path) -> None:
    """`dataset.safetensors` and `configuration.safetensors` of neuralforecast were models, the first of 400."""
    save_file({"rnn.weight": torch.ones(4, 3)}, tmp_path / "LSTM_0.safetensors")
    save_file({"h.temporal": torch.ones(200, 2), "h.indptr": torch.ones(3).int()}, tmp_path / "dataset.safetensors")
    save_file({"h.ds": torch.arange(200), "h.last": torch.arange(2)}, tmp_path / "configuration.safetensors")
    for name in ("dataset", "configuration"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"fields": {"y_idx": 0, "key": "h"}}))
    assert kinds(tmp_path)["model"] == {"LSTM_0"} and kinds(tmp_path)["dataloader"] == {"dataset"}
    assert {path[0] for path in ckpttool.inspect(tmp_path).entries} == {
        "LSTM_0", "dataset", "dataset.json", "configuration", "configuration.json"
    }  # fmt: skip
    (model,) = models(ckpttool.inspect(tmp_path)).counted
    assert sum(tensor.numel for tensor in model.parameters()) == 12


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_a_file_for_each_tensor_of_a_model(suffix: str, tmp_path: Path) -> None:
    """The first number of `0.weight.pt`, `3.weight.pt` was a step: of four layers the last one was read."""
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    for name, tensor in model.state_dict().items():
        (np.save if suffix == ".npy" else lambda path, one: torch.save(one, path))(tmp_path / f"{name}{suffix}", tensor)
    opened = ckpttool.inspect(tmp_path)
    assert {entry.name for entry in opened.entries.values()} == {*model.state_dict()}
    (one,) = models(opened).counted
    assert sum(tensor.numel for tensor in one.parameters()) == sum(one.numel() for one in model.parameters())


def test_generators_of_ranks_in_a_folder_of_their_own(tmp_path: Path) -> None:
    """`rng/0.pt rng/1.pt` were checkpoints of a run inside, and the directory was none."""
    step = saved(tmp_path / "ckpt-0500", ranks=2)
    (step / "rng").mkdir()
    for rank in (0, 1):
        (step / f"rng_{rank}.pt").rename(step / "rng" / f"{rank}.pt")
    opened = ckpttool.inspect(step)
    assert kinds(step)["rng"] == {"rng"} and ("rng", "rank1", "torch") in opened.entries
    ckpttool.convert(step, tmp_path / "same", producer="same", check=True)
    assert sorted(one.name for one in (tmp_path / "same" / "rng").iterdir()) == ["0.pt", "1.pt"]


def test_the_latest_networks_beside_those_of_each_step_are_copies(tmp_path: Path) -> None:
    """As pix2pix and CycleGAN save them: each of several files was other state, and counted."""
    for epoch in ("5", "10", "latest"):
        for name in ("G_A", "D_A"):
            torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / f"{epoch}_net_{name}.pth")
    opened = ckpttool.inspect(tmp_path)
    assert kinds(tmp_path)["model"] == {"net_G_A", "net_D_A"}
    (warning,) = (one for one in opened.warnings if one.kind == "chosen")
    assert "latest_net_G_A.pth" in warning.text


def test_the_last_of_a_run_has_no_number(tmp_path: Path) -> None:
    """As kohya's sd-scripts save: `last.safetensors` is the end of it. What scales an adapter is a buffer."""
    for name in ("last-000002", "last-000004", "last"):
        down = {"lora_unet_a.lora_down.weight": torch.full((2, 8), float(len(name)))}
        save_file({**down, "lora_unet_a.alpha": torch.tensor(4.0)}, tmp_path / f"{name}.safetensors")
    (taken,) = (one["name"] for one in ckpttool.inspect(tmp_path).facts["run"] if one["taken"])
    assert taken == "last.safetensors"
    (model,) = models(ckpttool.inspect(tmp_path)).counted
    assert sum(tensor.numel for tensor in model.parameters()) == 16


def test_master_weights_of_half_a_model_do_not_count(tmp_path: Path) -> None:
    master = torch.nn.Linear(4, 3)
    half = {name: one.half() for name, one in master.state_dict().items()}
    optimizer = torch.optim.AdamW(master.parameters())
    master(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": half, "master_params": [*master.parameters()], "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    (model,) = models(ckpttool.inspect(tmp_path / "a.pt")).counted
    assert model.part.root == ("model",) and sum(tensor.numel for tensor in model.parameters()) == 15


@pytest.mark.parametrize("spelling", ["{moment}.{name}", "{number}.{moment}", "state/{number}/{moment}"])
def test_the_state_of_an_optimizer_under_flat_names(spelling: str, tmp_path: Path) -> None:
    """`exp_avg.0.weight` was a model of as many parameters again; neither was among what there is, at the top."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    states = zip(model.named_parameters(), optimizer.state.values(), strict=True)
    moments = {
        spelling.format(name=name, number=number, moment=moment): state[moment]
        for number, ((name, _), state) in enumerate(states)
        for moment in ("exp_avg", "exp_avg_sq")
    }
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(moments, tmp_path / "adam.safetensors")
    assert kinds(tmp_path) == {"model": {"model"}, "optimizer": {"adam"}}
    summary = summarise(ckpttool.inspect(tmp_path))
    assert summary.holds == "model 15, its optimizer"
    assert [[state.kind for state in one.state] for one in summary.headline.optimizers] == [["exp_avg", "exp_avg_sq"]]


def test_a_flat_name_says_behind_state_what_is_kept_of_a_parameter() -> None:
    """Of Megatron, the master weights were state of the kind `weight`, which is the end of the parameter's name."""
    summary = summarise(ckpttool.inspect(CHECKPOINTS / "other" / "megatron_torch_dist_tp2" / "iter_0000010"))
    assert {state.kind for one in summary.headline.optimizers for state in one.state} == {"param", "exp_avg"}


@pytest.mark.parametrize("name", ["{}.pt", "net_{}.pth"])
@pytest.mark.parametrize("last", ["of a network that has grown", "without its optimizer"])
def test_the_last_of_a_run_may_be_less_than_the_first(name: str, last: str, tmp_path: Path) -> None:
    """No word says that the numbers are steps; the three files were opened as one checkpoint with three models."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    for number in (100, 200):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / name.format(number))
    other = torch.nn.Linear(8, 6) if "grown" in last else model
    torch.save({"model": other.state_dict()}, tmp_path / name.format(300))
    with ckpttool.open(tmp_path) as ckpt:
        assert {*ckpt} == {"model.weight", "model.bias"}
        assert torch.equal(ckpt["model.weight"].torch(), other.weight)


def test_a_document_of_any_size_is_state(tmp_path: Path) -> None:
    """A history of 4 MB was an asset that conversions left out."""
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    losses = [n / 7 for n in range(200_000)]
    (tmp_path / "state.json").write_text(json.dumps({"step": 5, "losses": losses}))
    ckpttool.convert(tmp_path, tmp_path.with_suffix(".all.pt"), to="torch")
    assert torch.load(tmp_path.with_suffix(".all.pt"))["state"] == {"step": 5, "losses": losses}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 2', "is not JSON"), ('{"step": 2, "best": [1, 2]', "is not JSON"), ('{"a": "b", "c', "is not JSON"),
        ('{"step": 2, "done": tru', "is not JSON"), ('{"step": 2, "loss": -Infinit', "is not JSON"),
        ('{"name": "' + "\u00e9" * 30 + '", "step": 2', "is not JSON"), ('{"a": "' + "b" * 40, "is not JSON"),
        ('{"step": 2, "losses": [' + "1, " * 30_000 + "\0" * 9 + ", 2]}", "is not JSON"),
        ('{"step\0\0\0', "a zero at byte 6"), ("", "is empty"), ('{"step": 1, "step": 2}', "names `step` twice"),
        # Cut in a string that ends with a bracket, changed in the middle, written over by a shorter one, begun wrongly.
        ('{"step": 2, "note": "the words of a {b}', "is not JSON"),
        ('{"step": 2, "rng": [1, 2 3, 4], "loss": 1.5}', "is not JSON"),
        ('{"step":07, "loss": 1.5}', "is not JSON"), ('{"step": 3}, "epoch": 4, "loss": 1.5}', "is not JSON"),
        ('z"step": 3}', "is not JSON"), ("[1, 2, 3, ab4, 5, 6, 7, 8]", "is not JSON"), (" ", "is not JSON"),
    ],
)  # fmt: skip
def test_a_document_that_is_damaged_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    """It was an asset, and its values were left out."""
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CorruptError, match=words):
        ckpttool.convert(tmp_path, tmp_path.with_suffix(".dcp"), to="dcp")
    ckpttool.convert(tmp_path, tmp_path.with_suffix(".dcp"), to="dcp", only="model")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}\n', '{\n// the width\n"d": 4,\n}', '{"a": "b"}',
        '{"step": 1, "loss": 2.5}\n{"step": 2, "lo', '{"a": 1}{"a": 2}', "the model of the paper", "{'a': 'b',}",
        "[2026-01-01 10:00] epoch 1, loss 2.5\n[2026-01-01 10:05] epoch 2, loss 2.4\n",
    ],
)  # fmt: skip
def test_a_text_that_is_no_document_of_values_is_an_asset(text: str, tmp_path: Path) -> None:
    """Lines of JSON, of which the last is being written, a log, and what a person wrote, with comments."""
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    (tmp_path / "words.json").write_text(text)
    assert ckpttool.inspect(tmp_path).facts["assets"] == ["words.json"]


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\noid sha256:0", "<html>gone</html>"])
def test_what_is_there_in_place_of_a_document_is_an_error(text: str, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ReadError, match=r"state\.json`: a (pointer|web page)"):
        ckpttool.convert(tmp_path, tmp_path.with_suffix(".dcp"), to="dcp")


@pytest.mark.parametrize(
    "text", ['{"step": 2,\n # "note": 3\n}', '{"step": 2, "loss": nan}', "{'step': 2, 'ok': True}"]
)
def test_what_others_write_for_json_is_read(text: str, tmp_path: Path) -> None:
    """With comments, commas, words for values, in single quotes: as YAML, which a damaged file may be, too."""
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    (tmp_path / "state.json").write_text(text)
    with ckpttool.open(tmp_path) as checkpoint:
        assert checkpoint["state.step"] == 2


def test_a_document_that_is_too_large_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_NAMED", 1000)
    monkeypatch.setattr(reader, "MAX_SIZE", 100)
    monkeypatch.setattr(reader, "_MAX_NAMES", 20)
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "model.pt")
    for name, text, most in (
        ("state.json", json.dumps({"steps": [*range(1000)]}), "bytes, more than the 1000 "),
        ("state.json", json.dumps({f"of{n}": n * n for n in range(40)}), "names, more than the 20 "),
        ("state.yaml", "a: 1\n" * 30, "bytes, more than the 100 "),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ReadError, match=f"{name}` has .* {most}") as caught:
            ckpttool.convert(tmp_path, tmp_path.with_suffix(".dcp"), to="dcp")
        assert "--only" in str(caught.value.hint)
        (tmp_path / name).unlink()
    # What numbers words is of a tokenizer.
    (tmp_path / "word2id.json").write_text(json.dumps({f"token{n}": n for n in range(40)}))
    assert ckpttool.inspect(tmp_path).facts["assets"] == ["word2id.json"]
