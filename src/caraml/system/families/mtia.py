"""Meta's MTIA accelerators. No public driver shows them: what torch says is all there is."""

from __future__ import annotations

from caraml.system.families.family import Family, no_driver

FAMILY = Family(
    kind="mtia",
    torch_type="mtia",
    title="MTIA",
    fix="install the torch of the machine's vendor",
    by_driver=no_driver,
    driven=lambda build: any("mtia" in module for module in build.plugins),
)
