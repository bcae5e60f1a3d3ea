"""The HTML page: one self-contained file that opens offline, prints, and explains every number in it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml import __version__
from caraml.base.files import write_file
from caraml.base.text import printable
from caraml.power.model import METHOD_VERSION
from caraml.report.explain import ENERGY_FIX, definition, energy_reason, flag_meaning
from caraml.report.flatten import flat
from caraml.report.labels import labels
from caraml.report.rows import HEADLINE, Row, everything, flags, heading, pack, rows
from caraml.report.sections import sections
from caraml.report.svg import WIDTH, size_of, symbol
from caraml.report.traces import read_traces
from caraml.results.record import FLAGS, SCHEMA_VERSION, Record
from caraml.results.store import Store
from caraml.units import METRICS

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("page.js", "table.js", "trace.js", "point.js")
WIDE = 1.6 * WIDTH
"""A drawing wider than this has a row of the page for itself."""


def write_report(store: Store, records: Sequence[Record], path: Path, title: str) -> Path:
    """Write the page of ``records`` to ``path``, whole or not at all, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, page(store, records, title))
    return path


def page(store: Store, records: Sequence[Record], title: str, *, home: str = "", raw: str = "") -> str:
    """The page as HTML. ``home`` is the address of a list of pages, ``raw`` that of the raw files, where a server has them."""
    from markupsafe import Markup

    script = "".join(_asset(name) for name in SCRIPTS)
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            **_content(store, records),
            title=title,
            home=home,
            raw=raw,
            policy=policy(script),
            style=style(),
            script=Markup(script),  # noqa: S704 -- files of this package
        )
    )


def environment() -> Environment:
    """Templates that escape every text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("caraml.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    made.filters["svg"] = Markup  # only for drawings made by caraml.report.svg, whose texts are escaped
    made.filters["wide"] = lambda drawing: size_of(drawing)[0] > WIDE
    made.globals["symbol"] = symbol
    return made


def _visible(value: Any) -> Any:
    """Texts of records without characters that turn the direction of what follows, or that nobody can see; markup of ours as it is."""
    from markupsafe import Markup

    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(printable, value.split("\n")))
    return value


def policy(script: str = "") -> str:
    """What a page may do, as a content security policy: run the one script that it came with, and ask nobody for anything."""
    allowed = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" if script else "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def style() -> str:
    """The style sheet, as markup."""
    from markupsafe import Markup

    return Markup(_asset("style.css"))  # noqa: S704 -- a file of this package


def _asset(name: str) -> str:
    return files("caraml.report").joinpath(name).read_text(encoding="utf-8")


def _content(store: Store, records: Sequence[Record]) -> dict[str, Any]:
    named = labels(records)
    table = rows(store, records, named)
    traces, faults = read_traces(store, records)
    used = {flag for record in records for flag in flags(record)}
    names = dict.fromkeys([*HEADLINE, *(name for record in records for name in record.metrics)])
    return {
        "rows": table,
        "unfinished": [row for row in table if row.status != "ok"],
        "choices": _choices(table),
        "several": len({row.machine for row in table}) > 1,
        "headings": [(name, heading(name), definition(name)) for name in HEADLINE],
        "sections": sections(store, records),
        "trace_faults": faults,
        "packed": pack(everything(store, records, named, traces)),
        "summary": summary(records),
        "environment": _environment(records, named),
        "definitions": [(name, heading(name), METRICS[name].unit if name in METRICS else "", definition(name)) for name in names],
        "flags": [(flag, flag_meaning(flag)) for flag in sorted(used | FLAGS.keys())],
        "energy_reasons": sorted({reason for record in records if (reason := energy_reason(record))}),
        "energy_fix": ENERGY_FIX,
        "versions": {"caraml": __version__, "schema": SCHEMA_VERSION, "method": METHOD_VERSION},
    }


def _choices(table: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """What the table can be narrowed by: name, title and values, where there are at least two."""
    values = {name: list(dict.fromkeys(getattr(row, name) for row in table)) for name in ("status", "workload", "machine")}
    return [(name, name.capitalize(), column) for name, column in values.items() if len(column) > 1]


def summary(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The lines below the title: what ran where, when, on which software."""
    dates = sorted(record.started_at[:16].replace("T", " ") for record in records)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "–"
    statuses = [record.status for record in records]
    outcome = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return [
        ("Suite", _joined(record.point.suite for record in records)),
        ("Machine", _joined(f"{record.point.device} ({record.point.system})" for record in records)),
        ("Date", when),
        ("Software", _joined(record.point.software for record in records)),
        ("Points", outcome or "none"),
    ]


def _joined(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(map(printable, values))) or "–"


MOST_POINTS, MOST_VALUES = 6, 12
"""Points that the environment names where values differ, of more their number; and values that it lists."""


def _environment(records: Sequence[Record], named: dict[str, str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every setting once, with its value; where points differ, each value with the points that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    told = [record for record in records if record.environment or record.system]
    for record in told:
        for name, value in flat({"system": record.system, **record.environment}):
            found.setdefault(name, {}).setdefault(value, []).append(named[record.key])

    def points(having: list[str]) -> str:
        if len(having) == len(told):
            return ""
        return ", ".join(having) if len(having) <= MOST_POINTS else f"{len(having)} points, such as {having[0]}"

    def values(found: dict[str, list[str]]) -> list[tuple[str, str]]:
        shown = [(value, points(having)) for value, having in list(found.items())[:MOST_VALUES]]
        return [*shown, (f"and {len(found) - MOST_VALUES} further values", "")] if len(found) > MOST_VALUES else shown

    return [(name, values(having)) for name, having in found.items()]
