"""The command line: the commands, `--version` and shell completion."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ckpttool.cli.completion import VARIABLE
from ckpttool.cli.error_messages import exit_code_of
from ckpttool.cli.options import InstallCompletion, ShowCompletion, Version
from ckpttool.cli.parsing import CommandGroup, app, command, register_shells
from ckpttool.errors import INTERRUPTED, TERMINATED

_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 1 << 20  # `mallopt`: blocks from so many bytes on are mapped, one by one
_MAX_WIDTH = 160  # columns of `--help`, on a terminal that has them
_OPTIONAL = ("--install-completion", "--show-completion")

# In the order of `--help`, with their lines there, of at most 60 characters. A command's module is imported when the
# command is run.
COMMANDS = {
    "inspect": "Show what a checkpoint contains, without its weights.",
    "show": "Show one tensor: shards, values, mean, norm, NaN.",
    "stats": "Compute statistics of every tensor, layer and moment.",
    "browse": "Browse a checkpoint in the terminal.",
    "report": "Write statistics, shards and findings as one HTML file.",
    "diff": "Compare two checkpoints of any format and world size.",
    "check": "Check a model against a released one: names, shapes, ties.",
    "match": "Derive a key map from a checkpoint to a released model.",
    "verify": "Check that a checkpoint is intact: checksums and ranges.",
    "repair": "Write a repaired copy, with lossless fixes only.",
    "convert": "Convert to another format, bit for bit.",
    "export": "Export the model for transformers, vLLM and the Hub.",
    "reshard": "Reshard for another number of ranks or another mesh.",
    "batch": "Convert, export or verify every checkpoint of a run.",
    "prune": "Remove old checkpoints of a run, or parts of them.",
    "clean": "List or remove what failed runs left in a directory.",
    "samples": "Write small real checkpoints to try the commands on.",
    "formats": "List the formats that can be read and written.",
    "verify-resume": "Check that training resumes exactly from a checkpoint.",
}


class Application(CommandGroup):
    """The group of all commands. It imports the one that is run, and ends in an exit code whatever happens."""

    def list_commands(self, context: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        function = name.replace("-", "_")
        found = getattr(import_module(f"ckpttool.cli.{function}"), function)
        return found if isinstance(found, CommandGroup) else command(name, found)

    def format_commands(self, context: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        # The shell may be left out, which an option of typer cannot.
        is_left_out = words[:1] and words[0] in _OPTIONAL and (len(words) == 1 or words[1].startswith("-"))
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        return super().parse_args(context, [f"{words[0]}=", *words[1:]] if is_left_out else words)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        if VARIABLE in os.environ:
            register_shells()
            return super().main([], "ckpttool")
        words = list(sys.argv[1:] if args is None else args)
        sys.exit(exit_code_of(self, words))


def _ckpttool(
    *, version: Version = False, install_completion: InstallCompletion = None, show_completion: ShowCompletion = None
) -> None:
    """Inspect, convert, reshard, compare, verify and export PyTorch training checkpoints, bit for bit."""


def application() -> Any:
    """Return the command line."""
    return app(
        name="ckpttool",
        cls=Application,
        callback=_ckpttool,
        epilog="`ckpttool COMMAND --help` shows a command's options and examples.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _MAX_WIDTH},
    )


def collect_rarely() -> None:
    """Run the garbage collector rarely. Nearly everything that a command allocates is needed until it ends, and
    looking through it again and again takes a sixth of a short command."""
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)


def calculate_on_one_thread() -> None:
    """Let numpy start no threads of BLAS: each spins for 0.1 s, and next to nothing is calculated with them."""
    # Their own where they matter: the scripts of people inherit the environment.
    if not {"verify-resume", "--spectral"} & {*sys.argv[1:]}:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def return_large_blocks() -> None:
    """Let malloc return the blocks that stores have sent as soon as they are used. In its heaps they would take a third
    more than there is of them at a time."""
    if sys.platform == "linux" and any("://" in word for word in sys.argv[1:]):
        import ctypes

        with suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)


def _exit_at_once(code: object) -> None:
    """Exit without ending the interpreter, in which threads of obstore would abort the process if they came late."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    """Run the command of `sys.argv`, and end in its exit code."""
    collect_rarely()
    calculate_on_one_thread()
    return_large_blocks()
    silent = False
    if "WORLD_SIZE" in os.environ:
        # Only under torchrun: it imports much of what writes.
        from ckpttool.transfer import processes

        silent = processes.is_silent()
    if silent:
        # All processes divide the work of these; one does the rest, and one prints.
        divided = {"reshard", "trial", "batch", *(["convert"] if processes.is_of_torchrun() else [])}
        if not divided & {*sys.argv[1:]}:
            return
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        application()()
    except SystemExit as stop:
        if stop.code in (INTERRUPTED, TERMINATED):
            # A thread may be in the middle of importing torch, whose own threads abort an ordinary exit.
            sys.stderr.flush()
            os._exit(stop.code)
        if silent and stop.code:
            processes.wait_to_be_ended()
        if "obstore" in sys.modules:
            _exit_at_once(stop.code)
        raise
