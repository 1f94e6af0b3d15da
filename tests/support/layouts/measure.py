"""How much of the corpus of layouts ckpttool sees: `python tests/support/layouts/measure.py [NAME ...] [--convert]`.

With the word `runs`, whether the newest step is opened: of the run of each layout, and of each of `run_names`.

Each layout is written, its step is opened by the path that a person names, and every tensor that its own library reads
is looked for by the bits of its elements. A NAME is a part of a layout's name, or a kind: file, flat, directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import ckpttool
from ckpttool.analysis.describe.document import document
from ckpttool.errors import CkptError
from support import layouts
from support.layouts import reading
from support.layouts.run_names import RUNS
from support.layouts.step import tensors_of

# The kinds of parts under which a person is content to see a role; the first is the right one.
KINDS = {
    "model": ("model",),
    "ema": ("ema", "model"),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "scaler": ("scaler",),
    "rng": ("rng",),
    "dataloader": ("dataloader",),
    "progress": ("progress",),
    "config": ("config", "other", "progress"),
    "metrics": ("metrics", "progress", "other"),
    "other": ("other",),
}
STEP = 100
Roots = list[tuple[layouts.Expected, list[torch.Tensor], Any]]


@dataclass
class Figures:
    """What was seen of one layout."""

    opened: bool = False
    message: str = ""
    tensors: int = 0
    unseen: int = 0
    files: int = 0
    unnamed: list[str] = field(default_factory=list)
    roles: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    owners: str = "-"
    parameters: str = "-"
    step: str = "-"
    newest: str = "-"
    conversions: dict[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--convert", action="store_true", help="to DCP, to one torch file, and to the same layout")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.names == ["runs"]:
        print_runs()
        return
    chosen = [
        one
        for one in layouts.LAYOUTS
        if not options.names or any(name == one.kind or name.lower() in one.name.lower() for name in options.names)
    ]
    rows = {}
    for layout in chosen:
        with tempfile.TemporaryDirectory(prefix="layout-") as scratch:
            rows[layout.name] = measured(layout, Path(scratch), convert=options.convert)
        print(line(layout, rows[layout.name]), flush=True)
    for kind in ("file", "flat", "directory", None):
        some = [rows[one.name] for one in chosen if kind in (one.kind, None)]
        if some:
            print(totals(kind or "all", some))
    if options.json:
        options.json.write_text(json.dumps({name: vars(one) for name, one in rows.items()}, indent=1, default=dict))


def print_runs() -> None:
    """Print each run that does not open at its newest step, and how many do."""
    with tempfile.TemporaryDirectory(prefix="runs-") as scratch:
        of_layouts = {one.name: newest(one, Path(scratch) / str(i)) for i, one in enumerate(layouts.LAYOUTS)}
        of_names = {one.name: one.outcome(Path(scratch) / f"names-{i}") for i, one in enumerate(RUNS)}
    for kind, outcomes in (("layouts", of_layouts), ("names", of_names)):
        print("\n".join(f"{name:48} {outcome}" for name, outcome in outcomes.items() if outcome != "newest"))
        print(f"{kind}: newest {sum(one == 'newest' for one in outcomes.values())} of {len(outcomes)}")


def measured(layout: layouts.Layout, scratch: Path, *, convert: bool) -> Figures:
    """The figures of one layout: of a step alone, and of a run of two."""
    figures = Figures()
    run = scratch / "run"
    written = layout.write(run, STEP)
    roots: Roots = list(reading.tensors(run, written.expected))
    figures.tensors = sum(len(tensors) for _, tensors, _ in roots)
    figures.unseen = figures.tensors
    figures.files = len(written.files)
    try:
        with ckpttool.open(str(written.path)) as ckpt:
            see(figures, written, roots, ckpt, run)
            figures.opened = True
    except CkptError as error:
        figures.message = str(error).split("\n")[0].replace(str(scratch), "")
    except Exception:
        figures.message = "CRASH " + traceback.format_exc(limit=-2).replace("\n", " ")
    figures.newest = newest(layout, scratch / "two")
    if convert:
        expected = Counter(reading.digest(one) for _, tensors, _ in roots for one in tensors)
        figures.conversions = dict(conversions(written, expected, run, scratch))
    return figures


def see(figures: Figures, written: layouts.Written, roots: Roots, ckpt: Any, run: Path) -> None:
    """Compare what an open checkpoint shows with what a person expects."""
    catalogue = ckpt.catalogue
    shown: dict[str, list[Any]] = {}
    for tensor in ckpt.tensors():
        part = catalogue.tensors[tensor.name].part
        shown.setdefault(reading.digest(tensor.torch()), []).append(part)
    holds: dict[Any, set[tuple[str, str | None]]] = {}
    taken: list[tuple[layouts.Expected, Any]] = []
    figures.unseen = 0
    for one, tensors, _ in roots:
        for tensor in tensors:
            parts = shown.get(reading.digest(tensor)) or []
            if not parts:
                figures.unseen += 1
                continue
            part = min(parts, key=lambda part: part.kind not in KINDS[one.role])
            parts.remove(part)
            taken.append((one, part))
            if one.tensors > 1:
                holds.setdefault(part, set()).add((one.role, one.owner))
    for one, part in taken:
        figures.roles[verdict(one.role, part, holds.get(part, set()))] += 1
        if verdict(one.role, part, holds.get(part, set())) == "wrong":
            figures.wrong[f"{one.role} as {part.kind}"] += 1
    figures.owners = owners(written, taken)
    for one, tensors, value in roots:
        if not tensors:
            kinds = {part.kind for part in parts_of_objects(catalogue, one, value)}
            figures.values[value_verdict(one.role, kinds)] += 1
    text = json.loads("".join(document(ckpttool.inspect(written.path), str(written.path))))
    text.pop("tensors"), text.pop("objects")
    names = [*strings(text)]
    figures.unnamed = [file for file in written.files if not is_named(run / file, written.path, names)]
    wanted = sum(written.parameters.values())
    figures.parameters = "right" if text["parameters"] == wanted else f"{text['parameters']} for {wanted}"
    figures.step = step_verdict(written, text["step"])


def verdict(role: str, part: Any, inside: set[tuple[str, str | None]]) -> str:
    """Whether a part is the role's: an average is apart from the model, which has no other's tensors."""
    if part.kind not in KINDS[role]:
        return "other" if part.kind == "other" else "wrong"
    if part.kind == "model":
        return "right" if {one for one, _ in inside} <= {role} else "mixed"
    return "right"


def owners(written: layouts.Written, taken: list[tuple[layouts.Expected, Any]]) -> str:
    """Whether the models are parts of their own, where there are several."""
    if len(written.parameters) < 2:
        return "-"
    of: dict[Any, set[str]] = {}
    for one, part in taken:
        if one.role == "model" and one.owner:
            of.setdefault(part, set()).add(one.owner)
    return "-" if not of else "apart" if all(len(one) == 1 for one in of.values()) else "together"


def parts_of_objects(catalogue: Any, one: layouts.Expected, value: Any) -> Iterator[Any]:
    """The parts of the objects that lie where a root of values would be."""
    path = PurePosixPath(one.file)
    allowed = {*path.parts, *(piece for name in path.parts for piece in name.replace("-", "_").split("."))}
    allowed |= {piece for name in path.parts for piece in name.replace("-", "_").replace(".", "_").split("_")}
    keys = tuple(map(str, one.keys))
    for entry in catalogue.objects:
        names = tuple(map(str, entry.path))
        for start in range(len(names) - len(keys) + 1):
            above, below = names[:start], names[start + len(keys) :]
            if not all(name in allowed or name.startswith(("rank", *allowed)) for name in above):
                break
            is_here = bool(keys or below) or (bool(above) and path.name.startswith(above[-1]))
            if names[start : start + len(keys)] == keys and is_here and leads(value, below):
                yield entry.part
                break


def leads(value: Any, names: tuple[str, ...]) -> bool:
    """Whether names lead to something in a value."""
    for name in names:
        if isinstance(value, dict):
            below = {str(key): one for key, one in value.items()}
        elif isinstance(value, (list, tuple)):
            below = {str(index): one for index, one in enumerate(value)}
        else:
            below = getattr(value, "__dict__", {})
        if name not in below:
            return False
        value = below[name]
    return True


def value_verdict(role: str, kinds: set[str]) -> str:
    """Whether the kinds under which values are shown are right."""
    if not kinds:
        return "unseen"
    if kinds <= set(KINDS[role]):
        return "right"
    return "other" if kinds <= {"other", *KINDS[role]} else "wrong"


def step_verdict(written: layouts.Written, shown: int | None) -> str:
    """Whether the step is shown where a file or a name says it, and never an epoch; where nothing says it, the number
    of steps that an optimizer made may stand for it."""
    if written.step is None:
        return "right" if shown in (None, STEP) else f"{shown} for none"
    return "right" if shown == written.step else "missing" if shown is None else f"{shown} for {written.step}"


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield key
            yield from strings(below)
    elif isinstance(value, list):
        for below in value:
            yield from strings(below)


def is_named(file: Path, opened: Path, names: list[str]) -> bool:
    """Whether a document names a file, or the directory it lies in as one of a number of them."""
    if file == opened:
        return True
    below = str(file.relative_to(opened)) if file.is_relative_to(opened) else file.name
    if file.is_dir():
        return file == opened or any(below in name or name.endswith(".distcp") for name in names)
    quoted = {below, f"`{below}`"}
    if "." in file.name:
        return any(below in name or PurePosixPath(below).match(name) for name in names if name)
    return any(name in quoted or f"`{below}`" in name for name in names)


def newest(layout: layouts.Layout, run: Path) -> str:
    """Which step of a run of two is opened by the run's own directory."""
    first, last = layouts.run(run, layout)
    digests = []
    for one in (first, last):
        try:
            digests.append({reading.digest(t) for _, ts, _ in reading.tensors(run, one.expected) for t in ts})
        except FileNotFoundError:
            digests.append(set())
    old, new = digests[0] - digests[1], digests[1] - digests[0]
    if first.files == last.files:  # it was overwritten in place
        new, old = digests[1], set()
    try:
        with ckpttool.open(str(run)) as ckpt:
            shown = {reading.digest(tensor.torch()) for tensor in ckpt.tensors()}
    except CkptError:
        return "refused"
    except Exception as error:
        return f"CRASH {error!r}"
    if shown & old:
        return "old" if not shown & new else "mixed"
    return "newest" if new <= shown else "partly" if shown & new else "none"


def conversions(
    written: layouts.Written, expected: Counter[str], run: Path, scratch: Path
) -> Iterator[tuple[str, str]]:
    """Convert to DCP, to one torch file and to the same layout, and compare the bits that other readers find."""

    def attempt(destination: Path, read: Callable[[], Counter[str]], **options: Any) -> str:
        try:
            ckpttool.convert(str(written.path), str(destination), **options)
        except CkptError as error:
            return "refused: " + str(error).split("\n")[0].replace(str(scratch), "")[:200]
        except Exception as error:
            return f"CRASH {error!r}"
        try:
            found = read()
        except Exception as error:
            return f"unreadable: {error!r}"[:120]
        lost, more = (expected - found).total(), (found - expected).total()
        return "equal" if not lost and not more else f"{lost} lost, {more} more"

    def digests(value: Any) -> Counter[str]:
        return Counter(reading.digest(one) for one in tensors_of(value))

    one_file, directory, same = scratch / "one.pt", scratch / "dcp", scratch / "same"
    yield "torch", attempt(one_file, lambda: digests(reading.load(one_file)), to="torch")
    yield "dcp", attempt(directory, lambda: digests(reading.load(directory)), to="dcp")
    target = same / written.path.relative_to(run) if written.path != run else same

    def again() -> Counter[str]:
        return Counter(reading.digest(t) for _, ts, _ in reading.tensors(same, written.expected) for t in ts)

    yield "same", attempt(target, again, producer="same", check=True)


def line(layout: layouts.Layout, one: Figures) -> str:
    """A row of the table."""
    name = f"{layout.kind[:4]:4} {layout.name[:48]:48}"
    runs = f"run {one.newest}"
    more = "".join(f" | {key}: {value}" for key, value in one.conversions.items())
    if not one.opened:
        return f"{name} REFUSED {one.message[:160]} | {runs}{more}"
    roles = " ".join(f"{key} {n}" for key, n in one.roles.items())
    values = " ".join(f"{key} {n}" for key, n in one.values.items())
    unnamed = f" {','.join(PurePosixPath(file).name for file in one.unnamed)[:80]}" if one.unnamed else ""
    wrong = f" ({', '.join(one.wrong)})" if one.wrong else ""
    return (
        f"{name} unseen {one.unseen}/{one.tensors} | unnamed {len(one.unnamed)}/{one.files}{unnamed} | "
        f"tensors {roles}{wrong} | values {values} | owners {one.owners} | parameters {one.parameters} | "
        f"step {one.step} | {runs}{more}"
    )


def totals(kind: str, rows: list[Figures]) -> str:
    """Sums over some layouts."""
    seen = [one for one in rows if one.opened]
    whole = [one for one in seen if not one.unseen and not one.unnamed]
    roles: Counter[str] = sum((one.roles for one in seen), Counter())
    values: Counter[str] = sum((one.values for one in seen), Counter())
    silent = sum(bool(one.unseen) for one in seen)
    apart = Counter(one.owners for one in seen)
    steps = Counter(one.step if one.step in ("right", "missing") else "wrong" for one in seen)
    text = (
        f"\n{kind}: {len(rows)} layouts, opened {len(seen)}, whole {len(whole)}, opened with tensors unseen {silent}; "
        f"tensors unseen {sum(one.unseen for one in rows)} of {sum(one.tensors for one in rows)}; "
        f"files unnamed {sum(len(one.unnamed) if one.opened else one.files for one in rows)} "
        f"of {sum(one.files for one in rows)}\n"
        f"  opened: roles of tensors {dict(roles)}; of values {dict(values)}; several models {dict(apart)}; "
        f"parameters right {sum(one.parameters == 'right' for one in seen)} of {len(seen)}; step {dict(steps)}; "
        f"crashes {sum(one.message.startswith('CRASH') for one in rows)}\n"
        f"  run: {dict(Counter(one.newest.split()[0] for one in rows))}"
    )
    kinds = dict.fromkeys(key for one in rows for key in one.conversions)
    for key in kinds:
        outcomes = Counter(one.conversions[key].split(":")[0].split(",")[0] for one in rows)
        short: Counter[str] = Counter()
        for outcome, n in outcomes.items():
            short["tensors lost or added" if outcome[0].isdigit() else outcome] += n
        text += f"\n  to {key}: {dict(short)}"
    return text


if __name__ == "__main__":
    main()
