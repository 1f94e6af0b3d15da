"""The plan of an export: tensors, their names and files, and the assets beside them. Nothing is written until a file
of the plan is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpttool.analysis.result import FileSize
from ckpttool.catalogue import quantization
from ckpttool.catalogue.chosen import chosen_of_run
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CorruptError, LossError, UsageError
from ckpttool.formats.safetensors.sharding import MAX_SHARD_SIZE
from ckpttool.layout import dtype_rules
from ckpttool.layout.key_maps import apply, parse
from ckpttool.layout.move import derived, rebuilt
from ckpttool.layout.rename import rename_entries
from ckpttool.layout.selection import Selection, check_dtypes
from ckpttool.layout.views import Viewed
from ckpttool.models import adapters, architecture, assets, bundles, float32_names, key_maps, like, select_model, ties
from ckpttool.models import reference as references
from ckpttool.models.architecture import Expected
from ckpttool.models.assets import Assets
from ckpttool.models.bundles import BundleModule
from ckpttool.operations import secrets, write
from ckpttool.operations.export import card, weights
from ckpttool.operations.secrets import Secret
from ckpttool.operations.write import Conversion, OpenSource, WriteOptions
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.open import naming
from ckpttool.storage import files
from ckpttool.storage.stores import Outgoing, is_remote, locate
from ckpttool.text import count, is_or_are, meant, plural, some
from ckpttool.transfer.execute import Transferred

NAMES = ("released", "memory")


@dataclass(slots=True, repr=False)
class Exported(Conversion):
    """The result of an export, or its plan."""

    command = "export"

    like: str = ""  #: reference whose names, dtypes and files it has, or empty
    take: str = ""  #: tree that was exported in place of the model, or empty
    filled: list[str] = field(default_factory=list)  #: names of tensors that are those of `filled_from`
    filled_from: str = ""  #: base that missing tensors were taken from, or empty
    parameters: dict[str, int] = field(default_factory=dict)  #: number of elements by dtype, tied ones counted once
    assets: list[str] = field(default_factory=list)  #: all files that were copied: config, tokenizer, template, code
    key_map: str = ""  #: key map that was applied, or empty
    adapter: bool = False  #: whether it is an adapter of PEFT
    compared: str = ""  #: class of transformers, or reference, whose tensors were compared
    not_compared: str = ""  #: reason why they were not compared
    transformers_seconds: float = 0.0  #: part of `seconds` that transformers took to build the model
    card: bool = False  #: whether a model card was written

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """What is exported, by which names, and what the model was compared with."""
        yield "elements", ", ".join(f"{count(n)} {name}" for name, n in self.parameters.items()) or "none"
        if self.key_map:
            yield "key map", self.key_map
        if self.take:
            yield "taken", f"tree `{self.take}`, instead of the model"
        if self.like:
            yield "like", self.like
        if self.filled:
            yield "filled", f"{plural(len(self.filled), 'tensor')} from {self.filled_from}"
        if self.assets:
            yield "assets", f"{plural(len(self.assets), 'file')}: {', '.join(self.assets)}"
        yield "model", self.compared or f"not compared: {self.not_compared}"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export: `ExportOptions(dtype=("bfloat16",), assets="base/")`."""

    selection: Selection = field(default_factory=Selection)
    key_map: str | None = None
    names: str = NAMES[0]
    head_dim: int | None = None
    dtype: Sequence[str] = ()
    dtype_strict: bool = False
    max_shard_size: int | None = None
    assets: str | None = None
    strict: bool = True
    card: bool = True
    shapes: str | None = None
    include: Sequence[str] = ()
    not_secret: Sequence[str] = ()
    like: str | None = None
    fill_from: str | None = None
    fill: Sequence[str] = ()
    take: str | None = None


@dataclass(slots=True)
class Export:
    """A plan: `files` in the order in which they are written, the result so far, and the sums over files that were read
    in `moved`; `report` reports their bytes. The source is open as long as the block of `planned` lasts. `unless_there`
    are names of files that are not written where the destination has one: a model card without `--assets`."""

    files: list[Outgoing]
    result: Exported
    source: Viewed
    planned: Catalogue
    moved: Transferred
    unless_there: tuple[str, ...]
    components: Sequence[BundleModule]
    report: Callable[[], None]


@contextmanager
def planned(result: Exported, options: ExportOptions, how: WriteOptions) -> Iterator[Export]:
    """Open the source of `result` and plan its export. Progress counts bytes of weights over all files.

    Raises the errors of `ckpttool.errors`.
    """
    src, memory = result.source, how.max_memory
    with write.open_sources(src, options.shapes) as opened, ExitStack() as stack:
        reference = references.read(stack, options.like) if options.like is not None else None
        result.notes += reference.notes if reference is not None else []
        folder = locate(options.assets) if options.assets is not None else None
        if folder is not None:
            stack.callback(folder.store.close)
        elif reference is not None and (reference.assets.paths or reference.source is None):
            folder = reference.folder
        source = opened.source.catalogue
        result.source_format = source.format
        base = None
        if options.fill_from is not None:
            whole = CombinedSource.over(opened.source)
            is_same = reference is not None and options.fill_from == options.like
            from_ = reference if reference and is_same else references.read(stack, options.fill_from, is_run=True)
            base = like.base(whole, from_, options.fill)
            result.notes += [] if from_ is reference else from_.notes
            opened = _with_base(opened, whole)
        with naming(opened.path):
            viewed = Viewed(opened.source)
            beside = assets.collect(folder, source, options.include)
            components = _plan(source, viewed, beside, reference, base, options, result)
        catalogue = components[0].catalogue if len(components) == 1 else _combined(components)
        progress = write.with_downloads(how.progress, opened, catalogue)
        sends, can_copy = is_remote(result.destination), how.can_copy
        moving = weights.Moving(viewed, opened.before, how.threads, memory, progress, sends, can_copy)
        stem = weights.ADAPTER if result.adapter else weights.DIFFUSION if beside.class_name else weights.MODEL
        outgoing = []
        for one in components:
            kind, given = stem if one is components[0] else weights.MODEL, None
            if reference is not None and one is components[0] and options.max_shard_size is None:
                kind, given = like.files(one.catalogue, reference) or (kind, None)
            most = options.max_shard_size or MAX_SHARD_SIZE
            outgoing += weights.outgoing(one.catalogue, most, moving, stem=kind, folder=one.folder, given=given)
        _summarise(result, catalogue, source, viewed)
        outgoing += _other_files(beside, result, catalogue, source, options)
        _check_secrets(outgoing, beside.included, catalogue, options, result)
        result.files = [FileSize(file.name, file.size) for file in outgoing]
        result.file_bytes = sum(file.size for file in outgoing)
        result.memory_bytes = write.expected_memory(catalogue, result.cast, how.threads, memory)
        named = options.assets is not None and not result.card
        kept = () if named else (assets.CARD,)
        yield Export(outgoing, result, viewed, catalogue, moving.moved, kept, components, moving.report)


def _with_base(opened: OpenSource, whole: CombinedSource) -> OpenSource:
    """Return the source with the files of a base, which must not change while they are read either."""
    added = whole.catalogue.files[len(opened.source.catalogue.files) :]
    before = opened.before | files.fingerprint(file.location for file in added if not file.location.is_remote)
    return replace(opened, source=whole, before=before)


def _plan(
    source: Catalogue,
    viewed: Viewed,
    beside: Assets,
    reference: references.Reference | None,
    base: like.Base | None,
    options: ExportOptions,
    result: Exported,
) -> list[BundleModule]:
    """Return the tensors to write, each with its origin in the source, by folder: the model of the config first."""
    if options.take is not None:
        model = select_model.tree_of(source, options.take, result.notes, strict=options.strict and reference is None)
        result.take = options.take
    else:
        model = select_model.model_of(source, options.selection.only)
    planned = select_model.renamed(model, options.selection, reference.known if reference is not None else ())
    config = beside.adapter
    planned, method = adapters.without_base(planned, config)
    result.adapter = bool(method)
    if config is not None:
        _check_adapter(planned, method, config, beside, options, result)
    others: list[BundleModule] = []
    alone = planned
    if not result.adapter:
        planned, others = bundles.place(planned, beside)
    if reference is None:
        expected = _expected(beside, options, result)
        if expected is not None and planned is alone:
            planned = select_model.renamed(model, options.selection, expected.memory)
        unmapped = planned
        planned = planned if result.adapter else _mapped(planned, viewed, beside, options, result)
    same = partial(ties.same_bytes, viewed)
    if reference is not None:
        planned = _like(planned, source, viewed, beside, reference, base, options, result)
        return [BundleModule(beside.main, planned), *others]
    if expected is not None:
        planned = _released(planned, unmapped, expected, viewed, beside, options, result)
        planned = ties.by_model(planned, expected.tied, same, result.notes)
    elif not result.adapter:
        planned = ties.by_names(planned, beside.ties_words, same, result.notes)
    check_dtypes(options.dtype, _combined([BundleModule("", planned), *others]) if others else planned)
    planned = _cast(planned, expected, beside, options, result)
    if expected is not None:
        _compare(planned, expected, beside, options, result)
    general = dtype_rules.caster(options.dtype)
    others = [BundleModule(one.folder, dtype_rules.cast(one.catalogue, general)) for one in others]
    return [BundleModule(beside.main, planned), *others]


def _like(
    planned: Catalogue,
    source: Catalogue,
    viewed: Viewed,
    beside: Assets,
    reference: references.Reference,
    base: like.Base | None,
    options: ExportOptions,
    result: Exported,
) -> Catalogue:
    """Return the tensors as the reference has them."""
    where, rows = result.source, options.head_dim or beside.head_dim
    named, notes = options.key_map, result.notes
    planned, keymap = like.mapped(planned, viewed, reference, named, beside.config, rows, notes)
    result.key_map = keymap.name if keymap is not None else ""
    same = partial(ties.same_bytes, viewed)
    planned = ties.by_names(planned, beside.ties_words or None, same, [])
    try:
        found = like.fitted(planned, reference, base, where)
    except (CorruptError, LossError):
        # It takes transformers seconds to say which tensors the model ties.
        expected = _expected(beside, options, result)
        if expected is None or not expected.tied:
            raise
        planned = ties.by_model(planned, expected.tied, same, [])
        found = like.fitted(planned, reference, base, where, expected.tied)
    if base is not None:
        facts = _facts(beside, options)

        def mapped(catalogue: Catalogue) -> Catalogue:
            return apply(keymap, catalogue, viewed, facts)[0] if keymap is not None else catalogue

        like.check_untrained(found.filled, source, options.selection, mapped, base, where, result.notes)
        result.filled, result.filled_from = found.filled, base.path
    for name, twin in found.twins:
        result.notes.append(f"`{name}` is `{twin}`, which is written once, as in the reference")
    result.like, result.compared = reference.path, f"`{reference.path}`"
    check_dtypes(options.dtype, found.catalogue)
    if options.dtype:
        return _cast(found.catalogue, None, beside, options, result)
    return like.cast(found.catalogue, reference)


def _combined(components: Sequence[BundleModule]) -> Catalogue:
    """Return all tensors, under names that begin with their folders."""
    tensors = [
        derived(t, path=(one.folder + t.name,), alias=(f"{one.folder}{t.alias[0]}",) if t.alias else None)
        for one in components
        for t in one.catalogue.tensors
    ]
    return rebuilt(components[0].catalogue, tensors, {})


def _cast(
    planned: Catalogue, model: Expected | None, beside: Assets, options: ExportOptions, result: Exported
) -> Catalogue:
    """Return the tensors with their new dtypes. What the library of the model keeps in float32, so that routers choose
    the same experts, stays float32 for a `--dtype` without a pattern, which is noted."""
    wanted = dtype_rules.general(options.dtype)
    scales = set[str]() if wanted is None or options.dtype_strict else _scales(planned, beside, options, result)
    asked = dtype_rules.cast(planned, dtype_rules.caster(options.dtype, scales=scales))
    if wanted is None or options.dtype_strict or result.adapter:
        return asked
    stays, who = float32_names.kept(beside.architecture or beside.class_name, wanted), "the model's library"
    if model is not None:
        prefix = f"{model.prefix}."
        names = {each for name in model.float32 for each in (name, prefix + name, name.removeprefix(prefix))}
        if model.library.startswith("transformers 4."):
            # It rounds the biases of some routers itself, unlike later versions, which may load the model, too.
            listed = stays
            stays, who = (lambda name: name in names or listed(name)), "transformers"
        else:
            stays, who = names.__contains__, model.library
    kept = dtype_rules.cast(planned, dtype_rules.caster(options.dtype, stays, scales))
    different = [one.name for one, other in zip(kept.tensors, asked.tensors, strict=True) if one.dtype != other.dtype]
    if different:
        result.notes.append(
            f"{plural(len(different), 'tensor')} {is_or_are(different)} float32, as {who} loads "
            f"{'it' if len(different) == 1 else 'them'} whatever the dtype: {some(different)}; `--dtype-strict` casts "
            "all"
        )
    return kept


def _scales(planned: Catalogue, beside: Assets, options: ExportOptions, result: Exported) -> set[str]:
    """Return the names of the scales of quantised weights, which a bare `--dtype` leaves; this is noted."""
    config = (beside.config or {}).get("quantization_config")
    scales = quantization.analyse(planned, config if isinstance(config, dict) else {}).companions
    if left := dtype_rules.left_scales(planned, options.dtype, scales):
        number = plural(len(left), "scale")
        why = f"of quantised weights {is_or_are(left)} not cast"
        result.notes.append(f"{number} {why}: {some(left)}; `--dtype-strict` casts all")
    return scales


def _check_adapter(
    planned: Catalogue, method: str, config: Any, beside: Assets, options: ExportOptions, result: Exported
) -> None:
    try:
        adapters.check(planned, method, config, str(beside.paths[assets.ADAPTER]))
    except CorruptError as error:
        if options.strict:
            raise
        result.notes.append(error.message)


def _mapped(planned: Catalogue, viewed: Viewed, beside: Assets, options: ExportOptions, result: Exported) -> Catalogue:
    names = [tensor.name for tensor in planned.tensors]
    keymap = key_maps.chosen(options.key_map, names, beside.config, released=options.names == "released")
    if keymap is None:
        return planned
    mapped, unknown = apply(keymap, planned, viewed, _facts(beside, options))
    if len(unknown) == len(names):
        raise UsageError(
            f"`--map {options.key_map}`: none of its rules matches a tensor here",
            hint=f"names here are like `{names[len(names) // 2]}`",
        )
    result.key_map = keymap.name
    if options.key_map is None:
        result.notes.append(f"the names are those of key map `{keymap.name}` ({keymap.title}), which is applied")
    return mapped


def _facts(beside: Assets, options: ExportOptions) -> dict[str, int]:
    return key_maps.facts(beside.config, options.head_dim or beside.head_dim)


def _released(
    planned: Catalogue,
    unmapped: Catalogue,
    model: Expected,
    viewed: Viewed,
    beside: Assets,
    options: ExportOptions,
    result: Exported,
) -> Catalogue:
    """Return the tensors under the names of the model, without a prefix that the training put before them; and under
    those of files, if the library says how they become of those in memory: also of those in the memory of another
    version than a key map is for, which makes files of some."""
    is_free = options.names == "released" and options.key_map is None
    found = _compared_with(planned, model)
    if is_free and found.differs and (again := _compared_with(unmapped, model)).in_memory and not again.differs:
        planned, found = unmapped, again
    if found.prefix:
        planned = rename_entries(planned, partial(architecture.with_prefix, change=found.prefix))
        what = "put before" if found.prefix[0] == "+" else "removed from"
        result.notes.append(f"`{found.prefix[1:]}` is {what} the names, which are then those of `{model.architecture}`")
    if not (is_free and found.in_memory and model.rules):
        return planned
    keymap = parse({"name": model.library, "rules": model.rules}, model.library)
    result.key_map = keymap.name
    result.notes.append(f"the names are those that {model.library} has in memory; it says those of files, as written")
    return apply(keymap, planned, viewed, _facts(beside, options))[0]


def _compared_with(planned: Catalogue, model: Expected) -> architecture.ArchitectureDifferences:
    shapes = {tensor.name: tensor.shape for tensor in planned.tensors if tensor.alias is None}
    return architecture.compare(shapes, model)


def _expected(beside: Assets, options: ExportOptions, result: Exported) -> Expected | None:
    """Return the model of the config; without one, `not_compared` of the result says why."""
    if result.adapter:
        if assets.ADAPTER not in beside.paths:
            result.notes.append(f"PEFT needs an `{assets.ADAPTER}` too, and there is none: pass `--assets`")
        result.not_compared = "an adapter is not a model of its own"
    elif beside.main + assets.CONFIG not in beside.paths or beside.config is None:
        result.not_compared = "there is no `config.json`: pass `--assets` with the directory that has it"
    else:
        began = time.monotonic()
        model = architecture.expected(beside.config, dtype_rules.general(options.dtype))
        result.transformers_seconds = time.monotonic() - began
        if not isinstance(model, str):
            return model
        result.not_compared = model
    return None


def _compare(planned: Catalogue, model: Expected, beside: Assets, options: ExportOptions, result: Exported) -> None:
    shapes = {tensor.name: tensor.shape for tensor in planned.tensors if tensor.alias is None}
    compared = architecture.compare(shapes, model)
    if compared.differs or compared.prefix:
        error = architecture.refusal(compared, shapes, model, beside.paths[beside.main + assets.CONFIG])
        if options.strict:
            raise error
        result.not_compared = error.message
        return
    result.compared = f"{model.architecture} of {model.library}"
    if compared.in_memory:
        other = next((name for name in model.files if name not in shapes), "")
        result.notes.append(
            f"the names are those that transformers has in memory; it loads them, but files have others: `{other}`"
        )


def _other_files(
    beside: Assets, result: Exported, planned: Catalogue, source: Catalogue, options: ExportOptions
) -> list[Outgoing]:
    """Return the files beside the weights."""
    files, notes = assets.outgoing(beside, _main_dtype(planned), adapter=result.adapter)
    result.notes += [*beside.notes, *notes]
    result.assets = [file.name for file in files]
    if options.card and assets.CARD not in result.assets:
        files.append(assets.of_bytes(assets.CARD, card.text(result, source, beside).encode()))
        result.card = True
    return files


def _check_secrets(
    files: list[Outgoing], included: Sequence[str], planned: Catalogue, options: ExportOptions, result: Exported
) -> None:
    """Raise UsageError for a file to be sent that has a key or a token in it; for a directory, notes it."""
    known = {file.name for file in files}
    for name in options.not_secret:
        if name not in known:
            raise UsageError(
                f"`--not-secret {name}`: no such file is written",
                hint=meant(name, sorted(known), "`--dry-run` lists the files"),
            )
    texts = [file for file in files if not file.name.endswith(".safetensors") and file.name not in options.not_secret]
    found = secrets.in_files(texts, [name for name in included if name not in options.not_secret])
    inside = secrets.in_text("\n".join(tensor.name for tensor in planned.tensors).encode("utf-8", "replace"))
    if inside is not None:
        found.append(Secret("model.safetensors", 0, f"{inside[1]}, in the name of a tensor"))
    if found and is_remote(result.destination):
        raise UsageError(
            f"{found[0]}, and nothing is sent" + (f"; {len(found) - 1} more files have one" if found[1:] else ""),
            hint="remove it, and revoke it if others could read it; "
            f"if it is not a secret, `--not-secret {found[0].file}` sends the file",
            file=found[0].file,
            found=[str(one) for one in found],
        )
    result.notes += [f"{one}: look at it before you publish this directory" for one in found]


def _main_dtype(planned: Catalogue) -> str | None:
    """Return the floating-point dtype of most of the bytes; `dtype` of a config is not about quantized weights."""
    counted: Counter[str] = Counter()
    for tensor in planned.tensors:
        if tensor.dtype.kind == "float" and tensor.dtype.itemsize > 1:
            counted[tensor.dtype.name] += tensor.nbytes
    return max(counted, key=lambda name: (counted[name], DTYPES[name].itemsize)) if counted else None


def _summarise(result: Exported, planned: Catalogue, source: Catalogue, viewed: Viewed) -> None:
    write.count_tensors(result, planned)
    filled = {*result.filled}
    kept = (tensor for tensor in planned.tensors if tensor.name not in filled)
    result.dropped = write.left_out(source, {one.path for t in kept for one in viewed.stored(t.origin or t)})
    numbers: Counter[str] = Counter()
    for tensor in planned.tensors:
        if tensor.alias is None:
            numbers[tensor.dtype.name] += tensor.numel
    result.parameters = dict(numbers.most_common())
    result.notes[:0] = [*chosen_of_run(source), *map(str, source.warnings + planned.warnings)]
