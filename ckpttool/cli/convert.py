"""`ckpttool convert`: one format into another."""

from __future__ import annotations

import os

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written


def convert(
    src: options.Source, dst: options.Destination, *,
    only: options.Only = [], drop: options.Drop = [], tensors: options.Tensors = [], exclude: options.Exclude = [],
    shapes: options.Shapes = None, model_from: options.ModelFrom = None, optim_from: options.OptimFrom = None,
    rename: options.Rename = [], strip_wrappers: options.StripWrappers = False,
    strip_prefix: options.StripPrefix = None, like: options.LikeRun = None, key_map: options.KeyMapToApply = None,
    to: options.To = None, producer: options.Producer = None, dtype: options.Dtype = [],
    max_shard_size: options.MaxShardSize = None, to_world: options.ToWorld = None,
    tensor_class: options.TensorClass = None, optim_keys: options.OptimKeys = None,
    optim_root: options.OptimRoot = None,
    public: options.Public = False, private: options.Private = False, tag: options.Tag = None,
    commit_message: options.CommitMessage = None, token: options.Token = None, stage: options.Stage = None,
    not_secret: options.NotSecret = [], in_store: options.InStore = "auto",
    check: options.Check = False, manifest: options.Manifest = None, overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False, threads: options.Threads = None, max_memory: options.MaxMemory = None,
    resume: options.Resume = False, no_manifest: options.NoManifest = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Convert a checkpoint to another format, bit for bit.

    The tensors, objects and names stay the same unless options change them. DST is written completely or not at all;
    under torchrun the processes divide the work.
    Data that the format cannot store is an error, unless --only, --drop or --exclude leaves it out.

    Examples:
        ckpttool convert step-1000 model.safetensors --only model
        ckpttool convert checkpoint.pt step-1000 --to dcp --to-world 8
        ckpttool convert step-1000 hf-resume --producer accelerate --dry-run
        ckpttool convert hf://Qwen/Qwen3-0.6B start --to dcp --like run7/step-10
        ckpttool convert step-1000 fused --to dcp --map fused.json
    """
    arguments = locals()
    shared = False
    if "WORLD_SIZE" in os.environ:
        from ckpttool.transfer.processes import is_of_torchrun

        shared = is_of_torchrun()
    respond_written("convert", {**arguments, "shared": shared})
