"""The page in a real browser: it draws, runs without a fault, does not scroll sideways, follows the theme."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from record_factory import full_store

from caraml.report.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

PROBE = """
<script>
addEventListener("error", (event) => faults.push(String(event.message)));
const faults = [];
addEventListener("load", () => {
  const box = (element) => element.getBoundingClientRect();
  const drawings = [...document.querySelectorAll("figure > svg")];
  const outside = drawings.flatMap((svg) => [...svg.querySelectorAll("text")].filter((text) => {
    const a = box(text), b = box(svg.closest("figure"));
    return a.left < b.left - 1 || a.right > b.right + 1;
  }).map((text) => text.textContent));
  const overlaps = drawings.flatMap((svg) => {
    const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, box(text)]);
    return texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([, b]) =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4).map(([two]) => `${one} / ${two}`));
  });
  const hover = (selector) => {
    const target = document.querySelector(selector);
    target.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
    return document.getElementById("tip").textContent;
  };
  const cell = hover("#results td.n"), mark = hover("figure svg path[aria-label^=gpt-mini]");
  const column = () => [...document.querySelectorAll("#results tbody tr")].map((row) => row.querySelector("data")?.value ?? "");
  document.querySelectorAll("#results th button")[2].click();
  const sorted = column();
  const ink = () => getComputedStyle(document.querySelector("figure > svg text")).fill;
  const before = ink();
  document.getElementById("theme").click();
  const found = {faults, outside, overlaps, cell, mark, sorted, inks: [before, ink()], drawings: drawings.length,
    heights: drawings.map((svg) => box(svg).height), wide: document.documentElement.scrollWidth - innerWidth, width: innerWidth};
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def browse(path: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = full_store(tmp_path_factory.mktemp("store"))
    return page(store, store.records("quick"), "In a browser")


@pytest.mark.parametrize(("width", "large_text"), [(1280, False), (500, False), (1280, True)])
def test_page_in_chromium(html: str, tmp_path: Path, width: int, large_text: bool) -> None:
    path = tmp_path / "page.html"
    wider_font = "<style>figure > svg text { font-family: 'DejaVu Sans', Verdana, sans-serif !important; }</style>" if large_text else ""
    path.write_text(html.replace("<head>", f"<head>{wider_font}{PROBE}"), encoding="utf-8")
    done = browse(path, tmp_path / "profile", f"--window-size={width},2000", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert match is not None
    found = json.loads(unescape(match.group(1)))
    assert found["faults"] == []
    assert found["outside"] == []
    assert found["overlaps"] == []
    assert found["wide"] <= 0
    assert found["drawings"] >= 12
    assert min(found["heights"]) > 100
    assert found["cell"].startswith("Items trained in the window")
    assert found["mark"] == "gpt-mini b16 fp32: 40,790 ± 0.8 % token/s"
    values = [float(value) for value in found["sorted"] if value]
    assert values == sorted(values)
    assert found["inks"][0] != found["inks"][1]


def test_screenshot_is_not_blank(html: str, tmp_path: Path) -> None:
    from PIL import Image

    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(html, encoding="utf-8")
    browse(path, tmp_path / "profile", "--window-size=1280,3000", f"--screenshot={picture}")
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 100
