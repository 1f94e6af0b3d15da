"""`ckpttool export`: the model of a checkpoint as `from_pretrained` expects it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import options
from ckpttool.cli.answer import respond_written
from ckpttool.cli.options import Option
from ckpttool.cli.terminal import err
from ckpttool.text import plural

if TYPE_CHECKING:
    from ckpttool import Exported


@options.command(
    "export",
    arguments=(
        options.SOURCE,
        options.reworded(options.DESTINATION, "The directory to write, or hf://org/name on the Hub."),
    ),
    sections={
        "Selection": (
            options.reworded(options.ONLY, "Which model, if there are two."),
            options.EXCLUDE,
            Option("--take TREE", "Export this tree in place of the model: ema, or its whole key."),
            options.SHAPES,
        ),
        "Names": (
            options.RENAME,
            options.STRIP_PREFIX,
            options.MAP,
            Option(
                "--names WHICH",
                "Names as released files have them, or as transformers has them in memory: memory.",
                type=click.Choice(["released", "memory"]),
                default="released",
            ),
        ),
        "Reference": (
            Option(
                "--like FROM", "Names, order, dtypes, files and config of this model: a directory, hf://org/name, ..."
            ),
            Option("--fill-from FROM", "Take the tensors that are missing from this model."),
            Option("--fill GLOB...", "Take only these tensors from there, also if they are not missing. Repeatable."),
        ),
        "Format": (
            Option(
                "--assets DIR",
                "Directory or Hub repository with config, tokenizer and code. Default: beside the weights.",
            ),
            Option(
                "--include GLOB...",
                "Copy these files too, which are no assets by their names: 'docs/*.md'. Repeatable.",
            ),
            Option("--not-secret FILE...", "Send FILE although it seems to have a key or a token in it. Repeatable."),
            options.DTYPE,
            Option(
                "--dtype-strict", "Cast also what the model's library keeps in float32, such as the bias of routers."
            ),
            options.reworded(
                options.MAX_SHARD_SIZE, "Split into files of at most this size: 512MiB, ... Default: 5GB."
            ),
            Option("--head-dim N", "Size of an attention head, if no config has it.", type=click.IntRange(min=2)),
            Option("--no-strict", "Export even if tensors do not match config.json."),
            Option("--no-card", "Write no model card."),
        ),
        "Hugging Face Hub": (
            options.PUBLIC,
            options.PRIVATE,
            Option("--keep GLOB...", "Do not remove these weights of an earlier export. Repeatable."),
            Option("--create-pr", "Open a pull request; do not change the branch."),
            options.TAG,
            options.COMMIT_MESSAGE,
            options.TOKEN,
            options.reworded(
                options.STAGE, "Staging directory for the uploads, kept. Default: up to three temporary files."
            ),
        ),
        "Execution": options.WRITING,
        "Output": options.PRINTING,
    },
    examples=(
        "step-1000 my-model --assets meta-llama/Llama-3.1-8B --dtype bfloat16",
        "step-1000 hf://org/my-model --public --dry-run",
        "step-1000 my-model --like hf://Qwen/Qwen3-0.6B --take ema",
    ),
)
def export(**arguments: Any) -> None:
    """Export the model of a checkpoint for transformers, vLLM and the Hugging Face Hub.

    Writes indexed safetensors files without wrapper prefixes, with tied weights once, beside config, tokenizer and
    code. The tensors are compared with the config first. DST is written completely or not at all.
    """
    if not (arguments["quiet"] or arguments["as_json"] or arguments["dry_run"]):
        arguments["announce"] = _list_assets
    respond_written("export", **arguments)


def _list_assets(plan: Exported) -> None:
    """Print what goes to the Hub beside the weights before it goes there."""
    from ckpttool.storage.stores import is_remote

    if is_remote(plan.destination) and plan.assets:
        err().line(f"sending {plural(len(plan.assets), 'file')} beside the weights: {', '.join(plan.assets)}")
        err().flush()
