"""Environment variables of points: whose values may be shown, and how the others reach a job without standing where others can read them.

Names are shown always. A value is shown if its name is one of the known settings of libraries, which change speed or numbers and are what
a reader of a record looks for. Every other value may be a secret: in its place stands a *reference*, ``$NAME`` as its author wrote it or
``hidden:DIGEST`` (keyed by a file of the user's own, so that no guess can be tried), and a job gets it from a folder that only its user can
open. The folder goes when the attempt has its record.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
import shutil
import string
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import config_home, make_folder, write_new, write_once
from caraml.base.limits import RECORD, read_bytes
from caraml.base.processes import private_folder

PROBE = "CARAML_PROBE_SECONDS"
"""Environment variable: how long a search for the fastest arithmetic takes [s]; every other search and look takes its share of that.
With 0 there is none, and limits are unknown."""
PATIENCE = "CARAML_HANG_SECONDS"
"""Environment variable: seconds without a step after which a point is given up; 0 for ever."""
_AT_ZERO = {PROBE: "0 for no search", PATIENCE: "0 for never"}
FOLDER = ".private"
"""In an attempt's folder: what only its user can open."""
SITE, PROGRAM = "site", "program"
"""Files in it, written as ``/proc/PID/environ``: variables of the machine's description, for all that a script starts, and of a program."""

_SHOWN = re.compile(
    r"(CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|(HIP|ROCR)_VISIBLE_DEVICES"
    r"|(OMP|KMP|GOMP|MKL|OPENBLAS)_[A-Z_]+|MALLOC_[A-Z_]+|GLIBC_TUNABLES|LD_PRELOAD|(NCCL|RCCL|UCX|MIOPEN|HSA|CUBLAS|CUDNN)_[A-Z0-9_]+"
    r"|GLOO_[A-Z_]+|(PYTORCH|TORCH|HIPBLASLT)_[A-Z0-9_]+|TORCHINDUCTOR_[A-Z_]+|ONEDNN_[A-Z_]+|DNNL_[A-Z_]+|NVIDIA_TF32_OVERRIDE"
    r"|PYTHONHASHSEED|CARAML_[A-Z_]+)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|PWD|CREDENTIAL|KEY|AUTH|LICEN[CS]E|(^|_)PAT$")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FROM_CALLER = re.compile(rf"\$({_NAME.pattern})")
_FORMAT = re.compile(r"[<>=^]?[ +-]?#?0?[0-9]{0,3}[,_]?(\.[0-9]{1,2})?[bcdeEfFgGnosxX%]?")
_ACCOUNT = re.compile(r"(://|\bredfish:)\S*@")
"""Also where the scheme is left out."""
_HIDDEN = "hidden:"
_SALT_BYTES = 32


def seconds_asked(name: str, usual: float) -> float:
    """What an environment variable of CARAML's asks for [s], 0 or more; ``usual`` where it is not set. Raises ``InputError`` for what is no
    such number."""
    text = os.environ.get(name, "")
    with suppress(ValueError):
        if 0 <= (found := float(text or usual)) < math.inf:
            return found
    hint = f"export {name}=10, {_AT_ZERO[name]}, or unset it"
    raise InputError(f"{name}: found {text!r}, expected a number of seconds, 0 or more", hint)


def shown(name: str) -> bool:
    """Whether the value of a variable of this name may be shown."""
    return _SHOWN.fullmatch(name) is not None and not _SECRET.search(name)


def has_account(text: str) -> bool:
    """Whether an address in a text has an account in it, and so a password: ``https://NAME:PASSWORD@HOST``."""
    return _ACCOUNT.search(text) is not None


def concealed(variables: Mapping[str, str]) -> dict[str, str]:
    """Those variables of a machine's description whose values are not shown; an empty value hides nothing."""
    return {name: text for name, text in variables.items() if _FROM_CALLER.fullmatch(text) or (text and not shown(name))}


def is_reference(text: str) -> bool:
    """Whether a text of a suite stands for a value that is elsewhere."""
    return text.startswith(_HIDDEN) or _FROM_CALLER.fullmatch(text) is not None


def hidden(name: str, template: str, parameters: Container[str]) -> str:
    """What a suite's template may be shown as: itself, or a reference, which has the template's fields behind the digest.

    A template of nothing but fields is shown: what it gives are parameters, which stand beside it.

    Raises:
        ValueError: a single brace, or braces around anything but one of the ``parameters`` and its format.
    """
    parts = list(string.Formatter().parse(template))
    for _, field, spec, form in parts:
        if field is not None and (field not in parameters or form or not _FORMAT.fullmatch(spec or "")):
            raise ValueError("braces around what is no parameter")
    fields = "".join(f"{{{field}{':' if spec else ''}{spec}}}" for _, field, spec, _ in parts if field is not None)
    nothing_else = not any(re.search(r"[^\W_]", literal) for literal, _, _, _ in parts)
    if not template or shown(name) or is_reference(template) or (fields and nothing_else):
        return template
    return f"{_HIDDEN}{digest(name, template)}{fields}"


def behind(name: str, text: str, known: Mapping[str, str]) -> str | None:
    """The template that a suite's ``text`` for a variable stands for (see :func:`hidden`); ``None`` where it is not known here.

    ``known`` are templates by their references, as they were when the suite was read from its own file. The caller's environment may have
    the others, each under its own name.
    """
    match = _FROM_CALLER.fullmatch(text)
    if match is not None:
        value = os.environ.get(match[1])
        return None if value is None else _literally(value)
    if not text.startswith(_HIDDEN) or text in known:
        return known.get(text, text)
    value = os.environ.get(name, "")
    return next((one for one in (value, _literally(value)) if text.startswith(f"{_HIDDEN}{digest(name, one)}")), None)


def missing(variables: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """A sentence for each variable whose value is not known here."""
    found = []
    for name, text in variables.items():
        if behind(name, text, known) is None:
            match = _FROM_CALLER.fullmatch(text)
            kept = f"its value was not kept, only its name{f', and {name} of the environment is another' if name in os.environ else ''}"
            found.append(f"env.{name}: {f'the environment has no variable {match[1]}' if match else kept}")
    return found


def of_caller(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of a machine's description with ``$NAME`` replaced; those that the caller does not have are left out."""
    found = {name: _FROM_CALLER.fullmatch(text) for name, text in variables.items()}
    values = {name: os.environ.get(match[1]) if match else variables[name] for name, match in found.items()}
    return {name: value for name, value in values.items() if value is not None}


def digest(name: str, text: str) -> str:
    """16 hexadecimal digits that tell values of a variable apart and say nothing else of them. Raises ``EnvironmentUnfitError`` where the
    key cannot be kept: every run would have digests of its own."""
    return hmac.new(_key(), f"{name}\0{text}".encode(), hashlib.sha256).hexdigest()[:16]


def _key() -> bytes:
    """The user's key, made where there is none yet."""
    path = config_home() / "digest-key"
    try:
        if not path.exists():
            make_folder(path.parent)  # which others could fill with systems if the umask let them
            write_once(path, secrets.token_bytes(_SALT_BYTES), mode=0o600)
        known, key = path.stat(), read_bytes(path, _SALT_BYTES)
    except (OSError, InputError) as error:
        why = error.strerror if isinstance(error, OSError) else error.line
        hint = 'write env = { NAME = "$NAME" } and have NAME in your environment, or set XDG_CONFIG_HOME to a folder of yours'
        raise EnvironmentUnfitError(f"{path}: {why}; the key is needed to hide the values of env", hint) from error
    if len(key) != _SALT_BYTES or known.st_uid != os.geteuid() or known.st_mode & 0o077:
        found = f"{path}: expected {_SALT_BYTES} bytes that only you can read; others could guess what is hidden with this key"
        raise EnvironmentUnfitError(found, "remove it: a new one is made, and points with hidden values are measured again")
    return key


def _literally(value: str) -> str:
    """A value as a template that gives it."""
    return value.replace("{", "{{").replace("}", "}}")


def check_name(key: str, name: str) -> None:
    """Raise ``InputError`` for a name that the shell would take for something else."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{key}: found {name!r}, expected the name of a variable")


# -- on the way to a job ---------------------------------------------------------------------------------------------------------------


def hand_over(attempt: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Leave variables in an attempt's private folder for its job; without any there is no folder. Raises ``InputError`` for a value with a
    NUL character, behind which another variable would begin."""
    for name in (name for variables in files.values() for name, value in variables.items() if "\0" in name + value):
        raise InputError(f"env.{name.partition(chr(0))[0]}: found a NUL character, expected a value that an environment can have")
    for file, variables in files.items():
        if variables:
            content = "".join(f"{name}={value}\0" for name, value in variables.items())
            write_new(private_folder(attempt / FOLDER) / file, content, mode=0o600)


def handed_over(attempt: Path, file: str) -> dict[str, str]:
    """What :func:`hand_over` left in a file; nothing where there is none."""
    try:
        content = read_bytes(attempt / FOLDER / file, RECORD).decode()
    except FileNotFoundError:
        return {}
    return dict(pair.partition("=")[::2] for pair in content.split("\0")[:-1])


def forget(attempt: Path) -> None:
    """Remove an attempt's private folder."""
    shutil.rmtree(attempt / FOLDER, ignore_errors=True)


def loading(names: Iterable[str], file: str, last: bool = False) -> list[str]:
    """Shell lines that export what was handed over, in the attempt's folder; without it they say which variable the caller must have.

    With ``last`` nobody else reads from the folder, and it goes at once.
    """
    lines, path = required(names), f"{FOLDER}/{file}"
    return lines and [
        "# Values that are not shown: from a folder that only its user can open, or else from whoever starts this by hand.",
        f"if [ -r {path} ]; then while IFS= read -r -d '' _pair; do export \"$_pair\"; done <{path}; fi",
        *([f"rm -rf {FOLDER}"] if last else []),
        *lines,
    ]


def required(names: Iterable[str]) -> list[str]:
    """Shell lines that export variables which the caller must have, and end the script with a sentence where one is missing. Raises
    ``InputError`` for a name that the shell would take for something else."""
    names = list(names)
    for name in names:
        check_name("env", name)
    return [f': "${{{name}?its value is not kept: export {name} first}}"; export {name}' for name in names]
