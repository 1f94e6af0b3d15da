"""Trials of the tests: their ranks are forked from a process that is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import warm_python


@pytest.fixture(scope="session", autouse=True)
def _trials_start_at_once() -> Iterator[None]:
    with warm_python.trials():
        yield
