"""The components of any directory, by what its files hold: the layout of scripts that follow no framework.

    model.pt optimizer.pt rng.pt            model.*  optimizer.*  rng.*        a file is mounted under its stem
    state.pt rng_0.pt rng_1.pt              state.*  rng.rank0.*  rng.rank1.*  files of ranks are one set
    unet/model.safetensors ema/ema.pt       unet.*  ema.*                      a folder with one component is its root
    .metadata *.distcp extra.pt             keys of DCP at the root, extra.*
    lit_model.pth config.yaml               one file of tensors alone has its own keys, as if it were named

What is not a component is an asset (configuration, tokenizer, scripts, logs, the model for another library) or cannot
be read, which is a fault.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from ckpttool import formats
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Path
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, ReadError
from ckpttool.formats.deepspeed import members as deepspeed
from ckpttool.formats.detect import detect, paths_in
from ckpttool.formats.documents import reader as documents
from ckpttool.formats.rankfiles.rank_file import mentions_shards
from ckpttool.formats.safetensors.model_files import left_over
from ckpttool.producers import foreign
from ckpttool.producers.components import (
    ASSET_NAMES,
    DCP_FILE,
    DCP_FILES,
    OTHER_FORMAT,
    REPOSITORY,
    VARIANT,
    Component,
    Layout,
    check_index,
    check_ranks,
    check_shards,
    rank_sets,
)
from ckpttool.serialization import other_files
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.manifest import NAME
from ckpttool.storage.stores import Location
from ckpttool.storage.unfinished import ended, is_left
from ckpttool.text import is_or_are, some

_MAX_DEPTH = 8
_OF_DCP = re.compile(rf"{DCP_FILES.pattern}|{deepspeed.FILES}(?<!/)")
_RANK = re.compile(
    r"(?<![a-z])(?:(?:world_?size[._-]?(?P<world>\d+)[._-])?(?:[a-z]p_)?rank|dp|sdp)[._=-]?(?P<rank>\d{1,6})(?!\d)",
    re.I,
)
_NUMBER = re.compile(r"[._/-](?P<rank>\d{1,6})(?=\.[^/]*$|$)")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<shard>\d{5})-of-(?P<count>\d{5})\.(safetensors|bin|pt|pth)")
_SUFFIX = re.compile(
    r"(?<=.)(\.(safetensors|pth?|th|bin|ckpt|tar|pkl|pickle|p|dump|np[yz]?|memmap|json|ya?ml|txt|model|state|zip|nemo)\b)+"
)
_INDEX = re.compile(r".*\.index\.json")
_PIECES = r"(?:.*/)?(ckpttool\.json|shard-\d+-model-\d+-of-\d+\.safetensors)"
_OF_SAFETENSORS = r".*\.safetensors(\.index\.json)?|ckpttool\.json|sharded/"
# Of the model for other libraries, and what people look at. A replay buffer may be an HDF5 file, too.
_OTHER_LIBRARIES = r".*\.(msgpack|onnx|onnx_data|gguf|ot|tflite|pb|engine|mlmodel)|tf_model(-\d{5}-of-\d{5})?\.h5"
_LOOKED_AT = (
    r".*\.(log|md|pyc?|sh|csv|tsv|jsonl|png|jpe?g|svg|gif|mp4|wav|html|pdf|lock|ply|tiktoken|jinja)"
    r"|(all|train|eval|predict|test)_results\.json|LICENSE.*|Thumbs\.db|events\.out\.tfevents.*"
)
_ASSET = re.compile(rf"(?:.*/)?({ASSET_NAMES}|(?P<of_another>{_OTHER_LIBRARIES})|{_LOOKED_AT})")
# Folders of frameworks; in those of other directories there may be state.
_LOGS = r"(?:.*/)?(runs|logs|wandb|original)/.*"
_LOG = re.compile(rf"{_LOGS}\.(json|ya?ml|txt|wandb|db)")
_HEAD = 4096
_LEFT_OUT = "`--only` leaves it out"
_STATE = f"it may hold training state; {_LEFT_OUT}"
_BEGUN = f"judging by its name, a save or download that did not finish: run it again, or remove the file; {_LEFT_OUT}"


def layout(
    directory: Directory,
    names: Collection[str] | None = None,
    step: int | None = None,
    *,
    named: Layout | None = None,
    apart: bool = False,
    without: Collection[str] = (),
) -> Layout:
    """Return the components of a directory; with `names`, of these files and folders in it, and not of the files
    `without`. To those `named` by the row of a framework are added the files that it does not know, and in its folders
    what lies beside DCP. `step` is a number in the names of files that lie beside those of other steps; `apart`,
    also a file alone is mounted under its stem."""
    result = Layout() if named is None else named
    own, is_all = len(result.components), named is None and names is None
    listed = names if names is not None else directory.names if named is None else named.unknown
    is_dcp = is_all and directory.has(DCP_FILE)
    if is_dcp or (is_all and directory.has(_PIECES)):
        result.components.append(Component(""))
        listed = [name for name in listed if not re.fullmatch(DCP_FILES.pattern if is_dcp else _OF_SAFETENSORS, name)]
    found = [*_below(directory, listed, is_dcp, result)]
    for folder in [one.name for one in result.components if one.name.endswith("/") and names is None]:
        inner = directory.folder(folder)
        found += _below(inner, inner.names, True, result, folder)
    remaining = dict.fromkeys(sorted({*found}.difference(without)))
    for sets in (_indexed, _left_over, _shards, _ranks):
        for component in [*sets(directory, remaining, result)]:
            result.components.append(component)
            for name in component.files:
                remaining.pop(name, None)
    for name in remaining:
        _add_file(directory, name, result, beside=named is not None)
    _give_roots(result, own if named is not None else 0, step, spares=named is not None, apart=apart)
    result.components[own:] = sorted(result.components[own:], key=lambda one: one.spare)  # compared with the others
    result.assets.sort()
    result.unknown = []
    return result


def is_of_safetensors(directory: Directory, layout: Layout) -> bool:
    """Return whether what a layout does not know yet of a directory is one file, an index or a training state in
    safetensors, and nothing but what such a model is made of, by the names; its assets are added to the layout."""
    known = rf"{_OF_SAFETENSORS}|{REPOSITORY.pattern}|{re.escape(NAME)}"
    others = [name for name in layout.unknown if not re.fullmatch(known, name)]
    assets = [name for name in others if _is_asset(name, directory.at(name))]
    rest = [name for name in others if name not in assets]
    number = sum(1 for _ in directory.matching(r".*\.safetensors"))
    # Of the pieces that torch's writer joins to the files beside them, and nothing else.
    inside = directory.folder("sharded").names if "sharded/" in directory else ()
    rest += [name for name in inside if not re.fullmatch(_PIECES, name)]
    if rest or not (number == 1 or directory.has(r".*\.safetensors\.index\.json|ckpttool\.json")):
        return False
    layout.assets = sorted([*layout.assets, *assets])
    return True


def _below(
    directory: Directory, names: Collection[str], is_dcp: bool, layout: Layout, above: str = "", depth: int = 0
) -> Iterator[str]:
    """Yield the files below a directory, and with a slash the folders that a format opens as a whole."""
    if depth > _MAX_DEPTH:
        text = f"`{directory.path}`: folders nested more than {_MAX_DEPTH} deep"
        layout.unreadable[above] = ReadError(text, file=directory.path)
        return
    own = [name for name in names if not (is_dcp and _OF_DCP.fullmatch(name))]  # may lie in folders of it
    layout.warnings += (left := [*remains(directory, own, above)])
    for name in own:
        if re.fullmatch(rf"{REPOSITORY.pattern}|{re.escape(NAME)}", name) or any(above + name in w.names for w in left):
            continue
        location = directory.at(name.rstrip("/"))
        if location.is_link() and _is_beside(location.real(), directory.path.real(), names):
            continue  # `latest`, to what lies beside it
        if not name.endswith("/"):
            yield above + name
            continue
        inner = directory.folder(name)
        if (recognition := foreign.recognise(inner.path, inner)) is not None:
            layout.unreadable[above + name] = recognition.refusal(inner.path)
        elif deepspeed.recognise(inner.path):
            yield above + name
        elif inner.has(DCP_FILE) and not (is_dcp and not inner.has(r"\.metadata|__\d+\.metadata")):
            yield above + name
            yield from _below(inner, inner.names, True, layout, above + name, depth + 1)
        elif inner.has(_PIECES):
            yield above + name
            rest = [one for one in inner.names if not re.fullmatch(_OF_SAFETENSORS, one)]
            yield from _below(inner, rest, False, layout, above + name, depth + 1)
        else:
            yield from _below(inner, inner.names, is_dcp, layout, above + name, depth + 1)


def remains(directory: Directory, names: Iterable[str], above: str = "") -> Iterator[Warning]:
    """Yield a warning of what did not end, with what it would have replaced beside it, of some names in a directory."""
    if left := [above + name for name in names if is_remnant(directory, name)]:
        text = f"{some(left)} {is_or_are(left)} not read: left by a save or a copy that did not end"
        yield Warning("left-out", text, file=left[0], names=left)


def without_remains(names: Iterable[str], left: Collection[str]) -> list[str]:
    """Return the names of files that are neither among the remains `left` of a save, nor in folders that are."""
    begins = tuple(f"{one.rstrip('/')}/" for one in left)
    return [name for name in names if not f"{name}/".startswith(begins)]


def is_remnant(directory: Directory, name: str) -> bool:
    """Return whether a file or a folder is of a save that did not end: by its name, and as it is not whole or has
    entries of what it replaces."""
    if not is_left(name, directory):
        return False
    with suppress(CkptError):
        beside = (place for one in ended(name.rstrip("/")) if (place := directory.at(one)).exists())
        own, *others = map(_paths, (directory.at(name.rstrip("/")), *beside))
        return not own or not others or not all(map(own.isdisjoint, others))
    return True


def _paths(location: Location) -> set[Path]:
    """Return the key paths of the entries of a checkpoint, or of the files in a folder, each below its name. Raises
    CkptError if one cannot be opened."""
    with suppress(ReadError):
        return paths_in(location)
    files = (name for name in location.below() if not _is_asset(name, location / name))
    return {(name, *path) for name in files for path in paths_in(location / name)}


def _is_beside(target: Location, directory: Location, names: Collection[str]) -> bool:
    """Return whether what a link names is, or lies in, one of the names in a directory."""
    if not target.is_below(directory) or not target.exists():
        return False
    first = target.relative_to(directory).partition("/")[0]
    return first in names or f"{first}/" in names


# Sets of files --------------------------------------------------------------------------------------------------------


def _indexed(directory: Directory, names: Collection[str], layout: Layout) -> Iterator[Component]:
    """Yield the models whose files an index names."""
    for name in names:
        if not _INDEX.fullmatch(name):
            continue
        folder, _, base = name.rpartition("/")
        inner = directory.folder(folder)
        above, weight_map = f"{folder}/" if folder else "", inner.facts(base).get("weight_map")
        if isinstance(weight_map, dict) and base.endswith(".safetensors.index.json"):
            shards = sorted({f"{above}{one}" for one in weight_map.values() if isinstance(one, str)})
            yield Component(name, files=(name, *shards))
        elif isinstance(weight_map, dict):
            present = check_index(layout, inner, base)
            yield from (Component(above + one, files=(above + one,), kind="shard") for one in present)


def _left_over(directory: Directory, names: dict[str, None], layout: Layout) -> tuple[()]:
    """Take out the files that are from another save than the index beside them, each with a warning."""
    for index in [c.name for c in layout.components if _INDEX.fullmatch(c.name)]:
        folder, _, base = index.rpartition("/")
        model = {(tensor,) for tensor in directory.folder(folder).facts(base).get("weight_map", ())}
        for name in [name for name in names if name.rpartition("/")[0] == folder]:
            if (warning := left_over(directory.at(name), name, index, model)) is not None:
                layout.warnings.append(warning)
                del names[name]
    return ()


def _shards(directory: Directory, names: Collection[str], layout: Layout) -> Iterator[Component]:
    """Yield the files of models that were split without an index: `model-00001-of-00002.safetensors`."""
    sets: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if (match := _SHARD.fullmatch(name)) is not None:
            sets[match["stem"], match["count"]].append(name)
    for (stem, count), shards in sets.items():
        check_shards(layout, stem, len(shards), count)
        for name in shards:
            yield Component(name, files=(name,), kind="shard")


def _ranks(directory: Directory, names: Collection[str], layout: Layout) -> Iterator[Component]:
    """Yield the sets of files whose names differ in a rank alone."""
    for name, of_rank in rank_sets(filter(None, (rank_in(n) for n in names if not n.endswith("/")))).items():
        before = name.partition("*")[0]
        is_named = _RANK.search(f"{before}0") is not None
        is_own = parts.kind_of_key(before.rstrip("._-/").rpartition("/")[2]) in parts.PER_RANK
        ranks = [int(match["rank"]) for match in of_rank]
        # Of what each rank has of its own, one of several may be missing.
        is_counted = ranks == [*range(len(ranks))] or (is_own and not ranks[0] and ranks[-1] < 2 * len(ranks))
        if not is_named and (len(ranks) < 2 or not is_counted):
            if is_own and len(ranks) > 1 and ranks == [*range(1, len(ranks) + 1)]:
                text = f"no file of rank 0 is beside {some([match.string for match in of_rank])}, if they count from 0"
                layout.warnings.append(Warning("missing-file", text, file=of_rank[0].string))
            continue
        # Else only shards say that a number is a rank, and not that of a model or an optimizer.
        if is_named or is_own or all(mentions_shards(directory.at(match.string)) for match in of_rank):
            yield Component(name, files=check_ranks(layout, of_rank), kind="rank files", by_name=True)


def rank_in(name: str) -> re.Match[str] | None:
    """Return where a name has what may be a rank: behind a word for it, or as the number at its end."""
    named = [*_RANK.finditer(name)]
    return named[-1] if named else _NUMBER.search(name)


# Single files ---------------------------------------------------------------------------------------------------------


def _add_file(directory: Directory, name: str, layout: Layout, *, beside: bool) -> None:
    """Add a file as a component, as an asset, or as one that cannot be read; `beside` what a framework wrote also what
    it logs."""
    location = directory.at(name.rstrip("/"))
    if name.endswith("/"):
        # Torch's writer joins the pieces in `sharded/` to the files beside it.
        layout.components.append(Component(name, files=(name,), spare=name.endswith("sharded/")))
    elif location.exists() and not location.is_file():
        # Opening a pipe would wait, and reading a device never end.
        text = f"`{location}`: a pipe or a device, not a regular file"
        layout.unreadable[name] = ReadError(text, hint=_STATE, file=location)
    elif _is_asset(name, location) or (beside and _LOG.fullmatch(name)):
        layout.assets.append(name)
    elif any(row.recognise(location) for row in formats.FORMATS):
        layout.components.append(Component(name, files=(name,)))
    else:
        head = b""
        try:
            location.check_readable()
            if not _INDEX.fullmatch(name):
                documents.check(location)
            head = location.head(_HEAD)
            is_text = other_files.is_text(name, head) or (beside and re.fullmatch(_LOGS, name) is not None)
            if formats.DATA_FILE.fullmatch(name) or not (is_text or other_files.is_of_no_state(head)):
                detect(location)
            layout.assets.append(name)
        except CkptError as error:
            is_unknown = formats.DATA_FILE.fullmatch(name) is None and type(error) is ReadError
            hint = error.hint if not is_unknown else _BEGUN if ended(name.rpartition("/")[2]) else _STATE
            hint = f"{error.hint}; {_LEFT_OUT}" if other_files.is_archive(head) else hint
            facts = error.facts | ({"unknown": True} if is_unknown else {})  # which is no damage
            layout.unreadable[name] = type(error)(error.message, hint=hint, **facts)


def _is_asset(name: str, location: Location) -> bool:
    """Return whether a file is an asset by its name, and of no format by its first bytes, which on the Hub are not
    read; any text may be YAML. The same model for another library is one whatever it holds."""
    match = _ASSET.fullmatch(name)
    if match is None or match["of_another"] or not location.store.is_local:
        return match is not None
    return not any(row.recognise(location) for row in formats.BINARY)


# Roots ----------------------------------------------------------------------------------------------------------------


def _give_roots(layout: Layout, named: int, step: int | None, *, spares: bool, apart: bool) -> None:
    """Give each component its root, but for the first that a framework has `named`: the folders and the stem of its
    name, the keys of which nothing else has. One alone has its own keys, unless it is to be `apart`; beside what is
    named there may be `spares`, the same model in another format."""
    documents = (".json", ".yaml", ".yml", ".txt")
    components = layout.components[named:]
    holders = [c for c in components if _INDEX.fullmatch(c.name) or not c.name.endswith(documents)]
    main = [c for c in holders if not (spares and OTHER_FORMAT.fullmatch(c.name))]
    # Else all are of torch: `pytorch_model.fp16.bin` is the other one.
    main = main or [c for c in holders if not VARIANT.fullmatch(c.name)] or holders
    is_alone = len({stem(c, step) for c in main}) == 1 and not named and not apart
    in_folder: dict[Path, set[Path]] = defaultdict(set)
    folders: set[Path] = set()
    for component in components:
        place = stem(component, step) or ("",)
        in_folder[place[:-1]].add(place)
        folders.update(place[:depth] for depth in range(1, len(place)))
    for inner in folders:
        in_folder[inner[:-1]].add(inner)  # what lies there has no place among the keys of a file
    taken = {component.root: component for component in layout.components[:named]}
    # Of `dataset.safetensors` and `dataset.json`, the tensors have the name.
    for i, component in sorted(enumerate(components, named), key=lambda one: one[1] not in holders):
        root = stem(component, step)
        if len(root) > 1 and in_folder[root[:-1]] == {root} and root[:-1] not in taken:
            root = root[:-1]
        if is_alone and component in main:
            root = ()
        other = taken.get(root)
        if other is not None and not (other.kind == component.kind == "shard"):
            root = (*root[:-1], component.name.rpartition("/")[2].replace("*", ""))
        taken.setdefault(root, component)
        is_spare = spares and (component not in main or not is_alone) and OTHER_FORMAT.fullmatch(component.name)
        layout.components[i] = replace(component, root=root, spare=component.spare or bool(is_spare))


def stem(component: Component, step: int | None = None) -> Path:
    """Return the folders and the stem of a component, without rank, number of shards, suffixes and step."""
    name = component.name.rstrip("/")
    if not name:
        return ()
    *folders, base = name.split("/")
    if component.kind == "shard" and (match := _SHARD.fullmatch(base)) is not None:
        base = match["stem"]
    base = _SUFFIX.sub("", re.sub(r"\.(safetensors|bin)\.index\.json$", "", base))
    if component.kind == "rank files":
        base = re.sub(r"[._-]?(world_?size[._-]?\d+[._-])?([a-z]p_?)?(rank|dp|sdp)?[._=-]?\*", "", base, flags=re.I)
    if step is not None:
        base = re.sub(rf"[._=-]?(?<!\d)0*{step}(?!\d)", "", base)
    base = base.strip("._-= ")
    above = [*filter(None, (re.sub(r"[._-]?\*", "", folder) for folder in folders))]
    return tuple([*above, base] if base or not above else above)
