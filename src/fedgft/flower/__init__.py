"""fedgft on Flower: strategies for the server, handlers for the clients.

    from flwr.serverapp.strategy import FedAvg
    from fedgft.flower import FedGFT

    strategy = FedGFT(FedAvg(), metric="sp", target=0.02)

Needs the extra: pip install 'fedgft[flower]'.
"""

from typing import Any

from fedgft.errors import import_extra, import_on_use

# Names are imported on first use: every message starts a client process, which does not need the
# server's modules.
_MODULES = {
    "BoostedTrees": "fedgft.flower.boosted_trees",
    "Budget": "fedgft.privacy.noise",
    "FairFed": "fedgft.flower.strategy",
    "FairStrategy": "fedgft.flower.strategy",
    "FedGFT": "fedgft.flower.strategy",
    "SiteLimits": "fedgft.metrics.robust_aggregation",
    "LinearModel": "fedgft.flower.client",
    "MeasuredStrategy": "fedgft.flower.strategy",
    "ServerPenalty": "fedgft.flower.client",
    "Site": "fedgft.flower.client",
    "empty_booster": "fedgft.flower.boosters",
    "penalty_of": "fedgft.flower.client",
    "register": "fedgft.flower.client_app",
    "statistics": "fedgft.flower.client_app",
}
__all__ = list(_MODULES)
_import_name = import_on_use(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import_extra("flwr", "fedgft.flower")
    return _import_name(name)
