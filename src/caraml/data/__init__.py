"""What several workloads share of their input: the loader, synthetic samples, staging, and the store of prepared data.

What only one workload reads stands in its folder below :mod:`caraml.workloads`. Reading, writing and preparing text need no torch.
"""
