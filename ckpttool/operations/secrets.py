"""Finds keys and tokens in what is about to be published, by patterns as precise as those of gitleaks and TruffleHog:
the prefix and the length that an issuer gives its tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpttool.catalogue.entries import Catalogue, dotted
from ckpttool.catalogue.values import CONTAINERS, children
from ckpttool.storage import workspace
from ckpttool.storage.stores import Location, Outgoing, locate

# A pattern begins with a literal, so that `re` finds candidates in large files fast; what must not come before it is
# looked for afterwards. The group `value` is the secret: a placeholder such as `hf_xxxx` is none.
_TOKENS = {
    "a private key": rb"-----BEGIN [A-Z0-9 ]{0,40}?PRIVATE KEY(?: BLOCK)?-----"
    rb"(?:[^-]|-(?!----)){0,400}?(?P<value>[A-Za-z0-9+/]{40})",
    "a private key of PuTTY": rb"PuTTY-User-Key-File-\d: (?P<value>[^#]{40})",
    "a private key of age": rb"AGE-SECRET-KEY-1(?P<value>[A-Z0-9]{58})",
    "a Hugging Face token": rb"hf_(?<![A-Za-z0-9_]hf_)(?:oauth_|jwt_)?(?P<value>[A-Za-z0-9]{34,})(?![A-Za-z0-9_])",
    "a Hugging Face organization token": rb"api_org_(?<![A-Za-z0-9_]api_org_)(?P<value>[A-Za-z0-9]{34})(?!\w)",
    # Of OpenAI, Anthropic, OpenRouter and others: at least one digit and letters of both cases tell it from a word.
    "an API key": rb"sk-(?<![A-Za-z0-9]sk-)(?=[\w-]*\d)(?=[\w-]*[A-Z])(?=[\w-]*[a-z])(?P<value>[A-Za-z0-9_-]{32,})",
    "a GitHub token": rb"gh[pousr]_(?<![A-Za-z0-9_]gh._)(?P<value>[A-Za-z0-9]{36,255})(?!\w)",
    "a fine-grained GitHub token": rb"github_pat_(?P<value>\w{36,255})",
    "a GitLab token": rb"glpat-(?P<value>[\w-]{20,})",
    "an AWS access key": rb"A(?:KIA|SIA|BIA|CCA)(?<![A-Za-z0-9/+]A...)(?P<value>[A-Z2-7]{16})(?![A-Za-z0-9/+])",
    "a Slack token": rb"xox[abeoprs]-(?=[0-9A-Za-z-]*\d)(?P<value>[0-9A-Za-z]{8,}-[0-9A-Za-z-]{8,})",
    "a Slack app token": rb"xapp-\d-(?P<value>[A-Z0-9]{8,}-\d+-[0-9a-f]{16,})",
    "a Google API key": rb"AIza(?<![\w-]AIza)(?P<value>[\w-]{35})(?![\w-])",
    "a Google OAuth secret": rb"GOCSPX-(?P<value>[\w-]{28})",
    "a Google access token": rb"ya29\.(?P<value>[\w-]{40,})",
    "a service account of Google": rb'"service_account"(?P<value>)',
    "a Stripe key": rb"[sr]k_live_(?P<value>[A-Za-z0-9]{16,})",
    "an npm token": rb"npm_(?<!\wnpm_)(?P<value>[A-Za-z0-9]{36})(?!\w)",
    "a PyPI token": rb"pypi-AgE(?P<value>[\w-]{50,})",
    "a Weights & Biases key": rb"wandb_v\d_(?P<value>\w{40,})",
    "a SendGrid key": rb"SG\.(?P<value>[\w-]{20,24}\.[\w-]{39,50})",
    "a DigitalOcean token": rb"do[opr]_v1_(?P<value>[a-f0-9]{64})",
    "a JSON web token": rb"eyJ(?<![\w-]eyJ)(?P<value>[\w-]{17,}\.eyJ[\w-]{17,}\.[\w-]{16,})",
    "an address with a password": rb"://(?P<user>[^\s/:@\"'<>{}$]{1,64}):(?P<value>[^\s/:@\"'<>{}$*]{6,})@[\w.-]+",
}
_COMPILED = {what: re.compile(pattern) for what, pattern in _TOKENS.items()}
# A secret without a prefix, by the name that it is assigned to: `AWS_SECRET_ACCESS_KEY=...`, `"wandb_api_key": "..."`.
_ASSIGNED = re.compile(
    rb"(?i)(?:secret_?(?:access_?)?key|api_?key|client_?secret|(?:auth|access|refresh|hf|hub|bearer)_?token|passw(?:or)?d)"
    rb"[\"'`]?[ \t]*(?:=>|[:=])[ \t]*[\"'`]?(?=[A-Za-z0-9+/_.=-]*\d)(?=[A-Za-z0-9+/_.=-]*[A-Za-z])"
    rb"(?P<value>[A-Za-z0-9+/_=-]{32,})(?![\w.(\[])"
)
_NETRC = re.compile(rb"(?m)(?:^|\")[ \t]*machine[ \t]+\S+\s+login[ \t]+\S+\s+password[ \t]+(?P<value>\S{6,})")
_UNPREFIXED = {"a secret": _ASSIGNED, "a password of .netrc": _NETRC}
# Without a literal to look for, these are searched for in files of people's size only, not in vocabularies.
_MAX_UNPREFIXED = 1 << 20
_MIN_ENTROPY = 2.5  # bits of a character; gitleaks has 2 to 3 for most
_PLACEHOLDER = re.compile(rb"EXAMPLE$|(?i:x{8}|your|placeholder|changeme|^password$|^passwd$|^secret$|^token$)")
_SHORT = 64  # bytes of a string; each mention of it is looked at
_BLOCK, _OVERLAP = 8 << 20, 8 << 10

_NAMES = re.compile(
    r"\.env.*|.*\.env|(.*[_.-])?credentials?([_.-].*)?|(.*[_-])?service[_-]?account.*|client[_-]?secrets?.*"
    r"|.*\.(pem|key|p12|pfx|jks|keystore|ppk|kdbx|asc)|id_(rsa|dsa|ecdsa|ed25519).*|[._]?netrc"
    r"|\.(npmrc|pypirc|pgpass|git-credentials|dockercfg|htpasswd|boto|s3cfg)|kubeconfig|stored_tokens"
    r"|(.*[_-])?(secrets?|passwords?|passwd|api[_-]?keys?)(\.\w+)?"
    r"|((.*[_-])?(hf|hub|huggingface|api|auth|access|refresh|wandb|github|slack|openai)[_-])?tokens?(\.(txt|json|ya?ml))?",
    re.I,
)


class Secret(NamedTuple):
    """What looks like a secret: `Secret("README.md", 3, "a GitHub token")`. The line of a name is 0. No message has the
    secret itself."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        if not self.line:
            return f"`{self.file}`: the name is that of {self.what}"
        return f"`{self.file}` line {self.line}: looks like {self.what}"


def in_text(text: bytes) -> tuple[int, str] | None:
    """Return the line and the kind of the first secret in a text, or None. Pure."""
    patterns = {**_COMPILED, **_UNPREFIXED} if len(text) <= _MAX_UNPREFIXED else _COMPILED
    for what, pattern in patterns.items():
        for match in pattern.finditer(text):
            if not match["value"] or _is_random(match["value"]):
                return text.count(b"\n", 0, match.start()) + 1, what
    return None


def _is_random(value: bytes) -> bool:
    n = len(value)
    entropy = -sum(count / n * math.log2(count / n) for count in Counter(value).values())
    return entropy >= min(_MIN_ENTROPY, math.log2(n) / 2) and _PLACEHOLDER.search(value) is None


def in_name(name: str) -> str | None:
    """Return what a file of this name holds by convention, or its name itself; None if that is not a secret."""
    found = in_text(name.encode("utf-8", "replace"))
    return found[1] if found is not None else "a secret" if _NAMES.fullmatch(name.rpartition("/")[2]) else None


def in_files(outgoing: Iterable[Outgoing], named: Sequence[str]) -> list[Secret]:
    """Return the secrets in files that would be published, at most one of each file. The names of the files `named` are
    looked at, too: those that a user selects.

    A file is written to a scratch directory, so that the very bytes are looked at that would be sent.
    """
    found = [Secret(name, 0, what) for name in named if (what := in_name(name)) is not None]
    with workspace.scratch_directory("ckpttool-plan-") as scratch:
        path = locate(scratch) / "file"
        for file in outgoing:
            assert file.write is not None
            file.write(path)
            if (one := _in_file(path)) is not None:
                found.append(Secret(file.name, *one))
            path.remove()
    return found


def _in_file(path: Location) -> tuple[int, str] | None:
    before, lines = b"", 0
    for block in path.blocks(_BLOCK):
        # UTF-16 is text with null bytes in between.
        text = before + block.replace(b"\0", b"")
        found = in_text(text)
        if found is not None:
            return found[0] + lines, found[1]
        lines += text.count(b"\n", 0, max(0, len(text) - _OVERLAP))
        before = text[-_OVERLAP:]
    return None


# Values of a checkpoint -----------------------------------------------------------------------------------------------


def in_catalogue(catalogue: Catalogue, besides: Collection[str] = ()) -> list[Secret]:
    """Return the secrets in names and in values that are not tensors, at most one of each entry; `file` is the name of
    that, without a secret in it. Entries named in `besides` are left out."""
    found: dict[str, Secret] = {}
    for batch in _batches(_texts(catalogue)):
        if in_text(b"\n".join(text for _, text in batch)) is None:
            continue
        for name, text in batch:
            if name not in {*found, *besides} and (one := in_text(text)) is not None:
                found[name] = Secret(_masked(name), 0, one[1])
    return [*found.values()]


def _masked(text: str) -> str:
    data = text.encode("utf-8", "replace")
    for pattern in (*_COMPILED.values(), *_UNPREFIXED.values()):
        data = pattern.sub(lambda match: match[0].replace(match["value"] or match[0], b"***"), data)
    return data.decode("utf-8", "replace")


def _texts(catalogue: Catalogue) -> Iterator[tuple[str, bytes]]:
    """Yield strings with the name of the entry that each is in, as in a file of JSON: a key tells what a value is."""
    seen: set[int] = set()
    remarks = catalogue.facts.get("metadata", {})
    for entry in catalogue.entries.values():
        yield entry.name, entry.name.encode("utf-8", "replace")
    values = [(entry.name, entry.value) for entry in catalogue.objects]
    values += [(dotted(path), container.attrs) for path, container in catalogue.containers.items() if container.attrs]
    for name, value in [*values, *remarks.items()]:
        todo = [(name, value)]
        while todo:
            key, node = todo.pop()
            # What is shared is looked at once, or a small file could ask for any amount of work.
            if not isinstance(node, (str, bytes, bytearray, *CONTAINERS)) or id(node) in seen:
                continue
            if isinstance(node, CONTAINERS) or len(node) > _SHORT:
                seen.add(id(node))
            if isinstance(node, CONTAINERS):
                for inner, child in children(node):
                    todo.append((inner if isinstance(inner, str) else key, child))
                    if not isinstance(inner, (str, int)) or isinstance(child, CONTAINERS):
                        todo.append((key, inner))
            else:
                data = node.encode("utf-8", "replace") if isinstance(node, str) else bytes(node).replace(b"\0", b"")
                yield name, b'"%s": "%s"' % (key.encode("utf-8", "replace"), data)


def _batches(texts: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield texts together that have as many bytes as are searched for everything."""
    batch: list[tuple[str, bytes]] = []
    nbytes = 0
    for name, text in texts:
        if batch and nbytes + len(text) > _MAX_UNPREFIXED:
            yield batch
            batch, nbytes = [], 0
        batch.append((name, text))
        nbytes += len(text) + 1
    if batch:
        yield batch
