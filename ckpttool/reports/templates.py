"""Renders the templates of HTML pages: everything is escaped, and what is invisible is made visible."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ckpttool.text import duration, plural, safe, size


def environment(package: str) -> Environment:
    """Return the environment of the templates in a package, `ckpttool.reports`."""
    templates = Environment(
        loader=PackageLoader(package, ""), autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    templates.filters |= {"duration": duration, "plural": plural, "size": size, "number": _number, "prose": _prose}
    return templates


def verbatim(text: str) -> Markup:
    """Return a text that is not to be escaped, as it is our own or has no markup."""
    return Markup(text)  # noqa: S704


def _printable(value: Any) -> Any:
    """Return a value as text without invisible signs; markup, which is made of such text, as it is."""
    return value if isinstance(value, Markup) else safe(str(value))


def _prose(sentence: Any) -> Markup:
    """Return a sentence with the names that stand in backticks as code."""
    pieces = str(sentence).split("`")
    if len(pieces) % 2 == 0:
        return escape(safe(str(sentence)))
    code = Markup("<code>{}</code>")
    return Markup().join(code.format(safe(piece)) if i % 2 else escape(safe(piece)) for i, piece in enumerate(pieces))


def _number(value: Any, digits: int = 9) -> str:
    """Return a number with `digits` digits if it is a float; a dash for None."""
    if value is None:
        return "–"
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
