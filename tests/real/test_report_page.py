"""The report's page in headless Chromium: nothing in its console, nothing wider than the window, light and dark."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import sample_report
from linnet_export.verify import page
from linnet_export.verify.records import Report

INSTALL = "apt-get update && apt-get install -y chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--v=0",
)  # fmt: skip
HEIGHT = 2400
TALLEST = {1200: 9000, 400: 16000}  # a page with everything unfolded would be longer

# The page in a frame of a width that no window has, measured by a script of the page around it.
MEASURE = """<!doctype html><meta charset="utf-8"><title>measured</title>
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  const shown = element => element.getBoundingClientRect().width > 0;
  const drawings = [...page.querySelectorAll("svg")].filter(shown);
  const sizes = [...page.querySelectorAll("svg text")].filter(shown).map(text => {{
    const matrix = text.getScreenCTM();
    return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(matrix.a, matrix.b);
  }});
  document.body.dataset.measured = JSON.stringify({{
    width: page.documentElement.scrollWidth, height: page.documentElement.scrollHeight,
    forms: drawings.map(svg => svg.classList.value), smallest: Math.min(...sizes),
  }});
}});
</script>"""


def chromium(tmp_path: Path, file: Path, width: int, *flags: str) -> tuple[str, list[str]]:
    """What the browser printed for a file, and the lines of its console."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail(f"chromium is not on PATH; install it: {INSTALL}")
    profile = tmp_path / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    profile.mkdir()
    done = subprocess.run(
        [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{HEIGHT}", *flags, file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def reports() -> dict[str, Report]:
    return {
        "passed": sample_report.report(),
        "failed": sample_report.report(failed=True),
        "exact": sample_report.report(kind="bf16"),
    }


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("name", ["passed", "failed", "exact"])
def test_the_page_fits_the_window_and_its_console_is_empty(tmp_path: Path, name: str, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.html(reports()[name]), encoding="utf-8")
    _, console = chromium(tmp_path, file, width, "--dump-dom")
    assert console == []

    framed = escape(file.read_text(encoding="utf-8"), quote=True)
    file.write_text(MEASURE.format(width=width, page=framed), encoding="utf-8")
    dom, console = chromium(tmp_path, file, 1400, "--dump-dom")
    assert console == []
    said = re.search(r'data-measured="([^"]*)"', dom)
    assert said is not None
    found = json.loads(unescape(said[1]))
    assert found["width"] <= width
    assert found["height"] < TALLEST[width]
    assert found["forms"] == ["wide" if width == 1200 else "narrow"] * (2 if name == "exact" else 3)
    assert found["smallest"] >= 9.5  # pixels: what can still be read


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_is_drawn_in_light_and_in_dark(tmp_path: Path, width: int, *, dark: bool) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page.html(reports()["failed"]), encoding="utf-8")
    mode = ["--force-dark-mode"] if dark else []
    _, console = chromium(tmp_path, file, width, f"--screenshot={picture}", *mode)
    assert console == []
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (HEIGHT, width)
    assert float(pixels[2, 2].max()) < 0.2 if dark else float(pixels[2, 2].min()) > 0.9
    # Ink on paper, the other way round in the dark; and colours: the verdict's at least.
    ink = pixels.min(axis=-1) > 0.8 if dark else pixels.max(axis=-1) < 0.3
    assert 0.001 < float(ink.mean()) < 0.3
    assert float(((pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.4).mean()) > 0.001
    assert np.isfinite(pixels).all()


def test_an_error_in_a_page_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "broken.html"
    file.write_text("<!doctype html><title>t</title><script>nothing.here()</script>", encoding="utf-8")
    _, console = chromium(tmp_path, file, 400, "--dump-dom")
    assert any("nothing is not defined" in line for line in console)
