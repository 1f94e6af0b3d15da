"""torch.distributed.checkpoint directories, of every torch from 2.0 to 2.15.

    .metadata                      the index, written last; see `metadata`
    __{rank}_{n}.distcp            items back to back; see `items`. n counts threads, or items
    __{rank}.metadata              instead of `.metadata`: `use_collectives=False`, an index for each rank (torch 2.9)
    *.metadata.tmp                 an index that was being written when the save stopped

Upstream: `torch/distributed/checkpoint/filesystem.py`; keys are flattened by `_nested_dict.py` and `_traverse.py`.
A tensor's chunks are unopened items until `resolve`; objects are decoded when the directory is opened, up to a limit.
What DCP cannot express (integer keys, `OrderedDict`, attributes) is written to an attribute `ckpttool` of the index,
which torch keeps and ignores; tied names refer to the same item.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred
from ckpttool.formats.dcp import index

FORMAT = Format(
    name="dcp",
    title="torch.distributed.checkpoint directory",
    recognise=index.looks_like,
    open=deferred(f"{__name__}.reader", "open"),
    create=deferred(f"{__name__}.writer", "create"),
    losses=deferred(f"{__name__}.writer", "losses"),
    chunked=True,
    any_state=True,
    marks="DCP (a directory with `.metadata`)",
    data_suffixes=(".distcp",),
)
