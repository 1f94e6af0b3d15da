"""The grammar of patterns and of `--rename` rules."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.catalogue.patterns import any_of, compile_pattern, renamer, rule
from ckpttool.errors import UsageError

NAME = "model.layers.10.attn.weight"
LITERALS = st.text(alphabet=st.characters(exclude_characters="*?[="), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (NAME, True),
        ("*", True),
        ("model.*", True),
        ("*.weight", True),
        ("model.*.weight", True),
        ("model.layers.1?.attn.*", True),
        ("model.layers.[0-9]*.weight", True),
        ("model.layers.[!1]*", False),
        ("layers.*", False),
        ("model", False),
        ("*.WEIGHT", False),
        ("model+layers*", False),
        (r"re:model\.layers\.\d+\..*", True),
        (r"re:layers", False),
        (r"re:model\.layers", False),
        (r"re:.*(?=t)t", True),
    ],
)
def test_a_glob_crosses_dots_and_an_expression_matches_the_whole_name(pattern: str, matches: bool) -> None:
    assert bool(compile_pattern(pattern).fullmatch(NAME)) is matches
    assert any_of(["nothing", pattern])(NAME) is matches


def test_no_patterns_match_nothing() -> None:
    assert not any_of([])(NAME)


def test_a_broken_expression_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"`re:\(` is not a regular expression"):
        compile_pattern("re:(")


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("a=b", ("a", "b")),
        ("a=", ("a", "")),
        ("a=b=c", ("a", "b=c")),
        ("re:(?=a)a=b", ("re:(?=a)a", "b")),
        ("re:(?P<n>a)=b", ("re:(?P<n>a)", "b")),
    ],
)
def test_sides_of_a_rule(text: str, sides: tuple[str, str]) -> None:
    assert rule(text, "--dtype") == sides


@pytest.mark.parametrize("text", ["a", "=b", "", "re:a"])
def test_a_rule_has_two_sides(text: str) -> None:
    with pytest.raises(UsageError, match="is not of the form PATTERN=VALUE"):
        rule(text, "--dtype")


@pytest.mark.parametrize(
    ("rules", "new"),
    [
        ([], NAME),
        (["model.layers=blocks"], "blocks.10.attn.weight"),
        (["model.layer=blocks"], NAME),
        (["model.*=*"], "layers.10.attn.weight"),
        (["model.layers.*.attn.*=h.*.self.*"], "h.10.self.weight"),
        (["*=net.*"], f"net.{NAME}"),
        (["model.layers.*=first", "*=second.*"], "first"),
        (["nothing=first", "*.weight=*.w"], "model.layers.10.attn.w"),
        ([r"re:model\.layers\.(\d+)\.(.*)=\2.\1"], "attn.weight.10"),
        ([r"re:model\.(?P<rest>.*)=\g<rest>"], "layers.10.attn.weight"),
        (["model.layers.1?.*=h.*"], "h.attn.weight"),
        (["model.layers.[0-9]*.attn.*=h.*.*"], "h.0.weight"),
    ],
)
def test_renaming(rules: list[str], new: str) -> None:
    assert renamer(rules)(NAME) == new


def test_a_plain_rule_takes_everything_below() -> None:
    rename = renamer(["a.b=x"])
    assert [rename(n) for n in ("a.b", "a.b.c", "a.bc", "z.a.b", "a")] == ["x", "x.c", "a.bc", "z.a.b", "a"]
    assert renamer(["model="])("model.w") == "w"


@pytest.mark.parametrize("text", ["a=*", "*=*.*", "a.*=*.b.*", r"re:(a)=\2", r"re:(.*)=\g<no>", "re:(=a"])
def test_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        renamer([text])("a")


@pytest.mark.parametrize("text", ["a=", "*=", "re:.*=", "a*=*"])
def test_no_name_becomes_empty(text: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        renamer([text])("a")


@settings(max_examples=100)
@given(st.text(max_size=8), LITERALS.filter(lambda ends: not ends.startswith("re:")))
def test_a_star_stands_for_what_it_matched(middle: str, ends: str) -> None:
    assert renamer([f"{ends}*{ends}=<*>"])(ends + middle + ends) == f"<{middle}>"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]", "."]), max_size=7), st.text("ab.\n", max_size=9))
def test_stars_are_those_of_a_regular_expression(signs: list[str], name: str) -> None:
    """Each takes as much as it can, the first first."""
    glob = "*" + "".join(signs)
    made = "|".join("*" * glob.count("*"))
    text = "".join({"*": "(.*)", "?": ".", "[!a]": "[^a]", ".": r"\."}.get(sign, sign) for sign in ["*", *signs])
    match = re.fullmatch(text, name, re.DOTALL)
    expected = name if match is None else "|".join(match.groups())
    if name and expected:
        assert renamer([f"{glob}={made}"])(name) == expected


def test_many_stars_take_no_exponential_time() -> None:
    """As a regular expression with a group for each star, this would not end."""
    name = "a" * 3000 + "c"
    assert renamer(["*a*a*a*a*a*a*a*b*c=x"])(name) == name
    assert renamer(["*a*a*a*a*a*a*a*c=*.*"])(name) == "a" * 2993 + "."
