"""A coverage-guided fuzzer in two hundred lines: what reaches a new line of ours is kept, and changed further.

    python tests/fuzz/fuzz.py                      all targets, a minute each
    python tests/fuzz/fuzz.py zip --time 600
    python tests/fuzz/fuzz.py zip --runs 300 --seed 7

Needs nothing but Python: `sys.settrace` tells which lines run. An input that crashes a parser, runs more lines or takes
more memory than allowed is written beside this file and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from targets import TARGETS, Target  # noqa: E402

import ckpttool  # noqa: E402
from ckpttool.errors import CkptError  # noqa: E402

PACKAGE = str(Path(ckpttool.__file__).parent)
MOST_LINES = 1_000_000  # of ours that one input may run: the same on every machine
MOST_SECONDS = 60.0  # of the processor, for what runs no lines
MOST_BYTES = 1 << 30  # of address space, on top of what there is at the beginning
LONGEST = 1 << 16  # bytes of an input
INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)


class Slow(BaseException):
    """An input took too long."""


class Broken(Exception):
    """A parser raised what it must not; `data` is the input."""

    def __init__(self, data: bytes, why: BaseException) -> None:
        super().__init__(f"{type(why).__name__}: {why}")
        self.data = data


class Coverage:
    """Lines of ours that have run so far, each with the line before it."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self.fresh = False
        self.lines = 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        before = frame.f_lineno
        name = frame.f_code.co_filename

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "line":
                self.lines += 1
                if self.lines > MOST_LINES:
                    raise Slow(f"more than {MOST_LINES} lines")
                edge = name, before, frame.f_lineno
                before = frame.f_lineno
                if edge not in self.seen:
                    self.seen.add(edge)
                    self.fresh = True
            return local

        return local


class Fuzzer:
    """One target with the inputs that were worth keeping."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self.coverage = Coverage()
        self.corpus: list[bytes] = []
        self.runs = 0

    def begin(self, more: list[bytes]) -> None:
        for data in [*self._target.seeds(), *more, b""]:
            self.one(data)

    def one(self, data: bytes) -> None:
        """Run one input. Raises Broken."""
        self.runs += 1
        self.coverage.fresh, self.coverage.lines = False, 0
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        sys.settrace(self.coverage.trace)
        try:
            self._target.run(data)
        except CkptError as error:
            # What is said is for people.
            if "Traceback" in error.message or not error.message:
                raise Broken(data, error) from None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Broken(data, error) from error
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.coverage.fresh:
            self.corpus.append(data)

    def step(self) -> None:
        # What was found last has been changed least.
        recent = self.corpus[-20:] if self._random.random() < 0.4 else self.corpus
        self.one(self._changed(self._random.choice(recent)))

    def _changed(self, data: bytes) -> bytes:
        made = bytearray(data)
        for _ in range(1 << self._random.randrange(5)):
            self._change(made)
        return bytes(made[:LONGEST])

    def _change(self, made: bytearray) -> None:
        draw = self._random.randrange
        at = draw(len(made) + 1)
        to = min(len(made), at + 1 + draw(16))
        match draw(9):
            case 0 if made:
                made[at % len(made)] ^= 1 << draw(8)
            case 1 if made:
                made[at % len(made)] = draw(256)
            case 2:
                del made[at:to]
            case 3:
                made[at:at] = made[at:to] * (1 + draw(4))
            case 4:
                made[at:at] = self._random.choice(self._target.words)
            case 5:
                word = self._random.choice(self._target.words)
                made[at : at + len(word)] = word
            case 6:
                size = self._random.choice((1, 2, 4, 8))
                number = self._random.choice(INTEGERS) % (1 << 8 * size)
                made[at : at + size] = number.to_bytes(size, self._random.choice(("little", "big")))
            case 7:
                other = self._random.choice(self.corpus)
                start = draw(len(other) + 1)
                made[at:to] = other[start : start + 1 + draw(64)]
            case 8:
                made[at:at] = str(self._random.choice(INTEGERS)).encode()


def _slow(signum: int, frame: FrameType | None) -> None:
    raise Slow(f"more than {MOST_SECONDS} s")


def fuzz(name: str, *, runs: int | None = None, seconds: float | None = None, seed: int = 0) -> Fuzzer:
    """Run one target so often, or so long. Raises Broken."""
    signal.signal(signal.SIGPROF, _slow)
    fuzzer = Fuzzer(TARGETS[name], seed)
    folder = HERE / "corpus" / name.removeprefix("large-")
    fuzzer.begin([path.read_bytes() for path in sorted(folder.glob("*"))])
    end = None if seconds is None else time.monotonic() + seconds
    while (runs is None or fuzzer.runs < runs) and (end is None or time.monotonic() < end):
        fuzzer.step()
    return fuzzer


def _limit_memory() -> None:
    status = Path("/proc/self/status")
    if status.exists():
        size = next(int(s.split()[1]) << 10 for s in status.read_text().splitlines() if s.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--time", type=float, default=60, help="seconds for each target")
    parser.add_argument("--runs", type=int, help="inputs for each target, instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    _limit_memory()
    for name in said.targets or TARGETS:
        started = time.monotonic()
        try:
            done = fuzz(name, runs=said.runs, seconds=None if said.runs else said.time, seed=said.seed)
        except Broken as broken:
            path = HERE / f"crash-{name}-{hashlib.sha256(broken.data).hexdigest()[:12]}"
            path.write_bytes(broken.data)
            print(f"{name}: {broken}: see {path}", file=sys.stderr)
            return 1
        took = time.monotonic() - started
        print(
            f"{name}: {done.runs:,} inputs in {took:.0f} s, {len(done.coverage.seen)} edges, "
            f"{len(done.corpus)} kept, nothing broke",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
