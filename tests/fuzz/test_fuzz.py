"""A short form of `make fuzz`: so many inputs from one seed; and the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import Broken, Fuzzer, fuzz
from targets import TARGETS, Target

from ckpttool.catalogue.work_limit import charge

HERE = Path(__file__).resolve().parent


RUNS = {"large-metadata": 100, "json": 150}  # these take longer for each


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks_it(name: str) -> None:
    runs = RUNS.get(name, 400)
    done = fuzz(name, runs=runs, seed=1)
    assert done.runs >= runs
    assert done.coverage.seen > fuzz(name, runs=0).coverage.seen, "the fuzzer learns nothing"


def test_a_parser_that_breaks_is_found() -> None:
    """Else the tests above would prove nothing."""

    def parse(data: bytes) -> None:
        if data[:2] == b"ab":
            raise KeyError(data)

    fuzzer = Fuzzer(Target(parse, lambda: [b"aa"], (b"b",)), 0)
    fuzzer.corpus.append(b"aa")
    with pytest.raises(Broken, match="KeyError"):
        for _ in range(5000):
            fuzzer.step()


def test_an_input_that_keeps_a_parser_busy_is_found() -> None:
    """By the lines that it runs: the time differs from machine to machine."""

    def parse(data: bytes) -> None:
        for _ in range(int(data)):
            charge(0)

    fuzzer = Fuzzer(Target(parse, lambda: [b"1000"], (b"0",)), 0)
    fuzzer.one(b"1000")
    with pytest.raises(Broken, match="lines"):
        fuzzer.one(b"1000000")


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks_it_for_a_minute(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), name, "--time", "60"], capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
