"""What the metadata of the built packages say: addresses of the repository that built them, or none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.long  # hatchling is fetched

ADDRESS = "https://github.example/owner/name"
BUILDER = {"GITHUB_SERVER_URL": "https://github.example", "GITHUB_REPOSITORY": "owner/name"}
TAG = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v1.2"}
LINK = re.compile(r"\]\(([^)]*)\)")

Build = Callable[[Path, str, dict[str, str]], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(root, "wheel", variables)`: the wheel or sdist of the project at `root`."""
    backend = tmp_path_factory.mktemp("backend")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", backend, "hatchling"], check=True)

    def built(root: Path, target: str, variables: dict[str, str]) -> Path:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
        out = tmp_path_factory.mktemp(target)
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out],
            cwd=root, env={**kept, "PYTHONPATH": str(backend), **variables}, check=True, capture_output=True,
        )  # fmt: skip
        (package,) = out.iterdir()
        return package

    return built


def of_wheel(path: Path) -> Message:
    with zipfile.ZipFile(path) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(wheel.read(name).decode())


def check_addresses(metadata: Message, at: str) -> None:
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls["Source"] == ADDRESS and urls["Issues"] == f"{ADDRESS}/issues"
    assert urls["Changelog"] == f"{ADDRESS}/blob/{at}/CHANGELOG.md"
    text = metadata.get_payload()
    assert isinstance(text, str) and metadata["Description-Content-Type"] == "text/markdown"
    links = LINK.findall(text)
    assert len(links) > 15 and f"{ADDRESS}/blob/{at}/docs/how-to/statistics.md#one-html-file" in links
    assert [link for link in links if not link.startswith("https://")] == []
    inside = [link.removeprefix(f"{ADDRESS}/blob/{at}/").partition("#")[0] for link in links if ADDRESS in link]
    assert [path for path in inside if not (ROOT / path).exists()] == []


def test_the_repository_that_builds_is_named(build: Build, tmp_path: Path) -> None:
    check_addresses(of_wheel(build(ROOT, "wheel", BUILDER)), "HEAD")
    packed = build(ROOT, "sdist", BUILDER | TAG)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    check_addresses(message_from_string((root / "PKG-INFO").read_text()), "v1.2")
    # Wherever a wheel is made of it: without those variables, and where they name somebody else.
    check_addresses(of_wheel(build(root, "wheel", {})), "v1.2")
    check_addresses(of_wheel(build(root, "wheel", BUILDER | {"GITHUB_REPOSITORY": "some/body"})), "v1.2")


@pytest.mark.parametrize("variables", [{}, {**BUILDER, "GITHUB_WORKSPACE": "/elsewhere"}], ids=["none", "elsewhere"])
def test_other_builds_name_none(build: Build, variables: dict[str, str]) -> None:
    metadata = of_wheel(build(ROOT, "wheel", variables))
    assert "Project-URL" not in metadata
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
