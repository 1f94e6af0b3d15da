"""A Python that has imported torch: `[*python(), script, arguments...]` is a command that starts without those seconds.

Importing torch, and the compiler in the first step of an optimizer, is what most processes of tests take most time for.
One server per process of pytest has imported both; each command asks it for a fork, hands it its streams, variables and
directory, passes signals on to it, and ends as it ends. Where it is the start that is tested, a real one is started.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_ADDRESS = "TESTS_WARM_PYTHON"  # a variable, for what our own processes start
_NUMBER = struct.Struct("<q")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Server:
    process: subprocess.Popen[bytes] | None = None
    address = ""


def python() -> list[str]:
    """The command to put where `sys.executable` would be: a script or `-c CODE` follows."""
    if sys.platform != "linux":
        return [sys.executable]  # elsewhere, libraries that have started threads do not survive a fork
    if (address := os.environ.get(_ADDRESS)) is None:
        _Server.address = address = str(Path(tempfile.mkdtemp(prefix="warm-")) / "at")
        words = [sys.executable, __file__, "serve", _Server.address]
        # It ends when its stdin does, with us at the latest. What it is asked to run has streams of its own.
        _Server.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=os.sep
        )
        assert _Server.process.stdout is not None
        assert _Server.process.stdout.read(1), "torch cannot be imported"
        os.environ[_ADDRESS] = address
    # Without `site`, a client starts in a few hundredths of a second.
    return [sys.executable, "-I", "-S", __file__, "ask", address]


@contextmanager
def trials() -> Iterator[None]:
    """The ranks of `verify-resume trial` are forked from it."""

    def start(words: Sequence[str], log: str, environment: Mapping[str, str]) -> Process:
        return Process([*python(), *words[1:]], log, environment)

    from ckpttool.fleet.process import Process
    from ckpttool.resume import launch

    module: Any = launch
    module.Process = start
    try:
        yield
    finally:
        module.Process = Process


def program(folder: Path) -> str:
    """A file that is executed as `ckpttool`, by this Python, with its trials."""
    main = "from support.warm_python import trials; from ckpttool.__main__ import main\nwith trials(): main()"
    words = ["env", f"PYTHONPATH={Path(__file__).parents[1]}", *python(), "-c", main]
    path = folder / "ckpttool"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return str(path)


def end() -> None:
    """End the server, and wait for it: the time of what it ran is ours then."""
    if _Server.process is not None:
        os.environ.pop(_ADDRESS, None)
        _Server.process.communicate()
        os.rmdir(os.path.dirname(_Server.address))
        _Server.process = None


# The command ----------------------------------------------------------------------------------------------------------


def ask(address: str, words: list[str]) -> int:
    """Have a command run by the server, and return how it ended."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [_NUMBER.pack(len(request))], [0, 1, 2])
        server.sendall(request)
        pid = _received_number(server)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(pid, number))
        code = _received_number(server)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _received_number(stream: socket.socket) -> int:
    data = b""
    while len(data) < _NUMBER.size:
        if not (more := stream.recv(_NUMBER.size - len(data))):
            raise SystemExit("the server of warm_python.py is gone")
        data += more
    number: int = _NUMBER.unpack(data)[0]
    return number


# The server -----------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a process for each that asks, until stdin ends. One that is killed takes its process along."""
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import ckpttool.resume.worker.run
    import ckpttool.training  # noqa: F401 - what most of them import next
    from ckpttool.transfer import processes

    processes._POLL = 0.005  # ranks on one machine have little to wait for
    torch.set_num_threads(1)
    gc.freeze()  # a collection would copy all of that into each process, and the hook would look at it
    running: dict[int, socket.socket] = {}
    look, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as events:
        listening.bind(address)
        listening.listen()
        for stream in (0, look, listening):
            events.register(stream, selectors.EVENT_READ)
        os.write(1, b".")
        while True:
            for key, _ in events.select():
                if key.fileobj == 0:
                    os.unlink(address)
                    for pid in running:
                        _kill(pid)
                    return
                if key.fileobj is look:
                    look.recv(1000)
                    _report(running, events)
                elif key.fileobj is listening:
                    asking, _ = listening.accept()
                    pid = _fork(asking)
                    running[pid] = asking
                    events.register(asking, selectors.EVENT_READ, pid)
                elif key.data in running:
                    events.unregister(running[key.data])
                    _kill(key.data)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _report(running: dict[int, socket.socket], events: selectors.BaseSelector) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        asking = running.pop(pid)
        with suppress(KeyError):
            events.unregister(asking)
        with asking, suppress(OSError):
            asking.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _fork(asking: socket.socket) -> int:
    """Fork the process that somebody asks for, and tell its number."""
    data, streams, *_ = socket.recv_fds(asking, _NUMBER.size, 3)
    with asking.makefile("rb") as rest:
        words, variables, folder = json.loads(rest.read(_NUMBER.unpack(data)[0]))
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        asking.sendall(_NUMBER.pack(pid))
        return pid
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        os.closerange(3, 256)  # those of the server and of others that asked
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):  # a pipe that nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(words: list[str]) -> int:
    """Run a script, or code, as Python itself would."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [one for one in given if one and one not in sys.path]
    try:
        if words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
            exec(compile(words[1], "<string>", "exec"), names)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    what, at, *command = sys.argv[1:]
    if what == "ask":
        raise SystemExit(ask(at, command))
    serve(at)
