"""A site trains on its own rows and sends parameters and sums, never a row."""

from fairapp.task import make
from fedgft.flower.client_app import make_client_app

app = make_client_app(make)
