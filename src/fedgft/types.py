"""The array shapes of this library, each named once.

Letters: n rows, d features, c classes, g groups, v conditions of a metric, r runs,
u units (one client of one run), p parameters. An array may be numpy's or torch's:
everything that carries these names is written in operations that both of them know.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

Probs = Float[Any, "n c"]  # f(x): one column per class
Labels = Float[Any, "n c"]  # Y, one-hot
Groups = Float[Any, "n g"]  # A, one-hot; a row of zeros where it is not recorded
PerSample = Float[Any, "n 2 v g"]  # numerators, then denominators
Statistics = Float[Any, "*batch 2 v g"]  # their mean over rows (and over clients)
Rates = Float[Any, "*batch v g"]
Value = Float[Any, "*batch"]
Price = Float[Any, "*batch c k c"]  # label, group (the last one: not recorded), class
Weights = Float[Any, "*batch c k"]  # label, group
Block = Float[Any, "u p"]  # one flat parameter vector per unit
Column = Shaped[np.ndarray, "n"]
Index = Int[np.ndarray, "n"]


def namespace(array: Any) -> ModuleType:
    """Return the module, NumPy or torch, whose functions take this array."""
    return np if isinstance(array, np.ndarray) else import_module("torch")
