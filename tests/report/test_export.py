"""Markdown, CSV and figures as files: the same numbers, and names that attack a reader's program stay names."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from campaign_factory import campaign
from record_factory import UNICODE, broken_record, full_store, make_point, make_record, save, unpack

from caraml.base.chart import Drawing, standalone, text_at
from caraml.base.errors import InputError
from caraml.metrics.model import Metric, OwnMetric
from caraml.report.document import csv_text, figure_sections, markdown, safe_cells, write_figures
from caraml.report.page import page
from caraml.results.record import Record
from caraml.results.store import Store

ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]></style></svg><svg onload=alert(1)>",
    "=cmd|' /C calc'!A0",
    "| a | b |\n# heading",
    "[link](javascript:alert(1)) `code` **bold**",
    "\u202egnp.exe\u202c \u2066isolated\u2069",
    "\x1b[31mred\x07",
    "長" * 300,
)


@pytest.fixture(scope="module", params=ATTACKS, ids=range(len(ATTACKS)))
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Store, list[Record]]:
    """Records in which every text that a user or a machine can choose is an attack."""
    attack: str = request.param
    store = Store(tmp_path_factory.mktemp("attacked"))
    facts = {"suite": attack, "benchmark": attack, "system": attack, "device": attack, "software": attack, "params": {attack: attack}}
    for batch in (16, 32):
        record = make_record(make_point(**facts, global_batch=batch), attack, watts=200.0, flags=[attack], environment={attack: attack})
        own = Metric(value=1.0, unit=attack[:40])
        said = {attack[:40]: OwnMetric(unit=own.unit, definition=attack, source=attack)} if attack.isprintable() else {}
        record = record.model_copy(update={"metrics": record.metrics | {attack[:40]: own}, "definitions": said})
        save(store, record, watts=200.0)
    save(store, broken_record(make_point(**facts, global_batch=64), "failed", attack))
    return attack, store, store.records()


@pytest.mark.slow
def test_no_attack_becomes_markup_in_the_page(attacked: tuple[str, Store, list[Record]]) -> None:
    _, store, records = attacked
    html = page(store, records, attacked[0])
    tags = set(re.findall(r"<([a-zA-Z]+)", re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)))
    assert not tags & {"img", "iframe", "object", "embed", "base", "b", "code onload"}
    assert len(re.findall(r"<script", html)) == 2
    assert not re.search(
        r"<[^>]*\son\w+\s*=", re.sub(r"\"[^\"]*\"", '""', re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL))
    )
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b\x07]", html)
    packed = re.search(r'id="packed">([^<]*)<', html)
    assert packed is not None
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", str(unpack(packed[1])))


def test_no_attack_becomes_markup_in_a_drawing(attacked: tuple[str, Store, list[Record]]) -> None:
    _, store, records = attacked
    figures = [figure for section in figure_sections(store, records) for figure in section.figures]
    assert figures
    for figure in figures:
        tree = ElementTree.fromstring(standalone(figure.drawings, figure.title, figure.legend, figure.key))
        names = {element.tag.rpartition("}")[2] for element in tree.iter()}
        assert names <= {"svg", "g", "path", "rect", "text", "title", "desc", "line", "defs", "clipPath"}, names
        assert not [name for element in tree.iter() for name in element.attrib if name.lower().startswith("on") or "href" in name]


def test_no_text_of_a_csv_begins_like_a_formula(attacked: tuple[str, Store, list[Record]]) -> None:
    attack, _, records = attacked
    lines = list(csv.DictReader(io.StringIO(csv_text(records))))
    assert len(lines) == 3
    assert not [cell for line in lines for cell in line.values() if cell.lstrip().startswith(("=", "+", "@"))]
    assert {line["suite"].removeprefix("'") for line in lines} == {attack}


def test_markdown_shows_attacks_as_text(attacked: tuple[str, Store, list[Record]]) -> None:
    _, store, records = attacked
    text = markdown(store, records, attacked[0])
    assert "<" not in text.replace("\\<", "")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b]", text)
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) > 2
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.split("\n")}
        assert len(columns) == 1, table
    headings = [line for line in text.split("\n") if line.startswith("#")]
    assert not [line for line in headings if line == "# heading"]
    assert not re.search(r"(?<!\\)\]\(", text)


def test_numbers_stay_numbers_in_csv(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = save(store, make_record(watts=100.0))
    (line,) = csv.DictReader(io.StringIO(csv_text([record])))
    assert float(line["throughput [token/s]"]) == record.value("throughput")
    assert safe_cells([-1.5, "-1.5", "+x", " =1+1", "plain", None]) == [-1.5, "'-1.5", "'+x", "' =1+1", "plain", None]


@pytest.mark.slow
def test_markdown_has_the_page_s_numbers(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    text = markdown(store, store.records("quick"), "Quick")
    assert text.startswith("# Quick\n")
    assert "| gpt-mini b16 fp32 | ok |" in text
    assert "40,790 ± 5 % token/s" in text
    assert "out of memory: asked for 96 GiB, 12 GiB were free" in text
    assert "### Rate, energy and efficiency over global batch: resnet50" in text
    assert UNICODE in text


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<svg xmlns="), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
@pytest.mark.slow
def test_every_figure_is_a_file(tmp_path: Path, kind: str, magic: bytes) -> None:
    store = campaign(tmp_path / "store", points=8)
    paths = write_figures(store, store.records(), tmp_path / "figures", kind)
    expected = [figure.slug for section in figure_sections(store, store.records()) for figure in section.figures]
    assert [path.stem[3:] for path in paths] == expected
    for path in paths:
        assert path.read_bytes().startswith(magic)
    if kind == "svg":
        text = paths[0].read_text(encoding="utf-8")
        assert "var(" not in text, "a file of its own has no style sheet"
        assert 'width="100%"' in text
        assert "1x2" in text, "the legend"
    if kind == "png":
        from PIL import Image

        with Image.open(paths[0]) as image:
            assert image.width > 3 * 330
            assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 50


def test_results_without_numbers_have_no_figure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, broken_record(make_point(), "failed", "no GPU"))
    with pytest.raises(InputError, match="no figure"):
        write_figures(store, store.records(), tmp_path / "figures", "svg")


def test_a_name_that_looks_like_a_colour_stays_a_name(tmp_path: Path) -> None:
    drawing = Drawing("t", "s", 10, 10, text_at(0, 0, "var(--own)"))
    assert ">var(--own)<" in standalone([drawing], "t")
