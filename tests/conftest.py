"""Options of the whole test run, and what tests in several directories need."""

import os
import signal

import pytest

# A worker of pytest-xdist has a processor to itself, and so have the ranks and commands that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is kept in the user's cache.
os.environ["CKPTTOOL_CACHE"] = ""
# Under `nohup`, or in the background of a script, these are ignored by all children too, and tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the transcripts of the CLI with what it prints now")


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
