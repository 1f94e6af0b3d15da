"""What is asked over the screen: a statistic to sort by, the keys, a text to read."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option


class Choice(ModalScreen[str | None]):
    """A list of words, of which one is chosen."""

    CSS = """
    Choice { align: center middle; }
    Choice OptionList { width: 40; max-width: 100%; height: auto; max-height: 90%; border: round $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", show=False),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
    ]

    def __init__(self, title: str, words: list[str], chosen: str) -> None:
        super().__init__()
        self._title, self._words, self._chosen = title, words, chosen

    def compose(self) -> ComposeResult:
        """Return the list."""
        options = OptionList(*[Option(word, id=word) for word in self._words])
        options.border_title = self._title
        options.highlighted = self._words.index(self._chosen) if self._chosen in self._words else 0
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """End with the word."""
        self.dismiss(event.option_id)

    def action_down(self) -> None:
        """Move down."""
        self.query_one(OptionList).action_cursor_down()

    def action_up(self) -> None:
        """Move up."""
        self.query_one(OptionList).action_cursor_up()


class Page(ModalScreen[None]):
    """A text to read."""

    CSS = """
    Page { align: center middle; }
    Page VerticalScroll { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round $accent; padding: 0 1; }
    Page Static { height: auto; }
    """  # noqa: E501
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,question_mark,d", "dismiss(None)", show=False)]

    def __init__(self, title: str, text: Text | Table) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        """Return the text in a box."""
        scroll = VerticalScroll(Static(self._text))
        scroll.border_title = Text(self._title).plain.replace("[", r"\[")
        scroll.border_subtitle = "Esc closes"
        yield scroll
