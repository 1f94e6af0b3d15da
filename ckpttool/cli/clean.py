"""`ckpttool clean`: what failed runs left in a directory."""

from __future__ import annotations

from ckpttool.cli import options
from ckpttool.cli.terminal import answer, err
from ckpttool.text import duration, size


def clean(
    directory: options.Directory, *,
    yes: options.Yes = False,
    as_json: options.AsJson = False, quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """List what failed runs left in a directory, or remove it.

    These are partial outputs, old destinations that were being replaced, and temporary files. What a run is working in
    is left alone, and so is what nothing proves to be of a run of yours.

    Examples:
        ckpttool clean runs
        ckpttool clean runs --yes
    """
    import ckpttool

    result = ckpttool.clean(directory, yes=yes)
    with answer(result.exit_code) as terminal:
        if as_json:
            terminal.json(result.as_dict())
            return
        for one in result.left:
            if quiet:
                if one.state == "ended":
                    terminal.line(one.names[0])
                continue
            words = [one.kind, size(one.bytes), f"{duration(one.age)} old", "removed" if one.removed else one.state]
            terminal.line(one.names[0])
            terminal.line(f"  {', '.join(words)}" + (f": {one.why}" if one.why else ""))
        if not quiet:
            terminal.line(result.message)
            if result.verdict == "left":
                terminal.line(f"`ckpttool clean {directory} --yes` removes it")
            err().warnings(result.notes)
