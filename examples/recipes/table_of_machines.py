"""Workloads by machines, best throughput in each cell, as CSV: one SQL query over all results.

python examples/recipes/table_of_machines.py caraml-results > machines.csv
"""

import csv
import sys

import caraml

results = caraml.load(*sys.argv[1:])
best = results.sql("SELECT workload, device, max(throughput) AS rate FROM records WHERE throughput > 0 GROUP BY ALL ORDER BY ALL")
devices = sorted({row["device"] for row in best})
rates = {(row["workload"], row["device"]): row["rate"] for row in best}

writer = csv.writer(sys.stdout)
writer.writerow(["workload", *devices])
for workload in sorted({row["workload"] for row in best}):
    writer.writerow([workload, *(f"{rates[workload, device]:.6g}" if (workload, device) in rates else "" for device in devices)])
