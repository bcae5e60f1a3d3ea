"""What would training on a billion tokens (or images, or samples) cost in time, energy and money?

python examples/recipes/cost_of_training.py caraml-results
"""

import sys

import caraml

ITEMS = 1e9
EUROS_PER_KWH = 0.30

for result in caraml.load(*sys.argv[1:]).where(status="ok"):
    rate = result.value("throughput")
    if rate is None:  # as of an imported row without one
        continue
    hours = ITEMS / rate / 3600
    line = f"{result.point.label}: 10⁹ {result.record.item}s in {hours:,.1f} h"
    energy = result.metric("energy_per_item")
    if energy.value is None:
        print(f"{line}; energy not known: {energy.reason}")
    else:
        kwh = ITEMS * energy.value / 3.6e6
        print(f"{line}, {kwh:,.2f} kWh ({energy.scope}), {kwh * EUROS_PER_KWH:,.2f} EUR")
