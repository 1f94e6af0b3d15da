"""The templates of docs/how-to/whole-runs.md for schedulers: they parse, and the command lines in them are commands."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli import run
from support.paths import ROOT

PAGE = (ROOT / "docs" / "how-to" / "whole-runs.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def template(heading: str) -> tuple[str, str]:
    """The language and the text of the one template below a heading."""
    (found,) = BLOCK.findall(re.split(r"^##+ ", PAGE.partition(f"### {heading}\n")[2], flags=re.MULTILINE)[0])
    return found


def parsed(heading: str) -> Any:
    language, text = template(heading)
    assert language == "yaml"
    return yaml.safe_load(text)


def refused(words: list[str]) -> str:
    """What a command line says where no run is; of an option that is none, it says that."""
    assert words[0] == "ckpttool"
    failed = run(*words[1:])
    assert failed.exit_code == 3, failed.stderr
    return failed.stderr


def test_every_shell_block_parses() -> None:
    blocks = [text for language, text in BLOCK.findall(PAGE) if language == "sh"]
    assert len(blocks) >= 3
    for text in blocks:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language, text = template("Slurm")
    assert language == "sh"
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    low, high = re.findall(r"--array=(\d+)-(\d+)", text)[0]
    last = text.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    for name, value in {"ID": "3", "COUNT": str(int(high) - int(low) + 1), "MIN": low, "STEP": "1"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert "`run7`: cannot read" in refused(shlex.split(last.removeprefix("srun ")))


def test_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = parsed("Kubernetes")
    spec, (container,) = job["spec"], job["spec"]["template"]["spec"]["containers"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert {one["name"]: one["value"] for one in container["env"]} == {"JOB_COMPLETIONS": str(spec["completions"])}
    assert [one["name"] for one in container["volumeMounts"]] == [
        one["name"] for one in job["spec"]["template"]["spec"]["volumes"]
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "7")
    monkeypatch.setenv("JOB_COMPLETIONS", str(spec["completions"]))
    assert "`/data/run7`: cannot read" in refused(container["command"])


def test_ray() -> None:
    language, text = template("Ray")
    assert language == "py"
    calls = {ast.unparse(node.func): node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    call = calls["ckpttool.batch"]
    assert {keyword.arg for keyword in call.keywords} == {"shard", "to", "only"}
    assert {"ray.get", "convert.remote", "ray.remote"} <= calls.keys()


def test_skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed("SkyPilot")
    assert {"name", "num_nodes", "resources", "file_mounts", "setup", "run"} == task.keys()
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    line = (
        task["run"]
        .replace("\\\n", "")
        .replace("$SKYPILOT_NODE_RANK", "3")
        .replace("$SKYPILOT_NUM_NODES", str(task["num_nodes"]))
    )
    monkeypatch.chdir(tmp_path)
    assert "`/data/run7`: cannot read" in refused(shlex.split(line))
