"""What `--producer trainer` writes is resumed from by the Trainer of transformers, to the same end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
from runs_trainer import train
from same import assert_same

from ckpttool import convert

STEP = transformers.Trainer.training_step


@dataclass
class Run:
    """Four steps that were trained here: another processor's kernels calculate other numbers."""

    halfway: Path
    end: dict[str, Any]


def end_of(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The state after the fourth step, gone on to from the second; and what was logged on the way."""
    logged: list[dict[str, Any]] = []
    resume = transformers.Trainer.train

    def go_on(trainer: transformers.Trainer) -> None:
        resume(trainer, resume_from_checkpoint=str(checkpoint))
        logged.extend(trainer.state.log_history)

    steps = mock.patch.object(transformers.Trainer, "training_step", autospec=True, side_effect=STEP)
    with mock.patch.object(transformers.Trainer, "train", go_on), steps as counted:
        whole = train(folder, save_steps=4).by_step[4]
    assert counted.call_count == 2, "it began anew"
    untimed = [{key: value for key, value in one.items() if not key.startswith("train_")} for one in logged]
    return {**whole, "logged": untimed}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    states = train(folder).by_step
    return Run(folder / "ckpt" / "checkpoint-2", states[4])


@pytest.fixture(scope="module")
def native(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return end_of(tmp_path_factory.mktemp("native"), run.halfway)


def test_the_oracle_goes_on_as_the_run_did(run: Run, native: dict[str, Any]) -> None:
    for part in ("model", "optim", "step", "scheduler"):
        assert_same(native[part], run.end[part], at=part)


def test_its_own_checkpoint(tmp_path: Path, run: Run, native: dict[str, Any]) -> None:
    convert(run.halfway, tmp_path / "checkpoint-2", producer="trainer", check=True)
    assert_same(end_of(tmp_path / "on", tmp_path / "checkpoint-2"), native)


def test_a_state_that_says_no_step(tmp_path: Path, run: Run, native: dict[str, Any]) -> None:
    """Through one file with names in the optimizer, without what only the Trainer has; the step is in the name."""
    drop = ("trainer_state", "other")
    convert(run.halfway, tmp_path / "state.pt", drop=drop)
    convert(tmp_path / "state.pt", tmp_path / "checkpoint-2", producer="trainer", check=True)
    found = end_of(tmp_path / "on", tmp_path / "checkpoint-2")
    # What was logged before is gone, and `logging_steps` is 500 now, as a new state has it.
    assert_same({**found, "logged": None}, {**native, "logged": None})


def test_a_model_in_several_files(tmp_path: Path, run: Run, native: dict[str, Any]) -> None:
    convert(run.halfway, tmp_path / "checkpoint-2", producer="trainer", max_shard_size=2000, check=True)
    assert (tmp_path / "checkpoint-2/model.safetensors.index.json").exists()
    assert_same(end_of(tmp_path / "on", tmp_path / "checkpoint-2"), native)
