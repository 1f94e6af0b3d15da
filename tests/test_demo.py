"""`make demo`: that it ends well, and that its comparison can fail."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import warm_python
from support.torchrun import Once, forked_launcher

DEMO = Path(__file__).resolve().parent.parent / "samples" / "demo.py"


def demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def in_this_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same with all that has torch forked."""
    import demo as program

    def forked(title: str, script: str, folder: Path) -> None:
        command = [*forked_launcher(), str(program.RANKS), str(DEMO.parent / script)]
        program.step(title, command, folder, {**os.environ, "OMP_NUM_THREADS": "1"})

    words, out = list(map(str, arguments)), io.StringIO()
    with tempfile.TemporaryDirectory() as scripts, pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr(program, "torchrun", forked)
        patch.setattr(program, "program", lambda: warm_python.program(Path(scripts)))
        return subprocess.CompletedProcess(words, program.main(words), out.getvalue(), "")


@pytest.fixture(scope="module", params=[in_this_process, pytest.param(demo, marks=pytest.mark.long)])
def done(request: pytest.FixtureRequest, once: Once) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of it, which is not to be changed."""

    def make(folder: Path) -> None:
        run = request.param("--dir", folder / "out")
        (folder / "told.json").write_text(json.dumps([run.args, run.returncode, run.stdout, run.stderr]))

    folder = once(f"demo-{request.param.__name__}", make)
    return folder / "out", subprocess.CompletedProcess(*json.loads((folder / "told.json").read_text()))


def checked(folder: Path) -> tuple[int, str]:
    """The exit code and the output of `--check`."""
    done = in_this_process("--dir", folder, "--check")
    return done.returncode, done.stdout


def readings(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((folder / "readings.json").read_text())["readings"]
    return {(row["what"], row["reader"]): row for row in rows}


def test_everything_is_equal(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, run = done
    assert run.returncode == 0, run.stdout + run.stderr
    reference = torch.load(folder / "reference.pt", weights_only=False)
    tensors = len(reference["model"]) + sum(len(s) for s in reference["optim"]["state"].values()) + 2  # one RNG a rank
    groups = sum(len(group) for group in reference["optim"]["param_groups"])
    objects = groups + len(reference["scheduler"]) + 2 * 2 + 1  # python and numpy of each rank, and the step
    lines = run.stdout.splitlines()
    assert len(lines) <= 26 and not run.stderr
    *_, readings_line, resumed, log, page = lines
    assert readings_line == f"all equal: {tensors} tensors, {objects} objects, in 7 readings"
    assert resumed == "trained on 2 ranks, resumed on 4 and 1: exact resume"
    assert log.endswith(f"{folder / 'log.txt'}")
    assert page == f"open {folder / 'trial-on-4.html'} for the report of the resume"
    rows = readings(folder)
    assert {row["verdict"] for row in rows.values()} == {"equal"}
    full = [row for row in rows.values() if row["objects"] != "-"]
    assert {(row["tensors"], row["objects"]) for row in full} == {(str(tensors), str(objects))}
    assert rows["run/safetensors/", "safe_open, json"]["tensors"] == str(tensors)
    assert rows["run/model.safetensors", "safe_open"]["tensors"] == str(len(reference["model"]))


def test_each_step_is_a_line_and_its_output_is_in_the_log(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, run = done
    steps = [line.split() for line in run.stdout.splitlines() if line.startswith("✓ ")]
    commands = [words[2] for words in steps if words[1] == "ckpttool"]
    assert commands == ["inspect"] + ["convert"] * 5 + ["verify-resume"] * 2
    assert len(steps) == len(commands) + 2
    log = (folder / "log.txt").read_text()
    assert log.count("\n$ ") + 1 == len(steps)
    assert any("scheduler" in line for line in log.splitlines())


def test_training_goes_on_on_other_ranks(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    log = (folder / "log.txt").read_text()
    verdicts = [line for line in log.splitlines() if line.startswith("PASS  exact resume")]
    assert ["state on 4 ranks" in verdicts[0], "state on 1 rank " in verdicts[1], len(verdicts)] == [True, True, 2]
    for ranks in (4, 1):
        page = (folder / f"trial-on-{ranks}.html").read_text()
        assert "Resume is exact" in page


@pytest.mark.long
def test_a_difference_fails(done: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(done[0], folder)
    run = folder / "run"
    flip(run / "model.safetensors", (run / "model.safetensors").stat().st_size - 1)
    drop_a_tensor(run / "safetensors")
    state = torch.load(run / "full.pt", weights_only=False)
    state["optim"]["param_groups"][1]["betas"] = [0.9, 0.95]
    state["rng"]["rank_1"]["extra"] = 1
    del state["scheduler"]["last_epoch"]
    torch.save(state, run / "full.pt")
    (run / "full-again.pt").unlink()
    piece = bytes(state["optim"]["state"]["layers.0.qkv.weight"]["exp_avg"][0].numpy())
    for file in (run / "dcp-again").glob("*.distcp"):
        if (offset := file.read_bytes().find(piece)) >= 0:
            flip(file, offset)

    code, said = checked(folder)

    assert code == 1, said
    assert "not equal: 7 of 7 readings" in said.splitlines()
    verdicts = {key: row["verdict"] for key, row in readings(folder).items()}
    moment = "1 differ: optim.state.layers.0.qkv.weight.exp_avg"
    assert verdicts["run/dcp-again/", "dcp.load, 2 ranks"] == moment
    assert verdicts["run/dcp-again/", "dcp_to_torch_save"] == moment
    assert verdicts["run/model.safetensors", "safe_open"].startswith("1 differ: ")
    assert verdicts["run/safetensors/", "safe_open, json"].startswith("1 missing: ")
    three = (
        "1 missing: scheduler.last_epoch; 1 not in the reference: rng.rank_1.extra; "
        "1 differ: optim.param_groups.1.betas"
    )
    assert verdicts["run/full.pt", "torch.load"] == three
    assert verdicts["run/full.pt", "torch.load, mmap=True"] == three
    assert verdicts["run/full-again.pt", "torch.load"].startswith("cannot be read: ")


@pytest.mark.long
def test_a_checkpoint_that_is_incomplete_fails(
    done: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(done[0], folder)
    (folder / "run" / "dcp-again" / "__1_0.distcp").unlink()
    code, said = checked(folder)
    assert code == 1, said
    verdicts = {key: row["verdict"] for key, row in readings(folder).items() if row["verdict"] != "equal"}
    assert set(verdicts) == {("run/dcp-again/", "dcp.load, 2 ranks"), ("run/dcp-again/", "dcp_to_torch_save")}
    why = "cannot be read: FileNotFoundError: [Errno 2] No such file or directory: 'run/dcp-again/__1_0.distcp'"
    assert set(verdicts.values()) == {why}


def test_training_that_does_not_go_on_fails(
    done: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    import demo as program

    folder = tmp_path / "out"
    shutil.copytree(done[0], folder)
    monkeypatch.setattr(program, "make", lambda folder: None)
    monkeypatch.setattr(program, "torchrun", lambda title, script, folder: kept.rename(readings_file))
    readings_file, kept = folder / "readings.json", folder / "kept.json"
    shutil.copy(readings_file, kept)
    monkeypatch.setattr(program, "resume", lambda folder, ranks: ranks != 4)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert program.main(["--dir", str(folder)]) == 1
    verdict = capsys.readouterr().out.splitlines()[-3]
    assert verdict.startswith("\x1b[1;31mtrained on 2 ranks, resumed on 4 and 1: resume is not exact")


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused = demo("--dir", tmp_path)
    assert refused.returncode == 1
    assert "was not made by this demo" in refused.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def drop_a_tensor(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    with safe_open(file, framework="pt") as opened:
        kept = {name: opened.get_tensor(name) for name in list(opened.keys())[1:]}
    save_file(kept, file)
