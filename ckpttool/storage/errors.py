"""Turns an `OSError` into an error of `ckpttool.errors`: a full disk, a missing file, no permission."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from ckpttool.errors import CkptError, DeniedError, OverwriteError, ReadError, StorageError
from ckpttool.text import near_names

FREE_SPACE = "free some space, or write somewhere else"
_SMALLER = "the file system or `ulimit -f` allows no larger file: write somewhere else, or several files"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name
_HUB = re.compile(r"hf(?::/{0,3}|//)([^/].*)", re.IGNORECASE)
_BUCKET = re.compile(r"(s3|gs|az|gcs|abfss?|r2):/?([^/].*)", re.IGNORECASE)  # with one slash, or none
_HUB_PAGE = re.compile(
    r"(?:https?://|git@)?(?:www\.)?(?:huggingface\.co|hf\.co)[/:](?:models/)?([^/?#]+/[^/?#]+)"
    r"(?:/(?:blob|resolve|tree|raw)/([^/?#]+)(/[^?#]+)?|/[^?#]*)?(?:[?#].*)?",
    re.I,
)
_BUCKET_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(buckets/[^/?#]+/[^/?#]+)(?:/(?:resolve|tree)(/[^?#]+))?/?(?:[?#].*)?",
    re.I,
)
_NEWEST = ("latest", "last", "newest", "final", "latest.pt", "last.pt")
_DRIVE = re.compile(r"([A-Za-z]):[\\/](.*)")  # of Windows
_TEXTS = re.compile(r"\.(txt|md|rst|log|csv|tsv|html|py|sh|png|jpg|pdf|svg|out|err)$")  # which are not meant
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")  # of a shell
_MAX_NAMES = 2000  # names of a directory that are compared with one that is not there
_SHORT = 3  # a shorter name is like too many


def from_os_error(error: OSError, path: str, doing: str) -> CkptError:
    """Return the error of `ckpttool.errors` for an OSError. `doing` is `read` or `write`."""
    reason = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"`{path}`: {reason}", hint=FREE_SPACE, file=path)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and (above := _file_above(path)) is not None:
        reason = f"`{above}` is a file, not a directory"
    if error.errno == errno.ENOENT and os.path.islink(path):
        reason = f"a link to `{os.readlink(path)}`, which does not exist"
    if error.errno == errno.EFBIG:
        return StorageError(f"`{path}`: cannot {doing}: {reason}", hint=_SMALLER, file=path)
    if doing == "write" or error.errno == errno.EIO:
        return StorageError(f"`{path}`: cannot {doing}: {reason}", file=path)
    hint = _meant(path) if error.errno == errno.ENOENT else None
    if error.errno in (errno.EACCES, errno.EPERM):
        return DeniedError(f"`{path}`: cannot read: {reason}", file=path)
    return ReadError(f"`{path}`: cannot read: {reason}", hint=hint, file=path)


def not_expanded(path: str) -> str | None:
    """Return the hint for a path with a `~` or a variable that no shell has expanded; None if there is such a
    directory."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    if expanded == path or os.path.lexists(path.partition("/")[0]):
        return None
    what = _VARIABLE.search(path) or ["~"]
    return f"no shell has expanded the `{what[0]}`: write `{expanded}`"


def of_windows(path: str) -> str | None:
    """Return the hint for a path of Windows, such as `D:\\runs`; None for any other."""
    if (drive := _DRIVE.fullmatch(path)) is None:
        return None
    rest = drive[2].replace("\\", "/")
    return f"drives of Windows are elsewhere here: in WSL, it is `/mnt/{drive[1].lower()}/{rest}`"


def hub_address(path: str) -> str | None:
    """Return `hf://org/name` for a path `org/name` of which there is nothing on this machine; None for any other."""
    is_one = _REPOSITORY.fullmatch(path) and not os.path.lexists(path.partition("/")[0])
    return f"hf://{path}" if is_one else None


def address_of_page(page: str) -> str | None:
    """Return the address of what a page of the Hub is about: `hf://org/name@main/file`; None for any other text."""
    if bucket := _BUCKET_PAGE.fullmatch(page):
        return f"hf://{bucket[1]}{(bucket[2] or '').rstrip('/')}"
    found = _HUB_PAGE.fullmatch(page)
    if found is None:
        return None
    revision = f"@{found[2]}" if found[2] and (found[2] != "main" or found[3]) else ""
    return f"hf://{found[1].removesuffix('.git')}{revision}{(found[3] or '').rstrip('/')}"


def _meant(path: str) -> str | None:
    """Return the hint for a path of this machine at which there is nothing."""
    if address := address_of_page(path):
        return f"write `{address}`"
    if hint := not_expanded(path):
        return hint
    if remote := _HUB.fullmatch(path):
        return f"write `hf://{remote[1]}`"
    if bucket := _BUCKET.fullmatch(path):
        return f"write `{bucket[1].lower()}://{bucket[2]}`"
    if os.path.exists(slashed := path.replace("\\", "/")) and slashed != path:
        return f"did you mean `{slashed}`?"
    if hint := of_windows(path):
        return hint
    if os.path.basename(path) in _NEWEST and os.path.isdir(above := os.path.dirname(path)):
        return f"`{above}` alone stands for the newest checkpoint in it"
    near = [f"`{one}`" for one in _near(path) or _below(path)]
    if address := hub_address(path):
        if not near:
            return f"if it is a repository of the Hub, write `{address}`"
        near[-1] += f", or on the Hub `{address}`"
    return f"did you mean {', '.join(near)}?" if near else None


def _near(path: str) -> list[str]:
    """Return paths that are there and like one that is not: another name in place of its first that is not there."""
    parts = Path(path).parts
    known = next((n for n in range(len(parts)) if not os.path.lexists(Path(*parts[: n + 1]))), None)
    if known is None or len(parts[known]) < _SHORT:
        return []
    with suppress(OSError), os.scandir(Path(*parts[:known])) as entries:
        names = [entry.name for entry in islice(entries, _MAX_NAMES) if not entry.name.startswith(".")]
        typed = Path(parts[known]).suffix
        names = [name for name in names if Path(name).suffix in (typed, "") or not _TEXTS.search(name)]
        near = [Path(*parts[:known], name, *parts[known + 1 :]) for name in near_names(parts[known], sorted(names))]
        return [str(one) for one in near if one.exists()]
    return []


def _below(path: str) -> list[str]:
    """Return the end of a relative path that is there: of who is in a directory and types its name, too."""
    parts = Path(path).parts
    ends = [os.path.join(*parts[n:]) for n in range(1, len(parts))] if not os.path.isabs(path) else []
    # The last part alone may be another one: there is a `step-1000` in each run.
    return [end for end in ends if os.path.exists(end) and (len(Path(end).parts) > 1 or parts[0] == _here())][:1]


def _here() -> str:
    with suppress(OSError):
        return os.path.basename(os.getcwd())
    return ""


def _file_above(path: str) -> str | None:
    above = [*([Path(path)] if path.endswith("/") else []), *Path(path).parents]
    return next((str(one) for one in above if one.is_file()), None)


@contextmanager
def os_errors(path: str, doing: str) -> Iterator[None]:
    """Raise an OSError of the block as the error of `ckpttool.errors`. `doing` is `read` or `write`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, path, doing) from None


def written_meanwhile(address: str) -> OverwriteError:
    """Return the error for a destination that somebody else has written."""
    message = f"`{address}` exists: another run has written it in the meantime"
    return OverwriteError(message, hint="pass `--overwrite` to replace it", file=address)
