"""What a project writes beside its steps: names of the newest, links to it, copies of it and of the best."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from support.layouts.layout import Pointer, Written


def text(name: str, template: str) -> Pointer:
    """A text with the name of the newest step."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(_filled(template, steps[-1]))

    return write


def link(name: str, *, best: bool = False) -> Pointer:
    """A relative link to the newest step, or to the best."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.symlink(os.path.relpath(steps[0 if best else -1].path, path.parent), path)

    return write


def link_to(name: str, target: str) -> Pointer:
    """A link to a file of the newest step."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        (run / name).unlink(missing_ok=True)
        os.symlink(_filled(target, steps[-1]), run / name)

    return write


def copy(name: str, *, best: bool = False) -> Pointer:
    """A copy of the newest step, or of the best, which is the first."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        source = steps[0 if best else -1].path
        if source.is_dir():
            shutil.copytree(source, run / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source, run / name)

    return write


def renamed(pattern: str, replacement: str, *, best: bool = False) -> Pointer:
    """Copies of the files of a flat directory with another word in place of the step."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        step = steps[0 if best else -1]
        old, new = _filled(pattern, step), _filled(replacement, step)
        for file in step.files:
            if old in file:
                shutil.copy2(run / file, run / file.replace(old, new))

    return write


def beside(name: str, contents: str | bytes) -> Pointer:
    """A file of the run that is not part of a step, such as a log."""

    def write(run: Path, steps: Sequence[Written]) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)

    return write


def _filled(template: str, step: Written) -> str:
    return template.format(step=step.step or 0, epoch=step.epoch or 0, name=step.path.name, path=step.path)
