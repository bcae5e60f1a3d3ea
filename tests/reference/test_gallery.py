"""The gallery: the committed page is what the script writes, and its drawings show the published numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from caraml.base.format import significant
from caraml.reference import SHORT, select
from caraml.reference.figures import published_figures
from caraml.report.section import plain

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(ROOT / "bench" / "reference" / "gallery.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def texts(path: Path) -> list[str]:
    return re.findall(r">([^<>]+)</t(?:ext|span)>", path.read_text(encoding="utf-8"))


def tips(path: Path) -> list[str]:
    return re.findall(r'data-tip="([^"]+)"', path.read_text(encoding="utf-8"))


def test_the_committed_page_is_what_the_script_writes(drawn: Path) -> None:
    assert (drawn / "gallery.md").read_text(encoding="utf-8") == (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    files = {path.name for path in (drawn / "gallery").iterdir()}
    assert files == {path.name for path in (ROOT / "docs" / "gallery").iterdir()}
    assert files == set(re.findall(r"\(gallery/(\S+)\)", (drawn / "gallery.md").read_text(encoding="utf-8")))
    for name in files:  # a newer drawing library may move a point, but not change what is written
        assert texts(drawn / "gallery" / name) == texts(ROOT / "docs" / "gallery" / name), name
        assert tips(drawn / "gallery" / name) == tips(ROOT / "docs" / "gallery" / name), name
    assert sum((ROOT / "docs" / "gallery" / name).stat().st_size for name in files) < 1.5e6


def test_shaded_tables_hold_the_tables_numbers(drawn: Path) -> None:
    shown = texts(drawn / "gallery" / "maelstrom-figures-48-and-50.svg")
    energies = [
        row for row in select(source="maelstrom", mode="compute", metric="device_energy") if row.parameters.get("method") == "integral"
    ]
    energies = [row for row in energies if row.table.startswith("Table")]
    assert len(energies) == 48
    for row in energies:
        assert significant((row.value or 0) / 3600) in shown, row


def test_scaling_matches_what_the_report_says_of_its_figure(drawn: Path) -> None:
    shown = texts(drawn / "gallery" / "maelstrom-figures-1-and-2.svg")
    assert "0.9, 1 → 4" in shown  # AP2 on H100
    actions = texts(drawn / "gallery" / "maelstrom-figure-77.svg")
    published = [row.value or 0 for row in select(table="text 4.9.8", metric="action")]
    assert len(published) == 6
    assert all(any(text.endswith(f": {plain('', action / 1e6, 'MJ s')}") for text in actions) for action in published)


def test_every_drawing_stands_alone_and_has_a_title(drawn: Path) -> None:
    for path in (drawn / "gallery").iterdir():
        text = path.read_text(encoding="utf-8")
        assert re.match(r"<svg[^>]*><title>[^<]{5,}</title>", text), path.name
        assert "var(" not in text and "href=" not in text, path.name


def test_a_table_of_a_machine_that_nobody_describes_is_listed_as_having_no_command() -> None:
    text = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    (table,) = {row.table for row in select(system="e4-amd")}
    without = text.partition("## What has no command")[2].partition("\n## ")[0]
    number = table.removeprefix("Table ")
    assert f"{table} of MAELSTROM" in without
    assert not [line for line in text.splitlines() if "`caraml run" in line and re.search(rf"MAELSTROM.*Table[^|]*\b{number}\b", line)]


def test_commands_of_maelstrom_s_tables_train_as_many_epochs_as_it_states() -> None:
    """They ended with a window, while the tables are of whole runs; and those of AP6 on E4 trained the epochs of JSC."""
    stated = {(row.workload, str(row.parameters["name"])): row.value for row in select(source="maelstrom", metric="epochs")}
    ap1, ap3, ap5 = (stated[name, "epochs"] for name in ("temperature_postprocessing", "radiation_emulation", "downscaling_gan"))
    ap6, ap6_e4 = (stated["regime_clustering", name] for name in ("epochs-jsc", "epochs-e4"))
    tables = {"6 to 11": ap1, "12 to 16": 1, "17 to 21": ap3, "22 to 26": 1, "32 to 34": 3, "35 to 39": ap5, "42 and 43": ap6}
    text = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"\| MAELSTROM \| Tables? ([^:,]+)[:,].*--set measure.epochs=(\d+)` \|", text))
    assert {name: float(epochs) for name, epochs in found.items()} == tables | {"44": ap6_e4}
    without = {app: stated[name, "non-io-epochs"] for app, name in (("ap1", "temperature_postprocessing"), ("ap5", "downscaling_gan"))}
    found = dict(re.findall(r"caraml run maelstrom-nonio \S+ \S+ --only (\w+) --set measure.epochs=(\d+) --set measure.timeout", text))
    assert {app: float(epochs) for app, epochs in found.items()} == without
    commands = [figure.command for figure in published_figures() if "--only ap6" in figure.command]
    assert commands and all(command.endswith(f"--system e4-a2 --only ap6 --set measure.epochs={ap6_e4:g}") for command in commands)


def test_every_figure_has_its_line_and_command_in_the_list_of_published_results() -> None:
    text = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    for figure in published_figures():
        assert f"| {SHORT[figure.source]} | {figure.name} | {figure.title} | `{figure.command}` |" in text, (
            "run bench/reference/gallery.py docs"
        )
