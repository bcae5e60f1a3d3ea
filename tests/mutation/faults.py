"""Faults that measuring code could have, most of them seen in other benchmarks: each is one edit, and some test must notice it.

``old`` stands exactly once in ``file``; ``tests`` are the quick tests that must fail once it is ``new``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One edit of one file below ``src/caraml``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LOOP, DEVICE, CONTROL, STEP = (f"engine/{name}.py" for name in ("loop", "device", "control", "step"))
WORKER, CONCLUDE = "worker.py", "conclude.py"
METRICS, STATS, MODEL = "results/metrics.py", "stats.py", "suite/model.py"
T_LOOP, T_DEVICE, T_CONTROL, T_STEP = (f"tests/engine/test_{name}.py" for name in ("loop", "device", "control", "step"))
T_WORKER, T_METRICS, T_STATS, T_EXPAND = (
    "tests/test_worker.py",
    "tests/results/test_metrics.py",
    "tests/test_stats.py",
    "tests/suite/test_expand.py",
)
T_VIEW = f"{T_WORKER}::test_the_slowest_rank_counts_in_everything"

FAULTS = [
    Fault(
        "no synchronisation where the window opens",
        LOOP,
        "        self._ranks.barrier()\n        self._device.synchronize()\n",
        "        self._ranks.barrier()\n",
        (T_LOOP,),
    ),
    Fault(
        "no synchronisation where the window closes",
        LOOP,
        "        self._device.synchronize()\n        end = self._device.now()\n        self._hooks.edge()\n",
        "        end = self._device.now()\n        self._hooks.edge()\n        self._device.synchronize()\n",
        (T_LOOP,),
    ),
    Fault(
        "a synchronisation in every step",
        LOOP,
        "        self._outcomes.append(self._step())\n",
        "        self._outcomes.append(self._step())\n        self._device.synchronize()\n",
        (T_LOOP,),
    ),
    Fault("the first step belongs to the window", LOOP, 'StepRow("first", begin', 'StepRow("measure", begin', (T_LOOP,)),
    Fault("warm-up belongs to the window", LOOP, '_append_rows("warm_up"', '_append_rows("measure"', (T_LOOP,)),
    Fault(
        "skipped updates are looked for one step late",
        LOOP,
        "scales[index] < scales[index - 1] for index in inside",
        "scales[index + 1] < scales[index] for index in list(inside)[:-1]",
        (T_LOOP,),
    ),
    Fault(
        "a drifting window is not flagged",
        LOOP,
        "abs(drift(finished)) > self._policy.target",
        "False",
        (f"{T_WORKER}::test_drifting_steps_are_flagged", f"{T_WORKER}::test_a_device_that_got_hot_is_flagged"),
    ),
    Fault(
        "events' milliseconds taken for seconds", DEVICE, "first.elapsed_time(last) / 1e3 if", "first.elapsed_time(last) if", (T_DEVICE,)
    ),
    Fault("unfinished events are read", DEVICE, "/ 1e3 if last.query() else None", "/ 1e3", (T_DEVICE,)),
    Fault(
        "steps are timed from the window's begin",
        DEVICE,
        "            self._pending.popleft()\n",
        "            del self._pending[1]\n",
        (T_LOOP,),
    ),
    Fault("resident kilobytes taken for bytes", DEVICE, 'unit = 1 if sys.platform == "darwin" else 1024', "unit = 1", (T_LOOP,)),
    Fault(
        "warm-up is over one look early", STATS, "warm_up_length(series) < n // 2", "warm_up_length(series) <= n // 2", (T_STATS, T_CONTROL)
    ),
    Fault(
        "a window stops when precise, however short",
        CONTROL,
        "(precise and enough and _confirmed(seconds, policy))",
        "(precise)",
        (T_CONTROL,),
    ),
    Fault(
        "a window's budget is not kept",
        CONTROL,
        "spent or (precise and enough and _confirmed(seconds, policy))",
        "precise and enough",
        (T_CONTROL,),
    ),
    Fault("every step is looked at", CONTROL, "return max(1, min(by_time, 1000), launched // 20)", "return 1", (T_CONTROL,)),
    Fault(
        "data wait is not counted",
        STEP,
        "            wait += time.monotonic() - begin\n            with self._exchange",
        "            with self._exchange",
        (T_STEP,),
    ),
    Fault(
        "losses of micro-batches are added, not averaged",
        STEP,
        "self._task.loss(self._model, batch) / count",
        "self._task.loss(self._model, batch)",
        (T_STEP,),
    ),
    Fault("only the first micro-batch is trained", STEP, "count = self._point.accumulation\n", "count = 1\n", (T_STEP,)),
    Fault(
        "step times of rank 0",
        CONCLUDE,
        "np.maximum.reduce([np.frombuffer(rows.seconds) for rows in ranks])",
        "np.frombuffer(ranks[0].seconds)",
        (T_VIEW,),
    ),
    Fault(
        "step times of the quickest rank",
        CONCLUDE,
        "np.maximum.reduce(",
        "np.minimum.reduce(",
        (T_VIEW,),
    ),
    Fault("window of rank 0", CONCLUDE, "max(rank.end - rank.begin for rank in ranks)", "ranks[0].end - ranks[0].begin", (T_VIEW,)),
    Fault(
        "data wait of rank 0",
        CONCLUDE,
        "max(sum(rows.data_waits) for rows in windows)",
        "sum(windows[0].data_waits)",
        (T_VIEW,),
    ),
    Fault("first step of rank 0", CONCLUDE, "max(rank.first_step_time for rank in ranks)", "ranks[0].first_step_time", (T_VIEW,)),
    Fault("loss of rank 0", CONCLUDE, "losses.mean(axis=0)", "losses[0]", (T_VIEW,)),
    Fault(
        "skipped updates are counted as trained",
        CONCLUDE,
        "trained = steps - window0.skipped_updates",
        "trained = steps",
        (f"{T_WORKER}::test_updates_that_overflowed_are_not_trained",),
    ),
    Fault(
        "accumulation is ignored",
        CONCLUDE,
        "return self.point.global_batch * self.facts",
        "return self.point.micro_batch * self.point.world * self.facts",
        (f"{T_WORKER}::test_accumulation_counts_every_micro_batch",),
    ),
    Fault(
        "only this rank's items are counted",
        CONCLUDE,
        "return self.point.global_batch * self.facts",
        "return self.point.global_batch // self.point.world * self.facts",
        (f"{T_WORKER}::test_two_ranks_double_the_rate",),
    ),
    Fault(
        "energy from the first step on",
        WORKER,
        'energy("measure", mine.begin, mine.begin',
        'energy("measure", mine.rows[0].start, mine.begin',
        (f"{T_WORKER}::test_known_watts",),
    ),
    Fault(
        "energy of half the window",
        WORKER,
        "mine.begin + window0.seconds, idle)",
        "mine.begin + window0.seconds / 2, idle)",
        (f"{T_WORKER}::test_known_watts",),
    ),
    Fault(
        "a NaN loss is fine",
        CONCLUDE,
        'status="ok" if not window0.losses or np.isfinite(window0.losses).all() else "invalid"',
        'status="ok"',
        (f"{T_WORKER}::test_nan_loss_makes_the_point_invalid",),
    ),
    Fault(
        "MFU by the peak of another arithmetic",
        "engine/precision.py",
        '"bf16": "bf16"',
        '"bf16": "fp32"',
        (f"{T_WORKER}::test_utilisation_is_of_the_arithmetic_used",),
    ),
    Fault(
        "MFU of all devices over one device's peak",
        METRICS,
        "facts.flops_per_item * window.items / measured.world",
        "facts.flops_per_item * window.items",
        (T_METRICS,),
    ),
    Fault("rate per device is the rate", METRICS, "_scaled(throughput, 1 / measured.world,", "_scaled(throughput, 1.0,", (T_METRICS,)),
    Fault(
        "rate is the mean of rates",
        METRICS,
        "_rate(window.items, window.seconds, unit_of",
        "_rate(window.items / window.steps * float(np.mean([1 / t for t in measured.step_times])), 1.0, unit_of",
        (T_METRICS,),
    ),
    Fault(
        "mean step without the window's ends",
        METRICS,
        "mean, half = window.seconds / window.steps",
        "mean, half = interval.mean",
        (T_METRICS,),
    ),
    Fault(
        "ends of the rate's interval swapped",
        METRICS,
        "low=value / (1 + relative), high=value / (1 - relative)",
        "low=value / (1 - relative), high=value / (1 + relative)",
        (T_METRICS,),
    ),
    Fault("shortest and longest step swapped", METRICS, '"step_time_min": seconds(min(', '"step_time_min": seconds(max(', (T_METRICS,)),
    Fault("quantiles of the step time swapped", METRICS, "p5, median, p95 =", "p95, median, p5 =", (T_METRICS,)),
    Fault("joules taken for watt-hours", METRICS, "window.items * JOULES_PER_WATT_HOUR", "window.items", (T_METRICS,)),
    Fault(
        "idle energy not scaled to the window",
        METRICS,
        "net = boundary.energy_j - watts * window.seconds",
        "net = boundary.energy_j - baseline.energy_j",
        (T_METRICS,),
    ),
    Fault(
        "ends of items per watt-hour swapped",
        METRICS,
        "low = numerator / metric.high if metric.high else None\n",
        "low = numerator / metric.low if metric.low else None\n",
        (T_METRICS,),
    ),
    Fault("input by items, not samples", METRICS, "_rate(window.samples * facts", "_rate(window.items * facts", (T_METRICS,)),
    Fault(
        "an interval that ignores autocorrelation",
        STATS,
        "    half = max(by_ar1, _half_width_batch_means(x, confidence))\n",
        "    half = 1.96 * float(x.std(ddof=1)) / math.sqrt(x.size)\n",
        (T_STATS,),
    ),
    Fault("the narrower of two intervals", STATS, "half = max(by_ar1", "half = min(by_ar1", (T_STATS,)),
    Fault(
        "quantile of a one-sided interval",
        STATS,
        "t_quantile((1 + confidence) / 2, max(effective - 1, 2))",
        "t_quantile(confidence, max(effective - 1, 2))",
        (T_STATS,),
    ),
    Fault("drift is never found", STATS, "DRIFT_Z = 2.6", "DRIFT_Z = 1e9", (T_STATS,)),
    Fault(
        "power times the interval before it",
        "power/integral.py",
        "(b - a) * (p + q) / 2 for",
        "(b - a) * p for",
        ("tests/power/test_power_truth.py",),
    ),
    Fault(
        "milliwatts taken for watts",
        "power/sources/nvml.py",
        "MILLI = 1e-3",
        "MILLI = 1.0",
        ("tests/power/test_power_sources.py::test_nvml_reads_joules_and_watts",),
    ),
    Fault(
        "files are written in place",
        "results/files.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")',
        "temporary = path",
        ("tests/results/test_store.py",),
    ),
    Fault(
        "the key ignores the device",
        MODEL,
        'exclude={"suite", "benchmark", "variant", "placement", "knobs"}',
        'exclude={"suite", "benchmark", "variant", "placement", "knobs", "device"}',
        (T_EXPAND,),
    ),
    Fault("the key ignores the method", MODEL, '{"method": METHOD_VERSION, **content}', "content", (T_EXPAND,)),
    Fault(
        "accumulation over one device",
        MODEL,
        "self.global_batch // (self.micro_batch * self.dp)",
        "self.global_batch // self.micro_batch",
        (T_EXPAND,),
    ),
    Fault(
        "a matrix product counted as half its work",
        "system/probe.py",
        "flops = 2.0 * m * k * n",
        "flops = 1.0 * m * k * n",
        ("tests/system/test_system_probe.py",),
    ),
    Fault(
        "nanoseconds of throttling taken for microseconds",
        "system/throttle.py",
        "violationTime / 1e9",
        "violationTime / 1e6",
        ("tests/system/test_system_throttle.py",),
    ),
    Fault("neighbours' share of one CPU", "engine/neighbours.py", "/ (seconds * cpus)", "/ seconds", (T_LOOP,)),
]
