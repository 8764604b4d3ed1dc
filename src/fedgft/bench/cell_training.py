"""The cells of the benchmark: all strengths and replicates of one method on one track.

All runs of a cell are trained as one batch. Every method of a track has the same learning rate,
which each replicate chooses on its inner rows for FedAvg. Decision rules are fitted on the scores
of that FedAvg. Nothing here reads the labels of test rows but the final counts.
"""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from threadpoolctl import threadpool_limits  # comes with scikit-learn

from fedgft.algorithms import Algorithm
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.loss_rules import SCORE_BINS
from fedgft.algorithms.weightings import reads_more
from fedgft.bench.choices import InnerRows
from fedgft.bench.entrants import REFERENCE, Entrant
from fedgft.bench.scores import Outcome, OutcomeCounter, count_decisions, stack_outcomes, to_lists
from fedgft.bench.tracks import Track, TrackSplit
from fedgft.data.dataset import Federation
from fedgft.engine import Settings, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import Metric, get_metric
from fedgft.rules.counts import DECISION_BINS, FEDERATION_BINS, name_clients
from fedgft.rules.federation_rule import FIXED_KEY, RuleKind, fit_rule, merge_sites
from fedgft.study.post_processing import apply_rule
from fedgft.study.protocol import RATES, get_protocol

MODEL = "logistic"
PROTOCOL = get_protocol("heldout")
SETTINGS = replace(PROTOCOL.settings, eval_every=0, eval_on="test")
ALL_METRICS = "all"  # the metric of a cell whose method does not know the metric
UNSEEN_SEEDS = 5  # replicates in which sites are left out
UNSEEN_SITES = 5  # sites that are left out in turn, the largest
UNSEEN_TARGET = 0.02
CHUNK = 1 << 16  # rows that are scored at a time
BYTES_PER_PARAMETER = 4
BYTES_PER_SUM = 8
OnProgress = Callable[[int], None]  # run-rounds since the last call


@dataclass(frozen=True, eq=False)
class OpenTrack:
    """A track with the splits of its replicates in memory.

    Parameters
    ----------
    track
        The track.
    splits
        The split of each replicate.
    settings
        Settings of the simulator, the same for all methods.
    shared
        By method, the outcome and the seconds of trainings that are the same for all metrics.
    """

    track: Track
    splits: tuple[TrackSplit, ...]
    settings: Settings = SETTINGS
    shared: dict[str, tuple[Outcome, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, track: Track, seeds: int, settings: Settings = SETTINGS) -> "OpenTrack":
        """Read a track and make the splits of its first seeds."""
        return cls(track, tuple(track.split(seed) for seed in range(seeds)), settings)

    @cached_property
    def counters(self) -> tuple[OutcomeCounter, ...]:
        """What counts the decisions of each replicate."""
        return tuple(OutcomeCounter.of(split) for split in self.splits)

    @property
    def federations(self) -> list[Federation]:
        """The federation of each replicate, with its training rows."""
        return [split.federation for split in self.splits]

    @property
    def seeds(self) -> list[int]:
        """The seed of each replicate."""
        return [split.seed for split in self.splits]

    @cached_property
    def unseen(self) -> tuple[tuple[int, Federation], ...]:
        """For the first seeds and the largest sites: the replicate, and the other sites.

        The test rows of such a federation are all rows of the site that is left out.
        """
        found = []
        for i, split in enumerate(self.splits[:UNSEEN_SEEDS]):
            sizes = np.bincount(split.owner, minlength=split.num_sites)
            largest = np.sort(np.argsort(-sizes, kind="stable")[:UNSEEN_SITES])
            found += [(i, split.without_site(int(site))) for site in largest]
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Base:
    """What all cells of a track share: the learning rates, and the models of FedAvg.

    Parameters
    ----------
    lr
        (seed,) the learning rate of each replicate.
    inner_accuracy
        (rate, seed): what it was chosen by.
    params
        (seed, p): FedAvg's models.
    unseen_params
        (left-out site, p): FedAvg's models of the federations `OpenTrack.unseen`.
    seconds
        Per run.
    """

    lr: np.ndarray
    inner_accuracy: np.ndarray
    params: np.ndarray
    unseen_params: np.ndarray
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values. A model that diverged has None for its numbers."""
        arrays = {k: to_lists(v) for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return {**arrays, "seconds": self.seconds}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Base":
        """Read what `to_json` returned."""
        names = ("lr", "inner_accuracy", "params", "unseen_params")
        arrays: dict[str, Any] = {name: np.array(record[name], dtype=float) for name in names}
        return cls(**arrays, seconds=record["seconds"])


@dataclass(frozen=True, eq=False)
class Cell:
    """All results of one method on one track for one metric.

    Parameters
    ----------
    track, version, metric, method
        Which cell it is; the metric is `ALL_METRICS` if the method has no strength.
    label, league, grid
        The name in tables, the league, and the strengths.
    outcome
        Counts with the leading axes (candidate, seed); None if the method does not offer the cell.
    unseen
        (left-out site, label, group, decision): counts of all rows of sites whose rows the model
        has not seen, at the strength that is chosen for `UNSEEN_TARGET`; None if that is not
        offered.
    seconds
        Of training, or of FedAvg's training and the fit of a rule, per run.
    bytes_sent
        What all sites send in one run; None if that is not counted.
    reason
        Why the method does not offer the cell; empty if it does.
    has_targets
        Whether the strengths are targets for the gap.
    """

    track: str
    version: int
    metric: str
    method: str
    label: str
    league: str
    grid: tuple[float, ...]
    outcome: Outcome | None = None
    unseen: np.ndarray | None = None
    seconds: float = 0.0
    bytes_sent: float | None = None
    reason: str = ""
    has_targets: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain = {k: v for k, v in vars(self).items() if k not in ("outcome", "unseen")}
        outcome = None if self.outcome is None else self.outcome.to_json()
        unseen = None if self.unseen is None else to_lists(self.unseen)
        return plain | {"grid": list(self.grid), "outcome": outcome, "unseen": unseen}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Cell":
        """Read what `to_json` returned."""
        plain: dict[str, Any] = dict(record)
        outcome = plain.pop("outcome")
        unseen = plain.pop("unseen")
        plain["grid"] = tuple(plain["grid"])
        return cls(
            **plain,
            outcome=None if outcome is None else Outcome.from_json(outcome),
            unseen=None if unseen is None else np.array(unseen, dtype=float),
        )


def train_base(found: OpenTrack, on_progress: OnProgress) -> Base:
    """Train FedAvg at every learning rate, and choose the rate of each replicate on inner rows."""
    rates = np.array(RATES)
    seeds = len(found.splits)
    params, seconds = _train(
        found.federations * len(rates),
        found.seeds * len(rates),
        np.repeat(rates, seeds),
        PROTOCOL.algorithm(REFERENCE, get_metric("sp"), 0.0),
        found.settings,
        on_progress,
    )
    params = params.reshape(len(rates), seeds, -1)
    accuracy = _count_models(found, params).accuracy("inner")
    best = np.argmax(np.where(np.isfinite(accuracy), accuracy, -1.0), axis=0)
    base = Base(rates[best], accuracy, params[best, np.arange(seeds)], params[:0, 0], seconds)
    reference = PROTOCOL.algorithm(REFERENCE, get_metric("sp"), 0.0)
    unseen, _ = _train_unseen(found, base, reference, on_progress)
    return replace(base, unseen_params=unseen)


def run_cell(
    found: OpenTrack, base: Base, entrant: Entrant, metric: str, on_progress: OnProgress
) -> Cell:
    """Train and count one cell; a cell that the method does not offer says why.

    Parameters
    ----------
    found, base
        The track, and what its cells share.
    entrant
        The method or rule.
    metric
        The name of the metric, or `ALL_METRICS`.
    on_progress
        Called with the number of run-rounds since the last call.
    """
    names = (entrant.name, entrant.label, entrant.league)
    empty = Cell(
        *(found.track.name, found.track.version, metric, *names, entrant.grid),
        has_targets=entrant.has_targets,
    )
    try:
        if entrant.name == REFERENCE:
            return _count_reference(found, base, empty)
        run = _run_rule if entrant.is_rule else _run_method
        return run(found, base, entrant, empty, on_progress)
    except FedgftError as error:
        if error.kind not in ("unsupported", "data"):
            raise
        return replace(empty, reason=error.message)


def count_work(found_seeds: int, sites: int, entrant: Entrant, rounds: int) -> int:
    """Return the run-rounds of a cell, for a progress bar; a fitted rule counts as a run."""
    unseen = min(found_seeds, UNSEEN_SEEDS) * min(sites, UNSEEN_SITES)
    return (len(entrant.grid) * found_seeds + unseen) * rounds


def _count_reference(found: OpenTrack, base: Base, empty: Cell) -> Cell:
    outcome = _count_models(found, base.params[None])
    sent = _count_bytes(found, PROTOCOL.algorithm(REFERENCE, get_metric("sp"), 0.0), base)
    unseen = _count_unseen(found, base.unseen_params)
    return replace(empty, outcome=outcome, unseen=unseen, seconds=base.seconds, bytes_sent=sent)


def _run_method(
    found: OpenTrack, base: Base, entrant: Entrant, empty: Cell, on_progress: OnProgress
) -> Cell:
    """Train every strength and replicate of a method as one batch."""
    metric = get_metric("sp" if empty.metric == ALL_METRICS else empty.metric)
    grid = np.array(entrant.grid)
    copies = len(grid)
    seeds = len(found.splits)
    algorithm = PROTOCOL.algorithm(entrant.name, metric, np.repeat(grid, seeds))
    if entrant.name in found.shared:
        outcome, seconds = found.shared[entrant.name]
        on_progress(copies * seeds * found.settings.rounds)
    else:
        params, seconds = _train(
            found.federations * copies,
            found.seeds * copies,
            np.tile(base.lr, copies),
            algorithm,
            found.settings,
            on_progress,
        )
        outcome = _count_models(found, params.reshape(copies, seeds, -1))
        if not entrant.reads_metric:
            found.shared[entrant.name] = (outcome, seconds)
    asked = entrant.grid if entrant.has_targets else None
    chosen = grid[InnerRows.of(outcome, metric, asked).choose(UNSEEN_TARGET)]
    sent = _count_bytes(found, algorithm, base)
    made = replace(empty, outcome=outcome, seconds=seconds, bytes_sent=sent)
    try:
        strength = chosen[[i for i, _ in found.unseen]]
        algorithm = PROTOCOL.algorithm(entrant.name, metric, strength)
        unseen, _ = _train_unseen(found, base, algorithm, on_progress)
    except FedgftError as error:  # the method may need more than the one site that is left
        if error.kind != "unsupported":
            raise
        return made
    return replace(made, unseen=_count_unseen(found, unseen))


def _run_rule(
    found: OpenTrack, base: Base, entrant: Entrant, empty: Cell, on_progress: OnProgress
) -> Cell:
    """Fit a rule to FedAvg's scores for each target in each replicate."""
    metric = get_metric(empty.metric)

    def fit(i: int) -> tuple[Outcome, float]:
        started = time.perf_counter()
        federation = found.federations[i]
        every = np.arange(len(federation.dataset))
        scores = score_rows(federation, base.params[i : i + 1], every)[:, 0]
        owner = found.splits[i].owner
        decisions = (
            _decide_by_rule(federation, scores, entrant, metric, t, owner) for t in entrant.grid
        )
        counted = [found.counters[i].count(decide(every)) for decide in decisions]
        on_progress(len(entrant.grid) * found.settings.rounds)
        return stack_outcomes(counted), time.perf_counter() - started

    def fit_unseen(place: int) -> np.ndarray:
        i, federation = found.unseen[place]
        every = np.arange(len(federation.dataset))
        scores = score_rows(federation, base.unseen_params[place : place + 1], every)[:, 0]
        decide = _decide_by_rule(federation, scores, entrant, metric, float(chosen[i]))
        on_progress(found.settings.rounds)
        return _count_rows(federation, decide(federation.test))

    # The solver of thresholds and NumPy release the lock of the interpreter.
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = list(pool.map(fit, range(len(found.splits))))
        outcome = stack_outcomes([each for each, _ in pairs])
        outcome = outcome.map(lambda array: np.swapaxes(array, 0, 1))
        inner = InnerRows.of(outcome, metric, entrant.grid)
        chosen = np.array(entrant.grid)[inner.choose(UNSEEN_TARGET)]
        unseen = list(pool.map(fit_unseen, range(len(found.unseen))))
    seconds = float(np.mean([taken for _, taken in pairs])) / len(entrant.grid)
    return replace(
        empty,
        outcome=outcome,
        unseen=np.stack(unseen),
        seconds=base.seconds + seconds,
        bytes_sent=_count_rule_bytes(found, entrant, base),
    )


def _decide_by_rule(
    federation: Federation,
    scores: np.ndarray,
    entrant: Entrant,
    metric: Metric,
    target: float,
    owner: np.ndarray | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """Fit a rule; return the function from rows to probabilities of a positive decision.

    `owner` (n,) is the site of each row; None for rows of a site that the rule does not know.
    """
    if not np.isfinite(scores).all():  # FedAvg has diverged
        return lambda rows: np.full(len(rows), np.nan)
    parts = [part for part, _ in metric.parts] or [metric]
    rule = fit_rule(
        federation,
        scores,
        cast("RuleKind", entrant.name),
        target=dict.fromkeys(parts, target),
        key=FIXED_KEY,
    )
    data = federation.dataset
    if not rule.per_site:
        return lambda rows: apply_rule(data, rows, rule, scores)
    merged = merge_sites(rule, federation, scores >= 0.5)
    if owner is None:
        return lambda rows: apply_rule(data, rows, merged, scores)
    names = name_clients(federation)
    groups = [*data.group_names, None]
    has_rule = np.array([[(site, (group,)) in rule.cells for group in groups] for site in names])

    def decide(rows: np.ndarray) -> np.ndarray:
        known = has_rule[owner[rows], data.groups[rows]] | (data.groups[rows] < 0)
        sites = [names[k] for k in owner[rows[known]]]
        out = np.empty(len(rows))
        out[known] = apply_rule(data, rows[known], rule, scores, sites=sites)
        out[~known] = apply_rule(data, rows[~known], merged, scores)
        return out

    return decide


def score_rows(federation: Federation, params: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the probability of the positive class, (row, run), by linear models.

    Parameters
    ----------
    federation
        Whose feature scaling is applied.
    params
        (run, p): two weight vectors and two biases of each run.
    rows
        Numbers of rows of the data set.
    """
    weights = params[:, :-2].reshape(len(params), 2, -1)
    slope = weights[:, 1] - weights[:, 0]
    offset = params[:, -1] - params[:, -2]
    if federation.mean is not None and federation.spread is not None:
        slope = slope / federation.spread
        offset = offset - slope @ federation.mean
    features = federation.dataset.features
    out = np.empty((len(rows), len(params)))
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        logits = features[rows[part]].astype(np.float64) @ slope.T + offset
        out[part] = 0.5 + 0.5 * np.tanh(0.5 * logits)
    return out


def _train(
    federations: Sequence[Federation],
    seeds: Sequence[int],
    lr: np.ndarray,
    algorithm: Algorithm,
    settings: Settings,
    on_progress: OnProgress,
) -> tuple[np.ndarray, float]:
    """Train runs as one batch; return the parameters (run, p) and the seconds per run."""
    runs = len(federations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)  # the board says which gaps are kept
        history = simulate(
            list(federations),
            MODEL,
            algorithm,
            settings,
            seeds=list(seeds),
            lr=lr,
            on_round=lambda done, total: on_progress(runs),
        )
    return history.params, history.seconds / runs


def _train_unseen(
    found: OpenTrack, base: Base, algorithm: Algorithm, on_progress: OnProgress
) -> tuple[np.ndarray, float]:
    """Train without each of the left-out sites in turn."""
    at = [i for i, _ in found.unseen]
    federations = [federation for _, federation in found.unseen]
    seeds = [found.seeds[i] for i in at]
    return _train(federations, seeds, base.lr[at], algorithm, found.settings, on_progress)


def _count_models(found: OpenTrack, params: np.ndarray) -> Outcome:
    """Count the decisions of models (candidate, seed, p) on all rows of their splits."""
    runs = []
    for i, (federation, counter) in enumerate(zip(found.federations, found.counters, strict=True)):
        every = np.arange(len(federation.dataset))
        scores = score_rows(federation, params[:, i], every)
        runs.append(stack_outcomes([counter.count(_decide(each)) for each in scores.T]))
    stacked = stack_outcomes(runs)
    return stacked.map(lambda array: np.swapaxes(array, 0, 1))


def _count_unseen(found: OpenTrack, params: np.ndarray) -> np.ndarray:
    """Count the decisions of each model about the rows of the site that it has not seen."""
    counts = []
    for (_, federation), each in zip(found.unseen, params, strict=True):
        scores = score_rows(federation, each[None], federation.test)[:, 0]
        counts.append(_count_rows(federation, _decide(scores)))
    return np.stack(counts)


def _count_rows(federation: Federation, decisions: np.ndarray) -> np.ndarray:
    """Count decisions about the test rows of a federation, (label, group, decision)."""
    data = federation.dataset
    rows = federation.test
    groups = len(data.group_names)
    return count_decisions(data.labels[rows], data.groups[rows], decisions, num_groups=groups)


def _decide(scores: np.ndarray) -> np.ndarray:
    """Return 1 where the score is at least a half; NaN everywhere if the model diverged."""
    if not np.isfinite(scores).all():
        return np.full(len(scores), np.nan)
    return (scores >= 0.5).astype(np.float64)


def _count_bytes(found: OpenTrack, algorithm: Algorithm, base: Base) -> float:
    """Return what all sites send in a run: their models, and sums by label and group.

    Sums are sent by methods with a penalty or a rule for the loss, one number by label and group
    (or one per bin of the scores) for each other report of a rule, and two numbers per group, or
    the loss, by a weighting that measures them.
    """
    federation = found.federations[0]
    labels = len(federation.dataset.classes)
    groups = len(federation.dataset.group_names) + 1
    each = BYTES_PER_PARAMETER * base.params.shape[1]
    objective = algorithm.objective
    if objective.penalties or objective.loss_rules:
        each += BYTES_PER_SUM * labels * groups * (1 + 2 * labels)
    for name in objective.reads:
        each += BYTES_PER_SUM * labels * groups * (SCORE_BINS if name == "histograms" else 1)
    if reads_more(algorithm.weighting):
        each += BYTES_PER_SUM
    if getattr(algorithm.weighting, "metric", None) is not None:
        each += BYTES_PER_SUM * 2 * groups
    return float(each * found.settings.rounds * federation.num_clients)


def _count_rule_bytes(found: OpenTrack, entrant: Entrant, base: Base) -> float | None:
    """Return what sites send for FedAvg and then for a rule that is fitted on counts of scores.

    None for rules that are fitted on more than counts.
    """
    if entrant.name not in ("thresholds", "derived", "cost-lp"):
        return None
    federation = found.federations[0]
    trained = _count_bytes(found, PROTOCOL.algorithm(REFERENCE, get_metric("sp"), 0.0), base)
    bins = FEDERATION_BINS if entrant.name == "thresholds" else DECISION_BINS
    cells = 2 * (len(federation.dataset.group_names) + 1) * bins
    return trained + float(BYTES_PER_SUM * cells * federation.num_clients)
