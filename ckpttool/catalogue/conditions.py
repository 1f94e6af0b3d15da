"""Conditions on what is known of a tensor: `nan > 0 or absmax > 1e4`, `numel > 1e6 and name != '*.bias'`. Pure."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttool.catalogue.patterns import any_of
from ckpttool.errors import UsageError
from ckpttool.text import meant

_MAX_LENGTH = 1000
_OPERATORS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}

Values = Mapping[str, object]
Condition = Callable[[Values], bool]


@dataclass(frozen=True, slots=True)
class Columns:
    """What conditions compare: names of numbers and of texts, what one of them is called, and an example."""

    numbers: Sequence[str]
    texts: Sequence[str]
    noun: str
    example: str


def condition(text: str, columns: Columns, flag: str) -> Condition:
    """Return the predicate that `text` is: comparisons of columns, joined by `and`, `or` and `not`; of numbers with
    numbers, and of texts with globs (`==` and `!=`).

    A comparison with a number that a tensor does not have is false. Raises UsageError, naming `flag`, for any other
    text.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) <= _MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    parsing = _Parsing(text, columns, flag)
    if tree is None:
        raise parsing.refused()
    return parsing.condition(tree.body)


@dataclass(frozen=True, slots=True)
class _Parsing:
    text: str
    columns: Columns
    flag: str

    def condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(value) for value in node.values]
            join = all if isinstance(node.op, ast.And) else any
            return lambda values: join(part(values) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.condition(node.operand)
            return lambda values: not inner(values)
        if isinstance(node, ast.Name) and node.id in self.columns.numbers:
            # A shell takes the rest of `nan>0` for a file to write to.
            raise self.refused(f"compare it with a number, in quotes: `{self.flag} '{node.id} > 0'`")
        if not isinstance(node, ast.Compare):
            raise self.refused()
        terms = [node.left, *node.comparators]
        pairs = [self._comparison(*pair) for pair in zip(terms, node.ops, terms[1:], strict=False)]
        return lambda values: all(pair(values) for pair in pairs)

    def refused(self, meant: str = "") -> UsageError:
        columns = self.columns
        what = f"compare {columns.noun}s by `==`, `!=`, `<`, `<=`, `>`, `>=` with numbers"
        what += f", or {', '.join(columns.texts)} with globs" if columns.texts else ""
        hint = meant or f"{what}, joined by `and`, `or` and `not`: {columns.example}"
        return UsageError(f"`{self.flag} {self.text}` is not a condition", hint=hint, found=self.text)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
        compare = _OPERATORS.get(type(op))
        if compare is None:
            raise self.refused()
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            left, right = right, left
        if isinstance(right, ast.Constant) and isinstance(right.value, str):
            return self._matches(left, right.value, op)
        for column, value in ((left, right), (right, left)):
            if isinstance(column, ast.Name) and column.id in self.columns.texts:
                sign = "!=" if isinstance(op, ast.NotEq) else "=="
                example = f'{column.id} {sign} "{ast.unparse(value)}"'
                raise self.refused(f"a {column.id} is a text, in quotes of its own: `{self.flag} '{example}'`")
        a, b = self._number(left), self._number(right)

        def holds(values: Values) -> bool:
            first, second = (values.get(term) if isinstance(term, str) else term for term in (a, b))
            if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
                return False
            return compare(first, second)

        return holds

    def _matches(self, column: ast.expr, glob: str, op: ast.cmpop) -> Condition:
        if not isinstance(column, ast.Name) or not isinstance(op, (ast.Eq, ast.NotEq)):
            raise self.refused()
        name, is_wanted = self._known(column.id, self.columns.texts), isinstance(op, ast.Eq)
        matches = any_of([glob])
        return lambda values: matches(str(values[name])) == is_wanted

    def _number(self, node: ast.expr) -> str | float:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            term = self._number(node.operand)
            if isinstance(term, float):
                return -term
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return float(node.value)
        if isinstance(node, ast.Name):
            return self._known(node.id, self.columns.numbers)
        raise self.refused()

    def _known(self, name: str, names: Sequence[str]) -> str:
        """Return `name`, if it is one of `names`. Raises UsageError if it is not a column, or one of the other kind."""
        if name in names:
            return name
        known = [*self.columns.numbers, *self.columns.texts]
        if name in known:
            raise self.refused()
        noun = self.columns.noun
        hint = meant(name, known, f"the {noun}s are {', '.join(known)}")
        raise UsageError(f"`{self.flag} {self.text}`: there is no {noun} `{name}`", hint=hint, found=name)
