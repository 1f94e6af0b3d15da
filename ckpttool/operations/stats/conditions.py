"""Conditions on statistics: `nan > 0 or absmax > 1e4`. Pure."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from ckpttool.errors import UsageError
from ckpttool.text import meant

_LONGEST = 1000
_OPERATORS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

Values = Mapping[str, float | None]
Condition = Callable[[Values], bool]


def condition(text: str, names: list[str], flag: str) -> Condition:
    """Return the predicate that `text` is: comparisons of statistics and numbers, joined by `and`, `or` and `not`.

    A comparison with a statistic that a tensor does not have is false. Raises UsageError, naming `flag`, for any other
    text.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        raise _refused(text, flag)
    return _condition(tree.body, names, text, flag)


def _condition(node: ast.expr, names: list[str], text: str, flag: str) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = [_condition(value, names, text, flag) for value in node.values]
        join = all if isinstance(node.op, ast.And) else any
        return lambda values: join(part(values) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _condition(node.operand, names, text, flag)
        return lambda values: not inner(values)
    if not isinstance(node, ast.Compare) or any(type(op) not in _OPERATORS for op in node.ops):
        raise _refused(text, flag)
    terms = [_term(term, names, text, flag) for term in (node.left, *node.comparators)]
    compare = [_OPERATORS[type(op)] for op in node.ops]

    def holds(values: Values) -> bool:
        numbers = [values.get(term) if isinstance(term, str) else term for term in terms]
        pairs = zip(numbers, compare, numbers[1:], strict=False)
        return all(a is not None and b is not None and op(a, b) for a, op, b in pairs)

    return holds


def _term(node: ast.expr, names: list[str], text: str, flag: str) -> str | float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        term = _term(node.operand, names, text, flag)
        if isinstance(term, float):
            return -term
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        if node.id not in names:
            hint = meant(node.id, names, f"the statistics are {', '.join(names)}")
            raise UsageError(f"`{flag} {text}`: there is no statistic `{node.id}`", hint=hint, found=node.id)
        return node.id
    raise _refused(text, flag)


def _refused(text: str, flag: str) -> UsageError:
    return UsageError(
        f"`{flag} {text}` is not a condition",
        hint="compare statistics with numbers, joined by `and`, `or` and `not`: 'nan > 0 or absmax > 1e4'",
        found=text,
    )
