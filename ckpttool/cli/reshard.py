"""`ckpttool reshard`: the same checkpoint for another number of ranks, or another mesh."""

from __future__ import annotations

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written


def reshard(
    src: options.Source, dst: options.ReshardDestination, *,
    to_world: options.ToRanks = None, to_mesh: options.ToMesh = None, like: options.LikeSharding = None,
    placements: options.Placements = [], shard: options.Shard = [], replicate: options.Replicate = [],
    rng: options.Rng = "keep", dataloader: options.Dataloader = "keep",
    to: options.ToSharded = None,
    only: options.Only = [], drop: options.Drop = [], shapes: options.Shapes = None,
    public: options.Public = False, private: options.Private = False, tag: options.Tag = None,
    commit_message: options.CommitMessage = None, token: options.Token = None, stage: options.Stage = None,
    not_secret: options.NotSecret = [], in_store: options.InStore = "auto",
    engine: options.Engine = None, check: options.Check = False, manifest: options.Manifest = None,
    overwrite: options.Overwrite = False, dry_run: options.DryRun = False, threads: options.Threads = None,
    max_memory: options.MaxMemory = None, no_manifest: options.NoManifest = False, resume: options.Resume = False,
    html: options.ReshardHtml = None, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Reshard a checkpoint for another number of ranks or another mesh.

    No process group is needed; under torchrun the processes divide the work. DST is written completely or not at all.

    Examples:
        ckpttool reshard step-1000 step-1000-w16 --to-world 16
        ckpttool reshard step-1000 step-1000-tp --to-mesh shard=4,tp=2 --dry-run
    """
    respond_written("reshard", locals())
