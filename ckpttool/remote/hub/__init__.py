"""The Hugging Face Hub, as a store to read from and as a destination. The only importer of huggingface_hub.

address     parsing of `hf://org/name@revision/path` and `hf://buckets/org/name/path`
answers     checks of what an endpoint answers, and of where the token goes
blocks      files of which what is read is fetched, in blocks
bucket_mark the mark of a run in a folder of a bucket, until the last file is there
bucket_upload  a bucket as a destination: files are sent, and then named in it, that which makes the checkpoint last
buckets     a bucket as a store, whose files may change
client      the client of the library, quiet and with time-outs
errors      exceptions of the client as errors of `ckpttool.errors`
headers     headers and indexes of models, kept for the next look
limits      sizes and times that an answer may take
listing     the files of a revision: names, sizes, digests
local_files  what is sent: files on this machine, or gathered from the source
retries     attempts after failures that may pass
store       a repository as a store, at one commit
upload      a repository as a destination: files are sent one at a time, and published in one commit
xet         the end of transfers over Xet in which nothing moves
"""

from __future__ import annotations

import huggingface_hub

from ckpttool.errors import UsageError

# Before the modules that import names of later versions.
if tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 22):
    raise UsageError(
        f"`hf://` needs huggingface_hub 1.22 or later, and {huggingface_hub.__version__} is installed",
        hint="`pip install -U huggingface_hub`; transformers 4 needs an older one, so use another environment",
    )

from ckpttool.remote.hub import bucket_upload, buckets, store, upload
from ckpttool.remote.hub.address import BUCKETS
from ckpttool.remote.hub.upload import Sent
from ckpttool.storage.stores import Location

__all__ = ["Sent", "destination", "locate"]


def locate(text: str) -> Location:
    """Return the location of an address. Raises UsageError, RemoteError or ReadError."""
    return buckets.locate(text) if text.startswith(BUCKETS) else store.locate(text)


def destination(text: str) -> Location:
    """Return the location of an address to publish at. Raises UsageError."""
    return bucket_upload.destination(text) if text.startswith(BUCKETS) else upload.destination(text)
