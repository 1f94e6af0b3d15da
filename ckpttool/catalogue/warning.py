"""Typed warnings: what a person should know about a checkpoint that can be read all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckpttool.catalogue.findings import DAMAGE, NOTE, SUSPECT, Finding

Kind = Literal[
    "byte-order",  # values are stored in the other byte order
    "chosen",  # one checkpoint, model or part was taken of several
    "converted",  # a module or a tensor subclass is shown as plain tensors
    "damaged",  # a fault that stops every operation but `inspect`
    "differing-replicas",  # several ranks have stored different values of one tensor
    "empty-file",  # data files of no bytes
    "framework",  # what a framework expects of the files written for it, or what was made for it
    "left-out",  # code, attributes, buffers or files that are not part of the catalogue
    "lost-shards",  # shards of other ranks are in no file
    "missing-file",  # a file that an index names
    "missing-index",  # the index of a rank
    "missing-part",  # a part that such checkpoints have
    "missing-scale",  # scales of quantised weights that are missing, left over or of another shape
    "names",  # other names than those of the source, by a key map or as they were before
    "no-checksum",  # bytes that cannot be verified
    "no-effect",  # an option that changes nothing
    "no-index",  # several files were taken as one checkpoint without an index
    "no-values",  # tensors on the meta device
    "not-compared",  # several ranks have stored an entry, and whether it is the same is not known
    "not-looked",  # a tool whose checkpoints could not be looked for
    "optimizer-keys",  # how the keys of an optimizer were rewritten
    "overlapping-storage",  # tensors that share some of their bytes
    "per-rank",  # entries that only some ranks have, or that each rank has its own of
    "placement",  # how tensors were sharded where the rules leave it open
    "rank-part",  # one file of a sharded checkpoint
    "renamed-rank",  # rank files whose names and contents disagree
    "replicated",  # equal copies, one of which is read
    "stale-file",  # data files of another save
    "stale-index",  # indexes of another save
    "stale-manifest",  # the manifest of an earlier save into the same directory
    "stored-twice",  # equal tensors that are probably tied
    "superseded-file",  # a file that another one is taken in place of
    "suspect-values",  # values that a known defect of the writer has changed
    "uneven-ranks",  # one rank wrote much more than the others
    "root-key",  # a key around all names that the format does not keep in them
    "unknown-checksums",  # checksums of another file, or of a later version
    "unknown-shape",  # shards without the shape of the whole tensor
    "unlisted-file",  # files that the index does not mention
    "unlisted-tensor",  # tensors that the index does not mention
    "unmatched-optimizer",  # optimizer state of parameters that the model does not have
    "unreadable",  # an object that cannot be read
    "unreadable-manifest",  # a manifest that cannot be read
    "unsafe-global",  # a name in a pickle that runs code when loaded; `names` has it
    "unused-storage",  # bytes that no tensor uses
]


_REMARKS = ("chosen", "converted", "framework", "names", "no-effect", "optimizer-keys", "placement")


class Warning(Finding):
    """A finding that the reader of a checkpoint leaves in its catalogue: ``Warning("missing-file", "file `a.pt` is
    missing", file="a.pt")``. Code selects warnings by `kind` and never by `message`, which is for people. `names` are
    the files, objects or globals that the warning is about, where code needs them."""

    __slots__ = ()
    kind: Kind

    def __init__(
        self, kind: Kind, text: str, file: str | None = None, tensor: str | None = None, names: Sequence[str] = ()
    ) -> None:
        gravity = DAMAGE if kind == "damaged" else NOTE if kind in _REMARKS else SUSPECT
        # A tuple: warnings are put together by all that they say.
        super().__init__(gravity, kind, text, file, tensor, names=tuple(names))

    @property
    def text(self) -> str:
        """The message."""
        return self.message

    def prefixed(self, prefix: str) -> Warning:
        """Return the same warning with `prefix: ` before its text."""
        return Warning(self.kind, f"{prefix}: {self.message}", self.file, self.tensor, self.names)
