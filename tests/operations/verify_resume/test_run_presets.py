"""Presets of `verify-resume run`. tests/upstream/test_resumed_scripts.py runs them with the frameworks."""

from __future__ import annotations

import json

import pytest
from support.cli import run

from ckpttool.errors import UsageError
from ckpttool.operations.verify_resume.run.commands import parse
from ckpttool.operations.verify_resume.run.logged import from_files
from ckpttool.operations.verify_resume.run.losses import Output
from ckpttool.operations.verify_resume.run.presets import PRESETS, fill

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
    if options["stop"] != "sigkill":
        assert any(word.startswith(options["stop"].partition("=")[2]) for word in words)


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
    with pytest.raises(UsageError, match="`until` is missing"):
        fill(None, [], {"at": 4, "until": None})
    assert fill(None, ["x"], {"at": 4, "until": 8, "loss": None}) == (["x"], {"at": 4, "until": 8})


def test_the_command_line_shows_what_is_added() -> None:
    done = run("verify-resume", "run", "--preset", "trainer", "--dry-run", "--json", "--", "train.py", "--o=OUT")
    assert done.exit_code == 0, done.stderr
    a, _, b = json.loads(done.stdout)["runs"]
    assert " ".join(a["command"][2:]).startswith("--max_steps 8 --save_strategy steps --save_steps 1")
    assert b["command"][-2:] == ["--resume_from_checkpoint", "<checkpoint of step 4>"]
