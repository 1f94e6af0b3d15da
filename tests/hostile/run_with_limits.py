"""Runs commands over many files in one process that has little memory, and says what became of each and what it took.

    python run_with_limits.py [SHARE] < jobs.json     [["name", ["inspect", "ckpt.pt"]], ...], a line of JSON for each

With SHARE, `inspect` may do that part of the work that it may otherwise do for a file of no bytes: 16, a sixteenth.

What was begun and not ended is a hang: the alarm ends the process there.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys
from functools import partial
from pathlib import Path

from support.work import counted
from typer.testing import CliRunner, Result

from ckpttool.catalogue import work_limit
from ckpttool.cli.app import application

MOST_CALLS = 10_000_000  # of functions of Python and C; the most work that an honest error takes is half of it
ROOM = 1 << 30  # bytes of address space: what is asked for and not used counts there
ALARM = 200  # seconds by the clock, for what waits
PROCESSOR = 60.0  # seconds of the processor, for what does not end
LEAST = work_limit.LEAST
SIXTEENTH = 16  # of the work that a file of no bytes may take, for what opens it as `inspect` does

STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")


def field(name: str) -> int:
    """A line of the process's status, in bytes; 0 where there is none."""
    if not STATUS.exists():
        return 0
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10


def _limited(runner: CliRunner, words: list[str], before: int) -> tuple[Result, int]:
    """What the command says, and by how many bytes this process was larger than before."""
    signal.alarm(ALARM)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR)
    done = runner.invoke(application(), words)
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return done, field("VmHWM") - before


def main() -> None:
    jobs = json.load(sys.stdin)
    runner = CliRunner()
    runner.invoke(application(), ["formats"])  # what is imported late is not a file's fault
    gc.collect()
    gc.freeze()  # nor is it looked at again after each
    limit = field("VmSize") + ROOM
    if limit > ROOM:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    share = {"inspect": int(sys.argv[1]) if sys.argv[1:] else 1}
    for name, words in jobs:
        sys.stderr.write(f"{name}: {' '.join(words)}\n")
        sys.stderr.flush()
        if PEAK.exists():
            PEAK.write_text("5")  # begins the peak anew
        before = field("VmRSS")
        work_limit.LEAST = LEAST // share.get(words[0], SIXTEENTH)
        (done, taken), calls = counted(partial(_limited, runner, words, before), MOST_CALLS)
        sys.stdout.write(json.dumps({
            "name": name, "words": words, "code": done.exit_code, "out": done.stdout, "err": done.stderr,
            "calls": calls, "taken": taken,
        }) + "\n")  # fmt: skip
        sys.stdout.flush()
        del done  # its traceback keeps what was read
        gc.collect()


if __name__ == "__main__":
    main()
