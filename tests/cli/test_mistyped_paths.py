"""What is said of a path that is mistyped, of this machine or another, or that no shell has expanded."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.cli import run
from support.paths import CHECKPOINTS

from ckpttool.storage.local import LocalStore


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(CHECKPOINTS / "torch/full/ckpt.pt", "full.pt")
    for step in (500, 1000):
        os.makedirs(f"run7/step-{step}")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("fulll.pt", "did you mean `full.pt`?"),
        ("run7/step-10000", "did you mean `run7/step-1000`, `run7/step-500`?"),
        ("rnu7/step-500", "did you mean `run7/step-500`, or on the Hub `hf://rnu7/step-500`?"),
        ("~/full.pt", "no shell has expanded the `~`: write `/home/me/full.pt`"),
        ("hf:/org/name", "write `hf://org/name`"),
        ("hf:org/name", "write `hf://org/name`"),
        ("run7\\step-500", "did you mean `run7/step-500`?"),
        ("C:\\runs\\full.pt", "drives of Windows are elsewhere here: in WSL, it is `/mnt/c/runs/full.pt`"),
        ("org/name", "if it is a repository of the Hub, write `hf://org/name`"),
    ],
)
def test_a_path_at_which_there_is_nothing(path: str, hint: str, there: Path) -> None:
    done = run("inspect", path)
    said = f"error: `{path}`: cannot read: no such file or directory\nhint: {hint}\n"
    assert (done.exit_code, done.stderr) == (3, said)


def test_there_is_no_hint_where_nothing_is_like_it(there: Path) -> None:
    for path in ("nothing", "x", f"{there}/nowhere/full.pt"):
        assert run("inspect", path).stderr == f"error: `{path}`: cannot read: no such file or directory\n"


@pytest.mark.parametrize(
    "command", ["convert full.pt ~/x.pt", "convert full.pt ~/x.pt -n", "report full.pt -o ~/x", "samples ~/x"]
)
def test_no_directory_is_made_of_a_tilde(command: str, there: Path) -> None:
    """A shell expands no `~` in quotes and none behind `=`, and Python never does."""
    done = run(*command.split())
    assert done.exit_code == 2 and "hint: no shell has expanded the `~`: write `/home/me/x" in done.stderr
    assert not (there / "~").exists()
    os.mkdir("~")  # may be meant after all
    assert run("convert", "full.pt", "~/x.pt").exit_code == 0 and (there / "~/x.pt").exists()


def test_a_file_in_place_of_a_directory(there: Path) -> None:
    done = run("convert", "full.pt", "run7/step-500/a.pt"), run("convert", "full.pt", "run7/step-500/a.pt/b.pt")
    assert done[1].stderr == (
        "error: `run7/step-500/a.pt/b.pt`: cannot write: `run7/step-500/a.pt` is a file, not a directory\n"
    )
    assert run("inspect", "full.pt/").stderr.endswith("cannot read: `full.pt` is a file, not a directory\n")
    done = run("inspect", "full.pt/x"), run("report", "full.pt", "-o", "run7")
    assert done[0].stderr == "error: `full.pt/x`: cannot read: `full.pt` is a file, not a directory\n"
    assert "hint: name the file: `run7/NAME`" in done[1].stderr


def test_a_pattern_of_no_ranks(there: Path) -> None:
    """What it matches is opened together, as files of one step are."""
    assert run("inspect", "*ll.pt", "--tensors", "-q").stdout == run("inspect", "full.pt", "--tensors", "-q").stdout
    assert run("inspect", "*lll.pt").stderr.startswith("error: `*lll.pt`")


def test_a_directory_whose_file_may_not_be_read(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to hold no checkpoint of a known format."""

    def refused(self: LocalStore, name: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr(LocalStore, "check_readable", refused)  # root may read everything
    Path("run7/step-500/full.pt").write_text("not to be read")
    done = run("inspect", "run7/step-500")
    assert (done.exit_code, done.stderr) == (3, "error: `run7/step-500/full.pt`: cannot read: permission denied\n")


def test_too_many_arguments(there: Path) -> None:
    """As of a pattern that the shell expands to several checkpoints."""
    assert run("verify", "run7/step-500", "run7/step-1000").stderr == (
        "error: too many arguments: `run7/step-1000`\n"
        "hint: `ckpttool verify PATH` is all; `ckpttool verify --help` shows what it takes; was it a pattern? "
        "Name one of them, or `run7` for the newest in it\n"
    )
    assert "pattern" not in run("verify", "run7/step-500", "nothing").stderr


@pytest.mark.parametrize("words", ["inspect -", "convert full.pt -", "convert full.pt - --to torch", "diff - full.pt"])
def test_no_pipe(words: str, there: Path) -> None:
    """`convert full.pt - --to torch` wrote a file `-`."""
    done = run(*words.split())
    assert done.exit_code == 2 and "which no pipe can" in done.stderr and not (there / "-").exists()


def test_a_link_to_nothing(there: Path) -> None:
    os.symlink("/nowhere/full.pt", "linked.pt")
    said = "error: `linked.pt`: cannot read: a link to `/nowhere/full.pt`, which does not exist\n"
    assert run("inspect", "linked.pt").stderr == said


def test_no_text_is_meant(there: Path) -> None:
    Path("notes.txt").write_text("a text")
    assert "did you mean" not in run("inspect", "notes").stderr
    assert "did you mean `notes.txt`?" in run("inspect", "note.txt").stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--verbose inspect full.pt", "options come after the command: `ckpttool inspect ... --verbose`"),
        ("--json inspect full.pt", "options come after the command: `ckpttool inspect ... --json`"),
        ("--versoin", "did you mean `--version`?"),
        ("--color inspect full.pt", "`NO_COLOR=1` before the command turns colours off, `FORCE_COLOR=1` on"),
        ("inspect --no-color full.pt", "`NO_COLOR=1` before the command turns colours off, `FORCE_COLOR=1` on"),
    ],
)
def test_options_of_no_command(words: str, hint: str, there: Path) -> None:
    done = run(*words.split())
    assert done.exit_code == 2 and hint in done.stdout + done.stderr


def test_help_of_a_command(there: Path) -> None:
    assert run("help", "show").stdout == run("show", "--help").stdout != ""
    assert run("help").stdout == run("--help").stdout != ""
    assert run("help", "verify-resume", "run").stdout == run("verify-resume", "run", "--help").stdout
