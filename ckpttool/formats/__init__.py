"""The table of formats. Adding one is a folder in this one, and a row here."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttool.catalogue.protocols import Format
from ckpttool.errors import UsageError
from ckpttool.formats import (
    archives,
    dcp,
    deepspeed,
    documents,
    numpy_files,
    pickles,
    rankfiles,
    safetensors,
    torchsave,
)
from ckpttool.text import meant, near_names

# Rank files are torch.save files too, and recognised by more than that: they come first. Any file of safetensors may
# lie in a directory of DCP or DeepSpeed.
CHECKPOINTS: tuple[Format, ...] = (
    dcp.FORMAT,
    deepspeed.FORMAT,
    safetensors.FORMAT,
    rankfiles.FORMAT,
    torchsave.FORMAT,
)
"""The formats of whole checkpoints."""
_BESIDE = (numpy_files.MEMMAP, numpy_files.NPZ, numpy_files.NPY, documents.JSON, pickles.FORMAT, documents.YAML)
FORMATS = (*CHECKPOINTS, *_BESIDE, archives.FORMAT)
"""All formats: also those of files that lie beside a checkpoint, `component_only`."""
BINARY = tuple(row for row in FORMATS if row not in (documents.JSON, documents.YAML))
"""All but those of texts."""
DATA_FILE = re.compile(
    ".*(" + "|".join(re.escape(s) for row in CHECKPOINTS for s in row.suffixes + row.data_suffixes) + ")"
)
"""Names of files that hold tensors in one of the formats."""

NOT_WRITTEN = {
    ".gguf": "`convert_hf_to_gguf.py` of llama.cpp makes one of what `ckpttool export` writes",
    ".onnx": "`optimum-cli export onnx` makes one of what `ckpttool export` writes",
    ".distcp": "a DCP checkpoint is a directory: name that",
    **dict.fromkeys((".npz", ".npy", ".json", ".yaml", ".yml"), ""),
    **dict.fromkeys((".h5", ".hdf5", ".keras", ".msgpack", ".pb", ".tflite", ".tar", ".zip", ".gz"), ""),
}
"""Suffixes of files that are no checkpoints of a format, and what is written in place of such a file."""

_QUOTED_OPTIONS = re.compile(r"\s+--?[a-z]")
_SUFFIX = re.compile(r"\.[^./]+$")
_SUFFIXES = [suffix for row in CHECKPOINTS for suffix in row.suffixes]

OF_TRANSFORMERS = ("hf", "huggingface", "transformers", "vllm")
"""What the directory of a model is called that `export` writes."""


def named(name: str) -> Format:
    """Return the format called `name`. Raises UsageError with the nearest one."""
    for row in CHECKPOINTS:
        if name in (row.name, row.target):
            return row
    names = [row.target for row in CHECKPOINTS if row.create]
    if name.lower() in OF_TRANSFORMERS:
        raise UsageError(
            f"there is no format `{name}`", hint="`ckpttool export` writes a model for transformers and vLLM"
        )
    if name.lower() in ("fsdp", "fsdp2", "distcp", "sharded"):
        raise UsageError(f"there is no format `{name}`", hint="did you mean `dcp`, which FSDP2 loads?")
    if why := NOT_WRITTEN.get(f".{name.lower().lstrip('.')}"):
        raise UsageError(f"there is no format `{name}`", hint=why)
    meant_by_suffix = next((row.target for row in CHECKPOINTS if f".{name.lstrip('.')}" in row.suffixes), name)
    hint = meant(meant_by_suffix, names, f"the formats are {', '.join(f'`{n}`' for n in names)}")
    raise UsageError(f"there is no format `{name}`", hint=hint)


def by_suffix(path: str) -> Format | None:
    """Return the format that a name says unmistakably."""
    found = [row for row in CHECKPOINTS if row.suffixes and path.endswith(row.suffixes)]
    return found[0] if len(found) == 1 else None


def options(rows: Iterable[Format], comma: str = " or ") -> str:
    """Return how these formats are asked for: "`--to dcp` or `--to fsdp1`"."""
    return comma.join(f"`--to {row.target}`" for row in rows if row.create and not row.component_only)


def writable(name: str | None, dst: str) -> Format:
    """Return the format to write: the one named, or the one that the suffix of `dst` says unmistakably."""
    row = named(name) if name is not None else by_suffix(dst)
    if row is None:
        hint = f"pass {options(CHECKPOINTS, ', ')}"
        if options_in := _QUOTED_OPTIONS.search(dst):
            hint = f"the quotes include an option: end them after `{dst[: options_in.start()]}`"
        elif suffix := next((suffix for suffix in NOT_WRITTEN if dst.endswith(suffix)), None):
            stem = dst.removesuffix(suffix).removesuffix(".index").removesuffix(".safetensors")
            hint = NOT_WRITTEN[suffix] or f"no such file is written: name it `{stem}.pt` or `{stem}.safetensors`"
        elif (typed := _SUFFIX.search(dst)) and (near := near_names(typed[0], _SUFFIXES, 1)):
            hint = f"did you mean `{dst.removesuffix(typed[0])}{near[0]}`? Else {hint}"
        raise UsageError(f"cannot infer the output format from `{dst}`", hint=hint)
    if row.create is None:
        hint = f"`--producer {row.name}` writes the directory that it resumes from"
        raise UsageError(f"`--to {row.target}`: this format is read, and not written by `--to`", hint=hint)
    return row


def check_suffix(dst: str, target: Format, known: Iterable[str] = ()) -> None:
    """Raise UsageError for a file with the suffix of another format, by which others choose how to read it, and for a
    directory with that of a file. A `/` after the name says that a directory is meant. `known` are names that files of
    the target's format have: who wrote `100.tar` with torch.save reads one."""
    is_file, rows = target.is_file(dst), {suffix: row for row in FORMATS for suffix in row.suffixes}
    suffix = next((suffix for suffix in (*rows, *NOT_WRITTEN) if dst.endswith(suffix)), None)
    row = rows.get(suffix or "")
    if suffix is None or dst.endswith("/") or (is_file and row is not None and row.name == target.name):
        return
    if is_file and not target.suffixes:  # a pickle of `--producer same`, which may be called anything
        return
    if is_file and row is None and any(name.endswith(suffix) for name in known):
        return
    stem = dst.removesuffix(suffix)
    hint = f"name it `{stem}{target.suffixes[0]}`" if is_file else f"name it `{stem}`, or `{dst}/` to keep the name"
    other = NOT_WRITTEN[suffix] if row is None else f"`ckpttool convert --to {row.target}` writes such a file"
    what = f"a {target.title}" if is_file else "a directory"
    text = f"`{dst}` has the suffix of another kind of file: it would be {what}"
    raise UsageError(text, hint="; ".join(filter(None, (hint, other))))
