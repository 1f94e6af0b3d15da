"""What the config says that the model is, compared with the tensors that would be written."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.protocols import activity
from ckpttool.errors import CorruptError, ReadError
from ckpttool.storage import workspace
from ckpttool.storage.stores import local_path
from ckpttool.text import literal, some

_TIMEOUT = 600.0  # seconds; torch and transformers take five of a quiet machine
_POLL = 0.1
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "USE_TF": "0"}


@dataclass(frozen=True, slots=True)
class Expected:
    """The model of a config, as its library makes it:
    `Expected("GPT2LMHeadModel", "transformers 5.23.0", {"wte.weight": ..})`.

    `files` are names and shapes as its files have them, `memory` as it has them in memory, tied ones included;
    `float32` are names of both, of tensors that stay float32 in a model of the dtype asked for. `rules` are those of
    the key map from `memory` to `files`, if there is one.
    """

    architecture: str
    library: str
    memory: Mapping[str, Ints]
    files: Mapping[str, Ints]
    tied: Mapping[str, str]
    prefix: str = ""
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    float32: Sequence[str] = ()
    rules: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class ArchitectureDifferences:
    """What differs: names, and for `misshapen` what was found and expected. `prefix` goes on or off the names before
    they are those of the model (`+model.`, `-model.`); `in_memory` when these are not those of files."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, Ints, Ints]] = field(default_factory=list)
    prefix: str = ""
    in_memory: bool = False

    @property
    def differs(self) -> bool:
        """Whether the model could not be loaded as it is."""
        return bool(self.missing or self.unexpected or self.misshapen)


def expected(config: Mapping[str, Any], dtype: str | None = None) -> Expected | str:
    """Return the tensors that transformers or diffusers expects for a config and a dtype, or why that is unknown."""
    import subprocess

    if "auto_map" in config:
        return "the config names code of its own, which is not run"
    library = "diffusers" if "_class_name" in config else "transformers"
    if library == "transformers" and not config.get("architectures"):
        return "the config names no architecture"
    if find_spec(library) is None:
        return f"{library} is not installed"
    with workspace.scratch_directory("ckpttool-model-") as scratch:
        # A directory with the config alone, without a tokenizer or code.
        (local_path(scratch) / "config.json").put(json.dumps(config).encode())
        out = local_path(scratch) / "model.json"
        command = [sys.executable, "-m", "ckpttool.models.architecture_process", scratch, out, dtype or ""]
        try:
            _run(command)
            answer = json.loads(out.read())
        except (OSError, ValueError, subprocess.SubprocessError, ReadError) as error:
            return f"{library} did not answer ({type(error).__name__})"
    if "why_not" in answer:
        return str(answer["why_not"])
    shapes = {key: {n: tuple(shape) for n, shape in answer[key].items()} for key in ("memory", "files")}
    return Expected(**{**answer, **shapes})


def _run(command: Sequence[str]) -> None:
    """Run a process to its end, and say meanwhile what it does: importing torch and transformers takes seconds."""
    import subprocess

    watcher, end = activity.get(), time.monotonic() + _TIMEOUT
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # Only interpreter and module are arguments; the config is a file.
    process = subprocess.Popen(command, env={**os.environ, **_OFFLINE}, **streams)  # noqa: S603
    try:
        while process.poll() is None:
            watcher("importing transformers to check the tensors", 0, 0)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(command, _TIMEOUT)
    finally:
        process.kill()
        process.wait()
        watcher("", 0, 0)


def compare(shapes: Mapping[str, Ints], model: Expected) -> ArchitectureDifferences:
    """Compare the tensors to write, `{"lm_head.weight": (32, 8)}`, with the model of the config. Pure.

    A tied tensor may have any of its names. Names may be those in memory, and have a prefix too many or too few.
    """
    in_memory = _in_memory(model)
    first = None
    for prefix in ("", *_prefixes(shapes, model)):
        respelt = {with_prefix(name, prefix): shape for name, shape in shapes.items()}
        if len(respelt) < len(shapes):
            continue
        for names in (model.files, in_memory):
            found = _compared(respelt, names, model, prefix, in_memory=names is in_memory)
            if not found.differs:
                return found
            first = first or found
    assert first is not None
    return first


def _in_memory(model: Expected) -> dict[str, Ints]:
    return {name: shape for name, shape in model.memory.items() if name not in model.tied}


def with_prefix(name: str, change: str) -> str:
    """Return a name with the prefix of `+model.` before it, or without that of `-model.`. Pure."""
    return change[1:] + name if change[:1] == "+" else name.removeprefix(change[1:])


def _prefixes(shapes: Mapping[str, Ints], model: Expected) -> Iterator[str]:
    if model.prefix:
        yield from (f"+{model.prefix}.", f"-{model.prefix}.")
    if prefix := _before_names(shapes, model):
        yield f"-{prefix}"


def _compared(
    shapes: Mapping[str, Ints], names: Mapping[str, Ints], model: Expected, prefix: str = "", *, in_memory: bool = False
) -> ArchitectureDifferences:
    result = ArchitectureDifferences(prefix=prefix, in_memory=in_memory)
    missing, unexpected = (_any(patterns) for patterns in (model.missing, model.unexpected))
    twins: dict[str, set[str]] = {}
    for name, kept in model.tied.items():
        twins.setdefault(kept, {kept}).add(name)
    for name, shape in names.items():
        if name in shapes:
            if shapes[name] != shape:
                result.misshapen.append((name, shapes[name], shape))
        elif not missing(name) and not any(twin in shapes for twin in twins.get(name, ())):
            result.missing.append(name)
    result.unexpected = [n for n in shapes if n not in names and n not in model.tied and not unexpected(n)]
    known = {**model.files, **model.memory}
    result.misshapen += [
        (name, shapes[name], known[kept])
        for name, kept in model.tied.items()
        if name in shapes and kept in known and shapes[name] != known[kept]
    ]
    return result


def _any(patterns: Sequence[str]) -> Any:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def refusal(compared: ArchitectureDifferences, shapes: Mapping[str, Ints], model: Expected, where: str) -> CorruptError:
    """Return the error for tensors that are not those of the config. Pure."""
    kinds = (("missing", compared.missing), ("unexpected", compared.unexpected))
    lines = [f"{len(names)} {what}: {some(names)}" for what, names in kinds if names]
    if compared.misshapen:
        name, actual_, expected_ = compared.misshapen[0]
        more = f" and {len(compared.misshapen) - 1} more" if len(compared.misshapen) > 1 else ""
        lines.append(f"`{name}`{more} of another shape: found {list(actual_)}, expected {list(expected_)}")
    return CorruptError(
        f"`{where}`: the tensors are not those of its `{model.architecture}`: {'; '.join(lines)}",
        hint=_hint(compared, shapes, model),
        file=where,
        missing=compared.missing,
        unexpected=compared.unexpected,
        misshapen=[name for name, _, _ in compared.misshapen],
    )


def _hint(compared: ArchitectureDifferences, shapes: Mapping[str, Ints], model: Expected) -> str:
    prefix = _before_names(shapes, model)
    if prefix:
        return f"names begin with `{prefix}`: pass `--strip-prefix {prefix.rstrip('.')}`"
    alike = Counter(shapes.values()) & Counter(model.files.values())
    if compared.missing and compared.unexpected and 2 * sum(alike.values()) < len(model.files):
        return "is the config this model's? Most tensors have other shapes; `--assets` names the directory of its model"
    if compared.missing and compared.unexpected:
        return "give them their names with `--rename OLD=NEW` or `--map`; `--no-strict` writes them as they are"
    if compared.unexpected:
        return f"leave them out with `--exclude {literal(compared.unexpected[0])}`, or pass `--no-strict`"
    return "is the config this model's? `--no-strict` exports anyway"


def _before_names(shapes: Mapping[str, Ints], model: Expected) -> str:
    """Return the prefix that all names of the model have among those of `shapes`, if they have one."""
    for names in (model.files, _in_memory(model)):
        # A tied tensor may have another name.
        longest = max((name for name in names if name not in model.tied.values()), key=len, default="")
        for name in shapes:
            prefix = name.removesuffix(longest)
            if longest and prefix != name and prefix.endswith("."):
                shorter = {n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
                if not _compared(shorter, names, model).missing:
                    return prefix
    return ""
