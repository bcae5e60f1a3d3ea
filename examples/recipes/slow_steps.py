"""How much time do the occasional slow steps cost? From the raw step times of every point.

python examples/recipes/slow_steps.py caraml-results
"""

import statistics
import sys

import caraml

for result in caraml.load(*sys.argv[1:]).where(status="ok"):
    if "steps" not in result.record.files:  # as of a program
        continue
    times = result.steps.measured()
    median = statistics.median(times)
    slow = [time for time in times if time > 1.1 * median]
    lost = sum(time - median for time in slow) / sum(times)
    print(f"{result.point.label}: {len(slow)} of {len(times)} steps are 10 % above the median; they cost {100 * lost:.1f} % of the window")
