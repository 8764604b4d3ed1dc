"""Tables, public data sets, and the ways to cut them into federations.

Names are imported on first use: training on arrays needs no package that reads tables.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "SOURCES": "public",
    "Dataset": "dataset",
    "Encoder": "encode",
    "Federation": "dataset",
    "Progress": "public",
    "Roles": "table",
    "from_frame": "table",
    "load": "public",
    "load_celeba": "images",
    "load_images": "images",
    "load_table": "table",
    "prepared_frame": "public",
    "read_frame": "table",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
