"""Runs the blocks of README.md, the tutorial and the how-to pages as a reader pastes them: in an empty directory, with
what `ckpttool samples` writes, and nothing of ckpttool but the installed wheel.

All `console`, `python` and `sh` blocks are run, those with torchrun too, but for a block below a comment `not run`.
README.md and the tutorial are pasted without torch, too, as after `pip install ckpttool`, but for what names torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support import qwen3
from support.hub_server import Hub
from support.paths import ROOT
from test_docs import masked

pytestmark = pytest.mark.long

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
BLOCK = re.compile(
    r"(?P<not_run><!-- not run[^>]*-->\n+)?^```(?P<kind>console|python|sh)\n(?P<text>.*?)^```$", re.M | re.S
)
# What a reader without torch does not paste.
NEEDS_TORCH = re.compile(r"^(import torch\b|from (torch|safetensors\.torch) |torchrun )", re.M)
# The number of this machine's processors is in it; `test_docs` compares it, with that of a page.
MEMORY = re.compile(r"^  memory +about .* at most$", re.M)
# Runs what it is sent, each a length in a line and as many bytes of code, in one scope.
INTERPRETER = """
import sys, traceback
scope = {}
while line := sys.stdin.buffer.readline():
    code = sys.stdin.buffer.read(int(line)).decode()
    try:
        exec(compile(code, "<page>", "exec"), scope)
        result = "done"
    except BaseException:
        result = traceback.format_exc().replace("\\n", " | ")
    print("\\0" + result, flush=True)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, torch and transformers, which are borrowed from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("ckpttool-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    programs = folder / "env" / "bin"
    (packages,) = (folder / "env").glob("lib/*/site-packages")
    # What lies there in a `.pth` file, such as the checkout, is not borrowed.
    (packages / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    subprocess.run(
        [programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel], check=True
    )
    torchrun = programs / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return programs


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with closing(Hub(tmp_path / "hub")) as hub:
        qwen3.add(hub)
        yield hub


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_as_a_reader_pastes_it(page: Path, programs: Path, hub: Hub, tmp_path: Path) -> None:
    paste(page, programs, hub, tmp_path)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.stem)
def test_a_page_without_torch(page: Path, programs: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    paste(page, programs, hub, tmp_path, not_pasted=NEEDS_TORCH, PYTHONPATH=str(tmp_path / "absent"))


def paste(
    page: Path, programs: Path, hub: Hub, tmp_path: Path, not_pasted: re.Pattern[str] | None = None, **variables: str
) -> None:
    keep = ("HOME", "LANG", "TMPDIR")
    environment = {
        **{name: os.environ[name] for name in keep if name in os.environ},
        "PATH": f"{programs}:/usr/bin:/bin",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        **variables,
    }
    folder = tmp_path / "empty"
    folder.mkdir()

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        """Run in the directory that the last command went to."""
        script = f"cd '{folder}'/$(cat '{tmp_path}/where' 2>/dev/null)\n{text}\nresult=$?\n"
        script += f"realpath --relative-to='{folder}' . > '{tmp_path}/where'\nexit $result"
        command = ["bash", "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)

    assert "site-packages/ckpttool" in shell("python -c 'import ckpttool; print(ckpttool.__file__)'").stdout
    if page != PAGES[0]:  # which says so itself
        assert shell("ckpttool samples try && cd try").returncode == 0
    interpreter = None
    for block in BLOCK.finditer(page.read_text()):
        kind, text = block["kind"], block["text"]
        if block["not_run"] or (not_pasted is not None and not_pasted.search(text)):
            continue
        if kind == "sh":
            lines = [line for line in text.splitlines() if not re.match(r"(pip|make) ", line)]
            done = shell("set -e\n" + "\n".join(lines))
            assert done.returncode == 0, f"{text}{done.stdout[-2000:]}{done.stderr[-3000:]}"
        elif kind == "console":
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
                done = shell(command)
                found = masked(done.stdout + done.stderr)
                assert MEMORY.sub("", found).strip() == MEMORY.sub("", shown).strip(), command
        else:
            if interpreter is None:
                where = folder / (tmp_path / "where").read_text().strip()
                interpreter = subprocess.Popen(
                    [programs / "python", "-c", INTERPRETER],
                    cwd=where, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )  # fmt: skip
            assert interpreter.stdin is not None and interpreter.stdout is not None
            code = text.encode()
            interpreter.stdin.write(b"%d\n" % len(code) + code)
            interpreter.stdin.flush()
            result = next(line for line in interpreter.stdout if line.startswith(b"\0"))
            assert result == b"\0done\n", f"{text}{result.decode()}"
    if interpreter is not None:
        interpreter.kill()
        interpreter.wait()
