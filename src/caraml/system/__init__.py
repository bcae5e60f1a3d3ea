"""What a machine is: its model, detection, the catalogue of known systems, peaks by data sheet and by measurement.

Nothing here imports torch but what measures limits: kernels and limits.
"""
