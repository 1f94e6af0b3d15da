"""Pages for people: one HTML file each, made of the data that `--json` prints. Nothing is read here."""

from __future__ import annotations

from ckpttool.operations.verify_resume.trial.html import trial_page

__all__ = ["trial_page"]
