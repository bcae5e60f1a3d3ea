"""What can be measured here: every source with its channels, or why it cannot be read and what would mend that."""

from __future__ import annotations

from typing import Any

from caraml.power.sampler import observe
from caraml.power.source import create, entries


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
        line: dict[str, Any] = {
            "name": entry.name,
            "title": entry.title,
            "auto": entry.auto,
            "found": False,
            "readable": False,
            "reason": None,
            "fix": None,
            "channels": [],
        }
        report.append(line)
        if entry.argument is not None:
            line["reason"], line["fix"] = f"needs its {entry.argument}", f"use {entry.name}:<{entry.argument}>"
            continue
        source = create(entry.name, ["all"], automatic=True)
        periods, problem = observe(source, seconds)
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
