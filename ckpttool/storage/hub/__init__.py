"""The Hugging Face Hub, as a store to read from and as a destination. The only importer of huggingface_hub.

address     parsing of `hf://org/name@revision/path`
client      the client of the library, quiet and with time-outs
errors      exceptions of the client as errors of `ckpttool.errors`
listing     the files of a revision: names, sizes, digests
download    a repository as a store whose files are fetched as they are read
progress    progress of a file in transfer, in bytes
upload      upload of files to a repository, one at a time, in one commit
"""

from __future__ import annotations

from ckpttool.storage.hub.store import locate
from ckpttool.storage.hub.upload import Sent, SentFile, send

__all__ = ["Sent", "SentFile", "locate", "send"]
