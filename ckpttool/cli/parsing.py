"""The classes of the command line: help in sections with examples, values of options, errors in ckpttool's words.

The only importer of typer, by its public names. Its newer releases have a click of their own and convert values by
pydantic, its older ones use click; values are converted here, which is the same with both and takes no time to import.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from ckpttool.cli.terminal import err
from ckpttool.cli.usage_errors import command_meant, missing, reworded
from ckpttool.errors import UsageError

Context = typer.Context
Exit = typer.Exit
# What typer's parser raises: the class has no public name, and is the base of one that has.
ParseError: type[Any] = typer.BadParameter.__bases__[0]

# Metavars of paths.
_PATHS = ("PATH", "SRC", "DST", "A", "B", "DIR", "FILE", "OTHER", "NAME", "FROM", "PATTERN", "[CKPT]", "RUN")
_NUMBERS = {int: "a whole number", float: "a number"}
_QUOTED = re.compile(r"(?<!\w)'[^']*'(?!\w)")
_UNBROKEN = "\xa0"  # a space at which no line is broken
_PRINTING = ("as_json", "quiet", "verbose")
_COMMAND = "COMMAND"  # begins the metavar of words that another command parses
_EXAMPLES = "\n\nExamples:\n"  # in the docstring of a command


def option(
    usage: str, section: str, help: str, *, least: int | None = None,
    complete: Callable[..., list[str]] | None = None, at_once: Callable[..., None] | None = None,
) -> Any:  # fmt: skip
    """Return an option as `--help` shows it: `option("--threads -j N", "Execution", "Number of threads.", least=1)`.

    Without a metavar it is a flag, `/--no-card` sets a flag that is on to False. `at_once` is called with the value
    whatever else is on the command line.
    """
    words = usage.split()
    flags = [f" {word}" if word[0] == "/" else word for word in words if word[0] in "-/"]
    return typer.Option(
        *flags, metavar=" ".join(words[len(flags) :]) or None, help=help, rich_help_panel=section, min=least,
        autocompletion=complete, callback=at_once, is_eager=at_once is not None,
    )  # fmt: skip


def _unbroken(quoted: re.Match[str]) -> str:
    return quoted[0].replace(" ", _UNBROKEN)


def argument(metavar: str, help: str, *, complete: Callable[..., list[str]] | None = None) -> Any:
    """Return a positional argument, as `--help` shows it."""
    return typer.Argument(metavar=metavar, help=help, rich_help_panel="Arguments", autocompletion=complete)


class Reworded(NamedTuple):
    """Another help text or section of an option: `Annotated[Only, Reworded("Which model, if there are two.")]`."""

    help: str = ""
    section: str = ""


def _value(self: Any, ctx: Any, value: Any) -> Any:
    """Return the value of a parameter: that of a word, or the default. Raises UsageError."""
    if not isinstance(value, (str, int, float, list, tuple)):  # None, or what click has for None
        value = () if self.nargs == -1 or getattr(self, "multiple", False) else None
    if isinstance(value, str):
        value = _converted(value, self, ctx)
    if value is None and self.required:
        raise missing(_shown(self), self, ctx)
    if self.callback is not None and not ctx.resilient_parsing:
        value = self.callback(ctx, self, value)
    return value


def _converted(word: str, param: Any, context: Any) -> Any:
    kind = param.hint
    while get_origin(kind) in (Annotated, Union, UnionType, list):
        kind = get_args(kind)[0]
    choices = get_args(kind)
    try:
        value: Any = kind(word) if kind in _NUMBERS else word
    except ValueError:
        wrong = f"`{word}` is not {_NUMBERS[kind]}"
    else:
        if (param.least is None or value >= param.least) and (not choices or value in choices):
            return value
        named = ", ".join(f"`{choice}`" for choice in choices)
        wrong = f"`{word}` is not one of {named}" if choices else f"{value} is less than {param.least}"
    hint = f"`{context.command_path} --help` shows what it takes"
    raise UsageError(f"invalid value for {_shown(param)}: {wrong}", hint=hint)


def _shown(param: Any) -> str:
    names = [param.metavar or param.name] if isinstance(param, Argument) else param.opts
    return " / ".join(f"`{name}`" for name in names)


class Argument(TyperArgument):
    """A positional argument, shown by its metavar as it is."""

    hint: Any
    least: int | None
    process_value = _value

    def get_usage_pieces(self, context: Any) -> list[str]:
        return [self.metavar or self.name]

    def get_help_record(self, context: Any) -> tuple[str, str]:
        return self.metavar or self.name, self.help or ""


class Option(TyperOption):
    """An option, shown with its default if that is neither a flag's nor empty, and with its least value."""

    hint: Any
    least: int | None
    process_value = _value

    def get_help_record(self, context: Any) -> tuple[str, str]:
        names = " / ".join(", ".join(sorted(flags, key=len)) for flags in (self.opts, self.secondary_opts) if flags)
        notes = [
            *([f"default: {self.default}"] if self.metavar and self.default else []),
            *([f"x>={self.least}"] if self.least is not None else []),
            *(["required"] if self.required else []),
        ]
        note = f"  [{'; '.join(notes)}]" if notes else ""
        return f"{names} {self.metavar}" if self.metavar else names, f"{self.help}{note}"


def _adopt_all(command: TyperCommand | TyperGroup) -> None:
    """Make the parameters that typer has made of a function's signature those of this module."""
    given = inspect.signature(command.callback, eval_str=True).parameters if command.callback is not None else {}
    for param in command.params:
        _adopt(param, given[param.name].annotation)


def _adopt(param: Any, hint: Any = bool) -> Any:
    if type(param) not in (TyperOption, TyperArgument):
        return param  # which is adopted already, or `--help` of an older release
    param.__class__ = Option if isinstance(param, TyperOption) else Argument
    param.hint, param.least = hint, None
    for note in getattr(hint, "__metadata__", ()):
        param.help = note.help or param.help  # which an older release loses with a newer click
        if isinstance(note, Reworded):
            param.rich_help_panel = note.section or param.rich_help_panel
        else:
            param.least = note.min
    return param


class Command(TyperCommand):
    """A command whose `--help` has titled sections, and the examples of the function's docstring."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.help, _, examples = (self.help or "").partition(_EXAMPLES)
        self.examples = inspect.cleandoc(examples).splitlines()
        _adopt_all(self)
        if any((param.metavar or "").startswith(_COMMAND) for param in self.params):
            self.allow_interspersed_args = False

    def get_help_option(self, context: Any) -> Any:
        return _adopt(super().get_help_option(context))

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        context.meta["words"] = [*words]
        return _parsed(super().parse_args, context, words)

    def check_paths(self, context: Any) -> None:
        """Raise UsageError for a path that cannot be one, and take the signatures of addresses out of what is shown."""
        from ckpttool.storage.stores import check_scheme, path_text

        for param in self.params:
            value = context.params.get(param.name)
            if (param.metavar or "").removesuffix("...") in _PATHS and value is not None:
                paths = [*value] if isinstance(value, (list, tuple)) else [value]
                for path in paths:
                    if path == "":
                        raise UsageError(f"{_shown(param)} is empty", hint="is a variable of the shell not set?")
                    check_scheme(str(path))
                # Without the signature of an address, which is not shown.
                shown = [path_text(path) if isinstance(path, str) else path for path in paths]
                context.params[param.name] = shown if isinstance(value, (list, tuple)) else shown[0]

    def check_forms(self, context: Any) -> None:
        """Raise UsageError for two forms of the same answer: stdout has one."""
        forms = {"as_json": "--json", "as_csv": "--csv", "as_md": "--md"}
        if len(given := [f"`{flag}`" for name, flag in forms.items() if context.params.get(name)]) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other", hint="pass one of them")

    def invoke(self, context: Any) -> Any:
        # Before anything is read or run: some paths are used hours later.
        self.check_paths(context)
        self.check_forms(context)
        # A command without `--quiet` shows what takes long by itself.
        if context.params.get("quiet", True) or not sys.stderr.isatty():
            return super().invoke(context)
        from ckpttool.cli.progress import activity_on_stderr

        with activity_on_stderr():
            return super().invoke(context)

    def format_arguments(self, context: Any, formatter: Any) -> None:
        """Write nothing: the arguments are the first of the sections."""

    def format_options(self, context: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for param in self.params:
            sections.setdefault(getattr(param, "rich_help_panel", ""), []).append(param)
        sections.get("Output", []).append(self.get_help_option(context))
        for title, params in sections.items():
            records = [param.get_help_record(context) for param in params]
            with formatter.section(title):
                formatter.write_dl([(names, _QUOTED.sub(_unbroken, text)) for names, text in records])

    def get_help(self, context: Any) -> str:
        """Return the help, in which no line ends within an example in quotes."""
        return super().get_help(context).replace(_UNBROKEN, " ")

    def format_epilog(self, context: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        page = "reference/cli.md#" + context.command_path.removeprefix("ckpttool ").replace(" ", "-")
        write_address(formatter, page)


class CommandGroup(TyperGroup):
    """A group of commands, which says which command may be meant by another word. Without a word it shows its help."""

    page = "reference/cli.md"
    """The page of the documentation about it, below `docs/`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _adopt_all(self)

    def format_epilog(self, context: Any, formatter: Any) -> None:
        super().format_epilog(context, formatter)
        write_address(formatter, self.page)

    def get_help_option(self, context: Any) -> Any:
        return _adopt(super().get_help_option(context))

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        if not {*words} - {"--"} and not context.resilient_parsing:
            err().write(f"{context.get_help()}\n")
            raise Exit(UsageError.exit_code)
        return _parsed(super().parse_args, context, words)

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        names = self.list_commands(context)
        if words[0] not in names and not context.resilient_parsing:
            hint = command_meant(words[0], names, context.command_path)
            raise UsageError(f"there is no command `{words[0]}`", hint=hint)
        return super().resolve_command(context, words)


def write_address(formatter: Any, page: str) -> None:
    """Write the address of a page of the documentation, if the package that is installed has one."""
    from importlib.metadata import PackageNotFoundError, metadata  # takes longer than the help itself

    with suppress(PackageNotFoundError):
        pages = dict(url.split(", ", 1) for url in metadata("ckpttool").get_all("Project-URL") or ())
        if (overview := pages.get("Documentation", "")).endswith("README.md"):
            formatter.write_paragraph()
            formatter.write_text(f"More: {overview.removesuffix('README.md')}{page}")


def _parsed(parse: Callable[[Any, list[str]], list[str]], context: Any, words: list[str]) -> list[str]:
    try:
        return parse(context, [*words])
    except ParseError as error:
        raise reworded(error, context, words) from None


def app(**settings: Any) -> typer.Typer:
    """Return an application of typer that leaves help, errors and completion scripts to this module."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def command(name: str, function: Callable[..., None]) -> Any:
    """Return the command of a function, whose signature is its options and whose docstring is its help."""
    single = app()
    single.command(name, cls=Command)(function)
    return get_command(single)


def parsed(name: str, function: Callable[..., None], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command on a command line, by name, with any number of paths in place of its own: these
    are a tuple under the name of the first. Raises UsageError, or Exit after `--help`."""
    single = command(name, function)
    first, *rest = (param for param in single.params if isinstance(param, Argument))
    first.nargs, first.metavar = -1, "RUN..."
    single.params = [param for param in single.params if param not in rest]
    context = single.make_context(f"ckpttool {name}", [*words])
    single.check_paths(context)
    arguments: dict[str, Any] = context.params
    return arguments


def group(name: str, functions: Sequence[Callable[..., None]], *, help: str, page: str) -> Any:
    """Return a group of the commands of functions, which have their names; `page` is about it."""
    kind = type(CommandGroup.__name__, (CommandGroup,), {"page": page})
    several = app(name=name, cls=kind, help=help)
    for function in functions:
        several.command(function.__name__, cls=Command)(function)
    return get_command(several)


def library_arguments(arguments: Mapping[str, Any], *own: str) -> dict[str, Any]:
    """Return the arguments of a command that the library takes: not those on printing, nor its `own`."""
    given = {name: value for name, value in arguments.items() if name not in (*_PRINTING, *own)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def register_shells() -> None:
    """Let typer know how shells ask for completions, which it does for an application with its own options for them."""
    own = typer.Typer()
    own.command()(register_shells)
    get_command(own)
