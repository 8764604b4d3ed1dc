"""Train methods on the replicates of a study, choose a model, describe the results, save them.

study = Study(load("adult"), get_protocol("heldout"), range(20))
trained = train_model(study, "fedgft-control", "sp")
trained.model().predict(frame, source="new rows")
trained.save(Path("fedgft-train"))
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import METHOD_LABELS, METHODS
from fedgft.auditing import Audit, audit, measure
from fedgft.data.dataset import Dataset
from fedgft.data.encode import MISSING, Categorical
from fedgft.data.features import GROUP, split_words
from fedgft.engine import predict_proba
from fedgft.engine.history import ModelInputs
from fedgft.errors import FedgftError, LazyModule
from fedgft.fair_model import FairModel
from fedgft.formatting import escape_markdown, format_gap, format_percent, format_points
from fedgft.metrics import CATALOG, Metric, get_metric
from fedgft.metrics.functions import constant_accuracy, selection_rates
from fedgft.metrics.group_axis import MappedMetric
from fedgft.models import Trees, get_model
from fedgft.settings import TARGET_TOLERANCE
from fedgft.site_sums import SiteSums
from fedgft.store import atomic_write, make_folder, stage_files
from fedgft.study.figures import plot_before_after, plot_rounds, save_figure
from fedgft.study.post_processing import RULE_METHODS, check_rules, rule_row
from fedgft.study.results import (
    Choice,
    Row,
    choose_replicate,
    client_rows,
    describe_training,
    label_methods,
    number,
    round_rows,
    row,
)
from fedgft.study.study import Result, Study
from fedgft.study.tradeoff import Frontier, TradeoffPoint, find_knee
from fedgft.study.unseen_clients import (
    check_number_of_clients,
    measure_unseen_clients,
    summarize_unseen_clients,
)
from fedgft.sums import Sums

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

MAX_FEATURES = 12  # names of features in a sentence
MAX_IMPORTANT = 4  # columns in a sentence on trees
MAX_GROUPS = 4  # largest number of groups whose rates a sentence names; tables show all
NOT_ESTIMABLE = "not estimable"
NO_GAP = "The gap is not estimable, so nothing can be said about the target."
FEW_ROWS = "95% interval not estimable: fewer than ten rows"
MODEL_FILE = "model.safetensors"
CARD_FILE = "MODEL.md"
TEST_SITE = "held-out rows"
SCORE_WORDS = {  # in names of columns that hold the result of a model
    *("score", "scores", "probability", "proba", "prob", "prediction", "predictions"),
    *("predicted", "pred", "decision", "decisions", "yhat", "hat"),
}
MARGIN = 0.01  # of accuracy, above that of always predicting the most frequent class
ROUNDED = 1e-4  # rounding errors of float32 are smaller
MAX_SITES = 50  # clients that the audit of the held-out rows lists one by one
NOTHING: Mapping[str, Any] = MappingProxyType({})
LOCAL_METHODS = ("lrw", "lft", "fairfed")  # they make each client fair by itself
TEXT_COLUMNS = ("rule", "target_of", "missed_because", "widest", "widest_federation")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods on the same replicates; `rows` has one row per method, metric and alpha.

    `results` has those that were trained: decision rules are not. `unseen` has one row per cell,
    replicate and client that was left out, see `measure_unseen_clients`; it is empty unless clients
    were left out.
    """

    study: Study
    results: list[Result]
    rows: list[Row]
    unseen: Sequence[Row] = ()

    def save(self, folder: Path) -> list[Path]:
        """Write rows.parquet, rounds.parquet and the figure, all or none; return their paths.

        If clients were left out, there is also unseen.parquet, with one row per such client.

        The folder is created if it does not exist.
        """
        make_folder(folder)
        with stage_files(folder) as place:
            paths = self.write(place)
        return [folder / path.name for path in paths]

    def write(self, place: Path) -> list[Path]:
        """Write the files of `save` to a folder that the caller has staged."""
        lines = [line for result in self.results for line in round_rows(self.study, result)]
        figure = plot_rounds(self.study, self.results)
        unseen = [write_rows(self.unseen, place / "unseen.parquet")] if self.unseen else []
        return [
            write_rows(self.rows, place / "rows.parquet"),
            write_rows(lines, place / "rounds.parquet"),
            *unseen,
            *save_figure(figure, place, "rounds"),
        ]


def compare_methods(
    study: Study,
    methods: Sequence[str],
    metrics: Sequence[Metric],
    alphas: Sequence[float],
    *,
    leave_one_client_out: bool = False,
) -> Comparison:
    """Train every method for every metric at every alpha, on the replicates of one study.

    With `leave_one_client_out`, each cell is also trained without each client in turn and judged on
    its rows; the columns of `summarize_unseen_clients` say what to expect of a client that did not
    take part.

    Results are in the order alpha, metric, method. A decision rule (`RULE_METHODS`) has a row and
    no result of its own. The rows report missed targets, so there is no `TargetMissedWarning`.
    """
    metrics = [study.bind(metric) for metric in metrics]
    if leave_one_client_out:
        if any(isinstance(metric, MappedMetric) for metric in metrics):
            text = "does not work with metrics within strata or with randomized groups"
            raise FedgftError(text, field="leave_one_client_out", kind="unsupported")
        check_number_of_clients(study)
    for metric in metrics:
        check_rules(study, metric, methods)
    cells = list(product(alphas, metrics, methods))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        trained = [
            study.run(alpha, "fedavg" if method in RULE_METHODS else method, metric)
            for alpha, metric, method in cells
        ]
    rows = [
        rule_row(study, result, method, metric) if method in RULE_METHODS else row(study, result)
        for (_, metric, method), result in zip(cells, trained, strict=True)
    ]
    named = zip(cells, trained, strict=True)
    results = [result for (*_, method), result in named if method not in RULE_METHODS]
    if not leave_one_client_out:
        return Comparison(study, results, rows)
    unseen = measure_unseen_clients(study, methods, metrics, alphas)
    columns = summarize_unseen_clients(unseen)
    rows = [each | columns[each["alpha"], each["method"], each["metric"]] for each in rows]
    return Comparison(study, results, rows, unseen)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """One method, trained on all replicates, and the choice of one of them.

    The last result of `comparison` is that of the method. The first is FedAvg's on the same
    replicates, to show what the method changes; it is the only one if FedAvg is the method.
    """

    comparison: Comparison
    choice: Choice

    @property
    def study(self) -> Study:
        return self.comparison.study

    @property
    def result(self) -> Result:
        return self.comparison.results[-1]

    @property
    def fedavg(self) -> Result:
        """FedAvg on the same replicates."""
        return self.comparison.results[0]

    @property
    def summary(self) -> Row:
        """How the chosen replicate was trained, its accuracy and gap, and why it was chosen."""
        about = describe_training(self.study, self.result, self.choice.replicate)
        return {**about, "why": self.choice.reason}

    def warn_useless(self) -> str:
        """A warning if the model is hardly better than the most frequent class; empty if it is.

        The margin is one point for the mean of the replicates, and for the saved model also the
        95% interval of its accuracy on test rows.
        """
        last = self.comparison.rows[-1]
        at = self.choice.replicate
        sums = self.result.test_sums[at]
        models = {"the saved model": (float(sums.accuracy()), float(constant_accuracy(sums)))}
        squares = self.result.history.squares
        margins = [1.96 * _standard_error(sums, squares and squares[at]), MARGIN]
        if last["accuracy"] is not None and last["seeds"] > 1:
            models["the mean over the replicates"] = (last["accuracy"], last["accuracy_constant"])
        for (name, pair), margin in zip(models.items(), margins, strict=False):
            accuracy, constant = pair
            if accuracy - constant < max(margin, MARGIN):
                return (
                    f"{name} is not clearly more accurate ({format_percent(accuracy)}) than always "
                    f"predicting the most frequent class ({format_percent(constant)}) on these "
                    f"rows, so a small gap is no achievement; {self._advise_useless()}"
                )
        return ""

    def _advise_useless(self) -> str:
        """What to try, which depends on whether FedAvg is better than the most frequent class."""
        plain = self.comparison.rows[0]
        if (
            plain["accuracy"] is not None
            and plain["accuracy"] < plain["accuracy_constant"] + MARGIN
        ):
            return "FedAvg is not either, so the features may say little about the label"
        return "`fedgft frontier` shows what can be reached, or try a larger `target`"

    def _list_rates(self) -> list[tuple[str, list[float | None]]]:
        """The rates at which FedAvg and the model select each group on test rows."""
        at = self.choice.replicate
        data = self.study.dataset
        models = (self.fedavg, self.result)
        each = [selection_rates(made.test_sums[at].by_group()) for made in models]
        classes = range(len(data.classes))
        shown = [1] if len(data.classes) == 2 else classes
        return [
            (f"{data.classes[c]}, {group}", [number(rates[g, c]) for rates in each])
            for g, group in enumerate(data.group_names)
            for c in shown
        ]

    def clients(self) -> list[Row]:
        """Every client with this method and with FedAvg, see `client_rows`."""
        return client_rows(
            self.study, self.result, replicate=self.choice.replicate, fedavg=self.fedavg
        )

    def model(self) -> FairModel:
        """The chosen model, as `load_model` would read it from the file."""
        return build_model(self.study, self.result, self.choice.replicate, why=self.choice.reason)

    def card(self) -> str:
        """The model card in Markdown: `FairModel.card`, FedAvg beside the model, and limits."""
        at = self.choice.replicate
        method = label_methods([self.result.method])[self.result.method]
        results = {"FedAvg": self.fedavg, method: self.result}
        rows = [describe_training(self.study, result, at) for result in results.values()]
        accuracies = [format_percent(row["accuracy_test"]) for row in rows]
        gaps = [format_points(row["gap_test"]) for row in rows]
        constant = format_percent(number(constant_accuracy(self.result.test_sums[at])))
        warning = self.warn_useless().replace("`", "")
        lines = [
            self.model().card(),
            "## Beside FedAvg",
            "",
            "FedAvg is the same training without fairness, on the same rows.",
            "",
            f"| on held-out rows | {' | '.join(results)} |",
            "|---|" + "---:|" * len(results),
            f"| accuracy | {' | '.join(accuracies)} |",
            f"| gap, points | {' | '.join(gaps)} |",
            *(
                f"| predicted {escape_markdown(name)} | {' | '.join(map(format_percent, rates))} |"
                for name, rates in self._list_rates()
            ),
            "",
            f"Always predicting the most frequent class has accuracy {constant} on the held-out "
            "rows.",
            *([f"Warning: {escape_markdown(warning)}."] if warning else []),
            "",
            "## Columns that are not features",
            "",
            escape_markdown(_describe_excluded(self.study.dataset)) or "None.",
            "",
            "## Limits",
            "",
            "- Accuracy and gap are those of rows like the training rows. They can change with the "
            "people, with time and with the threshold.",
            "- A small gap in one metric says nothing about other metrics or about other groups.",
            "- Whether this use of the model is right and lawful is not a result of the data.",
            "",
        ]
        return "\n".join(lines)

    def audit(self, *, group: str = "", about: Mapping[str, Any] = NOTHING) -> Audit:
        """Audit the decisions of the saved model on the test rows of its replicate.

        The tolerance is the target, if there is one above 0.

        Parameters
        ----------
        group
            The name of the column of groups, where `Dataset.excluded` does not name it.
        about
            What a reader must know, see `fedgft.audit`; it replaces what this function states.
        """
        name = self.result.metric.name
        target = self.summary["target"]
        has_tolerance = bool(target) and name in CATALOG
        method = label_methods([self.result.method])[self.result.method]
        tested = "Rows that were held out of training"
        if self.study.protocol.test == "overlap":
            tested = "Test rows, which clients have trained on too"
        stated = {
            "title": f"Audit of a model trained with {method} on {self.study.dataset.name}",
            "model": MODEL_FILE,
            "prepared_by": "fedgft train",
            "decided_by": "the model: the class that it finds most probable",
            "purpose": f"{tested}, with the split of seed {self.summary['seed']}",
        }
        if len(self.study.dataset.classes) == 2:
            stated["outcome"] = f"predicted {self.study.dataset.classes[1]}"
        model = self.model()
        if model.has_trees:
            shares = _list_shares(model, MAX_FEATURES)
            stated["relies_on"] = f"{shares} (shares of columns in the gain of all splits)"
        groups = [column for column, why in self.study.dataset.excluded if why == GROUP]
        return audit(
            _measure_test_rows(self, " & ".join(groups) or group or "group"),
            tolerance={name: target} if has_tolerance else None,
            about={**stated, **about},
        )

    def save(self, folder: Path, *, all_models: bool = False) -> list[Path]:
        """Write the chosen model, its card, the rows and the figures; return their paths.

        All files are written or none.

        Parameters
        ----------
        folder
            The output folder; it is created if it does not exist.
        all_models
            Whether the models of all replicates are written too.
        """
        models = {MODEL_FILE: self.choice.replicate}
        if all_models:
            models |= {f"model-{seed}.safetensors": i for i, seed in enumerate(self.study.seeds)}
        make_folder(folder)
        with stage_files(folder) as place:
            paths = []
            for name, replicate in models.items():
                why = self.choice.reason if name == MODEL_FILE else None
                path = place / name
                paths.append(save_model(self.study, self.result, replicate, path, why=why))
            with atomic_write(place / CARD_FILE) as part:
                part.write(self.card().encode())
            figure = plot_before_after(self.study, self.fedavg, self.result)
            paths += [place / CARD_FILE, *save_figure(figure, place, "before-after")]
            paths += self.comparison.write(place)
        return [folder / path.name for path in paths]


def describe_features(dataset: Dataset, *, all_names: bool = False) -> str:
    """Which columns are features, and which are not and why, in two sentences.

    Parameters
    ----------
    dataset
        The data.
    all_names
        Whether all features are named, however many.

    Returns
    -------
    The sentences; empty for images.
    """
    if dataset.images:
        return ""
    names = list(dataset.columns)
    if dataset.encoder is not None:
        names = [field.name for field in dataset.encoder.fields]
    more = 0 if all_names else len(names) - MAX_FEATURES
    listed = ", ".join(names if more <= 0 else names[:MAX_FEATURES])
    rest = f" and {more} more" if more > 0 else ""
    excluded = _describe_excluded(dataset)
    text = f"Features: {listed}{rest}."
    return f"{text} Not features: {excluded}." if excluded else text


def describe_earlier_scores(dataset: Dataset) -> str:
    """A note on features that look like scores or decisions of an earlier model; empty if none do.

    The name says so, and the values are between 0 and 1 or the names of classes.
    """
    fields = () if dataset.images or dataset.encoder is None else dataset.encoder.fields
    classes = {name.casefold() for name in dataset.classes}
    found = []
    for field in fields:
        if SCORE_WORDS.isdisjoint(split_words(field.name)):
            continue
        if isinstance(field, Categorical):
            is_likely = {level.casefold() for level in field.levels} - {MISSING} <= classes
        else:
            values = _read_raw_column(dataset, field.name)
            is_likely = bool(((values > -ROUNDED) & (values < 1 + ROUNDED)).all())
        if is_likely:
            found.append(field.name)
    if not found:
        return ""
    if len(found) == 1:
        looks = "looks like the score or decision of an earlier model, and is used as a feature"
        return f"{found[0]} {looks}; `leave_out` {found[0]} leaves it out"
    looks = "look like scores or decisions of an earlier model, and are used as features"
    return f"{_join(found)} {looks}; `leave_out` {' '.join(found)} leaves them out"


def _read_raw_column(dataset: Dataset, name: str) -> np.ndarray:
    """(n,) A feature in the units of the table, up to rounding errors of float32."""
    at = dataset.columns.index(name)
    center = 0.0 if dataset.center is None else dataset.center[at]
    scale = 1.0 if dataset.scale is None else dataset.scale[at]
    return center + scale * dataset.features[:, at]


def _describe_excluded(dataset: Dataset) -> str:
    """The columns that are not features, each with the reason; empty if there are none."""
    return ", ".join(f"{name} ({why})" for name, why in dataset.excluded)


def _standard_error(sums: Sums, squares: Sums | None) -> float:
    """The standard error of the accuracy on these rows; `squares`: of their weights, or None."""
    accuracy = float(sums.accuracy())
    rows = float(sums.rows())
    if squares is not None:
        rows *= rows / max(float(squares.rows()), 1.0)
    return float(np.sqrt(accuracy * (1 - accuracy) / max(1.0, rows)))


def _measure_test_rows(trained: TrainedModel, group: str) -> SiteSums:
    """The sums over the test rows under the chosen model, by client where a column names them."""
    study = trained.study
    data = study.dataset
    at = trained.choice.replicate
    federation = trained.result.federations[at]
    rows = np.unique(federation.test)
    scores = predict_proba(federation, study.model, trained.result.history.params[at], rows)
    classes = np.array(data.classes)
    names = np.array([*data.group_names, None], object)  # the last: not recorded, -1
    groups = names[data.groups[rows]]
    given = " & ".join(data.given)
    strata = np.empty(0)
    if data.strata is not None:
        strata = np.array(data.strata_names, object)[data.strata]
    owner = np.full(len(rows), TEST_SITE, object)
    is_by_client = study.kind == "column" and len(data.client_names) <= MAX_SITES
    if is_by_client and data.clients is not None:
        owner = np.array(data.client_names, object)[data.clients[rows]]
    found = SiteSums()
    for site in dict.fromkeys(owner):
        mine = owner == site
        found += measure(
            classes[data.labels[rows[mine]]],
            classes[scores[mine].argmax(1)],
            scores=scores[mine, 1] if len(classes) == 2 else scores[mine],
            sensitive_features={group: groups[mine]},
            sample_weight=None if data.row_weights is None else data.row_weights[rows[mine]],
            control_features={given: strata[rows[mine]]} if given else None,
            randomized_groups=data.randomized or None,
            classes=data.classes,
            values={group: data.group_names},
            site=site,
        )
    return found


def train_model(
    study: Study, method: str = "fedgft-control", metric: str | Metric = "sp", *, alpha: float = 0.5
) -> TrainedModel:
    """Train one method on all replicates of a study, and FedAvg for comparison; choose a replicate.

    Parameters
    ----------
    study
        Data, protocol (with `lam`, `beta` or `target`), replicates and model.
    method
        A key of `METHODS`.
    metric
        The metric whose gap is reduced and measured.
    alpha
        Heterogeneity of a Dirichlet partition: small is heterogeneous.
    """
    methods = list(dict.fromkeys(("fedavg", method)))
    comparison = compare_methods(study, methods, [get_metric(metric)], [alpha])
    return TrainedModel(comparison, choose_replicate(study, comparison.results[-1]))


def build_model(
    study: Study, result: Result, replicate: int, *, why: str | None = None
) -> FairModel:
    """The model of one replicate: tensors by their torch names, the scaling, and the header.

    The header says how a raw table becomes features, how the model was trained and what gap it
    has. Raises `FedgftError` where the model has diverged.
    """
    flat = result.history.params[replicate]
    federation = result.history.federation
    finite = federation is None or np.isfinite(federation[-1].score[replicate]).all()
    if not (finite and np.isfinite(flat).all()):
        raise FedgftError(
            f"{result.method}: the model of seed {study.seeds[replicate]} has diverged, so it is "
            "not saved; try a smaller `lr`"
        )
    about = {
        "data": study.dataset.name,
        "method": result.method,
        "metric": result.metric.name,
        "protocol": study.protocol.name,
        "seed": int(study.seeds[replicate]),
        "trained": {**describe_training(study, result, replicate), "why": why},
    }
    inputs = ModelInputs.of(result.federations[replicate])
    model = get_model(study.model)
    if isinstance(model, Trees):
        model = replace(model, max_depth=int(result.depth[replicate]))
    return inputs.build(model, flat, about)


def save_model(
    study: Study, result: Result, replicate: int, path: Path, *, why: str | None = None
) -> Path:
    """Write the model of one replicate, see `build_model`; return the path.

    `why`: the reason for choosing this replicate, which the header of the file states.
    """
    return build_model(study, result, replicate, why=why).save(path)


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as Parquet that only its owner can read.

    Files with the same columns can be concatenated: a column that holds only nulls still has a
    type, and a value that is itself a table (rates by group) becomes JSON text.
    """
    flat = [
        {name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()}
        for row in rows
    ]
    frame = pl.DataFrame(flat, infer_schema_length=None)
    empty = [name for name, kind in frame.schema.items() if kind == pl.Null]
    frame = frame.with_columns(
        pl.col(name).cast(pl.String if name in TEXT_COLUMNS else pl.Float64) for name in empty
    )
    buffer = BytesIO()
    frame.write_parquet(buffer)
    with atomic_write(path, private=True) as part:
        part.write(buffer.getvalue())
    return path


# Results in words: sentences made from rows (`results.row`).


def list_results(
    rows: Sequence[Row], *, groups: Sequence[str], title: str, methods: Sequence[str] = ()
) -> list[str]:
    """The result in a few lines: accuracy and gap with FedAvg and with the method, on test rows.

    Parameters
    ----------
    rows
        One row per method of one cell: FedAvg's first, that of the method last. Of the local
        methods between them, the one with the smallest gap has a line too.
    groups, title
        Names of the groups, and of the metric.
    methods
        Methods that a figure or table shows beside those of the rows, see `label_methods`.

    Returns
    -------
    A heading, one line per method, the accuracy of a constant model, and the noise floor.
    """
    last = rows[-1]
    names = label_methods([*methods, *(row["method"] for row in rows)])
    shown = {names[rows[0]["method"]]: rows[0]}
    local = [row for row in rows[1:-1] if row["method"] in LOCAL_METHODS]
    local = [row for row in local if row["gap_hard_test"] is not None]
    if local:
        best = min(local, key=lambda row: row["gap_hard_test"])
        shown[f"best local ({METHOD_LABELS[best['method']]})"] = best
    shown[names[last["method"]]] = last
    where = (
        "Held-out rows" if last["protocol"] == "heldout" else "Test rows (clients train on them)"
    )
    times = "one replicate" if last["seeds"] == 1 else f"mean of {last['seeds']} replicates"
    lines = [f"{where}, {times}. {title.capitalize()} {_describe_groups(last, groups)}:"]
    width = max(map(len, shown))
    lines += [f"{name:<{width}}  {_describe_result(row)}" for name, row in shown.items()]
    if last["accuracy_constant"] is not None:
        constant = format_percent(last["accuracy_constant"])
        lines.append(f"Always predicting the most frequent class: {constant} accurate.")
    if "gap_marginal_test" in last:
        lines.append(f"{names[last['method']]}: {describe_marginal(last)}")
    if last["floor"] is not None:
        lines.append(
            f"Noise floor: {format_points(last['floor'])} points, the gap that a perfectly fair "
            "model would show on these rows."
        )
    return lines


def _describe_groups(row: Row, groups: Sequence[str]) -> str:
    """The groups of a gap: both of two, or else how many and which two are farthest apart."""
    if len(groups) <= 2:
        return f"between {_join(groups)}"
    widest = row["widest"]
    text = f"between {len(groups)} groups"
    return text if widest is None else f"{text} (widest: {widest['high']} and {widest['low']})"


def _describe_result(row: Row) -> str:
    """Accuracy and gap of decisions on test rows: "84.6% accurate, gap 4.8 points (...)"."""
    accuracy = f"{format_percent(row['accuracy'], unknown=NOT_ESTIMABLE)} accurate"
    if row["accuracy"] is None:
        accuracy = "training diverged"
    gap = f"gap {NOT_ESTIMABLE}" if row["gap_hard_test"] is None else f"gap {_describe_gap(row)}"
    return f"{accuracy}, {gap}"


def state_target(row: Row, fedavg: Row | None = None) -> str:
    """One sentence: the target, whether it was reached, and the mean gap.

    `fedavg`: FedAvg's row of the same cell, whose gap is named too.
    """
    kind = {"decisions": "gap_hard", "scores": "gap_soft"}[row["target_of"]]
    if row[kind] is None or row["accuracy"] is None:
        return NO_GAP
    plain = ""
    if fedavg is not None:
        plain = f", FedAvg {format_points(fedavg[kind], unknown=NOT_ESTIMABLE)}"
    gaps = f"mean gap {format_points(row[kind])}{plain}"
    local = ""
    if row.get("local_target") is not None:
        local = f", and {format_points(row['local_target'])} points on the rows of each client"
        gaps += f"; mean of the largest local gaps {_describe_local_gap(row, fedavg)}"
    text = (
        f"Target {format_points(row['target'])} points for {row['target_of']} on the clients' own "
        f"rows{local}: {_count_reached(row)} ({gaps})."
    )
    is_above = row[kind] > row["target"]
    if local and row["local_gap"] is not None:
        is_above |= row["local_gap"] > row["local_target"]
    if row["reached"] and is_above:
        tolerance = format_points(TARGET_TOLERANCE)
        text += f" A gap up to {tolerance} points above the target counts as reached."
    return text


def _describe_local_gap(row: Row, fedavg: Row | None) -> str:
    """The largest local gap, and that of FedAvg where it was trained: "4.9, FedAvg 15.2"."""
    text = format_points(row["local_gap"], unknown=NOT_ESTIMABLE)
    if fedavg is None:
        return text
    return f"{text}, FedAvg {format_points(fedavg['local_gap'], unknown=NOT_ESTIMABLE)}"


def describe_target(row: Row, fedavg: Row | None = None) -> str:
    """The target, how many replicates reached it, what it cost, and which groups are behind it.

    `fedavg`: FedAvg's row of the same cell, where it was trained.
    """
    texts = [state_target(row, fedavg)]
    if texts == [NO_GAP]:
        return NO_GAP
    if row["collapsed"]:
        texts.append(describe_collapse(row))
    return " ".join([*texts, *describe_details(row, fedavg)])


def describe_details(row: Row, fedavg: Row | None = None) -> list[str]:
    """Sentences on the gap of decisions and the accuracy on test rows, beside FedAvg's."""
    return [_describe_test(row), _describe_accuracy(row, fedavg)]


def count_missed(row: Row) -> int:
    """Replicates that did not meet the target, or met it with a collapsed model; 0 without one."""
    if row["reached"] is None:
        return 0
    return row["seeds"] - row["reached"] + row["reached_collapsed"]


def describe_collapse(row: Row) -> str:
    """How many models have collapsed, and what that means."""
    rates = _describe_rates(row["selection_rates_federation"], digits=2)
    selected = rates and f" (selected on the clients' rows: {rates})"
    return (
        f"The model has collapsed in {row['collapsed']} of {row['seeds']} replicates: it gives "
        f"nearly everybody the same decision{selected}. Such a model has no gap and no use."
    )


def suggest_changes(row: Row) -> str:
    """What to try where a target was missed; empty where every replicate met it."""
    if not count_missed(row):
        return ""
    longest = max(map(int, row["rounds"]))
    rounds = f"more rounds (--rounds {2 * longest}; {longest} were tried)"
    rate = f"another learning rate (--lr; {row['lr']:.3g} on average)"
    larger = "a larger --target"
    if row.get("local_target") is not None:
        larger += " or --local-target"
    tried = [rounds, rate, larger]
    if row["collapsed"]:
        tried = [larger, rate, "another --metric"]
    why = "" if row["missed_because"] is None else f"{row['missed_because']} "
    text = (
        f"{why}What to try: {'; '.join(tried)}. `fedgft frontier` shows which gaps can be reached, "
        "and at what price."
    )
    if row["floor"] is not None and row["target"] < row["floor"]:
        text += (
            f" The target is below the noise floor of the test rows, "
            f"{format_points(row['floor'])} points: it cannot be checked on them."
        )
    return text


def describe_saved_model(about: Row) -> str:
    """Which replicate's model was saved, why, and its gap (`TrainedModel.summary`)."""
    on_clients = NOT_ESTIMABLE if about["gap"] is None else f"{format_points(about['gap'])} points"
    verdict = ""
    if about["target"] is not None:
        verdict = _describe_verdict(about["gap"], "target", about["target"])
        target = format_points(about["target"])
        if "met" in verdict and about["gap"] > about["target"]:
            verdict = f", within {format_points(TARGET_TOLERANCE)} points of the target {target},"
    low = about["gap_test_low"]
    on_test = NOT_ESTIMABLE
    if about["gap_test"] is not None:
        on_test = format_gap(about["gap_test"], low, about["gap_test_high"])
    texts = [
        f"Saved model: the replicate of seed {about['seed']}, {about['why']}. Its gap of "
        f"{about['gap_of']} is {on_clients} on its clients' rows{verdict} and {on_test} on its "
        "test rows."
    ]
    if about.get("local_target") is not None:
        largest = format_points(about["local_gap"], unknown=NOT_ESTIMABLE)
        verdict = _describe_verdict(about["local_gap"], "local target", about["local_target"])
        texts.append(f"The largest gap on the rows of one client is {largest} points{verdict}.")
    if about["target"] and about["reached"] and low is not None and low > about["target"]:
        texts.append(
            "On test rows the gap exceeds the target, because the clients' rows are a sample too: "
            "a smaller `target` or more rows leave a margin."
        )
    if about["collapsed"]:
        texts.append("It has collapsed.")
    return " ".join(texts)


def _describe_verdict(gap: float | None, name: str, target: float) -> str:
    """Whether a gap is within its target: " (target 5.0: met)"."""
    is_met = gap is not None and gap <= target + TARGET_TOLERANCE
    return f" ({name} {format_points(target)}: {'met' if is_met else 'missed'})"


def describe_widest(found: Row | None, replicates: int) -> str:
    """The pair of groups behind a gap and the condition, from a row's `widest`."""
    if found is None:
        return NOT_ESTIMABLE
    times = found["replicates"]
    often = "" if times == replicates else f", in {times} of {replicates} replicates"
    return f"{found['high']} (the higher rate) and {found['low']}, {found['condition']}{often}"


def list_choice(found: Frontier, *, groups: Sequence[str], tested: str) -> list[str]:
    """What was chosen from a frontier, in a few lines: see `list_results`.

    There must be a choice. `groups` are the names of the groups, `tested` names the test rows.

    Returns
    -------
    Accuracy and gap of FedAvg and of the chosen method; which setting and which model this is;
    and, where models have collapsed, how many.
    """
    chosen = found.chosen
    saved = found.replicate
    assert chosen is not None and saved is not None
    rows = found.rows()
    row = rows[found.points.index(chosen)]
    both = [rows[0]] if chosen is found.points[0] else [rows[0], row]
    methods = [point.method for point in found.points]
    lines = list_results(both, groups=groups, title=found.metric.title, methods=methods)
    knee = find_knee([point for point in found.points if point.method in METHODS], found.metric)
    reason = "at the knee, where a larger gap brings little accuracy"
    if chosen is not knee:
        reason = "the one with the smallest gap"
    if found.target is not None:
        limit = f"{format_points(found.target)} points"
        is_met = chosen.meets(found.metric, found.target)
        reason = f"the most accurate with a gap within {limit}" if is_met else f"nearest to {limit}"
    lines.append(f"Chosen on the clients' rows: {_describe_setting(chosen, methods)}, {reason}.")
    on_clients, on_test = (
        format_points(chosen.values(found.metric, where)[1][saved])
        for where in ("federation", "test")
    )
    lines.append(
        f"Saved model: the replicate of seed {found.study.seeds[saved]}, {found.why}. Its gap is "
        f"{on_clients} points on its clients' rows and {on_test} points on {tested}."
    )
    if row["collapsed"]:
        lines.append(
            f"The model has collapsed in {row['collapsed']} of {row['seeds']} replicates: it gives "
            "nearly everybody the same decision."
        )
    return lines


def describe_trees(model: FairModel, *, out_of_fold: bool) -> str:
    """How many trees there are, which columns matter most to them, and what gaps refer to."""
    most = _list_shares(model, MAX_IMPORTANT)
    text = f"Model: {model.forest.describe()}"
    text += f" Largest shares in the gain of their splits: {most}."
    if out_of_fold:
        text += (
            " Numbers for the clients' rows are out of fold: each row is decided by trees that "
            "have not seen it."
        )
    return text


def _list_shares(model: FairModel, most: int) -> str:
    """The columns with the largest importances and their shares, such as "age 24.0%"."""
    shares = [(name, share) for name, share in model.importances().items() if share > 0]
    texts = [f"{name} {format_percent(share)}" for name, share in shares[:most]]
    return _join(texts) if texts else "no column"


def _describe_setting(point: TradeoffPoint, methods: Sequence[str]) -> str:
    """A method and its strength in words: "FedGFT, trained to a gap of 0.3 points".

    `methods` are all that are shown.
    """
    name = label_methods(methods)[point.method]
    strength = METHODS[point.method].strength
    if strength is None or point.strength is None:
        return name
    if strength == "target":
        return f"{name}, trained to a gap of {format_points(point.strength)} points"
    return f"{name} with {strength} {point.strength:.3g}"


def describe_choice(found: Frontier) -> str:
    """Balanced accuracy and selection rates of the chosen point, and the groups behind its gap."""
    chosen = found.chosen
    assert chosen is not None
    row = found.rows()[found.points.index(chosen)]
    rates = _describe_rates(row["selection_rates"], digits=1)
    selected = rates and f", it selects {rates}"
    return (
        f"Its balanced accuracy is {format_percent(row['balanced_accuracy'])}{selected}; always "
        f"predicting the most frequent class has accuracy "
        f"{format_percent(row['accuracy_constant'])}. The gap is widest between "
        f"{describe_widest(row['widest'], row['seeds'])}."
    )


def _count_reached(row: Row) -> str:
    """In how many replicates the target was reached, and how many of these have collapsed."""
    times = row["reached"]
    seeds = row["seeds"]
    if not times:
        return "missed" if seeds == 1 else f"missed in all {seeds} replicates"
    text = "reached" if seeds == 1 else f"reached in {times} of {seeds} replicates"
    if lost := row["reached_collapsed"]:
        models = "models has" if lost == 1 else "models have"
        return f"{text}, but {lost} of these {models} collapsed"
    return text


def _describe_test(row: Row) -> str:
    """The gap of decisions on test rows, the noise floor, and the groups behind the gap."""
    rows = "Held-out decisions" if row["protocol"] == "heldout" else "Decisions on test rows"
    if row["gap_hard_test"] is None:
        return f"{rows}: not estimable."
    return (
        f"{rows} differ by {format_points(row['gap_hard_test'])} points (noise floor "
        f"{format_points(row['floor'])}), widest between "
        f"{describe_widest(row['widest'], row['seeds'])}."
    )


def _describe_accuracy(row: Row, plain: Row | None) -> str:
    """Accuracy and balanced accuracy on test rows, beside FedAvg's and a constant model's."""
    text = f"Accuracy {format_percent(row['accuracy'])}"
    balanced = f"balanced accuracy {format_percent(row['balanced_accuracy'])}"
    if plain is not None and plain["accuracy"] is not None:
        less = plain["accuracy"] - row["accuracy"]
        more = "less" if less >= 0 else "more"
        text += f", {format_points(abs(less))} points {more} than FedAvg"
        balanced += f" (FedAvg {format_percent(plain['balanced_accuracy'])})"
    constant = format_percent(row["accuracy_constant"])
    return f"{text}; {balanced}; always predicting the most frequent class has {constant}."


def _describe_gap(row: Row) -> str:
    """The gap of decisions on test rows, with its interval or why it has none."""
    low = row["gap_hard_test_low"]
    high = row["gap_hard_test_high"]
    if low is None or high is None:
        return f"{format_points(row['gap_hard_test'])} points ({_explain_no_interval(row)})"
    return format_gap(row["gap_hard_test"], low, high)


def _explain_no_interval(row: Row) -> str:
    """Why a gap has no interval."""
    if row.get("randomized"):
        return f"estimated from groups randomized with epsilon {row['randomized']:g}"
    return "root mean square over strata" if "gap_marginal_test" in row else FEW_ROWS


def describe_marginal(row: Row) -> str:
    """The gaps beside one within strata: over all rows, pooled, and the largest one."""
    all_rows, pooled, largest = (
        format_points(row[f"gap_{name}_test"], unknown=NOT_ESTIMABLE)
        for name in ("marginal", "pooled", "largest")
    )
    return (
        f"Over all rows of each group the gap is {all_rows} points; within strata, the pooled gap "
        f"(Mantel-Haenszel) is {pooled} points and the largest one {largest}."
    )


def _describe_rates(rates: Row, *, digits: int) -> str:
    """Selection rates of a few groups; empty where there are many groups or more classes."""
    texts = [f"{100 * r:.{digits}f}% of {g}" for g, r in rates.items() if isinstance(r, float)]
    return _join(texts) if 0 < len(texts) <= MAX_GROUPS else ""


def _join(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
