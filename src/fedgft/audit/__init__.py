"""Measure a model's fairness over data that cannot be pooled: sums leave a site, rows do not."""

from importlib import import_module
from typing import Any

# Names are imported on first use: a study needs the thresholds, and not the readers of tables.
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
