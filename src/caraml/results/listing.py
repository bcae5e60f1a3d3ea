"""What a campaign was asked for: the suite's text and points, who asked, where it runs; and which campaign of its suite it is.

``suites/NAME.json`` is the newest campaign of a suite as it is written, ``suites/NAME+HASH.json`` the newest of a variant by ``--set``, and
``...@ROUND.json`` an earlier one. The campaigns of a suite are numbered in the order in which they were asked for, variants included.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shlex
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line
from caraml.base.limits import LISTING, read_json
from caraml.system.variables import digest

_UNKNOWN = "another user, another machine or an earlier version"
_AGAIN = "run the suite again: what has a result is not measured twice"


def command_of(file: str, name: str) -> str:
    """What runs a suite, for hints; ``file`` is the path that it was read from, if it is none of the catalogue."""
    return f"caraml run {shlex.quote(file) if file.endswith('.toml') else name}"


class Listing(BaseModel):
    """A campaign: a suite as it was run into a store."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    title: str = ""
    file: str = Field("", description="name or path by which the suite was asked for")
    text: str = Field("", description="the suite file itself, with what it includes, so that it can be run again without it")
    settings: list[str] = Field([], description="`--set` values")
    system: str = "local"
    system_file: str = Field("", description="path of the description that was asked for, if by its file")
    launcher: str = "local"
    launchers: list[str] = Field([], description="those that it was told to use before, while it went on")
    machine: str = Field("", description="what computes, with its software")
    tags: list[str] = []
    comment: str = ""
    asked_at: str = ""
    imported: str = Field("", description="the archive that it came from: its programs are not run before somebody has seen them")
    points: list[tuple[str, str]] = Field([], description="key and label of each point, in order")
    round: int = Field(1, description="number of the campaign among those of its suite, from 1")
    again: bool = Field(False, description="whether it measured anew what had a result")
    before: dict[str, int] = Field({}, description="by key, the highest number of an attempt at a point when the campaign began")
    seal: str = Field("", description="what only this user's key makes of all this: who copies the folder of another has no such listing")

    @property
    def campaign(self) -> str:
        """Its name with what ``--set`` changed: ``quick+global_batch=16``; it stands for the newest round of this variant."""
        return "+".join([self.name, *self.settings])

    @property
    def stem(self) -> str:
        """Name of the file of the newest round of this variant, without its ending."""
        if not self.settings:
            return self.name
        return f"{self.name}+{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:8]}"

    def to_json(self) -> str:
        """The listing as its file has it."""
        return self.model_dump_json(indent=1)

    def sealed(self) -> Listing:
        """The listing with the seal of the user who runs this; with none where the user's key cannot be kept."""
        try:
            return self.model_copy(update={"seal": self._seal()})
        except EnvironmentUnfitError:
            return self

    @property
    def mine(self) -> bool:
        """Whether the user who runs this asked for it."""
        try:
            return hmac.compare_digest(self.seal.encode(), self._seal().encode())
        except EnvironmentUnfitError:
            return False

    def stranger(self) -> str:
        """Whose programs it names, if not those of the user who runs this: the archive that it came from, or somebody. Empty otherwise."""
        return self.imported or ("" if self.mine else _UNKNOWN)

    def _seal(self) -> str:
        return digest("listing", self.model_copy(update={"seal": ""}).model_dump_json(exclude_defaults=True))


def read_listing(path: Path) -> Listing:
    """Read a listing. Raises ``InputError`` for anything else."""
    try:
        listing = Listing.model_validate_json(read_json(path, LISTING))
    except (ValidationError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a list of a suite's points: {in_a_line(error)}", _AGAIN) from error
    if not all(key.isalnum() for key, _ in listing.points):
        raise InputError(f"{path}: not a list of keys", _AGAIN)
    return listing.model_copy(update={"name": suite_of(path.stem)})  # whatever it calls itself: it is asked for by the file's name


def suite_of(stem: str) -> str:
    """Name of the suite whose campaign a file of this name (without its ending) lists."""
    return stem.partition("@")[0].partition("+")[0]
