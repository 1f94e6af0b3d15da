"""One browser for the tests of each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.chromium import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    browser = Page()
    yield browser
    browser.close()
