"""The fixture `resume_check`, in a test suite of its own, with a script that resumes exactly and one that does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np  # noqa: F401 - pytester forgets what is imported in it, and numpy cannot be imported twice
import pytest
from support.paths import ROOT

pytest_plugins = ["pytester"]

SCRIPT = ROOT / "tests" / "resume" / "scripts" / "train_numpy.py"
SUITE = f"""
def test_resumes(resume_check, tmp_path):
    cmd = [{sys.executable!r}, {str(SCRIPT)!r}, "--out", "OUT", "--steps", "3", *FAULT]
    report = resume_check(
        cmd=cmd, at=2, until=3, stop="max-steps=--steps", checkpoints="OUT/step-{{step}}.safetensors",
        resume_with="... --resume {{checkpoint}}", inject_switches=False,
    )
    assert report.verdict == "same"

def test_usage(resume_check):
    resume_check(cmd="python train.py", preset="traner")

def test_misspelt(resume_check):
    resume_check(cmd="python train.py", untill=8)
"""


def results(pytester: pytest.Pytester, fault: str, *words: str) -> tuple[dict[str, int], str]:
    pytester.makepyfile(SUITE.replace("*FAULT", fault))
    present = pytester.plugins or pytester._request.config.pluginmanager.has_plugin("ckpttool")
    own = () if present else ("-p", "ckpttool.cli.pytest_plugin")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *own, *words)
    return done.parseoutcomes(), done.stdout.str()


def test_without_the_option_nothing_is_started(pytester: pytest.Pytester) -> None:
    outcomes, _ = results(pytester, "")
    assert outcomes == {"skipped": 3}


def test_a_script_that_resumes_exactly_and_a_misspelt_preset(pytester: pytest.Pytester) -> None:
    outcomes, text = results(pytester, "", "--ckpt-resume")
    assert outcomes == {"passed": 1, "failed": 2}, text
    assert "`resume_check` has no option `untill`: did you mean `until`" in text
    assert '`preset="traner"` is unknown' in text and "did you mean `trainer`?" in text


def test_a_script_that_does_not(pytester: pytest.Pytester) -> None:
    outcomes, text = results(pytester, '"--fault", "rng"', "--ckpt-resume", "-k", "resumes")
    assert outcomes["failed"] == 1 and "differs: FAIL  resume is not exact" in text
    assert "likely cause" in text and "criterion" in text


def test_the_entry_point_is_the_plugin() -> None:
    text = Path(ROOT, "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nckpttool = "ckpttool.cli.pytest_plugin"' in text


def test_the_example_of_the_action_is_one_that_it_takes() -> None:
    """The inputs of the step in the page are those of the action, and the README shows the same step."""
    page = Path(ROOT, "docs", "how-to", "check-script.md").read_text(encoding="utf-8")
    action = Path(ROOT, ".github", "actions", "verify-resume", "action.yml").read_text(encoding="utf-8")
    step = page.partition("- uses: ckpttool/ckpttool/.github/actions/verify-resume@")[2].partition("```")[0]
    assert step in Path(ROOT, "README.md").read_text(encoding="utf-8")
    given = re.findall(r"^    ([a-z-]+): ", step, re.MULTILINE)
    inputs = re.findall(r"^  ([a-z-]+):$", action.partition("inputs:")[2].partition("outputs:")[0], re.MULTILINE)
    assert "command" in given and {*given} <= {*inputs}
