"""Presets of `verify-resume run`. tests/upstream/test_resumed_scripts.py runs them with the frameworks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.cli import run

from ckpttool.analysis.logged import from_files
from ckpttool.analysis.losses import Output
from ckpttool.cli.presets import PRESETS, fill
from ckpttool.errors import UsageError
from ckpttool.fleet.commands import parse
from ckpttool.resume.runs import run as verify

STEPS = {"at": None, "until": None}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_a_command_that_can_be_run(name: str) -> None:
    words, options = fill(name, ["python", "train.py", "--output_dir", "OUT"], {**STEPS, "keep": None})
    assert (options["at"], options["until"]) == (4, 8) and "keep" not in options
    commands = parse(words, options["resume_with"], "OUT")
    assert commands.uses("out")
    assert "{" not in " ".join(words).replace("{out}", "")
    loss = options.get("loss")
    assert from_files(loss or "") or Output(loss)


def test_what_the_command_and_the_options_say_is_kept() -> None:
    given = ["python", "t.py", "--save_steps=2", "--report_to", "all", "--output_dir", "OUT"]
    words, options = fill("trainer", given, {"at": 2, "until": None, "loss": "loss (.*)", "stop": "sigterm"})
    assert words[: len(given)] == given
    assert words[len(given) :] == ["--max_steps", "8", "--save_strategy", "steps", "--logging_steps", "1"]
    assert options["at"] == 2 and options["loss"] == "loss (.*)" and options["stop"] == "sigterm"
    assert fill("trainer", [], {"at": 20, "until": None})[1]["until"] == 21
    assert fill("trainer", [], {"at": None, "until": 3})[1]["at"] == 2
    callbacks = ["--trainer.callbacks+=Mine"]
    assert "ModelCheckpoint" not in " ".join(fill("lightning", callbacks, STEPS)[0])


def test_usage() -> None:
    with pytest.raises(UsageError, match='`preset="traner"` is unknown') as raised:
        fill("traner", [], STEPS)
    assert raised.value.hint == "did you mean `trainer`?"
    assert fill(None, [], {"at": 4, "until": None}) == ([], {"at": 4})
    assert fill(None, ["x"], {"at": 4, "until": 8, "loss": None}) == (["x"], {"at": 4, "until": 8})


def test_the_command_line_shows_what_is_added() -> None:
    done = run("verify-resume", "run", "--preset", "trainer", "--dry-run", "--json", "--", "train.py", "--o=OUT")
    assert done.exit_code == 0, done.stderr
    a, b = json.loads(done.stdout)["runs"]
    assert " ".join(a["command"][2:]).startswith("--max_steps 8 --save_strategy steps --save_steps 1")
    assert b["command"][-2:] == ["--resume_from_checkpoint", "<checkpoint of step 4>"]


TORCHTUNE = """
import pathlib, shutil, sys
made, fault, *words = sys.argv[1:]
made, config = pathlib.Path(made), dict(word.split("=") for word in words)
out, epochs, start = pathlib.Path(config["output_dir"]), int(config["epochs"]), 0
if "resume_from_checkpoint" in config and fault != "forgets":
    recipe = pathlib.Path(config["checkpointer.recipe_checkpoint"]).read_bytes()
    start = next(n for n in range(9) if recipe == (made / f"recipe{n}").read_bytes())
    assert "~checkpointer.checkpoint_files" in config
    files = config["checkpointer.checkpoint_files"].strip("[]").split(",")
    assert [pathlib.Path(one).read_bytes() for one in files] == [(made / f"model{start}").read_bytes()]
log = out / "logs" / f"log_{len(words)}.txt"
log.parent.mkdir(parents=True, exist_ok=True)
for epoch in range(start, epochs):
    state = "other" if fault == "optimizer" and start else ""
    log.open("a").write(f"Step {epoch + 1} | loss:{2.5 / (epoch + 1)} lr:0.1\\n")
    saved = out / f"epoch_{epoch}" / "model-00001-of-00001.safetensors"
    saved.parent.mkdir(exist_ok=True)
    (saved.parent / "config.json").exists() or (saved.parent / "config.json").write_text("{}")
    saved.write_bytes((made / f"model{epoch + 1}").read_bytes())
    if epoch + 1 < epochs:
        (out / "recipe_state").mkdir(exist_ok=True)
        (out / "recipe_state" / "recipe_state.pt").write_bytes((made / f"{state}recipe{epoch + 1}").read_bytes())
"""


@pytest.mark.parametrize(("fault", "named"), [("", None), ("forgets", "did not resume"), ("optimizer", "exp_avg")])
def test_torchtune_saves_a_folder_for_each_epoch_and_its_state_beside_them(
    fault: str, named: str | None, tmp_path: Path
) -> None:
    """By a script that writes files as torchtune does, which were made before."""
    for step in range(4):
        save_file({"w": np.full(3, step, np.float32)}, tmp_path / f"model{step}")
        for other in ("", "other"):
            moment = torch.full((3,), step + 0.5 * bool(other))
            state = {0: {"step": torch.tensor(float(step)), "exp_avg": moment, "exp_avg_sq": moment + 1}}
            optimizer = {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}]}
            torch.save({"optimizer": optimizer, "epochs_run": step, "seed": 1}, tmp_path / f"{other}recipe{step}")
    (tmp_path / "train.py").write_text(TORCHTUNE)
    command, options = fill("torchtune", ["train.py", str(tmp_path), fault], {"at": 1, "until": 3})
    report = verify([sys.executable, str(tmp_path / command[0]), *command[1:]], timeout=300.0, **options)
    assert report.verdict == ("differs" if named else "same"), report.message
    assert named is None or named in " ".join([report.message, *(one.message for one in report.findings)])
    assert [[saved.step for saved in one.checkpoints] for one in report.runs] == [[1, 2, 3]] * (
        3 if fault == "optimizer" else 2
    )
    # The last epoch has weights alone.
    compared = {row.what for row in report.compared if row.equal is not None}
    assert {"step 2: model", "step 2: optimizer", "step 3: model", "loss"} <= compared
    assert "step 3: optimizer" not in compared


def test_whole_epochs_have_no_losses_by_step() -> None:
    words, options = fill("torchtune", ["tune", "max_steps_per_epoch=null"], {**STEPS, "observe": False})
    assert words.count("max_steps_per_epoch=1") == 0 and options["loss"] == "none"
    assert fill("torchtune", ["tune", "max_steps_per_epoch=1"], STEPS)[1]["loss"] != "none"
    with pytest.raises(UsageError, match="steps are observed with `max_steps_per_epoch=1`"):
        fill("torchtune", ["tune", "max_steps_per_epoch=null"], {**STEPS, "observe": True})


def test_a_model_with_an_adapter_resumes_from_the_weights_that_training_began_with(tmp_path: Path) -> None:
    commands = parse(["tune", "{out}"], "... resume=[{weights}] from={checkpoint}", "")
    for name in ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "optimizer.bin"):
        (tmp_path / name).touch()
    filled = commands.filled(commands.resume, out="o", checkpoint=str(tmp_path))
    files = ",".join(f"{tmp_path}/model-0000{n}-of-00002.safetensors" for n in (1, 2))
    assert filled == ["tune", "o", f"resume=[{files}]", f"from={tmp_path}"]
    (tmp_path / "adapter_model.pt").touch()
    assert commands.filled(commands.resume, out="o", checkpoint=str(tmp_path)) == ["tune", "o", f"from={tmp_path}"]
    # It names the checkpoint, so that what was saved after it is put aside.
    assert parse(["{out}"], "... [{weights}]", "").uses("checkpoint", resuming=True)
    with pytest.raises(UsageError, match=r"no value for `\{weights\}`"):
        commands.filled(["{weights}"], out="o")
