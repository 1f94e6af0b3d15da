"""The Hugging Face Hub, as a store to read from and as a destination. The only importer of huggingface_hub.

address     parsing of `hf://org/name@revision/path`
answers     checks of what an endpoint answers, and of where the token goes
client      the client of the library, quiet and with time-outs
errors      exceptions of the client as errors of `ckpttool.errors`
headers     headers and indexes of models, kept for the next look
limits      sizes and times that an answer may take
listing     the files of a revision: names, sizes, digests
retries     attempts after failures that may pass
store       a repository as a store whose files are fetched as they are read
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

from ckpttool.storage.hub.store import locate
from ckpttool.storage.hub.upload import Sent, SentFile, destination

__all__ = ["Sent", "SentFile", "destination", "locate"]
