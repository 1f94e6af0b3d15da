"""Of a run directory, each command says which checkpoint it read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli import run
from support.paths import CHECKPOINTS

from ckpttool.errors import UsageError
from ckpttool.operations.repair import repair

COMMANDS = (
    "check run --against other.pt",
    "check other.pt --against run",
    "match run --like other.pt",
    "match other.pt --like run",
    "stats run --only model",
    "report run",
    "show run model.norm.weight",
    "diff run other.pt",
    "verify-resume audit run",
    "verify run",
    "convert run out.pt --dry-run",
    "convert other.pt out --to dcp --like run --dry-run",
    "convert other.pt out.pt --model-from run --dry-run",
    "convert other.pt out.pt --optim-from run --dry-run",
    "export run out --dry-run",
    "export other.pt out --like run --dry-run",
    "reshard run out --to-world 2 --dry-run",
)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w4/ckpt", there / f"run/step-{step}")
    (there / "run/step-3").mkdir()
    shutil.copy(there / "run/step-2/__0_0.distcp", there / "run/step-3")
    assert run("convert", f"{there}/run/step-1", f"{there}/other.pt", "-q").exit_code == 0
    return there


@pytest.mark.parametrize("command", COMMANDS)
def test_the_checkpoint_of_a_run_is_named(command: str, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there)
    monkeypatch.setenv("COLUMNS", "200")
    done = run(*command.split())
    said = done.stdout + done.stderr
    assert done.exit_code in (0, 1), said
    assert "using `step-2`, the newest complete of the 3 checkpoints in the run" in said
    assert "`step-2` is opened; newer checkpoints are incomplete: `step-3`" in said


@pytest.mark.parametrize("command", ["report run -o {}", "inspect run --html {}", "diff run other.pt --html {}"])
def test_pages_name_it_too(command: str, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there)
    assert run(*(word.format(tmp_path / "page.html") for word in command.split())).exit_code in (0, 1)
    assert "using <code>step-2</code>, the newest complete of the 3" in (tmp_path / "page.html").read_text()


def test_one_checkpoint_of_a_run_is_repaired_at_a_time(there: Path) -> None:
    """The others would be copied and not looked at."""
    with pytest.raises(UsageError, match="a run with 3 checkpoints") as refused:
        repair(there / "run", there / "repaired")
    assert refused.value.hint == f"name one: `{there}/run/step-3`"
    assert not (there / "repaired").exists()
