"""fedgft on Flower: strategies for the server, handlers for the clients.

    from flwr.serverapp.strategy import FedAvg
    from fedgft.flower import FedGFT

    strategy = FedGFT(FedAvg(), metric="sp", target=0.02)

Needs the extra: pip install 'fedgft[flower]'.
"""

from importlib import import_module
from typing import Any

from fedgft.errors import import_extra

# Names are imported on first use: every message starts a client process, which does not need the
# server's modules.
_MODULES = {
    "Budget": "privacy.noise",
    "FairFed": "flower.strategy",
    "FairStrategy": "flower.strategy",
    "FedGFT": "flower.strategy",
    "Limits": "flower.aggregator",
    "LinearModel": "flower.client",
    "Measured": "flower.strategy",
    "ServerPenalty": "flower.client",
    "Site": "flower.client",
    "penalty_of": "flower.client",
    "register": "flower.client_app",
    "statistics": "flower.client_app",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_extra("flwr", "fedgft.flower")
    return getattr(import_module(f"fedgft.{_MODULES[name]}"), name)
