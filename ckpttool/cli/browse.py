"""`ckpttool browse`: a checkpoint in the terminal, to walk through."""

from __future__ import annotations

import sys

from ckpttool.cli import options


def browse(path: options.Checkpoint, *, shapes: options.Shapes = None) -> None:
    """Browse a checkpoint in the terminal: its tree, statistics, histograms, heat maps and shards.

    Values are read in the background, those on the screen first. `?` lists the keys, `q` quits.

    Examples:
        ckpttool browse step-1000
        ckpttool browse run7
    """
    from ckpttool.errors import UsageError, require

    require("textual", "`browse`")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("`browse` needs a terminal", hint="`ckpttool inspect` and `ckpttool stats` print the same")
    from ckpttool.cli.browser.app import Browser

    Browser.show(path, shapes)
