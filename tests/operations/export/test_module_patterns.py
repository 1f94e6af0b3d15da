"""Regular expressions over the names of modules: what `re` answers, and an end to what `re` would not end."""

from __future__ import annotations

import re

import pytest

from ckpttool.errors import CorruptError
from ckpttool.models import module_patterns
from ckpttool.models.module_patterns import ModulePatterns

NAMES = ["", "a", "q_proj", "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.up", "vision.layers.1.q_proj", "aa"]
PATTERNS = [
    "",
    "a*",
    "(a|aa)+",
    r".*\.q_proj",
    r"(?:.*\.)?(?:q_proj)$",
    r"model\.layers\.\d+\.(?:self_attn|mlp)\.(q_proj|up)",
    r"^(?!.*vision).*(?:q_proj|up).*$",
    r".*(?<=_attn\.)q_proj",
    r".*(?<!_attn\.)q_proj",
    r"(?:.*?(?:layers|text).*?(?:self_attn|mlp).*?(?:q_proj|up).*?)|(?:\bmodel\.[\d]{1,}\.up)",
    r"[^.]+",
    r"[a-c]{2}",
    r"a{2,}",
    r"(a?){3}",
    r"a{3}",
    r".*\Bproj",
    r"\w+(?:\.\w+)*",
    r"model[\W].*\D\Z",
    r"(?!)",
    r"(a*)*",
    r"((a|b)*c?)*\.?",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_is_the_answer_of_re(pattern: str) -> None:
    patterns = ModulePatterns()
    for name in NAMES:
        assert patterns.fullmatch(pattern, name) == bool(re.fullmatch(pattern, name)), name
        assert patterns.match(pattern, name) == bool(re.match(pattern, name)), name


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)+$", "(.*a){20}b", ".*" * 40 + "b", "(((a?){900}){900}){900}b", "(" * 40 + "a" + "*)" * 40],
)
def test_it_ends(pattern: str) -> None:
    assert not ModulePatterns().fullmatch(pattern, "a" * 300 + "!")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "unterminated"),
        (r"(a)\1", "more than characters"),
        ("(?i)a", "flags"),
        ("(?i:a)", "more than characters"),
        ("a" * 10_001, "10001 characters"),
        ("(" * 4000 + ")" * 4000, "nested too deeply"),
        ("a{99999999999}", "too large"),
    ],
)
def test_what_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(CorruptError, match=why):
        ModulePatterns().fullmatch(pattern, "a" * 100)


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "_MOST", 100_000)
    with pytest.raises(CorruptError, match="it takes too long to match"):
        ModulePatterns().match("(?:(?=.*" * 6 + "b" + ").)*" * 6, "a" * 100)
