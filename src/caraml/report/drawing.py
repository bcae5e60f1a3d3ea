"""What the figures are drawn with: axes, and layers of a Vega-Lite specification.

The specification is written out as plain tables. A library of classes around them would check every one of them against its schema, which
costs more time than drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from caraml.report.svg import HEIGHT, WIDTH, Words, dash, render, series_colour

Encoding = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """Title and scale of an axis."""

    title: str
    log: int | None = None
    zero: bool = False
    ticks: list[float] = field(default_factory=list)
    domain: tuple[float, float] | None = None
    time: bool = False
    """Values are milliseconds since 1970, written as dates."""

    def of(self, name: str) -> dict[str, Any]:
        """The encoding of the column ``name`` along this axis."""
        scale: dict[str, Any] = {"zero": self.zero, "nice": self.domain is None}
        if self.log:
            scale = {"type": "log", "base": self.log, "nice": False}
        if self.domain:
            scale["domain"] = list(self.domain)
        if self.time:
            del scale["zero"]
            scale["type"] = "utc"
        axis: dict[str, Any] = {"title": self.title, **({} if self.time else {"format": ",~r"})}
        if self.ticks:
            axis["values"] = self.ticks
        return {"field": name, "type": "temporal" if self.time else "quantitative", "scale": scale, "axis": axis}


class Drawing:
    """Layers of a chart, and their data beside them."""

    def __init__(self) -> None:
        self._layers: list[dict[str, Any]] = []
        self._datasets: dict[str, list[dict[str, Any]]] = {}
        self.words: list[Words] = []

    def data(self, values: Iterable[dict[str, Any]]) -> str:
        """Put rows beside the layers, and return the name by which a layer finds them."""
        name = f"data{len(self._datasets)}"
        self._datasets[name] = list(values)
        return name

    def add(self, data: str, mark: Mapping[str, Any], **encoding: Encoding) -> None:
        """Add a layer: a mark for each row of ``data``."""
        self._layers.append({"data": {"name": data}, "mark": dict(mark), "encoding": encoding})

    def svg(self, title: str, summary: str, height: int = HEIGHT, width: int = WIDTH) -> str:
        """The finished drawing; ``summary`` is read to those who cannot see it."""
        return render({"layer": self._layers, "datasets": self._datasets, "width": width, "height": height}, title, summary, self.words)


SPOKEN: Encoding = {"field": "d", "type": "nominal"}
"""What is read out for a mark stands in its row's ``d``."""


def said(text: str) -> Encoding:
    """One text read out for a whole layer; empty for one that says nothing of its own."""
    return {"value": text}


def as_is(name: str) -> Encoding:
    """A column that holds colours, dashes or shapes themselves."""
    return {"field": name, "type": "nominal", "scale": None}


def stroke(index: int) -> dict[str, Any]:
    """Colour and dash of a series' line."""
    return {"stroke": series_colour(index), **({"strokeDash": list(dash(index))} if dash(index) else {})}


def clamped(summaries: Sequence[str], limit: int = 16) -> str:
    """A drawing's summary from its parts: all of them, or the first and how many more the table has."""
    more = f"; and {len(summaries) - limit} more, in the table of this figure" if len(summaries) > limit else ""
    return "; ".join(summaries[:limit]) + more
