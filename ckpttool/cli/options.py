"""The commands' options: the classes that print `--help` in sections, and each option that several commands share."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

_PATHS = (
    "PATH",
    "SRC",
    "DST",
    "A",
    "B",
    "DIR",
    "FILE",
    "OTHER",
    "NAME",
    "FROM",
    "PATTERN",
    "[CKPT]",
)  # metavars
_COMPLETED = 1000  # names that a shell is given to choose from

Param = TypeVar("Param", bound="Argument | Option")

Sections = Mapping[str, Sequence[click.Parameter]]  # the parameters in each section of `--help`


class Argument(click.Argument):
    """A positional argument with a help text."""

    def __init__(self, name: str, *, help: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.help = help


class Option(click.Option):
    """An option, as `--help` shows it: `Option("--threads -j N", "Number of threads.")`, `GLOB...` if it is repeatable.

    Without a metavar it is a flag, `--no-card` sets `card` to False, and a pair of flags is None without either. The
    default is shown, but neither a flag's nor an empty one.
    """

    def __init__(self, usage: str, help: str, *, name: str | None = None, **settings: Any) -> None:
        given = settings
        flags = [word for word in usage.split() if word.startswith("-")]
        metavar = " ".join(usage.split()[len(flags) :])
        if metavar:
            settings |= {"metavar": metavar.removesuffix("..."), "multiple": metavar.endswith("...")}
        else:
            settings = {"is_flag": True, "default": None if "/" in usage else False, **settings}
        if usage[2:5] == "no-":
            name, settings = usage[5:], {"flag_value": False, "default": True, **given}
        shown = bool(metavar) and settings.get("default") != ""
        super().__init__([*flags, name] if name else flags, help=help, show_default=shown, **settings)


class Command(click.Command):
    """A command whose `--help` has titled sections and examples."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., None],
        sections: Sections,
        examples: Sequence[str],
        full_screen: bool = False,
    ) -> None:
        params = [param for section in sections.values() for param in section]
        super().__init__(name, callback=callback, help=inspect.cleandoc(callback.__doc__ or ""), params=params)
        self.sections = sections
        self.examples = examples
        self.full_screen = full_screen

    def invoke(self, context: click.Context) -> Any:
        from ckpttool.storage.stores import check_scheme

        # Before anything is read or run: some paths are used hours later.
        for param in self.params:
            if (param.metavar or "").removesuffix("...") in _PATHS and (value := context.params.get(param.name or "")):
                for path in value if isinstance(value, tuple) else (value,):
                    check_scheme(str(path))
        if self.full_screen or context.params.get("quiet") or not sys.stderr.isatty():
            return super().invoke(context)
        from ckpttool.cli.progress import activity_on_stderr

        with activity_on_stderr():
            return super().invoke(context)

    def format_arguments(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: the arguments are the first of the sections."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, params in self.sections.items():
            help_option = self.get_help_option(context) if title == "Output" else None
            with formatter.section(title):
                formatter.write_dl([_help_record(p, context) for p in (*params, help_option) if p is not None])

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{context.command_path} {example}\n")
        page = "docs/reference/cli.md#" + context.command_path.removeprefix("ckpttool ").replace(" ", "-")
        formatter.write_paragraph()
        formatter.write_text(f"More: {page}")


class Commands(click.Group):
    """A group whose `--help` lists the commands in the order in which they were given."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)


def _help_record(param: click.Parameter, context: click.Context) -> tuple[str, str]:
    if isinstance(param, Argument):
        return param.make_metavar(context), param.help or ""
    return param.get_help_record(context) or ("", "")


def command(
    name: str,
    *,
    arguments: Sequence[Argument] = (),
    sections: Sections,
    examples: Sequence[str] = (),
    full_screen: bool = False,
) -> Callable[[Callable[..., None]], Command]:
    """Make a function a command. Its docstring is the help; it is called with the values of the parameters by name.
    One that is `full_screen` shows what takes long by itself."""
    with_arguments = {"Arguments": arguments, **sections} if arguments else sections
    return lambda callback: Command(name, callback, with_arguments, examples, full_screen)


def reworded(param: Param, help: str) -> Param:
    """Return `param` with another help text."""
    param = copy.copy(param)
    param.help = help
    return param


# Completion -----------------------------------------------------------------------------------------------------------


def _formats(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ckpttool.formats import CHECKPOINTS

    return [row.target for row in CHECKPOINTS if row.create and row.target.startswith(incomplete)]


def _producers(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ckpttool.producers.writable import LAYOUTS

    return [layout.name for layout in LAYOUTS if layout.name.startswith(incomplete)]


def _parts(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ckpttool.catalogue.entries import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _dtypes(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ckpttool.catalogue.dtypes import DTYPES

    pattern, equals, begun = incomplete.rpartition("=")
    names = [name for name, dtype in DTYPES.items() if dtype.kind == "float" and name.startswith(begun)]
    return [f"{pattern}{equals}{name}" for name in names]


def _tensor_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names in the checkpoint that was typed before, if it is on this machine."""
    from ckpttool.errors import CkptError
    from ckpttool.operations.inspect import inspect
    from ckpttool.storage.stores import is_remote

    # Behind an option without its value, click has not told the arguments apart yet.
    path = context.params.get("path") or context.params.get("src") or next(iter(context.args), None)
    if not path or is_remote(path):
        return []
    try:
        names = [tensor.name for tensor in inspect(path).tensors if tensor.name.startswith(incomplete)]
    except CkptError:
        return []
    return names[:_COMPLETED]


# Arguments ------------------------------------------------------------------------------------------------------------

CHECKPOINT = Argument(
    "path",
    metavar="PATH",
    help="A checkpoint: a file, a directory, a run directory, or a quoted pattern of rank files.",
)
SOURCE = Argument("src", metavar="SRC", help="The checkpoint to read. It is never changed.")
DESTINATION = Argument(
    "dst", metavar="DST", help="The file or directory to write, with missing parents, or hf://org/name/path."
)

TENSOR = Argument(
    "tensor", metavar="TENSOR", help="Its dotted name, as `inspect --tensors` shows it.", shell_complete=_tensor_names
)

# What is read and written ---------------------------------------------------------------------------------------------

ONLY = Option(
    "--only PART...", "Include only this part (model, optimizer, ...; or its key). Repeatable.", shell_complete=_parts
)
DROP = Option("--drop PART...", "Exclude this part. Repeatable.", shell_complete=_parts)
TENSORS = Option(
    "--tensors GLOB...",
    "Include only tensors whose dotted name matches; `*` also matches dots, `re:` starts a regular expression. "
    "Repeatable.",
    shell_complete=_tensor_names,
)
EXCLUDE = Option("--exclude GLOB...", "Exclude matching tensors. Repeatable.", shell_complete=_tensor_names)
SHAPES = Option(
    "--shapes FROM",
    "Parameter names, shapes and order (a checkpoint or JSON); needed for FSDP1 flat parameters and "
    "integer-keyed optimizers.",
)
RENAME = Option("--rename OLD=NEW...", "Rename OLD to NEW; `*` captures; @FILE reads rules. Repeatable.")
STRIP_WRAPPERS = Option(
    "--strip-wrappers",
    "Remove `module.`, `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` from names.",
)
STRIP_PREFIX = Option("--strip-prefix P", "Remove this prefix from the names of the model.")
MAP = Option(
    "--map --key-map NAME",
    "Key map of the model's parameters: a name, a .json file, or none. Default: the one that fits.",
    name="key_map",
)
TO = Option(
    "--to FORMAT", "torch, dcp, safetensors or fsdp1. Default: from the suffix of DST.", shell_complete=_formats
)
PRODUCER = Option(
    "--producer NAME",
    "Write the directory layout that a framework resumes from: accelerate, torchtitan, verl or trainer. Replaces --to.",
    shell_complete=_producers,
)
DTYPE = Option(
    "--dtype [PATTERN=]DTYPE...",
    "Cast floating-point tensors: bfloat16, or 'norm*=float32' for some. Repeatable; the first match applies.",
    shell_complete=_dtypes,
)
MAX_SHARD_SIZE = Option("--max-shard-size SIZE", "Split into files of at most this size: 5GB, 512MiB, ...")

STEPS = Option(
    "--steps STEPS", "Of a run, all complete checkpoints (all) or some (500,1000 or 500..900), side by side."
)

# Execution and output -------------------------------------------------------------------------------------------------

OVERWRITE = Option("--overwrite", "Replace DST. The old one is kept until the new one is complete.")
RESUME = Option(
    "--resume",
    "Continue an interrupted run: check and keep what it has copied. If this run is interrupted, keep its copies.",
)
DRY_RUN = Option("--dry-run -n", "Show the plan and write nothing.")
CHECK = Option("--check", "Verify DST against SRC before committing it.")
# One argument of the library: a path, or False.
MANIFEST = Option(
    "--manifest FILE", "Also write a manifest of DST: SHA-256 of each file and tensor.", type=click.UNPROCESSED
)
NO_MANIFEST = Option(
    "--no-manifest", "Leave out the manifest that a DCP directory carries.", type=click.UNPROCESSED, default=None
)
NO_CACHE = Option("--no-cache", "Read all values, and keep no result.")
THREADS = Option("--threads -j N", "Number of threads that read and write.", type=click.IntRange(min=1))
MAX_MEMORY = Option("--max-memory SIZE", "Limit the buffers: 2GB, 512MiB, ...")
AS_JSON = Option("--json", "Print one JSON object, also for an error.", name="as_json")
REPLACE = Option("--overwrite", "Replace FILE.")
HTML = Option("--html FILE", "Also write the result as an HTML page that opens offline.")
QUIET = Option("--quiet -q", "Print bare values only, and no progress.")
VERBOSE = Option("--verbose -v", "Full output; tracebacks for internal errors.")

# The Hub.
PUBLIC = Option("--public", "Make a newly created repository public. Default: private.")
PRIVATE = Option("--private", "Refuse a repository that is public.")
TAG = Option("--tag NAME", "Tag of the commit, which must not exist yet.")
COMMIT_MESSAGE = Option("--commit-message TEXT", "Message of the commit.")
TOKEN = Option("--token TOKEN", "Token in place of HF_TOKEN, which other users of the machine cannot see.")
STAGE = Option("--stage DIR", "Directory with room for DST, which is written there before it is sent. Default: TMPDIR.")
NOT_SECRET = Option(
    "--not-secret NAME...", "Send the value NAME although it seems to have a key or a token in it. Repeatable."
)

SELECTION = (ONLY, DROP, TENSORS, EXCLUDE)
HUB = (PUBLIC, PRIVATE, TAG, COMMIT_MESSAGE, TOKEN, STAGE, NOT_SECRET)
WRITING = (CHECK, MANIFEST, OVERWRITE, DRY_RUN, THREADS, MAX_MEMORY)
PRINTING = (AS_JSON, QUIET, VERBOSE)
