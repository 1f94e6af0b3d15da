"""`ckpttool export`: the model of a checkpoint as `from_pretrained` expects it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written
from ckpttool.cli.terminal import err
from ckpttool.text import plural

if TYPE_CHECKING:
    from ckpttool import Exported


def export(
    src: options.Source, dst: options.ExportDestination, *,
    only: options.OnlyModel = [], exclude: options.Exclude = [], take: options.Take = None,
    shapes: options.Shapes = None,
    rename: options.Rename = [], strip_prefix: options.StripPrefix = None, key_map: options.KeyMap = None,
    names: options.ExportedNames = "released",
    like: options.LikeModel = None, fill_from: options.FillFrom = None, fill: options.Fill = [],
    assets: options.Assets = None, include: options.Include = [], not_secret: options.NotSecretFiles = [],
    dtype: options.Dtype = [], dtype_strict: options.DtypeStrict = False,
    max_shard_size: options.MaxExportShardSize = None, head_dim: options.HeadDim = None,
    strict: options.ConfigStrict = True, card: options.Card = True,
    public: options.Public = False, private: options.Private = False, keep: options.Keep = [],
    create_pr: options.CreatePr = False, tag: options.Tag = None, commit_message: options.CommitMessage = None,
    token: options.Token = None, stage: options.StageUploads = None, in_store: options.InStore = "auto",
    check: options.Check = False, manifest: options.Manifest = None, overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False, threads: options.Threads = None, max_memory: options.MaxMemory = None,
    as_json: options.AsJson = False, quiet: options.Quiet = False, verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Export the model of a checkpoint for transformers, vLLM and the Hugging Face Hub.

    Writes indexed safetensors files without wrapper prefixes, with tied weights once, beside config, tokenizer and
    code. The tensors are compared with the config first. DST is written completely or not at all.

    Examples:
        ckpttool export step-1000 my-model --assets hf://org/base --dtype bfloat16
        ckpttool export step-1000 hf://org/my-model --public --dry-run
        ckpttool export step-1000 my-model --like hf://Qwen/Qwen3-0.6B --take ema
    """
    announce = None if quiet or as_json or dry_run else _list_assets
    respond_written("export", {**locals(), "announce": announce})


def _list_assets(plan: Exported) -> None:
    """Print what goes to the Hub beside the weights before it goes there."""
    from ckpttool.storage.stores import is_remote

    if is_remote(plan.destination) and plan.assets:
        err().line(f"sending {plural(len(plan.assets), 'file')} beside the weights: {', '.join(plan.assets)}")
        err().flush()
