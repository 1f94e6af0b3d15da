"""The transcripts: what each command prints, word for word.

A transcript is a file of blocks; text between them is for people. `pytest --accept` writes what is printed now.

    % ckpttool formats -q           a command; all of a file's share one scratch directory with the samples in it
    dcp                             its stdout
    2> error: ...                   its stderr
    => 0                            its exit code
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import run
from support.paths import CHECKPOINTS, all_samples

TRANSCRIPTS = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))

# What differs from run to run and from machine to machine.
_MASKS = (
    (re.compile(r"^(  time +).*$", re.MULTILINE), r"\1(time)"),
    (re.compile(r"needed, .* free"), "needed, (bytes) free"),
    (re.compile(r"^(  memory +)about .* at most$", re.MULTILINE), r"\1about (bytes) at most"),
)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(
    transcript: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in all_samples():
        (tmp_path / name.replace("/", "_")).symlink_to(CHECKPOINTS / name)
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "CKPTTOOL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    said = transcript.read_text()
    now = "\n".join(_replayed(said.split("\n")))
    if request.config.getoption("--accept"):
        transcript.write_text(now)
    assert now == said


def _replayed(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if line.startswith("% ckpttool"):
            assert not inside, f"`{line}` begins before the last one has ended with `=> code`"
            inside = True
            yield line
            yield from _printed(line)
        elif line.startswith("=> "):
            inside = False
        elif not inside:
            yield line


def _printed(line: str) -> Iterator[str]:
    result = run(*shlex.split(line.removeprefix("% "))[1:])
    yield from _masked(result.stdout)
    yield from (f"2> {error}" for error in _masked(result.stderr))
    yield f"=> {result.exit_code}"


def _masked(text: str) -> list[str]:
    for pattern, instead in _MASKS:
        text = pattern.sub(instead, text)
    return text.splitlines()
