"""Addresses on the Hub: `hf://org/name[@revision][/path]` and `hf://buckets/org/name[/path]`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ckpttool.errors import UsageError

SCHEME = "hf://"
BUCKETS = f"{SCHEME}buckets/"
# A slash in a branch name is written `%2F`, except in the references that the Hub itself creates.
_ADDRESS = re.compile(
    r"hf://(?:models/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_LONGEST = 255  # bytes of a revision
_HUB_REFERENCE = re.compile(r"refs/(?:pr|convert)/[^/]+")
# What git refuses in the name of a reference. A revision is also a path in the cache.
_NO_REVISION = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^/|/$|(^|/)\.|\.$|\.lock(/|$)|^-")
_KINDS = ("datasets/", "spaces/", "kernels/")


@dataclass(frozen=True, slots=True)
class Address:
    """An address: `Address("org/name", "main", "step-100")`; `revision` is None when the address has none."""

    repo: str
    revision: str | None = None
    path: str = ""
    is_bucket: bool = False

    def __str__(self) -> str:
        return f"{self.root}/{self.path}" if self.path else self.root

    @property
    def root(self) -> str:
        """The address of the repository at this revision, or of the bucket, without the path."""
        if self.is_bucket:
            return f"{BUCKETS}{self.repo}"
        if self.revision is None:
            return f"{SCHEME}{self.repo}"
        revision = self.revision if _HUB_REFERENCE.fullmatch(self.revision) else quote(self.revision, safe="")
        return f"{SCHEME}{self.repo}@{revision}"

    @property
    def branch(self) -> str:
        """The revision, `main` by default."""
        return self.revision or "main"


def parse(text: str) -> Address:
    """Return the parsed address. Raises UsageError if `text` is not one. Pure."""
    rest = text.removeprefix(SCHEME)
    if rest.startswith(_KINDS):
        kind = rest.partition("/")[0]
        hint = "use a model repository or a bucket: `hf://org/name`, `hf://buckets/org/name`"
        raise UsageError(f"`{text}`: {kind} are not supported", hint=hint)
    is_bucket = text.startswith(BUCKETS)
    match = _ADDRESS.fullmatch(text.replace(BUCKETS, SCHEME, 1) if is_bucket else text)
    if match is None:
        hint = "write `hf://org/name`, `hf://org/name@revision/path` or `hf://buckets/org/name/path`"
        raise UsageError(f"`{text}` is not an address on the Hub", hint=hint)
    if is_bucket and match["revision"]:
        raise UsageError(f"`{text}`: a bucket has no revisions", hint=f"write `{BUCKETS}{match['repo']}`")
    path = (match["path"] or "").strip("/")
    if any(part in (".", "..", "") for part in path.split("/")) and path:
        raise UsageError(f"`{text}`: `{path}` is not a path in a repository", hint="write `hf://org/name/path`")
    revision = unquote(match["revision"]) if match["revision"] else None
    if revision is not None and (_NO_REVISION.search(revision) or len(os.fsencode(revision)) > _LONGEST):
        raise UsageError(
            f"`{text}`: `{revision}` is not the name of a revision",
            hint="name a branch, a tag or a commit: `hf://org/name@main`",
        )
    return Address(match["repo"], revision, path, is_bucket)
