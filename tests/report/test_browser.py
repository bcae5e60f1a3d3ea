"""The page in a real browser: no fault, no request, nothing cut off; it filters, sorts, explains, and can be used without a mouse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import Browser, needs_chromium
from record_factory import HOSTILE, UNICODE

pytestmark = [needs_chromium, pytest.mark.processes]

TEXTS = """(() => {
  const box = (element) => element.getBoundingClientRect();
  const drawings = [...document.querySelectorAll("figure svg[role=img]")];
  const texts = drawings.map((svg) => [...svg.querySelectorAll("text")].map((text) => [text.textContent, box(text)]));
  const outside = drawings.flatMap((svg, index) => {
    const b = box(svg.closest("figure")), scrolls = svg.closest(".scroll");
    return scrolls ? [] : texts[index].filter(([, a]) => a.left < b.left - 1 || a.right > b.right + 1).map(([text]) => text);
  });
  const overlaps = texts.flatMap((found) => found.flatMap(([one, a], i) => found.slice(i + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4).map(([two]) => `${one} / ${two}`)));
  const low = drawings.filter((svg) => box(svg).height < 40).length;
  return {outside, overlaps, low, drawings: drawings.length, wide: document.documentElement.scrollWidth - innerWidth};
})()"""
FOCUS = "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent || document.activeElement.name).trim()"
TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
SHOWN = "[...document.querySelectorAll('#table tbody tr')].filter((row) => !row.hidden).length"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, True)])
@pytest.mark.parametrize("name", ["odd", "many"])
def test_the_page_runs_whole_and_asks_for_nothing(chromium: Browser, pages: dict[str, str], name: str, width: int, dark: bool) -> None:
    chromium.size(width, dark=dark)
    chromium.open(pages[name])
    chromium.run("known.then(() => 0)")
    assert chromium.faults == []
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []
    found = chromium.run(TEXTS)
    assert (found["outside"], found["overlaps"], found["low"]) == ([], [], 0)
    assert found["wide"] <= 0
    assert found["drawings"] >= 12


def test_filters_narrow_the_table(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    assert chromium.run(SHOWN) == 60
    chromium.run("document.querySelector('#filter [name=status]').focus()")
    chromium.run(
        "(() => { const box = document.querySelector('#filter [name=status]'); box.value = 'skipped';"
        " box.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    skipped = chromium.run(SHOWN)
    assert 0 < skipped < 30
    figures = chromium.run("document.querySelectorAll('figure[hidden]').length")
    assert chromium.run("count.textContent") == f"{skipped} of 60 points, in table and figures; {figures} figures without them hidden"
    chromium.run("document.querySelector('#filter [type=reset]').click()")
    chromium.run("document.querySelector('#filter [name=text]').focus()")
    chromium.type("b32 1x2 GPT")
    expected = [
        record
        for record in chromium.run("[...document.querySelectorAll('#table tbody tr')].map((row) => row.textContent)")
        if all(word in record for word in ("b32", "1x2", "gpt"))
    ]
    assert chromium.run(SHOWN) == len(expected) > 0
    chromium.type(" nothing has this")
    assert chromium.run(SHOWN) == 0
    assert chromium.faults == []


MARKS = "[...document.querySelectorAll('figure:not([hidden]) [data-tip]:not(.away)')].map((mark) => mark.dataset.tip)"


def test_filters_narrow_the_figures(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    everything = chromium.run(MARKS)
    assert any("jureca-a100" in tip for tip in everything) and any("jedi" in tip for tip in everything)
    chromium.run(
        "(() => { const box = document.querySelector('#filter [name=machine]'); box.value = 'jedi';"
        " box.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    left = chromium.run(MARKS)
    assert 0 < len(left) < len(everything) and not any("jureca-a100" in tip or "lumi" in tip for tip in left)
    kept = "[...document.querySelectorAll('figure:not([hidden]) [data-all]:not(.away)')].length"
    assert chromium.run(kept) > 0, "lines of which all points are shown stay"
    chromium.run("document.querySelector('#filter [type=reset]').click()")
    assert chromium.run(f"new Promise((done) => setTimeout(() => done({MARKS}), 50))") == everything and chromium.faults == []


def test_headings_sort_numbers_as_numbers(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    column = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.querySelector('data')?.value ?? '')"
    chromium.run("document.querySelector('#table th[data-metric=throughput] button').click()")
    rising = chromium.run(column)
    values = [float(value) for value in rising if value]
    assert values == sorted(values)
    assert "" not in rising[: len(values)], "points without a number come last"
    assert chromium.run("document.querySelector('#table th[data-metric=throughput]').ariaSort") == "ascending"
    chromium.run("document.querySelector('#table th[data-metric=throughput] button').click()")
    falling = [float(value) for value in chromium.run(column) if value]
    assert falling == values[::-1]


def test_keys_reach_everything_in_the_order_of_the_page(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    chromium.press("Tab")
    assert chromium.run(FOCUS) == "Skip to the results"
    stops = []
    for _ in range(200):
        chromium.press("Tab")
        stops.append(
            chromium.run(
                "(() => { const e = document.activeElement;"
                " return e === document.body ? null : [e.tagName, e.closest('section')?.id ?? 'head']; })()"
            )
        )
        if stops[-1] is None:
            break
    stops = [stop for stop in stops if stop]
    assert stops[0] == ["BUTTON", "head"]
    sections = list(dict.fromkeys(section for _, section in stops))
    order = chromium.run("['head', ...[...document.querySelectorAll('section')].map((section) => section.id)]")
    assert sections == [section for section in order if section in sections]
    assert {"results", "throughput", "point"} <= set(sections)
    inside = [tag for tag, section in stops if section == "results"]
    assert len(inside) < 10, "one stop leads into the table, however long it is"


def test_arrow_keys_walk_the_table_and_explain_its_numbers(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    chromium.run("document.querySelector('#table tbody a').focus()")
    chromium.press("ArrowRight", times=3)
    assert "token/s" in chromium.run(FOCUS)
    tip = chromium.until(f"({TIP}).startsWith('Items trained in the window') && ({TIP})")
    assert "window from " in tip and "source: " in tip
    assert chromium.run("document.activeElement.getAttribute('aria-describedby')") == "tip"
    chromium.press("Escape")
    assert chromium.run(TIP) == ""
    chromium.press("ArrowUp")
    assert chromium.run(TIP).startswith("Items trained in the window"), "a heading explains itself too"
    chromium.press("Enter")
    assert chromium.run("document.querySelector('#table th[data-metric=throughput]').ariaSort") == "ascending"
    chromium.press("ArrowDown")
    chromium.press("Home")
    label = chromium.run(FOCUS)
    chromium.press("Enter")
    chromium.until(f"document.getElementById('shown').textContent === {json.dumps(label)}")
    chromium.until("document.activeElement.id === 'shown'")


def test_pointing_at_a_mark_or_a_number_explains_it(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    for selector, word in (
        ("#throughput figure svg path[data-tip]", "batch"),
        ("#table tbody td.n", "window from"),
        ("#table td.state", "module_scope"),
    ):
        chromium.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        x, y = chromium.run(
            f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        chromium.point(1, 1)
        chromium.point(x, y)
        chromium.until(f"({TIP}).includes('{word}')")


def test_power_can_be_zoomed_into(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    said = "document.querySelector('#full output')?.textContent"
    press = "[...document.querySelectorAll('#full .controls button')].find((button) => button.textContent === '{}').click()"
    whole = chromium.until(said)
    assert whole.startswith("Power from ")
    ticks = "[...document.querySelectorAll('.trace text')].map((text) => text.textContent).join()"
    before = chromium.run(ticks)
    chromium.run(press.format("Zoom in"))
    assert chromium.run(said) != whole
    assert chromium.run(ticks) != before
    chromium.run(press.format("Whole run"))
    assert chromium.run(said) == whole
    chromium.run(press.format("Window"))
    assert chromium.run(said) != whole
    assert chromium.faults == []


def test_hostile_names_do_nothing(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["odd"])
    chromium.run("window.alert = () => { window.alerted = true; }")
    keys = chromium.run("[...which.options].map((option) => option.value)")
    texts = []
    for key in keys:
        chromium.run(f"location.hash = '#point={key}'")
        chromium.until(f"which.value === '{key}' && full.textContent")
        texts.append(chromium.run("full.textContent"))
    assert chromium.run("window.alerted ?? false") is False
    assert chromium.run("document.querySelectorAll('script').length") == 2
    assert any(HOSTILE in text for text in texts)
    assert any(f"Costliest operatorssharetimecallsoperator100.0 %1.00 s1{HOSTILE}" in text for text in texts)
    assert any(UNICODE in text for text in texts)
    assert chromium.faults == []


def test_light_and_dark(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1280)
    chromium.open(pages["many"])
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    light = chromium.run(ink)
    chromium.run("theme.click()")
    assert chromium.run(ink) != light


def test_in_print_nothing_scrolls(chromium: Browser, pages: dict[str, str]) -> None:
    chromium.size(1000, media="print")
    chromium.open(pages["many"])
    hidden = "[...document.querySelectorAll('#filter, nav, #theme')].every((element) => getComputedStyle(element).display === 'none')"
    assert chromium.run(hidden)
    assert chromium.run("document.querySelector('.tall').clientHeight >= document.querySelector('.tall').scrollHeight")


def test_a_picture_is_not_blank(chromium: Browser, pages: dict[str, str], tmp_path: Path) -> None:
    from PIL import Image

    chromium.size(1280, 3000)
    chromium.open(pages["odd"])
    chromium.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        colours = image.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 100
