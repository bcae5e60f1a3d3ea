"""Which accelerators belong to this process: the masks that schedulers set, in all their spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caraml.power.source import UnknownDeviceError
from caraml.system.files import names_device


def select(present: Sequence[str], aliases: Mapping[str, Sequence[str]], wanted: Sequence[str] | None, mask: str | None) -> list[str]:
    """Ids out of ``present`` that were asked for, or that the environment's ``mask`` leaves visible.

    Args:
        present: stable ids in the library's order.
        aliases: other spellings of each id: index, PCI address, ids of slices.
        wanted: explicit choice; ``["all"]`` ignores the mask; an id that does not exist is an error.
        mask: comma-separated list as in ``CUDA_VISIBLE_DEVICES``; ``None`` means no mask. As the runtimes do, the list
            ends at the first entry that does not exist, and an empty list hides everything.

    An index in a mask counts in the library's order, which is the runtime's order where all devices are of one model.
    """
    if wanted is not None and list(wanted) == ["all"]:
        return list(present)
    if wanted is not None:
        matches = {word: _match(word, present, aliases) for word in wanted}
        unknown = [word for word, match in matches.items() if match is None]
        if unknown:
            raise UnknownDeviceError(unknown, [f"{i}: {device}" for i, device in enumerate(present)])
        return list(dict.fromkeys(match for match in matches.values() if match is not None))
    if mask is None:
        return list(present)
    visible = []
    for word in mask.split(","):
        match = _match(word.strip(), present, aliases)
        if match is None:
            break
        visible.append(match)
    return list(dict.fromkeys(visible))


def _match(word: str, present: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> str | None:
    """The id that ``word`` names: exactly, by PCI address in any spelling, or as the beginning of one UUID only."""
    low = word.lower()
    for device in present:
        if names_device(word, *aliases[device]):
            return device
    if low.startswith(("gpu-", "mig-")) and len(low) > 6:
        found = {device for device in present if any(alias.lower().startswith(low) for alias in aliases[device])}
        return found.pop() if len(found) == 1 else None
    return None
