"""Which accelerators a source reads: those that were asked for, or those that the environment leaves to this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from caraml.power.source import SourceUnavailable, UnknownDeviceError
from caraml.system.visible import UNTOLD, Masks, let_through, named


def select(
    present: Sequence[str], aliases: Mapping[str, Sequence[str]], wanted: Sequence[str] | None, masks: Masks = (), family: str = ""
) -> list[str]:
    """Ids out of ``present`` that were asked for, or that the environment leaves visible.

    Args:
        present: stable ids in the library's order.
        aliases: other spellings of each id besides its number: PCI address, ids of slices.
        wanted: explicit choice; ``["all"]`` ignores the environment; an id that does not exist is an error.
        masks: variables that narrow the devices where nothing was asked for.
        family: whose further variables hide devices in a way that sensors cannot follow (see ``UNTOLD``).

    Raises:
        SourceUnavailable: none was asked for, or some are hidden and nobody can tell which.
        UnknownDeviceError: one was asked for that does not exist.
    """
    if wanted is not None and not wanted:
        raise SourceUnavailable("none was asked for: what is measured uses none, or torch does not tell which")
    if wanted is not None and list(wanted) == ["all"]:
        return list(present)
    names = [(device, *aliases.get(device, ())) for device in present]
    if wanted is None:
        hiding = [name for name in UNTOLD.get(family, ()) if re.search(r"(^|[:,.])\s*\d", os.environ.get(name, ""))]
        if hiding and len(present) > 1:
            raise SourceUnavailable(f"{hiding[0]} hides some of {len(present)} devices, by numbers that their sensors do not have")
        return [present[place] for place in let_through(names, masks)]
    numbered = {place: (str(place), *some) for place, some in enumerate(names)}
    places = {word: named(word, numbered) for word in wanted}
    unknown = [word for word, place in places.items() if place is None]
    if unknown:
        raise UnknownDeviceError(unknown, [f"{i}: {device}" for i, device in enumerate(present)])
    return list(dict.fromkeys(present[place] for place in places.values() if place is not None))
