"""Which accelerators a source reads: those that were asked for, or those that the environment leaves to this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caraml.power.source import UnknownDeviceError
from caraml.system.visible import Masks, let_through, named


def select(present: Sequence[str], aliases: Mapping[str, Sequence[str]], wanted: Sequence[str] | None, masks: Masks = ()) -> list[str]:
    """Ids out of ``present`` that were asked for, or that the environment leaves visible.

    Args:
        present: stable ids in the library's order.
        aliases: other spellings of each id besides its number: PCI address, ids of slices.
        wanted: explicit choice; ``["all"]`` ignores the environment; an id that does not exist is an error.
        masks: variables that narrow the devices where nothing was asked for.
    """
    if wanted is not None and list(wanted) == ["all"]:
        return list(present)
    names = [(device, *aliases.get(device, ())) for device in present]
    if wanted is None:
        return [present[place] for place in let_through(names, masks)]
    numbered = {place: (str(place), *some) for place, some in enumerate(names)}
    places = {word: named(word, numbered) for word in wanted}
    unknown = [word for word, place in places.items() if place is None]
    if unknown:
        raise UnknownDeviceError(unknown, [f"{i}: {device}" for i, device in enumerate(present)])
    return list(dict.fromkeys(present[place] for place in places.values() if place is not None))
