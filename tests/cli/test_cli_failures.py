"""However a command ends: words on the right stream, the right exit code, and never a traceback."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import FULL, environment, run, spawn

import ckpttool
from ckpttool import errors

KINDS = [
    errors.UsageError, errors.ReadError, errors.CorruptError, errors.LossError, errors.OverwriteError,
    errors.StorageError, errors.RemoteError,
]  # fmt: skip


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(ckpttool, "inspect", fail)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_two_lines_on_stderr_and_its_exit_code(
    kind: type[errors.CkptError], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, kind("`x`: wrong", hint="do this", file="x"))
    result = run("inspect", "x")
    assert (result.exit_code, result.stdout) == (kind.exit_code, "")
    assert result.stderr == "error: `x`: wrong\nhint: do this\n"
    result = run("inspect", "x", "--json")
    assert (result.exit_code, result.stderr) == (kind.exit_code, "")
    assert json.loads(result.stdout) == {
        "schema": "ckpttool/error/2",
        "exit_code": kind.exit_code,
        "error": {
            "kind": kind.kind, "message": "`x`: wrong", "hint": "do this", "exit_code": kind.exit_code, "file": "x",
        },
    }  # fmt: skip


def test_facts_that_json_does_not_know_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errors.CorruptError("x", found=b"\xff", exit_code="theirs", hint2=Path("p")))
    said = json.loads(run("inspect", "x", "--json").stdout)["error"]
    assert (said["message"], said["exit_code"]) == ("x", 4)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (PermissionError(13, "Permission denied", "x"), 7, "error: `x`: permission denied\n"),
        (MemoryError(), 7, "error: out of memory\n"),
    ],
)
def test_errors_of_the_machine(error: Exception, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, error)
    result = run("inspect", "x")
    assert result.exit_code == code
    assert result.stderr.startswith(says)


def test_a_bug_is_one_line_and_how_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("oops\nmore"))
    result = run("inspect", "x")
    assert result.exit_code == 70
    assert result.stderr.splitlines() == [
        "bug: ZeroDivisionError: oops",
        "hint: this is a mistake in ckpttool: run it again with `-v` and report what it prints",
    ]
    for words, env in ((["-v"], {}), ([], {"CKPTTOOL_DEBUG": "1"})):
        assert "Traceback (most recent call last)" in run("inspect", "x", *words, env=env).stderr
    assert json.loads(run("inspect", "x", "--json").stdout)["error"]["kind"] == "bug"


def test_a_usage_error_in_json() -> None:
    result = run("inspect", "--json", "--dept", "3")
    assert (result.exit_code, result.stderr) == (2, "")
    said = json.loads(result.stdout)["error"]
    assert (said["kind"], said["exit_code"], said["hint"]) == ("usage", 2, "did you mean `--depth`?")


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["inspect", "x", "--depth", "0"], ["inspect", "x", "--depth", "x"], ["convert", "a", "b", "-j", "0"],
     ["convert", "a", "b", "--to"], ["-x"], ["convert", "a", "b", "c"]],
)  # fmt: skip
def test_every_usage_error_has_a_hint(words: list[str]) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    error, hint = result.stderr.splitlines()
    assert re.match(r"error: [a-z`].*[^.]$", error)
    assert re.match(r"hint: .*`ckpttool.* --help` shows", hint)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("info", "`inspect`"),
        ("ls", "`inspect`"),
        ("statistics", "`stats`"),
        ("compare", "`diff`"),
        ("merge", "`convert SRC out.pt`"),
        ("consolidate", "`convert SRC out.pt`"),
        ("version", "`ckpttool --version`"),
        ("inspct", "`inspect`"),
    ],
)
def test_the_command_that_was_meant(word: str, meant: str) -> None:
    """By what other tools call it, else by its spelling."""
    result = run(word, "x")
    assert result.exit_code == 2 and f"hint: did you mean {meant}" in result.stderr


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["x", "--depth", "0"], "0 is less than 1", "`ckpttool inspect --help`"),
        (["x", "--depth", "two"], "`two` is not a whole number", "`ckpttool inspect --help`"),
        (["x", "--json=1"], "does not take a value", "write `--json` alone; `ckpttool inspect --help`"),
    ],
)
def test_a_value_that_an_option_does_not_take(words: list[str], error: str, hint: str) -> None:
    result = run("inspect", *words)
    assert result.exit_code == 2 and error in result.stderr and f"hint: {hint}" in result.stderr


def test_a_path_in_place_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.pt").touch()
    assert "the command comes first: `ckpttool inspect out.pt`" in run("out.pt").stderr
    assert "the command comes first: `ckpttool inspect hf://org/name`" in run("hf://org/name").stderr
    assert "first: `ckpttool verify-resume audit out.pt`" in run("verify-resume", "out.pt").stderr
    assert "`ckpttool --help` lists the commands" in run("out").stderr


def test_a_recipe_in_place_of_a_checkpoint_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").touch()
    (tmp_path / "step-4").mkdir()
    trial, audit = ("verify-resume", "trial"), ("verify-resume", "audit")
    for words, hint in (
        ((*trial, "recipe.py"), "hint: `ckpttool verify-resume trial --recipe recipe.py`"),
        ((*trial, "step-4", "recipe.py"), "hint: `ckpttool verify-resume trial step-4 --recipe recipe.py`"),
        ((*trial, "step-4"), "hint: `ckpttool verify-resume init` writes"),
        ((*trial, "recipe.py", "--recipe", "step-4"), "hint: the recipe is a Python file: `--recipe recipe.py`"),
        ((*audit, "recipe.py"), "hint: the checkpoint comes first: `ckpttool verify-resume audit CHECKPOINT --recipe"),
    ):
        result = run(*words)
        assert result.exit_code == 2 and hint in " ".join(result.stderr.split()), (words, result.stderr)


def test_fsdp2_is_written_as_dcp() -> None:
    for name in ("fsdp2", "FSDP2", "distcp"):
        assert "did you mean `dcp`" in run("convert", FULL, "out", "--to", name).stderr


def test_what_is_on_the_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("inspect", "meta-llama/Llama-3.1-8B")
    assert result.exit_code == 3 and "write `hf://meta-llama/Llama-3.1-8B`" in result.stderr
    assert "`ckpttool export`" in run("convert", FULL, "out", "--to", "hf").stderr
    (tmp_path / "run7").mkdir()
    assert "hf://" not in run("inspect", "run7/step-1000").stderr


def test_no_words_at_all_is_the_help() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: ckpttool" in result.stderr


EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b\r"


def raw(text: str) -> str:
    """What of `text` a terminal would obey, beyond line feeds and our own colours."""
    return "".join(c for c in re.sub(r"\x1b\[[0-9;]*m|\n", "", text) if not c.isprintable())


def test_nothing_of_a_file_reaches_the_terminal_raw(tmp_path: Path) -> None:
    path = tmp_path / f"evil{EVIL}.pt"
    torch.save({EVIL: torch.ones(2), f"{EVIL}.x": torch.ones(1), "o": {EVIL: EVIL}, "step": 1}, path)
    for words in (["inspect"], ["inspect", "-v"], ["inspect", "-q"], ["inspect", "--tensors", "*"]):
        for env in ({}, {"FORCE_COLOR": "1"}):
            result = run(*words, str(path), env=env)
            assert result.exit_code == 0
            assert r"\x1b]0;owned\x07" in result.stdout
            assert not raw(result.stdout)
    for words in (["show", str(path), EVIL], ["show", str(path), f"{EVIL}!"], ["convert", str(path), f"{path}2"],
                  ["convert", str(path), str(tmp_path / "out.pt"), "-v", "--exclude", "*.x"], [EVIL], [f"--{EVIL}"],
                  ["inspect", f"/{EVIL}"]):  # fmt: skip
        result = run(*words, env={"FORCE_COLOR": "1"})
        assert not raw(result.stdout + result.stderr)
        assert "bug:" not in result.stderr


# As programs ---------------------------------------------------------------------------------------------------------

SLEEPY = """
import sys, time
import ckpttool
def sleep(*args, **options):
    print("started", file=sys.stderr, flush=True)
    time.sleep(600)
ckpttool.inspect = sleep
"""


# A module that is long in coming, as one of a network drive.
SLOW_TO_START = """
import sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "ckpttool.cli.parsing":
            print("started", file=sys.stderr, flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGINT, 130, "interrupted, nothing was written\n"),
     (signal.SIGTERM, 143, "terminated, nothing was written\n")],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_signals(number: signal.Signals, code: int, says: str, as_json: bool) -> None:
    process = spawn("inspect", "x", *(["--json"] if as_json else []), code=SLEEPY)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == code
    if as_json:
        assert json.loads(stdout)["error"]["exit_code"] == code
    else:
        assert (stdout, stderr) == ("", says)


def test_a_signal_before_the_command_has_begun() -> None:
    process = spawn("inspect", "x", code=SLOW_TO_START)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) == ("", "interrupted, nothing was written\n")
    assert process.returncode == 130


def test_a_reader_who_leaves_early_is_no_error(tmp_path: Path) -> None:
    """More than a pipe holds, so that it is the writing that fails and not the last flush."""
    torch.save({f"tensor_number_{i}": torch.ones(1) for i in range(5000)}, tmp_path / "many.pt")
    process = spawn("inspect", str(tmp_path / "many.pt"), "--tensors", "*")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_stdout_is_an_error(flags: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = spawn("inspect", FULL, *flags, stdout=full)
        assert process.communicate(timeout=300)[1] == "error: the output cannot be written: no space left on device\n"
    assert process.returncode == 7


def test_names_that_the_locale_cannot_spell() -> None:
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    env.pop("PYTHONIOENCODING")
    process = spawn("inspect", FULL, env=env)
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (0, "")
    assert r"h\xe9llo" in stdout


def test_a_second_sigterm_does_not_disturb_the_cleaning_up() -> None:
    code = (
        SLEEPY
        + """
def slow(*args, **kwargs):
    try:
        sleep()
    finally:
        time.sleep(1)
        print("cleaned", file=sys.stderr, flush=True)
ckpttool.inspect = slow
"""
    )
    process = spawn("inspect", "x", code=code)
    assert process.stderr is not None
    process.stderr.readline()
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.communicate(timeout=300)[1] == "cleaned\nterminated, nothing was written\n"
    assert process.returncode == 143
