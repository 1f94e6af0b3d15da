"""`ckpttool verify-resume`: whether training goes on as if nothing had happened, and the commands below it."""

from __future__ import annotations

import typer

from ckpttool.cli.verify_resume import trial
from ckpttool.cli.verifyaudit import audit
from ckpttool.cli.verifyinit import init

verify_resume = typer.Typer(
    name="verify-resume",
    help="Does training go on from a checkpoint as if nothing had happened?",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, summary in (
    (audit, "Is everything there to go on from? Nothing is trained."),
    (trial, "Train, resume by the route, train on, and compare."),
    (init, "A recipe with comments, which runs as it is."),
):
    verify_resume.command(short_help=summary)(command)
