"""Random damage: a checkpoint with some bytes changed, cut out or put in either works or is refused in our words.

Never another exception, never much work or memory. The seeds are fixed; `-m long` does more.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.paths import CHECKPOINTS, ROOT
from support.work import counted

import ckpttool
from ckpttool.errors import CkptError

SOURCES = {
    "torch": "torch/nested", "torch, all": "torch/full", "legacy": "torch/legacy", "tar": "torch/tar",
    "TorchScript": "torch/script", "torch.export": "torch/pt2", "unknown classes": "torch/unknown_classes",
    "dcp": "dcp/tuples", "dcp, ranks": "dcp/nocollectives_w2", "dcp, zstd": "dcp/zstd_w2",
    "dcp, safetensors": "dcp/safetensors_w2", "safetensors": "safetensors/single", "index": "safetensors/indexed",
    "pieces": "hf/sharded_w2",
}  # fmt: skip

MOST_CALLS = 2_000_000
"""Of functions, of Python and C, in one round; what takes most makes a tenth of them."""


def noisy(data: bytes, some: random.Random) -> bytes:
    """One to four small accidents, half of them where the structure is: at both ends."""
    made = bytearray(data)
    for _ in range(some.randint(1, 4)):
        size = len(made)
        if not size:
            break
        near = some.random() < 0.5
        at = some.choice((some.randrange(min(size, 2048)), size - 1 - some.randrange(min(size, 2048)))) if near else (
            some.randrange(size)
        )  # fmt: skip
        match some.randrange(6):
            case 0:
                made[at] ^= 1 << some.randrange(8)
            case 1:
                made[at] = some.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del made[at : at + some.randint(1, 16)]
            case 3:
                made[at:at] = some.randbytes(some.randint(1, 16))
            case 4:
                made[at : at + 8] = some.choice((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"9" * 8))
            case 5:
                del made[at : None if some.random() < 0.2 else at + 1]
    return bytes(made)


def spoil(path: Path, some: random.Random) -> None:
    """One file of the checkpoint, the index more often than not."""
    if path.is_file():
        path.write_bytes(noisy(path.read_bytes(), some))
        return
    files = sorted(p for p in path.iterdir() if p.is_file())
    indexes = [p for p in files if "metadata" in p.name or p.suffix == ".json"]
    file = some.choice(indexes if indexes and some.random() < 0.6 else files)
    file.write_bytes(noisy(file.read_bytes(), some))


def try_all(kind: str, folder: Path, rounds: int, seed: int) -> None:
    """Inspect and convert `rounds` spoilt copies. Raises AssertionError with the round for what is not ours."""
    original = next((CHECKPOINTS / SOURCES[kind]).glob("ckpt*"))
    for number in range(rounds):
        some = random.Random(f"{kind} {seed} {number}")
        copy, dst = folder / original.name, folder / "dst"
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            shutil.copyfile(original, copy)
        spoil(copy, some)
        to = some.choice(("torch", "dcp", "safetensors"))
        where = f"{kind}, seed {seed}, round {number}, to {to}"
        _, calls = counted(partial(_try, copy, dst, to, where), MOST_CALLS)
        assert calls < MOST_CALLS, f"{where}: {calls:,} calls"
        remove(copy)
        left = [p.name for p in folder.iterdir()]
        assert not left, f"{kind}, seed {seed}, round {number}: left {left}"


def _try(copy: Path, dst: Path, to: str, where: str) -> None:
    """Inspect and convert a spoilt copy."""
    acts = {
        "inspect": lambda: look(str(copy)),
        "convert": lambda: ckpttool.convert(str(copy), str(dst), to=to, threads=1),
    }
    for name, act in acts.items():
        try:
            act()
        except CkptError as error:
            assert error.message and error.exit_code in (2, 3, 4, 5), (where, name, error)
            assert not dst.exists()
        except Exception as error:
            raise AssertionError(f"{where}, {name}: {error!r}") from error
    remove(dst)


def look(path: str) -> None:
    """Inspect as the command does: the summary looks at more than opening."""
    from ckpttool.analysis.describe.document import document
    from ckpttool.analysis.describe.summary import summarise

    catalogue = ckpttool.inspect(path)
    summarise(catalogue, depth=3, limit=100)
    for _ in document(catalogue, path):
        pass


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_noise(kind: str, tmp_path: Path) -> None:
    try_all(kind, tmp_path, 60, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("kind", SOURCES)
def test_more_noise(kind: str, seed: int, tmp_path: Path) -> None:
    try_all(kind, tmp_path, 500, seed)


MEMORY = 300 << 20


def test_noise_takes_no_memory(tmp_path: Path) -> None:
    """All kinds in one process of bounded address space, whose peak is looked at too."""
    code = (
        "import resource, sys, pathlib\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"  # threads and numpy reserve more than they use
        "sys.path[:0] = sys.argv[1].split(':')\n"
        "import test_noise as noise\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for kind in noise.SOURCES:\n"
        "    noise.try_all(kind, pathlib.Path(sys.argv[2]), 20, 7)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, before)\n"
    )
    folder = tmp_path / "work"
    folder.mkdir()
    words = [sys.executable, "-c", code, f"{Path(__file__).parent}:{ROOT}/tests", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, before = (int(n) << 10 for n in done.stdout.split())
    assert peak - before < MEMORY, f"{(peak - before) >> 20} MiB more"
