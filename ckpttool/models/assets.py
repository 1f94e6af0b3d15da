"""The files beside the weights of a model: config, tokenizer, chat template, code. They are copied as files; in
`config.json`, the dtype is replaced by that of the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CorruptError, ReadError, UsageError
from ckpttool.models import asset_names, key_maps
from ckpttool.serialization import strict_json
from ckpttool.storage import files
from ckpttool.storage.errors import hub_address
from ckpttool.storage.stores import Location, Outgoing, locate
from ckpttool.text import is_or_are, plural, some

CONFIG, CARD, ADAPTER = "config.json", "README.md", "adapter_config.json"
# What makes a directory a model of its own, to which its card belongs.
_WEIGHTS = re.compile(r".*\.(safetensors|gguf|pth)|pytorch_model.*\.bin|adapter_model\.bin")
_NOT_WITH_ADAPTER = (CONFIG, "generation_config.json")
_MAX_CONFIG = 16 << 20
_BLOCK = 1 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Keys of the configs of the models that a model is made of; a `quantization_config` has dtypes of its own.
_CONFIGS = re.compile(r"(?!quantization|compression).*_config|(text_|audio_|image_)?(encoder|decoder)|generator")
_HEADER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.S | re.M)
_FACT = re.compile(r"^(license|license_name|license_link|pipeline_tag):[ \t]*[\"']?([\w.:/@-]+)[\"']?[ \t]*\r?$", re.M)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_VALUE = re.compile(r'\s*:\s*("(?:[^"\\]|\\.)*"|null)')


@dataclass(slots=True)
class Assets:
    """The files to copy, by name, with the path of each. `config` is the parsed `config.json`, if there is one; `text`
    is the file itself. `included` are names that `--include` selected. `facts` are those of the header of the card
    there, and `base` the repository of another model that the assets are of. `notes` say which files are not copied,
    and why. `main` is the folder of the config, `"unet/"` in a pipeline."""

    folder: Location | None = None
    paths: dict[str, Location] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    text: str = ""
    main: str = ""
    included: list[str] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def architecture(self) -> str | None:
        """The first class of transformers in the config."""
        names = self.config.get("architectures") if self.config is not None else None
        return str(names[0]) if isinstance(names, list) and names else None

    @property
    def class_name(self) -> str | None:
        """The class of diffusers in the config."""
        name = (self.config or {}).get("_class_name")
        return name if isinstance(name, str) else None

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """The parsed `adapter_config.json`, if there is one."""
        return _config(self.paths[ADAPTER])[1] if ADAPTER in self.paths else None

    @property
    def head_dim(self) -> int | None:
        """The rows of an attention head, as the config has them."""
        return key_maps.head_dim(self.config)

    @property
    def ties_words(self) -> bool | None:
        """`tie_word_embeddings` of the config; None when it is absent."""
        value = (self.config or {}).get("tie_word_embeddings")
        return value if isinstance(value, bool) else None


def collect(folder: Location | None, catalogue: Catalogue, include: Sequence[str] = ()) -> Assets:
    """Return the assets in a folder; without one, those beside the weights in the run directory that is the source.

    A model card in the folder of another model, as the base model of the training, is not copied. Raises UsageError for
    a folder that does not exist or has no assets, and ReadError for a link that leads out of it; beside the source,
    such links are skipped with a note. `include` are patterns of files that are not assets by their names.
    """
    if folder is not None:
        if not folder.is_dir():
            hint = "name the directory that has `config.json`"
            if address := hub_address(folder):
                hint += f", or on the Hub `{address}`"
            raise UsageError(f"`--assets {folder}` is not a directory", hint=hint)
        assets = _in(folder, include, strict=True)
        is_own = f"{catalogue.location and catalogue.location.real()}/".startswith(f"{folder.real()}/") or not any(
            map(_WEIGHTS.fullmatch, folder.names())
        )
        if CARD in assets.paths:
            assets.facts = _facts(assets.paths[CARD])
        if not is_own and folder.is_remote and folder.store.is_versioned:  # a bucket is no model
            assets.base = folder.store.root.partition("://")[2].partition("@")[0]
        if CARD in assets.paths and not is_own:
            del assets.paths[CARD]
            assets.notes.append(
                f"`{CARD}` of `{folder}` is not copied: it is about the model there; a card of your own is taken from "
                "an `--assets` directory without weights"
            )
        if not assets.paths:
            raise UsageError(f"`--assets {folder}` has no config, tokenizer or anything of the kind")
        others = [name for name in folder.names() if _is_other(folder, name, assets)]
        if others:
            number = f"{plural(len(others), 'other file')} of `{folder}`"
            assets.notes.append(f"{number} {is_or_are(others)} not copied; `--include GLOB` does: {some(others, 5)}")
        return assets
    beside = _beside(catalogue)
    if beside is None and include:
        hint = "name their directory: `--assets DIR`"
        raise UsageError(f"`--include {include[0]}`: there is no config or tokenizer beside the weights", hint=hint)
    assets = _in(beside, include, strict=False) if beside is not None else Assets()
    if not assets.paths:
        return Assets()
    taken = f"{plural(len(assets.paths), 'file')} {is_or_are(assets.paths)} taken from `{beside}`"
    assets.notes.insert(0, f"{taken}: {some(sorted(assets.paths), len(assets.paths))}")
    return assets


def _is_other(folder: Location, name: str, assets: Assets) -> bool:
    """Return whether a name is that of a file which is neither an asset nor weights. Those with a leading dot are not
    mentioned."""
    if name in assets.paths or name.startswith(".") or name == CARD or name.endswith(".index.json"):
        return False
    return not _WEIGHTS.fullmatch(name) and (folder / name).is_file()


def _beside(catalogue: Catalogue) -> Location | None:
    names = catalogue.facts.get("assets") or ()
    base = catalogue.location
    if base is None:
        return None
    if not base.is_dir():
        # One file of a model that lies in a directory of its own.
        base = base.absolute().parent
        return base if catalogue.format == "safetensors" and (base / CONFIG).is_file() else None
    folders: list[Location] = [base, *((base / name).parent for name in names)]
    folders += [base / name.rstrip("/") for name in names if (base / name).is_dir()]
    for marks in ((CONFIG, ADAPTER), ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        for folder in dict.fromkeys(folders):
            if any((folder / mark).is_file() for mark in marks):
                return folder
    return None


def _in(folder: Location, include: Sequence[str], *, strict: bool) -> Assets:
    assets = Assets(folder)
    assets.included = _included(folder, include)
    for name in sorted({*asset_names.find(folder), *assets.included}):
        path = folder / name
        try:
            kept = folder.inside(name)
        except CorruptError:
            text = f"`{path}`: a link that leads out of `{folder}`, which is not followed"
            if strict or name in assets.included:
                raise ReadError(text, hint="put the file itself there, or take the link away", file=path) from None
            assets.notes.append(text)
            continue
        if kept.is_file():
            assets.paths[name] = kept
    if CONFIG in assets.paths:
        assets.text, assets.config = _config(assets.paths[CONFIG])
    elif "params.json" in assets.paths:
        # Meta's, used for the width of the heads; not an asset of transformers.
        assets.config = _config(assets.paths["params.json"])[1]
    return assets


def settle(assets: Assets, main: str) -> None:
    """Take the config in a folder of the directory for that of the weights."""
    assets.main = main
    if main and main + CONFIG in assets.paths:
        assets.text, assets.config = _config(assets.paths[main + CONFIG])


def _included(folder: Location, patterns: Sequence[str]) -> list[str]:
    """Return the names of the files that `--include` selects. `*` stands for no `/`, and for no leading dot. Raises
    UsageError for a pattern that selects none, or weights."""
    names: list[str] = []
    for pattern in patterns:
        found = [path for path in (folder.escaped() / pattern).matches() if path.is_file() or path.is_link()]
        if not found:
            hint = "the pattern is relative to the directory of the assets: `--include 'docs/*.md'`"
            raise UsageError(f"`--include {pattern}`: no file of `{folder}` matches", hint=hint)
        names += [path.relative_to(folder) for path in found]
    for name in names:
        if _WEIGHTS.fullmatch(name.rpartition("/")[2]) or name.endswith(".index.json"):
            hint = "the weights are those of SRC; include no others"
            raise UsageError(f"`--include`: `{name}` of `{folder}` has weights, or is an index of them", hint=hint)
    return names


def _config(path: Location) -> tuple[str, Mapping[str, Any]]:
    if path.size() > _MAX_CONFIG:
        raise CorruptError(f"`{path}`: a config of more than {_MAX_CONFIG} bytes", file=path)
    try:
        text = path.read().decode()
    except UnicodeDecodeError:
        raise CorruptError(f"`{path}`: not UTF-8", file=path) from None
    try:
        config = json.loads(text)  # Infinity is in configs of transformers
    except (ValueError, RecursionError):
        config = strict_json.parse(text.encode(), f"`{path}`")
    if not isinstance(config, dict):
        raise CorruptError(f"`{path}`: not an object of JSON", file=path)
    return text, config


def _facts(path: Location) -> dict[str, str]:
    """Return the facts in the header of a model card that hold for what is made of the model."""
    head = _HEADER.match(path.head(_BLOCK).decode("utf-8", "replace"))
    return dict(_FACT.findall(head[1])) if head is not None else {}


def outgoing(assets: Assets, dtype: str | None, *, adapter: bool) -> tuple[list[Outgoing], list[str]]:
    """Return the files to write, and notes on changes in them. `dtype` is that of the weights; None: not changed."""
    files_: list[Outgoing] = []
    notes: list[str] = []
    for name, path in sorted(assets.paths.items()):
        if adapter and name in _NOT_WITH_ADAPTER:
            continue
        if name == assets.main + CONFIG and dtype is not None:
            text, changed = with_dtype(assets.text, dtype)
            if changed:
                keys, old = some([key for key, _ in changed]), some(list(dict.fromkeys(old for _, old in changed)))
                subject = f"{keys} of `{name}` {is_or_are(changed)}"
                notes.append(f"{subject} changed from {old} to `{dtype}`, the dtype of the weights")
            files_.append(of_bytes(name, text.encode()))
        else:
            files_.append(_copy(name, path))
    return files_, notes


def of_bytes(name: str, data: bytes) -> Outgoing:
    """Return a file with these bytes."""
    return Outgoing(name, len(data), lambda path: locate(path).put(data))


def _copy(name: str, source: Location) -> Outgoing:
    before = files.fingerprint([source])

    def write(path: str) -> None:
        source.copy_to(locate(path))
        files.check_unchanged(before)

    return Outgoing(name, source.size(), write)


# config.json ----------------------------------------------------------------------------------------------------------


def _is_of_model(text: str, keys: Sequence[str]) -> bool:
    """Return whether a config in a config is one of a model: that of MPT's attention has an empty `model_type`."""
    config = json.loads(text)
    for key in keys:
        config = config[key]
    return bool(config.get("model_type") != "")


def with_dtype(text: str, dtype: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a config with another dtype, and the changed keys with their old values:
    `[("torch_dtype", "float32"), ("text_config.dtype", "float32")]`. Only existing keys at the top level and of the
    configs in it are changed, and the rest of the text is kept. Pure.
    """
    changed: list[tuple[str, str]] = []
    pieces: list[str] = []
    at = done = 0
    key, inside = "", list[str]()  # the keys of the objects around this place
    while at < len(text):
        char = text[at]
        if char in "{[":
            inside.append(key if char == "{" else "[")
        elif char in "}]":
            del inside[-1:]
        elif char == '"':
            match = _STRING.match(text, at)
            if match is None:
                break
            at = match.end()
            key = json.loads(match[0])
            is_config = all(map(_CONFIGS.fullmatch, inside[1:])) and inside[:1] == [""]
            if is_config and key in _DTYPE_KEYS and (value := _VALUE.match(text, at)):
                old = json.loads(value[1])
                is_of_model = old is not None or not inside[1:] or _is_of_model(text, inside[1:])
                if old not in (dtype, f"torch.{dtype}") and is_of_model:
                    pieces += [text[done : value.start(1)], json.dumps(dtype)]
                    done = at = value.end()
                    changed.append((".".join([*inside[1:], key]), str(old)))
            continue
        at += 1
    return "".join([*pieces, text[done:]]), changed
