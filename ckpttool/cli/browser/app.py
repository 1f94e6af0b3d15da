"""The screen: a line about the checkpoint, tabs, the names on the left, a view on the right, and a line of keys."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Input, Static

from ckpttool.analysis.browsing.pixels import pooled
from ckpttool.analysis.browsing.search import Query, parse
from ckpttool.analysis.browsing.session import Opened, Session
from ckpttool.analysis.differences.tensors import difference
from ckpttool.analysis.statistics.results import COLUMNS
from ckpttool.cli.browser import views
from ckpttool.cli.browser.dialogs import Choice, Page
from ckpttool.cli.browser.names import NameLine, Names
from ckpttool.cli.browser.views import TABS, Look
from ckpttool.cli.signals import Terminated, catch_signals
from ckpttool.errors import CkptError, UsageError
from ckpttool.reports.statistics import rows as statistics_rows
from ckpttool.reports.terminal import Terminal
from ckpttool.text import natural, plural, safe, size
from ckpttool.transfer.numbers import Array
from ckpttool.transfer.threads import Stopped, Work

_TICK = 0.25  # seconds between two looks at what was read
_RARELY = 10  # times the duration of making a list, until it is made again
_OWN_ORDER = "tree"
_KEYS = (
    ("/", "search: words and globs of names, dtype=bfloat16 rank=3 part=model file=... dim=2, rms>1 and nan>0"),
    ("s", "sort by a statistic; the largest first"),
    ("Esc", "back to the tree"),
    ("n N", "next and previous finding"),
    ("d", "mark a tensor; on another one: how the two differ, also of another step"),
    ("[ ]", "previous and next step of a run"),
    ("1-7 Tab", "the tabs"),
    ("y Y", "copy the name; copy the `ckpttool show` command"),
    ("e E", "write the list as CSV; the screen as SVG"),
    ("< >", "make the list narrower or wider"),
    ("Enter", "open a line; read a tensor that is not on this machine"),
    ("arrows h j k l", "move, open and close; PgUp, PgDn, g, G"),
    ("J K", "scroll the right side"),
    ("q Ctrl-C", "quit"),
)
_HINTS = "/ search  s sort  d diff  n finding  y copy  e export  ? keys  q quit"


class Tabs(Static):
    """The names of the tabs on one line."""

    def show(self, chosen: int, width: int) -> None:
        """Draw the names, with more room between them on a wider screen."""
        text = Text(no_wrap=True, overflow="crop")
        wide = sum(len(title) + 4 for title in TABS) <= width
        for i, title in enumerate(TABS):
            style = Style(reverse=True, bold=True) if i == chosen else Style()
            label = f"{i + 1} {title}"
            text.append(f" {label} " if wide else label, style)
            if not wide:
                text.append(" ")
        self.update(text)
        self._ends = [len(f" {i + 1} {title} ") if wide else len(f"{i + 1} {title} ") for i, title in enumerate(TABS)]

    def on_click(self, event: events.Click) -> None:
        """Choose the tab under the mouse."""
        x = event.x
        for i, length in enumerate(self._ends):
            if x < length:
                browser = self.app
                assert isinstance(browser, Browser)
                browser.action_tab(i)
                return
            x -= length


class Browser(App[CkptError | KeyboardInterrupt | None]):
    """The browser of one checkpoint, or of the steps of a run."""

    CSS = """
    #head { height: 1; text-style: bold; }
    #tabs { height: 1; }
    #names { width: 42%; min-width: 20; border-right: vkey $primary; scrollbar-size-vertical: 1; overflow-x: hidden; }
    #view { width: 1fr; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    #text { height: auto; }
    #search { height: 1; border: none; padding: 0; display: none; }
    #keys { height: 1; color: $text-muted; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", priority=True, show=False),
        Binding("slash", "search", "Search"),
        Binding("escape", "leave", "Back"),
        Binding("s", "sort", "Sort"),
        Binding("d", "diff", "Diff"),
        Binding("n", "finding(1)", "Finding"),
        Binding("N", "finding(-1)", "Previous finding"),
        Binding("left_square_bracket", "step(-1)", "Previous step"),
        Binding("right_square_bracket", "step(1)", "Next step"),
        Binding("y", "copy", "Copy"),
        Binding("Y", "copy(True)", "Copy command"),
        Binding("e", "export_csv", "CSV"),
        Binding("E", "export_svg", "SVG"),
        Binding("question_mark", "keys", "Keys"),
        Binding("J", "scroll(1)", "Down"),
        Binding("K", "scroll(-1)", "Up"),
        Binding("less_than_sign", "narrow(-4)", "Narrower"),
        Binding("greater_than_sign", "narrow(4)", "Wider"),
        Binding("tab", "tab_by(1)", "Next tab", priority=True),
        Binding("shift+tab", "tab_by(-1)", "Previous tab", priority=True),
        *(Binding(str(i + 1), f"tab({i})", title, show=False) for i, title in enumerate(TABS)),
    ]

    def __init__(self, path: str, shapes: str | None = None) -> None:
        # With the colours of the terminal itself, NO_COLOR is heeded to the end: others would become shades of grey.
        super().__init__(ansi_color="NO_COLOR" in os.environ)
        if self.no_color:
            self.theme = "ansi-dark"
        self.session = Session(path, shapes)
        self.opened: Opened | None = None
        self.tab = 0
        self.sorting = _OWN_ORDER
        self.searched = ""
        self.message = ""
        self._message_line: NameLine | None = None
        self._query: Query | None = None
        self._seen: tuple[object, int] = (None, 0)
        self._pictured: tuple[object, ...] = ()
        self._picture: Array | str | None = None
        self._reading = Work()
        self._list_again = 0.0
        self._takes_signals = False

    @classmethod
    def show(cls, path: str, shapes: str | None) -> None:
        """Run until it is left. Raises what cannot be opened."""
        browser = cls(path, shapes)
        browser._takes_signals = True
        try:
            error = browser.run()
        finally:
            catch_signals()
            browser._reading.stopped.set()
            browser.session.close()
        if error is not None:
            raise error

    def _take_signals(self) -> None:
        """End between two messages, when nothing is being drawn, and not in the middle of one."""
        loop = asyncio.get_running_loop()
        for number, stop in (
            (signal.SIGINT, KeyboardInterrupt),
            (signal.SIGTERM, Terminated),
            (signal.SIGHUP, Terminated),
        ):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.exit, stop())

    # The screen -------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        yield Static(id="head")
        yield Tabs(id="tabs")
        with Horizontal():
            yield Names()
            with VerticalScroll(id="view", can_focus=False):
                yield Static(id="text")
        yield Input(id="search", placeholder="names, dtype=bfloat16, rms>1 and nan>0", select_on_focus=False)
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Draw the empty screen first, and open then."""
        if self._takes_signals:
            self._take_signals()
        self.query_one(Names).focus()
        self._draw()
        self.call_after_refresh(self._open)
        self.set_interval(_TICK, self._tick)

    def on_resize(self) -> None:
        """Draw what depends on the size."""
        self.call_after_refresh(self._draw)

    @work(thread=True)
    def _open(self) -> None:
        try:
            opened = self.session.open()
        except CkptError as error:
            if self.is_running:
                self.call_from_thread(self.exit, error)
            return
        self._from_thread(partial(self._show, opened))
        self._describe(opened)

    def _describe(self, opened: Opened) -> None:
        """Find out what a checkpoint is in a line, which of very many tensors takes longer than their tree."""
        if "headline" not in vars(opened):
            _ = opened.headline
            self._from_thread(self._draw)

    def _from_thread(self, call: Callable[[], object]) -> None:
        if self.is_running:
            self.call_from_thread(self._if_shown, call)

    def _if_shown(self, call: Callable[[], object]) -> None:
        """Call what draws, unless the screen is being left."""
        if self.query(Names):
            call()

    def _show(self, opened: Opened) -> None:
        names = self.query_one(Names)
        line = names.line
        was = self.opened.tensors[line.tensor].name if self.opened and line and line.tensor is not None else None
        self.opened = opened
        self._list()
        if was is not None and was in opened.numbers:
            names.select(opened.numbers[was])
        self._draw()
        # After the tree, which would come later beside it.
        self.call_after_refresh(self._read, opened)

    def _read(self, opened: Opened) -> None:
        if opened is self.opened and not opened.survey.finished:
            opened.survey.start()

    def _tick(self) -> None:
        """Show what was read since the last look."""
        if self.opened is None or not self.query(Names):
            return
        survey = self.opened.survey
        if self._seen == (survey, survey.version):
            return
        self._seen = survey, survey.version
        names = self.query_one(Names)
        is_by_value = (self._query is not None and self._query.holds is not None) or self.sorting in COLUMNS
        if not names.is_tree and is_by_value and (time.monotonic() > self._list_again or survey.finished):
            began = time.monotonic()
            self._list()
            # A list of very many takes a while, in which no key is heard.
            self._list_again = time.monotonic() + _RARELY * (time.monotonic() - began)
        names.refresh()
        self._draw()

    def _draw(self) -> None:
        self.query_one(Tabs).show(self.tab, self.size.width)
        self.query_one("#head", Static).update(self._head())
        hints = Text(self.message or _HINTS, no_wrap=True, overflow="ellipsis")
        self.query_one("#keys", Static).update(hints)
        self._draw_view()

    def _head(self) -> Text:
        if self.opened is None:
            return Text(f"{safe(self.session.path)}  opening ...", no_wrap=True, overflow="ellipsis")
        survey = self.opened.survey
        right = ""
        if not survey.finished and survey.rows and survey.is_local:
            right = f" {100 * survey.done // len(survey.rows)}% read"
        if survey.findings:
            right = f" {plural(len(survey.findings), 'finding')}{right}"
        room = max(0, self.size.width - cell_len(right))
        steps = [str(step.path) for step in self.session.steps]
        where = ""
        if self.opened.path in steps:
            where = f"  step {steps.index(self.opened.path) + 1} of {len(steps)} [ ]"
        left = f"{safe(self.opened.path)}{where}  {vars(self.opened).get('headline', '')}"
        if cell_len(left) > room:
            left = left[: max(0, room - 1)] + "…"
        return Text(set_cell_size(left, room) + right, no_wrap=True)

    def look(self) -> Look | None:
        """Return what is selected."""
        if self.opened is None:
            return None
        names, view = self.query_one(Names), self.query_one("#view")
        line = names.line
        tensor, node = (line.tensor, line.node) if line is not None else (None, None)
        width, height = max(10, view.size.width - 2), max(3, view.size.height)
        return Look(self.opened, tensor, node, width, height, not self.no_color)

    def _draw_view(self) -> None:
        look = self.look()
        if look is None:
            return
        text = self._heat_map(look) if TABS[self.tab] == "Heat map" else views.VIEWS[TABS[self.tab]](look)
        self.query_one("#text", Static).update(text)

    def _heat_map(self, look: Look) -> Text:
        """Return the picture of a tensor, which is read when it is looked at."""
        why_not = views.no_picture(look)
        if why_not:
            return Text(why_not, Style(dim=True))
        with_colour = not self.no_color
        if look.entry is None:
            return views.heat_map_of_several(look)
        height, width = views.picture_size(look, with_colour)
        key = (look.opened.path, look.tensor, height, width)
        if key != self._pictured:
            self._pictured, self._picture = key, None
            self._reading.stopped.set()
            self._reading = Work()
            self._read_picture(look, height, width, key, self._reading)
        if isinstance(self._picture, str):
            return Text(self._picture, Style(dim=True))
        return views.heat_map(look, self._picture, with_colour)

    @work(thread=True, group="picture")
    def _read_picture(self, look: Look, height: int, width: int, key: tuple[object, ...], reading: Work) -> None:
        entry = look.entry
        assert entry is not None
        found: Array | str | None
        try:
            found = pooled(entry, look.opened.source, height, width, reading)
        except Stopped:
            return
        except CkptError as error:
            found = error.message
        if key == self._pictured and not reading.stopped.is_set():
            self._picture = found
            self._from_thread(self._draw)

    def on_names_selected(self) -> None:
        """Show the line with the cursor, and read what is on the screen next."""
        if self.opened is not None:
            self.opened.survey.want(self.query_one(Names).on_screen())
            if self.query_one(Names).line != self._message_line:
                self.message = ""
            self._draw()

    def on_names_demanded(self) -> None:
        """Read a tensor wherever it is."""
        look = self.look()
        if look is not None and look.tensor is not None:
            look.opened.survey.want([look.tensor], demanded=True)

    # Keys -------------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Show a message in place of the keys, until the cursor moves."""
        self.message, self._message_line = f" {safe(text)}", self.query_one(Names).line
        self._draw()

    def action_tab(self, tab: int) -> None:
        """Show a tab."""
        self.tab = tab
        self.query_one("#view").scroll_home(animate=False)
        self._draw()

    def action_tab_by(self, by: int) -> None:
        """Show the next tab."""
        if len(self.screen_stack) == 1:
            self.action_tab((self.tab + by) % len(TABS))

    def action_scroll(self, by: int) -> None:
        """Scroll the view."""
        self.query_one("#view").scroll_relative(y=by * 5, animate=False)

    def action_narrow(self, by: int) -> None:
        """Make the list wider."""
        names = self.query_one(Names)
        names.styles.width = max(20, min(names.size.width + 1 + by, self.size.width - 20))
        self.call_after_refresh(self._draw)

    def action_keys(self) -> None:
        """Show the keys."""
        table = Table.grid(padding=(0, 1))
        for key, what in _KEYS:
            table.add_row(Text(key, Style(bold=True)), what)
        self.push_screen(Page("keys", table))

    def action_search(self) -> None:
        """Ask what to search."""
        field = self.query_one("#search", Input)
        field.display = True
        field.value = self.searched
        field.cursor_position = len(field.value)
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while it is typed, as far as it is a search already."""
        if self.opened is not None and event.input.display:
            self._search(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the search."""
        if self._search(event.value):
            self._leave_search()

    def _search(self, text: str) -> bool:
        assert self.opened is not None
        try:
            query = parse(text, self.opened.catalogue) if text.strip() else None
        except UsageError as error:
            self.say(f"{error.message}; {error.hint}" if error.hint else error.message)
            return False
        self.searched, self._query = text.strip(), query
        self._list()
        return True

    def _leave_search(self) -> None:
        self.query_one("#search").display = False
        self.query_one(Names).focus()

    def action_leave(self) -> None:
        """Leave the search, then the list."""
        was_typing = self.query_one("#search").display
        self._leave_search()
        if was_typing or self.searched or self.sorting != _OWN_ORDER:
            line = self.query_one(Names).line
            self.searched, self._query, self.sorting = "", None, _OWN_ORDER
            self._list()
            if line is not None and line.tensor is not None:
                self.query_one(Names).select(line.tensor)
        self._draw()

    def _list(self) -> None:
        """List what is searched, in its order; the tree without either."""
        assert self.opened is not None
        names, opened = self.query_one(Names), self.opened
        if self._query is None and self.sorting == _OWN_ORDER:
            names.show_tree(opened)
            return
        names.opened = opened
        query, rows = self._query, opened.survey.rows
        found: list[tuple[int, float | None]] = []
        unread = 0
        by_value = self.sorting in COLUMNS
        for i, tensor in enumerate(opened.tensors):
            if query is not None and not query.matches(tensor):
                continue
            row = rows[i]
            if query is not None and query.holds is not None and (row is None or not query.holds(row)):
                unread += row is None
                continue
            found.append((i, row.values()[self.sorting] if by_value and row is not None else None))
        if by_value:
            found.sort(key=lambda item: -item[1] if item[1] is not None else float("inf"))
        elif self.sorting == "name":
            found.sort(key=lambda item: natural(opened.tensors[item[0]].name))
        elif self.sorting == "size":
            found.sort(key=lambda item: -opened.tensors[item[0]].nbytes)
        names.show_list(found, "nothing matches" + (f"; {unread:,} not read yet" if unread else ""))
        order = f", by {self.sorting}" if self.sorting != _OWN_ORDER else ""
        more = f"; {unread:,} not read yet" if unread else ""
        self.say(f"{plural(len(found), 'tensor')}{order}{more}; Esc: back to the tree")

    def action_sort(self) -> None:
        """Ask what to sort by."""
        if self.opened is not None:
            self.push_screen(Choice("sort by", [_OWN_ORDER, "name", "size", *COLUMNS], self.sorting), self._sort)

    def _sort(self, column: str | None) -> None:
        if column is not None:
            self.sorting = column
            self.query_one(Names).cursor = 0
            self._list()
            self.query_one(Names).action_go(0)

    def action_finding(self, by: int) -> None:
        """Move to the next finding."""
        if self.opened is None:
            return
        found = [finding for finding in self.opened.survey.findings if finding.names[0] in self.opened.numbers]
        if not found:
            self.say("nothing stands out" + ("" if self.opened.survey.finished else " so far"))
            return
        look = self.look()
        name = look.entry.name if look is not None and look.entry is not None else None
        here = next((i for i, finding in enumerate(found) if name in finding.names), -1 if by > 0 else 0)
        finding = found[(here + by) % len(found)]
        names = self.query_one(Names)
        if not names.is_tree:
            self.searched, self._query, self.sorting = "", None, _OWN_ORDER
            self._list()
        names.select(self.opened.numbers[finding.names[0]])
        self.say(f"{(here + by) % len(found) + 1} of {len(found)}: {finding.message}")

    def action_copy(self, command: bool = False) -> None:
        """Copy the name of the line, or a command that shows it."""
        look = self.look()
        if look is None or (look.entry is None and look.node is None):
            return
        text = look.entry.name if look.entry is not None else look.node.label if look.node is not None else ""
        if command:
            words = ["show", look.opened.path, text] if look.entry is not None else ["stats", look.opened.path]
            text = shlex.join(["ckpttool", *words])
        self.copy_to_clipboard(text)
        self.say(f"copied: {text}")

    def action_export_csv(self) -> None:
        """Write the statistics of what is listed."""
        look = self.look()
        if look is None:
            return
        lines = self.query_one(Names).lines
        chosen = [line.tensor for line in lines if line.tensor is not None] if not self.query_one(Names).is_tree else []
        numbers = chosen or look.members
        rows = [row for i in numbers if (row := look.opened.survey.rows[i]) is not None]
        text = io.StringIO()
        Terminal(text).rows(*statistics_rows(rows))
        path = _written("csv", text.getvalue())
        left = len(numbers) - len(rows)
        self.say(f"wrote {path}: {plural(len(rows), 'tensor')}" + (f"; {left:,} not read yet" if left else ""))

    def action_export_svg(self) -> None:
        """Write the screen as a picture."""
        self.say(f"wrote {_written('svg', self.export_screenshot(title='ckpttool browse'))}")

    def action_step(self, by: int) -> None:
        """Show the next step of a run."""
        if self.opened is None:
            return
        if len(self.session.steps) < 2:
            self.say("this is not a run of several steps")
            return
        self._open_step(self.opened, by)

    @work(thread=True, exclusive=True)
    def _open_step(self, opened: Opened, by: int) -> None:
        try:
            other = self.session.beside(opened, by)
        except CkptError as error:
            self._from_thread(partial(self.say, error.message))
            return
        if other is None:
            self._from_thread(partial(self.say, "there is no step after this one" if by > 0 else "this is the first"))
            return
        opened.survey.stop()
        self._from_thread(partial(self._show, other))
        self._describe(other)

    # Diff -------------------------------------------------------------------------------------------------------------

    def action_diff(self) -> None:
        """Mark a tensor, or compare the marked one with this one."""
        names, look = self.query_one(Names), self.look()
        if look is None or look.tensor is None:
            self.say("d marks a tensor: move to one")
            return
        here = (look.opened, look.tensor)
        if names.marked is None or names.marked == here:
            names.marked = None if names.marked == here else here
            names.refresh()
            self.say("marked: d on another tensor compares the two" if names.marked else "no longer marked")
            return
        self.say("comparing ...")
        self._compare(names.marked, here)
        names.marked = None
        names.refresh()

    @work(thread=True, exclusive=True, group="diff")
    def _compare(self, one: tuple[Opened, int], other: tuple[Opened, int]) -> None:
        (first, i), (second, j) = one, other
        a, b = first.tensors[i], second.tensors[j]
        try:
            found = difference(a, b, (first.source, second.source), (first.path, second.path))
        except CkptError as error:
            self._from_thread(partial(self.say, error.message))
            return
        titles = [safe(a.name if first is second else f"{first.path}: {a.name}") for _ in (0,)]
        titles.append(safe(b.name if first is second else f"{second.path}: {b.name}"))
        rows = first.survey.rows[i], second.survey.rows[j]
        text = views.difference(found, titles, a.shape, rows)
        self._from_thread(partial(self.push_screen, Page("diff", text)))


def _written(suffix: str, text: str) -> str:
    """Write a text to a new file in the current directory, and return its name."""
    n = 1
    while True:
        path = f"ckpttool-browse-{n}.{suffix}"
        if not os.path.lexists(path):
            break
        n += 1
    with open(path, "x", encoding="utf-8") as stream:
        stream.write(text)
    return f"{path}, {size(len(text))}"
