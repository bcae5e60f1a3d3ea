"""When did a result change, and what changed with it? From every attempt at every point.

python examples/recipes/what_changed.py caraml-results
"""

import sys

import caraml
from caraml.analysis.history import history

results = caraml.load(*sys.argv[1:], every_attempt=True)
for series in history(results.records, "throughput"):
    if len(series.values) < 2:
        continue
    print(f"{series.name}: {len(series.values)} attempts, {series.note or f'{len(series.changes)} changes'}")
    for change in series.changes:
        when = series.values[change.index].time
        what = ", ".join(f"{difference.name}: {difference.a} to {difference.b}" for difference in change.changed)
        print(f"  {when:%Y-%m-%d}: {100 * (change.ratio - 1):+.1f} %; {what or 'nothing else that was recorded'}")
