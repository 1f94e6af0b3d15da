"""Starts a training as `verify-resume run` starts its run A: observed, and its output directory kept after each save.

python train_hooked.py FOLDER COMMAND ... OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ckpttool.resume import observe

folder, *command = sys.argv[1:]
# Beside the output directory: what the hook itself writes is no save.
for each in (folder, command[-1]):
    os.makedirs(each)
kept = f"{folder}-kept"
variables = observe.environment(folder, observe=True, states=(1,), keep=(command[-1], kept))
os.execve(command[0], command, {**os.environ, **variables})
