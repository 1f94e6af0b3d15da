"""The model card: what an export was made of, with the header by which the Hub files a model."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import without_credentials
from ckpttool.models.asset_names import MODULES
from ckpttool.models.assets import Assets
from ckpttool.storage.stores import is_remote, locate
from ckpttool.text import count, is_or_are, markdown_code, plural, size
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.operations.export.plan import Exported

_PLAIN = re.compile(r"[A-Za-z0-9][\w./+-]*(?<!/)|https://[\w./%-]+", re.ASCII)
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}


def _header(beside: Assets, library: str, *, is_adapter: bool) -> str:
    """Return the lines of the header. License and pipeline are those of the model that the assets are of."""
    suffix = re.search(r"For[A-Z]\w*$", beside.architecture or "")
    pipeline = beside.facts.get("pipeline_tag") or _PIPELINES.get(suffix[0] if suffix else "")
    rows: list[tuple[str, str | None]] = [("library_name", library), ("base_model", beside.base)]
    if is_adapter and beside.base:
        rows.append(("base_model_relation", "adapter"))
    rows += [(key, beside.facts.get(key)) for key in ("license", "license_name", "license_link")]
    rows.append(("pipeline_tag", pipeline))
    lines = [f"{key}: {_yaml(value)}\n" for key, value in rows if value]
    return "".join([*lines, "tags:\n", *(f"- {tag}\n" for tag in (["lora"] if is_adapter else []) + ["ckpttool"])])


def _yaml(value: str) -> str:
    """Return text for the header: as it is, or in quotes, which JSON's are, if it could be anything else there."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


def _title(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else markdown_code(text)


def _digest(catalogue: Catalogue) -> str:
    """Return a digest of the source: names and sizes of its files, and the checksums in its index."""
    sha = hashlib.sha256()
    for file in sorted(catalogue.own_files, key=lambda file: file.name):
        sha.update(f"{file.name}\0{file.size}\n".encode("utf-8", "backslashreplace"))
    names = [file.name for file in catalogue.files]
    for tensor in catalogue.tensors:
        for record in tensor.chunks.all_records():
            if record.crc is not None:
                line = f"{names[record.file]}\0{record.offset}\0{record.nbytes}\0{record.crc:08x}\n"
                sha.update(line.encode("utf-8", "backslashreplace"))
    return sha.hexdigest()


def _filled(result: Exported) -> str:
    names = ", ".join(map(markdown_code, result.filled))
    count = f"{plural(len(result.filled), 'tensor')} {is_or_are(result.filled)}"
    return f"{count} not of the checkpoint but of {markdown_code(_called(result.filled_from))}: {names}"


def _called(path: str) -> str:
    """Return the name of a path: cards are public, and directories of this machine are nobody's business."""
    return path if is_remote(path) else locate(path).real().name


def text(result: Exported, catalogue: Catalogue, beside: Assets) -> str:
    """Return a model card for an export of the source `catalogue`, as Markdown with the header that the Hub reads.

    No date and no path: the same source gives the same bytes. Pure.
    """
    architecture = beside.architecture
    total = count(sum(result.parameters.values()))
    dtypes = ", ".join(f"{name} ({count(n)})" for name, n in result.parameters.items())
    counted = Counter((old, new) for _, old, new in result.cast).items()
    casts = ", ".join(f"{plural(n, 'tensor')} from {old} to {new}" for (old, new), n in counted)
    library = "transformers" if architecture else "diffusers" if beside.class_name else "safetensors"
    if MODULES in beside.paths:
        library = "sentence-transformers"
    library = "peft" if result.adapter else library
    what = "an adapter" if result.adapter else f"a {markdown_code(architecture)}" if architecture else "a model"
    producer = catalogue.facts.get("producer")
    run = catalogue.facts.get("run", ())
    source = result.source if is_remote(result.source) else locate(result.source).name
    taken = next((f"{source}/{entry['name']}" for entry in run if entry["taken"]), source)
    rows = [
        (
            "Made from",
            f"{markdown_code(taken)}, {result.source_format}" + (f" as {producer} leaves it" if producer else ""),
        ),
        ("Made by", f"ckpttool {__version__}, `ckpttool export`"),
        ("Parameters", f"{total} in {plural(result.tensor_count, 'tensor')}, {size(result.payload_bytes)}"),
        ("Dtypes", dtypes or "none"),
        *([("Cast", casts)] if casts else []),
        *([("Weights", f"tree {markdown_code(result.take)}, instead of the model")] if result.take else []),
        *([("Names, dtypes and files", f"those of {markdown_code(_called(result.like))}")] if result.like else []),
        *([("Filled", _filled(result))] if result.filled else []),
        *([("Names", f"by key map {markdown_code(result.key_map)}")] if result.key_map else []),
        ("Digest of the source", f"`sha256:{_digest(catalogue)}` over names, sizes and stored checksums of its files"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    title = result.destination.rstrip("/").rpartition("/")[2] or "Model"
    header = _header(beside, library, is_adapter=result.adapter)
    return without_credentials(
        f"---\n{header}---\n\n# {_title(title)}\n\nThe weights of {what}, taken out of a training checkpoint"
        f"{', and cast' if casts else ' bit for bit'}.\n\n| | |\n|---|---|\n{table}\n\n"
        "This page was made by a program. What the model is for, what it was trained on and under which license it "
        "stands is for its author to add.\n"
    )
