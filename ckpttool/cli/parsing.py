"""Numbers and strings off the command line, without pydantic.

typer 0.29 builds a pydantic adapter for every option, whatever its type: 50 ms and 10 MB before the first byte of a
checkpoint is looked at, a quarter of what `inspect` takes. Ours are flags, strings, integers and lists of strings. A
typer that has no such function does as it always did.
"""

from __future__ import annotations

from typing import Any

import typer
from typer import core


class _Plain:
    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple else None
        if param.multiple:
            return list(value)
        return _integer(value, param, ctx) if param.type_descriptor.annotation is int else value


def _integer(value: Any, param: Any, ctx: Any) -> int:
    try:
        number = int(value)
    except ValueError:
        raise typer.BadParameter(f"`{value}` is not a whole number", ctx=ctx, param=param) from None
    if param.min is not None and number < param.min:
        raise typer.BadParameter(f"{number} is less than {param.min}", ctx=ctx, param=param)
    return number


def without_adapters() -> None:
    """Have typer use our adapter for the four types that our options have."""
    theirs: Any = getattr(core, "build_runtime_param", None)
    if theirs is None:
        return
    plain = _Plain()

    def build(wanted: Any) -> Any:
        return plain if wanted.annotation in (str, int, bool, list[str]) else theirs(wanted)

    core.build_runtime_param = build  # type: ignore[assignment, attr-defined, unused-ignore]
