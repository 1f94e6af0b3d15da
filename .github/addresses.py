"""Addresses in the metadata of a package: those of the repository on GitHub whose workflow builds it.

The workflow knows them, as `GITHUB_SERVER_URL` and `GITHUB_REPOSITORY`; then the links of the README are absolute, too.
A build elsewhere has none. What is built from an sdist has those of the sdist.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#|//)")
PAGES = {"Homepage": "", "Documentation": "/blob/{at}/docs/README.md", "Changelog": "/blob/{at}/CHANGELOG.md"}
PAGES |= {"Source": "", "Issues": "/issues"}


class Addresses(MetadataHookInterface):
    """Sets `readme` and `urls` unless the sdist that is built from has them."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata."""
        if "readme" in metadata:
            return
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("GITHUB_REPOSITORY")
        # A workflow that checks out another project and builds it is not that project's.
        if repository and Path(os.environ.get("GITHUB_WORKSPACE", self.root)).resolve() == Path(self.root).resolve():
            address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            is_tag = os.environ.get("GITHUB_REF_TYPE") == "tag"
            at = os.environ["GITHUB_REF_NAME"] if is_tag else "HEAD"
            metadata["urls"] = {name: address + page.format(at=at) for name, page in PAGES.items()}
            text = RELATIVE_LINK.sub(f"]({address}/blob/{at}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
