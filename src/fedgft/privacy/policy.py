"""A site's privacy policy: what a site may send, given the server's request and its own limits.

A site sets limits in its node configuration, and no server can override them:

| setting       | effect                                                                        |
|---------------|-------------------------------------------------------------------------------|
| `max-epsilon` | the site takes part only if the run's epsilon is at most this number          |
| `max-delta`   | with `max-epsilon`: and only if the delta is at most this number [1e-5]       |
| `ledger`      | a file; all runs of the site together must not cost more than `max-epsilon`   |
| `secure`      | the site sends its sums only within secure sums                               |
| `peers`       | a folder of public keys; the site joins secure sums only with these sites     |
| `min-count`   | the site reports nothing about a (label, group) with fewer rows than this     |

A site counts its own releases in a file that is kept when its process ends
(`fedgft.privacy.ledger`). A server that asks more often than agreed gets an error. A server that
asks again about the same model gets the same numbers, which reveal nothing new.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.errors import Kind as ErrorKind
from fedgft.formatting import one_line
from fedgft.metrics import Kind
from fedgft.privacy.ledger import Ledger, RunRecord, SiteContext, open_ledger, read_ledger
from fedgft.privacy.noise import (
    Budget,
    Noise,
    draw_discrete_gaussian,
    drop_small_cells,
    epsilon_of,
    total_rho,
)
from fedgft.sums import Sums

MAX_DELTA = 1e-5
UNIT = 2**20  # numbers travel in secure sums as integer multiples of 1 / UNIT


@dataclass(frozen=True)
class SitePolicy:
    """What a site may send in reply to one request.

    Parameters
    ----------
    context
        Flower's context: the run and the node's configuration with the site's limits.
    site
        Name of the site.
    request
        The server's request; its privacy settings are under ``privacy.``.
    """

    context: SiteContext
    site: str
    request: Mapping[str, Any] = field(default_factory=dict)

    # Terms

    def limits(self) -> tuple[float | None, float]:
        """Return the site's own max-epsilon (None: no limit) and max-delta.

        A limit that would have no effect is an error, which is raised before anything leaves the
        site. Examples are NaN, which no number exceeds, and a ledger without a max-epsilon.
        """
        config = self.context.node_config
        epsilon = config.get("max-epsilon")
        delta = config.get("max-delta", MAX_DELTA)
        if epsilon is None and "ledger" in config:
            remedy = "which is not set: add max-epsilon=1.0, or another number"
            raise self._error(f"its setting 'ledger' counts up to max-epsilon, {remedy}", "missing")
        for name, value, top in (("max-epsilon", epsilon, math.inf), ("max-delta", delta, 1.0)):
            valid = isinstance(value, int | float) and value is not True and 0 < value < top
            if value is not None and not valid:
                wanted = (
                    "a positive number" if top == math.inf else f"a positive number below {top:g}"
                )
                raise self._error(f"its setting {name} is {one_line(value, 40)}: write {wanted}")
        return None if epsilon is None else float(epsilon), float(delta)

    def agree(self) -> Budget:
        """Return the requested budget, or raise if the site's limits do not allow it."""
        config = self.context.node_config
        epsilon = self._setting("epsilon")
        delta = self._setting("delta") or 1e-6
        max_epsilon, max_delta = self.limits()
        if max_epsilon is not None and (epsilon is None or epsilon > max_epsilon):
            offered = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
            limit = f"an epsilon of at most {max_epsilon:g} (max-epsilon)"
            raise self._error(f"it takes part with {limit}; the server offers {offered}")
        if max_epsilon is not None and delta > max_delta:
            raise self._error(f"delta {delta:g} is above its max-delta, {max_delta:g}")
        if config.get("secure") and "privacy.secure" not in self.request:
            raise self._error("it takes part in secure sums only (its setting 'secure')")
        min_count = max(int(self._setting("min_count") or 0), int(config.get("min-count", 0)))
        return Budget(epsilon, delta, int(self._setting("releases") or 1), min_count)

    def hides_metrics(self) -> bool:
        """Return whether a reply must omit loss and accuracy and state only the number of rows."""
        return "privacy.epsilon" in self.request or "privacy.secure" in self.request

    # Releases

    def release(self, sums: Sums, model: str) -> Sums:
        """Return the sums that may leave the site.

        `sums` are the exact sums of a model, and `model` is the digest of this model.
        """
        budget = self.agree()
        if self.context.node_config.get("secure"):
            raise self._error("it gives its sums to secure sums only")
        noise = budget.noise(self._kind)
        if noise is not None:
            sums = self._release_noisy(sums, budget, noise, model)
        return drop_small_cells(sums, budget.min_count) if budget.min_count else sums

    def _release_noisy(self, sums: Sums, budget: Budget, noise: Noise, model: str) -> Sums:
        """Return the noisy sums of this model.

        If they were released before, the same numbers are returned. Otherwise new noise is drawn,
        and its cost is charged to the ledger.
        """
        name = f"{noise.kind} {model}"
        with open_ledger(self.context, self.site) as ledger:
            run = ledger.run(self.context.run_id, _terms(budget, secure=False))
            if name not in run.answers:
                first = run.counts is None
                self._charge_release(ledger, run, budget, with_counts=first)
                counts = None if first else self._reshape(run.counts, sums.count.shape)
                noisy = noise.add(sums, counts)
                run.counts = noisy.count.ravel().tolist()
                run.answers[name] = noise.select(noisy).ravel().tolist()
            counts = self._reshape(run.counts, sums.count.shape)
            values = self._reshape(run.answers[name], noise.select(sums).shape)
        return noise.rebuild(counts, values)

    def make_summand(
        self, sums: Sums, *, model: str, cohort: str, clients: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return this site's part of a secure sum, with its share of the noise.

        A second request about the same model gets the same numbers. The counts are those of the
        run's first secure sum. `cohort` identifies the set of sites in the sum and must be the same
        in the whole run; `clients` is their number.

        Returns
        -------
        counts, values
            The counts, and the sums of the model, as flat integer multiples of 1 / UNIT. Without
            noise, `values` holds the sums of scores and of decisions. With noise, it holds only the
            requested one of the two, without the first class.
        """
        budget = self.agree()
        noise = budget.noise(self._kind)
        if noise is not None and budget.min_count:
            problem = "min-count withholds cells by their true counts, which noise must not show"
            raise FedgftError(f"{problem}: drop one of the two", kind="conflict")
        sums = drop_small_cells(sums, budget.min_count)
        name = f"{'both' if noise is None else noise.kind} {model}"
        with open_ledger(self.context, self.site) as ledger:
            run = ledger.run(self.context.run_id, _terms(budget, secure=True))
            if run.cohort not in (None, cohort):
                raise FedgftError("this run has a sum over other sites already", kind="conflict")
            run.cohort = cohort
            if name not in run.answers:
                share = Noise(self._kind, 0.0, 0.0)
                values = np.stack([sums.score, sums.decision])
                if noise is not None:
                    self._charge_release(ledger, run, budget, with_counts=run.rows is None)
                    if run.rows is None:
                        run.rows = noise.add_to_rows(float(sums.rows()))
                    share = noise.share(clients)
                    values = noise.select(sums)
                run.counts = run.counts or _to_units(sums.count, share.count)
                run.answers[name] = _to_units(values, share.value)
            return np.array(run.counts, np.int64), np.array(run.answers[name], np.int64)

    def declare_rows(self, rows: int) -> int:
        """Return the number of rows that the site declares in secure sums.

        The number stays the same during a run. With a budget it is noisy and costs half of the
        budget for counts.
        """
        budget = self.agree()
        noise = budget.noise(self._kind)
        with open_ledger(self.context, self.site) as ledger:
            run = ledger.run(self.context.run_id, _terms(budget, secure=True))
            if run.rows is None:
                run.rows = float(rows)
                if noise is not None:
                    self.charge(ledger, budget.rho(0))
                    run.rows = noise.add_to_rows(float(rows))
            return max(1, round(run.rows))

    def release_report(self, make_report: Callable[[], str], budget: Budget, model: str) -> str:
        """Return the report on held-out rows.

        With noise, a run has a single report. A second request for the same model gets the same
        text; a request for another model is an error.
        """
        if budget.epsilon is None:
            return make_report()
        with open_ledger(self.context, self.site) as ledger:
            run = ledger.run(self.context.run_id, _terms(budget, secure=False))
            if run.reports and not run.reports.get(model):
                raise self._error("the budget of its report is spent")
            if not run.reports:
                self.charge(ledger, total_rho(budget.epsilon, budget.delta))
                run.reports[model] = make_report()
            return run.reports[model]

    def report_rows(self, rows: int, sent: Sums | None = None) -> int:
        """Return the number of rows that a reply may state.

        If the counts are noisy or cells are withheld, the true number of rows would reveal what
        they hide. The result is then the total of the counts that the site sent: in `sent`, or
        earlier in this run.
        """
        noisy = "privacy.epsilon" in self.request
        if noisy and "privacy.secure" in self.request:
            return self.declare_rows(rows)
        min_count = self._setting("min_count") or self.context.node_config.get("min-count")
        if not noisy and not min_count:
            return rows
        if noisy:
            runs = read_ledger(self.context, self.site).runs
            run = runs.get(f"{self.context.run_id} {self.site}")
            if run is not None and run.counts is not None:
                return max(1, round(sum(run.counts)))
        return 1 if sent is None else max(1, round(float(sent.rows())))

    def charge(self, ledger: Ledger, rho: float) -> None:
        """Add the cost of a release to the ledger, before the release.

        If the site limits the cost of all its runs, a cost above the limit is an error.
        """
        limit, delta = self.limits()
        epsilon = epsilon_of(ledger.rho + rho, delta)
        file = str(self.context.node_config.get("ledger", ""))
        if file and limit is not None and epsilon > limit * (1 + 1e-6):
            total = f"epsilon {epsilon:.3g} at delta {delta:g}, above its max-epsilon, {limit:g}"
            raise self._error(
                f"with this release all its runs cost {total} (ledger {Path(file).name})"
            )
        ledger.rho += rho
        ledger.epsilon = epsilon
        ledger.delta = delta

    def _charge_release(
        self, ledger: Ledger, run: RunRecord, budget: Budget, *, with_counts: bool
    ) -> None:
        """Count and charge a release of noisy sums; raise if the run's budget is spent."""
        if run.released >= budget.releases:
            spent = f"(epsilon {budget.epsilon:g}, {budget.releases} releases) is spent"
            raise self._error(
                f"its privacy budget {spent}; it sends no more statistics in this run"
            )
        self.charge(ledger, budget.rho(1, counts=int(with_counts)))
        run.released += 1

    def _reshape(self, values: list[float] | None, shape: tuple[int, ...]) -> np.ndarray:
        """Return released numbers as an array of this shape."""
        table = np.array(values or [], dtype=float)
        if table.size != math.prod(shape):
            raise self._error("its classes or groups changed during a run", "conflict")
        return table.reshape(shape)

    def _error(self, problem: str, kind: ErrorKind = "invalid") -> FedgftError:
        return FedgftError(f"site '{self.site}': {problem}", kind=kind)

    @property
    def _kind(self) -> Kind:
        return "hard" if self._setting("hard") else "soft"

    def _setting(self, name: str) -> float | None:
        """Return a privacy setting of the request. NaN is an error: it would pass every limit."""
        value = self.request.get(f"privacy.{name}")
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            text = f"the server's privacy.{name} is {one_line(value, 40)}: not a number"
            raise FedgftError(text)
        return None if value is None else float(value)


def _terms(budget: Budget, *, secure: bool) -> list[float]:
    return [float(budget.epsilon or 0), budget.delta, float(budget.releases), float(secure)]


def _to_units(exact: np.ndarray, deviation: float) -> list[float]:
    """Return the numbers as integer multiples of 1 / UNIT, with noise of this deviation."""
    units = np.rint(exact.ravel() * UNIT).astype(np.int64)
    if deviation:
        units += draw_discrete_gaussian(units.size, deviation * UNIT)
    return units.tolist()  # integers, which may be larger than a float can hold exactly
