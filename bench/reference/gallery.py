"""Draw the gallery: ``gallery.py DOCS_FOLDER`` writes ``gallery.md`` and ``gallery/*.svg``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import figures


@dataclass(frozen=True)
class Picture:
    """A drawing, what it is for those who cannot see it, and what stands below it."""

    draw: Callable[[], str]
    alternative: str
    caption: str

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.draw.__name__.replace('_', '-')}.svg"


INTRODUCTION = """# Gallery of published results

Every figure on this page is drawn from the numbers that `caraml references` prints. It shows the sources' tables with their misprints,
where a caption does not say otherwise. [Published results](published.md) has the sources and what disagrees in them.
`python bench/reference/gallery.py docs` draws the page again.
"""

SECTIONS: dict[str, list[Picture]] = {
    "CARAML on the IPU": [
        Picture(
            figures.ipu_nlp,
            "Rate and efficiency of GPT training on IPUs over the batch size",
            "GPT with 117 M parameters on four GC200 as a pipeline. Slides, table *NLP Benchmark on Graphcore IPU M2000 POD4*. The "
            "slides call the items tokens; they are sequences. The energy is that of one IPU and of a longer time than the rate's: "
            "over four batches it would mean up to 14 kW per IPU.",
        ),
        Picture(
            figures.ipu_cv,
            "Rate and efficiency of ResNet-50 on one IPU over the batch size",
            "ResNet-50 on one GC200. Slides, table *CV Benchmark on Graphcore IPU M2000 POD4*. The vertical axes do not begin at 0.",
        ),
    ],
    "MAELSTROM: all applications": [
        Picture(
            figures.scaling,
            "Ratios of time and energy between the best and the smallest number of devices",
            "The report's Figures 1 and 2: time and energy on the best number of devices over those on the smallest that was tried, "
            "means of repeats. AP2: Tables 12 to 14. AP3: Tables 19, 20 (MI250, full runs), 27 and 30 (without input). AP5: Tables "
            "35 to 37. AP6: section 4.9.8. A cell `1 → 1` means that one device needs the least energy.",
        ),
        Picture(
            figures.best_time_energy,
            "Ratio of the energies at the number of devices with the best time",
            "The report's Figure 3: energy on the number of devices that is fastest, over that on the smallest number. Same tables.",
        ),
        Picture(
            figures.to_solution,
            "Energy and time of each application on each device",
            "The report's Figures 4 to 6: energy of the devices and time with the number of devices that is fastest. AP1: Tables 7 "
            "to 11; AP2: Tables 12 to 16; AP3: Tables 17 to 19 and 21, default flags, training time because two of the runtimes are "
            "misprints; AP4: section 4.7.2; AP5: Tables 35 to 39; AP6: section 4.9.8. MI250 counts graphics compute dies.",
        ),
        Picture(
            figures.node_energy,
            "Energy of devices and of the rest of the node for A2 and GH200",
            "The report's Figure 7, and 18, 25 and 59 in part. AP1: Tables 10 and 11; AP3: Table 21, default flags; AP5: Tables 38 "
            "and 39, mean power of the node times runtime. AP2, AP4 and AP6: sections 4.3.2, 4.7.2 and 4.9.8.",
        ),
    ],
    "MAELSTROM: AP2 and AP3": [
        Picture(
            figures.ap2_split,
            "Shares of training, loading and the rest in the runtime of AP2",
            "The report's Figures 19, 20 and 22 to 24, means of repeats. Tables 12 to 16. The rest is neither loading nor training.",
        ),
        Picture(
            figures.ap3_flags,
            "Training time and energy of AP3 with cache, without cache, and of loading alone",
            "The report's Figures 26, 28, 30, 32, 34, 35, 38, 39, 42 and 44 in one. Tables 17 to 21, medians of three repeats: the mean of "
            "Table 21 would be spoilt by a misprint. Eight dies of MI250 load nearly as long as they train.",
        ),
    ],
    "MAELSTROM: AP3 without input": [
        Picture(
            figures.ap3_rate,
            "Input per second over the batch, by device and number of devices",
            "The report's Figure 46. Tables 27 to 31. The tables print GB/s and mean MB/s. Filled markers: several devices. The "
            "batches of the last two runs of GH200 are exchanged, as everything but the heading of Table 28 asks for.",
        ),
        Picture(
            figures.ap3_energy_time,
            "Energy and training time over the batch, by device and number of devices",
            "The report's Figures 47 and 49, whose captions say AP5. Tables 27 to 31, with the same exchange. Energy: integrals of power.",
        ),
        Picture(
            figures.ap3_heat,
            "Energy and training time by batch as shaded tables",
            "The report's Figures 48 and 50, from the same tables.",
        ),
    ],
    "MAELSTROM: AP5 and AP6": [
        Picture(
            figures.ap5_scaling,
            "Mean epoch and energy over the number of devices",
            "AP5 with its full pipeline, means of repeats, Tables 35 to 39. Not a figure of the report: its Figures 60 to 65 show "
            "runs without input, which are in no table. The energies cover the unused devices of the node as well.",
        ),
        Picture(
            figures.ap6_energy,
            "Energy of devices and nodes by number of devices and nodes",
            "The report's Figure 76, from section 4.9.8.",
        ),
        Picture(
            figures.ap6_action,
            "Action by number of devices and nodes",
            "The report's Figure 77, from section 4.9.8. Action is the energy of the nodes times the runtime; less is better.",
        ),
    ],
    "PEARC '22": [
        Picture(
            figures.pearc_scaling,
            "Images per second of ResNet-50 over the number of IPUs and over the batch on one IPU",
            "The IPU's part of Figures 1 and 2. PyTorch: Table 1, second epoch, at most 8 instances. TensorFlow: Table 3, batch 20 "
            "(left) and one IPU (right). The GPUs of these figures are in no table.",
        ),
        Picture(
            figures.pearc_compression,
            "Images per second of the image compression model over the number of devices",
            "Table 4. The point at 16 IPUs is 51 % above what its epoch time gives: rate and time are of different runs.",
        ),
    ],
}

REST = """## What the tables do not allow

| figure | why not |
|---|---|
| MAELSTROM 14 to 17 | the runs of AP1 without input, over the batch size, are in no table |
| MAELSTROM 60 to 65 | nor are those of AP5; section 4.8.2 states their ranges only, which `caraml references --table "text 4.8.2"` prints |
| MAELSTROM 8 to 13 | the tables of AP1 have no loading times |
| MAELSTROM 21 | no table of AP2 is of JUWELS Booster |
| MAELSTROM 54 to 58 | Tables 32 to 34 are of JUWELS and of another A2 run than the text; those of the figures are missing |
| MAELSTROM 71 to 75 | the tables of AP6 have no loading times, and are of JUWELS and of another A2 run |
| MAELSTROM 78 | AtmoRep's scaling is a curve without numbers |
| PEARC 1 and 2, GPUs | curves without numbers |
| EPICURE, all | curves without numbers; what its text states is in `caraml references --source epicure` |
| CARAML's slides, GPUs | curves and heat maps without numbers; the ratios of the text are in `caraml references --source caraml` |
"""


def page() -> str:
    """The gallery as Markdown."""
    parts = [INTRODUCTION]
    for heading, pictures in SECTIONS.items():
        parts.append(f"## {heading}\n")
        parts += [f"![{one.alternative}](gallery/{one.file})\n\n{one.caption}\n" for one in pictures]
    return "\n".join([*parts, REST])


def main() -> None:
    """Write the page and its drawings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("docs", type=Path, help="folder of gallery.md")
    folder = parser.parse_args().docs
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    for one in (one for pictures in SECTIONS.values() for one in pictures):
        (folder / "gallery" / one.file).write_text(one.draw(), encoding="utf-8")
    (folder / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
