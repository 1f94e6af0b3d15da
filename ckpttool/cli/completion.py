"""Completion: what a shell is offered for an option's value, and the script that lets it ask."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress

from ckpttool.cli.parsing import Context, Exit
from ckpttool.cli.terminal import out
from ckpttool.errors import UsageError
from ckpttool.version import __version__

VARIABLE = "_CKPTTOOL_COMPLETE"  # in which a completion script asks
_COMPLETED = 1000  # names that a shell is given to choose from


def formats() -> list[str]:
    """Return the formats that can be written."""
    from ckpttool.formats import CHECKPOINTS

    return [row.target for row in CHECKPOINTS if row.create]


def producers() -> list[str]:
    """Return the frameworks whose layout can be written."""
    from ckpttool.producers.writable import LAYOUTS

    return [layout.name for layout in LAYOUTS]


def parts() -> list[str]:
    """Return the kinds of parts."""
    from ckpttool.catalogue.entries import KINDS

    return [*KINDS]


def dtypes(incomplete: str) -> list[str]:
    """Return the dtypes to cast to, behind the pattern that was typed."""
    from ckpttool.catalogue.dtypes import DTYPES

    pattern, equals, _ = incomplete.rpartition("=")
    return [f"{pattern}{equals}{name}" for name, dtype in DTYPES.items() if dtype.kind == "float"]


def tensor_names(context: Context, incomplete: str) -> list[str]:
    """Return the names in the checkpoint that was typed before, if it is on this machine."""
    from ckpttool.errors import CkptError
    from ckpttool.operations.inspect import inspect
    from ckpttool.storage.stores import is_remote

    # Behind an option without its value, the arguments are not told apart yet.
    path = context.params.get("path") or context.params.get("src") or next(iter(context.args), None)
    if not path or is_remote(path):
        return []
    try:
        names = [tensor.name for tensor in inspect(path).tensors if tensor.name.startswith(incomplete)]
    except CkptError:
        return []
    return names[:_COMPLETED]


def _script(context: Context, shell: str) -> tuple[str, str]:
    """Return the shell's name (`$SHELL` if `shell` is empty) and its script. Raises UsageError for other shells."""
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in ("bash", "zsh", "fish"):
        raise UsageError(f"there is no completion for the shell `{name}`", hint="name one: bash, zsh or fish")
    os.environ[VARIABLE] = f"source_{name}"
    with redirect_stdout(io.StringIO()) as script, suppress(SystemExit):
        context.find_root().command.main()
    del os.environ[VARIABLE]
    return name, script.getvalue()


def show(context: Context, shell: str | None) -> None:
    """Print the script."""
    if shell is not None:
        out().write(_script(context, shell)[1])
        raise Exit


def install(context: Context, shell: str | None) -> None:
    """Write the script, and let the shell read it when it starts."""
    if shell is None:
        return
    name, script = _script(context, shell)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    folder = os.path.join(config, "fish/completions" if name == "fish" else "ckpttool")
    path = os.path.join(folder, "ckpttool.fish" if name == "fish" else f"completion.{name}")
    os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(script)
    if name != "fish":  # fish reads its folder by itself
        startup, line = os.path.expanduser(f"~/.{name}rc"), f'source "{path}"\n'
        with open(startup, "a+", encoding="utf-8") as stream:
            stream.seek(0)
            if line not in stream.read():
                stream.write(line)
    out().line(f"wrote {path}; it is used by each new {name}")
    raise Exit


def print_version(wanted: bool) -> None:
    """Print the version."""
    if wanted:
        out().line(f"ckpttool {__version__}")
        raise Exit
