"""What can be measured here: every source with its channels, or why it cannot be read and what would mend that."""

from __future__ import annotations

import threading
import time
from typing import Any

from caraml.power.sampler import POLL_S, PeriodWatch
from caraml.power.source import Source, SourceUnavailable, create, entries


def available_sources(seconds: float = 0.5) -> list[dict[str, Any]]:
    """One entry per source that exists, in the order in which they are tried.

    Keys: ``name``, ``title``, ``auto`` (opened without being asked for), ``found`` (the sensor exists), ``readable``,
    ``reason`` and ``fix`` (why not, and the command that mends it), ``channels``: ``id``, ``label``, ``boundary``,
    ``kind``, ``declared_period_s`` and ``measured_period_s``, the longest time between two changes seen while asking as
    fast as possible for ``seconds``; ``None`` if the value did not change often enough to tell.
    """
    report = []
    for entry in entries().values():
        if entry.name == "fake":
            continue
        line: dict[str, Any] = {"name": entry.name, "title": entry.title, "auto": entry.auto, "found": False, "readable": False}
        line |= {"reason": None, "fix": None, "channels": []}
        report.append(line)
        if entry.argument is not None:
            line["reason"], line["fix"] = f"needs its {entry.argument}", f"use {entry.name}:<{entry.argument}>"
            continue
        source = create(entry.name, ["all"], automatic=True)
        periods, problem = _observed(source, seconds)
        if problem is not None:
            line["found"] = problem.kind != "absent"
            line["reason"], line["fix"] = problem.message, problem.hint
            continue
        line["found"] = line["readable"] = True
        line["channels"] = [
            {
                "id": c.id,
                "label": c.label,
                "boundary": c.boundary,
                "kind": c.kind,
                "declared_period_s": c.update_period_s,
                "measured_period_s": periods.get(c.id),
            }
            for c in source.channels()
        ]
    return report


def _observed(source: Source, seconds: float, timeout: float = 5.0) -> tuple[dict[str, float], SourceUnavailable | None]:
    """Open a source, ask it as fast as it makes sense for ``seconds``, close it.

    Returns the longest time between changes of every channel that changed often enough [s], and why the source could
    not be opened. A sensor that does not answer within ``timeout`` [s] is given up.
    """
    result: dict[str, float] = {}
    problem: list[SourceUnavailable] = []

    def ask() -> None:
        try:
            source.open()
            watch = PeriodWatch(c.id for c in source.channels())
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                watch.feed(source.read())
                time.sleep(max(POLL_S, source.min_interval_s))
            result.update(watch.longest())
        except SourceUnavailable as error:
            problem.append(error)
        except Exception as error:  # noqa: BLE001 - thread boundary: a vendor library may raise anything; it is reported
            problem.append(SourceUnavailable(f"{type(error).__name__}: {error}"))
        finally:
            source.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + timeout)
    if thread.is_alive():
        return {}, SourceUnavailable(f"did not answer within {seconds + timeout:g} s")
    return result, problem[0] if problem else None
