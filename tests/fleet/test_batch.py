"""`batch`: every checkpoint of a run is what a single command makes of it, or is named with why it is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batch_logs import lines_of
from support.cli import run
from support.faults import mark, untouched
from support.folders import contents
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import ALL_FAILED, INTERRUPTED, SOME_FAILED, CorruptError, OverwriteError, ReadError, UsageError
from ckpttool.fleet.batch_result import blocks
from ckpttool.fleet.share import Share, share_of
from ckpttool.reports.report import Table
from ckpttool.transfer.workers import Workers

SMALL = {"to": "safetensors", "only": ["model"]}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three checkpoints, in the directory that everything is relative to."""
    for step in (5, 10, 100):
        shutil.copytree(CHECKPOINTS / "dcp/hsdp_w4/ckpt", tmp_path / f"run7/step-{step}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states(result: ckpttool.Batch) -> dict[str, str]:
    return {item.name: item.state for item in result.items}


def lines(path: str = "out/batch.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_each_checkpoint_is_what_a_single_command_makes(there: Path) -> None:
    with untouched("run7"):
        result = ckpttool.batch("convert", "run7", "out/{step}", jobs=2, **SMALL)
    assert (result.exit_code, result.verdict, states(result)) == (
        0,
        "done",
        {"step-5": "done", "step-10": "done", "step-100": "done"},
    )
    for step in (5, 10, 100):
        ckpttool.convert(f"run7/step-{step}", f"single/{step}", **SMALL)
        assert contents(f"out/{step}") == contents(f"single/{step}")
    ended = [line for line in lines() if line["state"] == "done"]
    assert sorted(line["step"] for line in ended if line["nbytes"] > 0 < line["seconds"]) == [5, 10, 100]


def test_running_it_again_goes_on(there: Path) -> None:
    ckpttool.batch("convert", "run7", "out/{step}", **SMALL)
    before = mark("out/5")
    shutil.rmtree("out/10")
    shutil.copytree("run7/step-100", "run7/step-200")
    again = ckpttool.batch("convert", "run7", "out/{step}", **SMALL)
    assert states(again) == {"step-5": "kept", "step-10": "done", "step-100": "kept", "step-200": "done"}
    assert mark("out/5") == before


def changed_options() -> dict[str, Any]:
    return {**SMALL, "dtype": "bfloat16"}


def changed_source() -> dict[str, Any]:
    newer = Path("run7/step-5/__0_0.distcp")
    newer.write_bytes(newer.read_bytes())
    later = newer.stat().st_mtime + 5
    os.utime(newer, (later, later))
    return SMALL


def lost_file() -> dict[str, Any]:
    next(Path("out/5").glob("*.safetensors")).write_bytes(b"{}")
    return SMALL


@pytest.mark.parametrize("change", [changed_options, changed_source, lost_file])
def test_what_is_there_and_not_of_this_is_no_success(change: Callable[[], dict[str, Any]], there: Path) -> None:
    """Of other options or another source, or not whole any more; `new` leaves it alone and says so, `overwrite`
    replaces it."""
    ckpttool.batch("convert", "run7/step-5", "out/{step}", **SMALL)
    options = change()
    refused = ckpttool.batch("convert", "run7/step-5", "out/{step}", **options)
    assert (states(refused), refused.exit_code) == ({"step-5": "failed"}, ALL_FAILED)
    assert [one.title for one in blocks(refused) if isinstance(one, Table) and (one.rows or one.aside)] == ["failed"]
    assert refused.items[0].exit_code == OverwriteError.exit_code
    there_all_the_same = ckpttool.batch("convert", "run7/step-5", "out/{step}", new=True, **options)
    assert states(there_all_the_same) == {"step-5": "present"}
    assert "1 there and not judged" in there_all_the_same.message
    assert states(ckpttool.batch("convert", "run7/step-5", "out/{step}", overwrite=True, **options)) == {
        "step-5": "done"
    }
    ckpttool.convert("run7/step-5", "single", **options)
    assert contents("out/5") == contents("single")


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_run_that_was_killed_between_the_rename_and_the_log(command: str, there: Path) -> None:
    """What it has written is recognised, and something else in its place is not."""
    dst, options = ("out/{step}", {"to": "dcp"}) if command == "convert" else ("out/{step}.json", {})
    ckpttool.batch(command, "run7", dst, **options)
    log = Path("out/batch.jsonl")
    begun = [line for line in log.read_text().splitlines() if '"begun"' in line]
    # Of one its process was killed, which was seen; and the last line is torn.
    log.write_text("\n".join([*begun, begun[0].replace('"begun"', '"failed"'), begun[0][:40]]))
    shutil.rmtree("out/10") if command == "convert" else Path("out/10.json").unlink()
    other = Path("out/10" if command == "convert" else "out/10.json")
    other.write_text("{}")
    again = ckpttool.batch(command, "run7", dst, **options)
    assert states(again) == {"step-5": "kept", "step-10": "failed", "step-100": "kept"}
    assert other.read_text() == "{}"
    assert [line["name"] for line in lines_of(log) if line["state"] == "kept"] == ["step-5", "step-100"]
    assert states(ckpttool.batch(command, "run7", dst, new=True, **options))["step-10"] == "present"


def test_nothing_of_a_run_is_left_out(there: Path) -> None:
    Path("run7/step-10/.metadata").unlink()
    Path("run7/logs").mkdir()
    Path("run7/step-20").mkdir()
    Path("run7/latest").symlink_to("step-100")
    result = ckpttool.batch("convert", "run7", "out/{step}", **SMALL)
    assert states(result) == {"step-5": "done", "step-10": "failed", "step-20": "failed", "step-100": "done"}
    assert result.items[1].error is not None
    assert "no `.metadata`: the save did not end" in result.items[1].error["message"]
    assert result.others == ["run7/logs/"]
    assert (result.exit_code, result.verdict) == (SOME_FAILED, "partial")
    assert [line.partition(":")[0] for line in result.lines] == ["step-10", "step-20"]


def test_versions_of_a_run_and_a_final_model_are_named(there: Path) -> None:
    shutil.copytree("run7", "logs/version_0/checkpoints")
    shutil.copytree("run7/step-5", "logs/version_1/checkpoints/step-5")
    with pytest.raises(UsageError, match=r"would both be written to `out/5`"):
        ckpttool.batch("convert", "logs", "out/{step}", **SMALL)
    assert not Path("out").exists()
    shutil.copytree(CHECKPOINTS / "run/trainer/ckpt", "finetune")
    shutil.copytree(CHECKPOINTS / "hf/llama/ckpt", "finetune", dirs_exist_ok=True)
    result = ckpttool.batch("convert", "finetune", "out/{name}", **SMALL)
    assert states(result) == {"checkpoint-2": "done", "checkpoint-4": "done", "finetune": "done"}
    result = ckpttool.batch("convert", "finetune", "out/{step}", **SMALL)
    assert states(result) == {"checkpoint-2": "done", "checkpoint-4": "done", "finetune": "failed"}


def test_patterns_lists_and_files(there: Path) -> None:
    Path("files").mkdir()
    for step in (100, 200):
        shutil.copy(CHECKPOINTS / "torch/ddp/ckpt.pt", f"files/model_{step}.pt")
    result = ckpttool.batch("convert", ["run7/step-*0", "files"], "out/{name}.safetensors", only="model")
    assert states(result) == dict.fromkeys(["step-10", "step-100", "model_100.pt", "model_200.pt"], "done")
    assert sorted(path.name for path in Path("out").glob("*.safetensors")) == [
        "model_100.safetensors", "model_200.safetensors", "step-10.safetensors", "step-100.safetensors",
    ]  # fmt: skip
    steps = ckpttool.batch("convert", ["files/*.pt", "run7/step-5"], "by/{step}.safetensors", only="model")
    assert sorted(item.step or 0 for item in steps.items) == [5, 100, 200]


def test_what_cannot_be_right_is_refused_before_anything_is_written(there: Path) -> None:
    for paths, dst, options, words in (
        ("run7", "out", {}, "would both be written to `out`"),
        ("run7", "run7/{step}-hf", {}, "is inside"),
        ("run7", "out/{step}", {"manifest": "m.json"}, "is one file, and there are 3 checkpoints"),
        ("run7", "out/{step}", {"jobs": 0}, "is less than 1"),
        ("run7", "out/{step}", {"world": 3}, "`convert` has no option 'world'"),
    ):
        with pytest.raises(UsageError, match=words.replace("{", r"\{")):
            ckpttool.batch("convert", paths, dst, **options)
    for path in ("absent", "run8/*", "empty"):
        Path("empty").mkdir(exist_ok=True)
        if path == "empty":
            result = ckpttool.batch("convert", path, "out/{name}")
            assert result.exit_code == ALL_FAILED
            shutil.rmtree("out")
        else:
            with pytest.raises(ReadError):
                ckpttool.batch("convert", path, "out/{step}")
    assert {path.name for path in Path().iterdir()} == {"run7", "empty"}


def test_documents_of_commands_that_read(there: Path) -> None:
    damaged = Path("run7/step-10/__0_0.distcp")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 255
    damaged.write_bytes(data)
    result = ckpttool.batch("verify", "run7", "out/{step}.json", write_manifest="manifests/{name}")
    codes = {item.step: item.exit_code for item in result.items}
    assert codes == {5: 0, 10: CorruptError.exit_code, 100: 0}
    assert result.exit_code == CorruptError.exit_code
    assert json.loads(Path("out/10.json").read_text())["verdict"] == "damaged"
    assert Path("manifests/step-5").is_file()
    single, document = ckpttool.verify("run7/step-5").as_dict(), json.loads(Path("out/5.json").read_text())
    of_manifest = {"seconds", "wrote", "hashed_bytes"}
    assert {key: document[key] for key in document.keys() - of_manifest} == {
        key: value for key, value in json.loads(json.dumps(single)).items() if key not in of_manifest
    }
    again = ckpttool.batch("verify", "run7", "out/{step}.json", write_manifest="manifests/{name}")
    assert {item.state for item in again.items} == {"kept"}
    assert again.exit_code == CorruptError.exit_code


def test_a_live_run_is_followed(there: Path) -> None:
    """It may not have begun. A checkpoint that is not complete is waited for, and one that never becomes it has failed
    in the end."""
    Path("run7").rename("later")
    for step in (10, 100):
        Path(f"later/step-{step}/.metadata").rename(f"{step}.metadata")
    results: list[ckpttool.Batch] = []
    call = threading.Thread(
        target=lambda: results.append(ckpttool.batch("convert", "run7", "out/{step}", watch=2.0, **SMALL))
    )
    call.start()
    time.sleep(0.1)
    Path("later").rename("run7")
    while not Path("out/5").exists():
        time.sleep(0.05)
    assert not Path("out/10").exists()
    Path("10.metadata").rename("run7/step-10/.metadata")
    call.join()
    assert states(results[0]) == {"step-5": "done", "step-10": "done", "step-100": "failed"}


def test_shares() -> None:
    assert share_of("2/8", {}) == Share(2, 8)
    assert share_of(None, {}) == Share(0, 1)
    slurm = {"ID": "7", "COUNT": "3", "MIN": "1", "MAX": "7", "STEP": "3"}
    assert share_of(None, {f"SLURM_ARRAY_TASK_{name}": value for name, value in slurm.items()}) == Share(2, 3)
    assert share_of(None, {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "4"}) == Share(0, 4)
    assert share_of("0/1", {"JOB_COMPLETION_INDEX": "3"}) == Share(0, 1)
    for text, environment in (
        ("8/8", {}),
        ("8", {}),
        ("-1/8", {}),
        (None, {"JOB_COMPLETION_INDEX": "0"}),
        (None, {"SLURM_ARRAY_TASK_ID": "4"}),
    ):
        with pytest.raises(UsageError, match=r"share|says"):
            share_of(text, environment)


def test_shares_are_everything_and_nothing_twice(there: Path) -> None:
    done: list[str] = []
    for index in range(4):
        result = ckpttool.batch("convert", "run7", "out/{step}", shard=f"{index}/4", **SMALL)
        done += states(result)
        assert f"share {index}/4 of 3" in result.message
        assert result.exit_code == 0
    assert sorted(done) == ["step-10", "step-100", "step-5"]
    # Each has a log of its own, and all are read.
    assert {item.state for item in ckpttool.batch("convert", "run7", "out/{step}", **SMALL).items} == {"kept"}


def test_the_command_line(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the command come behind its name, those of batch before."""
    done = run("batch", "-j", "2", "convert", "run7", "out/{step}", "--to", "dcp", "--no-manifest", "--json")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert [item["state"] for item in json.loads(done.stdout)["items"]] == ["done"] * 3
    assert lines()[0]["options"] == {"manifest": False, "to": "dcp"}
    Path("run7/step-10/.metadata").unlink()
    done = run("batch", "--new", "--shard", "0/1", "--jobs", "1", "convert", "run7", "out/{step}", "--to", "dcp")
    assert done.exit_code == SOME_FAILED
    assert "it is not complete" in done.stdout
    quiet = run("batch", "--quiet", "--new", "convert", "run7", "out/{step}", "--to", "dcp")
    assert quiet.stdout.startswith("step-10: it is not complete")
    planned = run("batch", "--verbose", "--watch", "0.1", "convert", "run7", "plan/{step}", "--dry-run", "--to", "dcp")
    assert planned.exit_code == SOME_FAILED
    assert not Path("plan").exists()
    for words, message in (
        (["convert", "run7"], "missing argument `DST`"),
        (["verify"], "missing argument `RUN`"),
        (["reshard", "run7", "out/{step}"], "`batch` has no command `reshard`"),
        (["convert", "run7", "out/{step}", "--tu", "dcp"], "`ckpttool convert` has no option `--tu`"),
        (["stats", "run7", "out/{step}", "--csv"], "`--csv` changes what `stats` prints"),
    ):
        failed = run("batch", *words)
        assert failed.exit_code == UsageError.exit_code
        assert message in failed.stderr
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    failed = run("batch", "--json", "convert", "run7", "out/{step}")
    assert failed.exit_code == UsageError.exit_code
    assert json.loads(failed.stdout)["error"]["message"] == "`JOB_COMPLETION_INDEX` says 1 of ?"


def test_an_interrupted_batch_says_how_far_it_is(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Workers.ended, []

    def ended(self: Any, timeout: float) -> Any:
        calls.extend(found := [*real(self, timeout)])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Workers, "ended", ended)
    stopped = run("batch", "convert", "run7", "out/{step}", "--to", "dcp")
    assert stopped.exit_code == INTERRUPTED
    assert "interrupted, 1 checkpoint done" in stopped.stderr
    assert "run the same command again" in stopped.stderr
    monkeypatch.setattr(Workers, "ended", real)
    assert states(ckpttool.batch("convert", "run7", "out/{step}", to="dcp")) == {
        "step-5": "kept", "step-10": "kept", "step-100": "done",
    }  # fmt: skip


def test_some_steps(there: Path) -> None:
    result = ckpttool.batch("convert", "run7", "out/{step}", steps="5..10", **SMALL)
    assert states(result) == {"step-5": "done", "step-10": "done"} and result.total == 2
    result = ckpttool.batch("convert", "run7", "out/{step}", steps=[100, 10], **SMALL)
    assert states(result) == {"step-10": "kept", "step-100": "done"}
    assert sorted(line["step"] for line in lines() if line["state"] == "done" and line["seconds"] > 0) == [5, 10, 100]
    with pytest.raises(UsageError, match=re.escape("no checkpoint of `run7` has the step 11..99")) as raised:
        ckpttool.batch("convert", "run7", "out/{step}", steps="5,11..99", **SMALL)
    assert raised.value.hint == "there are the steps 5, 10, 100"
    # Behind the name it is of `stats`; the others have no such option, and say where it belongs.
    done = run("batch", "-q", "stats", "run7", "stats/{step}.json", "--steps", "10")
    assert done.exit_code == 0 and sorted(os.listdir("stats")) == ["10.json", "batch.jsonl"], done.stderr
    done = run("batch", "convert", "run7", "out/{step}", "--steps", "10")
    assert done.exit_code == 2 and "`ckpttool batch --steps ... convert ...`" in done.stderr


def test_steps_of_a_live_run_may_be_of_the_future(there: Path) -> None:
    result = ckpttool.batch("convert", "run7", "out/{step}", steps="100..900", watch=1.0, **SMALL)
    assert states(result) == {"step-100": "done"}
