"""Options of the whole test run, and what tests in several directories need."""

import fcntl
import locale
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import warm_python
from support.torchrun import Once

# What people have set for their own terminal, job and account is not what is tested: a test sets what it is about.
_THEIRS = re.compile(
    r"(HF|HUGGING_?FACE|TRANSFORMERS|ACCELERATE|TORCHELASTIC|MASTER|GROUP|ROLE|GITHUB|LC|XDG)_.*|LANG(UAGE)?|TZ|CI|"
    r"CKPTTOOL_(HUB_.*|DEBUG)|(LOCAL_)?(RANK|WORLD_SIZE)|(NO|FORCE)_COLOR|COLORTERM|COLUMNS|LINES|TERM|TTY_.*|"
    r"PYTHON(UNBUFFERED|WARNINGS|OPTIMIZE|IOENCODING)|MAKE(FLAGS|LEVEL)"
)
for _name in filter(_THEIRS.fullmatch, list(os.environ)):
    del os.environ[_name]
os.environ |= {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
time.tzset()
locale.setlocale(locale.LC_ALL, "C.UTF-8")  # what files are read with here; Python took that of the environment
_GOLDEN = (5**0.5 - 1) / 2
# The servers of the tests are on this machine. What is installed from an index may have to come by way of a proxy.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"
# A worker of pytest-xdist has a processor to itself, and so have the ranks and commands that it starts.
os.environ["OMP_NUM_THREADS"] = "1"
# Nothing is kept in the user's cache.
os.environ["CKPTTOOL_CACHE"] = ""
# Under `nohup`, or in the background of a script, these are ignored by all children too, and tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long an example takes says how busy the machine is.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the transcripts of the CLI with what it prints now")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a sweep, leave all cases but some to `make test-all`. They lie anyhow, with values of all parameters."""
    seen: Counter[str] = Counter()
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None and item.get_closest_marker("long") is None:
            name = item.nodeid.partition("[")[0]
            if seen[name] * _GOLDEN % 1 >= 1 / sweep.args[0]:
                item.add_marker(pytest.mark.long)
            seen[name] += 1


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)`: the folder that `make(folder)` filled, in whichever worker of pytest-xdist came first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # somebody failed in the middle of it
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session", autouse=True)
def _models_of_configs_in_this_process() -> Any:
    """`export` starts a process that imports torch and transformers, which takes seconds each time; here they are. The
    value is what starts it."""
    from ckpttool.models import architecture, architecture_process

    start = architecture._run
    architecture._run = lambda command: architecture_process.main(*command[3:])
    return start


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once() -> None:
    """typer takes longer to build a command of its function than most tests need to run it."""
    from ckpttool.cli import app

    app.command = cache(app.command)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> None:
    """What is lost when the power fails shows in no test. The programs that tests start wait for it."""
    os.fsync = lambda descriptor: os.fstat(descriptor) and None


@pytest.fixture(scope="session", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    warm_python.end()


@pytest.fixture
def process_for_the_model(_models_of_configs_in_this_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As people have it, where the process is the point."""
    monkeypatch.setattr("ckpttool.models.architecture._run", _models_of_configs_in_this_process)


@pytest.fixture(scope="session", params=["one", "all"])
def gpus(request: pytest.FixtureRequest) -> int:
    """How many ranks a test marked `gpu` starts: one, and as many as there are accelerators of any maker."""
    from support import host_process_group

    from ckpttool.training import devices

    host_process_group.register_if_needed()
    if devices.kind() == "cpu":
        pytest.skip("there is no accelerator here")
    there = devices.count(devices.kind())
    if request.param == "all" and there == 1:
        pytest.skip("there is one accelerator, and it has been tested on")
    return 1 if request.param == "one" else there


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, in memory where there is room: hundreds of runs that sync would wait for the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as made:
        yield Path(made)
