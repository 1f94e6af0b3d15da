"""Reads the safetensors files of a model into one catalogue.

A file of torch's `HuggingFaceStorageWriter(save_distributed=True)` holds pieces: `__metadata__.DCP_SHARDING_INFO` is
`{name: {"saved_offsets": [..]}}` as JSON in a string (torch 2.8 to 2.13 take the furthest end for the whole size).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import product

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, File, Part, Path, Tensor
from ckpttool.catalogue.shown import shown
from ckpttool.catalogue.warning import Warning
from ckpttool.catalogue.work_limit import charge
from ckpttool.errors import CorruptError, ReadError
from ckpttool.formats.safetensors import checksums, index, sharding, state_json
from ckpttool.formats.safetensors.sharding import SUFFIX
from ckpttool.serialization import safetensors_header, strict_json
from ckpttool.serialization.safetensors_header import Header, HeaderEntry
from ckpttool.storage.stores import Location
from ckpttool.text import plural, some

SHARDED = "sharded"
MODEL = Part("model")
SHARDING = "DCP_SHARDING_INFO"
_NO_REMARKS = {SHARDING, "DCP_VERSION", checksums.KEY, sharding.STATE, sharding.INDEX}
_SINGLE, _INDEX = f"model{SUFFIX}", f"model{index.SUFFIX}"
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")  # suffixes that weights and state of optimizers have
_RANK_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_VARIANT = re.compile(r"\.[a-z0-9_]+\.safetensors$")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
# What is lost with the file beside parts of something.
_REST = "training state", "all but the tensors"
_MORE = "model", "what its files do not say, such as names of tied tensors"
_LAST = "copy it too; it is written last: if that did not happen, run what wrote the files again"
_NO_SIZES = Warning(
    "unknown-shape",
    "the files do not say how large the whole tensors are: that the last one is missing would go unnoticed",
)


def read_json(path: Location) -> bytes:
    """Return the contents of a JSON file. Raises CorruptError if it is larger than the limit."""
    size = path.size()
    limit = strict_json.MAX_JSON
    if size > limit:
        raise CorruptError(f"`{path}`: {size} bytes of JSON, more than the limit of {limit}", file=path)
    strict_json.check_beginning(path.head(1 << 16), f"`{path}`")
    return path.read(0, size)


def rank_files(root: Location) -> list[str]:
    """Return the names of the rank files in a directory, if it exists."""
    return [n for n in root.names() if _RANK_FILE.fullmatch(n)] if root.is_dir() else []


class HeaderMerger:
    """Merges the headers of several files into one catalogue, and the pieces of each tensor."""

    def __init__(self, root: Location, layout: str) -> None:
        self.catalogue = Catalogue("safetensors", facts={"layout": layout})
        self.metadata: dict[str, str] = {}
        self._root, self._beside = root, set[str]()  # names of files that those that are read say have the rest
        self.sums: dict[str, int] = {}  # of files that have checksums
        self.tensors: dict[str, Tensor] = {}  # until `finish`

    def add(self, name: str, rank: int | None = None, *, given: bool = False) -> None:
        """Add the tensors of a file, which may be a link out of the directory if the user has `given` it.

        Raises CorruptError if another file has a tensor of the same name.
        """
        path = self._root / name if given else self._root.inside(name)
        file, header = mount(self.catalogue, path, name, rank)
        self.metadata |= {k: v for k, v in header.metadata.items() if k not in _NO_REMARKS}
        self._beside |= sharding.beside(header.metadata)
        if checksums.KEY in header.metadata:
            self.sums[name] = checksums.of_value(header.metadata[checksums.KEY])
        offsets = _saved_offsets(header, f"`{path}`")
        for tensor, entry in header.tensors.items():
            before = self.tensors.get(tensor)
            if before is not None and not (offsets and rank is not None):
                first = self.file_of(before)
                text = f"`{self._root}`: tensor `{tensor}` is in `{first}` and in `{name}`"
                hint = "the directory has files of two checkpoints; name one of the files itself"
                raise CorruptError(text, hint=hint, tensor=tensor, found=[first, name])
            dtype, shape, begin, end, crc = entry
            if rank is None and not offsets:
                if crc is None:  # as in most files: of a million tensors each has one object less
                    chunks = Chunks.run(shape, file, begin, end - begin)
                else:
                    chunks = Chunks.single(shape, checksums.extent(file, entry))
                self.tensors[tensor] = Tensor((tensor,), dtype, shape, chunks, MODEL)
            else:
                start = (0,) * len(shape)
                whole = before or Tensor((tensor,), dtype, start, Chunks(), MODEL)
                piece = checksums.extent(file, entry)
                self.tensors[tensor] = self._with_piece(whole, offsets.get(tensor, start), entry, piece)

    def file_of(self, tensor: Tensor) -> str:
        """Return the name of the file that the first piece of a tensor is in."""
        return self.catalogue.files[tensor.chunks.file[0]].name

    def add_unread(self, name: str) -> None:
        """Add a file without its tensors. Raises CorruptError if it is not there."""
        _list(self.catalogue, self._root.inside(name), name)

    def finish(self, order: Iterable[str] = (), ties: dict[str, str] | None = None) -> Catalogue:
        """Return the catalogue with all tensors, `order` first; `ties` are names in an index of tied tensors."""
        for name in dict.fromkeys(order):
            self.catalogue.add(self.tensors.pop(name))
        for tensor in self.tensors.values():
            self.catalogue.add(tensor)
        for name in sorted(self._beside):
            if not (self._root / name).exists():
                of, rest = _REST if name == state_json.NAME else _MORE
                text = f"a part of a {of}: `{name}`, which has {rest}, is not beside it"
                self.catalogue.warnings.append(Warning("missing-part", text))
                self.catalogue.facts["lacks"] = name, rest
        remarks: dict[str, str] = {}
        metadata = self.metadata | (ties or {})
        if root := _root(metadata.get(sharding.ROOT)):
            self.catalogue.facts["root"] = root
            del metadata[sharding.ROOT]
        for name, kept in metadata.items():
            first = self.catalogue.entries.get((kept,))
            if isinstance(first, Tensor) and (name,) not in self.catalogue.entries and name not in sharding.RESERVED:
                charge(len(first.chunks) * len(first.shape))
                (tied := copy(first)).path = (name,)
                self.catalogue.add(tied)
            else:
                remarks[name] = kept
        if remarks:
            self.catalogue.facts["metadata"] = remarks
        return self.catalogue

    def _with_piece(self, tensor: Tensor, offsets: Ints, entry: HeaderEntry, extent: Extent) -> Tensor:
        """Return a tensor with one more box of it."""
        if entry.dtype != tensor.dtype or len(entry.shape) != len(tensor.shape):
            raise CorruptError(
                f"`{self._root}`: tensor `{tensor.name}` is {tensor.dtype} {list(tensor.chunks.sizes[0])} in "
                f"`{self.file_of(tensor)}`, but {entry.dtype} {list(entry.shape)} in `{self.catalogue.files[-1].name}`",
                hint="the directory has files of two checkpoints",
                tensor=tensor.name,
            )
        tensor.shape = tuple(max(n, o + s) for n, o, s in zip(tensor.shape, offsets, entry.shape, strict=True))
        tensor.chunks.add(offsets, entry.shape, extent)
        return tensor


def _root(text: str | None) -> Path:
    """Return the keys that were around a model before it was written as safetensors; none if that is not what the text
    says."""
    keys = None
    with suppress(CorruptError):
        keys = strict_json.parse(text.encode("utf-8", "replace"), sharding.ROOT) if text is not None else None
    return tuple(keys) if isinstance(keys, list) and all(type(key) in (str, int) for key in keys) else ()


def mount(catalogue: Catalogue, path: Location, name: str, rank: int | None = None) -> tuple[int, Header]:
    """Add a file to the catalogue, and return its number and header. Raises CorruptError if the header is wrong."""
    size = _list(catalogue, path, name, rank)
    header = safetensors_header.read_header(path.read, 0, size, name=f"`{path}`")
    return len(catalogue.files) - 1, _with_checksums(catalogue, header, f"`{path}`")


def _with_checksums(catalogue: Catalogue, header: Header, where: str) -> Header:
    """Return the header of the last file with the checksums that ckpttool has left in it. Raises CorruptError if it is
    not as it was written."""
    if checksums.KEY not in header.metadata:
        return header
    checked = checksums.checked(header, where)
    if checked is None:
        text = f"{where}: `{checksums.KEY}` is from another file or a later version: nothing is checked"
        catalogue.warnings.append(Warning("unknown-checksums", text, file=catalogue.files[-1].name))
        return header._replace(metadata={k: v for k, v in header.metadata.items() if k != checksums.KEY})
    catalogue.files[-1].crcs_at = checksums.PLACE
    return checked


def _list(catalogue: Catalogue, path: Location, name: str, rank: int | None = None) -> int:
    """Add a file to the catalogue, and return its size."""
    try:
        size = path.size()
    except ReadError:
        if path.exists() or path.is_link():
            raise
        text = f"`{path}` is not there, but the index names it"
        raise CorruptError(text, hint="copy the missing file too", file=path) from None
    catalogue.files.append(File(path, name, size, rank))
    return size


def _saved_offsets(header: Header, where: str) -> dict[str, Ints]:
    """Return the offsets of each tensor of a file in the whole tensor, if torch wrote it in pieces."""
    text = header.metadata.get(SHARDING)
    if not text:
        return {}
    table = strict_json.parse(text.encode("utf-8", "replace"), f"{where}: its `{SHARDING}`")
    try:
        offsets = {name: tuple(table[name]["saved_offsets"]) for name in header.tensors}
    except (TypeError, KeyError):
        raise CorruptError(f"{where}: its `{SHARDING}` does not give the offsets of every tensor") from None
    for name, at in offsets.items():
        if len(at) != len(header.tensors[name].shape) or not all(type(n) is int and 0 <= n < 1 << 62 for n in at):
            text = f"{where}: tensor `{name}`: {shown(list(at))} is not an offset in its `{SHARDING}`"
            raise CorruptError(text, tensor=name)
    return offsets


# Which files ----------------------------------------------------------------------------------------------------------


def open_file(root: Location, name: str) -> Catalogue:
    """Return the catalogue of one file, which an index may name too."""
    if _RANK_FILE.fullmatch(name) and len(rank_files(root)) > 1:
        text, hint = f"`{root / name}` holds one rank's pieces of tensors", f"name the directory: `{root or '.'}`"
        raise ReadError(text, hint=hint, file=name)
    reader = HeaderMerger(root, "one file")
    reader.add(name, given=True)
    catalogue = reader.finish()
    if _RANK_FILE.fullmatch(name):
        catalogue.warnings.append(_NO_SIZES)
    return catalogue


def open_directory(root: Location, names: Sequence[str], only: Collection[str] | None = None) -> Catalogue:
    """Return the catalogue of a directory with these names: of the model in it, or of the pieces of one. The fact
    `unused` has the other safetensors files. `only` is that of `open_indexed`."""
    model_files = [n for n in names if n.endswith(SUFFIX)]
    ranks = [n for n in model_files if _RANK_FILE.fullmatch(n)]
    whole = [n for n in model_files if not _RANK_FILE.fullmatch(n)]
    indexes = [n for n in names if n.endswith(index.SUFFIX)]
    sharded = root / SHARDED
    if not whole and not indexes:
        return _open_ranks(root, ranks) if ranks else _open_ranks(sharded, rank_files(sharded))
    if ranks:
        text = f"`{root}` has pieces of tensors, {some(ranks, 1)}, beside whole ones, {some(whole or indexes, 1)}"
        raise ReadError(text, hint="move the files of one of them into a directory of their own", file=root)
    catalogue = _open_whole(root, whole, indexes, only)
    used = {f.name for f in catalogue.files}
    unused = [n for n in model_files if n not in used]
    if "partial" not in catalogue.facts:  # else an index names more than the tensors that were asked for
        for index_name in indexes:
            left = {name: left_over(root / name, name, index_name, catalogue.entries) for name in unused}
            catalogue.warnings += filter(None, left.values())
            unused = [name for name in unused if left[name] is None]
        catalogue.facts |= {"unused": unused} if unused else {}
    if others := [n for n in names if n.endswith(_OF_TORCH)]:
        catalogue.warnings.append(Warning("unlisted-file", f"ignored, not safetensors: {some(others)}"))
    if rank_files(sharded):
        catalogue.warnings.append(_joined(sharded, catalogue))
    return catalogue


def left_over(location: Location, name: str, index_name: str, model: Container[Path]) -> Warning | None:
    """Return a warning for a file that is called as those of an index, which does not name it, if all of its tensors
    are in the model: it is from another save. None for any other file."""
    match = _NUMBERED.fullmatch(name.rpartition("/")[2])
    if match is None or index_name.rpartition("/")[2] != f"{match[1]}{index.SUFFIX}":
        return None
    with suppress(CorruptError, ReadError):
        header = safetensors_header.read_header(location.read, 0, location.size(), name=f"`{location}`")
        if all((tensor,) in model for tensor in header.tensors):
            text = f"`{name}` is from another save: `{index_name}` does not name it, but other files with its tensors"
            return Warning("stale-file", text, file=name)
    return None


def _joined(sharded: Location, catalogue: Catalogue) -> Warning:
    """Return a word about the pieces from which torch's writer has joined the files. Raises CorruptError if they are of
    another model, by the names, dtypes and shapes of their tensors, unless the catalogue is that of some files."""
    text = f"`{SHARDED}/` is not read, nor compared"
    if "partial" not in catalogue.facts:
        pieces = _open_ranks(sharded, rank_files(sharded)).tensors
        for tensor in pieces:
            joined = catalogue.entries.get(tensor.path)
            if not isinstance(joined, Tensor) or (joined.dtype, joined.shape) != (tensor.dtype, tensor.shape):
                which = f"`{tensor.name}`, which is another tensor in the files beside it, or none"
                hint = "they are from another save: name one of them, or move one away"
                raise CorruptError(f"`{sharded}` has pieces of {which}", hint=hint, tensor=tensor.name)
        text = f"`{SHARDED}/` is not read: it has the pieces of the same {plural(len(pieces), 'tensor')}"
    if any(not tensor.shape for tensor in catalogue.tensors):
        text = f"torch's consolidation writes 0-d tensors as zeros: `{SHARDED}/` has them as they were saved"
        return Warning("suspect-values", text)
    return Warning("superseded-file", text, file=SHARDED)


def _open_whole(
    root: Location, whole: Sequence[str], indexes: Sequence[str], only: Collection[str] | None
) -> Catalogue:
    """Return the catalogue of files of whole tensors: one of them, those of an index, or all."""
    if len(indexes) > 1 and _INDEX not in indexes:
        text = f"`{root}` has {len(indexes)} indexes, {some(indexes)}"
        raise ReadError(text, hint="name one of them itself", file=root)
    index_name = _INDEX if _INDEX in indexes else next(iter(indexes), None)
    if index_name is not None and _SINGLE not in whole:
        return open_indexed(root, index_name, only)
    # `model.fp16.safetensors` has other values of the same model.
    variants = {name for name in whole if _VARIANT.sub(SUFFIX, name) in {*whole} - {name}}
    catalogue = _open_listed(root, [_SINGLE] if _SINGLE in whole else [n for n in whole if n not in variants])
    if index_name is not None:
        # transformers, too, takes the single file where there are both.
        text = f"`{index_name}` is left aside for `{_SINGLE}`"
        catalogue.warnings.append(Warning("superseded-file", text, file=index_name))
    return catalogue


def _open_listed(root: Location, names: Sequence[str]) -> Catalogue:
    counts, there = Counter((m[1], int(m[3])) for n in names if (m := _NUMBERED.fullmatch(n))), set(names)
    for (stem, count), present in counts.items():
        if present < count:
            missing = next(n for n in sharding.file_names(stem, count) if n not in there)
            text = f"`{root / missing}` is not there, but `{stem}-...` are {count} files"
            raise CorruptError(text, hint="copy the missing file too", file=missing)
    reader = HeaderMerger(root, "one file" if len(names) == 1 else "several files without an index")
    for name in names:
        reader.add(name)
    catalogue = reader.finish()
    if len(names) > 1:
        lost, rest = catalogue.facts.get("lacks", ("", ""))
        if lost.endswith(index.SUFFIX):
            raise CorruptError(f"`{root / lost}` is missing, which has {rest}", hint=_LAST, file=lost)
        text = f"there is no index: {len(names)} files are taken as one checkpoint"
        catalogue.warnings.append(Warning("no-index", text))
    return catalogue


def open_indexed(root: Location, index_name: str, only: Collection[str] | None = None) -> Catalogue:
    """Return the catalogue of the files of an index; with `only`, of those that have the tensors of these names, if the
    files are not on this machine. Raises CorruptError if a tensor is not in its file."""
    where = f"`{root / index_name}`"
    weight_map, parsed = index.parse(read_json(root / index_name), where)
    metadata = parsed or {}
    ties = {k: v for k, v in metadata.items() if isinstance(v, str) and k != checksums.KEY}
    names = dict.fromkeys(weight_map.values())
    needed = _files_of(only, weight_map, ties) if only is not None and not root.store.is_local else None
    reader = HeaderMerger(root, "indexed")
    for name in names:
        if needed is None or name in needed:
            reader.add(name)
        else:
            reader.add_unread(name)
    for tensor, file in weight_map.items():
        found = reader.tensors.get(tensor)
        if needed is not None and file not in needed and found is None:
            continue
        actual = reader.file_of(found) if found is not None else None
        if actual != file:
            where_it_is = f"but it is in `{actual}`" if actual else "which does not have it"
            text = f"{where}: says that tensor `{tensor}` is in `{file}`, {where_it_is}"
            hint = "the index belongs to another save, or two ranks wrote the same file"
            raise CorruptError(text, hint=hint, tensor=tensor, found=actual, expected=file)
    if parsed is None and reader.sums:
        text = f"{where} has no `metadata`, in which the writer of its files keeps the names of tied tensors"
        raise CorruptError(text, hint="use another copy; one that you have written yourself needs `metadata: {}`")
    if checksums.KEY in metadata:
        sums = checksums.check_index(weight_map, metadata, where)
        check_sums(reader.catalogue, sums, reader.sums, where, needed)
    unlisted = [name for name in reader.tensors if name not in weight_map]
    catalogue = reader.finish((name for name in weight_map if name in reader.tensors), ties)
    if needed is not None and len(needed) < len(names):
        catalogue.facts["partial"] = tuple(weight_map)
    if unlisted:
        text = f"tensors in the files that `{index_name}` does not name: {some(unlisted)}"
        catalogue.warnings.append(Warning("unlisted-tensor", text, file=index_name))
    return catalogue


def check_sums(
    catalogue: Catalogue,
    expected: Mapping[str, int] | None,
    actual: Mapping[str, int],
    where: str,
    read: Collection[str] | None = None,
) -> None:
    """Compare the checksums of files, of those that were `read`, with the ones that their index has; None if it has
    those of others. A file without any was written by another tool, which is warned of. Raises CorruptError for one of
    another save."""
    if expected is None:
        text = f"{where}: its checksums are from other files or a later version: nothing in it is checked"
        catalogue.warnings.append(Warning("unknown-checksums", text))
    without = []
    for name in (expected or {}) if read is None else read:
        if expected is not None and name not in actual:
            without.append(name)
        elif expected is not None and actual[name] != expected[name]:
            text = f"{where}: `{name}` is from another save than the index, by their checksums"
            hint = f"take all files from one save; if they do belong together, remove `{checksums.KEY}` from the index"
            raise CorruptError(text, hint=hint, file=name)
    if without:
        text = f"{where} has checksums of files that have none themselves, as another tool wrote them: {some(without)}"
        catalogue.warnings.append(Warning("unknown-checksums", text))


def _files_of(tensors: Iterable[str], weight_map: Mapping[str, str], ties: Mapping[str, str]) -> set[str] | None:
    """Return the files that have these tensors, or None if the index does not name all of them. Pure."""
    files = {weight_map.get(name) or weight_map.get(ties.get(name, "")) for name in tensors}
    return None if None in files else {name for name in files if name is not None}


def _open_ranks(root: Location, names: Sequence[str]) -> Catalogue:
    """Return the catalogue of rank files (one for each rank and file number of the rank's tensors)."""
    if not names:
        raise ReadError(f"`{root}` has no safetensors files", file=root)
    numbers = [tuple(map(int, _RANK_FILE.fullmatch(name).groups())) for name in names]  # type: ignore[union-attr]
    present, count = {k for _, k, _ in numbers}, max(n for _, _, n in numbers)
    if len(present) < count:
        missing = next(k for k in range(1, count + 1) if k not in present)
        text = f"`{root}`: no file is number {missing} of {count}, of any rank"
        raise CorruptError(text, hint="copy the missing files too")
    reader = HeaderMerger(root, "pieces, a file for each rank")
    for name, (shard, _, _) in zip(names, numbers, strict=True):
        reader.add(name, rank=shard - 1)
    _check_grid(reader, root, numbers)
    catalogue = reader.finish()
    catalogue.facts["writer"] = "torch HuggingFaceStorageWriter"
    catalogue.warnings.append(_NO_SIZES)
    ranks = {shard for shard, _, _ in numbers}
    if len(ranks) != max(ranks):
        text = f"the files are of {len(ranks)} ranks, but the last of them is rank {max(ranks) - 1}"
        catalogue.warnings.append(Warning("per-rank", text))
    return catalogue


def _check_grid(reader: HeaderMerger, root: Location, numbers: Sequence[tuple[int, ...]]) -> None:
    """Check that no rank lacks a file. torch writes a piece for each rank that a tensor is sharded over, even one with
    no elements: where ranks with the same file have cut the tensors of another one into fewer pieces, one is missing.

    `numbers` are the shard, the number and the count in the name of each file. Raises CorruptError.
    """
    shards: defaultdict[int, set[int]] = defaultdict(set)
    for shard, k, _ in numbers:
        shards[k].add(shard)
    cuts = dict.fromkeys(shards, 0)  # the most pieces of a tensor, by the number of the file
    for tensor in reader.tensors.values():
        for file in tensor.chunks.file:
            k = numbers[file][1]
            cuts[k] = max(cuts[k], len(tensor.chunks))
    most = max(cuts.values())
    for k, other in product((k for k in cuts if cuts[k] < most), cuts):
        absent = shards[other] - shards[k]
        if absent and cuts[k] < cuts[other] and shards[k] & shards[other]:
            shard = min(absent)
            name = f"shard-{shard:05}-model-{k:05}-of-{numbers[0][2]:05}{SUFFIX}"
            text = f"`{root / name}` is not there, but rank {shard - 1} has pieces of the tensors in other files"
            hint = "copy the missing file too; if its tensors are not sharded, and none was written, put one without "
            raise CorruptError(text, hint=f"{hint}tensors in its place", file=name, expected=cuts[other], found=cuts[k])
