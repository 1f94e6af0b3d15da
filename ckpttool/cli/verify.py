"""`ckpttool verify`: is this checkpoint whole?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.options import Option
from ckpttool.cli.progress import progress_on_stderr
from ckpttool.cli.terminal import Styled, Terminal, answer, bold, dim, err
from ckpttool.text import duration, plural, size

if TYPE_CHECKING:
    from ckpttool.catalogue.findings import Finding
    from ckpttool.operations.verify.findings import Report

_SHOWN = 20
_TITLES = {
    "damage": ("damaged", "red"),
    "difference": ("other than in the other checkpoint", "red"),
    "nan": ("not a number", "red"),
    "suspect": ("suspect", "yellow"),
    "note": ("notes", "dim"),
}


@options.command(
    "verify",
    arguments=(options.CHECKPOINT,),
    sections={
        "Selection": (options.SHAPES,),
        "Comparison": (
            Option("--against OTHER", "Compare with a checkpoint that should be equal."),
            Option("--manifest FILE", "Compare with a manifest: SHA-256 of each file and tensor."),
            Option("--write-manifest FILE", "Write a manifest, if nothing is damaged."),
            Option("--values", "Check every element: NaN, infinite, all zero, denormal.", name="check_values"),
        ),
        "Execution": (options.THREADS,),
        "Output": (options.reworded(options.HTML, "Also write what was found as an HTML page."), *options.PRINTING),
    },
    examples=("step-1000", "step-1000 --values", "copy --against step-1000"),
)
def verify(as_json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
    """Read a whole checkpoint and report all damage.

    Every stored checksum is compared, and the index with the files. The exit code is 4 for damage, 1 for NaN or a
    difference, else 0.
    """
    import ckpttool

    with progress_on_stderr(not (quiet or as_json)) as progress:
        report = ckpttool.verify(**arguments, progress=progress)
    with answer(report.exit_code, verbose) as terminal:
        if as_json:
            terminal.json(report.as_dict())
        elif quiet:
            for finding in report.findings:
                if finding.gravity != "note":
                    terminal.line(f"{finding.gravity}: {finding.message}")
        else:
            _print(terminal, report)
            err().wrote(arguments["html"])


def _print(terminal: Terminal, report: Report) -> None:
    style = "red" if report.exit_code else "bold"
    terminal.line(bold(report.path), " is ", Styled(report.message.removeprefix(f"{report.path} is "), style))
    terminal.facts(_facts(report))
    for gravity, (title, style) in _TITLES.items():
        findings = [finding for finding in report.findings if finding.gravity == gravity]
        if findings:
            terminal.heading(title, str(len(findings)) if len(findings) > 1 else "")
            _print_findings(terminal, findings, Styled("! ", style))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    if report.format:
        yield "format", report.format + (f", {report.layout}" if report.layout else "")
        yield "contents", f"{plural(report.tensors, 'tensor')}, {plural(report.objects, 'object')}"
    yield "files", f"{plural(len(report.files), 'file')}, {size(report.file_bytes)}"
    yield "checked", _checked(report)
    if report.library is not None:
        refused = sum(finding.kind == "refused" for finding in report.findings)
        yield (
            "library",
            f"{report.library} opens " + ("all of its files" if not refused else f"all but {refused} files"),
        )
    manifest = report.manifest and f"{report.manifest}, {size(report.hashed_bytes)} hashed"
    facts = (("manifest", manifest), ("wrote", report.wrote), ("against", report.against))
    yield from ((title, text) for title, text in facts if text is not None)
    rate = f", {size(report.read_bytes / report.seconds)}/s" if report.seconds >= 1 else ""
    yield "time", f"{duration(report.seconds)}{rate}"


def _checked(report: Report) -> str:
    checked = [f"{plural(report.records, 'checksum')} over {size(report.checked_bytes)}"] if report.records else []
    checked += [f"{size(report.unchecked_bytes)} without checksums"] if report.unchecked_bytes else []
    checked += [f"{report.elements:,} values"] if report.elements else []
    return "; ".join(checked) or "nothing"


def _print_findings(terminal: Terminal, findings: list[Finding], mark: Styled) -> None:
    shown = findings if terminal.verbose else findings[:_SHOWN]
    for i, finding in enumerate(shown):
        terminal.paragraph(finding.message, mark=mark)
        # A hint that several have in common follows the last of them.
        if finding.hint and (i + 1 == len(shown) or shown[i + 1].hint != finding.hint):
            terminal.paragraph(finding.hint, mark=dim("  hint: "), indent=8)
    terminal.more(len(findings) - len(shown))
