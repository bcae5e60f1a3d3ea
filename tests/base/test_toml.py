"""TOML files: every fault at once, on the right line, in words that say what to do."""

from __future__ import annotations

import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from caraml.base.errors import ExitCode, InputError
from caraml.base.toml import key_name, parse_toml, read_toml, shown
from caraml.base.toml_lines import key_lines


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Benchmark(Strict):
    workload: str
    sweep: Literal["product", "zip"] = "product"
    batch: tuple[int, ...] = ()
    size: int | list[int] = 1
    target: float = 0.01


class Suite(Strict):
    name: str
    quick: bool = False
    colour: Colour = Colour.RED
    day: datetime.date | None = None
    benchmark: list[Benchmark] = []
    extra: dict[str, Benchmark] = {}
    seeds: Annotated[list[int], Field(min_length=1, max_length=2)] = [0]

    @model_validator(mode="after")
    def _not_reserved(self) -> Suite:
        if self.name == "local":
            raise ValueError("a name other than 'local'")
        return self


def faults(text: str, tmp_path: Path) -> str:
    file = tmp_path / "suite.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_toml(file).validate(Suite)
    assert caught.value.exit_code == ExitCode.WRONG_INPUT
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_a_good_file_becomes_the_model(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(
        'name = "ü"\ncolour = "blue"\nday = 2025-01-02\n[[benchmark]]\nworkload = "gpt"\nbatch = [1, 2]\ntarget = 1\n', encoding="utf-8"
    )
    suite = read_toml(file).validate(Suite)
    assert (suite.name, suite.colour, suite.day) == ("ü", Colour.BLUE, datetime.date(2025, 1, 2))
    assert suite.benchmark == [Benchmark(workload="gpt", batch=(1, 2), target=1.0)]


def test_every_fault_is_listed_with_its_line_in_file_order(tmp_path: Path) -> None:
    text = """# a comment
name = "x"
quick = 1

[[benchmark]]
workload = "gpt"

[[benchmark]]
workload = "gpt"
swep = "zip"
batch = [
  1,
  "2",   # a string
]

[extra.one]
workload = "gpt"
sweep = "produkt"
"""
    assert faults(text, tmp_path).splitlines() == [
        "4 faults in suite.toml",
        "  suite.toml:3: quick: found 1, expected true or false",
        '  suite.toml:10: benchmark[1].swep: found "zip", expected one of the keys workload, sweep, batch, size, target'
        " (did you mean 'sweep'?)",
        '  suite.toml:13: benchmark[1].batch[1]: found "2", expected an integer',
        "  suite.toml:18: extra.one.sweep: found \"produkt\", expected 'product' or 'zip' (did you mean 'product'?)",
    ]


def test_a_missing_key_stands_at_its_table(tmp_path: Path) -> None:
    text = 'name = "x"\n\n[[benchmark]]\nbatch = [1]\n'
    assert faults(text, tmp_path) == "suite.toml:3: benchmark[0].workload: found nothing, expected a value: this key is required"


def test_a_misspelt_required_key_is_one_fault(tmp_path: Path) -> None:
    assert faults('nmae = "x"\n', tmp_path).startswith('suite.toml:1: nmae: found "x", expected one of the keys name, quick')
    assert "did you mean 'name'?" in faults('nmae = "x"\n', tmp_path)


def test_inline_tables_and_unions(tmp_path: Path) -> None:
    text = """name = "x"
benchmark = [
  { workload = "gpt", batsh = [1] },
  { workload = "gpt", size = "big" },
]
extra.a = { workload = "gpt", sise = 2 }
"""
    assert faults(text, tmp_path).splitlines()[1:] == [
        "  suite.toml:3: benchmark[0].batsh: found [1], expected one of the keys workload, sweep, batch, size, target"
        " (did you mean 'batch'?)",
        '  suite.toml:4: benchmark[1].size: found "big", expected an integer or an array',
        "  suite.toml:6: extra.a.sise: found 2, expected one of the keys workload, sweep, batch, size, target (did you mean 'size'?)",
    ]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("[]", "seeds: found [], expected at least 1 entry"),
        ("[1, 2, 3]", "seeds: found [1, 2, 3], expected at most 2 entries"),
        ('["a"]', 'seeds[0]: found "a", expected an integer'),
    ],
)
def test_lengths(value: str, fault: str, tmp_path: Path) -> None:
    assert faults(f'name = "x"\nseeds = {value}\n', tmp_path) == f"suite.toml:2: {fault}"


def test_a_fault_of_the_whole_file(tmp_path: Path) -> None:
    assert faults('name = "local"\n', tmp_path) == "suite.toml:1: (file): found a table with name, expected a name other than 'local'"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('name = "x"\nquick true\n', "suite.toml:2: not valid TOML at column 7: "),
        ('name = "x"\nname = "y"\n', "suite.toml:2: not valid TOML at column 11: Cannot overwrite a value"),
        ('name = "x"\nbenchmark = [1, ', "suite.toml:2: not valid TOML: "),
        ("", "suite.toml:1: name: found nothing"),
    ],
)
def test_syntax_errors_have_line_and_column(text: str, start: str, tmp_path: Path) -> None:
    assert faults(text, tmp_path).startswith(start)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(InputError, match="not UTF-8 at offset 8"):
        read_toml(tmp_path / "suite.toml").validate(Suite)
    with pytest.raises(InputError, match=r"(?s)siute.toml: no such file.*did you mean '.*suite.toml'"):
        read_toml(tmp_path / "siute.toml").validate(Suite)
    with pytest.raises(InputError, match="cannot be read"):
        read_toml(tmp_path).validate(Suite)


def test_lines_of_everything_toml_can_write() -> None:
    text = '''a.b = 1            # 1
"q.r" = """two
lines ""quoted"" [x]
y = 1"""
'lit' = \'\'\'
# no comment
\'\'\'
[t."u v".w]
k = { x = 1, y.z = [ "]", { m = 2 } ] }
[[t.list]]
n = [ # comment ]
  [1, 2],

  [3]]
[t.list.sub]
p = 2020-01-01T00:00:00Z
[[t.list]]
[[t.list.deep]]
s = "a\\"b" # "
'''
    assert parse_toml(text, "x").data["t"]["list"][1]["deep"][0]["s"] == 'a"b'
    lines = key_lines(text)
    expected: dict[tuple[int | str, ...], int] = {
        ("a", "b"): 1,
        ("q.r",): 2,
        ("lit",): 5,
        ("t", "u v", "w"): 8,
        ("t", "u v", "w", "k", "y", "z", 1, "m"): 9,
        ("t", "list", 0): 10,
        ("t", "list", 0, "n", 1): 14,
        ("t", "list", 0, "n", 0, 1): 12,
        ("t", "list", 0, "sub", "p"): 16,
        ("t", "list", 1): 17,
        ("t", "list", 1, "deep", 0, "s"): 19,
    }
    assert {key: lines.get(key) for key in expected} == expected


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.integers(), st.booleans(), st.text(), st.lists(st.text())), max_size=8))
def test_any_key_on_its_own_line_is_found(content: dict[str, object]) -> None:
    def quoted(text: str) -> str:
        return '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"'

    def value(item: object) -> str:
        if isinstance(item, list):
            return "[\n" + ",".join(quoted(one) for one in item) + "]"
        return quoted(item) if isinstance(item, str) else str(item).lower()

    text, at = "", {}
    for key, item in content.items():
        at[(key,)] = text.count("\n") + 1
        text += f"{quoted(key)} = {value(item)}\n"
    lines = key_lines(text)
    assert {key: lines[key] for key in at} == at


def test_the_mark_that_some_editors_begin_with_is_no_fault() -> None:
    assert parse_toml("\ufeffa = 1\r\nb = 2\n", "s.toml").data == {"a": 1, "b": 2}


def test_names_and_values_as_shown() -> None:
    assert key_name(("a", 0, "b")) == "a[0].b"
    assert key_name(()) == "(file)"
    assert (shown(float("nan")), shown(float("-inf"))) == ("nan", "-inf")
    assert shown(True) == "true"
    assert shown({}) == "a table with no keys"
    assert len(shown("x" * 500)) == 60


def test_an_integer_that_toml_does_not_have_is_told_with_its_place() -> None:
    with pytest.raises(InputError) as refused:
        parse_toml(f"a = 1\n[[b]]\nc = [1, {1 << 63}]\nd = {(1 << 63) - 1}\ne = 0x{1 << 70:x}\n", "s.toml")
    words = "found an integer of more than 64 bits, which TOML does not have"
    assert str(refused.value) == f"2 faults in s.toml\n  s.toml:3: b[0].c[1]: {words}\n  s.toml:5: b[0].e: {words}"
