"""`ckpttool samples`, from a checkout and from the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
from support.cli import run
from support.hub_server import WRITER, Hub
from support.paths import ROOT, SAMPLES

import ckpttool
from ckpttool.errors import OverwriteError
from ckpttool.operations.samples import NAMES, SCRIPTS, samples


def test_they_are_the_samples_of_the_checkout(tmp_path: Path) -> None:
    sizes = dict(samples(tmp_path / "try").samples)
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
    """At most 110 MB of packages, numpy's 62 too, no torch, and every command that needs none works on its samples."""
    python, packages = _environment(sys.executable, tmp_path)
    before = _size(packages)
    _pip(python, "install", "--no-compile", _wheel(tmp_path))
    assert not (packages / "torch").exists()
    assert _size(packages) - before < 110e6
    _run_commands(python, tmp_path)


@pytest.mark.long
def test_the_lowest_declared_versions(tmp_path: Path) -> None:
    """Of all packages together, on the lowest Python here; what is read over the network, and what only a terminal
    or an option makes it import, too."""
    python, _ = _environment(_lowest_python(), tmp_path)
    wheel = _wheel(tmp_path)
    lowest = _lowest(wheel)
    _pip(python, "install", "--no-compile", f"{wheel}[zstd]", *(f"{name}=={v}" for name, v in lowest.items()))
    environment = {"FORCE_COLOR": "1"}
    _run_commands(python, tmp_path, **environment)
    _run(python, tmp_path, f"convert {SAMPLES / 'checkpoints/dcp/zstd_w2/ckpt'} zstd.pt", **environment)
    with closing(Hub(tmp_path / "hub")) as hub:
        hub.make("me/run7", tmp_path / "try" / "run7" / "step-1000")
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_TOKEN": WRITER}
        for command in (
            "inspect hf://me/run7",
            "verify hf://me/run7",
            "convert hf://me/run7 fetched.pt --check",
            "diff everything.pt fetched.pt",
            "export everything.pt hf://me/model",
            "diff exported hf://me/model",
        ):
            _run(python, tmp_path, command, **environment)
    report = "TrialReport(recipe='r.py', rule='bitwise', rule_message='').as_dict()"
    page = (
        "from ckpttool.reports.resumed import page; from ckpttool.resume.results import TrialReport; "
        f"assert '<html' in page({report})"
    )
    subprocess.run([python, "-c", page], check=True)


def _environment(interpreter: str | Path, folder: Path) -> tuple[Path, Path]:
    """A new environment: its interpreter, and the folder of its packages."""
    subprocess.run([interpreter, "-m", "venv", folder / "env"], check=True)
    return folder / "env" / "bin" / "python", next((folder / "env").glob("lib/*/site-packages"))


def _pip(python: str | Path, *words: str | Path) -> None:
    subprocess.run([python, "-m", "pip", words[0], "-q", *words[1:]], check=True)


def _wheel(folder: Path) -> Path:
    _pip(sys.executable, "wheel", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("ckpttool-*.whl")
    return wheel


def _lowest(wheel: Path) -> dict[str, str]:
    """The lowest version of each package that the wheel declares, torch apart, and textual, which needs a later rich
    than any command but `browse`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    declared = dict(re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)", text, re.M))
    assert {"numpy", "huggingface-hub", "zstandard"} <= declared.keys()
    del declared["torch"], declared["textual"]
    return declared


def _lowest_python() -> str:
    """The lowest that is supported and found, that of the tests if it is the only one."""
    found = [path for minor in range(10, 14) for path in (shutil.which(f"python3.{minor}"), *_pyenv(minor)) if path]
    for path in found:
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return sys.executable


def _pyenv(minor: int) -> list[str]:
    return [str(path) for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]


def _run_commands(python: Path, folder: Path, **environment: str) -> None:
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
        _run(python, folder, command, **environment)


def _run(python: Path, folder: Path, command: str, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "CKPTTOOL_"))}
    words = [python, "-m", "ckpttool", *command.split()]
    done = subprocess.run(words, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
