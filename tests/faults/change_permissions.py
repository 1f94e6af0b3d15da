"""Run ckpttool, and change permissions in the middle of it.

    python change_permissions.py CALL NTH WHAT WORDS...

runs `ckpttool WORDS...`, and just before the NTH call of `os.CALL` that is about a checkpoint, WHAT happens: `EACCES`
is what that call and all after it get, as from a network file system whose rights were taken away; `555:/some/folder`
gives the folder, and what is in it, that mode.

Calls about a checkpoint are those with a path below `$ALTERING`, also in an open directory, or a descriptor of one.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    name, nth, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    top, real, seen = os.environ["ALTERING"], getattr(os, name), [0]

    def call(first: Any, *rest: Any, **keywords: Any) -> Any:
        folder = keywords.get("dir_fd", keywords.get("src_dir_fd"))
        if isinstance(first, int):
            path = os.readlink(f"/proc/self/fd/{first}")
        else:
            path = os.path.join("" if folder is None else os.readlink(f"/proc/self/fd/{folder}"), os.fspath(first))
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if path.startswith(top):
            seen[0] += 1
            code = getattr(errno, what, None)
            if code is not None and seen[0] >= nth:
                raise OSError(code, os.strerror(code), *([] if isinstance(first, int) else [first]))
            if code is None and seen[0] == nth:
                mode, _, folder = what.partition(":")
                for one in (*Path(folder).rglob("*"), Path(folder)):
                    one.chmod(int(mode, 8))
        return real(first, *rest, **keywords)

    setattr(os, name, call)
    sys.argv[1:] = sys.argv[4:]
    from ckpttool.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
