"""Running the command: in this process, and as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner, Result

from support import json_schemas
from support.paths import CHECKPOINTS, ROOT

FULL = str(CHECKPOINTS / "torch/full" / "ckpt.pt")


def run(*words: object, env: Mapping[str, str] | None = None) -> Result:
    """`ckpttool words...` in this process. What `--json` prints is checked by its schema."""
    from ckpttool.cli.app import application

    done = CliRunner().invoke(application(), [*map(str, words)], env=dict(env or {}))
    if "--json" in words and done.stdout.startswith("{"):
        json_schemas.check(done.stdout)
    return done


def environment(**extra: str) -> dict[str, str]:
    """This one, without what the person who runs the tests has set for their own terminal."""
    theirs = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CKPTTOOL_DEBUG", "PYTHONUNBUFFERED")
    return {**{k: v for k, v in os.environ.items() if k not in theirs}, **extra}


def spawn(*words: str, code: str | None = None, **options: Any) -> subprocess.Popen[str]:
    """`ckpttool words...` as a program. `code` is Python that is run before it, to put something in its way."""
    program = [sys.executable, "-m", "ckpttool"]
    if code is not None:
        program = [sys.executable, "-c", f"{code}\nfrom ckpttool.__main__ import main\nmain()"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), "cwd": ROOT} | options
    return subprocess.Popen([*program, *words], text=True, **options)
