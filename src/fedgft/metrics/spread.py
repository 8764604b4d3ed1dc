"""How the rates of several groups become one number to push down, and its gradient.

| spread      | F, for each condition                                     | with two groups     |
|-------------|-----------------------------------------------------------|---------------------|
| `range`     | highest rate minus lowest: what is reported everywhere    | the gap             |
| `deviation` | largest distance of a group from the rate of all the rows | 1/2 to 1 of the gap |
| `variance`  | sqrt(2 sum over groups of (rate - their mean)^2)          | the gap             |

The first two are the largest over all conditions, and their gradient knows one or two groups at a
time: with many groups it jumps from pair to pair. The third adds up the squares, so every group is
pulled at once, and with J = F^2 it has no corner anywhere.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.types import Rates, Statistics, Value

Spread = Literal["range", "deviation", "variance"]
SPREADS: tuple[Spread, ...] = ("range", "deviation", "variance")


class Slopes(NamedTuple):
    """F, and its derivative by each group's rate and by the rate of all rows together."""

    value: Value
    rates: Rates
    overall: Any  # (..., v, 1)


def spread_gradient(
    metric: Metric, statistics: Statistics, spread: str
) -> tuple[Value, Statistics]:
    """Return F and dF/dS for statistics (..., 2, v, g); `spread` is one of `SPREADS`."""
    if spread == "range":
        return metric.readout(statistics), metric.gradient(statistics)
    pooled = statistics.sum(-1, keepdims=True)
    rates = metric.rates(statistics)
    overall = metric.rates(pooled)
    slopes = _variance(rates) if spread == "variance" else _deviation(rates, overall)
    own = metric.through_rates(slopes.rates, statistics)
    return slopes.value, own + metric.through_rates(slopes.overall, pooled)


def _variance(rates: Rates) -> Slopes:
    apart = rates - rates.mean(-1, keepdims=True)
    value = np.sqrt(2 * (apart**2).sum((-2, -1)))
    safe = np.where(value > 0, value, 1.0)[..., None, None]
    return Slopes(value, 2 * apart / safe, np.zeros_like(rates[..., :1]))


def _deviation(rates: Rates, overall: Any) -> Slopes:
    apart = rates - overall
    flat = np.abs(apart).reshape(*apart.shape[:-2], -1)
    at = np.argmax(flat, axis=-1)[..., None]
    widest = (np.arange(flat.shape[-1]) == at).reshape(apart.shape)
    slope = widest * np.sign(apart)
    return Slopes(flat.max(-1), slope, -slope.sum(-1, keepdims=True))
