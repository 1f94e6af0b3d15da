"""What the config says that the model is, compared with the tensors that would be written."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import CorruptError
from ckpttool.text import some

_PATIENCE = 600.0  # seconds; torch and transformers take five of a quiet machine
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "USE_TF": "0"}


@dataclass(frozen=True, slots=True)
class Expected:
    """The model of a config, as transformers makes it: `Expected("GPT2LMHeadModel", "5.23.0", {"wte.weight": ..})`.

    `files` are names and shapes as its files have them, `memory` as it has them in memory, tied ones included.
    """

    architecture: str
    transformers: str
    memory: Mapping[str, Ints]
    files: Mapping[str, Ints]
    tied: Mapping[str, str]
    prefix: str = ""
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


@dataclass(slots=True)
class Compared:
    """What differs: names, and for `misshapen` what was found and expected. `prefix` would go on or off every name
    (`+model.`, `-model.`), as transformers does by itself; `in_memory` when the names are not those of files."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, Ints, Ints]] = field(default_factory=list)
    prefix: str = ""
    in_memory: bool = False

    @property
    def differs(self) -> bool:
        """Whether the model could not be loaded as it is."""
        return bool(self.missing or self.unexpected or self.misshapen)


def expected(config: Mapping[str, Any]) -> Expected | str:
    """What transformers makes of a config; or why it makes nothing."""
    if "auto_map" in config:
        return "the config names code of its own, which is not run"
    if not config.get("architectures"):
        return "the config names no architecture"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    with tempfile.TemporaryDirectory(prefix="ckpttool-model-") as scratch:
        out = os.path.join(scratch, "model.json")
        # Alone with the config: what else lies there, a tokenizer or code, is not looked at.
        with open(os.path.join(scratch, "config.json"), "w", encoding="utf-8") as stream:
            json.dump(config, stream)
        said = _asked(scratch, out)
    if "why_not" in said:
        return str(said["why_not"])
    shapes = {key: {n: tuple(shape) for n, shape in said[key].items()} for key in ("memory", "files")}
    return Expected(
        said["architecture"], said["transformers"], shapes["memory"], shapes["files"], said["tied"], said["prefix"],
        said["missing"], said["unexpected"],
    )  # fmt: skip


def _asked(folder: str, out: str) -> dict[str, Any]:
    import subprocess

    command = [sys.executable, "-m", "ckpttool.operations.export.architecture_process", folder, out]
    try:
        # Ours is the interpreter and the module; of the config it sees a file.
        subprocess.run(  # noqa: S603
            command, check=False, timeout=_PATIENCE, env={**os.environ, **_OFFLINE},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with open(out, encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"why_not": f"transformers did not answer ({type(error).__name__})"}
    return found if isinstance(found, dict) else {}


def compare(found: Mapping[str, Ints], model: Expected) -> Compared:
    """The tensors that would be written, `{"lm_head.weight": (32, 8)}`, against the model of the config. Pure.

    A tied tensor may be there under each of its names. Names may be those in memory, which transformers loads too.
    """
    tries = [_compared(found, model.files, model, "")]
    if tries[0].differs:
        kept = {name: shape for name, shape in model.memory.items() if name not in model.tied}
        in_memory = _compared(found, kept, model, "")
        in_memory.in_memory = True
        tries.append(in_memory)
        if model.prefix:
            there = model.prefix + "."
            tries.append(_compared({there + name: shape for name, shape in found.items()}, model.files, model, "+"))
            off = {name.removeprefix(there): shape for name, shape in found.items()}
            tries.append(_compared(off, model.files, model, "-"))
            for one, sign in ((tries[-2], "+"), (tries[-1], "-")):
                one.prefix = sign + there
    return next((one for one in tries if not one.differs), tries[0])


def _compared(found: Mapping[str, Ints], wanted: Mapping[str, Ints], model: Expected, prefix: str) -> Compared:
    made = Compared(prefix=prefix)
    missing, unexpected = (_any(patterns) for patterns in (model.missing, model.unexpected))
    twins: dict[str, set[str]] = {}
    for name, kept in model.tied.items():
        twins.setdefault(kept, {kept}).add(name)
    for name, shape in wanted.items():
        if name in found:
            if found[name] != shape:
                made.misshapen.append((name, found[name], shape))
        elif not missing(name) and not any(twin in found for twin in twins.get(name, ())):
            made.missing.append(name)
    made.unexpected = [n for n in found if n not in wanted and n not in model.tied and not unexpected(n)]
    made.misshapen += [
        (n, found[n], model.memory[n]) for n in model.tied if n in found and found[n] != model.memory[n]
    ]  # fmt: skip
    return made


def _any(patterns: Sequence[str]) -> Any:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def refusal(compared: Compared, found: Mapping[str, Ints], model: Expected, where: str) -> CorruptError:
    """What is wrong, and what to type next. Pure."""
    said = []
    for what, names in (("missing", compared.missing), ("unexpected", compared.unexpected)):
        if names:
            said.append(f"{len(names)} {what}: {some(names)}")
    if compared.misshapen:
        name, have, want = compared.misshapen[0]
        more = f" and {len(compared.misshapen) - 1} more" if len(compared.misshapen) > 1 else ""
        said.append(f"`{name}`{more} of another shape: found {list(have)}, expected {list(want)}")
    return CorruptError(
        f"`{where}`: the tensors are not those of its `{model.architecture}`: {'; '.join(said)}",
        hint=_hint(compared, found, model),
        file=where, missing=compared.missing, unexpected=compared.unexpected,
        misshapen=[name for name, _, _ in compared.misshapen],
    )  # fmt: skip


def _hint(compared: Compared, found: Mapping[str, Ints], model: Expected) -> str:
    prefix = _prefix(found, model)
    if prefix:
        return f"every name begins with `{prefix}`: pass `--strip-prefix {prefix.rstrip('.')}`"
    if compared.missing and compared.unexpected:
        return "give them their names with `--rename OLD=NEW` or `--key-map`; `--no-strict` writes them as they are"
    if compared.unexpected:
        return f"leave them out with `--exclude {compared.unexpected[0]!r}`, or pass `--no-strict`"
    return "is the config this model's? `--no-strict` goes on all the same"


def _prefix(found: Mapping[str, Ints], model: Expected) -> str:
    """What stands before every name that is wanted, if it is the same for all."""
    wanted = max(model.files, key=len, default="")
    for name in found:
        prefix = name.removesuffix(wanted)
        if wanted and prefix != name and prefix.endswith("."):
            shorter = {n.removeprefix(prefix): shape for n, shape in found.items() if n.startswith(prefix)}
            return "" if _compared(shorter, model.files, model, "").missing else prefix
    return ""
