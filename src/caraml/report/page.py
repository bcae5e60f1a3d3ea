"""The HTML page: one self-contained file that opens offline, prints, and explains every number in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml import METHOD_VERSION, __version__
from caraml.analysis.run_variation import INTERVAL
from caraml.base.chart import WIDTH, Drawing, symbol
from caraml.base.files import make_folder, write_file
from caraml.base.format import printable
from caraml.metrics.model import METRICS, definition_of, title_of
from caraml.report.document import (
    HEADLINE,
    ResultRow,
    cell,
    environment,
    figure_sections,
    flags,
    folder_of,
    headline,
    result_rows,
    summary,
    unfinished,
)
from caraml.report.grouping import Repeats, labels, repeated, unknown_energy
from caraml.report.section import costliest, flag_meaning, flag_text, flat, interval, source, uncertainty, window_text, written
from caraml.report.series import PowerTrace, read_traces
from caraml.results.record import FLAGS, SCHEMA_VERSION, Record
from caraml.results.store import Store

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("page.js", "table.js", "trace.js", "point.js")
WIDE = 1.6 * WIDTH
"""A drawing wider than this has a row of the page for itself."""


def write_report(store: Store, records: Sequence[Record], path: Path, title: str) -> Path:
    """Write the page of ``records`` to ``path``, whole or not at all, and return the path."""
    make_folder(path.parent)
    write_file(path, page(store, records, title))
    return path


def page(store: Store, records: Sequence[Record], title: str, *, home: str = "", raw: str = "") -> str:
    """The page as HTML. ``home`` is the address of a list of pages, ``raw`` that of the raw files, where a server has them."""
    from markupsafe import Markup

    script = "".join(_asset(name) for name in SCRIPTS)
    own = {"title": title, "home": home, "raw": raw, "policy": policy(script), "style": style()}
    template = templates().get_template("page.html.jinja")
    return template.render(**_content(store, records), **own, script=Markup(script))  # noqa: S704 -- files of this package


def templates() -> Environment:
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
    # Only for drawings made by caraml.base.chart, whose texts are escaped.
    made.filters["svg"] = lambda drawing: Markup(drawing.svg if isinstance(drawing, Drawing) else drawing)  # noqa: S704 -- as above
    made.globals |= {"symbol": symbol, "wide": WIDE}
    return made


def _visible(value: Any) -> Any:
    """Texts of records without characters that turn the direction of what follows, or that nobody can see; markup of ours as it is."""
    from markupsafe import Markup

    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, lines=True)
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
    lines = repeated(records)
    table = result_rows(store, lines, named)
    traces, faults = read_traces(store, records)
    used = {flag for record in records for flag in flags(record)}
    names, shown = _metrics(records), headline(lines)
    missing = unfinished(store, records, named)
    return {
        "rows": table,
        "choices": _choices(table),
        "several": len({row.machine for row in table}) > 1,
        "headings": [(name, title_of(name), METRICS[name].definition) for name in shown],
        "unknown": [title_of(name) for name in HEADLINE if name not in shown],
        "sections": [*([missing] if missing.rows else []), *figure_sections(store, records)],
        "trace_faults": faults,
        "packed": pack(_everything(store, lines, named, traces)),
        "interval": INTERVAL,
        "summary": summary(records, lines),
        "environment": environment(records, named),
        "definitions": [(name, title_of(name), one.unit, one.definition) for name in names for one in [definition_of(name, records)]],
        "flags": [(flag, flag_meaning(flag)) for flag in sorted(used | FLAGS.keys())],
        "energy_reasons": sorted({unknown[1] for record in records if (unknown := unknown_energy(record, [record]))}),
        "versions": {"caraml": __version__, "schema": SCHEMA_VERSION, "method": METHOD_VERSION},
    }


def _metrics(records: Sequence[Record]) -> list[str]:
    """Every metric that the page names."""
    return list(dict.fromkeys([*HEADLINE, *(name for record in records for name in record.metrics)]))


def _choices(table: Sequence[ResultRow]) -> list[tuple[str, str, list[str]]]:
    """What the table can be narrowed by: name, title and values, where there are at least two."""
    values = {name: list(dict.fromkeys(getattr(row, name) for row in table)) for name in ("status", "workload", "machine")}
    return [(name, name.capitalize(), column) for name, column in values.items() if len(column) > 1]


def _everything(store: Store, lines: Sequence[Repeats], named: Mapping[str, str], traces: Mapping[str, PowerTrace]) -> dict[str, Any]:
    """All that the page tells of single points when it is asked: definitions once, and by key each run and each mean with its numbers."""
    points, runs = {}, [one for line in lines for one in line.runs]
    for line in lines:
        for record in line.runs:
            mean = line.mean if len(line.runs) == 1 else None
            points[record.key] = _point(store, record, named[record.key], traces.get(record.key), mean)
        if len(line.runs) > 1:
            points[line.key] = _mean(line, named)
    return {
        "metrics": {name: [title_of(name), definition_of(name, runs).definition] for name in _metrics(runs)},
        "points": points,
    }


def _mean(line: Repeats, named: Mapping[str, str]) -> dict[str, Any]:
    """Several runs of one work: their mean numbers, and where each run stands."""
    record, numbers = line.mean, []
    for name, metric in record.metrics.items():
        told = (f"{uncertainty(name, metric)}; n counts runs", "mean of the runs") if metric.value is not None else ("", "")
        about = told[0], metric.scope or "", told[1], metric.reason or ""
        numbers.append([name, title_of(name, record.item), cell(record, name, line.good).text, metric.value, *about])
    return {
        "label": record.point.label,
        "status": record.status,
        "reason": record.reason or line.lost,
        "flags": [(f"{flag}{line.flagged(flag)}", flag_text(record, flag)) for flag in record.flags],
        "window": f"mean of {line.count.replace('/', ' of ')} runs, each with a window of its own",
        "runs": [[run.key, named[run.key], run.status, written("throughput", run.metrics.get("throughput"))] for run in line.runs],
        "files": [],
        "facts": [],
        "numbers": numbers,
    }


def _point(store: Store, record: Record, label: str, trace: PowerTrace | None, mean: Record | None) -> dict[str, Any]:
    """One run; ``mean``: its numbers as the table has them, where it is the only run of its work."""
    window = record.window
    return {
        "label": label,
        "status": record.status,
        "reason": record.reason or "",
        "flags": [(flag, flag_text(record, flag)) for flag in flags(record)],
        "window": window_text(record),
        "span": [window.start, window.end] if window else None,
        "folder": folder_of(store, record),
        "files": ["record.json", *record.files.values()],
        "facts": flat(record.facts.model_dump(mode="json")) if record.facts is not None else [],
        "numbers": [_number(record, name, mean) for name in record.metrics],
        "profile": vars(costliest(record.profile)) if record.profile is not None else None,
        "trace": trace.packed() if trace is not None else None,
    }


def _number(record: Record, name: str, mean: Record | None) -> list[Any]:
    """Metric, title, what is written, exact value, uncertainty, boundary, source, note."""
    metric = record.metrics[name]
    known = metric.value is not None
    error = f"of the window: {uncertainty(name, metric)}"
    if mean is not None and known:
        between = interval(name, mean.metrics[name])
        error = f"{f'between runs: {between}' if between else 'between runs: not known'}; {error}"
    about = error if known else "", metric.scope or "", source(record, name) if known else "", metric.reason or ""
    return [name, title_of(name, record.item), cell(mean or record, name).text, metric.value, *about]


def pack(content: dict[str, Any]) -> str:
    """``content`` as base64 of gzip of JSON: a tenth of its size, and letters that no HTML parser takes for markup."""
    text = printable(json.dumps(content, separators=(",", ":"), ensure_ascii=False))  # JSON spells control characters out
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
