"""The pages of `inspect`, `diff`, `verify` and `reshard`, as files and in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chromium import Page
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import OverwriteError

DCP = CHECKPOINTS / "dcp/hsdp_w4/ckpt"
EVIL = "</script><script>alert(1)</script>"
NAMES = ("inspect", "diff", "verify", "reshard")


def data_of(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two checkpoints: one tensor equal, others with other values, dtypes, shapes, NaN, or in one only."""
    g = torch.Generator().manual_seed(0)
    a: dict[str, Any] = {f"layers.{i}.up.weight": torch.randn(700, 600, generator=g) for i in range(4)}
    a |= {"emb.weight": torch.randn(100, 48, generator=g).bfloat16(), "n": torch.arange(5), EVIL: torch.ones(3, 2)}
    a |= {"gone": torch.ones(2), "shape": torch.ones(2), "half": torch.randn(8, 8, generator=g)}
    b = {name: value.clone() for name, value in a.items() if name != "gone"}
    b["layers.1.up.weight"][500:] += 0.01 * torch.randn(200, 600, generator=g)
    b["layers.2.up.weight"][0, 0] = float("nan")
    b["emb.weight"][5:7] *= 1.5
    b["n"][2] = 9
    b["shape"] = torch.ones(3)
    b["half"] = b["half"].half()
    return {"model": a, "lr": 0.1}, {"model": b, "lr": 0.2}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of each command."""
    folder = tmp_path_factory.mktemp("book")
    a, b = states()
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    shutil.copytree(DCP, folder / "damaged")
    data = bytearray((folder / "damaged/__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "damaged/__0_0.distcp").write_bytes(data)
    done = run("inspect", str(DCP), "--html", str(folder / "inspect.html"))
    assert done.exit_code == 0 and f"wrote {folder / 'inspect.html'}" in done.stderr
    done = run("diff", str(folder / "a.pt"), str(folder / "b.pt"), "--html", str(folder / "diff.html"))
    assert done.exit_code == 1 and f"wrote {folder / 'diff.html'}" in done.stderr
    done = run("verify", str(folder / "damaged"), "--html", str(folder / "verify.html"))
    assert done.exit_code == 4 and f"wrote {folder / 'verify.html'}" in done.stderr
    w8, out = str(folder / "w8"), str(folder / "reshard.html")
    done = run("reshard", str(DCP), w8, "--to-world", "8", "--dry-run", "--html", out)
    assert done.exit_code == 0 and not (folder / "w8").exists() and f"wrote {folder / 'reshard.html'}" in done.stderr
    return folder


def test_a_difference_has_the_statistics_of_b_minus_a(written: Path) -> None:
    a, b = (torch.load(written / f"{name}.pt")["model"] for name in "ab")
    tensors = data_of(written / "diff.html")["tensors"]
    names = ["".join(x for pair in zip(tensors["names"][p], [*map(str, numbers), ""], strict=True) for x in pair)
             for p, *numbers in tensors["name"]]  # fmt: skip
    assert sorted(names) == sorted(f"model.{name}" for name in b)

    def figures(name: str) -> dict[str, Any]:
        i = names.index(f"model.{name}")
        return {key: column[i] if isinstance(column, list) else column for key, column in tensors["values"].items()}

    for name in (*(f"layers.{i}.up.weight" for i in range(4)), "emb.weight", "n", "half", EVIL):
        apart = b[name].double().numpy() - a[name].double().numpy()
        finite = apart[np.isfinite(apart)]
        found = figures(name)
        assert found["numel"] == apart.size and found["nan"] == apart.size - finite.size, name
        assert found["zeros"] == int((finite == 0).sum()), name
        for key, value in (("mean", finite.mean()), ("std", finite.std()), ("rms", np.sqrt((finite**2).mean()))):
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-12), (name, key)
        assert (found["min"], found["max"]) == pytest.approx((finite.min(), finite.max()), rel=1e-4), name
        assert found["differing elements"] == int((a[name] != b[name]).sum()), name
    assert figures("layers.1.up.weight")["p99_9"] == pytest.approx(
        np.quantile((b["layers.1.up.weight"] - a["layers.1.up.weight"]).numpy(), 0.999, method="inverted_cdf"), rel=0.01
    )
    shown = figures("shape")
    assert shown["differing elements"] is None and (shown["zeros"], shown["numel"]) == (0, 2)
    rows, columns = tensors["rows"][str(names.index("model.layers.1.up.weight"))]
    apart = (b["layers.1.up.weight"] - a["layers.1.up.weight"]).abs().numpy()
    assert rows[2:4] == [pytest.approx(apart.max(), rel=1e-4), int(apart.max(axis=1).argmax())]
    assert columns[3] == int(apart.max(axis=0).argmax())
    picture = tensors["thumbnails"][str(names.index("model.layers.1.up.weight"))]
    levels = np.frombuffer(base64.b64decode(picture[4]), np.uint8).reshape(picture[:2])
    cuts = np.arange(33) * 700 // 32  # of the rows; those from 500 differ
    assert (levels > 0).any(axis=1).tolist() == (cuts[1:] > 500).tolist()


def test_the_summary_of_a_difference_is_complete(written: Path) -> None:
    text = written.joinpath("diff.html").read_text()
    assert (
        "new NaN in B, 1 element" in text
        and "model.gone" in text
        and '<td>shape</td><td class="index">[2]</td><td class="index">[3]</td>' in text.replace("\n", "")
    )
    assert "<td>dtype</td><td>float32</td><td>float16</td>" in text.replace(
        "\n", ""
    ) and "<td>0.1</td><td>0.2</td>" in text.replace("\n", "")
    assert EVIL not in text and text.lower().count("<script") == 2


def test_a_reshard_has_both_layouts(written: Path, tmp_path: Path) -> None:
    data = data_of(written / "reshard.html")
    assert {rank for _, _, rank in data["layout"]["files"]} == {0, 1, 2, 3}
    ckpttool.reshard(DCP, tmp_path / "w8", to_world=8)
    with ckpttool.open(DCP) as before, ckpttool.open(tmp_path / "w8") as after:
        for checkpoint, layout in ((before, data["layout"]), (after, data["after"])):
            of = {tensor.name: tensor for tensor in checkpoint.catalogue.tensors}
            shards = layout["shards"]
            names = sorted(of, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)])
            for name, (tiling, *_) in zip(names, shards["tensors"], strict=True):
                boxes = {(*map(tuple, box),) for box in shards["tilings"][tiling][1]}
                assert boxes == {(c.offsets, c.sizes) for c in of[name].chunks}, name


def test_a_damaged_tensor_is_named_and_marked(written: Path) -> None:
    text, data = written.joinpath("verify.html").read_text(), data_of(written / "verify.html")
    assert "is damaged: 1 finding" in text and list(data["messages"]) == ["optim.state.layers.0.up.weight.exp_avg"]


def test_what_cannot_be_opened_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes((DCP / "__0_0.distcp").read_bytes()[:900])
    done = run("verify", str(tmp_path / "x.pt"), "--html", str(tmp_path / "x.html"))
    assert done.exit_code == 4 and "is damaged" in (tmp_path / "x.html").read_text()


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    mine, page = tmp_path / "mine", tmp_path / "page.html"
    mine.write_text("mine")
    for words in (["inspect", str(DCP)], ["verify", str(DCP)], ["diff", str(DCP), str(DCP)]):
        done = run(*words, "--html", str(mine))
        assert done.exit_code == 6 and "is not a page of ckpttool's" in done.stderr and mine.read_text() == "mine"
        assert run(*words, "--html", str(page)).exit_code == 0
    with pytest.raises(OverwriteError):
        ckpttool.reshard(DCP, tmp_path / "w2", to_world=2, html=mine)
    assert not (tmp_path / "w2").exists()
    ckpttool.reshard(DCP, tmp_path / "w2", to_world=2, html=page)
    text = page.read_text()
    assert "4 ranks to 2 ranks" in text and (tmp_path / "w2").exists()
    # A command that can be typed, and the time that it took.
    assert f"<code>ckpttool reshard {DCP} {tmp_path / 'w2'}</code>" in text and "<dd>0.00 s</dd>" not in text


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_drawn(written: Path, page: Page, name: str, width: int) -> None:
    page.view(width, 800, "dark" if width == 400 else "light")
    page.requests.clear()
    path = written / f"{name}.html"
    page.open(path)
    pages = page.ask("[...document.querySelectorAll('nav a')].map(one => one.dataset.page)")
    assert pages[:4] == ["summary", "matrix", "tensor", "sharding"] and ("after" in pages) == (name == "reshard")
    for one in pages:
        page.ask(f"location.hash = '{one}'")
        page.ask("new Promise(done => setTimeout(done, 30))")
        assert len(page.ask(f"document.getElementById('page-{one}').innerText")) > 60, one
        assert page.ask("document.documentElement.scrollWidth") <= width, f"{one} is wider than the window"
        widths = page.ask("[...document.querySelectorAll('.tall td:first-child')].map(one => one.offsetWidth)")
        assert not [width for width in widths if 0 < width < 150], "names are cut into a few letters a line"
    assert page.problems == [] and page.requests == [path.as_uri()]


def test_no_column_is_cut_off_on_paper(tmp_path: Path, page: Page) -> None:
    """A table that is wider than the paper had a bar to scroll it, and the last columns were missing."""
    weights = {
        f"model.layers.0.self_attn.a_projection_{n}.weight": torch.full((2, 2), 1e-5 * (n + 1)) for n in range(4)
    }
    torch.save({"model": weights}, tmp_path / "a.pt")
    torch.save({"model": {name: weight * 1.00321 for name, weight in weights.items()}}, tmp_path / "b.pt")
    path = tmp_path / "x.html"
    assert run("diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--html", str(path)).exit_code == 1
    page.view(700, 1000, "light")  # A4 without its margins
    page.open(path)
    page.ask("dispatchEvent(new Event('beforeprint'))")
    page.send("Emulation.setEmulatedMedia", media="print")
    wider = page.ask("[...document.querySelectorAll('.scroll')].map(one => [one.scrollWidth, one.clientWidth])")
    index = "[...document.querySelectorAll('.scroll td')].find(one => one.textContent === '[0, 0]')"
    style = page.ask(f"getComputedStyle({index}).whiteSpace")
    page.send("Emulation.setEmulatedMedia", media="")
    assert wider and all(inside <= outside for inside, outside in wider), wider
    assert style == "nowrap"


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_the_head_says_where_a_page_comes_from(command: str, tmp_path: Path) -> None:
    """The command, date, version, producer and size, also where a page is printed; modules are indented."""
    path, page = CHECKPOINTS / "run/trainer/ckpt", tmp_path / "a.html"
    words = ("--html", str(page)) if command == "inspect" else ("-o", str(page))
    assert run(command, str(path), *words).exit_code == 0
    head = re.sub(r"<[^>]+>", "", page.read_text().partition("<header>")[2].partition("<nav")[0])
    assert f"ckpttool {command} {path} \u00b7 " in head and f"ckpttool {ckpttool.__version__}" in head
    assert re.search(r"\b20\d\d-\d\d-\d\d \d\d:\d\d UTC\b", head)
    assert re.search(r"safetensors, transformers Trainer, [\d.]+ kB", head)
    assert '<span style="padding-left: 2ch">embed_tokens.weight</span>' in page.read_text()
    assert r"\u2003" not in page.read_text()


def test_a_missing_file_is_said_once(tmp_path: Path) -> None:
    """As damage, and not again as a warning of the reader."""
    shutil.copytree(DCP, tmp_path / "damaged")
    (tmp_path / "damaged/__2_0.distcp").unlink()
    done = run("verify", str(tmp_path / "damaged"), "--html", str(tmp_path / "x.html"))
    assert done.exit_code == 4 and "files     3 files, " in done.stdout
    said = re.findall(r"<code>__2_0.distcp</code> is missing", (tmp_path / "x.html").read_text())
    assert len(said) == 1
