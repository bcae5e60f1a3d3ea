#!/usr/bin/env python3
"""SQL over an archive of very many records: how long `caraml results --sql` takes.

    python bench/campaign/rows.py [--rows 1000000] [--work DIR]

The records are made up (rates, energies, eight suites) and written with the writer that `caraml archive` uses; only their table is in the
archive, since queries read nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scale import RUN, timed

from caraml.results.archive import MANIFEST, ROWS
from caraml.results.rows import Scalar, write_parquet

QUERIES = (
    "select count(*) from records",
    "select suite, count(*), avg(throughput), sum(energy) from records where status = 'ok' group by suite order by suite",
    "select label, throughput from records order by throughput desc limit 10",
)


def rows(count: int) -> Iterator[dict[str, Scalar]]:
    """Made-up rows."""
    chance = random.Random(0)
    for number in range(count):
        rate = chance.lognormvariate(5, 1)
        yield {
            "key": f"{number:016x}",
            "suite": f"suite-{number % 8}",
            "benchmark": "b",
            "workload": "gpt",
            "label": f"b b{2 ** (number % 12)} bf16",
            "status": "ok" if number % 50 else "oom",
            "device": "made up",
            "device_class": "gpu",
            "item": "token",
            "started_at": "2026-01-01T00:00:00+00:00",
            "attempt": 1,
            "global_batch": 2 ** (number % 12),
            "throughput": rate,
            "throughput_low": 0.99 * rate,
            "throughput_high": 1.01 * rate,
            "energy": chance.uniform(100, 1000),
        }


def archive(path: Path, count: int) -> None:
    """An archive with nothing but the table of its records."""
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / ROWS
        write_parquet(rows(count), table)
        content = table.read_bytes()
    files = {ROWS: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(ROWS, content)
        made.writestr(MANIFEST, json.dumps({"caraml_archive": 1, "caraml": "bench", "suite": "rows", "files": files}))


def main() -> None:
    """Make the archive, ask, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path, default=Path("rows-work"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work.resolve() / "rows.caraml.zip"
    archive(path, options.rows)
    print(f"{options.rows:,} rows, {path.stat().st_size / 2**20:,.1f} MiB")
    for query in QUERIES:
        cost = timed([sys.executable, "-c", RUN, "results", "--out", str(path), "--sql", query], options.work.resolve())
        print(f"wall {cost['wall_s']:.2f} s  cpu {cost['cpu_s']:.2f} s  {cost['rss_mib']:,.0f} MiB  exit {cost['exit_code']:.0f}  {query}")


if __name__ == "__main__":
    main()
