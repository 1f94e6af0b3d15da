"""Colours, widths and numbers as people meet them."""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import tabulate
import torch
from rich.cells import cell_len
from support.cli import FULL, environment, run, spawn
from support.paths import CHECKPOINTS
from support.upstream_samples import path_of
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpttool.cli import progress
from ckpttool.cli.app import application
from ckpttool.cli.progress import Progress
from ckpttool.errors import UsageError
from ckpttool.reports.report import Column, bold
from ckpttool.reports.terminal import Terminal, wants_colour
from ckpttool.text import count, duration, parse_size, plural, size


class Screen(io.StringIO):
    """A terminal of so many columns, as far as we look."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_table_in_a_pipe_is_the_same_where_wcwidth_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with IPython: tabulate then counts the columns of a character, and a control character has none."""
    plain = run("inspect", FULL).stdout
    monkeypatch.setattr(tabulate, "wcwidth", SimpleNamespace(wcswidth=cell_len))
    monkeypatch.setattr(tabulate, "WIDE_CHARS_MODE", True)
    assert run("inspect", FULL).stdout == plain
    monkeypatch.setattr(tabulate, "wcwidth", None)
    assert run("inspect", FULL).stdout == plain


# Colours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "on_terminal", "in_pipe"),
    [({}, True, False), ({"NO_COLOR": "1"}, False, False), ({"FORCE_COLOR": "1"}, True, True),
     ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False), ({"NO_COLOR": ""}, True, False),
     ({"TERM": "dumb"}, False, False)],
)  # fmt: skip
def test_who_gets_colours(
    env: dict[str, str], on_terminal: bool, in_pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Screen()) is on_terminal
    assert wants_colour(io.StringIO()) is in_pipe


def on_terminal(columns: int, *words: str, code: int = 0, **env: str) -> str:
    """What a real terminal of this width gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = spawn(*words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm", **env))
    os.close(theirs)
    got = b""
    try:
        while block := os.read(ours, 65536):
            got += block
    except OSError:  # Linux says EIO when the other side has gone
        pass
    os.close(ours)
    assert process.wait(timeout=300) == code
    return got.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, *(pytest.param(n, marks=pytest.mark.long) for n in (80, 160))])
def test_tables_fit_the_terminal(columns: int) -> None:
    for words in (["inspect", FULL], ["inspect", FULL, "--tensors", "*"], ["show", FULL, "model.embed.weight"]):
        text = on_terminal(columns, *words)
        assert "\x1b[1m" in text
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        # Letters of two columns are counted as one: only the sample's Japanese text is let off.
        assert [line for line in plain.splitlines() if len(line) > columns] == []
    assert "\x1b" not in on_terminal(columns, "inspect", FULL, NO_COLOR="1")


def test_a_narrow_terminal_shows_names_before_other_columns(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{'post_attention_layernorm' * 2}.weight" for i in range(3)]
    state = {name: torch.ones(1000, 100, dtype=torch.bfloat16) for name in names} | {"bias": torch.ones(3)}
    torch.save(state, tmp_path / "a.pt")
    text = on_terminal(80, "inspect", str(tmp_path / "a.pt"), NO_COLOR="1")
    assert "post_attention_layernorm" * 2 + ".weight" in text
    assert "elements" not in text.partition("\nmodel")[2]
    wide = on_terminal(160, "inspect", str(tmp_path / "a.pt"), NO_COLOR="1").partition("\nmodel")[2]
    assert "elements" in wide and "dtype" in wide


def test_values_are_cut_before_names_are_broken(tmp_path: Path) -> None:
    name = f"trainer.{'log_history' * 3}.learning_rate"
    torch.save({"w": torch.ones(2), name: "v" * 100, "other": 1}, tmp_path / "a.pt")
    text = on_terminal(80, "inspect", str(tmp_path / "a.pt"), NO_COLOR="1")
    assert name in text and "v" * 10 in text and "…" in text
    table = [line for line in text.splitlines() if name in line]
    assert max(map(len, table)) <= 80


def test_a_list_of_tensors_has_whole_names_on_a_narrow_terminal(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.post_attention_layernorm.weight_of_something" for i in range(3)]
    torch.save({name: torch.ones(1000, 100, dtype=torch.bfloat16) for name in names}, tmp_path / "a.pt")
    text = on_terminal(80, "inspect", str(tmp_path / "a.pt"), "--tensors", "*", NO_COLOR="1")
    assert all(name in text for name in names)
    assert "tensors  3 of 3, 600 kB, bfloat16" in text


def test_a_pipe_gets_everything_and_no_colours() -> None:
    text = run("inspect", FULL).stdout
    assert "\x1b" not in text
    assert "<argparse.Namespace lr=0.01 betas=(0.9, 0.95) name='tiny' resume=None>" in text


# Tables --------------------------------------------------------------------------------------------------------------


def test_a_table() -> None:
    stream = io.StringIO()
    Terminal(stream).table(
        [Column("name"), Column("n", is_number=True)], [("  a", "1"), (bold("bbb"), "20\x07")], indent=1
    )
    assert stream.getvalue() == " name       n\n   a        1\n bbb   20\\x07\n"


def on_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[str, ...]], second: Column | None = None
) -> list[str]:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    Terminal(screen).table([Column(fit="wrap"), second or Column()], rows, indent=1)
    return screen.getvalue().splitlines()


def test_a_name_that_is_too_long_is_continued_on_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("model.layers.0.weight", "1"), ("  [b]", "20\x07")]
    whole = [" model.layers.0.weight       1", "   [b]                  20\\x07"]
    assert on_screen(40, monkeypatch, rows, Column(is_number=True)) == whole
    lines = on_screen(20, monkeypatch, rows, Column(is_number=True))
    assert lines == [" model.            1", " layers.0.", " weight", "   [b]        20\\x07"]


def test_a_name_is_broken_where_one_of_its_parts_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("trainer_state.args.should_save", "True"), ("  a.bc.def_ghijkl", "1"), ("abcdefghijklmnopqrstuvw", "2")]
    lines = on_screen(26, monkeypatch, rows)
    assert lines[:2] == [" trainer_state.args.  True", " should_save"]
    lines = on_screen(18, monkeypatch, rows[1:])
    assert lines == ["   a.bc.def_     1", " ghijkl", " abcdefghijklmn  2", " opqrstuvw"]


def test_a_line_does_not_end_within_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    screen = Screen()
    Terminal(screen).paragraph("`w` is missing (float32 [13, 7]) of what was saved at step 4")
    assert screen.getvalue() == "  `w` is missing (float32\n  [13, 7]) of what was saved\n  at step 4\n"


def test_a_value_that_is_too_long_ends_in_an_ellipsis(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_screen(12, monkeypatch, [("a", "one two three four")], Column(fit="clip")) == [" a  one two…"]


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (4936, "4.94 kB"), (99_960, "100 kB"), (999_499, "999 kB"),
     (999_500, "1.00 MB"), (12_900_000_000, "12.9 GB"), (10**18, "1,000 PB")],
)  # fmt: skip
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_counts_and_durations() -> None:
    assert [count(n) for n in (9_999, 12_345, 6_738_415_616)] == ["9,999", "12.3k", "6.74B"]
    assert [duration(s) for s in (0.041, 12.3, 184, 3725)] == ["0.04 s", "12 s", "3 min 4 s", "1 h 2 min"]
    assert [plural(n, "file") for n in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("5GB", 5 * 10**9), ("5G", 5 * 10**9), ("512MiB", 512 << 20), ("1.5 gb", 1_500_000_000),
     ("2TiB", 2 << 40), ("7b", 7), ("1kB", 1000), ("1KiB", 1024), (" 3mb ", 3_000_000)],
)  # fmt: skip
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text, "--max-memory") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5", "5 5", "1e9", "0", "0.1", "5GBB", "٥GB", "9" * 30])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="max_memory"):
        parse_size(text, "--max-memory")


# Progress ------------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_a_bar_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    screen, clock = Screen(), Clock()
    with Progress(Terminal(screen), clock) as progress:
        progress(10**8, 10**9)
        assert screen.getvalue() == ""
        clock.now += 2
        progress(5 * 10**8, 10**9)
        drawn = screen.getvalue()
        text = CONTROL.sub("", drawn).splitlines()[-1].rstrip()
        assert text == f"{'━' * 12}{' ' * 12}  50%  500 MB of 1.00 GB  200 MB/s  2 s left"
        clock.now += 0.05
        progress(6 * 10**8, 10**9)
        assert screen.getvalue() == drawn
        clock.now += 1
        progress(10**9, 10**9)
        assert "100%" in screen.getvalue()
        assert "finishing" in screen.getvalue()
    # The line is erased, and the cursor is shown again.
    assert "\x1b[2K" in screen.getvalue().rpartition("finishing")[2]
    assert "\x1b[?25h" in screen.getvalue().rpartition("finishing")[2]


def test_a_line_every_half_minute_in_a_log() -> None:
    log, clock = io.StringIO(), Clock()
    with Progress(Terminal(log), clock) as progress:
        for second in range(95):
            clock.now = 100.0 + second
            progress(second * 10**7, 10**9)
    assert log.getvalue().splitlines() == [
        " 30%  300 MB of 1.00 GB  10.0 MB/s  1 min 10 s left",
        " 60%  600 MB of 1.00 GB  10.0 MB/s  40 s left",
        " 90%  900 MB of 1.00 GB  10.0 MB/s  10 s left",
    ]


def test_the_rate_is_of_the_bytes_and_not_of_what_came_before() -> None:
    log, clock = io.StringIO(), Clock()
    with Progress(Terminal(log), clock) as progress:
        # Twenty seconds of planning, and half of it is there from an interrupted run.
        clock.now += 40
        progress(5 * 10**8, 10**9)
        clock.now += 30
        progress(5 * 10**8, 10**9)
        clock.now += 30
        progress(8 * 10**8, 10**9)
    assert log.getvalue().splitlines() == [
        " 50%  500 MB of 1.00 GB", " 50%  500 MB of 1.00 GB", " 80%  800 MB of 1.00 GB  5.00 MB/s  40 s left",
    ]  # fmt: skip


def test_a_narrow_terminal_does_not_wrap_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    screen, clock = Screen(), Clock()
    progress = Progress(Terminal(screen), clock)
    clock.now += 2
    progress(1, 10**9)
    assert [line for line in CONTROL.sub("", screen.getvalue()).splitlines() if len(line) > 30] == []
    assert "0%" in screen.getvalue()


def test_nobody_looking_is_no_reason_to_stop() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock()
    with Progress(Terminal(Gone()), clock) as progress:
        for second in range(10):
            clock.now = 100.0 + second
            progress(second, 100)


# Reading a large index ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0.0, 60.0])
def test_a_large_index_is_a_line_that_goes_away(first: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, world = [f"model.layers.{n}.weight" for n in range(200)], 40
    chunks = [ChunkStorageMetadata(torch.Size([4 * rank, 0]), torch.Size([4, 5])) for rank in range(world)]
    size_of_all = torch.Size([4 * world, 5])
    tensors = {name: TensorStorageMetadata(TensorProperties(torch.float32), size_of_all, chunks) for name in names}
    places = {
        MetadataIndex(name, chunk.offsets, rank): _StorageInfo("__0_0.distcp", 0, 80)
        for name in names
        for rank, chunk in enumerate(chunks)
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, places), 4))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(80))
    monkeypatch.setattr(progress, "_FIRST", first)
    monkeypatch.setattr(progress, "_REDRAW", 0.0)
    seen = {}
    for is_terminal in (False, True):
        stream = Screen()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(stream, "reconfigure", lambda **settings: None, raising=False)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit) as stop:
            application()(["inspect", str(tmp_path)])
        assert stop.value.code == 0
        seen[stream.isatty()] = stream.getvalue()
    assert seen[False] == ""
    if first:
        assert seen[True] == ""
        return
    before, *lines, after = seen[True].split("\r\x1b[K")
    assert before == after == "" and len(lines) > 2
    total = f"{(tmp_path / '.metadata').stat().st_size / 1000:.0f} kB"
    assert {line.rpartition(" of ")[2] for line in lines} == {total}
    assert all(line.startswith("reading .metadata  ") for line in lines)


@pytest.mark.parametrize("columns", [80, 120, *(pytest.param(n, marks=pytest.mark.long) for n in (100, 160, 200))])
def test_a_difference_has_both_values_or_none(columns: int) -> None:
    run = CHECKPOINTS / "run" / "trainer" / "ckpt"
    text = on_terminal(columns, "diff", str(run / "checkpoint-2"), str(run / "checkpoint-4"), "--only", "model", code=1)
    (header,) = (line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.startswith("  tensor "))
    assert [title in header.split() for title in ("first", "A", "B")].count(True) in (0, 3), header


@pytest.mark.parametrize("is_terminal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_importing_transformers_is_said_on_a_terminal_and_nowhere_else(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_for_the_model: None
) -> None:
    """The process that is asked imports torch, which takes a second, and then this instead of transformers."""
    (tmp_path / "transformers.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(progress, "_FIRST", 0.3)
    stream = Screen()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(stream, "reconfigure", lambda **settings: None, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit) as stop:
        application()(["export", path_of("hf/llama"), str(tmp_path / "out"), "--json"])
    assert stop.value.code == 0
    if not is_terminal:
        assert "importing" not in stream.getvalue()
        return
    line = "importing transformers to check the tensors ..."
    before, *lines, after = stream.getvalue().split("\r\x1b[K")
    assert before == "" and set(lines) == {line} and line not in after
