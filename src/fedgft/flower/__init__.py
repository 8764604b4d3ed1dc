"""fedgft on Flower: a strategy wrapper for the server, handlers for the clients.

    from flwr.serverapp.strategy import FedAvg
    from fedgft.flower import FedGFT

    strategy = FedGFT(FedAvg(), metric="sp", target=0.02)

Needs the extra: pip install 'fedgft[flower]'.
"""

from importlib import import_module
from typing import Any

from fedgft.errors import FedgftError

# One of two sides is imported at a time: a client's process starts with every message.
_HOMES = {
    "Budget": "private",
    "FairFed": "methods",
    "FairStrategy": "strategy",
    "FedGFT": "methods",
    "Limits": "terms",
    "Measured": "methods",
    "ServerPenalty": "client",
    "Site": "site",
    "penalty_of": "client",
    "register": "client",
    "statistics": "client",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise FedgftError("this needs Flower: pip install 'fedgft[flower]'") from error
