"""Object stores, to read from and to write to: S3, Google Cloud Storage, Azure, and web servers, which are only read.
The only importer of obstore.

address     addresses, and the client for the bucket of one, with the credentials that are found
claim       which run writes a destination, and the names of its objects
client      requests on the event loop of a thread of their own
errors      exceptions of obstore as errors of `ckpttool.errors`
ranges      ranges of objects in memory, read ahead where a reader goes on
store       a bucket as a store, listed once and read in ranges
upload      a bucket as a destination: objects are sent one at a time, and the last one makes them a checkpoint
"""

from __future__ import annotations

from importlib.util import find_spec

from ckpttool.errors import require

# Before the modules that import it.
if find_spec("obstore") is None:
    require("obstore", "an object store")

from ckpttool.remote.cloud.store import locate
from ckpttool.remote.cloud.upload import Uploaded, destination

__all__ = ["Uploaded", "destination", "locate"]
