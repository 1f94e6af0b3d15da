"""Files that lie: each meets the one error that it must, at no cost, and nothing that it asks for happens.

The files are made by the generator in the `lying_*` modules. They are looked at in batches, by a process without
torch that has little memory and an alarm (`run_with_limits.py`), and a few by the real command.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple
from zlib import crc32

import lying_archives  # noqa: F401
import lying_headers  # noqa: F401
import lying_indexes  # noqa: F401
import lying_meshes  # noqa: F401
import lying_pickles  # noqa: F401
import lying_work
import pytest
from run_with_limits import MOST_CALLS
from support.faults import FORMATS, Ran, check_words, mark
from support.lying_files import CANARY, LIES, Lie
from support.paths import ROOT

HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join((str(ROOT), str(HERE.parent)))
MOST_BYTES = 300 << 20
LARGE = 4 << 20  # bytes
BATCH = 20


class Done(NamedTuple):
    """What a command did with a lie."""

    verb: str
    ran: Ran
    calls: int
    taken: int


def words(name: str, verb: str, path: Path, folder: Path) -> list[str]:
    made, to = str(folder / "out" / "dst"), FORMATS[crc32(name.encode()) % len(FORMATS)]
    return {
        "inspect": ["inspect", str(path)],
        "convert": ["convert", str(path), made, "--to", to],
        "verify": ["verify", str(path)],
        "diff": ["diff", str(path), str(path)],
    }[verb]


NOT_SHOWN = {
    "dcp: 4,096 chunks in 12 dimensions",
    "dcp: a tensor that is larger than said",
    "dcp: a tensor of 2**57 elements",  # torch writes an expanded tensor in as few bytes
    "dcp: a tensor of 2**40 elements",
    "dcp: the item of another tensor",
    "dcp: another dtype",
    "dcp: an item of no bytes",
    "dcp: an item cut short",
    "dcp: an item inside another",
    "dcp: a transform of zstd over what is none",
    "dcp: a thousand transforms",
}
"""Lies that an item in a data file gives away, which `inspect` does not read. All others it refuses or shows."""

SOONER = {f"mesh: the first of 2**20 ranks, in {name}.pt" for name in ("ckpt", "model_world_size_1_rank_0")}
"""Lies that ask for more than a sixteenth of the work before they are found out."""

VERBS = ["inspect", "convert"]
OTHER_VERBS = ["inspect", "verify", "diff"]
"""`inspect` with the whole limit of work; else it has a sixteenth, which is met sooner."""


def look(names: Sequence[str], folder: Path, verbs: Sequence[str]) -> dict[str, list[Done]]:
    """Make these lies below `folder` and look at them with each command."""
    jobs: list[tuple[str, list[str]]] = []
    for n, name in enumerate(names):
        place = folder / ascii_lowercase[n]  # not a number, which might be that of a rank
        (place / "out").mkdir(parents=True)
        path = LIES[name].make(place)
        jobs += [(name, words(name, verb, path, place)) for verb in verbs]
    (folder / "cwd").mkdir()
    before = {place: _mark(place) for place in folder.iterdir()}
    found: dict[str, list[Done]] = {name: [] for name in names}
    while jobs:
        done = subprocess.run(
            [sys.executable, str(HERE / "run_with_limits.py"), *(["16"] if verbs == VERBS else [])],
            input=json.dumps(jobs), capture_output=True, text=True, cwd=folder / "cwd",
            env={**os.environ, "PYTHONPATH": PATH, "MALLOC_ARENA_MAX": "1"}, timeout=300, check=False,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        for said in map(json.loads, lines):
            ran = Ran(said["code"], said["out"], said["err"])
            found[said["name"]].append(Done(said["words"][0], ran, said["calls"], said["taken"]))
        if len(lines) < len(jobs):
            # It was ended in the middle of the next.
            name, (verb, *_) = jobs[len(lines)]
            found[name].append(Done(verb, Ran(done.returncode, "", done.stderr[-1000:]), 0, 0))
        del jobs[: len(lines) + 1]
    after = {place: _mark(place) for place in folder.iterdir()}
    for place in after:
        after[place] = {k: v for k, v in after[place].items() if not k.startswith("out/dst")}  # accepted: said below
    assert after == before, "something was written"
    for n, name in enumerate(names):
        is_accepted = any(done.verb == "convert" and done.ran.code == 0 for done in found[name])
        assert is_accepted or os.listdir(folder / ascii_lowercase[n] / "out") == [], f"{name}: something is left"
    return found


def _mark(place: Path) -> dict[str, str]:
    """What is below a folder: of a file its bytes, or its size and time where it is mostly a hole."""
    large = {p for p in place.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size > LARGE}
    if not large:
        return mark(place)
    found: dict[str, str] = {}
    for path in place.rglob("*"):
        at = path.lstat()
        data = "" if path in large or not stat.S_ISREG(at.st_mode) else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(place))] = f"{at.st_mode} {at.st_size} {at.st_mtime_ns} {data}"
    return found


def complaint(lie: Lie, done: Done) -> str | None:
    """What is wrong with how a lie was met; None when nothing is."""
    where = f"{done.verb}: "
    said = done.ran.err + done.ran.out
    if done.ran.code < 0:
        return f"{where}was ended by signal {-done.ran.code}: {done.ran.err}"
    if done.calls > MOST_CALLS:
        return f"{where}called {done.calls:,} functions"
    if done.taken > MOST_BYTES:
        return f"{where}took {done.taken >> 20} MiB"
    if not all(c.isprintable() or c == "\n" for c in said):
        return f"{where}talks to the terminal: {said!r}"
    if done.ran.code == 0:
        shown = lie.late and (
            (done.verb == "inspect" and (lie.told(done.ran.out) or lie.name in NOT_SHOWN))
            or (done.verb == "diff" and lie.harmless_at_rest and lie.told(said))
        )
        return None if shown else f"{where}accepted"
    if done.verb in ("verify", "diff") and done.ran.code in (1, *lie.codes()):
        return None  # these collect what they find
    try:
        check_words(done.ran, lie.codes())
    except AssertionError as error:
        return f"{where}{error}"
    is_told = lie.told(done.ran.err) or (lie.name in SOONER and lying_work.WORK in done.ran.err)
    return None if is_told else f"{where}says something else: {done.ran.err}"


def _batches() -> Iterator[tuple[str, list[str]]]:
    for group in sorted({name.partition(":")[0] for name in LIES}):
        names = [name for name in LIES if name.partition(":")[0] == group]
        size = BATCH if group != "deep" else BATCH // 2
        for at in range(0, len(names), size):
            yield f"{group}-{at // size}", names[at : at + size]


BATCHES = dict(_batches())


# Of those in which tuples are nested without end, a third is quick.
QUICK = [pytest.param(one, marks=[pytest.mark.long] * (one in ("deep-1", "deep-2", "deep-3"))) for one in BATCHES]


@pytest.mark.parametrize("verbs", [VERBS, pytest.param(OTHER_VERBS, marks=pytest.mark.long)], ids=" ".join)
@pytest.mark.parametrize("batch", QUICK)
def test_lies_are_found_out(batch: str, verbs: Sequence[str], tmp_path: Path) -> None:
    found = look(BATCHES[batch], tmp_path, verbs)
    assert all(len(done) == len(verbs) for done in found.values())
    wrong = [
        f"{name}: {said}"
        for name, dones in found.items()
        for done in dones
        if (said := complaint(LIES[name], done)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_enough() -> None:
    assert len(LIES) > 300


LIVE = ("os.system", "posix.system", "eval", "subprocess", "INST", "OBJ")
LOADERS = {
    "pickle": "import io, sys, zipfile; import pickle\n"
    "class Reader(pickle.Unpickler):\n"
    "    persistent_load = staticmethod(lambda pid: None)\n"
    "    def find_class(self, module, name):\n"
    "        if module.startswith('torch'): return lambda *args: None\n"
    "        return super().find_class(module, name)\n"
    "Reader(io.BytesIO(zipfile.ZipFile(sys.argv[1]).read('ckpt/data.pkl'))).load()",
    "torch": "import sys, torch; torch.load(sys.argv[1], weights_only=False)",
}


@pytest.mark.parametrize(("name", "loader"), [*((name, "pickle") for name in LIVE), ("os.system", "torch")])
def test_a_payload_is_live(name: str, loader: str, tmp_path: Path) -> None:
    """Where something loads it that runs pickles, the canary is there: else its absence would prove nothing."""
    path = LIES[f"payload: {name}"].make(tmp_path)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    subprocess.run(
        [sys.executable, "-c", LOADERS[loader], str(path)], cwd=cwd, capture_output=True, timeout=300, check=False
    )
    assert [p.name for p in cwd.iterdir()] == [CANARY]
