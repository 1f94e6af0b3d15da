"""Loading a checkpoint of any format into the model and the optimizer of a training script, on any mesh.

    parallel     every rank reads its own shards from the files, and nothing is sent
    broadcast    rank 0 reads, module by module, and the others receive: for slow storage, or files that only it can see

Both fill the memory of the model; no rank ever has the whole checkpoint. Values other than tensors are small and known
to every rank, so hyper-parameters are set on each of them.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, dotted
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, ReadError, UsageError
from ckpttool.layout.views import Viewed
from ckpttool.producers.open import naming, open_source
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import divide, is_remote, local_path
from ckpttool.text import meant, size, some
from ckpttool.training import collectives, fill, fsdp1, match, released_names, stages
from ckpttool.training.check_read import check_read
from ckpttool.training.check_ties import check_ties
from ckpttool.training.contents import Contents, LoadOptions, describe, own_paths
from ckpttool.training.fill import Filler
from ckpttool.training.match import GroupMatch, ModelMatch
from ckpttool.training.materialize import materialize
from ckpttool.training.rank_values import RankValues
from ckpttool.training.read import Reader

log = logging.getLogger("ckpttool")

STRATEGIES = ("auto", "parallel", "broadcast")
# Storage that many processes reading at once make slower, or that only some of them may see.
_SLOW = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "davfs")


@dataclass(slots=True, repr=False)
class Loaded:
    """The result of `load`.

    Of values that ranks had differently, `rest` has those of this rank.
    """

    path: str  #: path of the checkpoint
    format: str  #: its format
    strategy: str  #: `parallel` or `broadcast`
    why: str  #: reason for the strategy
    bytes_read: int = 0  #: bytes of elements that this rank read
    bytes_checked: int = 0  #: those that were compared with a checksum
    unchecked: dict[str, int] = field(default_factory=dict)  #: bytes that were not, by the reason
    missing: list[str] = field(default_factory=list)  #: names that the checkpoint lacks
    unexpected: list[str] = field(default_factory=list)  #: names that the model lacks
    uninitialised: list[str] = field(default_factory=list)  #: names on the meta device that the checkpoint lacks
    other_dtype: list[str] = field(default_factory=list)  #: tensors cast from integers to real numbers, or back
    without_state: list[str] = field(default_factory=list)  #: trained parameters without optimizer state there
    without_own: list[str] = field(default_factory=list)  #: parts that other ranks saved, and this one did not
    left: list[str] = field(default_factory=list)  #: other models and optimizers that the checkpoint has
    rest: dict[Any, Any] = field(default_factory=dict)  #: all else, nested as it was saved: `rest["step"]`

    def __repr__(self) -> str:
        read = f"{size(self.bytes_read)} read by this rank"
        wrong = ("missing", "unexpected", "uninitialised", "other_dtype", "without_state")
        counts = [f"{len(names)} {what.replace('_', ' ')}" for what in wrong if (names := getattr(self, what))]
        return f"<Loaded: {', '.join((self.path, self.format, self.strategy, read, *counts))}>"


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strategy: str = "auto",
    strict: bool = True,
    check: bool = True,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    strip_prefix: str | None = None,
    device: torch.device | str | None = None,
    init_buffers: Callable[[nn.Module], Any] | None = None,
    shapes: str | None = None,
) -> Loaded:
    """Load the checkpoint at `path` into `model` and `optimizer`, in place. Every rank calls it.

    The model may be wrapped by FSDP2, FSDP1, HSDP, tensor parallelism, DDP or not at all, and be on the meta device, on
    some ranks or all.

    Args:
        path: a checkpoint of any format.
        model: the model to fill, or None to read only the rest.
        optimizer: its optimizer, which need not have stepped.
        strategy: `parallel`, where each rank reads its shards, `broadcast`, where one reads for all, or `auto`.
        strict: if false, missing and unexpected keys, tensors of another kind of dtype, and trained parameters without
            optimizer state are returned instead of refused.
        check: if false, the checksums that the checkpoint has are not compared.
        model_key: the model to load when the checkpoint has several.
        optimizer_key: the optimizer to load, likewise.
        strip_prefix: a prefix to remove from the checkpoint's names.
        device: the device that a model on the meta device gets memory on.
        init_buffers: called with each module of which no rank has the non-persistent buffers, to compute them.
        shapes: a checkpoint or a JSON file with the names and shapes of flat parameters.

    Raises:
        CkptError: the same on every rank, before anything is changed unless reading itself fails, the optimizer refuses
            the state, or a checksum differs: it is known when all has been read, and the model holds that then.
    """
    prefix = f"{strip_prefix.rstrip('.')}." if strip_prefix else ""
    options = LoadOptions(
        model,
        optimizer,
        model_key,
        optimizer_key,
        prefix,
        strategy=strategy,
        strict=strict,
        check=check,
        device=device,
        shapes=shapes,
        init_buffers=init_buffers,
    )

    def targets() -> list[LoadOptions]:
        if model is None and optimizer is not None:
            raise UsageError("an optimizer is loaded with its model, which knows the names of the parameters")
        if model is not None and not isinstance(model, nn.Module):
            hint = "`ckpttool.load_into(path, state)` fills a dict of models, tensors and values"
            raise UsageError(f"`load` fills a `torch.nn.Module`, and this is a {type(model).__name__}", hint=hint)
        return [options]

    return load_parts(path_first(path, "load"), targets)


def path_first(path: object, name: str) -> str:
    """Return the path as text. Raises UsageError for a model in its place: torch's own functions take them in another
    order."""
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    text = f"`{name}` takes the path first, and this is a {type(path).__name__}"
    raise UsageError(text, hint=f"`ckpttool.{name}(path, ...)`")


class OwnObjects(Protocol):
    """Other objects of a script, which `load_parts` loads with its models."""

    def prepare(self, rest: dict[Any, Any], filler: Filler, of_rank: RankValues) -> None:
        """Find what the checkpoint has of them, and change nothing. May raise on one rank."""

    def read(self, filler: Filler) -> None:
        """Read what is sharded, or in a model or an optimizer of the checkpoint. A collective."""

    def restore(self) -> None:
        """Give the objects what was read. May raise on one rank."""


@dataclass(slots=True)
class _Target:
    """A model with its optimizer, matched with the contents: nothing was changed yet."""

    options: LoadOptions
    filler: Filler
    fsdp1: fsdp1.FlatModelMatch | None
    matched: ModelMatch
    groups: list[GroupMatch]


def load_parts(path: str, targets: Callable[[], list[LoadOptions]], own: OwnObjects | None = None) -> Loaded:
    """Load the models that `targets` returns, with their optimizers, and other objects. All of them are matched before
    the first is changed."""
    options: list[LoadOptions] = []

    def arguments() -> dict[str, Any]:
        options.extend(targets())
        return _arguments(options)

    collectives.same_on_all(arguments)
    _check_one_path(path, options[0])
    chosen, why = choose(path, options[0].strategy)
    log.info("loading `%s` by `%s`: %s", path, chosen, why)
    if chosen == "broadcast":
        collectives.same_on_all(lambda: {"keys": sorted(map(dotted, options[0].own))})
    with _opened(path, chosen, options) as (reader, contents):
        fillers = [Filler(reader, one, broadcast=chosen == "broadcast", strict=options[0].strict) for one in contents]
        first, rank = contents[0], collectives.rank()
        loaded = Loaded(path, first.format, chosen, why, left=_left(contents))
        with collectives.together():
            of_rank = RankValues(first.rest, rank, options[0].own)
            loaded.rest, loaded.without_own = of_rank.nested(), [dotted(path) for path in of_rank.lacking]
            if own is not None:
                own.prepare(loaded.rest, fillers[0], of_rank)
        pairs = zip(options, fillers, strict=True)
        prepared = [_prepare(one, filler) for one, filler in pairs if one.model is not None]
        _fill(prepared, loaded)
        if own is not None:
            own.read(fillers[0])
        with _said_to_be_partial(path):
            loaded.bytes_checked, loaded.unchecked = check_read(reader, in_parts=chosen == "parallel")
        loaded.bytes_read = reader.nbytes if reader is not None else 0
    if own is not None:
        with collectives.together():
            own.restore()
    if loaded.uninitialised:
        log.warning("`%s`: not in the checkpoint, and uninitialised: %s", path, some(loaded.uninitialised))
    if loaded.without_own:
        log.warning("`%s`: rank %d saved no %s", path, rank, ", ".join(loaded.without_own))
    checked = "".join(f", {size(nbytes)} not: {why}" for why, nbytes in loaded.unchecked.items())
    what = f"{size(loaded.bytes_read)} read by rank {rank}, {size(loaded.bytes_checked)} checked{checked}"
    log.info("loaded `%s`: %s", path, what)
    return loaded


def _arguments(targets: Sequence[LoadOptions]) -> dict[str, Any]:
    """Return what every rank has to pass alike. Raises UsageError for a strategy that there is none of."""
    one = targets[0]
    if one.strategy not in STRATEGIES:
        hint = meant(one.strategy, list(STRATEGIES), "one of `auto`, `parallel`, `broadcast`")
        raise UsageError(f"there is no strategy `{one.strategy}`", hint=hint)
    return {
        "strategy": one.strategy,
        "strict": one.strict,
        "check": one.check,
        "models": [(t.model is not None, t.model_key) for t in targets],
        "optimizers": [(t.optimizer is not None, t.optimizer_key) for t in targets],
        "strip_prefix": one.prefix,
    }


def _left(contents: Sequence[Contents]) -> list[str]:
    return [part for part in contents[0].left if all(part in one.left for one in contents)]


def _prepare(options: LoadOptions, filler: Filler) -> _Target:
    model, optimizer = options.model, options.optimizer
    assert model is not None
    of_fsdp1 = fsdp1.prepare(model, optimizer, filler) if fsdp1.is_fsdp1(model) else None
    if of_fsdp1 is not None:
        matched, groups = of_fsdp1.matched, of_fsdp1.groups
    else:
        elsewhere = stages.names_elsewhere(model)
        with collectives.together():
            matched, groups = fill.prepare(model, optimizer, filler, elsewhere)
        if filler.broadcast:
            match.check_alike(matched, groups)
    check_ties(matched, filler)
    return _Target(options, filler, of_fsdp1, matched, groups)


def _fill(targets: Sequence[_Target], loaded: Loaded) -> None:
    """Fill the optimizers, which get back what they had if one of them refuses its state, and then the models."""
    for target in targets:
        options, matched = target.options, target.matched
        assert options.model is not None
        if target.fsdp1 is None:
            # What is not in the checkpoint has no values of its own either.
            with collectives.together():
                values = type(options.model).state_dict(options.model, keep_vars=True)
                loaded.uninitialised += [n for n in matched.missing if getattr(values.get(n), "is_meta", False)]
            loaded.uninitialised += materialize(
                options.model, options.device, target.filler.strict, options.init_buffers
            )
        loaded.missing += matched.missing
        loaded.unexpected += matched.unexpected
        loaded.other_dtype += matched.other_dtype
        loaded.without_state += matched.without_state
    with ExitStack() as undo:
        with collectives.together():
            for target in targets:
                if target.options.optimizer is not None:
                    undo.callback(fill.undo(target.options.optimizer))
        for target in targets:
            if target.options.optimizer is not None:
                if target.fsdp1 is not None:
                    fsdp1.fill_optimizer(target.fsdp1, target.filler)
                else:
                    fill.fill_optimizer(target.options.optimizer, target.matched, target.groups, target.filler)
        undo.pop_all()
    for target in targets:
        with _said_to_be_partial(loaded.path):
            if target.fsdp1 is not None:
                fsdp1.fill(target.fsdp1, target.filler)
            elif target.options.model is not None:
                fill.fill(target.options.model, target.matched, target.filler)


@contextmanager
def _said_to_be_partial(path: str) -> Iterator[None]:
    """Context manager in which an error of the script's own code, such as of a hook, says what it leaves behind."""
    try:
        yield
    except CkptError as error:
        if type(error) is CkptError and error.hint is None:
            error.hint = f"the model and the optimizer hold a part of `{path}` now: load again, or stop"
        raise


@contextmanager
def _opened(path: str, strategy: str, targets: Sequence[LoadOptions]) -> Iterator[tuple[Reader | None, list[Contents]]]:
    """Context manager with the reader, on ranks that read, and what the checkpoint says for each target, on all."""
    reader: Reader | None = None
    contents: list[Contents] = []
    with ExitStack() as stack:
        with collectives.together():
            if strategy == "parallel" or collectives.rank() == 0:
                source = stack.enter_context(closing(open_source(path, targets[0].shapes)))
                if strategy == "parallel" and collectives.world_size() > 1:
                    divide(file.location for file in source.catalogue.files)
                # Names of files may become those in memory, and tensors others with them.
                maps = [one for one in targets if one.model is not None and released_names.key_map(one.model)]
                viewed = Viewed(source) if maps else None
                reader = stack.enter_context(closing(Reader(viewed or source, check=targets[0].check)))
                catalogue = reader.source.catalogue
                with naming(path):
                    _check(catalogue, path, targets)
                    contents = [
                        describe(catalogue, path, reader.whole, one, viewed if one in maps else None, rest=not i)
                        for i, one in enumerate(targets)
                    ]
        if strategy == "broadcast":
            sent = collectives.from_first([one.for_others() for one in contents])
            contents = contents or sent
        if strategy == "parallel":
            for one in contents:
                _check_one_step(path, one)
        yield reader, contents


def _check(catalogue: Catalogue, path: str, targets: Sequence[LoadOptions]) -> None:
    """Raise CorruptError unless what is loaded, and the rest, is complete. A model or an optimizer that is not loaded
    may be damaged; that is logged as a warning."""
    unused = {kind for kind in ("model", "optimizer") if all(getattr(one, kind) is None for one in targets)}
    own = own_paths(catalogue, targets[0].own)
    entries = {path: e for path, e in catalogue.entries.items() if e.part.kind not in unused or path in own}
    absent = [fault for fault in catalogue.faults if parts.kind_of_key(fault.facts.get("absent")) in unused]
    validate(replace(catalogue, entries=entries, faults=[fault for fault in catalogue.faults if fault not in absent]))
    for fault in absent:
        log.warning("`%s`: not asked for, and damaged: %s", path, fault.message)


def _check_one_path(path: str, options: LoadOptions) -> None:
    """Raise UsageError on every rank unless all name one checkpoint: by one path, or by paths of the same files, as
    ranks do that name each its own file of a set."""
    place = local_path(path)
    views = collectives.all_gather_of(lambda: (path, platform.node(), str(place.real()) if place.exists() else None))
    others = [rank for rank, view in enumerate(views) if _may_differ(view, views[0])]
    if not others:
        return
    files: list[str] = []
    with collectives.together(), closing(open_source(path, options.shapes)) as source:
        files = sorted(file.location.real() for file in source.catalogue.files)
    own_files = collectives.all_gather(crc32("\n".join(files).encode(errors="surrogatepass")))
    other = next((rank for rank in others if own_files[rank] != own_files[0]), None)
    if other is not None:
        raise UsageError(
            f"rank {other} loads another checkpoint than rank 0: `{views[other][2] or views[other][0]}`, not "
            f"`{views[0][2] or views[0][0]}`",
            hint="give all ranks one path; each then reads its own share",
        )


def _may_differ(view: tuple[str, str, str | None], first: tuple[str, str, str | None]) -> bool:
    """Return whether a rank may name another checkpoint than the first; an unseen path is compared as text."""
    (path, host, real), (first_path, first_host, first_real) = view, first
    are_seen = real is not None and first_real is not None
    return real != first_real if are_seen and host == first_host else path.rstrip("/") != first_path.rstrip("/")


def _check_one_step(path: str, contents: Contents) -> None:
    """Raise UsageError on every rank if they read different checkpoints at one path, such as copies on disks of their
    nodes of which one is old."""

    def crc() -> int:
        groups = contents.optimizer.groups if contents.optimizer else []
        plain = [(one.params, _plain(one.values.items())) for one in groups]
        rest = _plain((entry.path, entry.value) for entry in contents.rest.objects)
        return crc32(repr((contents.model, plain, rest)).encode(errors="surrogatepass"))

    ranks = collectives.all_gather_of(crc)
    other = next((rank for rank, of_rank in enumerate(ranks) if of_rank != ranks[0]), None)
    if other is not None:
        raise UsageError(
            f"`{path}` is another checkpoint on rank {other} than on rank 0",
            hint="copies on the disks of the nodes must be of the same step",
        )


def _plain(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in items if isinstance(value, (bool, int, float, str, type(None)))]


def choose(path: str, strategy: str) -> tuple[str, str]:
    """Return the strategy, the same on every rank, and why."""
    if strategy != "auto":
        return strategy, "asked for"
    if not collectives.is_distributed():
        return "parallel", "there is one process"
    if is_remote(path):
        return "parallel", "it is in a store, from which each rank reads its own share"
    views = collectives.all_gather_of(lambda: (local_path(path).exists(), _filesystem(path)))
    blind = [rank for rank, (exists, _) in enumerate(views) if not exists]
    if views[0][0] and blind:
        return "broadcast", f"rank {blind[0]} does not see the path, rank 0 does"
    slow = [(rank, kind) for rank, (_, kind) in enumerate(views) if kind.startswith(_SLOW)]
    if slow:
        return "broadcast", f"rank {slow[0][0]} sees it on {slow[0][1]}, which is slow for many readers"
    return "parallel", f"all ranks see it on {views[0][1] or 'their disks'}, and each reads its own share"


def _filesystem(path: str) -> str:
    """Return the type of the file system of a path, by its Linux name; empty if it is not known."""
    try:
        table = local_path("/proc/self/mounts").read().decode(errors="replace")
    except ReadError:
        return ""
    real = f"{local_path(path).real()}/"
    mounts = (line.split()[1:3] for line in table.splitlines())
    places = [(place.replace("\\040", " ").rstrip("/") + "/", kind) for place, kind in mounts]
    around = [(len(place), i, kind) for i, (place, kind) in enumerate(places) if real.startswith(place)]
    return max(around)[2] if around else ""
