"""A hook of mkdocs: files of the checkout that pages link to are not part of the site, which shows only names."""

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./){1,2}(?:SECURITY\.md|CHANGELOG\.md|samples/[^)]*)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page without links to files outside docs/."""
    return _OUTSIDE.sub(r"\1", markdown)
