"""What a site does to its sums before they leave it, as the server asked and its own rules allow.

A site may set limits in its node configuration that no server can lift: `max-epsilon` and
`max-delta` (without at least that much noise it sends nothing) and `min-count`. It counts its own
releases: a server that asks more often than was agreed gets an error, and no sums.
"""

from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedgft.flower.private import Budget, noised, without_small
from fedgft.flower.wire import Request
from fedgft.metrics import Tally
from fedgft.types import FedgftError

STATE = "fedgft.private"


def quiet(request: Request) -> bool:
    """Whether a reply shall hold nothing of the rows but their number: no loss, no accuracy."""
    return "privacy.epsilon" in request or "privacy.secure" in request


def protected(tally: Tally, request: Request, context: Context, site: str) -> Tally:
    budget = agreed(request, context, site)
    noise = budget.noise("hard" if _asked(request, "hard") else "soft")
    if noise is not None:
        held: Any = context.state.get(STATE)
        released = 0 if held is None else int(held["released"])
        if held is not None and list(held["terms"]) != _terms(budget):
            raise FedgftError(f"site '{site}': the server changed the privacy budget during a run")
        if released >= budget.releases:
            raise FedgftError(
                f"site '{site}': its privacy budget (epsilon {budget.epsilon:g}, {budget.releases} "
                "releases) is spent; it sends no more statistics in this run"
            )
        counts = None if held is None else np.reshape(held["counts"], tally.count.shape)
        tally = noised(tally, noise, counts)
        context.state[STATE] = ConfigRecord({
            "released": released + 1, "terms": _terms(budget),
            "counts": [float(n) for n in tally.count.ravel()],
        })  # fmt: skip
    return without_small(tally, budget.min_count) if budget.min_count else tally


def agreed(request: Request, context: Context, site: str) -> Budget:
    """The server's wishes within the site's limits."""
    epsilon, own = _asked(request, "epsilon"), context.node_config.get("max-epsilon")
    if own is not None and (epsilon is None or epsilon > float(own)):
        offered = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        raise FedgftError(
            f"site '{site}' sends statistics with epsilon of at most {float(own):g} (its "
            f"max-epsilon); the server offers {offered}"
        )
    delta, strictest = (
        _asked(request, "delta") or 1e-6,
        float(context.node_config.get("max-delta", 1e-5)),
    )
    if own is not None and delta > strictest:
        raise FedgftError(f"site '{site}': delta {delta:g} is above its max-delta, {strictest:g}")
    least = max(
        int(_asked(request, "min_count") or 0), int(context.node_config.get("min-count", 0))
    )
    return Budget(epsilon, delta, int(_asked(request, "releases") or 1), least)


def _terms(budget: Budget) -> list[float]:
    return [float(budget.epsilon or 0), budget.delta, float(budget.releases)]


def _asked(request: Request, name: str) -> float | None:
    found = request.get(f"privacy.{name}")
    return None if found is None else float(found)
