"""`ckpttool samples`, from a checkout and from the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import run
from support.paths import ROOT, SAMPLES

import ckpttool
from ckpttool.errors import OverwriteError
from ckpttool.operations.samples import NAMES, SCRIPTS, samples


def test_they_are_the_samples_of_the_checkout(tmp_path: Path) -> None:
    sizes = samples(tmp_path / "try")
    for name, below in NAMES.items():
        assert subprocess.run(["diff", "-r", tmp_path / "try" / name, SAMPLES / below]).returncode == 0
        assert ckpttool.inspect(tmp_path / "try" / name).files
    for name in SCRIPTS:
        assert (tmp_path / "try" / name).read_bytes() == (SAMPLES / name).read_bytes()
    assert sizes.keys() == {*NAMES, *SCRIPTS} and all(sizes.values())


def test_a_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    with pytest.raises(OverwriteError):
        samples(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert run("samples", str(tmp_path / "try"), "-q").exit_code == 0
    assert run("samples", str(tmp_path / "try"), "-q").exit_code == OverwriteError.exit_code
    again = run("samples", str(tmp_path / "try"), "--json", "--overwrite")
    assert again.exit_code == 0 and len(json.loads(again.stdout)["samples"]) == len(NAMES) + len(SCRIPTS)


def test_the_wheel_has_all_of_them() -> None:
    toml = pytest.importorskip("tomllib")
    wheel = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {
        f"samples/{below}": f"ckpttool/sample_files/{below}" for below in (*NAMES.values(), *SCRIPTS)
    }


@pytest.mark.long
def test_the_wheel_alone_in_an_empty_environment(tmp_path: Path) -> None:
    """Less than 100 MB of packages, no torch, and every command that needs none works on the samples of the wheel."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("ckpttool-*.whl")
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    packages = next((tmp_path / "env").glob("lib/*/site-packages"))
    before = _size(packages)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", wheel], check=True)
    assert not (packages / "torch").exists()
    assert _size(packages) - before < 100e6
    for command in (
        "samples try",
        "inspect try/run7/step-1000",
        "verify try/run7/step-1000",
        "verify-resume audit try/run7/step-1000",
        "convert try/run7/step-1000 everything.pt --check",
        "diff try/run7/step-1000 everything.pt",
        "show everything.pt model.norm.weight",
        "reshard everything.pt four --to-world 4",
        "export everything.pt exported",
    ):
        done = subprocess.run(
            [python, "-m", "ckpttool", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
