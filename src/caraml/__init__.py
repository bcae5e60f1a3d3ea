"""CARAML: Compact, Automated, Reproducible Assessment of Machine Learning.

``caraml.measure`` measures a training loop of your own; see docs/api.md. ``caraml.load`` reads results; see docs/python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caraml.api import load
    from caraml.suite.model import Measure as Policy
    from caraml.worker.measure import measure

__version__ = "0.1.0"
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
