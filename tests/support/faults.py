"""What the tests of faults share: running the command, what a good refusal looks like, and small real checkpoints."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from support.paths import ROOT

FORMATS = ("torch", "dcp", "safetensors")
PROGRAM = (sys.executable, "-m", "ckpttool")

_LARGE = 1 << 30  # too much to hash
READ, CORRUPT, LOSS, EXISTS, STORAGE, USAGE = 3, 4, 5, 6, 7, 2


@dataclass(frozen=True)
class Ran:
    """What a command did: its exit code and what it said."""

    code: int
    out: str
    err: str


def run(*words: object) -> Ran:
    """`ckpttool words...` in this process: most tests have too many cases for a process each."""
    from ckpttool.cli.app import application

    done = CliRunner().invoke(application(), [str(w) for w in words])
    return Ran(done.exit_code, done.stdout, done.stderr)


def spawn(*words: object, **options: Any) -> subprocess.Popen[str]:
    """`ckpttool words...` as a program of its own."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
    return subprocess.Popen([*PROGRAM, *map(str, words)], **(piped | options))


@functools.cache
def as_somebody_else() -> list[str]:
    """What goes before a command that is to be run by a user who may not read everything."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("run by root, and there is no setpriv to be somebody else")
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*prefix, *PROGRAM, "--version"], capture_output=True, cwd=ROOT, check=False).returncode:
        pytest.skip("run by root, and the interpreter is out of reach for others")
    return prefix


def as_nobody(*words: object) -> Ran:
    """The command as a user who may not read everything; root may."""
    command = [*as_somebody_else(), *PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def shell(*words: object, timeout: float = 300, **options: Any) -> Ran:
    """`ckpttool words...` as a program of its own, to its end."""
    process = spawn(*words, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ran(process.returncode, out or "", err or "")


# What holds whatever goes wrong ---------------------------------------------------------------------------------------


def mark(path: str | Path) -> dict[str, str]:
    """Every file below `path` (or `path` itself): what it is, and a hash of what it holds."""
    top = Path(path)
    if not os.path.lexists(top):
        return {}
    found = {".": _kind(top)}
    if top.is_dir() and not top.is_symlink():
        for folder, folders, names in os.walk(top):
            for name in (*folders, *names):
                here = Path(folder, name)
                found[str(here.relative_to(top))] = _kind(here)
    return found


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"-> {path.readlink()}"
    if stat.S_ISREG(mode):
        try:
            if path.stat().st_size > _LARGE:
                return f"{path.stat().st_mtime_ns} {path.stat().st_size}"
            return f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        except PermissionError:
            return "unreadable"
    return oct(stat.S_IFMT(mode))


@contextmanager
def untouched(*paths: str | Path) -> Iterator[None]:
    """Nothing at these paths changes during the block."""
    before = [mark(p) for p in paths]
    yield
    assert [mark(p) for p in paths] == before, "a file changed that should not have been touched"


def check_words(ran: Ran, code: int | Sequence[int], *facts: object) -> str:
    """One error as `ckpttool/errors.py` wants it: one line with its facts, a hint at most, no traceback."""
    codes = [code] if isinstance(code, int) else list(code)
    assert ran.code in codes, f"exit code {ran.code}, not {codes}: {ran.err}{ran.out[:300]}"
    lines = ran.err.splitlines()
    assert lines, "not a word on stderr"
    assert lines[0].startswith("error: "), ran.err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), ran.err
    assert "Traceback" not in ran.err and "bug:" not in ran.err
    for line in lines:
        said = line.partition(": ")[2]
        assert said[:1] == said[:1].lower(), f"begins with a capital: {line}"
        assert not re.search(r"[.!]$", said.removesuffix("...")), f"ends with a full stop: {line}"
        assert len(said) > 8, line
        assert not re.search(r"\b(None|errno|Errno|[A-Z]\w+(Error|Exception))\b", said), f"Python shows: {line}"
        assert said.isprintable(), f"would talk to the terminal: {line!r}"
    for fact in facts:
        assert str(fact) in ran.err, f"does not mention {fact}: {ran.err}"
    return ran.err


def refused(
    src: str | Path,
    code: int | Sequence[int],
    *facts: object,
    to: Sequence[str] = FORMATS,
    look: bool = True,
    flags: Sequence[str] = (),
) -> str:
    """`src` cannot be converted to any of these formats (nor, with `look`, inspected): the words of the last refusal.

    DST does not appear, nothing is left beside it, SRC stays as it is.
    """
    said = ""
    src = Path(src)
    with out_folder() as folder, untouched(src):
        if look:
            said = check_words(run("inspect", src), code, *facts)
        for name in to:
            dst = folder / "dst"
            said = check_words(run("convert", src, dst, "--to", name, *flags), code, *facts)
            assert os.listdir(folder) == [], f"left behind: {os.listdir(folder)}"
    # In a batch log nobody knows any more which of a hundred checkpoints it was.
    assert src.name.isprintable() is False or src.name in said, f"does not say which checkpoint: {said}"
    return said


@contextmanager
def out_folder() -> Iterator[Path]:
    """A folder for what is made of a source, taken away at the end."""
    folder = Path(tempfile.mkdtemp(prefix="out-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Small real checkpoints -----------------------------------------------------------------------------------------------


def model(seed: int = 0) -> OrderedDict[str, torch.Tensor]:
    """Tensors with names, sizes and dtypes that are easy to tell apart."""
    made = torch.Generator().manual_seed(seed)
    return OrderedDict(
        {
            "embed.weight": torch.randn(29, 13, generator=made),
            "layers.0.weight": torch.randn(13, 7, generator=made),
            "layers.0.bias": torch.randn(13, generator=made).bfloat16(),
            "steps": torch.arange(6),
        }
    )


def save_torch(path: Path, state: Any | None = None, **options: Any) -> Path:
    torch.save(model() if state is None else state, path, **options)
    return path


def save_dcp(path: Path, state: Mapping[str, Any] | None = None) -> Path:
    import logging
    import warnings

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(model() if state is None else state), checkpoint_id=path, no_dist=True)
    return path


def save_safetensors(path: Path, state: Mapping[str, torch.Tensor] | None = None) -> Path:
    save_file(dict(model() if state is None else state), path, {"format": "pt"})
    return path


def save(kind: str, folder: Path, state: Any | None = None) -> Path:
    """A checkpoint of this kind in `folder`, by the library that owns the format."""
    if kind == "torch":
        return save_torch(folder / "ckpt.pt", state)
    if kind == "legacy":
        return save_torch(folder / "ckpt.pt", state, _use_new_zipfile_serialization=False)
    if kind == "dcp":
        return save_dcp(folder / "ckpt", state)
    return save_safetensors(folder / "ckpt.safetensors", state)


@contextmanager
def failing_read(folder: Path, nth: int, code: int = errno.EIO) -> Iterator[list[str]]:
    """The `nth` call that looks at something below a directory, or reads it, fails. Gives the calls that were made."""
    made: list[str] = []
    names = ("stat", "lstat", "fstat", "listdir", "scandir", "open", "pread", "preadv", "read")
    real = {name: getattr(os, name) for name in names}

    def calling(name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            at = args[0] if args else "."
            path = real_link(f"/proc/self/fd/{at}") if isinstance(at, int) else os.fspath(at)
            if str(path).startswith(str(folder)):
                made.append(name)
                if len(made) - 1 == nth:
                    raise OSError(code, os.strerror(code))
            return real[name](*args, **keywords)

        return call

    def real_link(path: str) -> str:
        try:
            return os.readlink(path)
        except OSError:
            return ""

    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(os, name, calling(name))
        yield made


# A disk that fails ----------------------------------------------------------------------------------------------------

WRITING = ("pwrite", "write", "ftruncate", "truncate", "fsync", "rename", "link", "mkdir", "open")


@contextmanager
def faulty_disk(code: int, nth: int, *, stays: bool) -> Iterator[list[str]]:
    """The `nth` call that writes fails with this number, and with `stays` all after it; of `open`, those that create.
    What is removed is removed. Gives the calls that were made so far."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in WRITING}

    def calling(name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            creates = name != "open" or (len(args) > 1 and args[1] & os.O_CREAT)
            # What pytest and the terminal write is not ours.
            if creates and not (name == "write" and args[0] < 3):
                made.append(name)
                if len(made) - 1 == nth or (stays and len(made) - 1 > nth):
                    raise OSError(code, os.strerror(code))
            return real[name](*args, **keywords)

        return call

    for name in WRITING:
        setattr(os, name, calling(name))
    try:
        yield made
    finally:
        for name in WRITING:
            setattr(os, name, real[name])
