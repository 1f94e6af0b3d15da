"""The GitHub Action: its inputs, and the script that it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

ACTION = ROOT / ".github" / "actions" / "verify-resume"
SCRIPT = ROOT / "tests" / "resume" / "scripts" / "train_numpy.py"
RESUME = "--resume-with '... --resume {checkpoint}' --checkpoints OUT/step-{step}.safetensors --stop max-steps=--steps"


def start(folder: Path, **inputs: str) -> tuple[int, str, str]:
    """The exit code of the Action's script, its outputs and its summary."""
    names = ("COMMAND", "OPTIONS", "PRESET", "AT", "UNTIL", "FAIL_ON")
    environment = {**os.environ, **dict.fromkeys(names, ""), "REPORT": str(folder / "report"), **inputs}
    environment |= {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ckpttool").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttool "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in programs.iterdir():
        path.chmod(0o755)
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(["bash", str(ACTION / "run.sh")], env=environment, check=False, timeout=300)
    return done.returncode, (folder / "output").read_text(), (folder / "summary").read_text()


def test_words_are_split_and_not_evaluated(tmp_path: Path) -> None:
    command = "train.py --out OUT --name 'two words' $(touch HERE) ; `id`"
    code, outputs, _ = start(tmp_path, COMMAND=command, OPTIONS="--dry-run", PRESET="trainer", UNTIL="6")
    assert code == 0 and outputs == "verdict=planned\n"
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    words = report["runs"][0]["command"]
    assert words[3:11] == ["--name", "two words", "$(touch", "HERE)", ";", "`id`", "--max_steps", "6"]


def test_a_command_that_cannot_be_judged_fails_the_job(tmp_path: Path) -> None:
    code, outputs, summary = start(tmp_path, COMMAND="train.py", AT="2", UNTIL="3", FAIL_ON="differs")
    assert code == 2 and outputs == "verdict=failed\n" and "output directory" in summary


def test_lines_are_joined_and_a_quote_without_its_end_fails(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    command = "train.py \\\n  --out OUT \\\n  --name ''\n"
    assert start(one, COMMAND=command, OPTIONS="--dry-run", AT="2", UNTIL="3")[0] == 0
    words = json.loads((one / "report" / "report.json").read_text())["runs"][0]["command"]
    assert (words[0], words[1], words[3:]) == ("train.py", "--out", ["--name", ""])
    (two := tmp_path / "two").mkdir()
    code, outputs, summary = start(
        two, COMMAND="train.py --out OUT --name it's", OPTIONS="--dry-run", AT="2", UNTIL="3"
    )
    assert code == 2 and outputs == "verdict=failed\n" and "COMMAND has a quote without its end" in summary


@pytest.mark.long
@pytest.mark.parametrize(("fault", "verdict", "code"), [("", "same", 0), (" --fault rng", "differs", 1)])
def test_a_verdict(tmp_path: Path, fault: str, verdict: str, code: int) -> None:
    command = f"{sys.executable} {SCRIPT} --out OUT --steps 3{fault}"
    found = start(tmp_path, COMMAND=command, AT="2", UNTIL="3", OPTIONS=RESUME)
    assert found[:2] == (code, f"verdict={verdict}\n") and f"verify-resume: {verdict}" in found[2]
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "report.json", "report.xml"}


def test_each_input_is_used_and_none_is_put_into_a_script() -> None:
    text = (ACTION / "action.yml").read_text(encoding="utf-8")
    declared = set(re.findall(r"^  ([a-z-]+):$", text.partition("outputs:")[0], re.MULTILINE))
    assert declared == set(re.findall(r"inputs\.([a-z-]+)", text)) and "command" in declared
    assert not re.search(r"^\s*run:.*\$\{\{", text, re.MULTILINE)


def test_the_schema_of_github(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION / "action.yml")]
    subprocess.run([sys.executable, *words], check=True)
