"""Which batch trains fastest, and which costs least energy, for every workload, machine and number of devices?

python examples/recipes/best_batch.py caraml-results
"""

import sys

import caraml

results = caraml.load(*sys.argv[1:]).where(status="ok")
families = {}
for result in results:
    if result.value("throughput") is None:  # as of an imported row without one
        continue
    point = result.point
    families.setdefault((point.benchmark, point.system, point.device, point.world, point.precision), []).append(result)
for (benchmark, _, device, world, precision), ours in sorted(families.items()):
    fastest = max(ours, key=lambda result: result.value("throughput"))
    print(f"{benchmark} on {world} of {device}, {precision}: fastest with batch {fastest.point.global_batch}", end="")
    known = [result for result in ours if result.value("energy_per_item") is not None]
    if known:
        thriftiest = min(known, key=lambda result: result.value("energy_per_item"))
        print(f", least energy with batch {thriftiest.point.global_batch}", end="")
    print()
