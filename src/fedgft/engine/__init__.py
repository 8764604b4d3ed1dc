"""The simulator."""

from fedgft.engine.settings import Settings
from fedgft.engine.simulate import History, simulate

__all__ = ["History", "Settings", "simulate"]
