"""Which checkpoint of a run a catalogue is, as was noted when it was opened. Pure."""

from __future__ import annotations

from ckpttool.catalogue.entries import Catalogue


def taken(path: str, catalogue: Catalogue) -> str:
    """Return the path by which errors name what was opened at `path`: of a run that of the checkpoint."""
    return next((str(entry["path"]) for entry in catalogue.facts.get("run", ()) if entry["taken"]), path)


def chosen_of_run(catalogue: Catalogue) -> list[str]:
    """Return a note on which checkpoint of a run directory this is; nothing for any other catalogue."""
    run = catalogue.facts.get("run", ())
    which = f"the newest complete of the {len(run)} checkpoints" if len(run) > 1 else "the only checkpoint"
    return [f"using `{entry['name']}`, {which} in the run" for entry in run if entry["taken"]]


def notes_of_run(catalogue: Catalogue, path: str | None = None) -> list[str]:
    """Return notes on which checkpoint of a run directory this is, and why another may have been meant. With `path`,
    they begin with it."""
    notes = chosen_of_run(catalogue) + [str(warning) for warning in catalogue.warnings if warning.kind == "chosen"]
    return notes if path is None else [f"`{path}`: {note}" for note in notes]
