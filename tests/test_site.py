"""The documentation site: it is whole, it needs no network, and its tables say everything that the code knows."""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pydantic import BaseModel

from caraml.base.errors import ExitCode
from caraml.cli import app
from caraml.launch import Job
from caraml.metrics.model import METRICS, Bandwidth, Facts, Metric, OwnMetric, Peak, Phase, Window
from caraml.power.model import BLOCKING, ENERGY_FLAGS, Channel
from caraml.power.source import SourceEntry
from caraml.results.record import FLAGS, STATUSES, Costly, Fingerprint, Profile, Record
from caraml.suite.load import Benchmark, Suite, catalog_suites
from caraml.suite.model import Knobs, Placement, Policy
from caraml.system.families.family import FAMILIES
from caraml.system.model import Affinity, Container, Cpu, DeviceModel, Figure, Link, Network, Scheduler, Site, Software, System
from caraml.workloads import WORKLOADS, load_workload
from caraml.workloads.base import BuildContext, Quality, Task, Workload

ROOT = Path(__file__).parents[1]
RECORD: tuple[type[BaseModel], ...] = (Record, Metric, OwnMetric, Window, Phase, Facts, Peak, Bandwidth, Fingerprint, Profile, Costly)
SYSTEM: tuple[type[BaseModel], ...] = (System, DeviceModel, Cpu, Link, Affinity, Figure, Site, Scheduler, Network, Container, Software)
MODELS: dict[str, type[BaseModel]] = {
    **{name: load_workload(name).params for name in WORKLOADS},
    **{model.__name__: model for model in (Suite, Policy, Knobs, Placement, *RECORD, *SYSTEM)},
}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The module that makes the tables."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as ``mkdocs build --strict`` makes it: a dead link or a page without a place is an error."""
    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    logging.getLogger("mkdocs").removeHandler(handler)
    assert warnings == []
    return folder


class Fetched(HTMLParser):
    """Addresses that a page fetches by itself, without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(values.get("href") or "")
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.addresses += [values.get("src") or "", values.get("srcset") or ""]


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert [address for address in parser.addresses if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"""(?:url\(|@import )["']?(?:https?:)?//[^)"']+""", sheet.read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_every_file_that_a_page_asks_for_is_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        for address in filter(None, parser.addresses):
            assert page.name == "404.html" or address.startswith("data:") or (page.parent / address.partition("?")[0]).exists(), (
                page,
                address,
            )


@pytest.mark.slow
def test_every_table_is_on_a_page_and_full(site: Path, tables: ModuleType) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(tables.MARKER.findall(sources)) == sorted(tables.TABLES)
    for name, make in tables.TABLES.items():
        assert make().count("\n| ") >= 3, name
    assert "puts the table" not in "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))


@pytest.mark.slow
def test_every_template_is_shown_on_its_page(site: Path) -> None:
    for page, files in {
        "workload": ["workload/pyproject.toml", "workload/caraml_curves.py", "workload/curves.toml"],
        "power-source": ["power_source/pyproject.toml", "power_source/caraml_ina.py"],
        "system": ["system.toml"],
        "launcher": ["launcher/pyproject.toml", "launcher/caraml_pbs.py"],
        "metric": ["metric.py"],
    }.items():
        code = re.findall(r"<code>(.*?)</code>", (site / "extend" / f"{page}.html").read_text(encoding="utf-8"), flags=re.DOTALL)
        shown = [html.unescape(re.sub(r"<[^>]+>", "", text)).strip() for text in code]
        for file in files:
            assert (ROOT / "examples" / file).read_text(encoding="utf-8").strip() in shown, file


@pytest.mark.slow
def test_the_search_needs_no_server(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert "assets/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_every_key_says_what_it_is(name: str) -> None:
    assert [key for key, field in MODELS[name].model_fields.items() if not field.description] == []


def test_every_key_of_a_benchmark_says_what_it_is() -> None:
    described = {*Knobs.model_fields, *Placement.model_fields}
    assert [key for key, field in Benchmark.model_fields.items() if not field.description and key not in described] == []


def first_cells(text: str) -> list[str]:
    """First word of the first cell of every row of tables, without its quotes."""
    return [cell for cell in re.findall(r"^\| `([^` :]+)[^|]*`? \|", text, flags=re.MULTILINE) if cell]


def test_tables_have_every_name_that_the_code_has(tables: ModuleType) -> None:
    expected: dict[str, list[str]] = {
        "metrics": list(METRICS),
        "flags": list(FLAGS),
        "power-flags": list(ENERGY_FLAGS),
        "statuses": list(STATUSES),
        "exit-codes": [str(int(code)) for code in ExitCode],
        "suites": catalog_suites(),
        "benchmark": list(Benchmark.model_fields),
        "measure": list(Policy.model_fields),
        "workloads": [key for name in WORKLOADS for key in load_workload(name).params.model_fields],
        "record": [key for model in RECORD for key in model.model_fields],
    }
    for name, names in expected.items():
        assert sorted(first_cells(tables.TABLES[name]())) == sorted(names), name
    assert {
        name for name, row in re.findall(r"^\| `(\w+)` \| (no|yes)", tables.TABLES["power-flags"](), re.MULTILINE) if row == "no"
    } == BLOCKING


def test_the_matrix_of_devices_claims_tests_that_exist(tables: ModuleType) -> None:
    assert tables.TABLES["devices"]().count("emulated") > 50
    matrix = sys.modules["devices_table"]
    assert len(matrix.TITLES) == len(matrix.COLUMNS) and set(matrix.SEEN) <= set(matrix.FEATURES)
    for file in matrix.RESULTS.values():
        found = json.loads((ROOT / file).read_text(encoding="utf-8"))
        assert all(check["deviation"] <= check["allowed"] for check in found["checks"]) and len(found["checks"]) > 10
        assert {True} == {record["energy"]["valid"] for record in found["records"] if record["status"] == "ok"}
        assert "throttling" not in matrix.SEEN or any("throttled" in record["flags"] for record in found["records"])
    for feature, tests in matrix.FEATURES.items():
        assert set(tests) <= set(matrix.COLUMNS), feature
        for test in set(tests.values()) - {matrix.NOT_THERE}:
            path, _, name = test.partition("::")
            name, _, parameters = name.partition("[")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert f"def {name}(" in text and parameters.removesuffix("]") in text, test


def test_every_variable_of_caraml_is_explained(tables: ModuleType) -> None:
    used = {
        name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r'"(CARAML_[A-Z_]+[A-Z])"', path.read_text(encoding="utf-8"))
    }
    assert set(first_cells(tables.TABLES["variables"]())) == used


def test_every_variable_of_others_that_is_obeyed_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'environ\.get\("([A-Z_]+)"', text)}
    masks = {name for family in FAMILIES for name in family.variables}
    by_launchers = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"}
    assert {name for name in (read | masks) - by_launchers if f"`{name}`" not in page} == set()


def test_limits_are_the_numbers_of_the_code(tables: ModuleType) -> None:
    text = tables.TABLES["limits"]()
    assert "| `LARGEST` | 1e+100 |" in text and "| `KEY` | 200 |" in text and "`_" not in text


def test_every_verb_and_option_is_in_the_table_of_commands(tables: ModuleType) -> None:
    import typer

    text = tables.TABLES["commands"]()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"^## caraml {name}\b", text, flags=re.MULTILINE), name
    for words in ("caraml power watch", "caraml system show", "caraml data prepare text"):
        assert f"## {words}\n" in text
    assert "| `--methods METHODS` |" in text and "| `--fail-if" in text and "CARAML_RESULTS" in text


def test_types_and_defaults_are_put_into_words(tables: ModuleType) -> None:
    text = tables.TABLES["benchmark"]()
    assert (
        '| `devices` | integer ≥ 1, `"all"` | `1` |' in text
        and '| `precision` | `"fp32"`, `"tf32"`, `"bf16"`, `"fp16"`, `"fp8"` | `"fp32"` |' in text
    )
    assert "| `target` | number > 0 < 1 | `0.01` |" in tables.TABLES["measure"]()
    assert "| `width` | integer ≥ 8 | by `preset` |" in tables.TABLES["workloads"]()


def test_the_pages_about_extending_name_all_that_a_plug_in_can_give() -> None:
    """What the engine fills in, and what only a model of CARAML's can say, stands in the code."""
    within = {"own_device", "divided", "attention", "division", "start_from", "save_to", "awaited"}
    pages = {"workload": (Workload, Task, BuildContext, Quality, Facts), "power-source": (SourceEntry, Channel), "launcher": (Job,)}
    for page, models in pages.items():
        text = (ROOT / "docs" / "extend" / f"{page}.md").read_text(encoding="utf-8")
        names = {name for model in models for name in (model.model_fields if issubclass(model, BaseModel) else model.__dataclass_fields__)}
        assert {name for name in names - within if not re.search(rf"\b{name}\b", text)} == set(), page
