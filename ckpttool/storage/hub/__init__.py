"""The Hugging Face Hub, as a source and as a destination. The only importer of huggingface_hub.

address     `hf://org/name@revision/path`, taken apart
client      the library's client: quiet, with a time-out, and asked for no more than it keeps
failing     what the client raises, as one of our errors with the next thing to do
contents    what a revision of a repository holds: names, sizes, digests
mirror      a repository as a folder whose files are fetched as they are read
watching    how much of a file has gone or come
sending     files to a repository, one at a time, in one commit
"""

from __future__ import annotations

from ckpttool.storage.hub.download import mount
from ckpttool.storage.hub.upload import Sent, SentFile, send

__all__ = ["Sent", "SentFile", "mount", "send"]
