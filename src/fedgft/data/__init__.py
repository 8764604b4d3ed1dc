"""Tables, public data sets, and the ways to cut them into federations.

Names are imported on first use: training on arrays needs no package that reads tables.
"""

from fedgft.errors import import_on_use

_MODULES = {
    "SOURCES": "fedgft.data.public",
    "Dataset": "fedgft.data.dataset",
    "Encoder": "fedgft.data.encode",
    "Federation": "fedgft.data.dataset",
    "Progress": "fedgft.data.remote_files",
    "Roles": "fedgft.data.table",
    "from_frame": "fedgft.data.table",
    "inject_bias": "fedgft.data.injected_bias",
    "load": "fedgft.data.public",
    "load_celeba": "fedgft.data.images",
    "load_images": "fedgft.data.images",
    "load_table": "fedgft.data.table",
    "load_tables": "fedgft.data.table",
    "make_loans": "fedgft.data.generated",
    "prepared_frame": "fedgft.data.public",
    "read_frame": "fedgft.data.table",
    "synthetic": "fedgft.data.generated",
}
__all__ = list(_MODULES)
__getattr__ = import_on_use(__name__, _MODULES)
