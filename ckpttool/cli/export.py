"""`ckpttool export`: the model of a checkpoint as `from_pretrained` expects it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.conversion_result import tell
from ckpttool.cli.options import (
    AsJson,
    Check,
    DryRun,
    Manifest,
    MaxMemory,
    Overwrite,
    Quiet,
    Shapes,
    Source,
    Threads,
    Verbose,
    complete_part,
)
from ckpttool.cli.progress import Progress
from ckpttool.cli.terminal import err
from ckpttool.text import count, plural, size

if TYPE_CHECKING:
    from ckpttool import Exported
    from ckpttool.storage.hub import Sent


def export(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write, or hf://org/name on the Hub.")],
    assets: Annotated[
        str | None,
        typer.Option(
            "--assets",
            metavar="DIR",
            help="Where config, tokenizer and code lie, here or on the Hub; by default beside the weights.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="[PATTERN=]DTYPE",
            help="Cast floating point tensors: bfloat16, or 'norm*=float32' for some. Repeatable; first match wins.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Files of at most 5GB (the default), 512MiB, ..."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", autocompletion=complete_part, help="Which model, when there are two."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not what matches. Repeatable.")
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="P", help="Take one prefix off the names.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="OLD=NEW", help="Rename; `*` on both sides is the same. @FILE has rules. Repeatable."
        ),
    ] = None,
    key_map: Annotated[
        str | None,
        typer.Option("--key-map", metavar="NAME", help="How a producer names a model: a name, a .json file, or none."),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option("--head-dim", metavar="N", min=2, help="Rows of an attention head, where no config says it."),
    ] = None,
    no_strict: Annotated[
        bool, typer.Option("--no-strict", help="Go on when the tensors are not those of the config.")
    ] = False,
    no_card: Annotated[bool, typer.Option("--no-card", help="Make no model card.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository on the Hub private, when it is created.")
    ] = False,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request on the Hub; the branch stays as it is.")
    ] = False,
    commit_message: Annotated[
        str | None, typer.Option("--commit-message", metavar="TEXT", help="What the commit on the Hub is called.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="DIR", help="Keep the files sent to the Hub here; else one is made at a time."),
    ] = None,
    shapes: Shapes = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    check: Check = False,
    manifest: Manifest = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export the model of a checkpoint for transformers, vLLM and every tool of the Hub.

    Weights without wrappers, tied ones once, split and indexed; config, tokenizer and code as files; compared with what
    the config says before anything is written. DST appears complete or not at all.
    """
    import ckpttool

    with ExitStack() as stack:
        progress = None if quiet or as_json else stack.enter_context(Progress(err()))
        made = ckpttool.export(
            src, dst, only=only or (), exclude=exclude or (), rename=rename or (), strip_prefix=strip_prefix,
            key_map=key_map, head_dim=head_dim, dtype=dtype or (), max_shard_size=max_shard_size, assets=assets,
            strict=not no_strict, card=not no_card, shapes=shapes, overwrite=overwrite, dry_run=dry_run,
            threads=threads, max_memory=max_memory, check=check, manifest=manifest, private=private,
            create_pr=create_pr, commit_message=commit_message, stage=stage, progress=progress,
        )  # fmt: skip
    tell(
        made, "ckpttool/export/1", as_json=as_json, quiet=quiet, verbose=verbose, checked=check, more=_more(made),
        waited=made.asked,
    )  # fmt: skip


def _more(made: Exported) -> list[tuple[str, str]]:
    numbers = ", ".join(f"{count(n)} {name}" for name, n in made.parameters.items())
    rows = [("parameters", numbers or "none")]
    if made.key_map:
        rows.append(("key map", made.key_map))
    if made.assets:
        rows.append(("assets", f"{plural(len(made.assets), 'file')}: {', '.join(made.assets[:5])}"))
    rows.append(("model", made.compared or f"not compared: {made.not_compared}"))
    return rows + (_on_the_hub(made.sent) if made.sent is not None else [])


def _on_the_hub(sent: Sent) -> list[tuple[str, str]]:
    by_status = {
        status: [f.name for f in sent.files if f.status == status] for status in ("new", "changed", "unchanged")
    }
    told = ", ".join(f"{len(names)} {status}" for status, names in by_status.items() if names)
    rows = [("on the Hub", f"{told}; {size(sent.bytes)} {'would go' if sent.dry_run else 'sent'}")]
    if sent.created and sent.dry_run:
        rows.append(("repository", "would be created"))
    rows += [(status, ", ".join(names)) for status, names in by_status.items() if names and status != "unchanged"]
    if sent.removed:
        rows.append(("removed", ", ".join(sent.removed)))
    if not sent.dry_run:
        rows.append(("commit", sent.pull_request or sent.commit or "none: nothing is different"))
    return rows
