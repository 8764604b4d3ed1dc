"""The controller: the server measures the gap of decisions and adjusts prices to reach a target.

Decisions have no gradient, so the penalty acts on scores, and the measured gap of decisions sets
its strength. For each condition v and group i the server holds two multipliers, one for each side
of a band of width `target` around a common center m, and converts them into the price of a row:

    above_i = rate_i - m - target/2          below_i = m - target/2 - rate_i
    limit_i = max(MAX_ROW_PRICE, MAX_GROUP_PRICE / w_i)
    up_i   <- clip(up_i   + k (above_i - PAST_SHARE last above_i), 0, limit_i)
    down_i <- clip(down_i + k (below_i - PAST_SHARE last below_i), 0, limit_i)
    q_i     = up_i - down_i, less its mean over rows         price of a row of group i

All rates lie within the band exactly if the gap is at most the target. Clients add
<v, statistics of the scores>, where v = sum_i w_i q_i d rate_i / dS and w_i = P(event, group i).
With two groups, w_0 q_0 = -w_1 q_1 is the constant C of the paper's Theorem 5.1. Because q is a
price per row, a small group needs no higher price than a large group, as long as its rate responds.

The gain k follows the measured response, so that no constant has to be tuned to an optimizer:

    b_i = how far rate_i fell in a round, per unit that q_i rose in the round before
    k   = GAIN trust / (b_i speed)

b is estimated by a regression over past rounds, first for all groups of a condition together and
then for each group, within RESPONSE_BOUNDS. The estimate starts from PRIOR and forgets old rounds
as new pushes (price changes times speed) replace them. `speed` is how far the coming round moves
the model, relative to the first round; it is the product of relative learning rate and damping.
`trust` is halved when a violation changes sides without shrinking, falls while rates rise where
prices rise, and recovers slowly.

With a learning rate that does not fall, the gaps of successive models would scatter around the
target without end. `damping` therefore shortens the server's step along a cosine.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from fedgft.algorithms.weightings import Cohort, client_means
from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, check_one_threshold, price
from fedgft.metrics.metric import Price, Rates, Statistics
from fedgft.settings import TARGET_TOLERANCE
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_number, check_number_per_run

GAIN = 0.6
"The share of the violation that a round is meant to remove."
PAST_SHARE = 0.4
"The share of the last violation that is subtracted: a round repeats this share of the last move."
PRIOR = 0.1
"The response assumed before the first measurement: change of rate per unit of price and round."
PRIOR_WEIGHT = 0.1
"The sum of squared price changes at which the measured response has the same weight as PRIOR."
RESPONSE_BOUNDS = (0.01, 2.0)
"The smallest and the largest response b that a gain is computed from."
FORGET = 0.8
"The smallest share of the past that the regression of the response keeps in a round."
MIN_TRUST = 0.1
"The smallest trust: at zero, prices would stop changing and no response could be measured again."
MAX_ROW_PRICE = 8.0
"The largest price of a row. A price of two already decides nearly every row of a calibrated model."
MAX_GROUP_PRICE = 3.0
"""The largest price of a whole group. It allows higher row prices in small groups, which need them
if they share all features with other groups."""
MIN_SPEED = 0.05
"The speed in the last round under damping."
BOOSTING_CAUTION = 0.3
"The caution of a booster: its trees are fitted to prices, so a large price bends a whole tree."
BOOSTING_TRUST = 4.0
"The largest trust of a booster: without the group as a feature, its response may be small."
PATIENT_GROWTH = 1.05
"The factor per round by which trust grows above 1."
MAX_SWING = 0.03
"The gap has settled if it varies by no more than this over the last third of the rounds."


REPORT_ARRAYS = ("target", "gap", "gaps", "local_target", "local_gap")
"The arrays of a `ControlReport`; the last two are None without local targets."
REMEDIES = {
    "not estimable": ("metric",),
    "unsettled": ("rounds", "lr"),
    "falling": ("rounds",),
    "settled": ("target", "rounds", "model"),
    "local": ("local_target", "rounds", "model"),
}
"The arguments whose change may help, by how a run missed its target; the best one first."


class TargetMissedWarning(UserWarning):
    """The gap of decisions on the clients' rows is above the target that was asked for.

    `fedgft.simulate` and `fedgft.FairClassifier` issue it. The text states the gap, the reason and
    the arguments to change, such as ``rounds``.

    Examples
    --------
    >>> import warnings
    >>> import fedgft
    >>> federation = fedgft.partition(fedgft.load("synthetic"), clients=3)
    >>> with warnings.catch_warnings(record=True) as found:
    ...     warnings.simplefilter("always")
    ...     history = fedgft.simulate(federation, metric="sp", target=0.01, rounds=2)
    >>> issubclass(found[0].category, fedgft.TargetMissedWarning)
    True
    """


@dataclass(frozen=True)
class Loop:
    """The properties of the training loop that a controller needs.

    Parameters
    ----------
    delay
        Number of rounds from a price to the first measurement of its effect: 1, or 2 if sums arrive
        together with the clients' updates.
    caution
        Factor of the gain; below 1 if measurements are noisy (a sampled cohort, added noise) or the
        server has momentum.
    repeat
        The share of its last move that a round repeats while prices stay as they are. A tree of a
        booster moves the logits by `lr` times what is left to do, so it repeats 1 - lr.
    most_trust
        The largest trust. Above 1, the gain grows by `PATIENT_GROWTH` per round while a violation
        keeps its side, because the response may be weaker than `PRIOR`; and a measured response of
        the wrong sign counts as noise.
    """

    delay: int = 1
    caution: float = 1.0
    repeat: Any = PAST_SHARE
    most_trust: float = 1.0


def boosting_loop(lr: Any) -> Loop:
    """Return the loop of a booster with this learning rate; its speed is `lr` in every round.

    A tree is fitted to the prices themselves: at first it moves the logit of a row by -lr price.
    `lr` is one number, or an array (r, 1, 1) with one per run.
    """
    return Loop(caution=BOOSTING_CAUTION, repeat=1.0 - lr, most_trust=BOOSTING_TRUST)


class ControllerState(NamedTuple):
    """The controller's memory between rounds. Axes: run r, condition v, group g.

    Arrays are None before the first measurement.
    """

    loop: tuple[Any, ...]  # delay, caution, repeat, most trust; version 0.1 wrote two of them
    speed: Any = 1.0  # speed of the coming round; one number, or (r, 1, 1)
    gaps: Any = None  # (r, measured models)
    rates: Any = None  # (r, v, g), rates of the last model; arrays below have the same shape
    up: Any = None  # multiplier that lowers a rate above the band
    down: Any = None  # multiplier that raises a rate below the band
    above: Any = None  # violations above the band
    below: Any = None  # violations below the band
    prices: Any = None  # price of a row
    pushes: Any = None  # (delay, r, v, g): price changes times speed, oldest first
    fall: Any = None  # running sum of pushes times the falls that followed
    moved: Any = None  # running sum of squared pushes
    trust: Any = None
    v: Statistics | None = None  # the last message
    change: Any = None  # of the rates between the last two models

    @property
    def most_trust(self) -> float:
        """The largest trust."""
        return self.loop[3] if len(self.loop) > 3 else 1.0

    @property
    def repeat(self) -> Any:
        """The share of its last move that a round repeats; one number, or (r, 1, 1)."""
        return self.loop[2] if len(self.loop) > 2 else PAST_SHARE


@dataclass(frozen=True)
class ControlReport:
    """Whether each run reached its target. All gaps are measured on all clients' training rows.

    Parameters
    ----------
    target
        (r,): the target of each run.
    gap
        (r,): the gap of the final model.
    gaps
        (r, rounds): the gaps of the models that were measured on the way.
    kind
        Gaps of decisions ("hard") or of scores ("soft").
    local_target, local_gap
        (r,): the local target of each run, and the largest gap of the final model on a client's own
        rows (NaN if none is estimable). None (the default): without local targets.
    """

    target: np.ndarray
    gap: np.ndarray
    gaps: np.ndarray
    kind: Kind = "hard"
    local_target: np.ndarray | None = None
    local_gap: np.ndarray | None = None

    @property
    def reached(self) -> np.ndarray:
        """(r,): whether the gap is at most TARGET_TOLERANCE above the target; NaN is not.

        With a local target, the largest local gap must be as near to it, if it is estimable.
        """
        return (self.gap <= self.target + TARGET_TOLERANCE) & (self.local_excess <= 0)

    @property
    def local_excess(self) -> np.ndarray:
        """(r,): how far the largest local gap is above its target and TARGET_TOLERANCE; or 0."""
        if self.local_target is None or self.local_gap is None:
            return np.zeros(len(self.gap))
        return np.fmax(self.local_gap - self.local_target - TARGET_TOLERANCE, 0.0)

    @property
    def swing(self) -> np.ndarray:
        """(r,): how much the gap varied over the last third of the rounds."""
        tail = self.gaps[:, -max(2, self.gaps.shape[1] // 3) :]
        return tail.max(1, initial=0.0) - tail.min(1, initial=1.0)

    @property
    def settled(self) -> np.ndarray:
        """(r,): whether `swing` is at most MAX_SWING."""
        return self.swing <= MAX_SWING

    def part(self, runs: slice | np.ndarray) -> "ControlReport":
        """Return the report of some of the runs."""
        arrays = {name: getattr(self, name) for name in REPORT_ARRAYS}
        chosen = {name: None if each is None else each[runs] for name, each in arrays.items()}
        return replace(self, **chosen)

    def with_runs(self, at: np.ndarray, other: "ControlReport") -> "ControlReport":
        """Return this report with the runs `at` replaced by those of another report.

        `other` may have more rounds than this report; then as many of its `gaps` as this report has
        are taken, evenly spread over its rounds.
        """
        gap = self.gap.copy()
        gaps = self.gaps.copy()
        rounds = np.linspace(0, other.gaps.shape[1] - 1, gaps.shape[1]).round().astype(int)
        gap[at] = other.gap
        gaps[at] = other.gaps[:, rounds]
        local_gap = self.local_gap
        if local_gap is not None and other.local_gap is not None:
            local_gap = local_gap.copy()
            local_gap[at] = other.local_gap
        return replace(self, gap=gap, gaps=gaps, local_gap=local_gap)

    def reason(self, run: int = 0, *, remedy: bool = True) -> str:
        """Return a sentence with the gap of this run and, if it missed its target, a remedy.

        Parameters
        ----------
        run
            The position of the run.
        remedy
            Whether a remedy is named.
        """
        of = {"hard": "decisions", "soft": "scores"}[self.kind]
        gap, target, swing = (100 * float(x[run]) for x in (self.gap, self.target, self.swing))
        case = self._case(run)
        if case == "not estimable":
            return f"The gap of {of} is not estimable: a group has no rows that the metric needs."
        if case == "local" and self.local_target is not None and self.local_gap is not None:
            local_gap, local_target = (
                100 * float(x[run]) for x in (self.local_gap, self.local_target)
            )
            found = f"The largest gap of {of} on a client's own rows is {local_gap:.1f} points"
            advice = ": try a larger local target, or more rounds" if remedy else ""
            return f"{found}, above the local target of {local_target:.1f}{advice}."
        found = f"The gap of {of} on the clients' rows is {gap:.1f} points"
        ends = {
            "reached": f", within the target of {target:.1f}.",
            "unsettled": f", above the target of {target:.1f}; it still varied by {swing:.1f} "
            "points over the last third of the rounds: try more rounds, or a lower learning rate.",
            "falling": f", above the target of {target:.1f} and still falling: try more rounds.",
            "settled": f", above the target of {target:.1f} although it has settled: try a larger "
            "target, more rounds, another model, or larger groups.",
        }
        end = ends[case] if remedy else f"{ends[case].partition(': try ')[0].rstrip('.')}."
        return found + end

    def _case(self, run: int) -> str:
        """Return "reached", or a key of `REMEDIES`."""
        if not np.isfinite(self.gap[run]):
            return "not estimable"
        if self.reached[run]:
            return "reached"
        if self.gap[run] <= self.target[run] + TARGET_TOLERANCE:
            return "local"
        if not self.settled[run]:
            return "unsettled"
        is_falling = self.gaps.shape[1] > 1 and self.gap[run] < self.gaps[run, -2] - 0.001
        return "falling" if is_falling else "settled"

    def warning(self, **used: float) -> str | None:
        """Return a text on all runs that missed their target; None if none did.

        Parameters
        ----------
        **used
            Values that were used in training, by the names of the arguments: ``rounds=50``. The
            text states them beside the arguments to change.
        """
        missed = np.flatnonzero(~self.reached)
        if not len(missed):
            return None
        run = int(missed[0])
        used = {"target": float(self.target[run]), **used}
        if self.local_target is not None:
            used = {"local_target": float(self.local_target[run]), **used}
        names = REMEDIES[self._case(run)]
        change = [f"{name} (now {used[name]:g})" if name in used else name for name in names]
        runs = f"{len(missed)} of {len(self.gap)} runs"
        text = f"the target was missed in {runs}. Run {run}: {self.reason(run)}"
        return f"{text} Arguments to change: {', '.join(change)}."


def with_speed(state: Any, speed: Any) -> Any:
    """Return a controller's state with the speed of the coming round; other states unchanged."""
    return state._replace(speed=speed) if isinstance(state, ControllerState) else state


def arrays_to_lists(value: Any) -> Any:
    """Replace arrays by lists, at any depth of dictionaries, so that JSON can hold the value."""
    if isinstance(value, dict):
        return {key: arrays_to_lists(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def lists_to_arrays(value: Any) -> Any:
    """Undo `arrays_to_lists`."""
    if isinstance(value, dict):
        found = {key: lists_to_arrays(item) for key, item in value.items()}
        return found | ({"loop": tuple(value["loop"])} if "loop" in value else {})
    return np.array(value) if isinstance(value, list) else value


def damping(done: int, rounds: int, speed: float) -> float:
    """Return the share of the server's step to take in a round.

    The share times the speed falls along a cosine from 1 to MIN_SPEED, so a step is not shortened
    where the learning rate already falls as fast:

        min(1, (MIN_SPEED + (1 - MIN_SPEED) (1 + cos(pi done / rounds)) / 2) / speed)

    Parameters
    ----------
    done, rounds
        The index of the round, counted from 0, and the number of rounds.
    speed
        How far this round moves the model by itself, relative to the first round.
    """
    cosine = MIN_SPEED + (1 - MIN_SPEED) * (1 + np.cos(np.pi * min(done / max(rounds, 1), 1.0))) / 2
    return float(min(1.0, cosine / max(speed, 1e-12)))


class StepDamper:
    """Shortens steps along a cosine in a loop where only the length of each step is known.

    Steps of the first quarter of the rounds stay as they are; their median length is the
    reference.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.first = max(rounds // 4, 1)
        self.lengths: list[float] = []

    def share(self, length: float) -> float:
        """Return the share of the next step to take, from its length."""
        self.lengths.append(length)
        done = len(self.lengths) - 1
        return 1.0 if done < self.first else damping(done, self.rounds, self._relative(length))

    @property
    def speed(self) -> float:
        """How far the coming round moves the model, relative to the first rounds.

        Steps also become shorter because training converges, so the square root of the relative
        length is used.
        """
        done = len(self.lengths)
        if done < self.first:
            return 1.0
        length = self._relative(self.lengths[-1])
        return float(np.sqrt(min(length, 1.0)) * damping(done, self.rounds, length))

    def _relative(self, length: float) -> float:
        reference = float(np.median(self.lengths[: self.first]))
        return length / reference if reference > 0 else 1.0


@dataclass(frozen=True)
class Controller:
    """FedGFT with a target: a penalty whose prices follow the measured gap.

    Parameters
    ----------
    metric
        The metric whose gap is controlled. For a metric within strata, each stratum has prices of
        its own that bring its gap within the target; whether the target is reached is said of the
        gap F of `fedgft.metrics.group_axis`, in which small strata count little.
    target
        The largest acceptable gap, as a fraction: one number, or one per run.
    kind
        The gap of decisions ("hard") or of scores ("soft").
    pick
        The share of the rounds, counted from the end, whose global models are candidates for the
        final model. The choice depends on accuracy and gap on the clients' rows. 0 means that the
        last model is the final model.
    damp
        Whether to shorten the server's steps toward the end where the learning rate does not
        fall.
    """

    metric: Metric
    target: float | np.ndarray = 0.0
    kind: Kind = "hard"
    pick: float = 0.6
    damp: bool = True

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)
        target = np.asarray(check_number_per_run("target", self.target))
        if not np.all((target >= 0) & (target < 1)):
            raise FedgftError(f"`target` must be at least 0 and below 1, got {self.target}")
        check_choice("kind", self.kind, get_args(Kind))
        if not 0 <= check_number("pick", self.pick, finite=False) <= 1:
            raise FedgftError(f"`pick` must lie between 0 and 1, got {self.pick:g}")

    def init(self, runs: int, loop: Loop = Loop()) -> ControllerState:  # noqa: B008
        """Return the state before the first measurement; `target` must fit the number of runs."""
        check_number_per_run("target", self.target, runs=runs)
        return ControllerState((loop.delay, loop.caution, loop.repeat, loop.most_trust))

    def update(self, state: ControllerState, cohort: Cohort, received: Sums) -> ControllerState:
        """Return the state after the cohort's sums of a model; calls `steer` with their mean."""
        return self.steer(state, self._mean(cohort, received))

    def steer(
        self,
        state: ControllerState,
        statistics: Statistics,
        *,
        max_row_price: float = MAX_ROW_PRICE,
    ) -> ControllerState:
        """Return the state with the next prices, from mean statistics (r, 2, v, g).

        The first model has not been trained, so its gap sets no price. A group without a rate
        keeps its multipliers, and its rows have no price. Noise can make a count negative, which
        gives no rate, or move a rate outside [0, 1], where it is clipped.
        """
        known = statistics[..., 1, :, :] > 0
        share = np.where(known, statistics[..., 1, :, :], 0.0)
        weight = share / np.maximum(share.sum(-1, keepdims=True), 1e-300)
        rates = np.where(known, self.metric.rates(statistics), np.nan).clip(0.0, 1.0)
        gap = self.metric.gap(rates, share)[:, None]
        rates = np.nan_to_num(rates)
        if state.gaps is None:
            return _with_zeros(state._replace(gaps=gap, rates=rates))
        state = state._replace(gaps=np.concatenate((state.gaps, gap), axis=1))
        targets = self._targets(len(rates))
        center = band_center(rates, weight, known, targets)
        above = np.where(known, rates - center - targets / 2, 0.0)
        below = np.where(known, center - targets / 2 - rates, 0.0)
        state = _with_response(state, rates, weight)
        state = state._replace(trust=_next_trust(state, above, below, weight))
        gain = np.where(known, self._gain(state, weight), 0.0)
        limit = np.maximum(max_row_price, MAX_GROUP_PRICE / np.maximum(weight, 1e-6))
        up = (state.up + gain * (above - state.repeat * state.above)).clip(0.0, limit)
        down = (state.down + gain * (below - state.repeat * state.below)).clip(0.0, limit)
        prices = np.where(known, up - down, 0.0)
        prices = np.where(known, prices - (weight * prices).sum(-1, keepdims=True), 0.0)
        push = state.speed * (prices - state.prices)
        return state._replace(
            rates=rates,
            up=up,
            down=down,
            above=above,
            below=below,
            prices=prices,
            pushes=np.concatenate((state.pushes[1:], push[None])),
            v=self.metric.through_rates(prices * share, statistics),
        )

    def price(self, state: ControllerState, *, run: np.ndarray, classes: int) -> Price | float:
        """Return the price of each score, one entry per run in `run`; 0 if there is none yet."""
        return 0.0 if state.v is None else price(self.metric, state.v, classes)[run]

    def excess(self, cohort: Cohort, received: Sums) -> np.ndarray:
        """Return by how much each run's gap exceeds its target; NaN where it is not estimable."""
        gap = self.metric.readout(self._mean(cohort, received))
        return np.maximum(gap - self._targets(len(gap))[:, 0, 0], 0.0)

    def report(self, state: ControllerState, federation: Sums) -> ControlReport:
        """Report whether each run reached its target, by the final model's sums (r, ...)."""
        gap = federation.gap(self.metric, self.kind)
        target = np.broadcast_to(np.asarray(self.target, np.float64), gap.shape)
        gaps = gap[:, None] if state.gaps is None else state.gaps
        return ControlReport(target, gap, gaps, self.kind)

    def _mean(self, cohort: Cohort, received: Sums) -> Statistics:
        return cohort.mean(client_means(self.metric, received, self.kind))

    def _targets(self, runs: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.target, np.float64), (runs,))[:, None, None]

    def _gain(self, state: ControllerState, weight: np.ndarray) -> np.ndarray:
        """Return the gain k (r, v, g): the change of price per unit of violation.

        F (`fall`) is the sum of push times fall over past rounds, M (`moved`) the sum of push^2,
        <.> a mean over rows, and s_v the share of condition v in a metric of V conditions
        (`Metric.gain_shares`):

            b   = (PRIOR_WEIGHT PRIOR + |<F>|) / (PRIOR_WEIGHT + <M>)      all groups together
            b_i = (PRIOR_WEIGHT b + |F_i|) / (PRIOR_WEIGHT + M_i)          group i
            k_i = GAIN caution s_v sqrt(V) trust_i / (b_i speed)
        """
        falls, moved = _row_means(weight, state.fall, state.moved)
        common = (PRIOR_WEIGHT * PRIOR + np.abs(falls)) / (PRIOR_WEIGHT + moved)
        by_group = (PRIOR_WEIGHT * common + np.abs(state.fall)) / (PRIOR_WEIGHT + state.moved)
        response = by_group.clip(*RESPONSE_BOUNDS)
        shares, conditions = self.metric.gain_shares(weight.shape[-2])
        caution = state.loop[1]
        strength = GAIN * caution * shares[:, None] * conditions**0.5
        return strength * state.trust / (response * np.maximum(state.speed, MIN_SPEED))


def band_center(
    rates: Rates, weight: np.ndarray, known: np.ndarray, width: np.ndarray
) -> np.ndarray:
    """Return the center (r, v, 1) of the band of the given width that is nearest to the rates.

    The center minimizes the weighted squared distances of the rates from the band, so that
    violations above and below the band balance. If all rates fit into a band, the center is midway
    between the highest and the lowest rate.
    """
    high = np.where(known, rates, -np.inf).max(-1, keepdims=True)
    low = np.where(known, rates, np.inf).min(-1, keepdims=True)
    high, low = (np.where(np.isfinite(edge), edge, 0.0) for edge in (high, low))
    middle = (high + low) / 2
    left = np.minimum(low + width / 2, middle)
    right = np.maximum(high - width / 2, middle)
    for _ in range(40):  # bisection: the balance falls as the center rises
        center = (left + right) / 2
        outside = np.maximum(rates - center - width / 2, 0.0)
        outside = outside - np.maximum(center - width / 2 - rates, 0.0)
        balance = (weight * outside).sum(-1, keepdims=True)
        left = np.where(balance > 0, center, left)
        right = np.where(balance > 0, right, center)
    return np.where(high - low <= width, middle, (left + right) / 2)


def _row_means(weight: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """Return the mean over rows of each array (r, v, g), where a group counts by its weight."""
    return [(weight * x).sum(-1, keepdims=True) for x in values]


def _with_zeros(state: ControllerState) -> ControllerState:
    """Return the state with arrays of zeros in the shape of its rates."""
    zero = np.zeros_like(state.rates)
    zeros = dict.fromkeys(("up", "down", "above", "below", "prices", "fall", "moved"), zero)
    pushes = np.zeros((int(state.loop[0]), *zero.shape))
    return state._replace(**zeros, pushes=pushes, trust=np.ones_like(zero), change=zero)


def _with_response(state: ControllerState, rates: Rates, weight: np.ndarray) -> ControllerState:
    """Return the state with one more round in its regression of falls on pushes.

    Rates are taken relative to their mean over rows, because training moves all groups and prices
    change the differences between groups. Old rounds are forgotten only as fast as new pushes
    replace them: while prices do not change, the measured response is kept. With the push of
    `delay` rounds ago, the change of the rate since the last model, and the mean over rows <.>:

        keep = 1 - (1 - FORGET) min(<push^2> / ((1 - FORGET) <M>), 1)
        F   <- keep F - push (change - <change>)
        M   <- keep M + push^2

    Where rounds repeat more of their last move than usual (`Loop.repeat`), the excess is subtracted
    from the change: it follows earlier pushes.
    """
    relative = rates - state.rates
    relative = relative - _row_means(weight, relative)[0]
    excess = np.maximum(state.repeat - PAST_SHARE, 0.0)
    change = relative - excess * state.change if np.any(excess) else relative
    push = state.pushes[0]
    new, old = _row_means(weight, push**2, state.moved)
    keep = 1 - (1 - FORGET) * np.minimum(new / np.maximum((1 - FORGET) * old, 1e-12), 1.0)
    fall = keep * state.fall - push * change
    return state._replace(fall=fall, moved=keep * state.moved + push**2, change=relative)


def _next_trust(
    state: ControllerState, above: np.ndarray, below: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Return the next trust (r, v, g), between MIN_TRUST and the largest trust, which is usually 1.

    Trust is halved if a group's violation has changed sides and is more than half as large as
    before. It falls by 15% while rates rise where prices rise. Otherwise it grows by 15%, or above
    1 by `PATIENT_GROWTH`.
    """
    now = np.maximum(above, 0.0) - np.maximum(below, 0.0)
    last = np.maximum(state.above, 0.0) - np.maximum(state.below, 0.0)
    turned = (now * last < 0) & (now**2 > 0.25 * last**2)
    fall, moved = _row_means(weight, state.fall, state.moved)
    wrong = (fall < -RESPONSE_BOUNDS[0] * moved) & (state.most_trust <= 1)
    grown = np.where(state.trust < 1, 1.15, PATIENT_GROWTH)
    change = np.where(turned, 0.5, np.where(wrong, 0.85, grown))
    return np.clip(change * state.trust, MIN_TRUST, state.most_trust)
