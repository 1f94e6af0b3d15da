"""`prune`: what stays of a run and what goes, each checkpoint as a whole, whenever it is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from support.cli import run
from support.faults import mark, save_dcp, untouched
from support.folders import contents
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import ReadError, StorageError, UsageError
from ckpttool.fleet import prune
from ckpttool.producers.open import opened as ckpttool_opened
from ckpttool.storage import tree

STEPS = (5, 10, 15, 20, 25)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, in the directory that everything is relative to."""
    for step in STEPS:
        shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w2/ckpt", tmp_path / f"run7/step-{step}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def actions(result: ckpttool.Pruned) -> dict[int | None, str]:
    return {one.step: one.action for one in result.checkpoints}


def names(folder: str = "run7") -> set[str]:
    return set(os.listdir(folder))


def test_it_changes_nothing_unless_it_is_told(there: Path) -> None:
    with untouched("run7"):
        result = ckpttool.prune("run7", keep_last=2, keep_every=10, drop="optimizer")
    assert actions(result) == {5: "remove", 10: "drop", 15: "remove", 20: "keep", 25: "keep"}
    assert result.verdict == "planned"
    nbytes = sum(file.stat().st_size for file in Path("run7/step-5").iterdir())
    assert result.freed_bytes > 2 * nbytes


def test_what_goes_is_gone_and_the_rest_is_untouched(there: Path) -> None:
    before = sum(file.stat().st_size for file in Path("run7").rglob("*") if file.is_file())
    with untouched("run7/step-20", "run7/step-25"):
        result = ckpttool.prune("run7", keep_last=2, keep_every=10, drop=["optimizer"], yes=True)
    assert names() == {"step-10", "step-20", "step-25"}
    after = sum(file.stat().st_size for file in Path("run7").rglob("*") if file.is_file())
    assert result.freed_bytes == before - after
    rest, whole = ckpttool.open("run7/step-10"), ckpttool.open("run7/step-20")
    is_of_optimizer = [name for name in whole if name.startswith("optim")]
    assert set(whole) - set(rest) == set(is_of_optimizer) and is_of_optimizer
    assert ckpttool.diff("run7/step-10", "run7/step-20", drop="optimizer").exit_code == 0
    assert ckpttool.verify("run7/step-10").whole
    # Again there is nothing to do, and every other command takes what is left.
    assert ckpttool.prune("run7", keep_last=2, keep_every=10, drop="optimizer", yes=True).verdict == "nothing"


def test_without_keep_every_all_others_lose_a_part_and_none_goes(there: Path) -> None:
    shutil.copytree(CHECKPOINTS / "run/trainer/ckpt", "finetune")
    assets = contents(Path("finetune/checkpoint-2"))
    result = ckpttool.prune("finetune", keep_last=1, drop=["optimizer", "scheduler"], yes=True)
    assert actions(result) == {2: "drop", 4: "keep"}
    left = contents(Path("finetune/checkpoint-2"))
    assert assets.keys() - left.keys() == {"optimizer.pt", "scheduler.pt"}
    assert {name for name in left if name.endswith(".json") and left[name] != assets[name]} == set()


def test_what_cannot_be_judged_stays_and_is_named(there: Path) -> None:
    Path("run7/step-5/.metadata").unlink()
    shutil.move("run7/step-10", "elsewhere")
    Path("run7/step-10").symlink_to(there / "elsewhere")
    Path("run7/latest").symlink_to("step-15")
    Path("run7/logs").mkdir()
    shutil.copytree("run7/step-25", "run7/step-30")
    Path("run7/step-30/.metadata").unlink()
    with untouched("elsewhere", "run7"):
        result = ckpttool.prune("run7", keep_last=1, keep_every=1000)
    assert {one.step: (one.action, one.why) for one in result.checkpoints} == {
        5: ("leave", "not complete: no `.metadata`: the save did not end"),
        10: ("leave", "a link"),
        15: ("keep", "a file or link names it"),
        20: ("remove", ""),
        25: ("keep", "the newest complete one"),
        30: ("leave", "not complete: no `.metadata`: the save did not end"),
    }
    assert result.others == ["run7/logs/"]
    ckpttool.prune("run7", keep_last=1, yes=True)
    assert names() == {"step-5", "step-10", "step-15", "step-25", "step-30", "latest", "logs"}
    assert Path("elsewhere/.metadata").exists()


@pytest.mark.parametrize("how", ["short", "zeros", "none"])
@pytest.mark.parametrize(
    "sample", ["dcp/fsdp2_w2/ckpt", "rank/fsdp1_w2/ckpt", "hf/sharded_w2/ckpt", "torch/full/ckpt.pt"]
)
def test_what_a_full_disk_has_left_is_not_the_newest(
    sample: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all of its files: others are not removed for it."""
    monkeypatch.chdir(tmp_path)
    suffix = Path(sample).suffix
    for step in (1, 2, 3):
        source, copy = CHECKPOINTS / sample, Path(f"run/step-{step}{suffix}")
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(source, copy)
    files = [one for one in [copy, *copy.rglob("*")] if one.suffix in (".distcp", ".pt", ".safetensors")]
    spoilt = max(files, key=lambda one: (one.stat().st_size, one))
    size = spoilt.stat().st_size
    os.truncate(spoilt, 0 if how != "short" else size - 100)
    os.truncate(spoilt, size if how == "zeros" else spoilt.stat().st_size)
    with untouched("run"):
        found = actions(ckpttool.prune("run", keep_last=1))
    assert found == {1: "remove", 2: "keep", 3: "leave"}
    (why,) = (one.why for one in ckpttool.prune("run", keep_last=2).checkpoints if one.step == 3)
    assert why.startswith("not complete: ") and (spoilt.name in why or "an empty file" in why), why
    assert actions(ckpttool.prune("run", keep_last=2)) == {1: "keep", 2: "keep", 3: "leave"}


def test_what_is_refused(there: Path) -> None:
    for path, options, error in (
        ("run7", {}, "nothing says what to keep"),
        ("run7", {"keep_last": 1, "drop": "optimzer"}, "no part `optimzer`"),
        ("run7/step-5", {"keep_last": 1}, "not a run"),
        ("absent", {"keep_last": 1}, "no such file"),
    ):
        with untouched("run7"), pytest.raises((UsageError, ReadError), match=error):
            ckpttool.prune(path, yes=True, **options)  # type: ignore[arg-type]
    for step in STEPS:
        Path(f"run7/step-{step}/.metadata").unlink()
    with untouched("run7"), pytest.raises(ReadError, match="none of its 5 checkpoints is complete"):
        ckpttool.prune("run7", keep_last=1, yes=True)


def test_a_removal_that_fails_is_an_error_of_that_checkpoint(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left of it is not at its place any more, and is what `clean` finds."""
    real, calls = tree.remove, []

    def remove(name: str, *args: object, **options: object) -> None:
        calls.append(name)
        if len(calls) == 1:
            raise OSError(5, "Input/output error", name)
        real(name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tree, "remove", remove)
    result = ckpttool.prune("run7", keep_last=3, yes=True)
    assert result.exit_code == StorageError.exit_code
    assert [(one.step, one.done) for one in result.checkpoints[:2]] == [(5, False), (10, True)]
    assert "not done: " in result.checkpoints[0].why
    assert {name for name in names() if not name.startswith(".")} == {"step-15", "step-20", "step-25"}
    assert ckpttool.clean("run7", yes=True).removed_bytes > 0
    assert names() == {"step-15", "step-20", "step-25"}


def test_the_command_line(there: Path) -> None:
    planned = run("prune", "run7", "--keep-last", "2", "--keep-every", "10", "--drop", "optimizer")
    assert planned.exit_code == 0
    assert "would remove 2 checkpoints and parts of 1 of run7" in planned.stdout
    assert planned.stdout.rstrip().endswith("pass `--yes` to carry this out")
    rule = ["--keep-last=2", "--keep-every=10", "--drop=optimizer"]
    assert run("prune", "run7", *rule, "-q").stdout.split() == ["step-5", "step-10", "step-15"]
    done = run("prune", "run7", *rule, "--yes", "--json")
    assert json.loads(done.stdout)["verdict"] == "pruned"
    assert run("prune", "run7", *rule, "--yes", "--quiet").stdout == ""
    assert run("prune", "run7").exit_code == UsageError.exit_code


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.long)])
def test_kills_at_random_moments(rounds: int, memory: Path) -> None:
    """Each checkpoint is gone, whole, or whole without its optimizer."""
    weights = {f"layers.{i}.weight": torch.arange(4096, dtype=torch.float32) * i for i in range(16)}
    source = save_dcp(memory / "one", {"model": weights, "optim": {"state": weights, "param_groups": []}})
    top, some = memory / "run", random.Random(rounds)

    def child() -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                ckpttool.prune(top, keep_last=1, keep_every=10, drop="optim", yes=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def begin() -> None:
        shutil.rmtree(top, ignore_errors=True)
        for step in STEPS:
            shutil.copytree(source, top / f"step-{step}")

    begin()
    began = time.monotonic()
    assert os.waitpid(child(), 0)[1] == 0
    seconds = time.monotonic() - began
    whole, thin = contents(source), contents(top / "step-10")
    assert thin.keys() <= whole.keys() and thin != whole
    killed = 0
    for _ in range(rounds):
        begin()
        pid = child()
        time.sleep(some.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert contents(top / "step-25") == whole
        if some.random() < 0.5:
            ckpttool.clean(top, yes=True)
        for step in STEPS:
            assert not (top / f"step-{step}").exists() or contents(top / f"step-{step}") in (whole, thin)
        assert os.waitpid(child(), 0)[1] == 0
        ckpttool.clean(top, yes=True)
        assert {one.name for one in top.iterdir()} == {"step-10", "step-20", "step-25"}
        assert contents(top / "step-10") == contents(top / "step-20") == thin
    print(f"{killed} kills")
    assert killed
    assert mark(source)


def test_the_one_file_that_stays_may_have_other_names(tmp_path: Path) -> None:
    """`model.pt` beside `optimizer.pt` is mounted as `model`, and has its own keys without it: that was refused."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        (folder := tmp_path / "run" / f"step_{step}").mkdir(parents=True)
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    ckpttool.prune(tmp_path / "run", keep_last=1, drop=["optimizer"], yes=True)
    assert [file.name for file in (tmp_path / "run" / "step_1").iterdir()] == ["model.pt"]
    assert torch.load(tmp_path / "run" / "step_1" / "model.pt")["weight"].equal(model.weight)


def _steps_with_files(folder: Path, steps: range) -> None:
    """Write `step_N/{model.pt, optimizer.pt, scheduler.pt, state.json}`, as a script does."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for step in steps:
        place = folder / f"step_{step}"
        place.mkdir(parents=True)
        torch.save(model.state_dict(), place / "model.pt")
        torch.save(optimizer.state_dict(), place / "optimizer.pt")
        torch.save(scheduler.state_dict(), place / "scheduler.pt")
        (place / "state.json").write_text(json.dumps({"step": step, "best": 0.5}))


@pytest.mark.parametrize(
    "name, how",
    [
        *((name, "gone") for name in ("model.pt", "optimizer.pt", "scheduler.pt", "state.json")),
        *((name, "called as not ended") for name in ("optimizer.pt", "state.json")),
        *(("state.json", how) for how in ("cut", "zeros", "empty")),
    ],
)
def test_a_step_of_which_the_last_file_is_missing_is_not_kept_for_another(name: str, how: str, tmp_path: Path) -> None:
    """The run was killed between two files of its last save: the step before is what it resumes from."""
    _steps_with_files(tmp_path / "run", range(1, 4))
    file = tmp_path / "run/step_3" / name
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "called as not ended":
        file.rename(f"{file}.tmp")
    else:
        file.write_bytes({"cut": data[:-3], "zeros": data[:5] + bytes(len(data) - 5), "empty": b""}[how])
    with untouched(str(tmp_path / "run/step_2"), str(tmp_path / "run/step_3")):
        result = ckpttool.prune(tmp_path / "run", keep_last=1, yes=True)
    assert names(str(tmp_path / "run")) == {"step_2", "step_3"}
    assert actions(result)[2] == "keep"
    assert name.partition(".")[0] in result.checkpoints[-1].why or "has no " in result.checkpoints[-1].why


def test_a_step_without_its_optimizer_does_not_count_among_the_last(tmp_path: Path) -> None:
    """Of a framework, which may leave out the optimizer on purpose: both stay."""
    for step in (10, 20, 30):
        shutil.copytree(CHECKPOINTS / "run/trainer/ckpt/checkpoint-4", tmp_path / f"checkpoint-{step}")
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-30/optimizer.pt").unlink()
    result = ckpttool.prune(tmp_path, keep_last=1, yes=True)
    assert names(str(tmp_path)) == {"checkpoint-20", "checkpoint-30"}
    assert result.checkpoints[-1].why == "has no `optimizer`, which `checkpoint-20` has"
    assert result.checkpoints[-2].why == "of the last 1"


def _save_step(folder: Path, step: int, *parts: str, linear: int = 4) -> None:
    """Save a model and other parts of a step in one file; of `small`, few of the weights are trained."""
    model = torch.nn.Linear(linear, linear)
    trained = [model.bias] if "small" in parts else [*model.parameters()]
    optimizer = torch.optim.Adam(trained)
    model(torch.ones(linear)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "step": step}
    if "optimizer" in parts:
        state["optimizer"] = optimizer.state_dict()
    if "critic" in parts:
        state["critic"] = torch.nn.Linear(linear, linear, bias=False).state_dict()
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"step_{step}.pt")


def test_of_weights_between_whole_steps_the_last_stay(tmp_path: Path) -> None:
    """A run that saves its optimizer at every tenth step: both the last steps and the last whole ones stay."""
    for step in range(1, 33):
        _save_step(tmp_path / "run", step, *["optimizer"] * (step % 10 == 0))
    ckpttool.prune(tmp_path / "run", keep_last=2, yes=True)
    assert names(str(tmp_path / "run")) == {f"step_{step}.pt" for step in (20, 30, 31, 32)}


def test_a_run_that_has_left_out_a_part_is_still_pruned(tmp_path: Path) -> None:
    for step in range(1, 20):
        _save_step(tmp_path / "run", step, "optimizer", *["critic"] * (step <= 5))
    ckpttool.prune(tmp_path / "run", keep_last=1, yes=True)
    assert names(str(tmp_path / "run")) == {"step_5.pt", "step_19.pt"}


def test_a_last_step_without_its_small_optimizer_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    for step in range(1, 5):
        _save_step(tmp_path / "run", step, "small", *["optimizer"] * (step < 4), linear=512)
    sizes = [(tmp_path / f"run/step_{step}.pt").stat().st_size for step in (3, 4)]
    assert sizes[0] < 1.02 * sizes[1]  # so little that it cannot be told from a longer log
    ckpttool.prune(tmp_path / "run", keep_last=1, yes=True)
    assert names(str(tmp_path / "run")) == {"step_3.pt", "step_4.pt"}


def test_few_of_those_that_are_removed_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each open is several requests to a store; that they are smaller from step to step is no reason for one."""
    for step in range(1, 41):
        _save_step(tmp_path / "run", step, "optimizer", linear=200 - step)
    opened: list[str] = []
    monkeypatch.setattr(prune, "opened", lambda path: opened.append(path) or ckpttool_opened(path))
    result = ckpttool.prune(tmp_path / "run", keep_last=1)
    assert [*actions(result).values()].count("remove") == 39
    assert len(opened) < 30


def test_a_damaged_step_that_holds_more_than_the_last_stays(tmp_path: Path) -> None:
    """The weights are in the damaged one only."""
    for step in (10, 20):
        shutil.copytree(CHECKPOINTS / "run/trainer/ckpt/checkpoint-4", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-10/trainer_state.json").write_bytes(b'{"global' + bytes(30))
    (tmp_path / "checkpoint-20/model.safetensors").unlink()
    with untouched(str(tmp_path)):
        assert actions(ckpttool.prune(tmp_path, keep_last=1, yes=True)) == {10: "leave", 20: "keep"}


def test_a_script_s_step_loses_its_optimizer_file(tmp_path: Path) -> None:
    _steps_with_files(tmp_path / "run", range(1, 4))
    before = {name: torch.load(tmp_path / f"run/step_1/{name}.pt") for name in ("model", "scheduler")}
    result = ckpttool.prune(tmp_path / "run", keep_last=1, drop=["optimizer", "scheduler"], yes=True)
    assert actions(result) == {1: "drop", 2: "drop", 3: "keep"} and result.exit_code == 0
    for step in (1, 2):
        assert names(str(tmp_path / f"run/step_{step}")) == {"model.pt", "state.json"}
    after = torch.load(tmp_path / "run/step_1/model.pt")
    assert after.keys() == before["model"].keys() and all(torch.equal(after[k], v) for k, v in before["model"].items())
    assert json.loads((tmp_path / "run/step_2/state.json").read_text())["step"] == 2


def test_the_newest_by_its_counters_stays(tmp_path: Path) -> None:
    # icefall: steps are saved between the epochs, whose numbers are lower.
    for step in (100, 200, 300, 400):
        _save_counted(tmp_path / f"checkpoint-{step}.pt", step)
    for epoch, step in ((1, 250), (2, 450)):
        _save_counted(tmp_path / f"epoch-{epoch}.pt", step)
    pruned = ckpttool.prune(tmp_path, keep_last=1, yes=True)
    why = {one.name: one.why for one in pruned.checkpoints if one.action == "keep"}
    assert why == {
        "epoch-2.pt": "the newest complete one",
        "checkpoint-400.pt": "the newest complete one by its name",
    }
    assert names(str(tmp_path)) == why.keys()
    assert [one["name"] for one in ckpttool.inspect(tmp_path).facts["run"] if one["taken"]] == ["epoch-2.pt"]


def _save_counted(path: Path, step: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    torch.save({"model": model.state_dict(), "optimizer": {"momentum": [0.5]}, "batch_idx_train": step}, path)
