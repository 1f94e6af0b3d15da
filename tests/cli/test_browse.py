"""`ckpttool browse`, by Textual's pilot: what the screen shows, and what the keys do.

`pytest --accept` writes the screens in tests/cli/screens.
"""

from __future__ import annotations

import asyncio
import csv
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support import cli
from support.paths import ROOT
from support.upstream_samples import path_of

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import Input

import ckpttool
from ckpttool.analysis.browsing.session import Opened
from ckpttool.analysis.statistics.results import COLUMNS
from ckpttool.cli.browser.app import Browser
from ckpttool.cli.browser.names import Names
from ckpttool.errors import TERMINATED, CkptError, ReadError

SCREENS = Path(__file__).parent / "screens"
SMALL, LARGE = (80, 24), (200, 50)
WAIT = 300.0


def screen(app: Browser) -> str:
    """The text on the screen, without the end of a scroll bar, whose place depends on when the text was laid out."""
    lines = ("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())
    return "\n".join(re.sub(r" +[▁▂▃▄▅▆▇]$", "", line).rstrip() for line in lines) + "\n"


def browse(
    path: str | Path, *keys: str, size: tuple[int, int] = SMALL, check: Callable[[Browser], None] | None = None
) -> str:
    """Press keys after all values are read, and return what is on the screen then."""
    return screens(path, [keys], size, check)[-1]


def screens(
    path: str | Path,
    series: Sequence[Sequence[str]],
    size: tuple[int, int] = SMALL,
    check: Callable[[Browser], None] | None = None,
) -> list[str]:
    """Return the screen after each series of keys."""

    async def run() -> list[str]:
        app, shown = Browser(str(path)), []
        async with app.run_test(size=size) as pilot:
            await until(lambda: app.return_value is not None or (app.opened is not None and is_read(app.opened)))
            if app.return_value is not None:
                raise app.return_value
            app._tick()
            for keys in series:
                for key in keys:
                    await press(key, app, pilot)
                shown.append(screen(app))
            if check is not None:
                check(app)
        app.session.close()
        return shown

    return asyncio.run(run())


async def press(key: str, app: Browser, pilot: Pilot[CkptError | KeyboardInterrupt | None]) -> None:
    """Press a key, `type` a text into the search, or `click` a widget at a place."""
    action, _, rest = key.partition(" ")
    if action == "search":
        app.action_search()
        app.query_one(Input).value = rest
        await pilot.press("enter")
    elif action == "click":
        selector, x, y = rest.split()
        await pilot.click(selector, offset=(int(x), int(y)))
    else:
        await pilot.press(key)
    await app.workers.wait_for_complete()
    await pilot.pause()
    if "bracket" in key:
        await until(lambda: app.opened is not None and app.opened.survey.finished)
        app._tick()
        await pilot.pause()


def is_read(opened: Opened) -> bool:
    return opened.survey.finished or (opened.survey.damage is not None and "headline" in vars(opened))


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(WAIT / 0.01)):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it took too long")


@pytest.fixture
def hsdp(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(Path(path_of("dcp/hsdp_w4")).parent)
    return Path(path_of("dcp/hsdp_w4")).name


QKV = "search qkv.weight part=model"
LARGE_SCREENS = [("large", (QKV, "down")), ("large_optimizer", ("5",))]
SMALL_SCREENS = [
    ("first", ()),
    ("layers", ("down", "down", "down", "down", "right", "down", "down")),
    ("tensor", ("right", "down")),
    ("sort", ("s",)),
    ("keys", ("escape", "question_mark")),
    ("search", ("escape", QKV)),
    ("histogram", ("2",)),
    ("shards", ("4",)),
    ("optimizer", ("5",)),
    ("files", ("6",)),
    ("findings", ("7",)),
]


@pytest.mark.parametrize(("size", "series"), [(SMALL, SMALL_SCREENS), (LARGE, LARGE_SCREENS)], ids=["80x24", "200x50"])
def test_screens(
    size: tuple[int, int], series: list[tuple[str, tuple[str, ...]]], hsdp: str, request: pytest.FixtureRequest
) -> None:
    shown = screens(hsdp, [keys for _, keys in series], size)
    for (name, _), now in zip(series, shown, strict=True):
        assert max(map(len, now.splitlines())) <= size[0] and len(now.splitlines()) == size[1]
        page = SCREENS / f"{name}.txt"
        if request.config.getoption("--accept"):
            page.write_text(now)
        assert now == page.read_text(), "run `pytest tests/cli/test_browse.py --accept`"


def test_a_heat_map_has_the_largest_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.full((8, 40), 0.01, np.float32)
    matrix[7, 39] = 5.0
    safetensors.numpy.save_file({"w": matrix}, tmp_path / "a.safetensors")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = browse(tmp_path / "a.safetensors", "down", "3")
    picture = [line.partition("▕")[2] for line in shown.splitlines() if "█" in line.partition("▕")[2]]
    assert [line.rstrip().endswith("█") and line.count("█") == 1 for line in picture] == [True]
    assert "largest |x|: 0.01 dark to 5 bright" in shown
    monkeypatch.delenv("NO_COLOR")
    assert "▀" * 40 in browse(tmp_path / "a.safetensors", "down", "3")


def listed(app: Browser) -> list[str]:
    assert app.opened is not None
    return [app.opened.tensors[line.tensor].name for line in app.query_one(Names).lines if line.tensor is not None]


@pytest.mark.parametrize(
    ("text", "where", "named"),
    [
        ("qkv part=model", None, ["model.layers.0.qkv.weight", "model.layers.1.qkv.weight"]),
        ("re:model\\.layers\\.\\d\\.gate", None, ["model.layers.0.gate", "model.layers.1.gate"]),
        ("model* rms>0.9 and absmax < 2.7", "rms>0.9 and absmax<2.7", None),
        ("zeros", "zeros>0", None),
        ("dtype=float32 dim=2 part=optimizer exp_avg_sq", None, None),
    ],
)
def test_a_search_finds_what_stats_finds(text: str, where: str | None, named: list[str] | None, hsdp: str) -> None:
    def check(app: Browser) -> None:
        if named is not None:
            assert listed(app) == named
        elif where is not None:
            tensors = ["model*"] if "model*" in text else []
            expected = ckpttool.stats(hsdp, where=where, tensors=tensors).tensors
            assert expected and listed(app) == [row.name for row in expected]
        else:
            catalogue = ckpttool.inspect(hsdp)
            expected_names = [t.name for t in catalogue.tensors if t.name.endswith("exp_avg_sq") and len(t.shape) == 2]
            assert expected_names and listed(app) == expected_names

    browse(hsdp, f"search {text}", check=check)


def test_a_rank_has_the_tensors_in_its_files(hsdp: str) -> None:
    catalogue = ckpttool.inspect(hsdp)
    own = {i for i, file in enumerate(catalogue.files) if file.rank == 3}
    expected = [tensor.name for tensor in catalogue.tensors if own & {*tensor.chunks.file}]

    def check(app: Browser) -> None:
        assert 0 < len(expected) < 67 and listed(app) == expected

    browse(hsdp, "search rank=3", check=check)


def test_what_is_no_search_says_so_and_escape_goes_back(hsdp: str) -> None:
    wrong, none, back = screens(
        hsdp, [("search rms>>1",), ("escape", "search no_such_tensor"), ("search qkv part=model", "down", "escape")]
    )
    assert "is not a condition" in wrong and "nothing matches" in none
    lines = back.splitlines()
    assert any("qkv.weight ×2" in line for line in lines) and "model.layers.1.qkv.weight" in lines[2]


def test_sorting_is_that_of_stats(hsdp: str) -> None:
    expected = sorted(
        (row for row in ckpttool.stats(hsdp).tensors if row.statistics.absmax is not None),
        key=lambda row: -(row.statistics.absmax or 0.0),
    )

    def check(app: Browser) -> None:
        values = {row.name: row.statistics.absmax for row in expected}
        assert [values[name] for name in listed(app)] == [row.statistics.absmax for row in expected]

    browse(hsdp, "s", *("up",) * (len(COLUMNS) - COLUMNS.index("absmax")), "enter", check=check)


def planted(folder: Path) -> Path:
    """A checkpoint of 8 layers, with NaN in one and a dead one."""
    rng = np.random.default_rng(3)
    state = {f"layers.{i}.up.weight": rng.standard_normal((8, 8)).astype(np.float32) for i in range(8)}
    state["layers.3.up.weight"][2, 5] = np.nan
    state["layers.6.up.weight"] *= 1e-6
    safetensors.numpy.save_file(state, folder / "a.safetensors")
    return folder / "a.safetensors"


def test_the_next_finding(tmp_path: Path) -> None:
    first, second, before = screens(planted(tmp_path), [("n",), ("n", "7"), ("N", "1")])
    assert "layers.3.up.weight" in first.splitlines()[2] and "! 1 NaN" in first
    assert "1 of 2: `layers.3.up.weight`: 1 of 64 elements is NaN" in first
    assert "▶ `layers.6.up.weight`" in second and "may be dead" in flat(second)
    assert "layers.3.up.weight" in before.splitlines()[2]


def test_two_tensors_differ(tmp_path: Path) -> None:
    path = planted(tmp_path)
    row = {row.name: row for row in ckpttool.stats(path).tensors}["layers.1.up.weight"]
    nothing, shown, unmarked = screens(path, [("d",), ("search up", "d", "down", "d"), ("escape", "d", "d")])
    assert "move to one" in nothing and "no longer marked" in unmarked
    assert "differing 64 of 64 elements, 100 %" in flat(shown) and f"{row.statistics.rms:.4g}" in shown
    a = safetensors.numpy.load_file(path)
    most = np.abs(a["layers.0.up.weight"].astype(np.float64) - a["layers.1.up.weight"]).max()
    assert f"{most:.4g} at most" in shown


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(Path(path_of("run/trainer")).parent)
    return Path(Path(path_of("run/trainer")).name)


def test_the_steps_of_a_run(run: Path) -> None:
    name = "model.model.norm.weight"
    values = [ckpttool.stats(run / f"checkpoint-{step}", tensors=name).tensors[0].values() for step in (2, 4)]
    shown = screens(run, [(f"search {name}",), ("left_square_bracket",), ("left_square_bracket",)], (160, 24))
    assert "step 2 of 2" in shown[0] and "checkpoint-4" in shown[0] and f"rms {values[1]['rms']:.4g}" in flat(shown[0])
    assert "step 1 of 2" in shown[1] and "checkpoint-2" in shown[1] and f"rms {values[0]['rms']:.4g}" in flat(shown[1])
    assert values[0]["rms"] != values[1]["rms"] and "this is the first" in shown[2]


def test_a_tensor_of_two_steps(run: Path) -> None:
    norm, counter = screens(
        run,
        [
            ("search model.model.norm.weight", "d", "left_square_bracket", "d"),
            ("escape", "search *state.0.step", "d", "right_square_bracket", "d"),
        ],
        size=(160, 24),
    )
    assert "differing" in norm and "checkpoint-4: model.model.norm" in norm and "checkpoint-2: model" in norm
    assert "1 of 1 elements, 100 %" in flat(counter) and "2 at most" in counter


def flat(text: str) -> str:
    return " ".join(text.split())


def test_names_and_commands_are_copied(hsdp: str) -> None:
    def check(app: Browser) -> None:
        assert app.clipboard == f"ckpttool show {hsdp} model.layers.0.qkv.weight"

    shown = browse(hsdp, QKV, "y", "Y", check=check)
    assert "copied: ckpttool show" in shown


def test_what_is_listed_is_written(hsdp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(hsdp).absolute()
    monkeypatch.chdir(tmp_path)
    browse(source, QKV, "e", "e", "E")
    assert sorted(os.listdir()) == ["ckpttool-browse-1.csv", "ckpttool-browse-1.svg", "ckpttool-browse-2.csv"]
    rows = list(csv.DictReader((tmp_path / "ckpttool-browse-1.csv").open()))
    expected = {row.name: row for row in ckpttool.stats(source).tensors}
    assert [row["name"] for row in rows] == ["model.layers.0.qkv.weight", "model.layers.1.qkv.weight"]
    assert all(float(row["rms"]) == expected[row["name"]].statistics.rms for row in rows)
    assert "<svg" in (tmp_path / "ckpttool-browse-1.svg").read_text()


def test_the_mouse(hsdp: str) -> None:
    opened, selected = screens(hsdp, [("click #names 0 4",), ("click #names 10 3", "click #tabs 20 0")])
    assert "▾ layers.0-1" in opened
    assert "quantiles 0.1 % to 99.9 %" in selected and "model.embed.weight" in selected


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "[bold]a[/bold].\x1b[31mred\x1b[0m.<script>.[/]"
    safetensors.numpy.save_file(
        {name: np.ones(3, np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "a.safetensors"
    )
    series = [*([("home", "down", tab) for tab in "1246"]), ("y", "d", "down", "d")]
    for shown in screens(tmp_path / "a.safetensors", series, (160, 24)):
        assert "\x1b" not in shown and "[bold]a[/bold]" in shown


def test_damage_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(path_of("dcp/hsdp_w4"), folder)
    shard = next(folder.glob("__0_0.distcp"))
    shard.write_bytes(shard.read_bytes()[:20000])
    (shown,) = screens(folder, [("7",)], (160, 24))
    assert re.search(r"! .*__0_0.distcp", shown)


def test_what_cannot_be_opened_ends_in_an_error(tmp_path: Path) -> None:
    async def run() -> object:
        app = Browser(str(tmp_path / "none"))
        async with app.run_test(size=SMALL):
            await until(lambda: not app.is_running or app.return_value is not None)
        return app.return_value

    assert isinstance(asyncio.run(run()), ReadError)


def test_a_screen_of_any_size(hsdp: str) -> None:
    async def run() -> None:
        app = Browser(hsdp)
        async with app.run_test(size=SMALL) as pilot:
            await until(lambda: app.opened is not None and app.opened.survey.finished)
            for tab, size in enumerate(((200, 50), (30, 5), (8, 3), (1, 1), (3, 200), (20, 2), (80, 24))):
                app.action_tab(tab)
                await pilot.resize_terminal(*size)
                await pilot.press("down")
            await app.workers.wait_for_complete()
            assert screen(app).count("\n") == 24
        app.session.close()

    asyncio.run(run())


def test_the_picture_in_the_docs_is_of_this_screen(hsdp: str) -> None:
    page = (ROOT / "docs" / "how-to" / "browse.md").read_text()
    assert "browse.svg" in page and (ROOT / "docs" / "pictures" / "browse.svg").stat().st_size < 60_000


@pytest.mark.parametrize("ends", ["ctrl-c", "term", "q"])
def test_the_terminal_is_as_it_was(ends: str, hsdp: str) -> None:
    """In a pseudo-terminal, resized while it runs: its modes are the same, screen, mouse and cursor are back."""
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "cwd": Path.cwd(), "start_new_session": True}
    program = cli.spawn("browse", hsdp, env=cli.environment(TERM="xterm-256color", PYTHONPATH=str(ROOT)), **terminal)
    shown = read_until(own, b"lm_head.weight")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    program.send_signal(signal.SIGWINCH)
    if ends == "term":
        program.terminate()
    else:
        os.write(own, b"\x03" if ends == "ctrl-c" else b"q")
    shown += read_until(own, b"\x1b[?1049l")
    assert program.wait(300) == (TERMINATED if ends == "term" else 0)
    while select.select([own], [], [], 0)[0]:
        shown += os.read(own, 65536)
    assert termios.tcgetattr(theirs) == before
    for mode in ("1049", "1000", "1003", "2004"):
        assert shown.rfind(f"\x1b[?{mode}l".encode()) > shown.rfind(f"\x1b[?{mode}h".encode()), mode
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    os.close(own)
    os.close(theirs)


def read_until(terminal: int, text: bytes) -> bytes:
    """What is written to a terminal, up to a text."""
    shown = b""
    while text not in shown:
        assert select.select([terminal], [], [], WAIT)[0], shown[-500:]
        shown += os.read(terminal, 65536)
    return shown


def test_it_needs_a_terminal(hsdp: str) -> None:
    done = cli.run("browse", hsdp, "--shapes", "names.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        done.stderr
        == "error: `browse` needs a terminal\nhint: `ckpttool inspect` and `ckpttool stats` print the same\n"
    )


def test_a_group_has_a_heat_map_and_a_histogram_at_once(tmp_path: Path) -> None:
    """With a cell for each tensor, also of one with NaN, and the elements of all together."""
    generator = np.random.default_rng(0)
    state = {
        f"layers.{i}.{k}.weight": generator.normal(size=(40, 40)).astype(np.float32) for i in range(4) for k in "qk"
    }
    state["layers.2.q.weight"][3, 3] = np.nan
    safetensors.numpy.save_file(state, tmp_path / "a.safetensors")
    first, histogram, heat_map = screens(tmp_path / "a.safetensors", [("2", "1"), ("2",), ("3",)], size=LARGE)
    for text in (first, heat_map):
        assert re.search(r"layers.1 +████\n", text) and re.search(r"layers.2 +(!██|██ !)\n", text)
        assert "1 layers.*.q.weight" in text or "1 layers.*.k.weight" in text
    for text in (first, histogram):
        assert "quantiles 0.1 % to 99.9 %" in text
        bars = [line.count("█") for line in text.splitlines() if re.search(r"▕ +-?[0-9.]+  █", line)]
        assert 0.3 < bars.index(max(bars)) / len(bars) < 0.7
    assert "of 8 tensors" in histogram
