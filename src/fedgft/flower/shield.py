"""What a site does to its sums before they leave it, as the server asked and its own rules allow.

A site sets limits in its node configuration that no server's configuration can lift:

| setting       | the site ...                                                                |
|---------------|-----------------------------------------------------------------------------|
| `max-epsilon` | takes part only where the statistics get at least that much noise,          |
| `max-delta`   | at a delta of at most this [1e-5],                                          |
| `ledger`      | a file: and only while all its runs together stay within that `max-epsilon` |
| `secure`      | gives its sums to secure sums, and to nothing else                          |
| `peers`       | a folder of public keys: adds up its sums with these sites and no others    |
| `min-count`   | says nothing of a (label, group) with fewer rows                            |

It counts its own releases, in a file that outlives its process (`ledger`): a server that asks more
often than was agreed gets an error, no sums; one that asks again about the same model gets the same
numbers again, which tell nothing new.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Context

from fedgft.errors import FedgftError
from fedgft.flower.checks import Noise
from fedgft.flower.gather import plain
from fedgft.flower.ledger import Ledger, RunRecord, ledger_file, open_ledger, read_ledger
from fedgft.flower.private import (
    Budget,
    discrete_gaussian,
    gaussian,
    noised,
    rows_noise,
    share_of,
    tally_from,
    total_rho,
    values_of,
    without_small,
)
from fedgft.flower.wire import Request
from fedgft.metrics import Kind, Tally

MAX_DELTA = 1e-5
UNIT = 2**20  # numbers travel in secure sums as whole multiples of 1 / UNIT


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


def protected(tally: Tally, request: Request, context: Context, site: str, model: str) -> Tally:
    """What may leave the site of these sums, those of the model with this digest."""
    budget = agreed(request, context, site)
    if context.node_config.get("secure"):
        raise FedgftError(f"site '{site}' gives its sums to secure sums only")
    kind = _kind(request)
    noise = budget.noise(kind)
    if noise is not None:
        with open_ledger(context, site) as ledger:
            run = ledger.run(context.run_id, _terms(budget, secure=False))
            sent = _released(tally, budget, noise, run, f"{kind} {model}", ledger, context)
        tally = sent
    return without_small(tally, budget.min_count) if budget.min_count else tally


def _released(
    tally: Tally,
    budget: Budget,
    noise: Noise,
    run: RunRecord,
    name: str,
    ledger: Ledger,
    context: Context,
) -> Tally:
    """The noisy sums of this model: those that were sent before, or new ones, on the account."""
    shape = values_of(tally, noise.kind).shape
    if name not in run.answers:
        _check_left(run, budget, ledger.site)
        new = run.counts is None
        charge(ledger, context, budget.rho(1, counts=int(new)))
        counts = None if new else _shaped(run.counts, tally.count.shape, ledger.site)
        made = noised(tally, noise, counts)
        run.released += 1
        run.counts = _listed(made.count)
        run.answers[name] = _listed(values_of(made, noise.kind))
    counts = _shaped(run.counts, tally.count.shape, ledger.site)
    return tally_from(counts, _shaped(run.answers[name], shape, ledger.site), noise.kind)


def _shaped(values: list[float] | None, shape: tuple[int, ...], site: str) -> np.ndarray:
    """What was released, as a table."""
    found = np.array(values or [], dtype=float)
    if found.size != math.prod(shape):
        raise FedgftError(f"site '{site}': its classes or groups changed during a run")
    return found.reshape(shape)


def _check_left(run: RunRecord, budget: Budget, site: str) -> None:
    if run.released >= budget.releases:
        raise FedgftError(
            f"site '{site}': its privacy budget (epsilon {budget.epsilon:g}, {budget.releases} "
            "releases) is spent; it sends no more statistics in this run"
        )


def charge(ledger: Ledger, context: Context, rho: float) -> None:
    """On the site's account, against the limit for all its runs where it keeps one."""
    most, delta = limits(context, ledger.site)
    file = ledger_file(context, ledger.site).name
    limit = most if "ledger" in context.node_config else None
    ledger.charge(rho, limit=limit, delta=delta, file=file)


@dataclass(frozen=True)
class Summand:
    """What a site brings to a secure sum, in whole multiples of 1 / UNIT: its counts, and the sums
    of one model. Under noise only the table that was asked for, without the first class."""

    counts: np.ndarray
    values: np.ndarray


def summand(
    tally: Tally,
    request: Request,
    context: Context,
    site: str,
    *,
    model: str,
    cohort: str,
    clients: int,
) -> Summand:
    """This site's part of the sum of so many clients, with its share of the noise. A second
    question about one model gets the same numbers; the counts are those of the first sum, and
    `cohort`, which names the clients, is that of the first sum too."""
    budget = agreed(request, context, site)
    kind = _kind(request)
    noise = budget.noise(kind)
    if noise is not None and budget.min_count:
        raise FedgftError(
            "min-count withholds cells by their true counts, which noise must not show: drop one"
        )
    if noise is None and budget.min_count:
        tally = without_small(tally, budget.min_count)
    with open_ledger(context, site) as ledger:
        run = ledger.run(context.run_id, _terms(budget, secure=True))
        name = f"{'both' if noise is None else kind} {model}"
        if run.cohort not in (None, cohort):
            raise FedgftError("this run has a sum over other sites already")
        run.cohort = cohort
        if name not in run.answers:
            if noise is not None:
                _check_left(run, budget, site)
                charge(ledger, context, budget.rho(1, counts=int(run.rows is None)))
                _draw_rows(run, noise, float(tally.rows()))
                run.released += 1
            share = Noise(kind, 0.0, 0.0) if noise is None else share_of(noise, clients)
            if run.counts is None:
                run.counts = _listed(_shared(tally.count, share.count))
            parts = (tally.score, tally.decision) if noise is None else (values_of(tally, kind),)
            exact = np.concatenate([part.ravel() for part in parts])
            run.answers[name] = _listed(_shared(exact, share.value))
        return Summand(*(np.array(part, np.int64) for part in (run.counts, run.answers[name])))


def _shared(exact: np.ndarray, deviation: float) -> np.ndarray:
    """In units, with a share of the noise."""
    units = np.rint(exact.ravel() * UNIT).astype(np.int64)
    return units + discrete_gaussian(units.size, deviation * UNIT) if deviation else units


def declared_rows(rows: int, request: Request, context: Context, site: str) -> int:
    """The number of rows that a site of a secure sum declares, the same for the whole run. With
    noise it is noisy, and half of the budget for counts."""
    budget = agreed(request, context, site)
    noise = budget.noise(_kind(request))
    with open_ledger(context, site) as ledger:
        run = ledger.run(context.run_id, _terms(budget, secure=True))
        if run.rows is None:
            if noise is None:
                run.rows = float(rows)
            else:
                charge(ledger, context, budget.rho(0))
                _draw_rows(run, noise, float(rows))
        return max(1, round(run.rows or 0.0))


def _draw_rows(run: RunRecord, noise: Noise, rows: float) -> None:
    if run.rows is None:
        run.rows = float(gaussian(np.array([rows]), rows_noise(noise))[0])


def report_once(
    made: Callable[[], str], budget: Budget, context: Context, site: str, model: str
) -> str:
    """The report on held-out rows. With noise there is one a run: asked again about the same
    model, the same text; about another, an error."""
    if budget.epsilon is None:
        return made()
    with open_ledger(context, site) as ledger:
        run = ledger.run(context.run_id, _terms(budget, secure=False))
        if run.reports and not run.reports.get(model):
            raise FedgftError(f"site '{site}': the budget of its report is spent")
        if not run.reports:
            charge(ledger, context, total_rho(budget.epsilon, budget.delta))
            run.reports[model] = made()
        return run.reports[model]


def examples(
    rows: int, request: Request, context: Context, site: str, sent: Tally | None = None
) -> int:
    """The number of rows that a reply admits to. Beside noise or withheld cells the true one would
    give away what they hide, so then it is that of the counts that were sent."""
    least = _asked(request, "min_count") or context.node_config.get("min-count")
    noisy = "privacy.epsilon" in request
    if noisy and "privacy.secure" in request:
        return declared_rows(rows, request, context, site)
    if not noisy and not least:
        return rows
    if noisy:
        runs = read_ledger(ledger_file(context, site), site).runs
        held = runs.get(f"{context.run_id} {site}")
        if held is not None and held.counts is not None:
            return max(1, round(sum(held.counts)))
    return 1 if sent is None else max(1, round(float(sent.rows())))


def _terms(budget: Budget, *, secure: bool) -> list[float]:
    return [float(budget.epsilon or 0), budget.delta, float(budget.releases), float(secure)]


def _kind(request: Request) -> Kind:
    return "hard" if _asked(request, "hard") else "soft"


def _listed(values: np.ndarray) -> list[float]:
    """Whole numbers stay whole: they may be beyond what a float counts exactly."""
    return values.ravel().tolist()


def _asked(request: Request, name: str) -> float | None:
    """NaN is neither above nor below a limit, so it would pass every one."""
    found = request.get(f"privacy.{name}")
    if found is None:
        return None
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise FedgftError(f"the server's privacy.{name} is {plain(found, 40)}: not a number")
    return float(found)
