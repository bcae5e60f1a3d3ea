"""What a campaign was asked for: the suite's text and points, who asked, where it runs."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from caraml.errors import InputError

_AGAIN = "run the suite again: what has a result is not measured twice"


class Listing(BaseModel):
    """A suite as it was run last into a store."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    title: str = ""
    file: str = Field("", description="name or path by which the suite was asked for")
    text: str = Field("", description="the suite file itself, so that it can be run again without it")
    settings: list[str] = Field([], description="`--set` values")
    system: str = "local"
    launcher: str = "local"
    tags: list[str] = []
    comment: str = ""
    asked_at: str = ""
    points: list[tuple[str, str]] = Field([], description="key and label of each point, in order")

    def to_json(self) -> str:
        """The listing as its file has it."""
        return self.model_dump_json(indent=1)


def read_listing(path: Path) -> Listing:
    """Read a listing, or the bare list of keys that CARAML wrote before it. Raises ``InputError`` for anything else."""
    content = path.read_bytes()
    try:
        if content.lstrip()[:1] == b"[":
            listing = Listing(name=path.stem, points=[(key, "") for key in TypeAdapter(list[str]).validate_json(content)])
        else:
            listing = Listing.model_validate_json(content)
    except (ValidationError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a list of a suite's points: {error}", _AGAIN) from error
    if not all(key.isalnum() for key, _ in listing.points):
        raise InputError(f"{path}: not a list of keys", _AGAIN)
    return listing
