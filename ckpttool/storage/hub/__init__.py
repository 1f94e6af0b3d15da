"""The Hugging Face Hub, as a store to read from and as a destination. The only importer of huggingface_hub.

address     parsing of `hf://org/name@revision/path`
client      the client of the library, quiet and with time-outs
errors      exceptions of the client as errors of `ckpttool.errors`
listing     the files of a revision: names, sizes, digests
store       a repository as a store whose files are fetched as they are read
upload      a repository as a destination: files are sent one at a time, and published in one commit
"""

from __future__ import annotations

from ckpttool.storage.hub.store import locate
from ckpttool.storage.hub.upload import Sent, SentFile, destination

__all__ = ["Sent", "SentFile", "destination", "locate"]
