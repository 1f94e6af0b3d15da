"""A command and its guard, with real processes: nothing goes on, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.faults import spawn
from support.paths import ROOT

from ckpttool.analysis.losses import read_log
from ckpttool.errors import UsageError
from ckpttool.fleet import guard, process
from ckpttool.fleet.process import MARK, Process
from ckpttool.resume.results import RunReport
from ckpttool.resume.runs import run

SCRIPTS = Path(__file__).parent / "scripts"
LINUX = pytest.mark.skipif(not Path("/proc/self").exists(), reason="other systems have no parent for orphans")
DAEMON = "env -i setsid sh -c 'env -i setsid sleep 600 & echo $!'; "
"""Forks twice, is in a session of its own, has an empty environment, and prints the process id."""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether a condition comes true."""
    until = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return is_met


def numbers(log: str, count: int) -> list[int]:
    """The process ids that a command prints."""
    assert wait(lambda: len(read_log(log).split()) >= count), read_log(log)
    return [int(word) for word in read_log(log).split()]


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on after a command has no time to end by itself."""
    monkeypatch.setattr(process, "_LINGER", 0.1)


@LINUX
def test_a_daemon_is_ended_and_named(log: str, at_once: None) -> None:
    with Process(["sh", "-c", DAEMON], log, {}) as command:
        assert command.wait(60) == 0
        (daemon,) = numbers(log, 1)
        assert is_running(daemon)
    assert command.left == f"`{daemon} sleep 600`" and not is_running(daemon)


@LINUX
def test_a_run_says_what_it_left(at_once: None) -> None:
    words = ["sh", "-c", f'{DAEMON} exec "$@"', "sh", sys.executable, str(SCRIPTS / "train_numpy.py"), "--out", "OUT"]
    given = {"at": 2, "until": 3, "checkpoints": "OUT/step-{step}.safetensors"}
    report: RunReport = run([*words, "--steps", "3"], resume_with="... --resume {checkpoint}", **given)  # type: ignore[arg-type]
    assert report.verdict == "same", report.message
    for one, note in zip(("A", "B"), report.notes, strict=True):
        assert note.startswith(f"run {one} left processes running, which were ended: `") and "sleep 600`" in note


def test_what_ends_by_itself_after_the_command_is_not_named(log: str) -> None:
    with Process(["sh", "-c", "sleep 0.3 &"], log, {}) as command:
        assert command.wait(60) == 0
    assert not command.left


@LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_goes_on_when_the_starter_is_killed(number: signal.Signals, log: str) -> None:
    """Nor what ignores SIGTERM, is in a session of its own, or a daemon."""
    program = (
        "import os, sys, time\nfrom ckpttool.analysis.losses import read_log\n"
        "from ckpttool.fleet.process import Process\n"
        f"words = ['sh', '-c', \"trap '' TERM; \" + sys.argv[2] + 'setsid sleep 600 & echo $!; echo $$; sleep 600']\n"
        "with Process(words, sys.argv[1], {}) as process:\n"
        "    while len(read_log(process.log).split()) < 3:\n        time.sleep(0.01)\n"
        f"    os.kill(os.getpid(), {number:d})\n"
    )
    words = [sys.executable, "-c", program, log, DAEMON]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -number, done.stderr
    started = numbers(log, 3)
    assert wait(lambda: not any(map(is_running, started)))


@LINUX
def test_nothing_goes_on_when_the_guard_is_killed(log: str, at_once: None) -> None:
    """The kernel kills the command with it, and the others are found by their mark."""
    with Process(["sh", "-c", "setsid sleep 600 & echo $!; echo $$; sleep 600"], log, {}) as command:
        started = numbers(log, 2)
        command._guard.kill()
        assert command.wait(60) == -signal.SIGKILL
        assert wait(lambda: not is_running(started[1]))
    assert not any(map(is_running, started)) and "sleep 600" in command.left


def test_signals_for_the_command_do_not_end_its_guard(log: str, at_once: None) -> None:
    """As `pkill -f train.py` sends them: the words of the command are among those of its guard."""
    with Process(["sh", "-c", "echo $$; sleep 600 & wait"], log, {}) as command:
        numbers(log, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            command._guard.send_signal(number)
        assert command.wait(0.2) is None
        command.send(signal.SIGTERM)
        assert command.wait(60) == -signal.SIGTERM


def test_sigterm_reaches_the_child_of_a_shell(log: str) -> None:
    child = "trap 'echo told; exit' TERM; echo ready; while :; do sleep 0.02; done"
    with Process(["sh", "-c", 'sh -c "$1"; true', "sh", child], log, {}) as command:
        assert wait(lambda: "ready" in read_log(log))
        assert command.stop(10.0)
    assert read_log(log).endswith("told\n") and not command.left


def test_a_command_that_ignores_sigterm_is_killed(log: str) -> None:
    with Process(["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.02; done"], log, {}) as command:
        numbers(log, 1)
        assert not command.stop(0.2)
        command.kill()
        assert command.poll() == -signal.SIGKILL
        command.kill()  # once more


@LINUX
def test_a_command_is_stopped_and_continued(log: str) -> None:
    with Process(["sh", "-c", "echo $$; exec sleep 600"], log, {}) as command:
        (pid,) = numbers(log, 1)

        def state() -> bytes:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]

        command.send(signal.SIGSTOP)
        assert wait(lambda: state() == b"T") and command.poll() is None
        command.send(signal.SIGCONT)
        assert wait(lambda: state() == b"S")
        command.send(signal.SIGINT)
        assert command.wait(60) == -signal.SIGINT
        command.send(signal.SIGTERM)  # to nobody


SEEN = (
    "import os, signal, sys\n"
    "print('out', flush=True)\nprint('err', file=sys.stderr)\nprint('out again', flush=True)\n"
    "print(repr(sys.stdin.read()), sorted(os.listdir('/dev/fd'))[:3], os.getcwd(), os.umask(0), sys.argv[1:])\n"
    "print(os.getsid(0) == os.getpgrp() == os.getpid(), sorted(os.environ.items()))\n"
    "print([signal.getsignal(n) for n in signal.valid_signals()], signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN])
def interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGINT, ignored or not, as under `nohup` and in the background of a script."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_command_is_as_subprocess_starts_it(interrupt: None, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signals, files, session, directory and variables, and the order of what it writes."""
    # Python ignores some signals itself.
    words = ["sh", "-c", 'grep -E "^Sig(Blk|Ign|Cgt)" /proc/self/status; exec "$@"', "sh"]
    words += [sys.executable, "-c", SEEN, "a word", "", "ü\udcff", "--", "-I"]
    monkeypatch.setenv("UNUSUAL", "\udcfe")
    with Process(words, log, {"PYTHONHASHSEED": "3"}) as command:
        assert command.wait(60) == 0
    text = read_log(log)
    mark = text.partition(f"('{MARK}', '")[2][:32]
    wanted = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "3", MARK: mark}, start_new_session=True,
    )  # fmt: skip
    assert text == wanted.stdout


@pytest.mark.parametrize(
    ("words", "code"), [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -SEGV $$"], -signal.SIGSEGV), (["true"], 0)]
)
def test_the_exit_code_is_that_of_the_command(words: list[str], code: int, log: str) -> None:
    with Process(words, log, {}) as command:
        assert command.wait(60) == code
    assert command.poll() == code and not read_log(log)


def test_what_cannot_be_started_is_said_as_subprocess_says_it(tmp_path: Path, log: str) -> None:
    (tmp_path / "script").write_text("no first line\n")
    (tmp_path / "script").chmod(0o755)
    for name in ("no-such-program", str(tmp_path), str(tmp_path / "script"), "x" * 300):
        with pytest.raises(OSError) as wanted:
            subprocess.Popen([name])
        with pytest.raises(UsageError) as raised:
            Process([name], log, {})
        assert raised.value.message == f"`{name}` cannot be started: {os.strerror(wanted.value.errno or 0).lower()}"
    with pytest.raises(UsageError, match="`` cannot be started"):
        Process([""], log, {})


@pytest.mark.skipif(not os.path.exists("/bin/ps"), reason="there is no ps")
def test_processes_are_found_without_proc(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_HAS_PROC", False)
    with Process(["sh", "-c", "echo $$; sleep 600 & echo $!; wait"], log, {}) as command:
        started = numbers(log, 2)
        assert command._running() == sorted(started)
        assert "sleep 600" in guard.command_line(started[1])
    assert not wait(lambda: any(map(is_running, started)), 0.1)


# `ckpttool` itself is killed ------------------------------------------------------------------------------------------

QUICK = [sys.executable, str(SCRIPTS / "train_numpy.py"), "--pause", "600"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", str(SCRIPTS / "train_fsdp2.py")]  # fmt: skip


def with_variable(text: str) -> list[int]:
    """The processes that have a variable in their environment."""
    return [pid for pid in guard.parents() if guard._has(pid, text)]


def killed(top: Path, words: list[str], has_begun: Callable[[], bool]) -> None:
    """Kill ckpttool with `kill -9` once something has begun, and wait for the end of all that it started."""
    with open(top / "output", "w+") as output:  # a pipe would have an end only when all have ended
        environment = {**os.environ, "TMPDIR": str(top), "FAULT": "hang"}
        program = spawn(*words, env=environment, stdout=output, stderr=output)
        assert wait(has_begun, 120), output.read()
        program.kill()
        program.wait()
    wait(lambda: not with_variable(f"TMPDIR={top}"), 20)
    guard.send(signal.SIGKILL, left := with_variable(f"TMPDIR={top}"))
    assert not left


@LINUX
@pytest.mark.parametrize(
    ("command", "saved"),
    [(QUICK, "step-1.safetensors"), pytest.param(TORCHRUN, "step-1", marks=pytest.mark.long)],
    ids=["quick", "torchrun"],
)
def test_a_killed_run_leaves_nothing(
    command: list[str], saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the temporary directory, which the next run removes."""
    top, pid = tmp_path / "tmp", tmp_path / "daemon"
    top.mkdir()
    words = ["sh", "-c", f'({DAEMON}) > {pid}; exec "$@"', "sh", *command, "--out", "OUT", "--steps", "500"]
    started = ["verify-resume", "run", "--at", "100", "--until", "500", "--checkpoints", f"OUT/{saved}", "--", *words]
    killed(top, started, lambda: bool([*top.glob(f"ckpttool-run-*/new/out/{saved}")]))
    assert wait(lambda: not is_running(int(pid.read_text())), 20)
    (left,) = top.glob("ckpttool-*")
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    with pytest.raises(UsageError, match="`no-such-program` cannot be started"):
        run(["no-such-program", "OUT"], at=1, until=2, resume_with="... {checkpoint}")
    assert not [*top.glob("ckpttool-*")], left


@LINUX
@pytest.mark.long
def test_a_killed_trial_leaves_no_rank(tmp_path: Path) -> None:
    words = ["verify-resume", "trial", "--recipe", str(Path(__file__).parent / "recipe_kinds.py"), "--no-gradients"]

    def is_in_a_step() -> bool:
        phases = [path.read_text() for path in tmp_path.glob("ckpttool-trial-*/new/A/rank?.phase")]
        return phases == ["step 2"] * 2

    killed(tmp_path, [*words, "--mesh", "shard=2", "--steps", "3"], is_in_a_step)


ABORTED = """
import atexit, os, sys, time

out, resumed, fails, rank = sys.argv[1], sys.argv[2:3], "{fails}", int(os.environ["RANK"])
if resumed and rank == 1 and fails in ("", "at its exit", "as it raises"):
    atexit.register(os.abort)  # last of all, as the threads of a process group that is not destroyed do
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = torch.load(resumed[0]) if resumed else {{"model": model.state_dict(), "step": 0}}
model.load_state_dict(saved["model"])
for step in range(saved["step"] + 1, 5):
    if rank == 0 or fails != "without a step":
        optimizer.zero_grad()
        model(torch.full((1, 2), float(step))).sum().backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        torch.save({{"model": model.state_dict(), "step": step}}, f"{{out}}/step-{{step}}.pt")
dist.barrier()
if fails == "without a step":  # as a rank that evaluates what the others have trained
    time.sleep(2 * rank)
if resumed and rank == 1 and fails in ("in a step", "without a step"):
    os.abort()
if resumed and rank == 1 and fails == "at its exit":
    sys.exit(1)
if resumed and rank == 1 and fails == "as it raises":
    raise SystemExit(1)
"""


@pytest.mark.long
@pytest.mark.parametrize("fails", ["", "in a step", "without a step", "at its exit", "as it raises"])
def test_a_rank_that_is_aborted_after_the_end_of_its_script_has_not_failed(fails: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(ABORTED.format(fails=fails))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "OUT"]
    given = {"at": 2, "until": 4, "checkpoints": "OUT/step-{step}.pt", "resume_with": "... {checkpoint}"}
    report = run(words, timeout=60.0, **given)  # type: ignore[arg-type]
    assert report.verdict == ("failed" if fails else "same"), report.message
    assert any("aborted after the end of its script" in note for note in report.notes) != bool(fails), report.notes
