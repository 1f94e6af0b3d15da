"""The Hugging Face Hub, as a store to read from and as a destination. The only importer of huggingface_hub.

address     `hf://org/name@revision/path`, parsed
client      the library's client: quiet, with a time-out
errors      the client's exceptions as errors of `ckpttool.errors`
listing     the files of a revision: names, sizes, digests
download    a repository as a store, whose files are fetched as they are read
progress    how much of a file has been sent or received
upload      files to a repository, one at a time, in one commit
"""

from __future__ import annotations

from ckpttool.storage.hub.download import locate
from ckpttool.storage.hub.upload import Sent, SentFile, send

__all__ = ["Sent", "SentFile", "locate", "send"]
