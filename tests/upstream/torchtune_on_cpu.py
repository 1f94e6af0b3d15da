"""Starts a recipe of torchtune for several ranks on CPUs: `torchtune_on_cpu.py RECIPE --config FILE WORD...`.

Stubbed is what it asks of the memory of a device; training is left as it is.
"""

import runpy
import sys
from pathlib import Path

import torch
import torchtune
from torchtune import training

torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
training.get_memory_stats = lambda *args, **kwargs: {}
training.log_memory_stats = lambda *args, **kwargs: None
sys.argv = sys.argv[1:]
recipe = Path(torchtune.__file__).parents[1] / "recipes" / f"{sys.argv[0]}.py"
runpy.run_path(str(recipe), run_name="__main__")
