"""A user's systems: found in two folders, laid over the catalogue field by field, and refused with the line of each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.system.catalogue import GIVEN, described, given, list_systems, load_system, with_given
from caraml.system.model import CATALOG, Cpu, DeviceModel, System, with_sheet
from caraml.worker.record import _datasheet

NEW = """name = "mine"
title = "Mine"
devices_per_node = 2
[[devices]]
model = "NVIDIA H200"
kind = "cuda"
[cpu]
model = "Chip"
[sources]
devices = "s"
devices_per_node = "s"
cpu = "s"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for a user's systems."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "caraml" / "systems"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite's file with a folder for systems beside it."""
    (tmp_path / "suite" / "systems").mkdir(parents=True)
    path = tmp_path / "suite" / "suite.toml"
    path.write_text("")
    return path


def test_a_new_system_is_found_by_name(config: Path) -> None:
    (config / "any-file.toml").write_text(NEW)
    assert load_system("mine").identity == "NVIDIA H200 x2"
    assert "mine" in [system.name for system in list_systems()]


def test_home_is_searched_where_no_variable_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "caraml" / "systems"
    folder.mkdir(parents=True)
    (folder / "m.toml").write_text(NEW)
    assert load_system("mine").name == "mine"


def test_fields_override_one_by_one(config: Path) -> None:
    text = 'name = "jedi"\n[site.scheduler]\naccount = "me"\nmax_minutes = 60\n[[devices]]\ntdp_w = 500\n'
    (config / "jedi.toml").write_text(text + '[sources]\n"devices.tdp_w" = "nvidia-smi"\n')
    base, changed = load_system(CATALOG / "jedi.toml"), load_system("JEDI")
    assert base.site.scheduler is not None and changed.site.scheduler is not None
    assert base.site.scheduler.account is None and load_system(config / "jedi.toml") == changed
    scheduler = changed.site.scheduler
    assert (scheduler.account, scheduler.max_minutes, scheduler.partition, scheduler.extra) == ("me", 60, "all", ("--hint=nomultithread",))
    assert [device.tdp_w for device in changed.devices] == [500.0] * 4
    assert changed.devices[0].memory_bytes == 96 * 2**30
    assert changed.sources["devices.tdp_w"] == "nvidia-smi"
    assert changed.sources["devices.memory_bytes"].startswith("CARAML slides")
    assert "site.scheduler.max_minutes" not in changed.missing and "affinity" in changed.missing
    assert changed.aliases == ("JEDI",) and changed.links and changed.peak


def test_a_file_that_extends_may_have_a_name_of_its_own(config: Path) -> None:
    (config / "m.toml").write_text('name = "small"\nextends = "LUMI"\n[site.scheduler]\npartition = "small-g"\n')
    small, lumi = load_system("small"), load_system("lumi")
    assert small.site.scheduler is not None and lumi.site.scheduler is not None
    assert (small.site.scheduler.partition, lumi.site.scheduler.partition) == ("small-g", "standard-g")
    assert small.affinity == lumi.affinity and small.aliases == () and load_system("LUMI-G").name == "lumi"
    assert [path.name for path in described("small").files] == ["lumi.toml", "m.toml"]


def test_extends_alone_changes_the_system_itself(config: Path) -> None:
    (config / "m.toml").write_text('extends = "A100"\ntitle = "Ours"\n')
    assert load_system("jureca-a100").title == "Ours"
    assert load_system("A100").title == "Ours"


def test_what_stands_beside_the_suite_comes_last(config: Path, suite: Path) -> None:
    (config / "m.toml").write_text(NEW)
    (suite.parent / "systems" / "m.toml").write_text('name = "mine"\ntitle = "Beside"\n')
    assert load_system("mine").title == "Mine"
    assert load_system("mine", beside=suite).title == "Beside"
    assert load_system("mine", beside=suite).identity == "NVIDIA H200 x2"
    assert [path.parent.name for path in described("mine", suite).files] == ["systems", "systems"]


def test_a_figure_is_replaced_with_its_unit_and_source(config: Path) -> None:
    figure = '[peak.bf16]\nvalue = 1e12\nunit = "FLOP/s"\nsource = "measured"\n'
    (config / "m.toml").write_text('name = "deucalion-a100-80"\n' + figure)
    peak = load_system("deucalion-a100-80").peak
    assert peak is not None
    assert (peak["bf16"].source, peak["fp16"].value) == ("measured", 312e12)
    (config / "m.toml").write_text('name = "deucalion-a100-80"\n[peak.bf16]\nvalue = 1e12\n')
    with pytest.raises(InputError, match=r"(?s)peak.bf16.unit: found nothing.*peak.bf16.source: found nothing"):
        load_system("deucalion-a100-80")


def test_the_old_source_does_not_vouch_for_a_new_figure(config: Path) -> None:
    (config / "m.toml").write_text('name = "jedi"\nnodes = 48\n\n[cpu]\ncores = 100\n')
    with pytest.raises(InputError) as caught:
        load_system("jedi")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("2 faults in ")
    assert lines[1].endswith("m.toml:2: sources.nodes: found nothing, expected where the figure comes from")
    assert "m.toml:4: sources.cpu: found nothing" in lines[2]


THREE = "[[devices]]\nindex = 0\n" * 3 + '[sources]\ndevices = "s"\ndevices_per_node = "s"\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('extends = "jedy"\n', r"m.toml:1: extends: found \"jedy\", .* \(did you mean '[jJ][eE][dD][iI]'\?\)"),
        ("extends = 3\n", r"m.toml:1: extends: found 3, expected the name of a system"),
        ('name = "local"\nextends = "jedi"\n', r"m.toml:1: name: found \"local\", expected another name"),
        ('extends = "jedi"\n[site.sheduler]\npartition = "x"\n', r"m.toml:2: site.sheduler: .*did you mean 'scheduler'"),
        ('extends = "jedi"\n[affinity]\nnuma_nodes = [0]\n[sources]\naffinity = "s"\n', r"m.toml:3: affinity.numa_nodes: found \"1 entr"),
        ('extends = "jedi"\n[affinity]\ncpus = ["0-", "1"]\n[sources]\naffinity = "s"\n', r"m.toml:3: affinity.cpus\[0\]"),
        ('extends = "jedi"\n[sources]\n"devices.tdp" = "s"\n', r"m.toml:3: sources.devices.tdp: .*did you mean 'tdp_w'"),
        ('extends = "jedi"\ndevices_per_node = 2\n' + THREE, r"m.toml:3: devices: found \"3 tables\", expected 1 or devices_per_node = 2"),
    ],
)
def test_faults_have_their_line(config: Path, text: str, fault: str) -> None:
    (config / "m.toml").write_text(text)
    with pytest.raises(InputError, match=fault):
        list_systems()


def test_two_files_may_not_claim_a_name(config: Path) -> None:
    (config / "m.toml").write_text(NEW.replace('"Mine"', '"Mine"\naliases = ["LUMI"]'))
    with pytest.raises(InputError, match=r"same name or alias: 'lumi' in .*m.toml"):
        list_systems()
    (config / "m.toml").write_text(NEW.replace('"Mine"', '"Mine"\naliases = ["Local"]'))
    with pytest.raises(InputError, match=r"'local' in .*m.toml and what is detected"):
        load_system("mine")


def test_the_catalogue_itself_stays_as_it_is(config: Path) -> None:
    before = load_system("jedi")
    (config / "m.toml").write_text('name = "jedi"\n[site.software.variables]\nX = "1"\n[missing]\nnodes = "other"\n')
    assert load_system("jedi").site.software.variables == {"X": "1"}
    (config / "m.toml").unlink()
    assert load_system("jedi") == before


def test_a_broken_file_is_named_and_local_needs_none(config: Path) -> None:
    (config / "m.toml").write_text("name = \n")
    assert load_system("local").name == "local"
    with pytest.raises(InputError, match=r"m.toml:1: not valid TOML"):
        load_system("jedi")


def test_a_wrong_kind_of_missing_is_told_of_a_file_that_builds_on_another(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('extends = "A100"\nname = "mine"\nmissing = ["nodes"]\n')
    with pytest.raises(InputError, match=r'missing: found \["nodes"\], expected a table$'):
        described(str(tmp_path / "s.toml"))


OWN = """name = "ours"
title = "Ours"
devices_per_node = 4
memory_bandwidth = { value = 2e12, unit = "B/s", source = "b" }

[[devices]]
model = "NVIDIA H100"
kind = "cuda"

[cpu]
model = "Chip"

[peak.bf16]
value = 800e12
unit = "FLOP/s"
source = "contract"

[sources]
devices = "s"
devices_per_node = "s"
cpu = "s"
"""


def test_figures_are_in_the_units_that_rates_are_compared_in(tmp_path: Path) -> None:
    """800 TFLOP/s were taken for 800 FLOP/s, and a peak of nothing for one."""
    path = tmp_path / "ours.toml"
    for old, new, words in (
        ('800e12\nunit = "FLOP', '800\nunit = "TFLOP', r'15: peak.bf16.unit: found "TFLOP/s", expected "FLOP/s", and the value in FLOP/s$'),
        ('2e12, unit = "B', '2, unit = "TB', r'4: memory_bandwidth.unit: found "TB/s", expected "B/s", and the value in B/s$'),
        ("800e12", "0", r"14: peak.bf16.value: found 0, expected greater than 0$"),
    ):
        path.write_text(OWN.replace(old, new))
        with pytest.raises(InputError, match=words):
            load_system(path)


def counted(found: System, described: System, folder: Path) -> System:
    """The machine as a worker sees it that was given a description of it."""
    (folder / GIVEN).write_text(given(described))
    return with_given(found, folder)


def test_a_peak_of_one_s_own_is_what_records_count(tmp_path: Path) -> None:
    """The manual has it added where a device is not known, and the worker looks at the machine itself."""
    ours, other = tmp_path / "ours.toml", tmp_path / "h200.toml"
    ours.write_text(OWN)
    other.write_text(OWN.replace('"ours"', '"other"').replace("NVIDIA H100", "NVIDIA H200"))
    h100, h200 = (
        with_sheet(System(name="local", title="", devices_per_node=1, devices=(DeviceModel(model=model, kind="cuda"),), cpu=Cpu(model="c")))
        for model in ("NVIDIA H100", "NVIDIA H200")
    )
    found = counted(h100, load_system(ours), tmp_path)
    assert (_datasheet(found, "bf16", 1).value, _datasheet(found, "bf16", 1).source) == (800e12, "contract")
    assert found.memory_bandwidth is not None and found.memory_bandwidth.value == 2e12 and "peak" not in found.missing
    assert _datasheet(found, "tf32", 1).value is None
    mixed = counted(h200, load_system(other), tmp_path)
    assert [_datasheet(mixed, dtype, 1).value for dtype in ("bf16", "tf32")] == [800e12, 494.7e12], "the rest is the data sheet's"
    assert load_system(other).peak == mixed.peak
    part = with_sheet(h200.model_copy(update={"peak": None, "devices": (h200.devices[0].model_copy(update={"multiprocessors": 66}),)}))
    assert counted(part, load_system(other), tmp_path).peak == {"bf16": mixed.peak["bf16"]}, "the data sheet is not that of a part"
    assert counted(h100, load_system("JEDI"), tmp_path) == h100, "who gives none"
    reason = counted(h100, load_system(other), tmp_path).missing["peak"]
    assert reason.startswith("no data sheet for 'NVIDIA H100'") and reason.endswith("; other gives it for 'NVIDIA H200'")


def test_a_peak_of_one_s_own_is_that_of_the_device_by_all_its_names(config: Path) -> None:
    """amdgpu gives the name on the board, the description of LUMI in the catalogue torch's: the user's peak was left out."""
    peak = '[peak.bf16]\nvalue = 150e12\nunit = "FLOP/s"\nsource = "contract"\n'
    (config / "lumi.toml").write_text(f'extends = "LUMI"\nname = "lumi"\n{peak}')
    device = DeviceModel(model="AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", kind="rocm")
    found = with_sheet(System(name="local", title="", devices_per_node=1, devices=(device,), cpu=Cpu(model="c")))
    own = counted(found, load_system("lumi"), config)
    assert [_datasheet(own, dtype, 1).value for dtype in ("bf16", "fp32")] == [150e12, 47.85e12]
