"""What the server hears of its clients: who is asked, who is believed, and what follows from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.checks import Noise
from fedgft.flower.constants import Constants, kind_of
from fedgft.flower.gather import Believer, Replies, log
from fedgft.flower.private import share_of
from fedgft.flower.secure import Cohort, SecureSum
from fedgft.flower.terms import Terms, line, query
from fedgft.flower.wire import Report, Request, prices
from fedgft.metrics import Kind, Tally
from fedgft.metrics.robust import Held, Spread, hold

OnRound = Callable[[dict[str, Any]], None]


class Best(NamedTuple):
    """The best model of the last rounds, and what was measured of it."""

    score: float
    arrays: ArrayRecord
    row: dict[str, Any]


@dataclass
class Hearing:
    constants: Constants
    terms: Terms
    believer: Believer = field(default_factory=Believer)
    on_round: OnRound | None = None
    rounds: int = 0  # of the whole run
    runs: int = 1  # one more every time the server was restarted: sites then begin anew
    released: int = 0  # times that clients were asked
    silent: int = 0  # rounds in a row without any statistics
    best: Best | None = None
    reports: dict[int, Report] = field(default_factory=dict)  # of the last round
    cohort: Cohort = field(default_factory=Cohort)  # of secure sums
    told: set[str] = field(default_factory=set)  # warnings that the log has already

    def __post_init__(self) -> None:
        for site, counts in (self.terms.counts or {}).items():
            self.believer.agree_on(site, counts)

    @property
    def noise(self) -> Noise | None:
        """What each client adds: of a secure sum, a share."""
        noise = self.terms.budget.noise(kind_of(self.constants.pricing))
        if noise is None or not self.terms.secure:
            return noise
        return share_of(noise, max(len(self.cohort), 1))

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.constants.history

    def check_budget(self, rounds: int) -> None:
        """A budget that ends before the run does would end the run."""
        final = self.terms.final and self.terms.channel != "evaluate"
        needed, budget = rounds + final, self.terms.budget
        if budget.epsilon is not None and budget.releases < needed:
            raise FedgftError(
                f"the privacy budget is for {budget.releases} release(s), and {rounds} rounds need "
                f"{needed}: Budget(epsilon, releases={needed})"
            )

    def request(self, *, asked: bool, both: bool = False) -> Request:
        """Prices, and whether sums are wanted: of the received model, or also of the trained."""
        if asked:
            self.released += 1
        wanted = ("both" if both else "received") if asked else "none"
        return prices(
            self.constants.price, self.believer.names, statistics=wanted,
            privacy=self.terms.asked(kind_of(self.constants.pricing)),
        )  # fmt: skip

    def ask(
        self, grid: Grid, arrays: ArrayRecord, nodes: list[int], *, of_round: int,
        config: ConfigRecord, timeout: float,
    ) -> None:  # fmt: skip
        """A question of its own: the sums of this model, which `of_round` rounds made."""
        request = self.request(asked=True)
        if self.terms.secure:
            budget = self.terms.budget
            secret = SecureSum(
                grid, arrays, request, config, timeout,
                noise=budget.noise(kind_of(self.constants.pricing)),
                max_share=self.terms.max_share, withheld=budget.min_count > 0,
            )  # fmt: skip
            self._ask_secretly(secret, sorted(grid.get_node_ids()), of_round)
            return
        messages = [query(arrays, config, request, node) for node in nodes]
        found = Replies.of(grid.send_and_receive(messages, timeout=timeout))
        self.learn(found.take(), found, arrays=arrays, of_round=of_round, asked=len(nodes))

    def _ask_secretly(self, secret: SecureSum, nodes: list[int], of_round: int) -> None:
        """Of the whole cohort, whatever clients train in this round: only so is the total of one
        round no different from that of another."""
        try:
            total, cohort = secret.ask(nodes, self.cohort)
            assert cohort.names is not None
            self.believer.names = self.believer.names or cohort.names
            self.believer.names.check(cohort.names, site="all sites")
        except FedgftError as error:
            self._nothing(str(error))
            return
        self.cohort = cohort
        self._use(total, len(cohort), secret.arrays, of_round, everybody=True)

    def learn(
        self, records: dict[int, Any], found: Replies, *, arrays: ArrayRecord, of_round: int,
        asked: int,
    ) -> None:  # fmt: skip
        """New constants from what clients say of a model."""
        self.reports = self.believer.reports(records, self.noise)
        if not self.reports:
            if found.good and not records:  # they work, and know nothing of us
                raise FedgftError(
                    f"no client sent statistics through channel '{self.terms.channel}': its "
                    "handlers must be those of fedgft.flower (docs/deployment.md)"
                )
            self._nothing("; ".join([*self.believer.dropped, found.why()]))
            return
        held = self._held()
        total = sum(held.tallies[1:], start=held.tallies[0])
        count = len(held.tallies)
        self._use(total, count, arrays, of_round, everybody=count == asked, about=self._about(held))

    def _held(self) -> Held:
        """The clients' sums within the limits; the reports are of those from here on."""
        tallies = [report.tally for report in self.reports.values()]
        noise, limits = self.noise, self.terms.limits_for(len(tallies))
        kinds: tuple[Kind, ...] = ("hard", "soft") if noise is None else (noise.kind,)
        spread = None if noise is None else Spread(noise.count, noise.value)
        agreed = [self.believer.identity(node) in self.believer.agreed for node in self.reports]
        metric = self.constants.metric
        held = hold(tallies, metric, kinds, limits, noise=spread, agreed=agreed)
        for (node, report), tally, why in zip(
            list(self.reports.items()), held.tallies, held.why, strict=True
        ):
            self.reports[node] = replace(report, tally=tally)
            if why:
                self.warn_once(f"{self.believer.site(node)} is held to the limits", "; ".join(why))
        return held

    def warn_once(self, what: str, details: str) -> None:
        """In the history every round is told; in the log, the first time."""
        if what not in self.told:
            self.told.add(what)
            log.warning("fedgft: %s: %s", what, details)

    def _about(self, held: Held) -> dict[str, Any]:
        """For the history: by site, how far it could have moved the gap, and who was clipped."""
        names = [self.believer.identity(node) for node in self.reports]
        every = list(zip(names, held.reach, held.moved, held.why, strict=True))
        return {
            "leverage": {name: round(float(reach), 6) for name, reach, _, _ in every},
            "clipped": {name: round(float(moved), 6) for name, _, moved, why in every if why},
        }

    def _nothing(self, why: str) -> None:
        self.silent += 1
        if not self.history and self.silent >= self.terms.patience:
            raise FedgftError(
                f"no client sent statistics through channel '{self.terms.channel}': {why}"
            )
        log.warning("fedgft: no statistics this round, the constants stay as they are: %s", why)

    def _use(
        self, total: Tally, clients: int, arrays: ArrayRecord, of_round: int, *, everybody: bool,
        about: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.silent, self.constants.names = 0, self.believer.names
        self.constants.learn(total, round=of_round, clients=clients, noise=self.noise)
        row, spent = self.history[-1], self.terms.budget.spent(self.released, self.runs)
        row |= about or {}
        if spent is not None:
            row |= {"epsilon": spent, "delta": self.terms.budget.delta}
        log.info("fedgft: %s", line(row, self.constants.metric.name))
        if self.on_round is not None:
            self.on_round(row)
        pick = 0.0 if self.constants.pricing is None else self.constants.pricing.pick
        if everybody and self.noise is None and of_round > self.rounds * (1 - pick):
            score = self.constants.score(total)
            if self.best is None or score >= self.best.score:
                self.best = Best(score, arrays, row)
