"""`python -m ckpttool`, and `torchrun ckpttool ...` from a checkout, which runs this directory as a script."""

import sys
from pathlib import Path

if not __package__:
    # Run as a directory, sys.path[0] is that directory: modules of ours would stand before those of the standard
    # library and of torch.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main() -> None:
    """`ckpttool`, as the shell calls it. What a command imports takes a while, in which it can be interrupted, too."""
    from ckpttool.cli.signals import Terminated, catch_signals
    from ckpttool.errors import INTERRUPTED, TERMINATED

    catch_signals()
    try:
        from ckpttool.cli.app import main as run

        run()
    except KeyboardInterrupt as stop:
        # No command has begun yet.
        word, code = ("terminated", TERMINATED) if isinstance(stop, Terminated) else ("interrupted", INTERRUPTED)
        sys.stderr.write(f"{word}, nothing was written\n")
        sys.exit(code)


if __name__ == "__main__":
    main()
