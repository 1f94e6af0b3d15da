"""`ckpttool verify-resume audit`: is everything there that training needs to go on?"""

from __future__ import annotations

from ckpttool.cli.options import Checkpoint
from ckpttool.errors import UsageError


def audit(path: Checkpoint) -> None:
    """Say whether everything is there to go on training, without training."""
    raise UsageError(f"`{path}` cannot be audited yet")
