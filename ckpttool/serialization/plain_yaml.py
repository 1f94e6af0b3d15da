"""Parses YAML of plain values within limits: no tags of its own, no name twice, aliases only of little.

Nine lines of lists that each name the one before ten times are a billion values; merges (`<<`) double mappings. So the
events are looked at first (depth), then the nodes (what aliases stand for), and only then values are made. Needs
PyYAML, which huggingface-hub brings. Source: `yaml/constructor.py` of PyYAML 6.
"""

from __future__ import annotations

from typing import Any

from ckpttool.catalogue.values import MAX_LEVELS
from ckpttool.errors import CorruptError

MAX_SIZE = 1 << 20  # bytes
_MAX_VALUES = 200_000  # with each alias as what it stands for
_MAX_NUMBER = 300  # characters: numbers in base 60 take time that grows with the square


def parse(text: bytes, what: str) -> Any:
    """Return the value that a document spells. Raises CorruptError; `what` is the subject of its message."""
    import yaml

    kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > MAX_SIZE:
        raise CorruptError(f"{what} has {len(text)} bytes, more than {MAX_SIZE} of YAML", expected=MAX_SIZE)
    try:
        _check_depth(yaml.parse(text, Loader=kind), what)
        loader = kind(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, what)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, LookupError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        problem = getattr(error, "problem", None) or error
        raise CorruptError(f"{what} is not YAML of plain values: {problem}".rstrip(".")) from None


def _check_depth(events: Any, what: str) -> None:
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if depth > MAX_LEVELS:
            raise CorruptError(f"{what} is nested more than {MAX_LEVELS} deep", expected=MAX_LEVELS)


def _check(root: Any, what: str) -> None:
    """Raise CorruptError for aliases that stand for too much, a value in itself, a name twice or an endless number."""
    sizes: dict[int, int] = {}  # of what is done; 0 of what is open
    todo = [(root, False)]
    while todo:
        node, is_done = todo.pop()
        children = _children(node)
        if is_done:
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
            if sizes[id(node)] > _MAX_VALUES:
                raise CorruptError(f"{what} has aliases that expand to more than {_MAX_VALUES} values")
            continue
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise CorruptError(f"{what} has a value that holds itself")
            continue
        sizes[id(node)] = 0
        if node.tag.startswith("tag:yaml.org,2002:python") or not node.tag.startswith("tag:yaml.org,2002:"):
            raise CorruptError(f"{what} has a value with a tag of its own, `{node.tag[:80]}`", found=node.tag[:80])
        if not children and node.tag[-3:] in ("int", "oat", "amp") and len(node.value) > _MAX_NUMBER:
            raise CorruptError(f"{what} has a number of {len(node.value)} characters", expected=_MAX_NUMBER)
        _check_once(node, what)
        todo += [(node, True), *((child, False) for child in children)]


def _children(node: Any) -> list[Any]:
    if isinstance(node.value, str):
        return []
    return [child for item in node.value for child in (item if isinstance(item, tuple) else (item,))]


def _check_once(node: Any, what: str) -> None:
    if not node.value or not isinstance(node.value[0], tuple):
        return
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        name = key.value
        if isinstance(name, str):
            if (key.tag, name) in seen:
                raise CorruptError(f"{what} names `{name[:80]}` twice", tensor=name[:80])
            seen.add((key.tag, name))
