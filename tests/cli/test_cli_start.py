"""How the program starts: quickly, without torch, in each of the ways in which it can be called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from support.cli import FULL, environment, run, spawn
from support.cli_reference import commands
from support.paths import ROOT
from support.upstream_samples import path_of

from ckpttool.cli.app import calculate_on_one_thread
from ckpttool.version import __version__

LOOK = "import sys, atexit; atexit.register(lambda: print(sorted({'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules)), file=sys.stderr))"  # noqa: E501


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["formats"], ["convert", "--help"], ["inspect", FULL, "--json"],
     *(["inspect", path_of(name)] for name in ("torch/layouts", "dcp/fsdp2_w4", "safetensors/indexed"))],
)  # fmt: skip
def test_torch_is_not_imported(words: list[str]) -> None:
    process = spawn(*words, code=LOOK)
    assert process.communicate(timeout=300)[1] == "[]\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "threads"), [("diff a b", "1"), ("stats a --spectral", None), ("verify-resume run", None)]
)
def test_threads_of_numpy(words: str, threads: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a training script is its own."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    monkeypatch.setattr(sys, "argv", ["ckpttool", *words.split()])
    calculate_on_one_thread()
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads


def test_version() -> None:
    assert run("--version").stdout == f"ckpttool {__version__}\n"


def test_run_as_a_directory(tmp_path: Path) -> None:
    """As `torchrun ckpttool` does it; `copy` must then be the standard library's whoever asks for it."""
    process = subprocess.run(
        [sys.executable, str(ROOT / "ckpttool"), "--version"],
        cwd=tmp_path, env=environment(PYTHONPATH=""), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stdout, process.stderr) == (0, f"ckpttool {__version__}\n", "")
    show = (
        "import runpy, sys; sys.argv = ['ckpttool', '--version']\n"
        f"try: runpy.run_path({str(ROOT / 'ckpttool')!r}, run_name='__main__')\n"
        "except SystemExit: print(sys.path[0])"
    )
    process = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == str(ROOT)


def test_no_module_of_ours_is_named_like_one_of_the_standard_library() -> None:
    ours = {path.stem for path in (ROOT / "ckpttool").iterdir()}
    assert not ours & sys.stdlib_module_names - {"__pycache__"}


@pytest.mark.parametrize("name", commands())
def test_help_fits_80_columns(name: str) -> None:
    """Examples too, and none in quotes is broken."""
    for flag in ("-h", "--help"):
        result = run(*name.split()[1:], flag)
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\xa0" not in result.stdout
    for line in result.stdout.splitlines():
        assert len(re.findall(r"(?<!\S)'", line)) == len(re.findall(r"\S'(?=[\s.,;:)]|$)", line)), line


def test_help_has_the_address_of_a_page_if_the_package_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/` is not in a wheel."""
    assert "docs/" not in run("convert", "--help").stdout + run("--help").stdout
    about = Message()
    about["Project-URL"] = "Documentation, https://host/org/name/blob/v1/docs/README.md"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: about)
    for words, page in ((["convert"], "cli.md#convert"), (["verify-resume", "run"], "cli.md#verify-resume-run")):
        assert f"More: https://host/org/name/blob/v1/docs/reference/{page}\n" in run(*words, "--help").stdout
    assert "docs/how-to/check-resume.md" in run("verify-resume", "--help").stdout


def test_help_is_as_wide_as_the_terminal_with_sections_and_examples() -> None:
    for words in (["convert"], ["inspect"], ["formats"], ["verify-resume", "init"], ["verify-resume", "trial"]):
        help_ = spawn(*words, "--help", env=environment(COLUMNS="160")).communicate(timeout=300)[0]
        assert "Output:" in help_ and "Examples:" in help_
        assert max(map(len, help_.splitlines())) <= 160
        assert words != ["convert"] or max(map(len, help_.splitlines())) > 100


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("insp", "inspect"), ("convert a b --to saf", "safetensors"), ("convert a b --only sched", "scheduler"),
     ("convert a b --strip-w", "--strip-wrappers"), ("convert a b --dtype bfl", "bfloat16"),
     ("convert a b --dtype norm*=bfl", "norm*=bfloat16"), (f"show {FULL} model.embed.w", "model.embed.weight"),
     (f"inspect {FULL} --tensors model.embed.w", "model.embed.weight")],
)  # fmt: skip
def test_completion(typed: str, expected: str) -> None:
    words = typed.split()
    env = environment(_CKPTTOOL_COMPLETE="complete_bash", COMP_WORDS=f"ckpttool {typed}", COMP_CWORD=str(len(words)))
    process = spawn(env=env)
    assert expected in process.communicate(timeout=300)[0].split()


def test_the_completion_script() -> None:
    for words, shell in ((["--show-completion", "bash"], "/bin/zsh"), (["--show-completion"], "/bin/bash")):
        process = spawn(*words, env=environment(SHELL=shell))
        assert "_CKPTTOOL_COMPLETE=complete_bash" in process.communicate(timeout=300)[0]


def test_a_word_of_another_program_is_not_an_option_of_this_one() -> None:
    words = "verify-resume run --at 1 --until 2 --dry-run --checkpoints OUT/{step}"
    result = run(*words.split(), "--", "train", "OUT", "--show-completion")
    assert result.exit_code == 0, result.output
    assert re.search(r"train \S+ --show-completion(?!=)", result.stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_installed_once(tmp_path: Path, shell: str) -> None:
    env = environment(HOME=str(tmp_path), XDG_CONFIG_HOME="", SHELL=f"/bin/{shell}")
    for _ in range(2):
        process = spawn("--install-completion", env=env)
        assert process.communicate(timeout=300)[1] == ""
        assert process.returncode == 0
    script = tmp_path / ".config" / "ckpttool" / f"completion.{shell}"
    assert f"_CKPTTOOL_COMPLETE=complete_{shell}" in script.read_text()
    assert (tmp_path / f".{shell}rc").read_text() == f'source "{script}"\n'
