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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.validation import validate
from ckpttool.errors import ReadError, UsageError
from ckpttool.producers.open import naming, open_source
from ckpttool.storage.crc import crc32
from ckpttool.storage.stores import local_path
from ckpttool.text import meant, size, some
from ckpttool.training import collectives, fill, fsdp1, match
from ckpttool.training.check_read import check_read
from ckpttool.training.contents import Contents, LoadOptions, describe, nested_rest, without_own
from ckpttool.training.fill import Filler
from ckpttool.training.materialize import materialize
from ckpttool.training.read import Reader

log = logging.getLogger("ckpttool")

STRATEGIES = ("auto", "parallel", "broadcast")
# Storage that many processes reading at once make slower, or that only some of them may see.
_SLOW = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "davfs")


@dataclass(slots=True, repr=False)
class Loaded:
    """The result of `load`.

    Rank-local state in `rest` (random states, data loaders) is that of this rank.
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
    if model is None and optimizer is not None:
        raise UsageError("an optimizer is loaded with its model, which knows the names of the parameters")
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
    return load_parts(os.fspath(path), options)


def load_parts(
    path: str,
    options: LoadOptions,
    refuse: Callable[[dict[Any, Any], Contents], None] | None = None,
    fill_own: Callable[[Filler], None] | None = None,
) -> Loaded:
    """Load as `load` does; `refuse` may refuse the rest before any change, `fill_own` fills other objects."""
    strategy = options.strategy
    if strategy not in STRATEGIES:
        hint = meant(strategy, list(STRATEGIES), "one of `auto`, `parallel`, `broadcast`")
        raise UsageError(f"there is no strategy `{strategy}`", hint=hint)
    _check_one_path(path, options)
    chosen, why = choose(path, strategy)
    log.info("loading `%s` by `%s`: %s", path, chosen, why)
    with _opened(path, chosen, options) as (reader, contents):
        loaded = Loaded(path, contents.format, chosen, why, left=contents.left)
        with collectives.together():
            loaded.rest = nested_rest(contents, collectives.rank())
            loaded.without_own = without_own(contents, collectives.rank())
            if refuse is not None:
                refuse(loaded.rest, contents)
        filler = Filler(reader, contents, broadcast=chosen == "broadcast", strict=options.strict)
        if options.model is not None:
            _fill(options.model, options, filler, loaded)
        if fill_own is not None:
            fill_own(filler)
        loaded.bytes_checked, loaded.unchecked = check_read(reader, in_parts=chosen == "parallel")
        loaded.bytes_read = reader.nbytes if reader is not None else 0
    if loaded.uninitialised:
        log.warning("`%s`: not in the checkpoint, and uninitialised: %s", path, some(loaded.uninitialised))
    if loaded.without_own:
        log.warning("`%s`: rank %d saved no %s", path, collectives.rank(), ", ".join(loaded.without_own))
    checked = "".join(f", {size(nbytes)} not: {why}" for why, nbytes in loaded.unchecked.items())
    what = f"{size(loaded.bytes_read)} read by rank {collectives.rank()}, {size(loaded.bytes_checked)} checked{checked}"
    log.info("loaded `%s`: %s", path, what)
    return loaded


def _fill(model: nn.Module, options: LoadOptions, filler: Filler, loaded: Loaded) -> None:
    optimizer = options.optimizer
    if fsdp1.is_fsdp1(model):
        matched = fsdp1.fill(model, optimizer, filler)
    else:
        with collectives.together():
            matched, groups = fill.prepare(model, optimizer, filler)
        if filler.broadcast:
            match.check_alike(matched, groups)
        # What is not in the checkpoint has no values of its own either.
        values = model.state_dict(keep_vars=True)
        without = [name for name in matched.missing if getattr(values.get(name), "is_meta", False)]
        loaded.uninitialised = without + materialize(model, options.device, filler.strict, options.init_buffers)
        fill.fill(model, optimizer, matched, groups, filler)
    loaded.missing, loaded.unexpected = matched.missing, matched.unexpected
    loaded.other_dtype, loaded.without_state = [*matched.other_dtype], matched.without_state


@contextmanager
def _opened(path: str, strategy: str, options: LoadOptions) -> Iterator[tuple[Reader | None, Contents]]:
    """Context manager with the reader, on ranks that read, and what the checkpoint says, on all."""
    reader: Reader | None = None
    contents: Contents | None = None
    with ExitStack() as stack:
        with collectives.together():
            if strategy == "parallel" or collectives.rank() == 0:
                reader = stack.enter_context(closing(Reader(open_source(path, options.shapes), check=options.check)))
                catalogue = reader.source.catalogue
                with naming(path):
                    _check(catalogue, path, options)
                    contents = describe(catalogue, path, reader.whole, options)
        if strategy == "broadcast":
            sent = collectives.from_first(contents.for_others() if contents is not None else None)
            contents = contents or sent
        assert contents is not None
        if strategy == "parallel":
            _check_one_step(path, contents)
        yield reader, contents


def _check(catalogue: Catalogue, path: str, options: LoadOptions) -> None:
    """Raise CorruptError unless what is loaded, and the rest, is complete. A model or an optimizer that is not loaded
    may be damaged; that is logged as a warning."""
    unused = {kind for kind in ("model", "optimizer") if getattr(options, kind) is None}
    own = {path for path in catalogue.entries for where in options.own if path[: len(where)] == where}
    entries = {path: e for path, e in catalogue.entries.items() if e.part.kind not in unused or path in own}
    absent = [fault for fault in catalogue.faults if parts.kind_of_key(fault.facts.get("absent")) in unused]
    validate(replace(catalogue, entries=entries, faults=[fault for fault in catalogue.faults if fault not in absent]))
    for fault in absent:
        log.warning("`%s`: not asked for, and damaged: %s", path, fault.message)


def _check_one_path(path: str, options: LoadOptions) -> None:
    """Raise UsageError on every rank unless all name one checkpoint: by one path, or by paths of the same files, as
    ranks do that name each its own file of a set."""
    place = local_path(path)
    views = collectives.all_gather((path, platform.node(), str(place.real()) if place.exists() else None))
    others = [rank for rank, view in enumerate(views) if _may_differ(view, views[0])]
    if not others:
        return
    files: list[str] = []
    with collectives.together(), closing(open_source(path, options.shapes)) as source:
        files = sorted(local_path(file.location).real() for file in source.catalogue.files)
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
    groups = (
        [(one.params, _plain(one.values.items())) for one in contents.optimizer.groups] if contents.optimizer else []
    )
    rest = _plain((entry.path, entry.value) for entry in contents.rest.objects)
    own = crc32(repr((contents.model, groups, rest)).encode(errors="surrogatepass"))
    ranks = collectives.all_gather(own)
    other = next((rank for rank, crc in enumerate(ranks) if crc != ranks[0]), None)
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
    views = collectives.all_gather((local_path(path).exists(), _filesystem(path)))
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
