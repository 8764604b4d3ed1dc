"""The simulator: trains all runs of an experiment together."""

from fedgft.engine.history import History
from fedgft.engine.simulate import predict_proba, simulate
from fedgft.settings import Settings

__all__ = ["History", "Settings", "predict_proba", "simulate"]
