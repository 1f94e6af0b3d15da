"""Without the optional packages: what works, and the one line that says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.upstream_samples import path_of

import ckpttool as ckpttool_library
from ckpttool.models import architecture_process

ABSENT = """
import sys
sys.modules |= dict.fromkeys(sys.argv.pop(1).split(","))
"""
HEAVY = "torch,transformers,safetensors,accelerate,huggingface_hub,rich,jinja2,zstandard,textual"


def without(packages: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ABSENT + code, packages, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def ckpttool(packages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return without(packages, "from ckpttool.__main__ import main; main()", *arguments)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["inspect", "{a}"],
        ["verify", "{a}"],
        ["diff", "{a}", "{a}"],
        ["verify-resume", "audit", "{a}", "--no-values"],
        ["convert", "{a}", "{out}.pt", "--check"],
        ["convert", "{a}", "{out}", "--to", "safetensors"],
        ["reshard", "{a}", "{out}", "--to-world", "2"],
        ["export", "{llama}", "{out}"],
        ["formats"],
    ],
    ids=lambda words: words[0],
)
def test_bytes_are_moved_with_none_of_them(words: list[str], tmp_path: Path) -> None:
    """Not even numpy, but where elements are calculated with (`audit` reads counters) or safetensors are written."""
    places = {"a": path_of("dcp/fsdp2_w4"), "out": str(tmp_path / "out"), "llama": path_of("hf/llama")}
    heavy = HEAVY if words[0] == "verify-resume" else f"{HEAVY},numpy"
    if "safetensors" in words or words[0] == "export":
        # The library opens what was written, and imports numpy.
        heavy = HEAVY.replace("safetensors,", "")
    done = ckpttool(heavy, *(word.format(**places) for word in words))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["convert", "--only", "model", "--check"], ["export", "--no-strict"]])
def test_a_cast_needs_no_torch(words: list[str], tmp_path: Path) -> None:
    source, out = path_of("dcp/fsdp2_w4"), tmp_path / "out.safetensors"
    if words[0] == "export":
        out = tmp_path / "out"
    done = ckpttool("torch,transformers,accelerate", *words[:1], source, str(out), *words[1:], "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    cast = load_file(out / "model.safetensors" if out.is_dir() else out)
    original = ckpttool_library.open(source)["model"]
    floats = [name for name in cast if original[name].torch().is_floating_point()]
    assert len(floats) > 10
    for name in floats:
        assert torch.equal(cast[name], original[name].torch().to(torch.bfloat16)), name


def test_what_needs_torch_says_how_to_install_it(tmp_path: Path) -> None:
    done = ckpttool("torch,transformers,accelerate", "verify-resume", "trial", "--recipe", "recipe.py")
    expected = "error: `verify-resume trial` needs torch, which is not installed\nhint: pip install 'ckpttool[torch]'\n"
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (2, expected.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "purpose"),
    [
        ("ckpttool.load", "`ckpttool.load`"),
        ("ckpttool.save", "`ckpttool.save`"),
        ("next(iter(ckpttool.open(sys.argv[1]).values())).torch()", "`LazyTensor.torch()`"),
    ],
)
def test_the_library_says_it_too(code: str, purpose: str) -> None:
    body = f"""
import ckpttool, ckpttool.errors
try:
    {code}
except ckpttool.errors.MissingPackageError as error:
    assert isinstance(error, ImportError) and isinstance(error, ckpttool.CkptError)
    print(error.message, error.hint)
"""
    done = without("torch", body, path_of("safetensors/single"))
    assert done.stdout == f"{purpose} needs torch, which is not installed pip install 'ckpttool[torch]'\n", done.stderr


def test_a_star_import_gives_what_there_is() -> None:
    code = """
from importlib import util
found = util.find_spec
util.find_spec = lambda name: None if name == "torch" else found(name)
from ckpttool import *
assert inspect and "load" not in globals()
"""
    result = without("torch", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_zstd_says_how_to_install_it(tmp_path: Path) -> None:
    done = ckpttool("zstandard,compression", "convert", path_of("dcp/zstd_w2"), str(tmp_path / "out.pt"))
    assert done.returncode == 3 and done.stderr.endswith("hint: pip install ckpttool[zstd]\n"), done.stderr


def test_browse_says_how_to_install_textual() -> None:
    done = ckpttool("textual", "browse", path_of("dcp/fsdp2_w4"))
    expected = "error: `browse` needs textual, which is not installed\nhint: pip install 'ckpttool[browse]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_a_package_that_is_always_needed_is_no_bug() -> None:
    done = ckpttool("tabulate,rich", "inspect", path_of("dcp/fsdp2_w4"))
    assert (done.returncode, done.stderr) == (2, "error: tabulate is not installed\nhint: pip install tabulate\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('built for another numpy\\nmore')", "RuntimeError: built for another numpy"),
        ("from os import no_such_name", "ImportError: cannot import name 'no_such_name' from 'os'"),
        ("raise OSError('libx.so.1: cannot open shared object file')", "OSError: libx.so.1: cannot open shared object"),
        ("import a.b.c", "tabulate needs it"),
        ("from tabulate import more", "tabulate cannot be imported: ImportError: cannot import name 'more'"),
    ],
)
def test_a_package_that_fails_to_import_is_not_called_missing(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "tabulate.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ckpttool.__main__ import main; main()"
    done = without("rich", code, "inspect", path_of("dcp/fsdp2_w4"))
    message = done.stderr.splitlines()[0]
    assert done.returncode == 2 and message.startswith("error: ") and reason in message, done.stderr
    assert "tabulate is not installed" not in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from os import no_such_name", "transformers cannot be imported: ImportError: cannot import name"),
        ("raise RuntimeError('torch is too old')", "transformers cannot be imported: RuntimeError: torch is too old"),
        ("import no_such_package", "no_such_package is not installed, and transformers needs it"),
    ],
)
def test_a_transformers_that_fails_to_import_says_why(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(source)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    architecture_process.main(str(tmp_path), str(tmp_path / "out"), "")
    assert json.loads((tmp_path / "out").read_text())["why_not"].startswith(reason)
