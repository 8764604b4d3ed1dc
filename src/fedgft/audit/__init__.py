"""Measure a model's fairness over data that cannot be pooled: sums leave a site, rows do not."""

from importlib import import_module
from typing import Any

# Each name is imported on first use, so code that needs only one module does not load the others
# (a study uses the thresholds but does not need the table readers).
_MODULES = {
    "Audit": "audit.report",
    "SiteSums": "sums",
    "audit": "audit.report",
    "measure": "audit.measurement",
    "measure_file": "audit.measurement",
    "merge": "sums",
    "read_sums": "audit.site_file",
    "write_sums": "audit.site_file",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedgft.{_MODULES[name]}"), name)
