"""The benchmark's inputs: which files there are, and making them once. Imports no torch: see `measure`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import files_under, remove

VERSION = 3  # raise it when `make_checkpoint` writes something else
MARK = "bench.json"  # written last: a directory with this file in it is complete
OURS = re.compile(r"bench-out|bench-out-logs|state-\d+-\d+ranks-v\d+|onetensor-\d+|metadata-\d+-\d+ranks")
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Checkpoint:
    """One training state in every form that some contender reads."""

    root: Path

    @property
    def train(self) -> Path:
        """DCP: model, AdamW state and param_groups, written by the ranks."""
        return self.root / "train"

    @property
    def tensors(self) -> Path:
        """DCP: the same data files (hard links) under a .metadata that names only the tensors.

        safetensors holds nothing but tensors, so this is what can become safetensors whole.
        """
        return self.root / "tensors"

    @property
    def weights(self) -> Path:
        """DCP: `tensors`, with all of them under the key `model`: a model as large as the whole state."""
        return self.root / "weights"

    @property
    def experts(self) -> Path:
        """DCP: experts, those of a layer one tensor. See `make_experts`."""
        return self.root / "experts"

    @property
    def expert_list(self) -> Path:
        """DCP: experts of the same bytes, each with tensors of its own."""
        return self.root / "expert_list"

    @property
    def train_pt(self) -> Path:
        """`train` as torch's own dcp_to_torch_save writes it."""
        return self.root / "train.pt"

    @property
    def tensors_pt(self) -> Path:
        """`tensors` as torch's own dcp_to_torch_save writes it."""
        return self.root / "tensors.pt"

    @property
    def tensors_safetensors(self) -> Path:
        """`tensors` as one safetensors file; also what every result is compared with."""
        return self.root / "tensors.safetensors"

    @property
    def bfloat16_safetensors(self) -> Path:
        """`tensors` in bfloat16, twice, as one safetensors file of the same size."""
        return self.root / "bfloat16.safetensors"

    @property
    def accelerate(self) -> Path:
        """DCP: the model alone under the key `model`, as accelerate saves it."""
        return self.root / "pytorch_model_fsdp_0"

    @property
    def hf(self) -> Path:
        """The model as HuggingFaceStorageWriter(save_distributed=True) writes it: safetensors, one file per rank."""
        return self.root / "hf_sharded"

    @property
    def ranks(self) -> Path:
        """`train` as one torch.save file of DTensors for each rank and part, named as verl names them."""
        return self.root / "ranks"

    @property
    def facts(self) -> dict[str, int]:
        """What was made: ranks, tensors, bytes."""
        facts: dict[str, int] = json.loads((self.root / MARK).read_text())
        return facts


def default_dir() -> Path:
    """Where the checkpoints and the outputs go unless `--dir` says otherwise."""
    return Path(tempfile.gettempdir()) / "ckpttool-bench"


def parse_size(text: str) -> int:
    """Bytes from `512MiB`, `10GiB` or a plain number."""
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"not a size: {text!r} (write 512MiB or 10GiB)")
    return int(float(match[1]) * UNITS[match[2].upper()])


def output_dir(directory: Path) -> Path:
    """Where the outputs go; emptied before every run."""
    return directory / "bench-out"


def ensure(directory: Path, size: int, world: int) -> Checkpoint:
    """The checkpoint of about `size` bytes, made now if this directory has none."""
    checkpoint = Checkpoint(directory / f"state-{size}-{world}ranks-v{VERSION}")
    if not (checkpoint.root / MARK).exists():
        remove(checkpoint.root)
        checkpoint.root.mkdir(parents=True)
        need = 8 * size  # train, rank files, two .pt, safetensors, a third each for accelerate and HF; an output; air
        free = shutil.disk_usage(checkpoint.root).free
        if free < need:
            raise SystemExit(f"{directory}: {need >> 20} MiB needed, {free >> 20} MiB free; pass --dir")
        print(f"making a checkpoint of {size >> 20} MiB in {checkpoint.root}", file=sys.stderr)
        maker = Path(__file__).with_name("make_checkpoint.py")
        subprocess.run([sys.executable, maker, checkpoint.root, str(size), str(world)], check=True)
    return checkpoint


def clean(directory: Path) -> None:
    """Remove what the benchmarks made in `directory`, and the directory if nothing else is in it."""
    for path in directory.glob("*"):
        if OURS.fullmatch(path.name):
            size = sum(file.stat().st_blocks * 512 for file in files_under([path]))
            remove(path)
            print(f"removed {path} ({size >> 20} MiB)")
    if directory.exists() and not any(directory.iterdir()):
        directory.rmdir()
