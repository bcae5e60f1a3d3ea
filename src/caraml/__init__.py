"""CARAML: Compact, Automated, Reproducible Assessment of Machine Learning.

``caraml.measure`` measures a training loop of your own; see docs/api.md. ``caraml.load`` reads results; see docs/python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caraml.api import load
    from caraml.suite.model import Policy
    from caraml.worker.measure import measure

__version__ = "0.1.0"
METHOD_VERSION = 2
"""Version of the rules by which time and energy are measured. It changes when the same run, or the same readings, would give another
number; results of different versions are never taken for the same work. 1: version 0.1.0. 2: the energy of every node counts, the window
begins and ends on all ranks together, and an energy whose sensor went silent is not replaced by that of another boundary."""
__all__ = ["Policy", "__version__", "load", "measure"]


def __getattr__(name: str) -> Any:
    """The public names on demand: ``measure`` needs torch, and ``import caraml`` must not."""
    if name == "measure":
        try:
            from caraml.worker.measure import measure
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from caraml.base.errors import EnvironmentUnfitError
            from caraml.workloads import how_to_install

            raise EnvironmentUnfitError("caraml.measure needs torch, not installed here", how_to_install(["torch"])) from error
        return measure
    if name == "load":
        from caraml.api import load

        return load
    if name == "Policy":
        from caraml.suite.model import policy

        return policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
