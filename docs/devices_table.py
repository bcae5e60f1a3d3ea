"""The matrix of ``docs/devices.md``: what was tested on which family of accelerators, each cell by the name of a test."""

from __future__ import annotations

from collections.abc import Mapping

from caraml.system.families import FAMILIES

TITLES = ("CPU", "NVIDIA", "AMD", "Intel GPU", "Gaudi", "Ascend", "Apple", "MTIA", "other plug-ins")
COLUMNS = ("cpu", *(family.kind for family in FAMILIES))
GENERAL = ("xpu", "hpu", "npu", "mtia", "other")
"""Families that run the same code of CARAML, which the tests run on the emulated accelerator."""
NOT_THERE = "–"

_FAMILIES, _ENGINE, _WORKER = (
    "tests/system/test_system_families.py",
    "tests/accelerator/test_accelerator.py::test_the_engine",
    "tests/accelerator/test_accelerator.py::test_a_point_trains_as_on_a_cpu",
)
_DETECT, _POWER, _PARITY = "tests/system/test_system_detect.py", "tests/power/test_power_sources.py", "tests/engine/parallel/test_parity.py"


_EVERY_PLACEMENT = f"{_PARITY}::test_every_placement_trains_as_one_process"


def _placed(name: str) -> dict[str, str]:
    return {"cpu": _EVERY_PLACEMENT, **_all(f"{_WORKER}[{name}]", *GENERAL), "mps": NOT_THERE}


def _all(test: str, *kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds, test)


FEATURES: Mapping[str, Mapping[str, str]] = {
    "detection": {
        "cpu": f"{_DETECT}::test_without_nvml_the_cpus_are_the_device",
        "cuda": f"{_DETECT}::test_four_a100",
        "rocm": f"{_DETECT}::test_amd_gpus_by_sys",
        **_all(f"{_FAMILIES}::test_one_that_torch_drives_is_what_torch_says", "xpu", "hpu", "npu"),
        "other": "tests/accelerator/test_accelerator.py::test_a_plan_names_the_accelerator",
    },
    "refused where torch cannot drive it": {
        "cpu": NOT_THERE,
        **_all(f"{_FAMILIES}::test_a_device_that_torch_cannot_drive_is_not_measured_as_a_cpu", "cuda", "rocm", "xpu", "hpu", "npu"),
        "other": "tests/accelerator/test_accelerator.py::test_a_plug_in_that_does_not_import_is_told_before_anything_runs",
    },
    "step times, window": {
        "cpu": "tests/workloads/test_training.py::test_gpt_learns_text",
        **_all("tests/engine/test_device.py::test_events_are_read_in_seconds_and_only_when_they_happened", "cuda", "rocm"),
        **_all(f"{_ENGINE}[a_window_is_exactly_its_steps]", *GENERAL, "mps"),
    },
    "peak memory": {
        "cpu": "tests/engine/test_loop.py::test_cpu_device_times_what_happens",
        **_all(f"{_ENGINE}[each_process_has_its_device]", *GENERAL),
        "mps": NOT_THERE,
    },
    "copies ahead of use": {"cpu": NOT_THERE, "mps": NOT_THERE, **_all(f"{_ENGINE}[copies_ahead_overlap_and_are_waited_for]", *GENERAL)},
    "losses as on a CPU, fp32": {
        "cpu": "tests/workloads/test_training.py::test_gpt_learns_text",
        **_all(f"{_WORKER}[resnet]", *GENERAL),
    },
    "bf16": {
        "cpu": "tests/workloads/test_training.py::test_reduced_precision_trains_alike",
        **_all(f"{_WORKER}[half]", *GENERAL),
    },
    "several devices: DDP": _placed("ddp"),
    "FSDP": _placed("fsdp"),
    "tensor parallelism": _placed("tp"),
    "pipeline parallelism": _placed("pp"),
    "limits by measurement": {
        "cpu": "tests/system/test_system_kernels.py::test_this_machine_has_limits_that_can_be_measured_again",
        **_all(f"{_ENGINE}[a_probe_leaves_the_device_as_it_was]", *GENERAL, "mps"),
    },
    "a device that is lost": {
        "cpu": NOT_THERE,
        **_all("tests/accelerator/test_accelerator.py::test_a_device_that_is_lost_in_the_window_takes_nothing_that_was_measured", *GENERAL),
    },
    "devices hidden by variables": {
        "cpu": NOT_THERE,
        "cuda": f"{_FAMILIES}::test_gpus_are_chosen_by_uuid_in_the_order_of_the_variable",
        "rocm": f"{_FAMILIES}::test_amd_s_uuid_has_one_spelling",
        **_all(f"{_FAMILIES}::test_devices_keep_the_driver_s_numbers_behind_a_mask", "xpu", "hpu", "npu"),
        "mps": NOT_THERE,
    },
    "energy": {
        "cpu": f"{_POWER}::test_rapl_domains_are_nested_and_counted_once",
        "cuda": f"{_POWER}::test_nvml_reads_joules_and_watts",
        "rocm": f"{_POWER}::test_amd_counter_is_accumulator_times_resolution",
        "xpu": f"{_POWER}::test_intel_card_contains_its_package",
        "hpu": f"{_POWER}::test_gaudi_zero_is_a_failure",
        "npu": f"{_POWER}::test_ascend_chips_are_read_from_one_table",
        **_all(NOT_THERE, "mps", "mtia", "other"),
    },
    "throttling": {
        "cuda": "tests/system/test_system_throttle.py::test_counters_are_seconds_by_gpu_and_reason",
        **_all(NOT_THERE, "cpu", "rocm", *GENERAL, "mps"),
    },
}
"""By family, the test that shows it; ``NOT_THERE`` where there is nothing to test. What is missing is untested."""
ON_HARDWARE = ("cpu",)
"""Families whose tests run on the hardware itself. Energy is an exception: its sensors are always emulated."""
RESULTS = {"cuda": "results/nvidia-h200-x1/gpu.json"}
"""By family, what ``bench/gpu.py`` wrote on one of its devices."""
SEEN = (
    *("detection", "step times, window", "peak memory", "copies ahead of use", "losses as on a CPU, fp32", "bf16", "limits by measurement"),
    "energy",
)
"""What such a file shows. Of throttling it has only that a point has no such flag."""


def status(feature: str, kind: str) -> str:
    """``measured``, ``emulated``, ``untested``, or that there is nothing of the kind."""
    if kind in RESULTS and feature in SEEN:
        return "measured"
    test = FEATURES[feature].get(kind)
    if test is None or test == NOT_THERE:
        return "untested" if test is None else NOT_THERE
    return "measured" if kind in ON_HARDWARE and feature != "energy" else "emulated"


def rows() -> list[list[str]]:
    """The matrix, a row for each feature."""
    return [[feature, *(status(feature, kind) for kind in COLUMNS)] for feature in FEATURES]


def head() -> list[str]:
    """Its first line."""
    return ["", *TITLES]
