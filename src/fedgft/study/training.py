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
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import METHOD_LABELS, METHODS
from fedgft.engine.history import ModelInputs
from fedgft.errors import FedgftError, LazyModule
from fedgft.fair_model import FairModel
from fedgft.formatting import format_gap, format_percent, format_points
from fedgft.metrics import Metric, get_metric
from fedgft.models import get_model
from fedgft.store import atomic_write, make_folder, stage_files
from fedgft.study.figures import plot_rounds, save_figure
from fedgft.study.results import (
    Choice,
    Row,
    choose_replicate,
    client_rows,
    describe_training,
    round_rows,
    row,
)
from fedgft.study.study import Result, Study
from fedgft.study.tradeoff import Frontier

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

MAX_GROUPS = 4  # largest number of groups whose rates a sentence names; tables show all
NOT_ESTIMABLE = "not estimable"
FEW_ROWS = "95% interval not estimable: fewer than ten rows"
MODEL_FILE = "model.safetensors"
TEXT_COLUMNS = ("rule", "target_of", "missed_because", "widest", "widest_federation")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods, trained on the same replicates; `rows` has one row per result."""

    study: Study
    results: list[Result]
    rows: list[Row]

    def save(
        self,
        folder: Path,
        *,
        models: Mapping[str, int] = MappingProxyType({}),
        why: str | None = None,
    ) -> list[Path]:
        """Write the models, rows.parquet, rounds.parquet and the figure; all files or none.

        Parameters
        ----------
        folder
            The output folder; it is created if it does not exist.
        models
            File names, and the replicates of the last result whose models they hold.
        why
            The reason for the choice of the replicate in `MODEL_FILE`, which its header states.

        Returns
        -------
        The paths of the files.
        """
        make_folder(folder)
        with stage_files(folder) as place:
            for name, replicate in models.items():
                reason = why if name == MODEL_FILE else None
                save_model(self.study, self.results[-1], replicate, place / name, why=reason)
            write_rows(self.rows, place / "rows.parquet")
            lines = [line for result in self.results for line in round_rows(self.study, result)]
            write_rows(lines, place / "rounds.parquet")
            save_figure(plot_rounds(self.study, self.results), place, "rounds")
        names = (*models, "rows.parquet", "rounds.parquet", "rounds.png", "rounds.svg")
        return [folder / name for name in names]


def compare_methods(
    study: Study, methods: Sequence[str], metrics: Sequence[Metric], alphas: Sequence[float]
) -> Comparison:
    """Train every method for every metric at every alpha, on the replicates of one study.

    Results are in the order alpha, metric, method. The rows report missed targets, so there is no
    `TargetMissedWarning`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        results = [
            study.run(alpha, method, metric)
            for alpha in alphas
            for metric in metrics
            for method in methods
        ]
    return Comparison(study, results, [row(study, result) for result in results])


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """One method, trained on all replicates, and the choice of one of them.

    The last result of `comparison` is that of the method. If the method has a target, the first is
    FedAvg's, to show what the target costs.
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
    def fedavg(self) -> Result | None:
        """FedAvg on the same replicates, where it was trained for comparison."""
        return self.comparison.results[0] if len(self.comparison.results) > 1 else None

    @property
    def summary(self) -> Row:
        """How the chosen replicate was trained, its accuracy and gap, and why it was chosen."""
        about = describe_training(self.study, self.result, self.choice.replicate)
        return {**about, "why": self.choice.reason}

    def clients(self) -> list[Row]:
        """Every client before and after, see `client_rows`."""
        return client_rows(
            self.study, self.result, replicate=self.choice.replicate, plain=self.fedavg
        )

    def model(self) -> FairModel:
        """The chosen model, as `load_model` would read it from the file."""
        return build_model(self.study, self.result, self.choice.replicate, why=self.choice.reason)

    def save(self, folder: Path, *, all_models: bool = False) -> list[Path]:
        """Write the chosen model, or with `all_models` also all others, the rows and the figure."""
        models = {MODEL_FILE: self.choice.replicate}
        if all_models:
            models |= {f"model-{seed}.safetensors": i for i, seed in enumerate(self.study.seeds)}
        return self.comparison.save(folder, models=models, why=self.choice.reason)


def train_model(
    study: Study, method: str = "fedgft-control", metric: str | Metric = "sp", *, alpha: float = 0.5
) -> TrainedModel:
    """Train one method on all replicates of a study and choose the best replicate.

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
    methods = ["fedavg", method] if method == "fedgft-control" else [method]
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
    return inputs.build(get_model(study.model), flat, about)


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


def compare_sentences(rows: Sequence[Row], *, groups: Sequence[str], title: str) -> str:
    """Two sentences about one cell: what FedGFT changes, and what the local methods do.

    Parameters
    ----------
    rows
        One row per method of one cell. If there is a row of fedgft-control, it represents FedGFT.
    groups, title
        Names of the groups, and of the metric.

    Returns
    -------
    The sentences; empty where FedAvg or FedGFT is missing.
    """
    by = {row["method"]: row for row in rows}
    plain = by.get("fedavg")
    fair = by.get("fedgft-control", by.get("fedgft"))
    if plain is None or fair is None:
        return ""
    if plain["gap_hard_test"] is None or fair["gap_hard_test"] is None:
        return (
            f"The held-out gap in {title} is not estimable: a group has no test row of the event."
        )
    text = (
        f"On held-out people, FedAvg's decisions differ between {_join(groups)} by "
        f"{_describe_gap(plain)} ({title}); those of {METHOD_LABELS[fair['method']]} differ by "
        f"{_describe_gap(fair)}, where a perfectly fair model would show about "
        f"{format_points(fair['floor'])} by chance, and it is right in "
        f"{format_percent(fair['accuracy'])} of cases against {format_percent(plain['accuracy'])} "
        f"(always predicting the most frequent class: {format_percent(fair['accuracy_constant'])})."
    )
    if fair["collapsed"]:
        text = f"{text} {describe_collapse(fair)}"
    local = [by[name] for name in ("lrw", "lft", "fairfed") if name in by]
    local = [row for row in local if row["gap_hard_test"] is not None]
    if not local:
        return text
    best = min(local, key=lambda row: row["gap_hard_test"])
    name = METHOD_LABELS[best["method"]]
    gap = format_points(best["gap_hard_test"])
    rest = f"{gap} points at {format_percent(best['accuracy'])} accuracy"
    if best["gap_hard_test"] <= fair["gap_hard_test"]:
        return f"{text} Here making each client fair on its own does as well: {name}, {rest}."
    return (
        f"{text} Making each client fair on its own is not the same thing: of the local methods "
        f"compared here ({_join([METHOD_LABELS[row['method']] for row in local])}) the best, "
        f"{name}, leaves {rest}."
    )


def describe_target(row: Row, plain: Row | None = None) -> str:
    """The target of fedgft-control, how many replicates reached it, and what it cost.

    `plain`: FedAvg's row of the same cell, where it was trained.
    """
    kind = {"decisions": "gap_hard", "scores": "gap_soft"}[row["target_of"]]
    if row[kind] is None or row["accuracy"] is None:
        return "The gap is not estimable, so nothing can be said about the target."
    fedavg = ""
    if plain is not None:
        fedavg = f", where FedAvg has {format_points(plain[kind], unknown=NOT_ESTIMABLE)}"
    texts = [
        f"Asked for a gap of {row['target_of']} of at most {format_points(row['target'])} points: "
        f"{_count_reached(row)}: mean gap {format_points(row[kind])}{fedavg}."
    ]
    if row["collapsed"]:
        texts.append(describe_collapse(row))
    return " ".join([*texts, _describe_test(row), _describe_accuracy(row, plain)])


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
    tried = [rounds, rate, "a larger --target"]
    if row["collapsed"]:
        tried = ["a larger --target", rate, "another --metric"]
    why = "" if row["missed_because"] is None else f"{row['missed_because']} "
    text = (
        f"{why}What to try: {'; '.join(tried)}. `fedgft frontier` shows which gaps can be reached, "
        "and at what price."
    )
    if row["floor"] is not None and row["target"] < row["floor"]:
        text += (
            " On as many test rows as these a perfectly fair model shows "
            f"{format_points(row['floor'])} points by chance, so a smaller target cannot be "
            "checked."
        )
    return text


def describe_saved_model(about: Row) -> str:
    """Which replicate's model was saved, why, and its gap (`TrainedModel.summary`)."""
    on_clients, on_test = (
        NOT_ESTIMABLE if about[name] is None else f"{format_points(about[name])} points"
        for name in ("gap", "gap_test")
    )
    verdict = ""
    if about["target"] is not None:
        met = "met" if about["reached"] else "missed"
        verdict = f" (target {format_points(about['target'])}: {met})"
    text = (
        f"The saved model is that of seed {about['seed']}: {about['why']}. Its gap of "
        f"{about['gap_of']} is {on_clients} on its clients' rows{verdict} and {on_test} on test "
        f"rows; {about['rounds']} rounds."
    )
    return f"{text} It has collapsed." if about["collapsed"] else text


def describe_widest(found: Row | None, replicates: int) -> str:
    """The pair of groups behind a gap and the condition, from a row's `widest`."""
    if found is None:
        return NOT_ESTIMABLE
    times = found["replicates"]
    often = "" if times == replicates else f", in {times} of {replicates} replicates"
    return f"{found['high']} (the higher rate) and {found['low']}, {found['condition']}{often}"


def describe_choice(found: Frontier, tested: str) -> list[str]:
    """What was chosen from a frontier and which replicate was saved, with accuracy and gap.

    `tested` names the test rows. There must be a choice. A second text follows where models have
    collapsed.
    """
    chosen = found.chosen
    saved = found.replicate
    assert chosen is not None and saved is not None
    accuracy, gap = chosen.mean(found.metric, "test")
    on_clients, on_test = (
        format_points(chosen.values(found.metric, where)[1][saved])
        for where in ("federation", "test")
    )
    strength = METHODS[chosen.method].strength
    setting = "" if strength is None else f" with {strength} {chosen.strength:.3g}"
    row = found.rows()[found.points.index(chosen)]
    rates = _describe_rates(row["selection_rates"], digits=1)
    selected = rates and f", it selects {rates}"
    texts = [
        f"Chosen: {METHOD_LABELS[chosen.method]}{setting}. On {tested} it is right in "
        f"{format_percent(accuracy)} of cases, gap {format_points(gap)} points, on average over "
        f"the replicates. Saved is the model of seed {found.study.seeds[saved]} ({found.why}): gap "
        f"{on_clients} on its clients' rows, {on_test} on {tested}. Its balanced accuracy is "
        f"{format_percent(row['balanced_accuracy'])}{selected}; always "
        f"predicting the most frequent class is right in "
        f"{format_percent(row['accuracy_constant'])}. The gap is widest between "
        f"{describe_widest(row['widest'], row['seeds'])}."
    ]
    if row["collapsed"]:
        texts.append(
            f"It has collapsed in {row['collapsed']} of {row['seeds']} replicates: the model gives "
            "nearly everybody the same decision."
        )
    return texts


def _count_reached(row: Row) -> str:
    """In how many replicates the target was reached, and how many of these have collapsed."""
    times = row["reached"]
    seeds = row["seeds"]
    where = "on the clients' own rows (within 0.3 points)"
    if not times:
        return f"missed {where} in all {seeds} replicates"
    text = f"reached {where} in {times} of {seeds} replicates"
    if lost := row["reached_collapsed"]:
        models = "models has" if lost == 1 else "models have"
        return f"{text}, but {lost} of these {models} collapsed"
    return text if times == seeds else f"{text}, missed in {seeds - times}"


def _describe_test(row: Row) -> str:
    """The gap of decisions on test rows, the noise floor, and the groups behind the gap."""
    rows = "Held-out decisions" if row["protocol"] == "heldout" else "Decisions on test rows"
    if row["gap_hard_test"] is None:
        return f"{rows}: not estimable."
    return (
        f"{rows} differ by {format_points(row['gap_hard_test'])} points (chance alone: "
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
    return f"{text}; {balanced}; always predicting the most frequent class is right in {constant}."


def _describe_gap(row: Row) -> str:
    """The gap of decisions on test rows, with its interval or why it has none."""
    low = row["gap_hard_test_low"]
    high = row["gap_hard_test_high"]
    if low is None or high is None:
        return f"{format_points(row['gap_hard_test'])} points ({FEW_ROWS})"
    return format_gap(row["gap_hard_test"], low, high)


def _describe_rates(rates: Row, *, digits: int) -> str:
    """Selection rates of a few groups; empty where there are many groups or more classes."""
    texts = [f"{100 * r:.{digits}f}% of {g}" for g, r in rates.items() if isinstance(r, float)]
    return _join(texts) if 0 < len(texts) <= MAX_GROUPS else ""


def _join(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
