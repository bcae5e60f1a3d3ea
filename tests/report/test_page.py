"""The HTML page: its numbers are the records', it loads nothing, it explains itself, and hostile text stays text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from record_factory import HOSTILE, NO_SENSOR, UNICODE, broken_record, full_store, make_point, make_record, save, unpack

from caraml.metrics.model import METRICS, Metric
from caraml.report.document import HEADLINE, findings, headline, markdown
from caraml.report.grouping import repeated
from caraml.report.page import page, write_report
from caraml.results.record import FLAGS, Costly, Profile, Record
from caraml.results.store import Store, write_record

VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Element:
    """A node of the parsed page."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def all(self, tag: str) -> list[Element]:
        found = [child for child in self.children if child.tag == tag]
        return found + [one for child in self.children for one in child.all(tag)]

    def add_text(self, text: str) -> None:
        self.texts.append(text)
        if self.parent is not None:
            self.parent.add_text(text)


class Page(HTMLParser):
    """Builds the tree; a tag that is closed out of order is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = self.at = Element("", {}, None)
        self.ids: dict[str, Element] = {}
        self.feed(html)
        assert self.at is self.root, f"<{self.at.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        if "id" in element.attributes:
            assert element.attributes["id"] not in self.ids
            self.ids[element.attributes["id"]] = element
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag, f"<{self.at.tag}> closed by </{tag}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.add_text(data)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = full_store(tmp_path_factory.mktemp("store"))
    save(
        store,
        make_record(make_point(benchmark=HOSTILE, seed=1, suite=HOSTILE, device=HOSTILE), environment={HOSTILE: HOSTILE}, flags=[HOSTILE]),
    )
    return store


@pytest.fixture(scope="module")
def records(store: Store) -> list[Record]:
    return store.records()


@pytest.fixture(scope="module")
def html(store: Store, records: list[Record]) -> str:
    return page(store, records, f"Title {HOSTILE}")


@pytest.fixture(scope="module")
def parsed(html: str) -> Page:
    return Page(html)


@pytest.mark.slow
def test_headline_numbers_are_the_records(parsed: Page, records: list[Record]) -> None:
    rows, shown = parsed.ids["results"].all("tbody")[0].all("tr"), headline(repeated(records))
    assert len(rows) == len(records) and {"throughput", "energy_per_item", "mfu"} < set(shown) < set(HEADLINE)
    assert (
        f"Not known of any point: {', '.join(METRICS[name].title for name in HEADLINE if name not in shown)}." in parsed.ids["results"].text
    )
    for row, record in zip(rows, records, strict=True):
        assert record.status in row.text
        if record.window is None:
            assert record.reason in row.text
            continue
        cells = [cell for cell in row.all("td") if cell.attributes.get("class", "").startswith("n")]
        for cell, name in zip(cells, shown, strict=True):
            value = record.value(name)
            if value is None:
                assert cell.text == ("no sensor" if name == "energy_per_item" else "not known")
            else:
                assert float(cell.all("data")[0].attributes["value"]) == value
        assert all(flag in row.text for flag in record.flags)


def test_the_best_of_the_summary_is_picked() -> None:
    """The best of many is also the luckiest: its own interval, as the table has it, held the truth of the best of 20 equal ones in 65 %."""

    def run(batch: int, rate: float) -> Record:
        made = make_record(make_point(global_batch=batch), "token", 40, 0.1, 300.0)
        throughput = Metric(value=rate, unit="token/s", low=0.9 * rate, high=1.1 * rate)
        return made.model_copy(update={"metrics": {"throughput": throughput}})

    lines = repeated([run(4, 1300.0), run(8, 1320.0), *(run(batch, 500.0) for batch in range(16, 160, 8))])
    (label, text) = dict(findings(lines))["Fastest"].split(": ")
    alone = dict(findings(lines[1:2]))["Fastest"]
    assert " b8 " in label and text.endswith(", by an interval that holds for all at once, 1 other may be as good)")
    by_three = [run(batch, rate * share) for batch, rate in ((4, 1000.0), (8, 1006.0)) for share in (0.999, 1.0, 1.001)]
    for at, record in enumerate(by_three):
        record.metrics["throughput"] = record.metrics["throughput"].model_copy(update={"low": None, "high": None})
        by_three[at] = record.model_copy(update={"point": record.point.model_copy(update={"repeat": at % 3})})
    (good, text_of_two) = dict(findings(repeated(by_three)))["Fastest"].split(": ")
    assert " b8 " in good and text_of_two.endswith(" at once)"), "as advise says, though intervals meet"
    assert alone.endswith(": 1,320 ± 12 % token/s") and text.startswith("1,320 ± 19 % token/s (picked as the best of 20,"), (alone, text)


def test_of_a_best_without_an_interval_others_may_be_as_good() -> None:
    def of(*intervals: bool) -> str:
        lines = []
        for batch, known in zip((4, 8, 16), intervals, strict=True):
            low = {"low": 90.0 * batch, "high": 110.0 * batch} if known else {}
            made = make_record(make_point(global_batch=batch), "token", 40, 0.1, 300.0)
            lines.append(made.model_copy(update={"metrics": {"throughput": Metric(value=100.0 * batch, unit="token/s", **low)}}))
        return dict(findings(repeated(lines)))["Fastest"].split(": ")[1]

    assert of(True, True, False) == "1,600 ± ? token/s (picked as the best of 3, 2 others may be as good)"
    assert of(True, False, True).endswith(" at once, 1 other may be as good)")
    assert of(False, False, False) == "1,600 ± ? token/s"


def test_the_summary_says_how_good_what_is_best_and_what_to_do() -> None:
    def run(batch: int, step: float, flags: list[str], **changes: object) -> Record:
        made = make_record(make_point(global_batch=batch), "token", 40, step, 300.0)
        return made.model_copy(update={"flags": flags, **changes})

    def wild(record: Record) -> Record:
        rate = record.metrics["throughput"]
        much = rate.model_copy(update={"low": 0.001 * (rate.value or 0.0), "high": 50.0 * (rate.value or 0.0)})
        return record.model_copy(update={"metrics": {**record.metrics, "throughput": much}})

    lines = repeated([run(4, 0.1, []), run(8, 0.1, ["imprecise"]), run(16, 0.1, ["busy_machine"])])
    found = dict(findings(lines))
    assert found["Quality"].endswith("; 1 of 3 less precise than asked for; 1 of 3 disturbed"), found
    two = repeated([run(4, 0.1, []), wild(run(8, 0.1, []))])
    *each, middle = [float(dict(findings(some))["Quality"].split()[5].replace(",", "")) for some in (two[:1], two[1:], two)]
    assert middle == pytest.approx(sum(each) / 2, rel=0.1), "of two rates the median, not the worse one"
    assert "e+" not in dict(findings(repeated([wild(run(4, 0.1, []))])))["Quality"]
    unlike = found["Limited by"].split("; ")
    assert all(one.endswith(" of 2") for one in unlike) and "memory and overhead" not in found["Limited by"], "not by others' work"
    assert "Limited by" not in dict(findings(lines[2:]))
    assert " b8 " in found["Fastest"] and "b4" not in found["Fastest"] and "b16" not in found["Fastest"], "not one that was disturbed"
    assert "on a quiet machine or for longer" in found["Next"] and "caraml advise" in found["Next"]
    assert "caraml retry quick" in found["Next"], "needs no file"
    failed = run(4, 1.0, [], status="failed", reason="no", metrics={}, window=None)
    unknown = run(8, 0.1, ["imprecise"])
    unknown.metrics["throughput"] = unknown.metrics["throughput"].model_copy(update={"low": None, "high": None})
    told = dict(findings(repeated([unknown])))["Quality"]
    assert told.startswith("no rate has an interval; 1 of 1 less precise than asked for"), "nothing is wider than something"
    assert "is imprecise" in dict(findings(repeated([run(8, 0.1, ["imprecise"])])))["Next"]
    blind = run(8, 0.1, [])
    blind.metrics["energy_per_item"] = Metric(value=None, unit="J/token", reason="no sensor of this boundary answered")
    assert "caraml doctor" in dict(findings(repeated([blind])))["Next"]
    blind.metrics["node_energy"] = Metric(value=2e3, unit="J", scope="node_ac")
    assert "Next" not in dict(findings(repeated([blind]))), "a meter of the node was read: nothing is to be looked for"
    many = [make_record(make_point(benchmark=f"b{number}", seed=number), "token", 40, 0.1, 300.0) for number in range(6)]
    assert dict(findings(repeated(many)))["Fastest"].endswith("; and 2 more in the table")
    ((title, text),) = findings(repeated([failed]))
    assert title == "Next" and text.startswith(f"caraml logs {failed.key} says what went wrong with ") and "caraml retry" in text
    other = failed.model_copy(update={"point": failed.point.model_copy(update={"suite": "other", "seed": 9})})
    told = dict(findings(repeated([run(4, 0.1, []), run(8, 0.1, []), other])))["Next"]
    assert "caraml retry other tries again" in told and "caraml advise compares" in told, "each suite by its name"


def test_a_throughput_reads_like_this(parsed: Page) -> None:
    texts = [data.text for data in parsed.ids["results"].all("data")]
    assert "40,790 ± 5 % token/s" in texts
    assert "1.84 ± 0.09 mJ/image, ± at most 0.002 mJ/image" in texts
    assert "41 ± 2 %" in texts


def test_everything_about_every_record_is_on_the_page(parsed: Page, records: list[Record]) -> None:
    told = unpack(parsed.ids["packed"].text)
    assert told["points"].keys() == {record.key for record in records}
    for record in records:
        point = told["points"][record.key]
        assert [number[0] for number in point["numbers"]] == list(record.metrics)
        for name, _, text, value, uncertainty, _, source, note in point["numbers"]:
            metric = record.metrics[name]
            assert (value, note) == (metric.value, metric.reason or "")
            assert value is None or (text and uncertainty and source not in ("", "not described"))
            assert told["metrics"][name][1] == METRICS[name].definition
        assert point["status"] == record.status
        assert point["window"].startswith("window from " if record.window else "no window")
        assert (point["trace"] is not None) == ("power" in record.files)


def test_headings_are_defined_without_a_script(parsed: Page, records: list[Record]) -> None:
    headings = parsed.ids["table"].all("thead")[0].all("th")
    assert [heading.attributes["title"] for heading in headings if "title" in heading.attributes] == [
        METRICS[name].definition for name in headline(repeated(records))
    ]


def test_the_page_loads_nothing(html: str, parsed: Page) -> None:
    def everything(element: Element) -> list[Element]:
        return [element, *(one for child in element.children for one in everything(child))]

    for element in everything(parsed.root):
        for attribute in ("src", "href", "xlink:href", "data", "action", "poster", "srcset", "background"):
            value = element.attributes.get(attribute, "#")
            assert value.startswith("#") or value == "data:,", (element.tag, attribute, value)
        assert not [name for name in element.attributes if name.startswith("on")]
        assert "url(" not in element.attributes.get("style", "")
    style = parsed.root.all("style")[0].text
    assert "@import" not in style
    assert "url(" not in style
    assert not re.search(r"https?://", html.replace("http://www.w3.org/", ""))
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(", html)
    policy = next(meta.attributes["content"] for meta in parsed.root.all("meta") if "http-equiv" in meta.attributes)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_hostile_text_stays_text(html: str, parsed: Page) -> None:
    assert "<script>alert" not in html
    assert [script.attributes.get("type") for script in parsed.root.all("script")] == ["text/plain", None]
    assert len(parsed.root.all("style")) == 1
    assert HOSTILE in parsed.ids["unfinished"].text
    assert HOSTILE in json.dumps(unpack(parsed.ids["packed"].text)).replace('\\"', '"')
    assert HOSTILE in parsed.ids["environment"].text
    assert parsed.root.all("h1")[0].text == f"Title {HOSTILE}"
    labels = {
        mark.attributes["data-tip"]
        for figure in parsed.root.all("figure")
        for tag in ("path", "line", "rect")
        for mark in figure.all(tag)
        if "data-tip" in mark.attributes
    }
    assert any(HOSTILE in label for label in labels)
    assert any(UNICODE in label for label in labels)


def test_failed_points_stand_with_their_reason_and_folder(parsed: Page, records: list[Record]) -> None:
    text = parsed.ids["unfinished"].text
    for record in records:
        if record.status != "ok":
            assert record.reason in text
            assert f"{record.point.workload}-{record.key}/{record.attempt}" in text


def test_figures_are_drawn_and_told(parsed: Page) -> None:
    captions = [caption.text for caption in parsed.root.all("figcaption")]
    assert len(captions) == len(set(captions))
    figures = {figure.all("figcaption")[0].text: figure for figure in parsed.root.all("figure")}
    for title in (
        "Rate over global batch: gpt-mini",
        "Rate, energy and efficiency over global batch: resnet50",
        "Time and energy of 10⁶ images: resnet50",
        "Action of 10⁶ images: resnet50",
        "Phases of each point",
        "Step times in the window: gpt-mini",
        "Step time over steps: resnet50",
        "Training loss over steps: gpt-mini",
        f"Training loss over steps: {UNICODE}",
        "Power: resnet50 b32 bf16",
    ):
        assert title in figures, title
    for title, figure in figures.items():
        svg = figure.all("svg")[0]
        assert svg.attributes["role"] == "img"
        assert svg.all("title")[0].text == title or "panels" in [box.attributes.get("class") for box in figure.all("div")]
        assert svg.all("desc")[0].text
        assert figure.all("tbody")[0].all("tr"), "no numbers below the figure"
        for mark in svg.all("path") + svg.all("text") + svg.all("g") + svg.all("rect"):
            colours = [mark.attributes.get(name, "none") for name in ("fill", "stroke")]
            assert all(colour in {"none", "transparent"} or colour.startswith("var(--") for colour in colours), mark.attributes
    drawn = figures["Rate, energy and efficiency over global batch: resnet50"]
    assert len([svg for svg in drawn.all("svg") if svg.attributes.get("role") == "img"]) == 3
    assert [row.all("td")[3].text for row in drawn.all("tbody")[0].all("tr")] == [
        "135,600 ± 5 % image/s",
        "150,700 ± 5 % image/s",
        "167,500 ± 5 % image/s",
    ]
    labels = [mark.attributes["data-tip"] for mark in drawn.all("svg")[0].all("path") if "data-tip" in mark.attributes]
    assert labels[-1] == "Test GPU, batch 128: 167,500 ± 5 % image/s"


def test_a_single_point_has_bars_and_no_empty_section(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = save(store, make_record())
    parsed = Page(page(store, [record], "one"))
    titles = [caption.text for caption in parsed.root.all("figcaption")]
    assert titles[:2] == ["Throughput, token/s", "Phases of each point"]
    assert "unfinished" not in parsed.ids
    assert f"No energy: {NO_SENSOR}" in parsed.ids["results"].text
    assert "No energy for gpt-mini b16 fp32" in parsed.ids["power"].text
    assert not parsed.ids["power"].all("figure")


def test_a_page_with_a_meter_of_the_whole_node_alone_says_that_and_not_that_there_is_no_energy(tmp_path: Path) -> None:
    store, record = Store(tmp_path), make_record()
    assert record.window is not None
    record.metrics["node_energy"] = Metric(value=record.window.items * 0.02, unit="J", scope="node_ac")
    save(store, record)
    html, tables = page(store, [record], "one"), markdown(store, [record], "one")
    shown = Page(html).ids["results"].text
    assert f"Energy of the whole node; of its devices or processors none: {NO_SENSOR}." in shown
    for text in (shown, tables):
        assert "mJ/token (node)" in text and "No energy" not in text and "no sensor" not in text


def test_a_profile_stands_with_its_point(tmp_path: Path) -> None:
    store, costly = Store(tmp_path), [Costly(name=f"kernel_{index}<4>", calls=3, seconds=0.1, share=0.1) for index in range(10)]
    found = Profile(of="kernels", steps=3, micro_batches=3, seconds=2.0, costliest=costly)
    record = save(store, make_record(profile=found))
    told = unpack(Page(page(store, [record], "one")).ids["packed"].text)["points"][record.key]
    assert told["profile"]["title"] == "Costliest kernels"
    assert told["profile"]["columns"] == ["share", "time", "calls", "kernel"]
    assert (
        told["profile"]["rows"][9] == ["10.0 %", "100 ms", "3", "kernel_9<4>"] and "3 steps after the window" in told["profile"]["notes"][0]
    )


def test_points_without_any_number_still_make_a_page(tmp_path: Path) -> None:
    store = Store(tmp_path)
    parsed = Page(page(store, [save(store, broken_record(make_point(), "failed", "no GPU"))], "none"))
    assert parsed.ids["count"].text == "1 point"
    assert not parsed.root.all("figure")
    assert "no GPU" in parsed.ids["unfinished"].text
    assert "No point has a throughput." in parsed.ids["throughput"].text
    assert "None" not in parsed.root.all("main")[0].text
    assert Page(page(store, [], "empty")).root.all("h1")[0].text == "empty"


def test_a_broken_raw_file_costs_its_figures_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = save(store, make_record())
    (store.folder(record) / "steps.parquet").write_bytes(b"nothing")
    parsed = Page(page(store, [record], "broken"))
    assert "steps.parquet cannot be read" in parsed.ids["times"].text
    assert str(tmp_path) not in parsed.root.text
    assert "40,790 ± 5 % token/s" in parsed.ids["results"].text


def test_definitions_and_flags_are_listed(parsed: Page) -> None:
    text = parsed.ids["definitions"].text
    for name in HEADLINE:
        assert METRICS[name].definition in text
    assert all(meaning in text for meaning in FLAGS.values())


def test_written_whole_with_its_folder(store: Store, records: list[Record], tmp_path: Path) -> None:
    path = write_report(store, records[:1], tmp_path / "new" / "report.html", "quick")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert list(path.parent.iterdir()) == [path]


def test_nothing_of_the_machines_folders_is_on_the_page(html: str, store: Store) -> None:
    assert str(store.root) not in html


def test_records_of_a_sweep_with_a_total_rate_only_are_drawn(tmp_path: Path) -> None:
    """Who writes records by other means may leave out the rate per device."""
    metrics = {"throughput": Metric(value=1.0, unit="image/s")}
    points = [make_point(global_batch=size) for size in (8, 16)]
    records = [Record(key=point.key, attempt=1, point=point, status="ok", started_at="x", metrics=metrics) for point in points]
    for record in records:
        write_record(Store(tmp_path).new_attempt(record.point), record)
    assert write_report(Store(tmp_path), records, tmp_path / "page.html", "t").stat().st_size
