"""Accelerators of any other plug-in of torch: a renamed PrivateUse1 backend, whose name is the plug-in's own."""

from __future__ import annotations

from caraml.system.families.family import Family, no_driver

FAMILY = Family(
    kind="other",
    torch_type="",
    title="accelerator of a plug-in",
    fix="install the vendor's plug-in for torch",
    by_driver=no_driver,
    driven=lambda build: bool(build.plugins),
)
