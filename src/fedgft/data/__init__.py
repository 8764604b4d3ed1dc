"""Tables, public data sets, and the ways to cut them into federations."""

from fedgft.data.dataset import Dataset, Federation
from fedgft.data.encode import Encoder
from fedgft.data.images import load_celeba, load_images
from fedgft.data.public import SOURCES, Progress, load, prepared_frame
from fedgft.data.table import Roles, from_frame, load_table, read_frame

__all__ = [
    "SOURCES",
    "Dataset",
    "Encoder",
    "Federation",
    "Progress",
    "Roles",
    "from_frame",
    "load",
    "load_celeba",
    "load_images",
    "load_table",
    "prepared_frame",
    "read_frame",
]
