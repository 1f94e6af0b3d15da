"""Files that are checkpoints of a run each are not parts of one; parts that are alike stay parts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CorruptError, DeniedError, ReadError, UsageError
from ckpttool.serialization.directory import Directory


def model(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 2), float(seed)), "bias": torch.full((3,), float(seed))}


def state(seed: int) -> dict[str, Any]:
    """A whole training state, of an epoch of its own."""
    network = torch.nn.Linear(2, 3)
    network.load_state_dict(model(seed))
    optimizer = torch.optim.SGD(network.parameters(), momentum=0.5)
    network(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model(seed), "optimizer": optimizer.state_dict(), "epoch": seed}


def save(folder: Path, names: str, of: Any = state) -> None:
    for seed, name in enumerate(names.split(), 1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(of(seed), folder / name)


def opened(folder: Path) -> set[str]:
    return {file.name for file in ckpttool.inspect(folder).files}


@pytest.mark.parametrize("of", [state, model])
@pytest.mark.parametrize(
    ("names", "newest"),
    [
        ("best_acc.pt best_loss.pt last.pt", "last.pt"),
        ("weights/best.pt weights/last.pt", "weights/last.pt"),
        ("netG_best.pt netG_final.pt", "netG_final.pt"),
    ],
)
def test_the_last_of_several(of: Any, names: str, newest: str, tmp_path: Path) -> None:
    save(tmp_path, names, of)
    (tmp_path / "args.yaml").write_text("epoch: 3\n")
    catalogue = ckpttool.inspect(tmp_path)
    assert {file.name for file in catalogue.files} == {newest, "args.yaml"}
    assert [one["name"] for one in catalogue.facts["run"] if one["taken"]] == [newest]
    assert {one["name"] for one in catalogue.facts["run"]} == {*names.split()}


def test_a_whole_state_and_the_best(tmp_path: Path) -> None:
    save(tmp_path, "checkpoint.pth.tar model_best.pth.tar")
    assert opened(tmp_path) == {"checkpoint.pth.tar"}
    ckpttool.convert(tmp_path, tmp_path.with_suffix(".out"), to="dcp")
    with ckpttool.open(tmp_path.with_suffix(".out")) as ckpt:
        assert ckpt["model.bias"].torch().tolist() == [1, 1, 1]


@pytest.mark.parametrize("of", [state, model])
def test_a_link_or_a_text_says_which(of: Any, tmp_path: Path) -> None:
    save(tmp_path, "a.pt b.pt c.pt", of)
    (tmp_path / "best.pt").symlink_to("a.pt")
    (tmp_path / "latest.pt").symlink_to("b.pt")
    assert opened(tmp_path) == {"b.pt"}
    (tmp_path / "latest.pt").unlink()
    (tmp_path / "latest").write_text("/elsewhere/c.pt\n")
    assert opened(tmp_path) == {"c.pt"}


def test_a_text_names_a_file_without_a_step_beside_steps(tmp_path: Path) -> None:
    """As fvcore's `Checkpointer` writes it, at the end of training too."""
    save(tmp_path, "model_0000001.pth model_0000003.pth")
    torch.save(state(2), tmp_path / "model_final.pth")
    assert opened(tmp_path) == {"model_0000003.pth"}
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    assert opened(tmp_path) == {"model_final.pth"}
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    assert opened(tmp_path) == {"model_0000003.pth"}


@pytest.mark.parametrize(
    ("last", "epoch"), [("last.pth", 9), ("epoch.pth", 9), ("last.pth", 2), ("last.pth", 1), ("other.pth", 9)]
)
def test_the_last_file_may_be_newer_than_the_last_step(last: str, epoch: int, tmp_path: Path) -> None:
    """Of steps that are kept and a file that each epoch overwrites, the newest step was opened: Ultralytics, DETR."""
    save(tmp_path, "epoch_10.pth epoch_20.pth best.pth")
    torch.save(state(2), tmp_path / "best.pth")
    torch.save(state(epoch), tmp_path / last)
    newest = last if epoch > 2 and last != "other.pth" else "epoch_20.pth"
    assert opened(tmp_path) == {newest}
    run = ckpttool.inspect(tmp_path).facts["run"]
    assert [one["name"] for one in run if one["taken"]] == [newest]
    assert {"epoch_10.pth", "epoch_20.pth"} < {*(one["name"] for one in run), newest, last}


@pytest.mark.parametrize("is_same", [True, False])
def test_the_best_of_another_run_is_not_the_newest(is_same: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(16, 16)
    for epoch in (1, 2):
        torch.save({"model": model.state_dict(), "epoch": epoch}, tmp_path / f"epoch_{epoch}.pth")
    best = model if is_same else torch.nn.Linear(16, 16)
    torch.save({"model": best.state_dict(), "epoch": 90}, tmp_path / "best.pth")
    assert opened(tmp_path) == {"best.pth" if is_same else "epoch_2.pth"}


def test_a_folder_that_is_the_last_has_its_size(tmp_path: Path) -> None:
    for name, epoch in (("checkpoint-1", 1), ("checkpoint-2", 2), ("checkpoint-last", 3)):
        (tmp_path / name).mkdir()
        torch.save(state(epoch), tmp_path / name / "state.pt")
    last = ckpttool.inspect(tmp_path).facts["run"][-1]
    size = (tmp_path / "checkpoint-last" / "state.pt").stat().st_size
    assert (last["name"], last["taken"], last["file_bytes"]) == ("checkpoint-last", True, size)


def test_two_names_of_steps_that_count_otherwise(tmp_path: Path) -> None:
    """icefall: a file of an epoch is newer than the last of so many batches, though its number is smaller."""
    for name, batch in (("checkpoint-4000.pt", 4000), ("checkpoint-8000.pt", 8000), ("epoch-1.pt", 9000)):
        torch.save({**state(1), "batch_idx_train": batch}, tmp_path / name)
    assert opened(tmp_path) == {"epoch-1.pt"}


def test_a_measured_number_is_no_step(tmp_path: Path) -> None:
    save(tmp_path, "net_loss=-3.pt net_loss=-6.pt", model)
    with pytest.raises(ReadError, match="nothing says which is the newest"):
        ckpttool.inspect(tmp_path)
    save(tmp_path, "net_epoch=1_loss=7.pt net_epoch=2_loss=5.pt", model)
    assert opened(tmp_path) == {"net_epoch=2_loss=5.pt"}


@pytest.mark.parametrize("names", ["best_acc.pt best_loss.pt", "a.pt b.pt", "fold_1.pt fold_2.pt fold_3.pt"])
def test_they_are_asked_for_by_name(names: str, tmp_path: Path) -> None:
    save(tmp_path, names)
    with pytest.raises(ReadError, match="nothing says which is the newest") as caught:
        ckpttool.inspect(tmp_path)
    assert caught.value.facts["found"] == names.split()
    pattern = str(caught.value.hint).split("'")[1]
    assert opened(Path(pattern)) == {*names.split()}


def test_steps_behind_the_suffix_beside_a_copy_of_the_last(tmp_path: Path) -> None:
    """A file that was renamed again and again is called by how often, not by steps."""
    save(tmp_path, "ckpt.pt.100 ckpt.pt.200 ckpt.pt.300")
    torch.save(state(3), tmp_path / "ckpt.pt")
    assert opened(tmp_path) == {"ckpt.pt.300"}
    torch.save(state(4), tmp_path / "ckpt.pt")
    assert opened(tmp_path) == {"ckpt.pt"}


def test_older_ones_that_were_renamed(tmp_path: Path) -> None:
    """The one that has the name itself is the newest, if it is of a later epoch."""
    save(tmp_path, "ckpt.pt.2 ckpt.pt.1 ckpt.pt")
    assert opened(tmp_path) == {"ckpt.pt"}
    save(tmp_path, "ckpt.pt ckpt.pt.2 ckpt.pt.1")
    with pytest.raises(ReadError, match="nothing says which is the newest"):
        ckpttool.inspect(tmp_path)


def test_a_run_whose_last_file_has_the_model_alone(tmp_path: Path) -> None:
    """`0.pt 1.pt 2.pt` were files of ranks, of two saves."""
    save(tmp_path, "0.pt 1.pt")
    torch.save(model(3), tmp_path / "2.pt")
    assert opened(tmp_path) == {"2.pt"}
    torch.save(state(1), tmp_path / "1.pt")  # of the same epoch: what ranks have
    assert opened(tmp_path) == {"0.pt", "1.pt", "2.pt"}


def test_several_files_by_a_word(tmp_path: Path) -> None:
    save(tmp_path, "netG_best.pt netG_last.pt", model)
    save(tmp_path, "netD_best.pt netD_last.pt", lambda seed: {"0.weight": torch.ones(seed * 0 + 5, 2)})
    assert opened(tmp_path) == {"netD_last.pt", "netG_last.pt"}


def test_a_link_that_leaves_the_directory_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "run", "a.pt b.pt")
    save(tmp_path, "elsewhere.pt")
    (tmp_path / "run" / "latest.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
        ckpttool.inspect(tmp_path / "run")


def test_a_step_with_fewer_files_is_not_complete(tmp_path: Path) -> None:
    save(tmp_path, "step_1/model.pt step_1/opt.pt step_2/model.pt step_2/opt.pt step_3/model.pt")
    catalogue = ckpttool.inspect(tmp_path)
    assert [one["name"] for one in catalogue.facts["run"] if one["taken"]] == ["step_2"]
    assert "`step_3`: `opt.pt` is missing, which the others have" in str(catalogue.warnings[0])


@pytest.mark.parametrize(
    ("names", "of"),
    [
        ("model.pt ema.pt", model),
        ("best.pt best_ema.pt", model),
        ("student.pt teacher.pt", model),
        ("G_A.pth G_B.pth", model),
        ("G_A.pth G_B.pth", lambda seed: {**state(seed), "epoch": 5}),
        ("actor.pt critic_1.pt critic_2.pt", model),
        ("model.pt model_best.pt optimizer.pt", model),
    ],
)
def test_parts_that_are_alike_stay_parts(names: str, of: Any, tmp_path: Path) -> None:
    save(tmp_path, names, of)
    assert opened(tmp_path) == {*names.split()}
    save(tmp_path / "step_100", "best.pt last.pt", of)
    assert opened(tmp_path / "step_100") == {"best.pt", "last.pt"}


def test_checkpoints_that_are_not_opened_are_named(tmp_path: Path) -> None:
    """A file of safetensors beside two runs was all that such a directory was said to be."""
    save_file(model(1), tmp_path / "model.safetensors")
    for name in ("a", "b"):
        save(tmp_path, f"{name}/step_1.pt {name}/step_2.pt")
    with pytest.raises(ReadError, match="not a checkpoint; found 5 inside") as raised:
        ckpttool.inspect(tmp_path)
    assert {"a/step_2.pt", "b/step_1.pt", "model.safetensors"} <= {*raised.value.facts["found"]}


def test_other_folders_beside_a_run_are_named(tmp_path: Path) -> None:
    save(tmp_path, "step_1/state.pt step_2/state.pt pretrained/model.pt stray.pt")
    (tmp_path / "logs").mkdir()
    (warning,) = (str(one) for one in ckpttool.inspect(tmp_path).warnings if one.kind == "chosen")
    assert warning == "not opened, as they are of no step: `stray.pt`, `pretrained/`"


def test_a_folder_beside_a_run_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "step_1/state.pt step_2/state.pt locked/model.pt")
    listing = Directory.folder

    def denied(directory: Directory, name: str) -> Directory:
        if name == "locked":
            raise DeniedError("`locked`: cannot read: Permission denied")
        return listing(directory, name)

    monkeypatch.setattr(Directory, "folder", denied)
    warnings = [str(one) for one in ckpttool.inspect(tmp_path).warnings]
    assert "not opened, as they are of no step: `locked/`" in warnings


def test_the_only_checkpoint_with_a_layout_is_not_taken_among_others(tmp_path: Path) -> None:
    """It has no step, and was opened as the run's, whatever lay beside it."""
    shutil.copytree(CHECKPOINTS / "run/accelerate_fsdp2_sharded_w2/ckpt", tmp_path / "saved")
    catalogue = ckpttool.inspect(tmp_path)
    assert catalogue.location == str(tmp_path / "saved")
    save(tmp_path, "stray.pt")
    with pytest.raises(ReadError, match=r"`stray\.pt` may hold training state, but belongs to no step"):
        ckpttool.convert(tmp_path, tmp_path.parent / "out.pt", to="torch")


# State beside the checkpoints of a run --------------------------------------------------------------------------------


def converted(folder: Path) -> dict[str, Any]:
    """What torch loads of a directory that was converted to one file."""
    out = folder.parent / f"{folder.name}.pt"
    ckpttool.convert(folder, out, to="torch", overwrite=True)
    value: dict[str, Any] = torch.load(out, weights_only=False)
    return value


def other(seed: int) -> dict[str, Any]:
    """A model that is none of the run: its tensors have other names and shapes."""
    return {"teacher": torch.full((7, seed), float(seed))}


def test_a_folder_with_a_number_is_a_part_of_the_directory_if_other_state_lies_beside_it(tmp_path: Path) -> None:
    """`0/` was opened as the only step of a run, and the model beside it left out with exit code 0."""
    folder = tmp_path / "saved"
    save(folder, "0/critic.pt")
    save(folder, "state.pt", other)
    (folder / "counters.yaml").write_text("step: 3\n")
    found = converted(folder)
    assert torch.equal(found["state"]["teacher"], torch.ones(7, 1)) and found["counters"] == {"step": 3}
    assert len(found) == 3


@pytest.mark.parametrize("names", ["step_1/state.pt step_2/state.pt", "step_1.pt step_2.pt"])
@pytest.mark.parametrize("beside", ["vae.pt", "vae/weights.pt", "best.pt", "final/model.pt", "noext"])
def test_other_state_beside_the_steps_is_read_with_the_newest(names: str, beside: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, names)
    save(folder, beside, other)
    found = converted(folder)
    shapes = [
        tuple(tensor.shape) for tensor in torch.utils._pytree.tree_leaves(found) if isinstance(tensor, torch.Tensor)
    ]
    assert (7, 1) in shapes and len(shapes) > 1
    # What has the tensors of the checkpoints is another one of the run.
    folder = tmp_path / "copies"
    save(folder, names)
    save(folder, beside)
    assert converted(folder).keys() <= {*state(1), "state"}


def test_other_state_beside_the_steps_of_a_framework_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(CHECKPOINTS / "run/accelerate_fsdp2_sharded_w2/ckpt", run / "checkpoint_1")
    shutil.copytree(CHECKPOINTS / "run/accelerate_fsdp2_sharded_w2/ckpt", run / "checkpoint_2")
    assert converted(run)
    save(run, "vae.pt", other)
    with pytest.raises(
        ReadError, match=r"`vae\.pt` may hold training state, but belongs to no step of the run"
    ) as caught:
        converted(run)
    assert f"`{run / 'checkpoint_2'}`" in str(caught.value.hint)
    assert not ckpttool.inspect(run / "checkpoint_2").faults
    ckpttool.convert(run, tmp_path / "model.pt", to="torch", only="model")


def test_a_file_and_a_folder_of_one_step_are_one_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, "step_1_policy.pt step_2_policy.pt")
    save(folder, "step_1_critic/critic.pt step_2_critic/critic.pt", other)
    shapes = {tuple(tensor.shape) for tensor in ckpttool.inspect(folder).tensors}
    assert (7, 2) in shapes and len(shapes) > 1


def test_files_numbered_from_0_with_other_tensors_are_no_steps(tmp_path: Path) -> None:
    """The last of them was opened as the newest step, and the model of the first left out."""
    folder = tmp_path / "saved"
    save(folder, "checkpoint_0.pt checkpoint_1.pt", other)
    assert {tuple(tensor.shape) for tensor in ckpttool.inspect(folder).tensors} == {(7, 1), (7, 2)}
    # Before the first step, an optimizer has no state.
    folder = tmp_path / "run"
    save(folder, "epoch_0.pt epoch_1.pt", lambda seed: model(seed) | ({"m": torch.ones(9)} if seed > 1 else {}))
    assert opened(folder) == {"epoch_1.pt"}


def test_a_folder_of_logs_is_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    """`20261128_145311/` of mmengine was listed as one that is not complete."""
    save(tmp_path, "epoch_1.pth epoch_2.pth")
    (tmp_path / "20261128_145311" / "vis_data").mkdir(parents=True)
    (tmp_path / "20261128_145311" / "vis_data" / "scalars.json").write_text('{"lr": 0.1}')
    (tmp_path / "last_checkpoint").write_text(str(tmp_path / "epoch_2.pth"))
    run = ckpttool.inspect(tmp_path).facts["run"]
    assert [(one["name"], one["complete"], one["taken"]) for one in run] == [
        ("epoch_1.pth", True, False),
        ("epoch_2.pth", True, True),
    ]


# What the names of files have whose save or copy did not end.
LEFT = ["{}.tmp", "tmp_{}", "{}.part", "{}.crdownload", "{}.tmp.4242", "{}~", ".{}.swp", ".{}.Ab3dE6"]


@pytest.mark.parametrize("name", [one.format("epoch_3.pth") for one in LEFT])
@pytest.mark.parametrize("nbytes", [1000, None])
def test_a_file_whose_save_has_not_ended_is_no_newest_checkpoint(name: str, nbytes: int | None, tmp_path: Path) -> None:
    """It was opened in place of the one before it, or the command failed as it was cut."""
    run = tmp_path / "run"
    save(run, f"epoch_1.pth epoch_2.pth {name}")
    (run / name).write_bytes((run / name).read_bytes()[:nbytes])
    ckpttool.convert(run, tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt")["epoch"] == 2
    assert any(name in warning.text for warning in ckpttool.inspect(run).warnings)


@pytest.mark.parametrize("suffix", LEFT)
@pytest.mark.parametrize("names", ["epoch_1.pth epoch_2.pth", "model_1.pt optim_1.pt model_2.pt optim_2.pt"])
def test_what_is_left_of_a_save_beside_the_file_makes_no_step_incomplete(
    names: str, suffix: str, tmp_path: Path
) -> None:
    """A run with `epoch_2.pth` and `epoch_2.pth.tmp` had no complete checkpoint; `epoch_2.pth.part` was not seen as one
    that did not end."""
    save(tmp_path, names)
    last = tmp_path / names.split()[-1]
    (tmp_path / suffix.format(last.name)).write_bytes(last.read_bytes()[:1000])
    run = ckpttool.inspect(tmp_path).facts["run"]
    found = sorted((one["step"], not one["complete"], one["taken"]) for one in run)
    assert found == [(1, False, False), (2, False, True), (2, True, False)]
    # One that was not renamed is of the step, which lacks it.
    last.unlink()
    run = ckpttool.inspect(tmp_path).facts["run"]
    assert [(one["step"], one["taken"]) for one in run if one["complete"]] == [(1, True)]


def test_folders_of_one_second_are_not_one_checkpoint(tmp_path: Path) -> None:
    """SpeechBrain's folders, the second of which has a number more, were opened as one checkpoint with two models."""
    for number in (0, 1):
        folder = tmp_path / f"CKPT+2026-11-28+18-28-56+0{number}"
        save(folder, "model.ckpt opt.ckpt")
        (folder / "CKPT.yaml").write_text(f"end-of-epoch: true\nunixtime: 1.{number}\n")
    run = ckpttool.inspect(tmp_path).facts["run"]
    assert [(one["name"][-2:], one["taken"]) for one in run] == [("00", False), ("01", True)]


@pytest.mark.parametrize("names", ["model_1.pt model_2.pt", "state_0.pt state_2.pt", "net_1.pt net_2.pt net_3.pt"])
@pytest.mark.parametrize("is_ensemble", [True, False])
def test_numbered_models_are_steps_only_if_their_values_are_alike(
    names: str, is_ensemble: bool, tmp_path: Path
) -> None:
    """Of an ensemble the last one was opened, as the newest step, and the others were left out."""
    torch.manual_seed(0)
    network = torch.nn.Linear(16, 8)

    def trained(_: int) -> dict[str, torch.Tensor]:
        if is_ensemble:
            network.reset_parameters()
        optimizer = torch.optim.AdamW(network.parameters(), 0.01)
        for _ in range(20):
            optimizer.zero_grad()
            network(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in network.state_dict().items()}

    save(tmp_path, names, trained)
    assert opened(tmp_path) == ({*names.split()} if is_ensemble else {names.split()[-1]})
    # A word says what is counted.
    save(tmp_path / "run", "epoch_1.pt epoch_2.pt", trained)
    assert opened(tmp_path / "run") == {"epoch_2.pt"}


def test_a_single_tensor_has_the_name_of_its_file_beside_documents(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(folder, "weights.pt", lambda seed: [torch.ones(2), torch.zeros(3)])
    (folder / "ema").mkdir()
    (folder / "ema" / "progress.json").write_text('{"step": 3}')
    found = converted(folder)
    assert found["ema"] == {"step": 3} and [len(one) for one in found["weights"]] == [2, 3]


@pytest.mark.parametrize(
    ("names", "pattern", "newest", "of"),
    [
        ("step-100/state.pt step-200/state.pt", "step-*", "step-200", state),
        ("model_epoch_1.pt model_epoch_2.pt", "model_*.pt", "model_epoch_2.pt", model),
        ("G_step_5.pt D_step_5.pt G_step_10.pt D_step_10.pt", "*.pt", "*_step_10.pt", model),
        ("checkpoint-10/state.pt checkpoint-20/state.pt", "checkpoint-*", "checkpoint-20", state),
        ("step_100/model.pt step_200/model.pt", "*/model.pt", "step_200/model.pt", model),
        ("epoch_0/a.pt epoch_1/a.pt", "*/a.pt", "epoch_1/a.pt", state),
        ("epoch_0.pt epoch_1.pt", "*.pt", "epoch_1.pt", state),
    ],
)
def test_a_pattern_of_several_steps_is_not_one_checkpoint(
    names: str, pattern: str, newest: str, of: Any, tmp_path: Path
) -> None:
    save(tmp_path, names, of)
    with pytest.raises(UsageError, match="names 2 checkpoints of a run") as caught:
        ckpttool.convert(tmp_path / pattern, tmp_path / "out.pt")
    assert f"`{tmp_path / newest}`" in str(caught.value.hint)
    every = {file.name for file in ckpttool.inspect(tmp_path / newest).files}
    assert len(every) == (2 if "*" in newest else 1)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ("G_step_5.pt D_step_5.pt", "*_step_5.pt"),
        ("expert_1.pt expert_2.pt expert_3.pt", "expert_*.pt"),
        ("G_A_step_100.pt G_B_step_90.pt", "G_*.pt"),
        ("G_100.pt G_200.pt", "G_*.pt"),
    ],
)
def test_a_pattern_of_parts_is_one_checkpoint(names: str, pattern: str, tmp_path: Path) -> None:
    """Also of trials, each with its optimizer."""
    save(tmp_path, names, model)
    assert {file.name for file in ckpttool.inspect(tmp_path / pattern).files} == {*names.split()}
    save(tmp_path / "trials", "1/state.pt 2/state.pt 3/state.pt")
    assert len(ckpttool.inspect(tmp_path / "trials/*/state.pt").files) == 3


@pytest.mark.parametrize("names", ["step_1.pt step_2.pt", "step_1/state.pt step_2/state.pt", "state.pt"])
@pytest.mark.parametrize("is_link", [False, True], ids=["text", "link"])
def test_a_pointer_to_what_is_gone_is_said(names: str, is_link: bool, tmp_path: Path) -> None:
    """The newest may have been lost: the one before it was opened without a word."""
    save(tmp_path, names)
    pointer = tmp_path / ("latest" if is_link else "last_checkpoint")
    pointer.symlink_to("model_final.pth") if is_link else pointer.write_text("/elsewhere/model_final.pth\n")
    said = [str(warning) for warning in ckpttool.inspect(tmp_path).warnings]
    assert f"`{pointer.name}` names `model_final.pth`, which is not there" in said
    pointer.unlink()
    assert "not there" not in str(ckpttool.inspect(tmp_path).warnings)
