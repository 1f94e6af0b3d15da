"""The error family: each child is one way in which a file, a flag or the machine can be wrong, with its exit code.

An error names its subject (file, tensor, found, expected) in lower case without a final period; what to type next
goes into `hint`, which is printed on a line of its own.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

EXTRAS = {"torch": "torch", "textual": "browse", "obstore": "cloud"}  # by package, those that `require` is asked for
DONE = 0
DIFFERS = 1
SOME_FAILED = 10  # of the checkpoints of a batch
ALL_FAILED = 11
BUG = 70
INTERRUPTED = 130
TERMINATED = 143


# `https://user:password@host` and `https://token@host`, but not `hf://name@revision`.
_CREDENTIALS = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@:`'\"]*:[^\s/@`'\"]*@|(https?://)[^\s/@`'\"]+@", re.I)
_SIGNATURE = re.compile(r"(https?://[^\s?`'\"]+\?)[^\s`'\"]+", re.I)


# What an option is called as a parameter, where that is not its own name; and the parameters that are true or false.
_PARAMETERS = {"values": "check_values", "sharding": "sharded", "map": "key_map"}
SWITCHES = frozenset(
    [
        "check",
        "check_values",
        "content",
        "create_pr",
        "dry_run",
        "dtype_strict",
        "ignore_dtype",
        "new",
        "overwrite",
        "private",
        "public",
        "resume",
        "shared",
        "sharded",
        "spectral",
        "strip_wrappers",
        "yes",
    ]
)
_OPTION = re.compile(r"--(no-)?([a-z][a-z-]*)(?: ('[^'`]*'|(?:(?! --)[^`\n])*))?(?= --|$)")
_ONE = r"--[a-z][a-z-]*(?: (?:'[^'`]*'|(?:(?! --)[^`\n])*))?"
_OPTIONS = re.compile(rf"`({_ONE}(?: {_ONE})*)`")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def as_arguments(text: str) -> str:
    """Return a message or a hint with options of the command line as arguments in Python: `overwrite=True` for
    `--overwrite`. Whole command lines stay. Pure."""
    return _OPTIONS.sub(lambda quoted: f"`{', '.join(map(_as_argument, _OPTION.finditer(quoted[1])))}`", text)


def _as_argument(option: re.Match[str]) -> str:
    negated, name, value = option.groups()
    name = _PARAMETERS.get(name, name).replace("-", "_")
    if value is not None:
        is_literal = value.startswith("'") or (value.isalpha() and value.isupper()) or _NUMBER.fullmatch(value)
        return f"{name}={value}" if is_literal else f'{name}="{value}"'
    if negated:
        return f"{name}=False"
    return f"{name}=True" if name in SWITCHES else name


def without_credentials(text: str) -> str:
    """Return a text in which no address has a user name, a password or a signature: `https://...@host/x?...`. Pure."""
    text = _SIGNATURE.sub(r"\1...", text) if "?" in text else text
    return _CREDENTIALS.sub(r"\1\2...@", text) if "@" in text and _CREDENTIALS.search(text) else text


class CkptError(Exception):
    """Base class of all errors that a user can correct.

    `facts` holds what the message says in a form for machines (`--json`): `file`, `tensor`, `found`, `expected`, ...
    """

    exit_code: ClassVar[int] = BUG
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        self.message = without_credentials(message)
        super().__init__(self.message)
        self.hint = without_credentials(hint) if hint is not None else None
        self.facts: dict[str, Any] = {
            key: without_credentials(fact) if isinstance(fact, str) else fact for key, fact in facts.items()
        }

    def __str__(self) -> str:
        # The command line prints `message` and `hint` themselves, with its options.
        return as_arguments(f"{self.message}\nhint: {self.hint}" if self.hint else self.message)

    def names(self, place: str) -> bool:
        """Return whether the message names `place`, a path or a part of one, already."""
        return place in self.message

    def prefixed(self, prefix: str, **facts: Any) -> CkptError:
        """Return the same error with `prefix` and a colon before its message, and with those `facts` that it lacks."""
        return type(self)(f"{prefix}: {self.message}", hint=self.hint, **{**facts, **self.facts})

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes; the default would drop the keywords.
        return partial(type(self), hint=self.hint, **self.facts), (self.message,)


class UsageError(CkptError):
    """The flags or arguments do not fit together, or name something that is not there."""

    exit_code = 2
    kind = "usage"


class MissingPackageError(UsageError, ImportError):
    """A package is not installed, or cannot be imported."""

    kind = "missing package"


def require(package: str, purpose: str) -> None:
    """Raise MissingPackageError unless `package` is installed, e.g. `require("torch", "`--dtype`")`."""
    if find_spec(package) is None:
        extra = f"ckpttool[{EXTRAS[package]}]" if package in EXTRAS else package
        text = f"{purpose} needs {package}, which is not installed"
        raise MissingPackageError(text, hint=f"pip install '{extra}'", package=package)


def why_no_import(package: str, error: Exception) -> str:
    """Return in one line why `import package` raised `error`: a package that is there may fail by itself."""
    absent = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
    if absent and "." not in absent and find_spec(absent) is None:
        return f"{absent} is not installed" + (f", and {package} needs it" if absent != package else "")
    return f"{package} cannot be imported: {in_one_line(error)}"


def in_one_line(error: BaseException) -> str:
    """Return `ImportError: cannot import name 'x'`: the first line of the text that is not empty."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"


class ReadError(CkptError):
    """The source cannot be read: no such path, no permission, an unknown format."""

    exit_code = 3
    kind = "cannot read"


class DeniedError(ReadError):
    """A file may not be read by this user: nothing is known of what it holds."""


class CorruptError(CkptError):
    """The source contradicts itself: a hole, an overlap, a range outside its file, a wrong checksum."""

    exit_code = 4
    kind = "corrupt"


class LossError(CkptError):
    """The destination cannot hold an entry of the source, and no option excludes it."""

    exit_code = 5
    kind = "would lose"


class OverwriteError(CkptError):
    """The destination exists."""

    exit_code = 6
    kind = "would overwrite"


class StorageError(CkptError):
    """A local file cannot be written: no space, no permission, an I/O error."""

    exit_code = 7
    kind = "storage"


class RemoteError(CkptError):
    """A remote store refuses a request or cannot be reached."""

    exit_code = 8
    kind = "remote"
