"""State of a script on two ranks: saved, loaded into in place, refused. The cases are in `on_ranks/state_cases.py`."""

from __future__ import annotations

import pytest
from support.torchrun import Verdicts
from test_load_on_ranks import STRATEGIES, by_turns, every_second, ids

# Of `ckpttool.training`: what one rank may run into by itself, such as having no memory left.
STEPS = (
    "load.describe", "load.RankValues", "match.match", "fill.check_memory", "fill.undo", "fill.allocate",
    "fill.hand_over", "fill.keep_dtypes", "check_read.check",
)  # fmt: skip
FSDP1_STEPS = ("fsdp1.check_memory", "fsdp1.hand_over", "fsdp1.keep_dtypes")
CASES = [
    *(["gathered", "fsdp2", format] for format in ("dcp", "torch")),
    *(["held", "plain", format] for format in ("dcp", "torch")),
    *([case, format, s] for case in ("in_place",) for format in ("dcp", "torch") for s in STRATEGIES),
    *(["on_meta", "dcp", strategy] for strategy in STRATEGIES),
    *(["other_sizes", "dcp", strategy] for strategy in STRATEGIES),
    *(["other_sizes_at_root", format, s] for format in ("dcp", "torch") for s in STRATEGIES),
    *(["failed_stage", "ckpttool.training.sharded_values.with_items", format] for format in ("dcp", "torch")),
    *(["failed_stage", "ckpttool.catalogue.parts.rank_key", format] for format in ("dcp", "torch")),
    ["failed_stage", "ckpttool.training.save._NotesPlanner", "dcp"],
    ["failed_stage", "ckpttool.training.save.counting", "dcp"],
    *(["failed_step", step, "fsdp2", s] for step in STEPS for s in STRATEGIES),
    *(["failed_step", step, "fsdp1", s] for step in FSDP1_STEPS for s in STRATEGIES),
    ["failed_step", "load.crc32", "plain", "parallel"],
    ["failed_step", "match.crc32", "plain", "broadcast"],
    *(["failed_step", "broadcast.empty", kind, "broadcast"] for kind in ("plain", "fsdp1")),
    *(["own_hook", call, "before"] for call in ("dcp", "torch", "fsdp1", "load")),
    *(["own_hook", "dcp", what] for what in ("after", "extra", "optimizer")),
    *(["empty_state", format, "parallel"] for format in ("dcp", "torch", "theirs")),
    ["empty_state", "theirs", "broadcast"],
    *(["before_the_first_step", kind, "dcp"] for kind in ("fsdp2", "fsdp1", "ddp")),
    *(["before_the_first_step", kind, "torch"] for kind in ("fsdp2", "fsdp1")),
    ["before_the_first_step", "fsdp1", "fsdp1"],
    *(["nothing_changed", what, s] for what in ("sizes", "expanded", "hook", "hook after") for s in STRATEGIES),
    *(["load_hook", kind, "broadcast"] for kind in ("plain", "fsdp2")),
    *(["blind_rank", name, "auto"] for name in ("platform.node", "ckpttool.training.load._filesystem")),
    *(["late_hook", "fsdp2", strategy] for strategy in STRATEGIES),
    *([case, "torch", strategy] for case in ("without_own", "unknown_class") for strategy in STRATEGIES),
    *(["several_shards", "plain", strategy] for strategy in STRATEGIES),
    *(["empty_moments", "plain", strategy] for strategy in STRATEGIES),
    ["other_arguments", "strategy", "broadcast"],
    ["other_arguments", "strategy", "fastest"],
    *(["other_arguments", name, "torch"] for name in ("strict", "format", "extra", "optimizer", "names")),
    *(["differing", "fsdp2", format] for format in ("dcp", "torch")),
    ["differing", "fsdp1", "fsdp1"],
    *(["saved_stages", "plain", format] for format in ("dcp", "torch")),
    *(["own_dict_by_rank", "torch", strategy] for strategy in STRATEGIES),
    *(["sharded_buffers", "torch", strategy] for strategy in STRATEGIES),
    *(["untied", kind, strategy] for kind in ("plain", "fsdp2", "fsdp1") for strategy in STRATEGIES),
]


BRIEF = every_second(by_turns(CASES))
REST = [case for case in CASES if case not in BRIEF]


@pytest.mark.parametrize("case", ids(BRIEF))
def test_two_ranks(verdicts: Verdicts, case: str) -> None:
    assert verdicts("states", 2, BRIEF)[case] == "equal"


@pytest.mark.long
@pytest.mark.parametrize("case", ids(REST))
def test_all_cases_of_two_ranks(verdicts: Verdicts, case: str) -> None:
    assert verdicts("other-states", 2, REST)[case] == "equal"
