"""Versions of the client: the oldest, the last before 2, and one that is too old. Each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.paths import ROOT

# Today's transformers refuses clients below 1.31.
NOT_WITH_THE_OLDEST = (
    "test_hub_processes.py::test_from_pretrained_takes_what_was_exported",
    "test_hub_secrets.py::test_every_file_that_transformers_writes_is_an_asset",
)


def run(*words: str | Path, seconds: int = 900) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTEST_"))}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [*map(str, words)], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=seconds
    )


def install(version: str, folder: Path) -> Path:
    """Return the Python of an environment with this client in front of what is installed here."""
    made = run(sys.executable, "-m", "venv", folder)
    assert made.returncode == 0, made.stderr
    python = folder / "bin" / "python"
    done = run(python, "-m", "pip", "install", "-q", "--no-input", f"huggingface_hub=={version}")
    assert done.returncode == 0, done.stderr
    installed = folder / "lib" / Path(sysconfig.get_path("purelib")).relative_to(Path(sys.prefix, "lib"))
    (installed / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.22.0", "1.33.0", "2.4.0"])
def test_the_tests_of_the_hub_pass_with(version: str, tmp_path: Path) -> None:
    python = install(version, tmp_path / "environment")
    assert run(python, "-c", "import huggingface_hub as h; print(h.__version__)").stdout == f"{version}\n"
    words = ["-m", "not long and not gpu", "-p", "no:cacheprovider"]
    if version == "1.22.0":
        words += [f"--deselect=tests/remote/hub/{test}" for test in NOT_WITH_THE_OLDEST]
    done = run(python, "-m", "pytest", *words, "tests/remote/hub")
    assert done.returncode == 0, done.stdout[-5000:]


TOO_OLD = "`hf://` needs huggingface_hub 1.22 or later, and 0.36.0 is installed"


@pytest.mark.long
def test_a_client_that_is_too_old(tmp_path: Path) -> None:
    python = install("0.36.0", tmp_path / "environment")
    done = run(python, "-m", "ckpttool", "inspect", "hf://org/name")
    assert done.returncode == 2 and TOO_OLD in done.stderr and "pip install -U huggingface_hub" in done.stderr


def test_an_old_client_is_told(tmp_path: Path) -> None:
    """The same, with a package of that name that has nothing of what is needed."""
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("__version__ = '0.36.0'\n")
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ckpttool.__main__ import main; sys.exit(main())"
    done = run(sys.executable, "-c", program, tmp_path, "inspect", "hf://org/name")
    assert done.returncode == 2 and TOO_OLD in done.stderr and "pip install -U huggingface_hub" in done.stderr
