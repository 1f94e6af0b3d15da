"""torch.save files: .pt .pth .bin .ckpt, and the other files that torch keeps tensors in.

    zip           <root>/data.pkl  byteorder  data/0 data/1 ...    torch 1.6 and later; see `torchzip`
    TorchScript   the same with constants.pkl and code/            `torch.jit.save`; read only
    pt2           data/weights/weight_0 ... and JSON, no pickle    `torch.export.save`; read only, see `torchexport`
    legacy, tar   streams of pickles and raw storages              before torch 1.6; read only, see `torchlegacy`

Upstream: `torch/serialization.py` of torch 0.1.10 to 2.15. A file holds one tree: it becomes key paths by `nesting`, a
module that was saved whole by `torchmodule`. What is written is what torch 2.7 and later write: a storage for each
tensor, tied tensors sharing one.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

FORMAT = Format(
    name="torch",
    title="torch.save file",
    recognise=deferred(f"{__name__}.reader", "recognise"),
    open=deferred(f"{__name__}.reader", "open"),
    create=deferred(f"{__name__}.writer", "create"),
    losses=deferred(f"{__name__}.writer", "losses"),
    is_file=lambda path: True,
    any_state=True,
    marks="torch.save (a zip archive or a pickle)",
    suffixes=(".pt", ".pth", ".bin", ".ckpt", ".pth.tar"),
)
