"""Rights that are taken away while ckpttool works: DST is absent and nothing beside it, or the next run removes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import CORRUPT, READ, STORAGE, Ran, as_somebody_else, check_words, mark, run
from support.paths import CHECKPOINTS, ROOT

ALTERING = Path(__file__).with_name("change_permissions.py")
SOURCE = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
MODEL = ("--only", "model")
WRITERS = {
    "convert": ("convert", "SRC", "DST", "--to", "torch", "--threads", "1"),
    "reshard": ("reshard", "SRC", "DST", "--to-world", "3", "--threads", "1"),
    "export": ("export", "SRC", "DST", *MODEL, "--exclude", "*tokens_seen", "--exclude", "*frozen", "--threads", "1"),
}
READERS = {"verify": ("verify", "SRC", "--threads", "1"), "diff": ("diff", "SRC", "OTHER", "--threads", "1")}
every_writer = pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
every_command = pytest.mark.parametrize("words", (WRITERS | READERS).values(), ids=WRITERS | READERS)


def naming(words: tuple[str, ...]) -> str:
    """The call that gives what is made its name: to rename a file might replace another."""
    return "link" if "torch" in words else "rename"


class Place:
    """A directory with `ckpt` and `other` in it, the same checkpoint twice, and `out`, which is empty. They belong to
    somebody else than root, from whom no right can be taken away."""

    def __init__(self, top: Path) -> None:
        self.top, self.src, self.out = top, top / "ckpt", top / "out"
        for name in ("ckpt", "other"):
            shutil.copytree(SOURCE, top / name)
        self.out.mkdir()
        self.prefix = as_somebody_else()
        if self.prefix:
            for path in (top, *top.rglob("*")):
                os.chown(path, 65534, 65534)

    def give_back(self) -> None:
        """Every right that was taken away: only then is seen what lies in a folder."""
        self.top.chmod(0o755)
        for folder, folders, names in os.walk(self.top):
            for name in (*folders, *names):
                Path(folder, name).chmod(0o755)

    def run(
        self, words: tuple[str, ...], call: str = "", nth: int = 1, what: str = "0", below: Path | None = None
    ) -> Ran:
        """A command, as somebody who is not root; with `call`, while this happens to it, counted `below` a folder."""
        names = {"SRC": str(self.src), "DST": str(self.out / "dst"), "OTHER": str(self.top / "other")}
        program = [str(ALTERING), call, str(nth), what] if call else ["-m", "ckpttool"]
        done = subprocess.run(
            [*self.prefix, sys.executable, *program, *(names.get(word, word) for word in words)],
            capture_output=True, cwd=ROOT, text=True, check=False, timeout=300,
            env={**os.environ, "ALTERING": str(below or self.top), "PYTHONPATH": str(ROOT), "HOME": str(self.top)},
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def place() -> Iterator[Place]:
    # Not in the tests' own directory, which is root's alone.
    top = Path(tempfile.mkdtemp(prefix="rights-"))
    try:
        made = Place(top)
        yield made
        made.give_back()
    finally:
        shutil.rmtree(top, ignore_errors=True)


def check_refused(done: Ran, words: tuple[str, ...], place: Place, reason: str) -> None:
    """One error that names the file; `verify` may list those that it cannot read instead."""
    if words[0] == "verify" and done.code == CORRUPT:
        assert re.search(rf"^! `__\d_0\.distcp`: cannot read: {reason}$", done.out, re.M), done.out
    else:
        check_words(done, READ, f"{place.src}/__", f".distcp`: cannot read: {reason}")
    assert os.listdir(place.out) == []


@every_command
def test_files_that_cannot_be_opened_any_more(words: tuple[str, ...], place: Place) -> None:
    """The first file is read when nobody may open the others any more."""
    before = mark(place.src)
    done = place.run(words, "preadv", 1, f"0:{place.src}")
    place.give_back()
    check_refused(done, words, place, "permission denied")
    assert mark(place.src) == before


@every_command
def test_a_file_server_that_refuses_to_go_on(words: tuple[str, ...], place: Place) -> None:
    """The file is open, and each read is asked for anew."""
    check_refused(place.run(words, "preadv", 3, "EPERM"), words, place, "operation not permitted")


@pytest.mark.sweep(3)
@every_writer
@pytest.mark.parametrize(("call", "nth"), [("open", 1), ("open", 3), ("open", 6), ("pwrite", 1), ("naming", 1)])
def test_a_destination_that_refuses(call: str, nth: int, words: tuple[str, ...], place: Place) -> None:
    done = place.run(words, naming(words) if call == "naming" else call, nth, "EACCES", below=place.out)
    check_words(done, STORAGE, place.out / "dst", "permission denied")
    assert ".partial-" not in done.err
    if os.listdir(place.out):
        # To be removed, a directory is opened.
        assert call == "open" and nth > 3
        assert place.run(words).code == 0 and os.listdir(place.out) == ["dst"]


@every_writer
def test_a_folder_that_is_read_only_now(words: tuple[str, ...], place: Place) -> None:
    """What was made cannot be given its name, or be removed: it does not look complete, and the next run removes it."""
    done = place.run(words, naming(words), 1, f"555:{place.out}")
    check_words(done, STORAGE, place.out / "dst", "permission denied")
    assert ".partial-" not in done.err
    left = os.listdir(place.out)
    assert left and all(name.startswith(".dst.partial-") for name in left)
    place.give_back()
    done = place.run(words)
    assert done.code == 0, done.err
    assert "what an interrupted run left" in done.err
    assert os.listdir(place.out) == ["dst"]
    assert run("verify", place.out / "dst").code == 0
