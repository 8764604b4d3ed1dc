"""`fedgft compare`: one row per combination of method, metric and heterogeneity."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import (
    MISSED,
    comparison,
    decisions,
    note,
    out,
    paragraph,
    print_json,
    wrote,
)
from fedgft.cli.names import Alphas, Flag, Methods, Metrics, Place, check_methods
from fedgft.cli.options import Options
from fedgft.cli.progress import bar
from fedgft.files import expanded, open_folder, staged

if TYPE_CHECKING:
    from fedgft.experiments import Result, Study
    from fedgft.experiments.checkpoints import Checkpoints
    from fedgft.saved import SavedModel

MODEL = "model.safetensors"  # the one that is handed over


def compare(
    *,
    methods: Methods = ("fedavg", "lrw", "fairfed", "fedgft", "fedgft-control"),
    metrics: Metrics = ("sp",),
    alpha: Alphas = (0.5,),
    out_: Annotated[Place | None, Parameter(name="--out")] = None,
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    options: Options | None = None,
) -> None:
    """Train several methods on the same replicates and compare accuracy and gaps.

    Parameters
    ----------
    methods
        fedavg, lrw, lft, fairfed, fedgft (as published), fedgft-control (a target for decisions).
    metrics
        sp, eop, eo, cal, acc, fpr; several at once with weights: sp+0.5*eop.
    alpha
        Dirichlet concentrations: small is heterogeneous.
    out_
        Folder for rows.parquet, rounds.parquet and the figure.
    strict
        End with exit code 4 where fedgft-control misses its target in more than half of the
        replicates, or meets it with a collapsed model.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    from fedgft.report.words import missed

    options, out_ = options or Options(), None if out_ is None else expanded(out_)
    with nullcontext() if out_ is None else open_folder(out_):
        study, results, rows = run(options, list(methods), list(metrics), list(alpha), folder=out_)
        paths = [] if out_ is None else save(study, results, rows, out_)
        finished(study)
    if json:
        print_json(rows)
    else:
        report(study, results, rows)
        for row in rows:
            _say_target(row, rows)
    wrote(paths)
    if strict and any(missed(row) > row["seeds"] / 2 for row in rows):
        raise SystemExit(MISSED)


def _say_target(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Of a row with a target: whether it was reached, and if not, what to try."""
    from fedgft.report.words import advice, reached

    if row["target"] is None:
        return
    cell = ("metric", "alpha")
    same = [r for r in rows if all(r[name] == row[name] for name in cell)]
    plain = next((r for r in same if r["method"] == "fedavg"), None)
    where = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    paragraph(f"{row['metric']}{where}. {reached(row, plain)}")
    paragraph(advice(row))


def run(
    options: Options,
    methods: list[Any],
    metrics: list[Any],
    alphas: list[float],
    *,
    folder: Path | None,
    start: "SavedModel | None" = None,
) -> tuple["Study", list["Result"], list[dict[str, Any]]]:
    """Check everything that can be checked first, then train all cells under one progress bar.

    Whoever names a folder has it open, until the results are written too.
    """
    from fedgft.errors import FedgftError
    from fedgft.experiments import row
    from fedgft.experiments.checks import contradiction
    from fedgft.federated.control import TargetMissedWarning
    from fedgft.metrics import get_metric

    options.check()
    for name, values in (("--methods", methods), ("--metrics", metrics), ("--alpha", alphas)):
        if not values:
            raise FedgftError(f"{name} needs at least one value")
    methods, metrics = list(dict.fromkeys(methods)), list(dict.fromkeys(metrics))
    alphas = list(dict.fromkeys(alphas))
    for alpha in alphas:
        if not 0 < alpha < float("inf"):
            raise FedgftError(f"--alpha must be a positive number, got {alpha:g}")
    unheard = check_methods(options, methods)
    wanted = [get_metric(name) for name in metrics]
    kept = options.checkpoints(folder)
    with guarded(kept), bar() as progress:
        study = options.open(wanted, alphas, progress, start=start, checkpoints=kept)
        if len(alphas) > 1 and study.kind not in ("dirichlet", "pure"):
            raise FedgftError(f"--alpha: a partition by {study.kind} has no concentration to vary")
        images = study.rows(alphas[0]) if study.dataset.images else None
        progress.expect(study.work(alphas, methods, metrics), images=images)
        with warnings.catch_warnings():  # told below, with what to try
            warnings.simplefilter("ignore", TargetMissedWarning)
            results = [
                study.run(alpha, method, metric)
                for alpha in alphas for metric in wanted for method in methods
            ]  # fmt: skip
    said = [text for m in wanted if (text := contradiction(study.dataset, m))]
    if options.fedbn:
        said.append(
            "--fedbn: test rows, and a saved model, have the mean of the clients' BatchNorm"
        )
    for text in (*study.dataset.notes, *unheard, *said):
        note(text)
    return study, results, [row(study, result) for result in results]


@contextmanager
def guarded(kept: "Checkpoints | None") -> Iterator[None]:
    """Nobody else writes to the checkpoints; who interrupts is told that they are there."""
    with nullcontext() if kept is None else kept.guarded():
        try:
            yield
        except KeyboardInterrupt:
            if kept is not None and kept.found():
                note(f"checkpoints are kept in {kept.folder}: --resume goes on from there")
            raise


def finished(study: "Study") -> None:
    """Its results are written: checkpoints have done their work."""
    if study.checkpoints is not None:
        study.checkpoints.clear()


def report(study: "Study", results: list["Result"], rows: list[dict[str, Any]]) -> None:
    from fedgft.experiments import choices

    out.print(comparison(rows))
    out.print(decisions(rows))
    for text in choices(study, results):
        note(f"chosen on inner splits, {text}")


def save(
    study: "Study", results: list["Result"], rows: list[dict[str, Any]], folder: Path, *,
    models: Mapping[str, int] = MappingProxyType({}), why: str | None = None,
) -> list[Path]:  # fmt: skip
    """`models`: names of files and the replicates of the last method whose models they are to hold;
    `why` is said in the one that is handed over."""
    from fedgft.experiments import round_rows
    from fedgft.experiments.store import save_model, write_rows
    from fedgft.report.figures import save as save_figure
    from fedgft.report.figures import trajectories

    each = [line for result in results for line in round_rows(study, result)]
    with staged(folder) as place:
        for name, i in models.items():
            said = why if name == MODEL else None
            save_model(study, results[-1], i, place / name, why=said)
        write_rows(rows, place / "rows.parquet")
        write_rows(each, place / "rounds.parquet")
        save_figure(trajectories(study, results), place, "rounds")
    names = (*models, "rows.parquet", "rounds.parquet", "rounds.png", "rounds.svg")
    return [folder / name for name in names]
