"""Which batch trains fastest, and which costs least energy, for every workload, machine and number of devices?

python examples/recipes/best_batch.py caraml-results
"""

import sys

import caraml

results = caraml.load(*sys.argv[1:]).where(status="ok")
families = {(r.point.benchmark, r.point.system, r.point.device, r.point.world, r.point.precision) for r in results}
for benchmark, system, device, world, precision in sorted(families):
    ours = results.where(benchmark=benchmark, system=system, device=device, world=world, precision=precision)
    fastest = max(ours, key=lambda result: result.value("throughput"))
    print(f"{benchmark} on {world} of {device}, {precision}: fastest with batch {fastest.point.global_batch}", end="")
    known = [result for result in ours if result.value("energy_per_item") is not None]
    if known:
        thriftiest = min(known, key=lambda result: result.value("energy_per_item"))
        print(f", least energy with batch {thriftiest.point.global_batch}", end="")
    print()
