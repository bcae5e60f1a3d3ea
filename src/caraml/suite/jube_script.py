"""JUBE scripts (YAML or XML) as elements, each with its line: read as data, nothing in them is executed. And what parameters and words of
CARAML's two benchmarks are in suites."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args
from xml.parsers import expat

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line, unknown_name
from caraml.base.limits import JUBE, read_text
from caraml.suite.expression import Condition, Formula
from caraml.suite.model import Stated

_INNER = {"benchmark", "parameterset", "parameter", "step", "use", "do", "fileset", "prepare", "substituteset", "patternset", "include"}
_INNER |= {"pattern", "analyser", "analyse", "file", "result", "table", "column", "include-path", "copy", "link", "iofile", "sub"}
_INNER |= {"selection", "tags", "check_tags"}
"""Keys of JUBE's YAML that are elements; all others are attributes."""
DEPTH = 40
GIVE_TAGS = "give the tags of `jube run --tag`, or write the number into the script"

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
SIZES = ("params.layers", "params.width", "params.heads", "params.sequence_length", "params.model")
"""Without these a suite would take its own, and another model."""
KEYS = {
    "gpt": {
        **_COMMON,
        "tp": "tp_size",
        "cp": "cp_size --context-parallel-size",
        "pp": "pp_size ipus_per_replica",
        "sp": "--sequence-parallel",
        "distributed_optimizer": "--use-distributed-optimizer",
        "params.width": "nhidden --hidden-size",
        "params.layers": "nlayers --num-layers",
        "params.heads": "nheads --num-attention-heads",
        "params.sequence_length": "sequence_length --seq-length",
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
PRECISIONS: dict[str, Stated] = {word: word for word in get_args(Stated)}
PRECISIONS |= {"--fp16": "fp16", "--bf16": "bf16", "True": "fp16", "False": "fp32", "16.16": "fp16", "32.32": "fp32"}
"""What the words of the scripts are as precisions of suites."""
WORDS: dict[str, dict[str, Any]] = {
    "precision": PRECISIONS,
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
NETWORKS = {"resnet50_v2": "resnetv2_50", "resnet50_mlperf_pod4_bs20": "resnet50"}


@dataclass
class Element:
    """An element of a script, from XML or from YAML."""

    kind: str
    line: int
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    inner: list[Element] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.attributes.get("name", "")

    @property
    def separator(self) -> str:
        return self.attributes.get("separator", ",") or "\0"  # a blank one divides nothing

    @property
    def active(self) -> str:
        """Whether it is executed: `true`, `false`, or a condition."""
        return self.attributes.get("active", "true").strip()

    def all(self, kind: str) -> list[Element]:
        return [one for one in self.inner if one.kind == kind]


def read_script(path: Path) -> Element:
    try:
        text = read_text(path, JUBE)
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path}: not a script of JUBE: {error}") from error
    root = _from_xml(path, text) if text.lstrip().startswith("<") else _from_yaml(path, text)
    if not any(one.kind in ("benchmark", "parameterset") for one in root.inner):
        found = short(", ".join(sorted({one.kind for one in root.inner}))) or "nothing"
        raise InputError(f"{path}: not a script of JUBE: expected benchmark or parameterset, found {found}")
    return root


def _from_xml(path: Path, text: str) -> Element:
    root = Element("", 1)
    open_ones, parser = [root], expat.ParserCreate()

    def begin(kind: str, attributes: dict[str, str]) -> None:
        open_ones.append(Element(kind, parser.CurrentLineNumber, attributes))
        open_ones[-2].inner.append(open_ones[-1])
        if len(open_ones) > DEPTH:
            raise InputError(f"{path}:{parser.CurrentLineNumber}: more than {DEPTH} elements within each other")

    def said(characters: str) -> None:
        open_ones[-1].text += characters

    def refuse(*_: object) -> None:
        raise InputError(f"{path}:{parser.CurrentLineNumber}: found a DOCTYPE with entities, which a script of JUBE does without")

    parser.StartElementHandler, parser.CharacterDataHandler, parser.EntityDeclHandler = begin, said, refuse
    parser.EndElementHandler = lambda kind: open_ones.pop()
    parser.buffer_text = True
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise InputError(f"{path}:{error.lineno}: not XML: {expat.ErrorString(error.code)}") from error
    return root.inner[0]


def _from_yaml(path: Path, text: str) -> Element:
    try:
        import yaml
    except ImportError as error:
        raise EnvironmentUnfitError(f"{path}: reading YAML needs the package pyyaml", "pip install 'caraml[jube]'") from error
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"{path}:{event.start_mark.line + 1}: found the alias *{event.anchor}, which is not read", "write it out")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return Element("", 1) if node is None else _elements("", node, 1, yaml.SafeLoader("").construct_object)[0]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not YAML: {in_a_line(error)}") from error


def _elements(kind: str, node: Any, line: int, read: Callable[[Any], Any], depth: int = 0) -> list[Element]:
    """JUBE's YAML: ``_`` is an element's text, lists are elements of one kind. What YAML ``read``s as a number or a truth value is that, as
    Python writes it: ``yes`` is ``True``, and ``010`` is ``8``.

    Raises ``ValueError`` for a key that stands twice, and for what is no value.
    """
    if node.tag == "!include":
        return [Element("include", line, {"from": str(node.value)})]
    element, texts = Element(kind, line), [node] if node.id == "scalar" else []
    pairs = node.value if node.id == "mapping" and depth <= DEPTH else []
    for word, times in Counter(str(key.value) for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"line {line}: the key {word!r} stands twice there")
    for key, value in pairs:
        place = key.start_mark.line + 1
        ones = [(one, one.start_mark.line + 1) for one in value.value] if value.id == "sequence" else [(value, place)]
        if key.id != "scalar":
            raise ValueError(f"line {place}: a key that is no word")
        if value.tag == "!include" or key.value in _INNER or kind in ("selection", "tags"):
            element.inner += (found for one, at in ones for found in _elements(key.value, one, at, read, depth + 1))
        elif key.value == "_":
            texts = [one for one, _ in ones if one.id == "scalar"]
        elif value.id == "scalar":
            element.attributes[key.value] = _text(read(value))
    return [replace(element, text=text) for text in [_text(read(one)) for one in texts] or [""]]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def computed(text: str) -> str:
    """What a Python parameter is worth. Raises ``InputError`` where that is more than arithmetic, tables and conditions."""
    try:
        return str(Formula(text).value())
    except InputError as error:
        if error.__cause__ is None:  # not of the language; else it could not be evaluated
            raise InputError(f"Python that is more than arithmetic is not computed: {short(text)}") from error
        raise InputError(str(error.args[0]).removeprefix("condition ")) from error
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{short(text)}: {error}") from error


def _holds(where: str, text: str, tags: Collection[str]) -> bool:
    """Whether a tag expression is true: ``+`` is and, ``|`` or, ``!`` not; a blank one is. ``where`` it stands."""
    asked = re.sub(r"[\w.-]+", lambda found: str(found[0] in tags), text)
    try:
        if "," in asked:
            raise InputError("JUBE's tags of old, which would be a tuple here")
        asked = asked.replace("+", " and ").replace("|", " or ").replace("!", " not ")
        return not asked.strip() or Condition(asked).holds({})
    except InputError as error:
        raise InputError(f"{where} = {text!r} cannot be read; expected names with + | ! ( )") from error


def select(path: Path, element: Element, tags: frozenset[str]) -> None:
    """Leave out what the tags exclude."""
    element.inner = [one for one in element.inner if _holds(f"{path}:{one.line}: tag", one.attributes.get("tag", ""), tags)]
    for one in element.inner:
        select(path, one, tags)


def check_tags(path: Path, root: Element, tags: frozenset[str]) -> None:
    """Raise ``InputError`` where a script refuses to run under these tags."""
    for check in (check for place in (root, *root.all("tags")) for check in place.all("check_tags")):
        if not _holds(f"{path}:{check.line}: check_tags", check.text, tags):
            found = f"found the tags {' '.join(sorted(tags)) or 'none'}; expected {short(check.text)}"
            raise InputError(f"{path}:{check.line}: check_tags: {found}", f"its tags, for --tag: {', '.join(sorted(known_tags(root)))}")


def known_tags(root: Element) -> set[str]:
    """Every tag that a script asks for, requires or describes."""
    texts = (text for one in everything(root) for text in (one.attributes.get("tag", ""), one.text if one.kind == "check_tags" else ""))
    described = (one.name for place in root.all("tags") for one in place.all("tag") if one.name)
    return {*(tag for text in texts for tag in re.findall(r"[\w.-]+", text)), *described}


def lineage(path: Path, whole: Element, step: Element) -> list[Element]:
    """The steps that a step depends on, whose parameters it has as well, and the step, last.

    Raises ``InputError`` for one that is not there: JUBE runs no such script.
    """
    steps, found, waiting = {one.name: one for one in whole.all("step")}, [step], [step]
    while waiting:
        one = waiting.pop()
        for name in filter(None, map(str.strip, one.attributes.get("depend", "").split(","))):
            if name not in steps:
                raise unknown_name(f"step at {path}:{one.line}, in depend of step {one.name}:", name, steps)
            if steps[name] not in found:
                found.insert(0, steps[name])
                waiting.append(steps[name])
    return found


def iterations(path: Path, steps: list[Element]) -> int:
    """How often each point of the last of these steps runs. Raises ``InputError`` for what is no number above zero."""
    numbers = [(step.line, step.attributes.get("iterations", "1").strip()) for step in steps]
    for line, text in numbers:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
            raise InputError(f"{path}:{line}: iterations = {short(text)}: expected a whole number of 1 or more")
    return math.prod(int(text) for _, text in numbers)


def used_sets(*steps: Element) -> set[str]:
    """Names of the sets of this script that steps use."""
    return {name.strip() for step in steps for use in step.all("use") if "from" not in use.attributes for name in use.text.split(",")}


def unknown_uses(step: Element, known: Collection[str]) -> list[tuple[int, str]]:
    """The sets that a step uses and that are none of the script's, with their lines; JUBE passes over them."""
    uses = [use for use in step.all("use") if "from" not in use.attributes]
    return [
        (use.line, name) for use in uses for one in use.text.split(",") if (name := one.strip()) not in known and "$" not in name and name
    ]


def used_parameters(path: Path, root: Element, whole: Element, steps: list[Element]) -> dict[str, Element]:
    """The parameters of the sets that steps use; of two with one name in a set the later counts, as in JUBE.

    Raises ``InputError`` where ``duplicate`` asks for something else, and where JUBE runs no such script: two sets have one name, whatever
    uses them, two used sets differ in a parameter, or anything else is in a set.
    """
    names, sets = used_sets(*steps), dict[str, Element]()
    for one in [*root.all("parameterset"), *(whole.all("parameterset") if whole is not root else [])]:
        if (earlier := sets.setdefault(one.name, one)) is not one:
            where = f"{path}:{one.line}: parameterset {one.name}: is in line {earlier.line} already, under these tags, which JUBE refuses"
            raise InputError(where, "give one of them another name and `use` it too, or write its parameters into the other")
    found: dict[str, Element] = {}
    for one_set in (one for name, one in sets.items() if name in names):
        own: dict[str, Element] = {}
        for one in one_set.inner:
            asked = (place.attributes.get("duplicate", "none").strip() for place in (one, one_set))  # none: what the set has counts
            if (word := next((word for word in asked if word != "none"), "replace")) != "replace":
                found_there = f"{path}:{one.line}: {one.kind} {one.name}: found duplicate {word}, expected replace"
                raise InputError(found_there, "write all values into one parameter")
            if one.kind == "parameter":
                own[one.name] = one
            elif one.kind != "include":
                where = f"{path}:{one.line}: {one.kind} {one.name}: in parameterset {one_set.name}, which has parameters only"
                raise InputError(where, "write it beside that one, and `use` it too")
        for name, one in own.items():
            if _parts(before := found.get(name, one)) != _parts(one):
                where = f"{path}:{one.line}: parameter {name}: line {before.line} has another value, in another set that is used here"
                raise InputError(f"{where}, which JUBE refuses", "leave one of them out")
        found |= {name: one for name, one in own.items() if name}
    return found


def _parts(parameter: Element) -> list[str]:
    return [part.strip() for part in parameter.text.split(parameter.separator)]


def everything(element: Element) -> Iterator[Element]:
    yield element
    for one in element.inner:
        yield from everything(one)


def short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:57]}..."
