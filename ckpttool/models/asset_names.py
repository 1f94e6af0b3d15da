"""The files of a directory that a model needs beside its weights: names that libraries write, and what these name.

A directory of a model may hold anything else, such as training scripts and credentials. So nothing is taken because of
its suffix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.producers.components import ASSET_NAMES
from ckpttool.storage.stores import Location

_NAMES = re.compile(
    # Those that lie beside a model wherever it is read; and what may be state in a directory of other files:
    rf"{ASSET_NAMES}"
    # configs of transformers
    r"|(quantize_config|hf_quant_config|modelcard|decision|decision_config|judge_config|calibration"
    # tokenizers of transformers, by `vocab_files_names`
    r"|vocab-(src|tgt)|target_vocab|entity_vocab|normalizer|emoji|byte_maps|word_shape|word_pronunciation|encoder|tekken|params"
    # sentence-transformers
    r"|config_sentence_transformers|sentence_[a-z-]+_config|router_config|wordembedding_config"
    r"|idf"
    # diffusers
    r"|model_index|scheduler_config)\.json"
    r"|vocab\.bpe|dict\.txt|bpe\.codes|prophetnet\.tokenizer"
    r"|(tokenizer|sentencepiece|spm|spm_char|tiktoken)\.model(\.v\d+)?|(source|target)\.spm"
    r"|[a-z][a-z0-9_]*\.tiktoken|(([a-z]+_)?chat|decision)_template\.jinja"
    r"|README\.md|(LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY)([-_.](?!.*(key|secret|token|cred|passw))[a-z0-9._-]+)?",
    re.I,
)
_TEMPLATES = "additional_chat_templates"
MODULES, PIPELINE = "modules.json", "model_index.json"
_MAX_SIZE = 16 << 20
_RELATIVE_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+\.([\w.]+)[ \t]+import\b|import[ \t]+\.([\w.]+))", re.M)


def find(folder: Location) -> list[str]:
    """Return the names, relative to a directory, of the files that belong to the model there, sorted."""
    names = [name for name in folder.names() if _NAMES.fullmatch(name)]
    if (folder / _TEMPLATES).is_dir():
        names += [f"{_TEMPLATES}/{name}" for name in (folder / _TEMPLATES).names() if name.endswith(".jinja")]
    inside = _module_folders(folder) if MODULES in names else []
    inside += [name for name in components(folder) if _is_dir(folder, name)] if PIPELINE in names else []
    for inner in inside:
        names += [f"{inner}/{name}" for name in (folder / inner).names() if _NAMES.fullmatch(name)]
    return sorted({*names, *_code(folder, names)})


def components(folder: Location) -> list[str]:
    """Return the components that `model_index.json` of a pipeline names, sorted."""
    index = _parsed(folder, PIPELINE)
    pairs = index.items() if isinstance(index, dict) else ()
    kinds = {name: kind for name, kind in pairs if re.fullmatch(r"[A-Za-z]\w*", name)}
    return sorted(n for n, kind in kinds.items() if isinstance(kind, list) and len(kind) == 2 and None not in kind)


def _module_folders(folder: Location) -> list[str]:
    """Return the folders that `modules.json` of sentence-transformers names."""
    modules = _parsed(folder, MODULES)
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return sorted({path for path in paths if isinstance(path, str) and path and _is_dir(folder, path)})


def _is_dir(folder: Location, name: str) -> bool:
    try:
        return folder.inside(name).is_dir()
    except CkptError:
        return False


def _code(folder: Location, names: list[str]) -> set[str]:
    """Return the Python files that the JSON files of a model name, and those that these import."""
    here = set(folder.names())
    found: set[str] = set()
    # A tokenizer itself can be large, and names no code.
    configs = [name for name in names if name.endswith("config.json") or name == MODULES]
    modules = {module for name in configs for module in _modules(_parsed(folder, name))}
    while modules:
        name = f"{modules.pop().replace('.', '/')}.py"
        if name in found or (name not in here and not _is_file(folder, name)):
            continue
        found.add(name)
        inside = name.rpartition("/")[0].replace("/", ".")
        for groups in _RELATIVE_IMPORT.findall(_text(folder, name)):
            module = "".join(groups).strip(".")
            modules.add(f"{inside}.{module}" if inside else module)
    return found


def _is_file(folder: Location, name: str) -> bool:
    try:
        return folder.inside(name).is_file()
    except CkptError:
        return False


def _modules(value: Any) -> Iterator[str]:
    """Yield the modules of classes in `auto_map`, `custom_pipelines` and `modules.json`. Those of another repository,
    `org/name--module.Class`, are not in this directory."""
    if isinstance(value, list):
        references = [entry.get("type") for entry in value if isinstance(entry, dict)]
    elif isinstance(value, dict):
        maps = [entry for entry in (value.get("auto_map"), value.get("custom_pipelines")) if isinstance(entry, dict)]
        references = [each for entry in maps for each in entry.values()]
    else:
        return
    while references:
        reference = references.pop()
        if isinstance(reference, list):
            references += reference
        elif isinstance(reference, dict):
            references.append(reference.get("impl"))
        elif isinstance(reference, str) and "--" not in reference and re.fullmatch(r"\w+(\.\w+)+", reference):
            yield reference.rpartition(".")[0]


def _parsed(folder: Location, name: str) -> Any:
    try:
        return json.loads(_text(folder, name))
    except (ValueError, RecursionError):
        return None  # the caller of a damaged config says so


def _text(folder: Location, name: str) -> str:
    """Return a small text file, or nothing for one that cannot be read here; a link out of the directory is refused
    where it would be copied."""
    try:
        path = folder.inside(name)
        return path.read().decode("utf-8", "replace") if path.is_file() and path.size() <= _MAX_SIZE else ""
    except CkptError:
        return ""
