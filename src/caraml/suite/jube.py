"""JUBE scripts of CARAML's two benchmarks (YAML or XML) as suite files: parameter sets, tags and steps.

A script is data here: its Python parameters are read as formulas, and its shell commands are not executed. What has no place in a suite is
named, each with its line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caraml.base.errors import InputError, in_a_line, unknown_name
from caraml.base.limits import JUBE_ROWS, too_large
from caraml.suite.expression import Formula
from caraml.suite.jube_script import DEPTH, PARTS, Element, check_tags, known_tags, read_script, select, selected, short, used_parameters

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_FLAG = re.compile(r"(?<!\S)--([A-Za-z][\w-]*)(?:(?:=|[ \t]+)(?!-)([^\s\"'\\;&|<>]+))?")
_OF_SITE = re.compile(
    r"account|queue|timelimit|hint|gres|tasks|threadspertask|partition|singularity_file|job_config|oot|outlog|outerr|starter"
)


_COMMON = {
    "nodes": "nodes",
    "devices": "gpus_per_node replicas taskspernode",
    "global_batch": "global_batch_size",
    "micro_batch": "micro_batch_size batch_size_per_device batch_size",
    "precision": "precision --fp16 --bf16 --use-fp16",
    "seed": "seed --seed",
    "params.learning_rate": "lr --lr --learning-rate",
    "params.data": "dataset",
}
_KEYS = {
    "gpt": {
        **_COMMON,
        "tp": "tp_size",
        "cp": "cp_size --context-parallel-size",
        "pp": "pp_size ipus_per_replica",
        "sp": "--sequence-parallel",
        "distributed_optimizer": "--use-distributed-optimizer",
        "params.width": "nhidden",
        "params.layers": "nlayers",
        "params.heads": "nheads",
        "params.sequence_length": "sequence_length",
        "params.weight_decay": "--weight-decay",
        "params.clip_norm": "--clip-grad",
        "params.recompute": "--recompute-granularity",
        "params.positions": "--position-embedding-type",
    },
    "image_classification": {
        **_COMMON,
        "compiler": "compiler",
        "compile": "compiler_mode",
        "channels_last": "channels_last",
        "params.model": "tf_model model",
        "params.workers": "num_workers",
    },
}
"""Keys of suites, and which parameters of the scripts and options of their programs hold them: the first that is there counts."""
_WORDS: dict[str, dict[str, Any]] = {
    "precision": {word: word for word in ("fp32", "tf32", "bf16", "fp16")}
    | {"--fp16": "fp16", "--bf16": "bf16", "True": "fp16", "16.16": "fp16", "32.32": "fp32"},
    "sp": {"--sequence-parallel": True},
    "distributed_optimizer": {"--use-distributed-optimizer": True},
    "channels_last": {"True": True, "False": False},
    "compiler": {"trace": "off", "aot_eager": "off", "inductor": "default"},
    "params.recompute": {"selective": "selective", "full": "full"},
    "params.positions": {"rope": "rotary", "rotary": "rotary"},
    "params.data": {"OSCAR": "text", "Synthetic": "synthetic", "ImageNet": "images", "ImageNet(synthetic)": "synthetic"}
    | {"Synthetic(Host)": "synthetic", "Synthetic(Device)": "synthetic-device"},
}
"""What the words of the scripts are in suites."""
_TEXT = "the text is not fetched; until params.corpus names it (`caraml data prepare text`), Python's own sources are read"
_SIZE = re.compile(r"\d+[MB]")
_NETWORKS = {"resnet50_v2": "resnetv2_50", "resnet50_mlperf_pod4_bs20": "resnet50"}


class _UnknownError(Exception):
    """A parameter whose value only a run of JUBE would tell; why, in words."""


class _SweptError(Exception):
    """A parameter with several values, of which none is chosen yet."""

    def __init__(self, name: str, values: list[str]) -> None:
        self.name, self.values = name, values


class _Parameters:
    """The parameters that a step uses, and those that were asked for; ``commands`` are the step's own."""

    def __init__(self, elements: dict[str, Element], commands: Sequence[Element] = ()) -> None:
        self.elements, self.commands = elements, commands
        self.used: set[str] = set()

    def value(self, name: str, chosen: dict[str, str], depth: int = 0) -> str:
        """A parameter's text under a choice of the swept ones. Raises ``_UnknownError`` and ``_SweptError``."""
        element = self.elements.get(name)
        mode = "text" if element is None else element.attributes.get("mode", "text")
        if element is None or mode not in ("text", "python") or depth > DEPTH:
            raise _UnknownError(
                f"${name} is known only to a run" if element is None or depth > DEPTH else f"{mode} commands are not executed"
            )
        self.used.add(name)
        text = self.filled(element.text, chosen, depth).strip()
        if mode == "python":
            try:
                text = element.separator.join(str(Formula(part).value()) for part in text.split(PARTS))
            except InputError as error:
                raise _UnknownError(in_a_line(error)) from error
        values = [one.strip() for one in text.split(element.separator)]
        if len(values) > 1 and name not in chosen:
            raise _SweptError(name, values)
        return chosen.get(name, text)

    def filled(self, template: str, chosen: dict[str, str], depth: int = 0) -> str:
        """A text with the values of the parameters in it; ``$$`` is a dollar."""
        return "$".join(
            _VARIABLE.sub(lambda found: self.value(found[1] or found[2], chosen, depth + 1), part) for part in template.split("$$")
        )

    def options(self) -> dict[str, tuple[Element, str]]:
        """Every option of a program in texts of parameters and commands, with hyphens: where, and a template of its value or itself."""
        return {
            f"--{found[1].replace('_', '-')}": (element, found[2] or f"--{found[1]}")
            for element in (*self.elements.values(), *self.commands)
            if element.attributes.get("mode", "text") == "text" and not _OF_SITE.search(element.name)
            for found in _FLAG.finditer(element.text)
        }


def suite_from_script(path: Path, tags: Sequence[str], name: str | None = None) -> str:
    """A suite file with what a JUBE script asks for under these tags.

    Args:
        path: the script, YAML or XML.
        tags: as of ``jube run --tag``.
        name: the suite's; default: the benchmark's.

    Returns:
        The file's text; comments at its end name what could not be turned, line by line.

    Raises:
        InputError: not a script of JUBE, a tag that it does not have, tags under which it refuses to run, or no training of CARAML's in it.
        EnvironmentUnfitError: YAML, and no package that reads it.
    """
    import tomli_w

    root = read_script(path)
    known = known_tags(root)
    for tag in tags:
        if tag not in known:
            raise unknown_name(f"tag of {path.name}", tag, known)
    only, others = selected(root, "only"), selected(root, "not")
    benchmarks = [one for one in root.all("benchmark") if (not only or one.name in only) and one.name not in others]
    whole = (benchmarks or [root])[0]
    given = frozenset(tags) | selected(root, "tag")
    check_tags(path, root, given)
    select(path, root, given)
    notes: list[tuple[int, str]] = [(one.line, f"benchmark {one.name!r}: only the first is read") for one in benchmarks[1:]]
    for step in whole.all("step"):
        parameters = _Parameters(used_parameters(path, root, whole, step), step.all("do"))
        workload = "gpt" if "nlayers" in parameters.elements else "image_classification"
        network = next((parameters.elements[one] for one in ("tf_model", "model") if one in parameters.elements), None)
        if "global_batch_size" in parameters.elements and (workload == "gpt" or network is not None):
            break
    else:
        hint = f"its tags: {', '.join(sorted(known))}; give those of `jube run --tag`" if known else None
        raise InputError(
            f"{path}: found no step with the parameters of CARAML's language model or image classification, global_batch_size first", hint
        )
    if workload != "gpt" and network is not None and _SIZE.fullmatch(network.text.strip()):
        found = f"{path}:{network.line}: {network.name} = {network.text.strip()}: the size of a language model, and no nlayers beside it"
        raise InputError(found, "write its nlayers, nhidden and nheads into the script, or take suite llm: caraml plan llm")
    benchmark = _benchmark(path, step, parameters, workload, notes)
    notes += _left(whole, step, parameters)
    suite = {
        "name": re.sub(r"[^a-z0-9_-]+", "-", (name or whole.name or path.stem).lower()).strip("-_") or "imported",
        "title": f"{whole.name or path.stem} {' '.join(tags)}".strip(),
        "description": f"From the JUBE script {path.name}" + (f", --tag {' '.join(tags)}." if tags else "."),
        "benchmark": [benchmark],
    }
    system = parameters.elements.get("system_name")
    start = f"# caraml run THIS_FILE --system {system.text.strip()}\n" if system is not None else ""
    lines = [f"# {path.name}:{line}: {text}" for line, text in sorted(set(notes))]
    return start + tomli_w.dumps(suite) + ("\n# Not in this suite:\n" + "\n".join(lines) + "\n" if lines else "")


def _benchmark(path: Path, step: Element, parameters: _Parameters, workload: str, notes: list[tuple[int, str]]) -> dict[str, Any]:
    rows = _rows(path, parameters, workload, notes)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    several = {key: list(dict.fromkeys(values)) for key, values in columns.items() if len(set(values)) > 1}
    product = set(itertools.product(*several.values())) == set(zip(*(columns[key] for key in several), strict=True))
    benchmark: dict[str, Any] = {"name": workload.replace("_", "-"), "workload": workload}
    if several and not product:
        benchmark["sweep"] = "zip"
    if (repeats := step.attributes.get("iterations", "1")) != "1" and repeats.isdigit():
        benchmark["repeats"] = int(repeats)
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
    while waiting:
        chosen = waiting.pop()
        try:
            rows.append(_row(parameters, workload, chosen, notes))
        except _SweptError as swept:
            waiting += [{**chosen, swept.name: value} for value in reversed(swept.values)]
            if len(waiting) + len(rows) > JUBE_ROWS:
                raise too_large(path, len(waiting) + len(rows), JUBE_ROWS, "combinations of parameters") from None
            continue
        if "global_batch" not in rows[-1]:
            why = next((text for at, text in notes if at == line), "global_batch_size is unknown")
            raise InputError(f"{path}:{line}: {why}", "give the tags of `jube run --tag`, or write the number into the script")
    if rounded := _settle(rows):
        notes.append(
            (line, f"{rounded} of {len(rows)} points: JUBE rounds the batch of a device and runs another one; here they are skipped")
        )
    if any(row.get("params.tied_head") is False for row in rows):
        notes.append((line, "params.tied_head = false where pp > 1: the first and the last stage cannot hold one weight"))
    if workload == "gpt" and any(row.get("params.data") == "text" for row in rows):
        notes.append((parameters.elements["dataset"].line, _TEXT))
    keys = set(itertools.chain(*rows))
    return [row for row in rows if set(row) == keys]  # the others have a value that was named as impossible


def _row(parameters: _Parameters, workload: str, chosen: dict[str, str], notes: list[tuple[int, str]]) -> dict[str, Any]:
    places = {name: (element, f"${{{name}}}") for name, element in parameters.elements.items()} | parameters.options()
    row: dict[str, Any] = {}
    for key, name in ((key, name) for key, names in _KEYS[workload].items() for name in names.split() if name in places):
        element, template = places[name]
        try:
            text = parameters.filled(template, chosen) if key not in row else ""
            value = _value(key, text)
        except _UnknownError as error:
            notes.append((element.line, f"{name}: {error}"))
            continue
        if value is not None:
            row.setdefault(key, value)
        elif key not in row:
            notes.append((element.line, f"{name} = {text}: no value of {key.removeprefix('params.')} says that"))
    for option, (element, template) in parameters.options().items():
        held = (found := _VARIABLE.fullmatch(template)) and (found[1] or found[2]) in parameters.elements  # the parameter is named
        if option not in " ".join(_KEYS[workload].values()).split() and not held:
            notes.append((element.line, f"{option}{f' {template}' if template != option else ''}: no key of a suite"))
        parameters.used.add(element.name)
    return row


def _value(key: str, text: str) -> Any:
    """A value of a suite, or ``None`` for a word that has no counterpart."""
    if key in _WORDS:
        return _WORDS[key].get(text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return _NETWORKS.get(text, text) if key in ("params.model", "compile") else None


def _settle(rows: list[dict[str, Any]]) -> int:
    """Make the keys of all rows agree as suites ask; of how many the batch was rounded to fit the devices."""
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
    same = {"micro_batch"} if whole == len(rows) else set()  # which a suite takes by itself
    same |= {"sp"} if not any(row.get("sp") for row in rows) else set()
    for row in rows:
        for key in same & set(row):
            del row[key]
    return rounded


_RESULTS = "rates and energy are measured and stand in every record (`caraml results`)"
_LEFT = {"fileset": "no files are made or fetched", "substituteset": "no files are made or fetched", "include": "other files are not read"}
_LEFT |= {"include-path": "other files are not read", "patternset": _RESULTS, "analyser": _RESULTS, "result": _RESULTS}


def _left(whole: Element, step: Element, parameters: _Parameters) -> Iterator[tuple[int, str]]:
    """Everything else of a script, each with why it is not in the suite."""
    for name, element in parameters.elements.items():
        if name not in parameters.used | {"system_name"} and element.text.strip():
            mode = element.attributes.get("mode", "text")
            why = "the system's file says it" if _OF_SITE.search(name) else "no key of a suite"
            why = why if mode in ("text", "python") else f"{mode} commands are not executed"
            yield element.line, f"parameter {name} = {short(element.text)}: {why}"
    for one in whole.inner:
        if one.kind == "step" and one is not step:
            yield one.line, f"step {one.name}: {short(' ; '.join(do.text for do in one.all('do'))) or 'nothing'} is not executed"
        elif one.kind in _LEFT:
            yield one.line, f"{one.kind} {one.name}".strip() + f": {_LEFT[one.kind]}"
        elif "init_with" in one.attributes:
            yield one.line, f"init_with {one.attributes['init_with']}: other files are not read"
