"""The list on the left: a tree of names or a list of tensors, of which only the lines on the screen are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ckpttool.analysis.browsing.folding import Node
from ckpttool.analysis.browsing.session import Opened
from ckpttool.analysis.statistics.results import TensorStatistics
from ckpttool.reports.statistics import bars, number, spark
from ckpttool.text import count, safe

_SPARK = 10  # bars, at most
_UNKNOWN = "·"


class NameLine(NamedTuple):
    """A line of the list. In a list of tensors, `value` is the statistic it is sorted by."""

    depth: int
    node: Node | None
    tensor: int | None
    value: float | None = None


class Names(ScrollView, can_focus=True):
    """The names of a checkpoint."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "go(0)", "First", show=False),
        Binding("end,G", "go(-1)", "Last", show=False),
        Binding("right,l", "open_line", "Open", show=False),
        Binding("left,h", "close_line", "Close", show=False),
        Binding("enter,space", "enter", "Open or close", show=False),
    ]

    class Selected(Message):
        """Another line has the cursor."""

    class Demanded(Message):
        """Enter was pressed on a tensor."""

    def __init__(self) -> None:
        super().__init__(id="names")
        self.opened: Opened | None = None
        self.lines: list[NameLine] = []
        self.cursor = 0
        self.marked: tuple[Opened, int] | None = None
        self.is_tree = True
        self.empty = ""
        self._open: set[int] = set()
        self._bars: dict[Node, tuple[int, str]] = {}

    # What is listed ---------------------------------------------------------------------------------------------------

    def show_tree(self, opened: Opened) -> None:
        """Show the tree of a checkpoint. One that is shown for the first time has its parts open."""
        if opened is not self.opened:
            self.opened, self._open = opened, set()
            for root in opened.tree.roots[:1]:
                self._open.add(id(root))
        self.is_tree = True
        self._set([line for root in opened.tree.roots for line in self._below(root, 0)])

    def show_list(self, tensors: Sequence[tuple[int, float | None]], empty: str) -> None:
        """Show tensors by their numbers, each with the statistic it is sorted by."""
        self.is_tree, self.empty = False, empty
        self._set([NameLine(0, None, i, value) for i, value in tensors])

    def select(self, tensor: int) -> None:
        """Move the cursor to a tensor, and open what is above it."""
        assert self.opened is not None
        if self.is_tree:
            path = self.opened.tree.path_to(tensor)
            self._open |= {id(node) for node in path[:-1]}
            self.show_tree(self.opened)
        at = next((i for i, line in enumerate(self.lines) if line.tensor == tensor), None)
        if at is not None:
            self.action_go(at)

    @property
    def line(self) -> NameLine | None:
        """The line with the cursor."""
        return self.lines[self.cursor] if self.cursor < len(self.lines) else None

    def on_screen(self) -> list[int]:
        """Return the numbers of the tensors of the lines on the screen, that with the cursor first."""
        found: list[int] = []
        top = self.scroll_offset.y
        shown = self.lines[top : top + self.size.height]
        for line in ([self.line] if self.line is not None else []) + shown:
            if line.tensor is not None:
                found.append(line.tensor)
            elif line.node is not None and line.node.is_list:
                found += line.node.members[: 4 * _SPARK * 8]
        return list(dict.fromkeys(found))

    def _below(self, node: Node, depth: int) -> list[NameLine]:
        lines = [NameLine(depth, node, node.tensor)]
        if id(node) in self._open:
            for child in node.children:
                lines += self._below(child, depth + 1)
        return lines

    def _set(self, lines: list[NameLine]) -> None:
        self.lines = lines
        self.virtual_size = Size(self.size.width, len(lines))
        self.cursor = max(0, min(self.cursor, len(lines) - 1))
        self.refresh()
        self.post_message(self.Selected())

    # Keys and mouse ---------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the cursor by some lines."""
        self.action_go(max(0, self.cursor + by))

    def action_page(self, by: int) -> None:
        """Move the cursor by a screen."""
        self.action_move(by * max(1, self.size.height - 1))

    def action_go(self, to: int) -> None:
        """Move the cursor to a line, the last for -1."""
        last = len(self.lines) - 1
        self.cursor = max(0, last if to < 0 else min(to, last))
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)
        self.refresh()
        self.post_message(self.Selected())

    def action_enter(self) -> None:
        """Open or close the line; of a tensor, read its values."""
        node = self.line.node if self.line is not None else None
        if node is None or node.tensor is not None:
            self.post_message(self.Demanded())
        else:
            self._open ^= {id(node)}
            self._reopen()

    def action_open_line(self) -> None:
        """Open the line, or move to the first line below it."""
        node = self.line.node if self.line is not None else None
        if node is not None and node.tensor is None:
            if id(node) in self._open:
                self.action_move(1)
            else:
                self.action_enter()

    def action_close_line(self) -> None:
        """Close the line, or move to the line above it."""
        line = self.line
        if line is None or line.node is None:
            return
        if id(line.node) in self._open:
            self.action_enter()
            return
        above = (i for i in range(self.cursor, -1, -1) if self.lines[i].depth < line.depth)
        self.action_go(next(above, self.cursor))

    def _reopen(self) -> None:
        if self.opened is not None and self.is_tree:
            self.show_tree(self.opened)

    def on_click(self, event: events.Click) -> None:
        """Select the line, and open it at its second click."""
        at = event.y + self.scroll_offset.y
        if at >= len(self.lines):
            return
        was = self.cursor
        self.action_go(at)
        line = self.lines[at]
        on_marker = line.node is not None and event.x <= 2 * line.depth + 1
        if on_marker or at == was or event.chain > 1:
            self.action_enter()

    # Drawing ----------------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Return one line of the screen."""
        width, base = self.size.width, self.rich_style
        at = y + self.scroll_offset.y
        if at >= len(self.lines):
            text = self.empty if y == 1 and not self.lines and not self.is_tree else ""
            return Strip([Segment(set_cell_size(f" {text}", width), base)])
        line = self.lines[at]
        cursor = Style(reverse=True, bold=True) if self.has_focus else Style(bold=True, underline=True)
        style = base + (cursor if at == self.cursor else Style(bold=line.depth == 0 and line.node is not None))
        label, right, right_style = self._words(line)
        room = width - cell_len(right) - 1
        left = _fitted(label, room, keep_end=line.node is None)
        quiet = style if at == self.cursor else base + right_style
        return Strip([Segment(left + " ", style), Segment(right, quiet)]).adjust_cell_length(width, base)

    def _words(self, line: NameLine) -> tuple[str, str, Style]:
        """Return what a line says, what stands at its right, and how that looks."""
        assert self.opened is not None
        rows = self.opened.survey.rows
        tensor = line.tensor
        mark = "● " if self.marked == (self.opened, tensor) and tensor is not None else ""
        row = rows[tensor] if tensor is not None else None
        is_bad = row is not None and bool(row.statistics.nans or row.statistics.infs)
        style = Style(color="red") if is_bad else Style(color="cyan")
        if line.node is None:
            assert tensor is not None
            right = number(line.value) if line.value is not None else self._right(tensor, row)
            return f" {mark}{safe(self.opened.tensors[tensor].name)}", f"{right} ", style
        node = line.node
        sign = "  " if tensor is not None else "▾ " if id(node) in self._open else "▸ "
        label = f"{'  ' * line.depth}{sign}{mark}{safe(node.label)}"
        if tensor is not None:
            return label, f"{self._right(tensor, row)} ", style
        label += f" ×{node.times}" if node.times > 1 else ""
        if node.is_list:
            version, bars = self._bars.get(node, (-1, ""))
            if version != self.opened.survey.version:
                version, bars = self._bars[node] = self.opened.survey.version, _bars([rows[i] for i in node.members])
            return label, f"{bars} ", style
        return label, f"{count(len(node.members))} ", Style(dim=True)

    def _right(self, tensor: int, row: TensorStatistics | None) -> str:
        assert self.opened is not None
        if tensor in self.opened.survey.errors:
            return "unreadable"
        if row is None:
            return _UNKNOWN
        s = row.statistics
        if s.nans or s.infs:
            return "NaN" if s.nans else "inf"
        if s.numel == 1 and s.max is not None:
            return number(s.max)
        return values_of(row)


def values_of(row: TensorStatistics) -> str:
    """Return bars of a linear histogram of the central elements; where all are one number, that number."""
    if row.histogram is None or row.statistics.absmax is None:
        return ""
    return bars(row, _SPARK) or number(row.statistics.max)


def _bars(rows: Sequence[TensorStatistics | None]) -> str:
    """Return a bar for the rms of each tensor, or of several together."""
    step = -(-len(rows) // _SPARK)
    bars = []
    known = [None if row is None else row.statistics.rms or 0.0 for row in rows]
    top = max((value for value in known if value is not None), default=0.0)
    for i in range(0, len(rows), step):
        some = [value for value in known[i : i + step] if value is not None]
        bars.append(spark([max(some), top])[0] if some else _UNKNOWN)
    return "".join(bars)


def _fitted(text: str, room: int, *, keep_end: bool) -> str:
    """Return a text of so many cells; of a longer one the end or the beginning, with `…`."""
    if cell_len(text) <= room:
        return set_cell_size(text, max(0, room))
    if room < 2:
        return set_cell_size("", max(0, room))
    if not keep_end:
        return set_cell_size(set_cell_size(text, room - 1) + "…", room)
    end = text
    while cell_len(end) > room - 1:
        end = end[1:]
    return set_cell_size("…" + end, room)
