"""The page for people who read it with a keyboard, a screen reader, or without telling all colours apart: the main rules of WCAG 2.2 AA."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise

import pytest
from browser import Browser, needs_chromium

from caraml.base import chart
from caraml.base.chart import DASHES, SERIES, SHAPES, dash, series_colour, shape

STYLE = files("caraml.report").joinpath("style.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{3,8})", STYLE[STYLE.index(":root {") : STYLE.index("}")]))
DARK = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{3,8})", STYLE[STYLE.index(':root[data-theme="dark"]') : STYLE.index("@media")]))

RULES = """(() => {
  const name = (e) => (e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.title || "").trim();
  const visible = (e) => e.checkVisibility();
  const faults = [];
  const check = (rule, selector, test) => [...document.querySelectorAll(selector)].filter(visible).filter((e) => !test(e))
    .forEach((e) => faults.push(`${rule}: ${e.outerHTML.slice(0, 120)}`));
  check("has a name", "a, button, input, select, summary, [role=region], [role=group], [role=search], nav, table[role=grid]", name);
  check("image has a title", "svg[role=img]", (e) => e.querySelector("title")?.textContent.trim());
  check("decoration is hidden", "svg:not([role=img])", (e) => e.getAttribute("aria-hidden") === "true");
  check("heading cells have a scope", "th", (e) => e.scope);
  check("table has headings", "table", (e) => e.tHead?.rows[0].cells.length);
  check("rows are as wide as their table", "tbody tr", (e) => [...e.cells].reduce((sum, cell) => sum + cell.colSpan, 0)
    === e.closest("table").tHead?.rows[0].cells.length);
  check("what scrolls can be focused", ".scroll", (e) => e.tabIndex === 0 || e.querySelector("[tabindex='0']"));
  check("no positive tabindex", "[tabindex]", (e) => e.tabIndex <= 0);
  check("reference leads somewhere", "[aria-describedby], [aria-labelledby]", (e) => (e.getAttribute("aria-describedby")
    ?? e.getAttribute("aria-labelledby")).split(" ").every((id) => document.getElementById(id)));
  check("link leads somewhere", "a[href^='#']", (e) => e.hash.startsWith("#point=") || document.getElementById(e.hash.slice(1)));
  check("targets are large enough", "button:not(th button), select, input", (e) => e.getBoundingClientRect().height >= 24);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  ids.filter((id, index) => ids.indexOf(id) !== index).forEach((id) => faults.push(`id twice: ${id}`));
  const levels = [...document.querySelectorAll("h1, h2, h3, h4")].filter(visible).map((e) => Number(e.tagName[1]));
  if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) faults.push(`one h1 first: ${levels}`);
  levels.slice(1).forEach((level, index) => level > levels[index] + 1 && faults.push(`heading skips a level: ${levels}`));
  for (const landmark of ["main", "header", "footer", "nav"])
    if (document.querySelectorAll(landmark).length !== 1) faults.push(`one ${landmark}`);
  if (!document.documentElement.lang) faults.push("language");
  return faults;
})()"""


def luminance(colour: tuple[float, float, float]) -> float:
    """Relative luminance (WCAG 2.2) of an sRGB colour, channels 0 to 1."""
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def rgb(text: str) -> tuple[float, float, float]:
    digits = text[1:] if len(text) > 4 else "".join(2 * digit for digit in text[1:])
    return int(digits[0:2], 16) / 255, int(digits[2:4], 16) / 255, int(digits[4:6], 16) / 255


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def blend(top: str, below: str, opacity: float) -> tuple[float, float, float]:
    a, b = rgb(top), rgb(below)
    return tuple(opacity * x + (1 - opacity) * y for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(theme: dict[str, str]) -> None:
    for ground in ("paper", "card"):
        for text in ("ink", "soft", "link", "good", "warn", "bad"):
            assert contrast(rgb(theme[text]), rgb(theme[ground])) >= 4.5, (text, ground)
        assert contrast(rgb(theme["edge"]), rgb(theme[ground])) >= 3, "the edge of a button"
    assert contrast(rgb(theme["paper"]), rgb(theme["ink"])) >= 4.5, "the explaining box"
    for opacity in (0.06, 0.5):
        assert contrast(rgb(theme["ink"]), blend(theme["s0"], theme["card"], opacity)) >= 4.5, "a cell of a heat map"
    shaded = blend(theme["shade"][:7], theme["card"], int(theme["shade"][7:], 16) / 255)
    assert contrast(rgb(theme["ink"]), shaded) >= 4.5


def test_light_and_dark_name_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert LIGHT | chart.LIGHT == LIGHT, "figures as files have the colours of the page"
    assert STYLE.count("--s6:") == 3, "the dark colours stand twice: chosen, and by the system's wish"
    chosen, wished = (dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]+)", part)) for part in STYLE.split("color-scheme: dark;")[1:3])
    assert {name: wished[name] for name in DARK} == {name: chosen[name] for name in DARK}


def test_no_two_series_differ_by_colour_alone() -> None:
    looks = [(series_colour(index), dash(index), shape(index)) for index in range(SERIES * len(SHAPES))]
    assert len(set(looks)) == len(looks)
    for one, other in pairwise(looks):
        assert one[1] != other[1]
        assert one[2] != other[2]
    assert len(DASHES) == len(SHAPES)


@needs_chromium
@pytest.mark.processes
@pytest.mark.parametrize("width", [1280, 420])
def test_names_roles_headings_and_tables(chromium: Browser, pages: dict[str, str], width: int) -> None:
    for url in pages.values():
        chromium.size(width)
        chromium.open(url)
        chromium.run("known.then(() => new Promise((done) => setTimeout(done, 200)))")
        chromium.run("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
        assert chromium.run(RULES) == []


@needs_chromium
@pytest.mark.processes
def test_the_rules_find_faults(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["odd"])
    spoil = """document.querySelector('main').insertAdjacentHTML('afterbegin', `<h4>too deep</h4><button></button>
        <button id="table">twice</button><table><tbody><tr><td>x</td></tr></tbody></table>
        <a href="#nowhere">x</a><svg role="img"></svg>`)"""
    chromium.run(spoil)
    found = " ".join(chromium.run(RULES))
    for rule in ("heading skips", "has a name", "id twice: table", "table has headings", "link leads", "image has a title"):
        assert rule in found, rule
