"""An address of no store is a usage error wherever a path can be given, and never a directory `s3:` here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.cli_reference import commands
from support.paths import CHECKPOINTS
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.app import application
from ckpttool.cli.parsing import Argument, Option
from ckpttool.errors import UsageError

SAMPLE = str(CHECKPOINTS / "dcp/single" / "ckpt")
# Metavars of what is not a path; all others are.
OTHERS = {
    *("N", "GLOB", "DTYPE", "SIZE", "KEY", "TENSOR", "PART", "OLD=NEW", "P", "R", "FORMAT", "[PATTERN=]DTYPE", "CLASS"),
    *(
        "KEYS",
        "TEXT",
        "TOKEN",
        "MESH",
        "GLOB=DIM:N",
        "POLICY",
        "ENGINE",
        "DEVICE",
        "ROUTE",
        "I",
        "SECONDS",
        "CONDITION",
    ),
    *(
        "STAT",
        "STEPS",
        "[STEP]...",
        "[ELEMENTS]",
        "TREE",
        "WHICH",
        "-- COMMAND...",
        "COMMAND",
        "COMMAND RUN... DST [OPTION]...",
        "I/N",
        "K",
        "M",
        "HOW",
        "WORD",
        "REGEX",
    ),
    *("NAME[=VALUE]", "[SHELL]", "EVENT"),
}


CASES = [
    (tuple(name.split()[1:]), command, param)
    for name, command in commands().items()
    for param in command.params
    if param.metavar and param.metavar not in OTHERS and param.name not in ("atol", "sort")
]


@pytest.mark.parametrize(("words", "command", "param"), CASES, ids=lambda v: getattr(v, "name", None) or " ".join(v))
def test_every_path(
    words: tuple[str, ...], command: Any, param: Argument | Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [*words]
    if isinstance(param, Option):
        line += [param.opts[0], "nfs://bucket/out"]
    for other in command.params:
        if isinstance(other, Option) and other.required and other is not param:
            line += [other.opts[0], SAMPLE]
        if isinstance(other, Argument) and (other.required or other is param):
            line.append("nfs://bucket/out" if other is param else SAMPLE if other.name != "dst" else "out")
    done = CliRunner().invoke(application(), line)
    assert (getattr(done.exception, "exit_code", None) or done.exit_code) == 2, (line, done.output)
    assert "`nfs://`" in f"{done.output}{done.exception}"
    assert os.listdir(tmp_path) == []


def test_there_are_cases() -> None:
    assert len(CASES) >= 35 and {words[0] for words, _, _ in CASES} >= {"inspect", "convert", "export", "samples"}


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("https://huggingface.co/org/name", "`hf://org/name`"),
        ("https://hf.co/org/name/tree/main", "`hf://org/name`"),
        ("HF://org/name", "`hf://org/name`"),
        ("file:///data/run", "`/data/run`"),
        ("nfs://server/x", "path of this"),
    ],
)
def test_what_would_work(path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: ckpttool.inspect(path), lambda: ckpttool.convert(SAMPLE, path, to="dcp")):
        with pytest.raises(UsageError) as raised:
            call()
        assert hint in str(raised.value.hint)
    assert os.listdir(tmp_path) == []
