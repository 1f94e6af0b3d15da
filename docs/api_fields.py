"""An extension of griffe: the comment `#: ...` behind a field of a dataclass is its docstring in the API reference."""

import ast
import re
from typing import Any

import griffe

_COMMENT = re.compile(r"  #: (.+)$")


class FieldComments(griffe.Extension):
    """Gives attributes without a docstring the comment at the end of their definition."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: object) -> None:
        """Set the docstring of an attribute."""
        if attr.docstring is not None or not isinstance(node, ast.AST) or attr.endlineno is None:
            return
        comment = _COMMENT.search(attr.lines_collection[attr.filepath][attr.endlineno - 1])
        if comment:
            text = f"{comment[1][0].upper()}{comment[1][1:]}."
            attr.docstring = griffe.Docstring(text, lineno=attr.endlineno, parent=attr)
