"""Makes the pictures of the documentation: terminal output and the screen of `browse` as SVG; pages of a trial and of a
report as PNG (with chromium).

python docs/pictures.py        # from a checkout, after `make .venv/bin/.ready`
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

import ckpttool
from ckpttool.cli.browser.app import Browser

HERE = Path(__file__).parent / "pictures"
COLUMNS = 100
COMMANDS = {
    "inspect": "inspect run7/step-1000 --depth 1",
    "diff": "diff finetune/checkpoint-2 finetune/checkpoint-4 --only model",
    "verify": "verify damaged",
}
BROWSED = ["down", "down", "down", "down", "right", "down", "down", "down", "right", "down", "2"]
DAMAGED = "model.layers.3.attn.out.weight"
TRIAL = "verify-resume trial --recipe recipe_fsdp2.py --via safetensors --to-world 4 --html trial.html"


def main() -> None:
    """Write all pictures."""
    HERE.mkdir(exist_ok=True)
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "try"

        def run(arguments: str) -> str:
            """What a terminal shows."""
            command = ["script", "-qec", f"{sys.executable} -m ckpttool {arguments}", "/dev/null"]
            shown = subprocess.run(command, cwd=samples, env=environment, capture_output=True, text=True).stdout
            return shown.replace("\r\n", "\n")

        subprocess.run([sys.executable, "-m", "ckpttool", "samples", samples, "-q"], check=True)
        shutil.copytree(samples / "run7" / "step-1000", samples / "damaged")
        catalogue = ckpttool.inspect(samples / "damaged")
        embedding = next(t for t in catalogue.tensors if t.name == "model.embed.weight").chunks[0].extent
        data = samples / "damaged" / catalogue.files[embedding.file].name
        content = bytearray(data.read_bytes())
        # The first value of the zip archive that DCP made of the shard.
        at = content.index(b"PK\3\4", content.index(b"data/0", embedding.offset)) - 64
        content[at] ^= 1
        data.write_bytes(content)
        for name, arguments in COMMANDS.items():
            console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
            console.print(Text.from_ansi(f"$ ckpttool {arguments}\n{run(arguments)}"))
            console.save_svg(str(HERE / f"{name}.svg"), title="ckpttool")
        os.chdir(samples)
        (HERE / "browse.svg").write_text(asyncio.run(_screen("run7/step-1000", BROWSED)), encoding="utf-8")
        run(TRIAL)
        _picture(samples / "trial.html", "", "trial.png", 900)
        _save_unusual("step-1000.pt")
        run("report step-1000.pt -o report.html")
        _picture(samples / "report.html", "#matrix", "report-layers.png", 800)
        _picture(samples / "report.html", f"#tensor/{DAMAGED}", "report-tensor.png", 1400)


def _picture(page: Path, fragment: str, name: str, height: int) -> None:
    """Write what a browser shows of a page."""
    browser = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size=1000,{height}"]
    # The page is drawn before the time is over.
    browser += ["--blink-settings=preferredColorScheme=1", "--virtual-time-budget=2000"]
    subprocess.run([*browser, f"--screenshot={HERE / name}", page.as_uri() + fragment], check=True, capture_output=True)


def _save_unusual(path: str) -> None:
    """Save a model with a weight 40 times too large, and one with a NaN, zeros, and a large row and column."""
    torch.manual_seed(0)
    kinds = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    model = {
        f"layers.{n}.{kind}.weight": torch.randn(256, 256) * (0.01 + 0.002 * n) for n in range(12) for kind in kinds
    }
    model["layers.7.mlp.up.weight"] *= 40
    weight = model[DAMAGED.removeprefix("model.")]
    weight[:, 64] *= 8
    weight[148] *= 4
    weight[248:] = 0
    weight[50, 200] = torch.nan
    torch.save({"model": model, "step": 1000}, path)


async def _screen(path: str, keys: list[str]) -> str:
    """What `browse` shows after some keys."""
    app = Browser(path)
    async with app.run_test(size=(COLUMNS, 24)) as pilot:
        while app.opened is None or not app.opened.survey.finished:
            await pilot.pause(0.1)
        await pilot.press(*keys)
        await pilot.pause(0.5)
        picture = app.export_screenshot(title="ckpttool browse", simplify=True)
    app.session.close()
    return picture


if __name__ == "__main__":
    main()
