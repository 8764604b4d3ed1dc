"""Tables, public data sets, and the ways to cut them into federations."""

from fedgft.data.celeba import load_celeba
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.encoding import Encoder
from fedgft.data.fetching import Progress
from fedgft.data.images import load_images
from fedgft.data.roles import Roles
from fedgft.data.sources import SOURCES, load, load_adult, load_compas, prepared_frame
from fedgft.data.table import from_frame, load_table, read_frame

__all__ = [
    "SOURCES",
    "Dataset",
    "Encoder",
    "Federation",
    "Progress",
    "Roles",
    "from_frame",
    "load",
    "load_adult",
    "load_celeba",
    "load_compas",
    "load_images",
    "load_table",
    "prepared_frame",
    "read_frame",
]
