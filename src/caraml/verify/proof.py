"""The whole proof: run the known work through campaign, launcher, worker and store, compare, look at the machine, write it down."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from caraml import __version__
from caraml.campaign import Campaign, Watcher
from caraml.launch.local import LocalLauncher
from caraml.results.files import write_atomically
from caraml.results.store import Store
from caraml.suite.load import load_suite
from caraml.suite.model import METHOD_VERSION
from caraml.system.detect import OVERRIDE, detect
from caraml.verify.claims import claims
from caraml.verify.energy import SOURCE
from caraml.verify.finding import Finding
from caraml.verify.machine import machine_findings
from caraml.worker import POWER_SOURCES

HERE = Path(__file__).parent
FILE = "verify.json"
FOLDER = "verify"
"""The known work has a store of its own, so that nobody takes it for a result."""


def prove(out: Path, watcher: Watcher) -> list[Finding]:
    """Every finding, the machine's last. Records stay below ``out/verify`` and the findings in ``out/verify.json``."""
    store = Store(out / FOLDER)
    with _environment({POWER_SOURCES: SOURCE, OVERRIDE: "cpu"}):
        findings = _measure("suite.toml", store, watcher)
    findings += _measure("real.toml", store, watcher)
    findings += machine_findings(detect())
    write(out / FILE, findings)
    return findings


def right(findings: Sequence[Finding]) -> bool:
    """True when nothing that was claimed is wrong."""
    return all(finding.verdict != "wrong" for finding in findings)


def write(path: Path, findings: Sequence[Finding]) -> None:
    """The findings as JSON, whole or not at all."""
    content = {
        "caraml": __version__,
        "method_version": METHOD_VERSION,
        "finished_at": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        "right": right(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False))


def _measure(suite: str, store: Store, watcher: Watcher) -> list[Finding]:
    """Findings about every point of one of our suites, measured anew."""
    records = Campaign(load_suite(str(HERE / suite)), detect(), store, LocalLauncher(), watcher, again=True).run()
    return [finding for record in records for finding in claims(record, store)]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables of the processes started inside, put back afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
