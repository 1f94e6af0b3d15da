"""Runs the examples of README.md and docs/: what a page shows is what is printed.

A ```console block is a dialogue: each `$ ckpttool ...` line is run and the lines below it are its stdout and stderr. A
```python block is executed. All blocks of a page share one directory, which has what `ckpttool samples` writes. Other
kinds of blocks (```sh, ```text) are not run. `pytest --accept` writes what is printed now into the pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import qwen3
from support.cli import run
from support.hub_client import use
from support.hub_server import Hub
from support.paths import ROOT

from ckpttool import convert
from ckpttool.errors import BUG
from ckpttool.operations.samples import samples
from ckpttool.transfer import execute

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Of the machine that the pages show: the memory that is planned with depends on it.
THREADS = 4
# What differs from run to run and from machine to machine.
MASKS = (
    (re.compile(r"^ *\d+%  .*\n", re.MULTILINE), ""),  # the progress of what takes long on a busy machine
    (re.compile(r"^(  time +)\S.*$", re.MULTILINE), r"\g<1>0.1 s"),
    (re.compile(r"(needed, ).* free"), r"\g<1>80.4 GB free"),
    (re.compile(r'("free_bytes": )\d+'), r"\g<1>80412345678"),
    (re.compile(r'("seconds": )[\d.e-]+'), r"\g<1>0.1"),
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub that the examples read from, with Qwen3-0.6B."""
    hub = Hub(tmp_path / "hub")
    qwen3.add(hub)
    use(hub, monkeypatch, tmp_path)
    yield hub
    hub.close()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    there = tmp_path / "samples"
    samples(there)
    monkeypatch.chdir(there)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(execute, "DEFAULT_THREADS", THREADS)
    return there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page(page: Path, there: Path, hub: Hub, request: pytest.FixtureRequest) -> None:
    said = page.read_text()
    scope: dict[str, object] = {}

    def replay(block: re.Match[str]) -> str:
        kind, text = block.groups()
        if kind == "python":
            exec(compile(text, str(page), "exec"), scope)
            return block.group()
        commands = [line for line in text.splitlines() if line.startswith("$ ")]
        return "```console\n" + "\n".join(map(_dialogue, commands)) + "```"

    now = BLOCK.sub(replay, said)
    if request.config.getoption("--accept"):
        page.write_text(now)
    assert now == said


def _dialogue(line: str) -> str:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    assert words[0] == "ckpttool", f"`{line}`: only ckpttool is run here; use another kind of block"
    done = run(*words[1:])
    assert done.exit_code != BUG, done.stderr  # not something to accept
    return f"{line}\n{masked(done.stdout + done.stderr)}"


def masked(printed: str) -> str:
    """What is printed, without what differs from run to run and from machine to machine."""
    for pattern, instead in MASKS:
        printed = pattern.sub(instead, printed)
    return printed


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "samples" / "README.md"]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            name, _, heading = target.partition("#")
            there = page.parent / name if name else page
            assert there.exists(), f"`{target}` is not there"
            assert not heading or heading in _headings(there), f"`{target}`: no such heading"


def _headings(page: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_the_list_of_pages() -> None:
    start = ROOT / "docs" / "README.md"
    linked = {(start.parent / target).resolve() for target in LINK.findall(start.read_text())}
    assert set(PAGES[1:]) - linked - {start} == set()


def test_the_state_file_on_its_page(there: Path) -> None:
    """The lines that docs/reference/training-state.md shows of a `ckpttool.json` are lines of one."""
    page = (ROOT / "docs" / "reference" / "training-state.md").read_text()
    shown = page.partition("```json\n")[2].partition("```")[0].splitlines()
    convert("full.pt", "state", to="safetensors")
    written = {line.rstrip(",") for line in Path("state/ckpttool.json").read_text().splitlines()}
    assert shown
    assert [line for line in shown if line.rstrip(",") not in written] == []


def test_there_are_examples() -> None:
    blocks = [m for page in PAGES for m in BLOCK.finditer(page.read_text())]
    assert len(blocks) >= 10
