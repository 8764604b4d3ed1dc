"""What a site does to its sums before they leave it, as the server asked and its own rules allow.

A site sets limits in its node configuration that no server's configuration can lift:

| setting       | the site ...                                                                |
|---------------|-----------------------------------------------------------------------------|
| `max-epsilon` | takes part only where the statistics get at least that much noise,          |
| `max-delta`   | at a delta of at most this [1e-5],                                          |
| `ledger`      | a file: and only while all its runs together stay within that `max-epsilon` |
| `secure`      | gives its sums to secure sums, and to nothing else                          |
| `min-count`   | says nothing of a (label, group) with fewer rows                            |

It counts its own releases: a server that asks more often than was agreed gets an error, no sums.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedgft.errors import FedgftError
from fedgft.files import parsed, whole
from fedgft.flower.gather import plain
from fedgft.flower.private import Budget, epsilon_of, noised, without_small
from fedgft.flower.wire import Request
from fedgft.metrics import Tally

STATE = "fedgft.private"
MAX_DELTA = 1e-5
MOST_RHO = 1e4  # far beyond what any limit allows


def quiet(request: Request) -> bool:
    """Whether a reply shall hold nothing of the rows but their number: no loss, no accuracy."""
    return "privacy.epsilon" in request or "privacy.secure" in request


def agreed(request: Request, context: Context, site: str) -> Budget:
    """The server's wishes within the site's limits; whatever a site sends, it asks here first."""
    node, epsilon = context.node_config, _asked(request, "epsilon")
    delta = _asked(request, "delta") or 1e-6
    most, strictest = limits(context, site)
    if most is not None and (epsilon is None or epsilon > most):
        offered = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        raise FedgftError(
            f"site '{site}' takes part with epsilon of at most {most:g} (its max-epsilon); "
            f"the server offers {offered}"
        )
    if most is not None and delta > strictest:
        raise FedgftError(f"site '{site}': delta {delta:g} is above its max-delta, {strictest:g}")
    if node.get("secure") and "privacy.secure" not in request:
        raise FedgftError(f"site '{site}' takes part in secure sums only (its setting 'secure')")
    least = max(int(_asked(request, "min_count") or 0), int(node.get("min-count", 0)))
    return Budget(epsilon, delta, int(_asked(request, "releases") or 1), least)


def limits(context: Context, site: str) -> tuple[float | None, float]:
    """The site's own max-epsilon and max-delta. A limit that holds nothing back is a mistake, and
    whoever makes it is told before anything leaves the site: NaN is below no number, and a ledger
    without a limit would never be full."""
    node = context.node_config
    most, delta = node.get("max-epsilon"), node.get("max-delta", MAX_DELTA)
    if most is None and "ledger" in node:
        raise FedgftError(f"site '{site}': its setting 'ledger' counts up to max-epsilon, which is "
                          "not set: add max-epsilon=1.0, or another number")  # fmt: skip
    for name, value, top in (("max-epsilon", most, math.inf), ("max-delta", delta, 1.0)):
        right = isinstance(value, int | float) and value is not True and 0 < value < top
        if value is not None and not right:
            upto = "" if top == math.inf else f" below {top:g}"
            raise FedgftError(f"site '{site}': its setting {name} is {plain(value, 40)}: write a "
                              f"positive number{upto}")  # fmt: skip
    return None if most is None else float(most), float(delta)


def protected(tally: Tally, request: Request, context: Context, site: str) -> Tally:
    """What may leave the site of these sums."""
    budget = agreed(request, context, site)
    if context.node_config.get("secure") and "secure.stage" not in request:
        raise FedgftError(f"site '{site}' gives its sums to secure sums only")
    noise = budget.noise("hard" if _asked(request, "hard") else "soft")
    if noise is not None:
        held = _ledger_of_run(budget, context, site)
        enter(context, site, budget.rho(1) if held is None else budget.rho(1, counts=0))
        counts = None if held is None else np.reshape(held["counts"], tally.count.shape)
        tally = noised(tally, noise, counts)
        context.state[STATE] = ConfigRecord({
            "released": 1 + (0 if held is None else int(held["released"])),
            "terms": _terms(budget), "counts": [float(n) for n in tally.count.ravel()],
        })  # fmt: skip
    return without_small(tally, budget.min_count) if budget.min_count else tally


def examples(rows: int, request: Request, context: Context, sent: Tally | None) -> int:
    """The number of rows that a reply admits to. Beside noise or withheld cells the true one would
    give away what they hide, so then it is that of the counts that were sent."""
    least = _asked(request, "min_count") or context.node_config.get("min-count")
    if "privacy.epsilon" not in request and not least:
        return rows
    held: Any = context.state.get(STATE)
    if held is not None:
        return max(1, round(sum(float(n) for n in held["counts"])))
    return 1 if sent is None else max(1, round(float(sent.rows())))


def _ledger_of_run(budget: Budget, context: Context, site: str) -> Any:
    """What this run has released so far; its terms are those of its first release."""
    held: Any = context.state.get(STATE)
    if held is None:
        return None
    if list(held["terms"]) != _terms(budget):
        raise FedgftError(f"site '{site}': the server changed the privacy budget during a run")
    if int(held["released"]) >= budget.releases:
        raise FedgftError(
            f"site '{site}': its privacy budget (epsilon {budget.epsilon:g}, {budget.releases} "
            "releases) is spent; it sends no more statistics in this run"
        )
    return held


def enter(context: Context, site: str, rho: float) -> None:
    """Over all runs: into the site's own file, before anything is released. Several runs may enter
    at once, so the file is read where it is written: whoever writes it (`whole`) is alone."""
    if "ledger" not in context.node_config:
        return
    path = Path(str(context.node_config["ledger"])).expanduser()
    most, delta = limits(context, site)
    assert most is not None  # a ledger has a limit
    with whole(path, private=True) as part:
        spent = rho + _entered(path, site)
        after = epsilon_of(spent, delta)
        if after > most * (1 + 1e-6):
            raise FedgftError(
                f"site '{site}': with this release all its runs would come to epsilon {after:.3g} "
                f"at delta {delta:g}, above its max-epsilon, {most:g} (ledger {path.name})"
            )
        part.write_text(json.dumps({"rho": spent, "epsilon": after, "delta": delta}), "utf-8")


def _entered(path: Path, site: str) -> float:
    try:
        spent = parsed(path.read_text("utf-8"))["rho"] if path.exists() else 0.0
        if type(spent) not in (int, float) or not 0 <= spent < MOST_RHO:  # NaN would allow all
            raise ValueError(f"rho is {str(spent)[:40]}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedgftError(f"site '{site}': {path}: not a ledger ({error})") from None
    return spent


def _terms(budget: Budget) -> list[float]:
    return [float(budget.epsilon or 0), budget.delta, float(budget.releases)]


def _asked(request: Request, name: str) -> float | None:
    """NaN is neither above nor below a limit, so it would pass every one."""
    found = request.get(f"privacy.{name}")
    if found is None:
        return None
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise FedgftError(f"the server's privacy.{name} is {plain(found, 40)}: not a number")
    return float(found)
