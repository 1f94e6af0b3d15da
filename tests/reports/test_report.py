"""`ckpttool.report`: the file it writes, in a real browser, and how large it gets."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chromium import Page
from support.cli import run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.analysis.statistics.elements import FRACTIONS, Channels, Statistics
from ckpttool.analysis.statistics.histogram import Central, Compact
from ckpttool.analysis.statistics.results import Stats, TensorStatistics
from ckpttool.analysis.statistics.thumbnails import Thumbnail
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import Finding
from ckpttool.errors import OverwriteError
from ckpttool.reports.document import document, ranges_in_order
from ckpttool.reports.page import PAGES, Book, json_in_html, render

EVIL = "</script><script>alert(1)</script>"
LIMIT = 3_000_000
DRAWN = [name for name in PAGES if name != "after"]
DCP = CHECKPOINTS / "dcp/hsdp_w4/ckpt"


def state(factor: float = 1.0) -> dict[str, Any]:
    """A model with experts, a layer that is too large, a name that is markup, and moments."""
    generator = torch.Generator().manual_seed(0)
    model = {"embed.weight": torch.randn(64, 16, generator=generator)}
    for layer in range(6):
        model[f"layers.{layer}.up.weight"] = torch.randn(32, 16, generator=generator) * 0.02 * factor
        for expert in range(4):
            model[f"layers.{layer}.experts.{expert}.down.weight"] = torch.randn(16, 16, generator=generator) * 0.02
    model["layers.4.up.weight"] *= 40
    model[EVIL] = torch.ones(3)
    moments = {
        name: {"exp_avg": torch.randn(value.shape, generator=generator), "exp_avg_sq": torch.rand(value.shape)}
        for name, value in model.items()
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.01 * factor, "params": [*model]}]},
        "step": 7,
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of two steps."""
    folder = tmp_path_factory.mktemp("report")
    for step in (1, 2):
        dcp.save(state(1.0 / step), checkpoint_id=folder / "run" / f"step-{step}", no_dist=True)
    found = ckpttool.report(folder / "run", folder / "report.html", steps="all", cache=False)
    assert found.pages == DRAWN and found.file_bytes == (folder / "report.html").stat().st_size
    return folder / "report.html"


# The file -------------------------------------------------------------------------------------------------------------


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def test_no_name_is_markup_and_nothing_is_fetched(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert text.lower().count("<script") == 2 and EVIL not in text
    assert "https://" not in text and not re.search(r"\b(src|href)=\"(?!#)", text)
    names = data_of(text)["tensors"]["names"]
    assert ["model." + EVIL] in names


def test_json_in_a_script_element_has_no_markup() -> None:
    value = {"<!--": "</script>", "&amp;": "\u2028\udc80"}
    text = json_in_html(value)
    assert not set(text) & set("<>&\u2028") and json.loads(text) == value


def test_files_of_boxes() -> None:
    assert ranges_in_order([0, 1, 2, 7, 5, 6, 6]) == "0-2,7,5-6,6"
    assert ranges_in_order([]) == ""


def test_shards_and_who_holds_them(tmp_path: Path) -> None:
    ckpttool.report(DCP, tmp_path / "x.html", cache=False)
    data = data_of((tmp_path / "x.html").read_text())
    with ckpttool.open(DCP) as checkpoint:
        tensors = [*checkpoint.catalogue.tensors]
        files = checkpoint.catalogue.files
    for tensor, (tiling, owner, _, chunks) in zip(tensors, data["layout"]["shards"]["tensors"], strict=True):
        shape, boxes = data["layout"]["shards"]["tilings"][tiling]
        assert tuple(shape) == tensor.shape and chunks == len(tensor.chunks)
        assert [(tuple(a), tuple(b)) for a, b in boxes] == [(c.offsets, c.sizes) for c in tensor.chunks]
        assert data["layout"]["shards"]["owners"][owner] == ranges_in_order(c.extent.file for c in tensor.chunks)
    assert [name for name, _, _ in data["layout"]["files"]] == [file.name for file in files]


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("mine")
    with pytest.raises(OverwriteError):
        ckpttool.report(DCP, tmp_path / "x.html")
    done = run("report", str(DCP), "-o", str(tmp_path / "x.html"))
    assert done.exit_code == 6 and (tmp_path / "x.html").read_text() == "mine"
    done = run("report", str(DCP), "--output", str(tmp_path / "x.html"), "--overwrite", "--no-cache", "--threads", "1")
    assert done.exit_code == 0 and "5 pages" in done.stdout
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")


def test_the_command(tmp_path: Path) -> None:
    path, out = str(DCP), str(tmp_path / "x.html")
    done = run("report", path, "-o", out, "--only", "model", "--tensors", "*.weight", "--exclude", "*norm*", "--quiet")
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert data_of(Path(out).read_text())["tensors"]["count"] == 10
    flat = CHECKPOINTS / "rank/fsdp1_flat_w2/ckpt"
    shapes = str(flat.with_name("reference.pt"))
    done = run("report", str(flat), "--output", str(tmp_path / "y.html"), "--shapes", shapes, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"] == "ordinary"
    done = run("report", path, "-o", out, "--overwrite", "--drop", "optimizer", "--steps", "all", "--verbose")
    assert done.exit_code == 2 and "not a run" in done.stderr


def test_steps_of_a_run_are_arguments(tmp_path: Path, written: Path) -> None:
    """As `--steps`: those that are named, oldest first, and the page is about the last of them."""
    path, out = str(written.parent / "run"), str(tmp_path / "x.html")
    steps = {("1",): None, ("2", "1"): [1, 2], ("all",): [1, 2], ("--steps", "2,1"): [1, 2]}
    for words, expected in steps.items():
        assert run("report", path, *words, "-o", out, "--overwrite", "--quiet").exit_code == 0
        drawn = data_of(Path(out).read_text())["steps"]
        assert (drawn and drawn["steps"]) == expected, words
    ckpttool.report(path, out, steps=2, overwrite=True)
    assert "<dt>run</dt><dd><code>step-2</code></dd>" in Path(out).read_text()
    ckpttool.report(path, out, steps=[2, 1], overwrite=True)
    drawn = Path(out).read_text()
    assert f"ckpttool report {path} --steps 2,1" in drawn
    assert "<dt>run</dt><dd><code>step-2</code>, the newest of 2 steps; the page Steps compares all</dd>" in drawn
    assert data_of(Path(out).read_text())["steps"]["steps"] == [1, 2]
    for words, message in (
        (("3",), "has no complete checkpoint of step 3\nhint: the complete ones are 1, 2"),
        (("1", "--steps", "2"), "the steps are given twice"),
    ):
        done = run("report", path, *words, "-o", out, "--overwrite")
        assert done.exit_code == 2 and message in done.stderr


# Size -----------------------------------------------------------------------------------------------------------------


def made_up(layers: int, kinds: list[str], shape: tuple[int, int]) -> Stats:
    """Statistics of a model and its moments, as long as real ones."""
    stats = Stats("/checkpoints/step-1000", "70.6B parameters")
    counts = [(sign, step, 1000 + 7919 * (step % 31) ** 3) for sign in (-1, 1) for step in range(-100, -8)]
    for moment in ("", "exp_avg", "exp_avg_sq"):
        for layer in range(layers):
            for k, kind in enumerate(kinds):
                seed = 1.0 + (layer * 31 + k * 7) % 97 / 97.123
                quantiles = {f"p{fraction * 100:g}": seed * 0.012345 * (i + 1) for i, fraction in enumerate(FRACTIONS)}
                figures = dict.fromkeys(("max", "absmax", "rms", "std", "kurtosis"), seed)
                statistics = Statistics(
                    shape[0] * shape[1], zeros=17 + layer, min=-seed, mean=seed * 1e-5, l1=seed * 1e5
                )
                statistics = replace(statistics, **figures, l2=seed * 1e3, quantiles=quantiles, quantile_error=0.0)
                part, name = "optimizer" if moment else "model", f"layers.{layer}.{kind}"
                full = f"optimizer.state.{name}.{moment}" if moment else f"model.{name}"
                place = part, moment, f"layers.{layer}", f"layers.*.{kind}", ""
                row = TensorStatistics(full, *place, "bfloat16", shape, 2, None, statistics)
                row.rows = row.columns = Channels(shape[0], seed * 0.1, seed, layer, 3)
                row.histogram = Compact(counts, Central(-0.1, 0.1, [1000 + 7919 * i**2 for i in range(41)], 17, 18))
                row.thumbnail = Thumbnail(32, 32, seed * 0.01, seed, base64.b64encode(bytes(range(256)) * 4).decode())
                stats.tensors.append(row)
    stats.findings = [Finding("nan", "nan", f"`{row.name}`: NaN", names=[row.name]) for row in stats.tensors[:20]]
    return stats


KINDS = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]


def test_a_report_of_70_billion_parameters_is_small() -> None:
    stats = made_up(80, KINDS, (8192, 28672))
    text = render(Book("report", "step-1000", "step-1000", stats, Catalogue("dcp")))
    drawn = data_of(text)["tensors"]
    assert len(stats.tensors) == 2160 and len(text) < LIMIT * 0.8
    assert len(drawn["histograms"]) == len(drawn["central"]) == len(drawn["thumbnails"]) == 2160
    assert all(one[:2] == [16, 16] for one in drawn["thumbnails"].values())


def test_thumbnails_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are halved, and then those of tensors that stand out and of the largest ones are there."""
    stats = made_up(4, KINDS, (8, 8))
    stats.findings = [Finding("nan", "nan", "NaN", names=[stats.tensors[-1].name])]
    stats.tensors[5].nbytes = 1000
    for limit, side, expected in ((1368 * 108, 32, 108), (1368 * 108 - 1, 16, 108), (344 * 2, 16, 2)):
        monkeypatch.setattr("ckpttool.reports.document._THUMBNAILS", limit)
        drawn = document(stats, Catalogue("dcp"))["tensors"]["thumbnails"]
        assert len(drawn) == expected and all(one[:2] == [side, side] for one in drawn.values()), limit
    assert [*drawn] == [107, 5]


def test_of_many_tensors_there_is_less_of_each() -> None:
    stats = made_up(100, [f"mlp.experts.{expert}.down_proj.weight" for expert in range(67)], (64, 64))
    text = render(Book("report", "step-1000", "step-1000", stats, Catalogue("dcp")))
    assert len(stats.tensors) == 20_100 and len(text) < LIMIT
    drawn = data_of(text)["tensors"]
    assert drawn["count"] == 20_100 and "rms" in drawn["values"] and len(drawn["histograms"]) == 20


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.reports.document._MAX_TENSORS", 30)
    stats = made_up(4, KINDS, (8, 8))
    stats.findings = [Finding("nan", "nan", "NaN", names=[stats.tensors[-1].name])]
    drawn = document(stats, Catalogue("dcp"))
    assert (drawn["omitted"], drawn["tensors"]["count"]) == (len(stats.tensors) - 30, 30)
    assert list(drawn["tensors"]["histograms"])[-1] == 29  # of the one that stands out


# The browser ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_drawn(written: Path, page: Page, width: int, scheme: str) -> None:
    page.view(width, 800, scheme)
    page.requests.clear()
    page.open(written)
    for name in DRAWN:
        page.ask(f"location.hash = '{name}'")
        page.ask("new Promise(done => setTimeout(done, 30))")
        assert page.ask("[...document.querySelectorAll('section')].filter(one => !one.hidden).map(one => one.id)") == [
            f"page-{name}"
        ]
        assert len(page.ask(f"document.getElementById('page-{name}').innerText")) > 100, name
        assert page.ask("document.documentElement.scrollWidth") <= width, f"{name} is wider than the window"
    background = page.ask("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(252, 252, 253)" if scheme == "light" else "rgb(17, 19, 20)")
    assert page.problems == [] and page.requests == [written.as_uri()]


def test_names_stay_text(written: Path, page: Page) -> None:
    page.open(written, "#tensor")
    shown = page.ask("[...document.querySelectorAll('#page-tensor td code')].map(one => one.textContent)")
    assert f"model.{EVIL}" in shown and f"optimizer.state.{EVIL}.exp_avg" in shown
    assert page.ask("document.scripts.length") == 2
    page.ask(f"location.hash = 'tensor/' + encodeURIComponent({json.dumps('model.' + EVIL)})")
    page.ask("new Promise(done => setTimeout(done, 30))")
    assert page.ask("document.querySelector('#detail h2').textContent") == f"model.{EVIL}"
    assert page.problems == []


def test_figures_are_those_of_stats(written: Path, page: Page) -> None:
    """A name is put together and its histogram decoded in the browser."""
    name = "model.layers.3.experts.2.down.weight"
    page.open(written, f"#tensor/{name}")
    cells = "[...document.querySelectorAll('#detail .figures div')]"
    figures = dict(page.ask(f"{cells}.map(one => [one.firstChild.textContent, one.lastChild.textContent])"))
    row = next(r for r in ckpttool.stats(written.parent / "run", cache=False).tensors if r.name == name)
    assert float(figures["rms"]) == pytest.approx(row.statistics.rms, rel=1e-3)
    assert float(figures["absmax"]) == pytest.approx(row.statistics.absmax, rel=1e-3)
    titles = page.ask("[...document.querySelectorAll('#detail .plot rect title')].map(one => one.textContent)")
    counts = [int(title.rsplit(" ", 1)[1].replace(",", "")) for title in titles]
    assert sum(counts) == pytest.approx(256, rel=0.02)


def test_steps_have_their_drift(written: Path, page: Page) -> None:
    """The second step has half of the first one."""
    page.open(written, "#steps")
    captions = page.ask("[...document.querySelectorAll('#page-steps figcaption')].map(one => one.textContent)")
    assert any("layers.*.up.weight" in one and ", -50 % from the first step" in one for one in captions), captions
    assert not any("previous" in one for one in captions)


def test_a_thumbnail_is_drawn(tmp_path: Path, page: Page) -> None:
    """A row and a column that stand out, zeros and a NaN, each where it is."""
    weight = torch.rand(64, 96) + 1
    weight[20], weight[:, 33], weight[0], weight[50, 90] = 300.0, 300.0, 0.0, float("nan")
    torch.save({"w": weight, "small": torch.ones(3, 2)}, tmp_path / "x.pt")
    ckpttool.report(tmp_path / "x.pt", tmp_path / "x.html", cache=False)
    page.open(tmp_path / "x.html", "#tensor/w")
    pixels = page.ask(
        "(() => { const one = document.querySelector('canvas.thumbnail'); return [one.width, one.height,"
        " [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]]; })()"
    )
    colours = torch.tensor(pixels[2]).reshape(32, 32, 4)[:, :, :3]
    assert pixels[:2] == [32, 32]
    yellow, red, grey = ([253, 231, 37], [229, 72, 77], [139, 141, 152])
    assert (colours[10, :] == torch.tensor(yellow)).all() and (colours[5, 11] == torch.tensor(yellow)).all()
    assert colours[25, 30].tolist() == red and (colours == torch.tensor(red)).all(dim=2).sum() == 1
    assert (colours == torch.tensor(grey)).all(dim=2).sum() == 0  # row 0 is half of its blocks
    page.ask("document.querySelector('canvas.thumbnail').dispatchEvent(new MouseEvent('mousemove', {clientX:"
             " document.querySelector('canvas').getBoundingClientRect().x + 1, clientY:"
             " document.querySelector('canvas').getBoundingClientRect().bottom - 1}))")  # fmt: skip
    assert page.ask("document.querySelector('canvas + .legend + .told').textContent").startswith(
        "rows 62 to 63, columns 0 to 2: at most "
    )
    assert page.problems == []


def test_keys(written: Path, page: Page) -> None:
    page.view(1280, 800, "light")
    page.open(written)
    current = "document.querySelector('nav [aria-current]').dataset.page"
    page.press("ArrowRight")
    assert page.ask(current) == "matrix"
    page.ask("document.querySelector('.matrix td[tabindex=\"0\"]').focus()")
    page.press("ArrowDown", "ArrowRight")
    assert "layers.1.experts.*.down.weight" in page.ask("document.activeElement.title") or "(4 tensors)" in page.ask(
        "document.activeElement.title"
    )
    page.press("ArrowLeft")
    assert page.ask("document.activeElement.title").startswith("model.layers.1.up.weight: rms ")
    assert page.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    assert page.ask("document.querySelector('#detail h2').textContent") == "model.layers.1.up.weight"
    page.ask("document.activeElement.blur()")
    page.press("/")
    assert page.ask("document.activeElement.type") == "search"
    page.press("e", "m", "b")
    assert page.ask("document.querySelectorAll('#page-tensor tbody tr[data-tensor]').length") == 3
    page.press("Tab")
    page.ask("document.querySelector('#page-tensor tr[data-tensor]').focus()")
    page.press("ArrowDown", "Enter")
    assert page.ask("document.querySelector('#detail h2').textContent") == "optimizer.state.embed.weight.exp_avg"
    page.ask("location.hash = 'bytes'")
    page.ask("new Promise(done => setTimeout(done, 30))")
    page.ask("document.querySelector('.leaf').focus()")
    page.press("Enter")
    assert page.ask("document.querySelectorAll('#page-bytes button').length") == 2
    page.press("Backspace")
    assert page.ask("document.querySelectorAll('#page-bytes button').length") == 1
    assert page.problems == []


def test_it_prints_all_pages(written: Path, page: Page) -> None:
    page.open(written)
    page.ask("dispatchEvent(new Event('beforeprint'))")
    page.send("Emulation.setEmulatedMedia", media="print")
    heights = page.ask("[...document.querySelectorAll('section')].map(one => one.offsetHeight)")
    page.send("Emulation.setEmulatedMedia", media="")
    assert len(heights) == len(DRAWN) and min(heights) > 50
