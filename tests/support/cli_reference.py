"""The generated half of docs/reference/cli.md: what each command takes, as the program itself describes it.

<!-- ckpttool convert -->      begins what is generated
<!-- end -->                   ends it; what stands outside is written by hand and is left alone
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

GENERATED = re.compile(r"^<!-- (ckpttool(?: [\w-]+)*) -->\n(.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)


def commands() -> dict[str, Any]:
    """`{"ckpttool": ..., "ckpttool inspect": ..., ...}`."""
    from typer.main import get_command

    from ckpttool.cli.app import application

    return dict(_below("ckpttool", get_command(application())))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    if isinstance(command, TyperGroup):
        context = command.context_class(command)
        for word in command.list_commands(context):
            yield from _below(f"{name} {word}", command.get_command(context, word))


def options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def generated(page: str) -> str:
    """`page` with what the commands say now between its marks."""
    every = commands()
    return GENERATED.sub(lambda m: f"<!-- {m[1]} -->\n{_section(m[1], every[m[1]])}<!-- end -->\n", page)


def by_hand(page: str) -> str:
    """`page` without what is generated."""
    return GENERATED.sub("", page)


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [
        name,
        *([] if command.allow_interspersed_args else ["[OPTIONS]"]),
        *(p.metavar for p in arguments),
        *(["[OPTIONS]"] if command.allow_interspersed_args else []),
        *(["COMMAND"] if isinstance(command, TyperGroup) else []),
    ]
    lines = ["", f"    {' '.join(filter(None, words))}", "", _prose(command.help), ""]
    if arguments or options(command):
        lines += [f"| {'argument or option' if arguments else 'option'} | what it does |", "|---|---|"]
    lines += [f"| `{p.metavar}` | {_help(p)} |" for p in arguments]
    lines += [f"| {_spelt(p)} | {_help(p)} |" for p in options(command)]
    return "\n".join([*lines, "", ""])


def _spelt(option: Any) -> str:
    value = "" if option.is_flag or not option.metavar else f" {option.metavar}"
    return ", ".join(f"`{spelling}{value}`" for spelling in option.opts or option.secondary_opts)


def _help(param: Any) -> str:
    return " ".join([_prose(param.help or ""), *(f"{note}." for note in _notes(param))])


def _notes(param: Any) -> Iterator[str]:
    if isinstance(param.default, (int, str)) and not isinstance(param.default, bool):
        yield f"Default: {param.default}"
    if param.least is not None:
        yield f"At least {param.least}"


def _prose(text: str) -> str:
    """Help as Markdown: outside of backticks its signs stand for themselves."""
    pieces = text.strip().split("`")
    pieces[::2] = [re.sub(r"([*_|<>\[\]])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(piece.replace("|", r"\|") if i % 2 else piece for i, piece in enumerate(pieces))
