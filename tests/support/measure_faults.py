"""Measure what `verify-resume run` finds of the faults in the corpus.

python tests/support/measure_faults.py [SCRIPT[:FAULT] ...] [--json FILE | --record] [-n WORKERS]

`--record` keeps what was found in the record that docs/explanation/what-is-found.md shows, and writes that page.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.resume_corpus import CORPUS, Fault, Outcome, Script, verify
from support.resume_record import PAGE, RECORD, recorded, with_table

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("only", nargs="*", metavar="SCRIPT[:FAULT]", help="those of the corpus; `SCRIPT:` is one without")
parser.add_argument("--json", metavar="FILE", help="add what was found to this file")
parser.add_argument("--record", action="store_true", help="keep it for the documentation")
parser.add_argument("-n", type=int, default=2, metavar="WORKERS")


def chosen(only: list[str]) -> list[tuple[Script, Fault | None]]:
    """Return the scripts and faults that were asked for: all of them, if none was."""
    pairs = [(script, fault) for script in CORPUS for fault in (None, *script.faults)]
    pairs = [pair for pair in pairs if importlib.util.find_spec(pair[0].needs) is not None]
    return [
        pair
        for pair in pairs
        if not only or pair[0].name in only or f"{pair[0].name}:{pair[1].name if pair[1] else ''}" in only
    ]


def row(outcome: Outcome) -> str:
    head = f"{outcome.script:<16} {outcome.fault or '-':<26} {outcome.grade:<12} {outcome.verdict:<8}"
    return f"{head} {outcome.seconds:5.1f} s  {outcome.message[:150]}"


def add(path: Path, outcome: Outcome) -> None:
    """Add what was found to a JSON file, in place of what was found before."""
    known = json.loads(path.read_text()) if path.exists() else []
    kept = {(one["script"], one["fault"]): one for one in known} | {
        (outcome.script, outcome.fault): dataclasses.asdict(outcome)
    }
    path.write_text(json.dumps([*kept.values()], indent=1) + "\n")


def main() -> None:
    args = parser.parse_args()
    began, outcomes = time.monotonic(), []
    with ProcessPoolExecutor(args.n) as pool:
        for done in as_completed([pool.submit(verify, *pair, is_forked=True) for pair in chosen(args.only)]):
            outcome = done.result()
            outcomes.append(outcome)
            print(row(outcome), flush=True)
            if args.json or args.record:
                add(RECORD if args.record else Path(args.json), outcome)
    if args.record:
        PAGE.write_text(with_table(PAGE.read_text(), recorded()))
    grades = Counter(("correct" if not one.fault else "fault", one.grade) for one in outcomes)
    print(f"\n{len({one.script for one in outcomes})} scripts, {sum(bool(one.fault) for one in outcomes)} faults")
    for (kind, grade), count in sorted(grades.items()):
        print(f"  {kind:<8} {grade:<12} {count}")
    print(f"  {time.monotonic() - began:.0f} s, {sum(one.seconds for one in outcomes):.0f} s of runs")


if __name__ == "__main__":
    main()
