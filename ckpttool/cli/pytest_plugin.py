"""A plugin of pytest: `pytest --ckpt-resume` runs the tests that use `resume_check`.

    def test_training_resumes_exactly(resume_check):
        resume_check(cmd="python train.py --output_dir OUT", preset="trainer")

They start a training command several times, and are skipped without `--ckpt-resume`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ckpttool.resume.results import RunReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("ckpttool").addoption(
        "--ckpt-resume",
        action="store_true",
        help="Run the tests that start a training command, stop it, resume it and compare (the fixture resume_check).",
    )


@pytest.fixture
def resume_check(request: pytest.FixtureRequest) -> Callable[..., RunReport]:
    """Return `resume_check(cmd=..., preset=None, **options)`, which fails the test if training does not resume exactly.

    `cmd` is a command line or its words. `options` are those of `ckpttool verify-resume run`: `at`, `until`,
    `checkpoints`, `resume_with`, ... The report is returned.
    """
    if not request.config.getoption("--ckpt-resume"):
        pytest.skip("starts a training command several times: pass --ckpt-resume")
    return _check


def _check(cmd: str | Sequence[str | os.PathLike[str]], *, preset: str | None = None, **options: Any) -> RunReport:
    import inspect
    import io
    import shlex

    from ckpttool.cli.presets import fill
    from ckpttool.cli.resume_run import document_blocks
    from ckpttool.errors import CkptError
    from ckpttool.reports.terminal import Terminal
    from ckpttool.resume.runs import run
    from ckpttool.text import meant

    words = shlex.split(cmd) if isinstance(cmd, str) else [os.fspath(word) for word in cmd]
    known = inspect.signature(run).parameters
    for name in options.keys() - known:
        hint = meant(name, [*known], f"they are {', '.join(known)}")
        pytest.fail(f"`resume_check` has no option `{name}`: {hint}", pytrace=False)
    try:
        words, filled = fill(preset, words, {"at": None, "until": None, **options})
        report = run(words, **filled)
    except CkptError as error:
        pytest.fail(str(error), pytrace=False)
    if report.verdict not in ("same", "planned"):
        text = io.StringIO()
        Terminal(text).blocks(document_blocks(report, False))
        pytest.fail(f"{report.verdict}: {text.getvalue()}", pytrace=False)
    return report
