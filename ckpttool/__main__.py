"""`python -m ckpttool`, and `torchrun ckpttool ...` from a checkout, which runs this directory as a script."""

import sys
from pathlib import Path

if not __package__:
    # Run as a directory, sys.path[0] is that directory: modules of ours would stand before those of the standard
    # library and of torch.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ckpttool.cli.app import main

if __name__ == "__main__":
    main()
