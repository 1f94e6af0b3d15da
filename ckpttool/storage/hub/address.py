"""Addresses on the Hub: `hf://org/name[@revision][/path]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ckpttool.errors import UsageError

SCHEME = "hf://"
# A branch name with a slash is written `feature%2Fx`, but for those that the Hub makes itself.
_ADDRESS = re.compile(
    r"hf://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_MADE_BY_THE_HUB = re.compile(r"refs/(?:pr|convert)/[^/]+")
_KINDS = ("datasets/", "spaces/", "buckets/", "kernels/")


@dataclass(frozen=True, slots=True)
class Address:
    """`Address("org/name", "main", "step-100")`; `revision` is None when none was named."""

    repo: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        return f"{self.root}/{self.path}" if self.path else self.root

    @property
    def root(self) -> str:
        """The address of the repository at this revision, without the path in it."""
        if self.revision is None:
            return f"{SCHEME}{self.repo}"
        named = self.revision if _MADE_BY_THE_HUB.fullmatch(self.revision) else quote(self.revision, safe="")
        return f"{SCHEME}{self.repo}@{named}"

    @property
    def branch(self) -> str:
        """The revision that is meant."""
        return self.revision or "main"


def parse(text: str) -> Address:
    """An address taken apart. Raises UsageError for what is none. Pure."""
    rest = text.removeprefix(SCHEME)
    if rest.startswith(_KINDS):
        kind = rest.partition("/")[0]
        raise UsageError(
            f"`{text}`: {kind} are not read", hint="checkpoints are in model repositories: `hf://org/name`"
        )
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise UsageError(
            f"`{text}` is no address on the Hub", hint="write `hf://org/name`, `hf://org/name@revision/path/in/it`"
        )
    path = (found["path"] or "").strip("/")
    if any(part in (".", "..", "") for part in path.split("/")) and path:
        raise UsageError(
            f"`{text}`: no path in a repository looks like `{path}`", hint="write `hf://org/name/path/in/it`"
        )
    revision = unquote(found["revision"]) if found["revision"] else None
    return Address(found["repo"], revision, path)
