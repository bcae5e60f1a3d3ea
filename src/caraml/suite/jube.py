"""JUBE scripts of CARAML's two benchmarks (YAML or XML) as suite files: parameter sets, tags and steps.

A script is data here: its Python parameters are read as formulas, and its shell commands are not executed. What has no place in a suite is
named, each with its line.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from caraml.base.errors import InputError, in_a_line, unknown_name
from caraml.base.format import printable
from caraml.base.limits import JUBE_ROWS, JUBE_TEXT, too_large
from caraml.suite.jube_script import (
    DEPTH,
    GIVE_TAGS,
    KEYS,
    NETWORKS,
    SIZES,
    WORDS,
    Element,
    check_tags,
    computed,
    everything,
    iterations,
    known_tags,
    lineage,
    read_script,
    select,
    short,
    unknown_uses,
    used_parameters,
    used_sets,
)
from caraml.suite.model import Stated

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_FLAG = re.compile(r"(?<!\S)--([A-Za-z][\w-]*)(?:(?:=|[ \t]+)(?!-|\d*[<>])([^\s\"'\\;&|<>]+))?")
_OF_SITE = re.compile(
    r"account|queue|timelimit|hint|gres|tasks|threadspertask|partition|singularity_file|job_config|oot|outlog|outerr|starter"
)
_TEXT = "the text is not fetched; until params.corpus names it (`caraml data prepare text`), Python's own sources are read"
_SIZE = re.compile(r"\d+[MB]")


class _UnknownError(Exception):
    """A parameter whose value only a run of JUBE would tell; why, in words, and the next step."""

    def __init__(self, why: str, hint: str = GIVE_TAGS) -> None:
        super().__init__(why)
        self.hint = hint


class _SweptError(Exception):
    """A parameter with several values, of which none is chosen yet."""

    def __init__(self, name: str, values: list[str]) -> None:
        self.name, self.values = name, values


class _Parameters:
    """The parameters that a step uses, and those that were asked for; ``commands`` are the step's own."""

    def __init__(self, elements: dict[str, Element], commands: Sequence[Element] = ()) -> None:
        self.elements, self.commands = elements, commands
        self.used: set[str] = set()
        self._chosen: dict[str, str] = {}
        self._known: dict[str, str] = {}
        """Values under this choice: one that stands in others twice each would be made as often as they double."""
        self.lost: dict[str, tuple[int, str, str]] = {}
        """Keys whose value is not known or has no counterpart: the line, why, and the next step."""

    def value(self, name: str, chosen: dict[str, str], depth: int = 0) -> str:
        """A parameter's text under a choice of the swept ones. Raises ``_UnknownError`` and ``_SweptError``."""
        if chosen != self._chosen:
            self._chosen, self._known = dict(chosen), {}
        if name not in self._known:
            self._known[name] = self._value(name, chosen, depth)
        return self._known[name]

    def _value(self, name: str, chosen: dict[str, str], depth: int) -> str:
        element = self.elements.get(name)
        mode = "text" if element is None else element.attributes.get("mode", "text")
        if element is None or mode not in ("text", "python") or depth > DEPTH:
            found = f"${name} is known only to a run" if element is None or depth > DEPTH else f"{mode} commands are not executed"
            raise _UnknownError(found)
        self.used.add(name)
        text = self.filled(element.text, chosen, depth).strip()
        if mode == "python":
            try:
                text = computed(text)
            except InputError as error:
                raise _UnknownError(f"parameter {name}: {in_a_line(error)}", "write the values into the script") from error
        values = [one.strip() for one in text.split(element.separator)]
        if len(values) > 1 and name not in chosen:
            raise _SweptError(name, values)
        return chosen.get(name, text)

    def filled(self, template: str, chosen: dict[str, str], depth: int = 0) -> str:
        """A text with the values of the parameters in it; ``$$`` is a dollar. Raises ``_UnknownError`` also for one that is too long."""
        text = "$".join(
            _VARIABLE.sub(lambda found: self.value(found[1] or found[2], chosen, depth + 1), part) for part in template.split("$$")
        )
        if len(text) > JUBE_TEXT:
            raise _UnknownError(f"with its parameters it has {len(text):,} characters, and at most {JUBE_TEXT:,} are read", "shorten it")
        return text

    def options(self) -> dict[str, tuple[Element, str]]:
        """Every option of a program in texts of parameters and commands, with hyphens: where, and a template of its value or itself."""
        return {
            f"--{found[1].replace('_', '-')}": (element, found[2] or f"--{found[1]}")
            for element in (*self.elements.values(), *self.commands)
            if (element.kind == "do" or element.attributes.get("mode", "text") == "text") and not _OF_SITE.search(element.name)
            for found in _FLAG.finditer(element.text)
        }


def suite_from_script(path: Path, tags: Sequence[str], name: str | None = None) -> str:
    """A suite file with what a JUBE script asks for under these tags of ``jube run --tag``, called ``name`` or as its benchmark. Comments
    at its end name what could not be turned, line by line. Raises ``InputError`` for what is no script of JUBE or has no training of
    CARAML's, for a tag that it does not have, and tags under which it refuses to run, and ``EnvironmentUnfitError`` for YAML that no
    package here reads."""
    import tomli_w

    root = read_script(path)
    known = known_tags(root)
    for tag in tags:
        if tag not in known:
            raise unknown_name(f"tag of {path.name}", tag, known)
    given = frozenset(tags)
    check_tags(path, root, given)
    under_any = {
        id(place): [(one.name, one.all("parameter")) for one in place.inner if one.kind.endswith("set")] for place in everything(root)
    }
    any_benchmark = bool(root.all("benchmark"))
    select(path, root, given)
    for one in root.all("selection"):
        raise InputError(f"{path}:{one.line}: found a selection, which is not read", "leave it out, and give its tags by --tag")
    whole, *others = root.all("benchmark") or [root]
    if any_benchmark and whole is root:
        raise InputError(f"{path}: these tags leave no benchmark", f"its tags: {', '.join(sorted(known))}")
    every = [*under_any[id(root)], *(under_any[id(whole)] if whole is not root else [])]
    notes: list[tuple[int, str]] = [(one.line, f"benchmark {one.name!r}: only the first is read") for one in others]
    steps, parameters, workload = _training(path, root, whole, every, known)
    benchmark = _benchmark(path, steps, parameters, workload, notes)
    notes += _left(root, whole, steps, parameters, {name for name, _ in every})
    suite = {
        "name": re.sub(r"[^a-z0-9_-]+", "-", (name or whole.name or path.stem).lower()).strip("-_") or "imported",
        "title": f"{whole.name or path.stem} {' '.join(tags)}".strip(),
        "description": f"From the JUBE script {path.name}" + (f", --tag {' '.join(tags)}." if tags else "."),
        "benchmark": [benchmark],
    }
    system = parameters.elements.get("system_name")
    start = f"{_comment(f'caraml run THIS_FILE --system {shlex.quote(system.text.strip())}')}\n" if system is not None else ""
    lines = [_comment(f"{path.name}:{line}: {text}") for line, text in sorted(set(notes))]
    return start + tomli_w.dumps(suite) + ("\n# Not in this suite:\n" + "\n".join(lines) + "\n" if lines else "")


def _comment(text: str) -> str:
    """A comment of one line, whatever is in the names and texts of the script: a line of its own would be a part of the suite."""
    return f"# {printable(' '.join(text.split()))}"


def _training(
    path: Path, root: Element, whole: Element, every: list[tuple[str, list[Element]]], known: set[str]
) -> tuple[list[Element], _Parameters, str]:
    """The first step that trains a model of CARAML's, after those that it depends on, its parameters, and the workload. ``every``: sets
    under any tags."""
    for step in whole.all("step"):
        steps = lineage(path, whole, step)
        commands = [do for do in step.all("do") if do.active.lower() != "false"]
        parameters = _Parameters(used_parameters(path, root, whole, steps), commands)
        there, others = parameters.elements, {one.name: one for name, inner in every if name in used_sets(*steps) for one in inner}
        workload = "gpt" if "nlayers" in there or "nlayers" in others else "image_classification"
        network = next((there[one] for one in ("tf_model", "model") if one in there), None)
        active = all(one.active.lower() != "false" for one in steps)
        if active and "global_batch_size" in there and (workload == "gpt" or network is not None):
            break
    else:
        raise _no_training(path, whole, {name for name, _ in every}, known)
    if workload != "gpt" and network is not None and _SIZE.fullmatch(network.text.strip()):
        found = f"{path}:{network.line}: {network.name} = {network.text.strip()}: the size of a language model, and no nlayers beside it"
        raise InputError(found, "write its nlayers, nhidden and nheads into the script, or take suite llm: caraml plan llm")
    for size in SIZES:
        for name in set(KEYS[workload].get(size, "").split()) & (others.keys() - there.keys()):
            parameters.lost[size] = (others[name].line, f"{name}: these tags leave it out", GIVE_TAGS)
    return steps, parameters, workload


def _no_training(path: Path, whole: Element, sets: set[str], tags: set[str]) -> InputError:
    """The error for a script without a step that trains, with what may be why."""
    for step in whole.all("step"):
        for line, name in unknown_uses(step, sets):
            return unknown_name(f"set at {path}:{line}, in use of step {step.name}:", name, sets)
    uses = [use for step in whole.all("step") for use in step.all("use")]
    elsewhere = [use for use in uses if use.attributes.get("from", "platform.xml") != "platform.xml"]  # which is JUBE's own
    unread = "; ".join(
        f"line {use.line} uses {short(use.text)} of {use.attributes['from']}, and other files are not read" for use in elsewhere
    )
    found = f"{path}: found no step with the parameters of CARAML's language model or image classification, global_batch_size first"
    found += "".join(f"; step {step.name} is not active" for step in whole.all("step") if step.active.lower() == "false")
    if unread:
        return InputError(f"{found}; {unread}", "write its sets into the script")
    return InputError(found, f"its tags: {', '.join(sorted(tags))}; give those of `jube run --tag`" if tags else None)


def _benchmark(path: Path, steps: list[Element], parameters: _Parameters, workload: str, notes: list[tuple[int, str]]) -> dict[str, Any]:
    rows = _rows(path, parameters, workload, notes)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    several = {key: list(dict.fromkeys(values)) for key, values in columns.items() if len(set(values)) > 1}
    product = set(itertools.product(*several.values())) == set(zip(*(columns[key] for key in several), strict=True))
    benchmark: dict[str, Any] = {"name": workload.replace("_", "-"), "workload": workload}
    if several and not product:
        benchmark["sweep"] = "zip"
    if (repeats := iterations(path, steps)) > 1:
        benchmark["repeats"] = repeats
    params: dict[str, Any] = {}
    for key, values in columns.items():
        value = values[0] if key not in several else several[key] if product else values
        (params if key.startswith("params.") else benchmark)[key.removeprefix("params.")] = value
    return benchmark | {"params": params}


def _rows(path: Path, parameters: _Parameters, workload: str, notes: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """The values of each combination of swept parameters, by the keys of suites."""
    waiting: list[dict[str, str]] = [{}]
    rows: list[dict[str, Any]] = []
    line = parameters.elements["global_batch_size"].line

    def need(keys: Iterable[str], known: Collection[str]) -> None:
        for at, why, hint in (parameters.lost[key] for key in keys if key in parameters.lost and key not in known):
            raise InputError(f"{path}:{at}: {why}", hint)

    while waiting:
        chosen = waiting.pop()
        try:
            rows.append(_row(parameters, workload, chosen, notes))
        except _SweptError as swept:
            waiting += [{**chosen, swept.name: value} for value in reversed(swept.values)]
            if len(waiting) + len(rows) > JUBE_ROWS:
                raise too_large(path, len(waiting) + len(rows), JUBE_ROWS, "combinations of parameters") from None
            continue
        need(["global_batch"], rows[-1])
    known = set[str]().union(*rows)
    need([*SIZES, "precision"], known)
    for size, names in ((size, KEYS[workload][size]) for size in SIZES if size in KEYS[workload] and size not in known):
        what = f"the model of this batch has no {size.removeprefix('params.')}: found no {names.replace(' ', ' and no ')}"
        raise InputError(f"{path}:{line}: {what}", "write it into a parameter of the script")
    share = next((parameters.elements[name].text for name in KEYS[workload]["micro_batch"].split() if name in parameters.elements), "")
    if rounded := _settle(rows, "global_batch" in share):
        points = f"{rounded} of {len(rows)} points"
        notes.append((line, f"{points}: JUBE rounds the batch of a device and runs another one; here they are skipped"))
    if any(row.get("params.tied_head") is False for row in rows):
        notes.append((line, "params.tied_head = false where pp > 1: the first and the last stage cannot hold one weight"))
    if workload == "gpt" and any(row.get("params.data") == "text" for row in rows):
        notes.append((parameters.elements["dataset"].line, _TEXT))
    keys = set(itertools.chain(*rows))
    return [row for row in rows if set(row) == keys]  # the others have a value that was named as impossible


def _row(parameters: _Parameters, workload: str, chosen: dict[str, str], notes: list[tuple[int, str]]) -> dict[str, Any]:
    places = {name: (element, f"${{{name}}}") for name, element in parameters.elements.items()} | parameters.options()
    row: dict[str, Any] = {}
    for key, name in ((key, name) for key, names in KEYS[workload].items() for name in names.split() if name in places):
        element, template = places[name]
        value, hint = WORDS.get(key, {}).get(name), GIVE_TAGS  # a flag says it by itself, whatever word follows it
        try:
            text = parameters.filled(template, chosen) if key not in row else ""
            value = found if (found := _value(key, text)) is not None else value
            why = f"{name} = {text}: no value of {key.removeprefix('params.')} says that"
            hint = f"write one of {', '.join(get_args(Stated))} into the script" if key == "precision" else hint
        except _UnknownError as error:
            why, hint = (str(error) if str(error).startswith(f"parameter {name}:") else f"{name}: {error}"), error.hint
        if value is not None:
            row.setdefault(key, value)
        if key in row:
            continue
        notes.append((element.line, why))
        parameters.lost.setdefault(key, (element.line, why, hint))
    for option, (element, template) in parameters.options().items():
        held = (found := _VARIABLE.fullmatch(template)) and (found[1] or found[2]) in parameters.elements  # the parameter is named
        if option not in " ".join(KEYS[workload].values()).split() and not held:
            notes.append((element.line, f"{option}{f' {template}' if template != option else ''}: no key of a suite"))
        parameters.used.add(element.name)
    return row


def _value(key: str, text: str) -> Any:
    """A value of a suite, or ``None`` for a word that has no counterpart."""
    if key in WORDS:
        return WORDS[key].get(text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return NETWORKS.get(text, text) if key in ("params.model", "compile") else None


def _settle(rows: list[dict[str, Any]], divided: bool) -> int:
    """Make the keys of all rows agree as suites ask; of how many the batch was rounded to fit the devices. A batch of a
    device that is the whole one ``divided`` is left out, as a suite divides by itself; one that is stated stays if the other is edited."""
    whole, rounded = 0, 0
    for row in rows:
        compiled, mode = row.pop("compiler", None), row.pop("compile", "default")
        if compiled is not None:
            row["compile"] = mode if compiled != "off" else "off"
        if "sp" in row:
            row["sp"] = row.get("tp", 1) > 1
        if any(one.get("pp", 1) > 1 for one in rows):  # the first and last stage cannot hold one weight
            row["params.tied_head"] = row["pp"] == 1
        copies = max(row.get("nodes", 1) * row.get("devices", 1) // (row.get("tp", 1) * row.get("cp", 1) * row.get("pp", 1)), 1)
        share = row.get("micro_batch") == row["global_batch"] // copies
        whole, rounded = whole + share, rounded + (share and row["global_batch"] % copies > 0)
    same = {"micro_batch"} if whole == len(rows) and (divided or len({row.get("micro_batch") for row in rows}) > 1) else set()
    same |= {"sp"} if not any(row.get("sp") for row in rows) else set()
    for row in rows:
        for key in same & set(row):
            del row[key]
    return rounded


_RESULTS = "rates and energy are measured and stand in every record (`caraml results`)"
_OTHERS = "other files are not read"
_LEFT = {"fileset": "no files are made or fetched", "substituteset": "no files are made or fetched", "include-path": _OTHERS}
_LEFT |= {"patternset": _RESULTS, "analyser": _RESULTS, "result": _RESULTS}


def _left(root: Element, whole: Element, steps: list[Element], parameters: _Parameters, sets: set[str]) -> Iterator[tuple[int, str]]:
    """Everything else of a script, each with why it is not in the suite."""
    for name, element in parameters.elements.items():
        if name not in parameters.used | {"system_name"} and element.text.strip():
            mode = element.attributes.get("mode", "text")
            why = "the system's file says it" if _OF_SITE.search(name) else "no key of a suite"
            why = why if mode in ("text", "python") else f"{mode} commands are not executed"
            yield element.line, f"parameter {name} = {short(element.text)}: {why}"
    yield from itertools.chain.from_iterable(_left_of_step(one, sets) for one in steps)
    for one in (*steps, *parameters.commands):
        if one.active.lower() != "true":
            yield one.line, f"{one.kind} {one.name}".strip() + f": active = {short(one.active)}: is executed here in any case"
    for include in (one for one in everything(root) if one.kind == "include"):
        yield include.line, f"include {include.attributes.get('from', '')}: {_OTHERS}"
    for one in [*whole.inner, *(root.inner if whole is not root else ())]:
        if one.kind == "step" and one is not steps[-1]:
            yield one.line, f"step {one.name}: {short(' ; '.join(do.text for do in one.all('do'))) or 'nothing'} is not executed"
        elif one.kind in _LEFT:
            yield one.line, f"{one.kind} {one.name}".strip() + f": {_LEFT[one.kind]}"
        elif "init_with" in one.attributes:
            yield one.line, f"init_with {one.attributes['init_with']}: {_OTHERS}"


def _left_of_step(step: Element, sets: set[str]) -> Iterator[tuple[int, str]]:
    for line, name in unknown_uses(step, sets):
        yield line, f"use {name}: the script has no such set"
    for use in step.all("use"):
        if "from" in use.attributes:
            yield use.line, f"use {short(use.text)} of {use.attributes['from']}: {_OTHERS}"
        elif "$" in use.text:
            yield use.line, f"use {short(use.text)}: which set that is, is known only to a run"
    if (cycles := step.attributes.get("cycles", "1").strip()) != "1":
        yield step.line, f"step {step.name}: cycles = {short(cycles)}: its commands run once in each point"
