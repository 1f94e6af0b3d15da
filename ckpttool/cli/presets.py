"""What `--preset` fills in for the scripts of a framework: what a flag or the command says itself is kept.

trainer       scripts that parse transformers' TrainingArguments, such as run_clm.py
accelerate    scripts like accelerate's complete_nlp_example.py
lightning     LightningCLI
torchtitan    python -m torchtitan.train
nanogpt       nanoGPT's train.py
torchtune     tune run with a recipe that saves after each epoch; a step is an epoch of one step
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.text import meant

AT, UNTIL = 4, 8


@dataclass(frozen=True, slots=True)
class Preset:
    """The options of `verify-resume run` for the scripts of a framework. `words` are added to the command, each a flag
    with its value; `{at}` and `{until}` are steps. `one_step` is the word by which a checkpoint comes after each step
    of the optimizer: with another value, losses and what is observed have other numbers than the checkpoints."""

    checkpoints: str
    resume_with: str
    words: Sequence[tuple[str, ...]]
    loss: str | None = None
    one_step: str | None = None

    def command(self, words: Sequence[str], at: int, until: int) -> list[str]:
        """Return a command with the words that it has not."""
        given = {re.split(r"[=+]", word, maxsplit=1)[0] for word in words}
        steps = {"at": str(at), "until": str(until)}
        added = [
            re.sub(r"\{(at|until)\}", lambda match: steps[match[1]], word)
            for row in self.words
            if re.split(r"[=+]", row[0], maxsplit=1)[0] not in given
            for word in row
        ]
        return [*words, *added]

    def other_steps(self, words: Sequence[str]) -> str | None:
        """Return the word of a command by which a checkpoint comes after another number of steps than one."""
        flag = (self.one_step or "").partition("=")[0]
        given = [word for word in words if self.one_step is not None and word.startswith(f"{flag}=")]
        return next((word for word in given if word != self.one_step), None)


PRESETS = {
    "trainer": Preset(
        checkpoints="{out}/checkpoint-{step}",
        resume_with="... --resume_from_checkpoint {checkpoint}",
        words=(
            ("--max_steps", "{until}"),
            ("--save_strategy", "steps"),
            ("--save_steps", "1"),
            ("--logging_steps", "1"),
            ("--report_to", "none"),
        ),
        loss="trainer:.",
    ),
    "accelerate": Preset(
        checkpoints="{out}/step_{step}",
        resume_with="... --resume_from_checkpoint {checkpoint}",
        words=(("--checkpointing_steps", "1"),),
    ),
    "lightning": Preset(
        checkpoints="{out}/lightning_logs/version_*/checkpoints/*step={step}.ckpt",
        resume_with="... --ckpt_path {checkpoint}",
        words=(
            ("--trainer.default_root_dir", "{out}"),
            ("--trainer.max_steps", "{until}"),
            ("--trainer.log_every_n_steps", "1"),
            ("--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir={out}"),
            (
                "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
                "--trainer.callbacks.every_n_train_steps=1",
                "--trainer.callbacks.save_top_k=-1",
            ),
        ),
        loss="csv:lightning_logs/version_*/metrics.csv",
    ),
    "torchtitan": Preset(
        checkpoints="{out}/checkpoint/step-{step}",
        resume_with="...",
        words=(
            ("--dump_folder", "{out}"),
            ("--training.steps", "{until}"),
            ("--checkpoint.enable",),
            ("--checkpoint.interval", "1"),
            ("--checkpoint.keep_latest_k", "0"),
            ("--metrics.log_freq", "1"),
        ),
        # Colours stand between the words.
        loss=r"step:(?:\x1b\[[\d;]*m|\s)*(?P<step>\d+).*?loss:(?:\x1b\[[\d;]*m|\s)*(?P<loss>[\d.]+)",
    ),
    "nanogpt": Preset(
        checkpoints="{out}/ckpt.pt",
        resume_with="... --init_from=resume",
        words=(
            ("--out_dir={out}",),
            ("--max_iters={until}",),
            ("--lr_decay_iters={until}",),
            ("--eval_interval={at}",),
            ("--log_interval=1",),
            ("--always_save_checkpoint=True",),
        ),
    ),
    "torchtune": Preset(
        checkpoints="{out}/epoch_{step-1} + {out}/recipe_state/recipe_state.pt",
        resume_with="... resume_from_checkpoint=True checkpointer.recipe_checkpoint={checkpoint}/recipe_state.pt "
        # A list cannot take the place of a mapping (`filename_format`), which goes before; torchtune ignores its `=`.
        "~checkpointer.checkpoint_files={weights} checkpointer.checkpoint_files=[{weights}]",
        words=(("output_dir={out}",), ("epochs={until}",), ("max_steps_per_epoch=1",), ("log_every_n_steps=1",)),
        loss="text:logs/log_*.txt",
        one_step="max_steps_per_epoch=1",
    ),
}


def fill(name: str | None, command: Sequence[str], given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return a command with what a preset adds, and the options of `run` with what it fills in for those that are None.

    Raises UsageError for an unknown preset.
    """
    options = dict(given)
    if name is None:
        return list(command), {key: value for key, value in options.items() if value is not None}
    if name not in PRESETS:
        names = list(PRESETS)
        raise UsageError(f"`--preset {name}` is unknown", hint=meant(name, names, f"one of {', '.join(names)}"))
    preset = PRESETS[name]
    at = options.get("at") or min(AT, (options.get("until") or UNTIL) - 1)
    filled = {
        "at": at,
        "until": max(UNTIL, at + 1),
        "checkpoints": preset.checkpoints,
        "resume_with": preset.resume_with,
        "loss": preset.loss,
    }
    if (other := preset.other_steps(command)) is not None:
        if options.get("observe"):
            message = f"`{other}`: steps are observed with `{preset.one_step}`"
            raise UsageError(message, hint="omit `--observe`: the checkpoints of whole epochs are compared")
        filled["loss"] = "none"
    options |= {key: value for key, value in filled.items() if options.get(key) is None}
    words = preset.command(command, options["at"], options["until"])
    return words, {key: value for key, value in options.items() if value is not None}
