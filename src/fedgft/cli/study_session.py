"""What the commands that train share: checks, the study under a progress bar, notes, tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fedgft.cli.console import bar, comparison, decisions, note, out
from fedgft.cli.options import Options, check_methods
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from fedgft.fair_model import FairModel
    from fedgft.metrics import Metric
    from fedgft.study import Comparison, Study
    from fedgft.study.cache import Checkpoints


def check_cells(
    options: Options, methods: Sequence[str], metrics: Sequence[str], alphas: Sequence[float]
) -> list["Metric"]:
    """Check everything that can be checked before any data is read; return the metrics.

    Prints a note for each option that none of the methods reads.
    """
    from fedgft.metrics import get_metric

    options.check()
    for name, values in (("methods", methods), ("metrics", metrics), ("alpha", alphas)):
        if not values:
            raise FedgftError("needs at least one value", field=name, kind="missing")
    for alpha in alphas:
        if not 0 < alpha < float("inf"):
            raise FedgftError(f"`alpha` must be a positive number, got {alpha:g}")
    for text in check_methods(options, list(methods)):
        note(text)
    return [get_metric(name) for name in metrics]


@contextmanager
def open_study(
    options: Options,
    metrics: Sequence["Metric"],
    alphas: Sequence[float],
    *,
    folder: Path | None,
    work: Callable[["Study"], int],
    start: "FairModel | None" = None,
) -> Iterator["Study"]:
    """The study that the options describe, under one progress bar; notes follow at the end.

    Parameters
    ----------
    folder
        For checkpoints, if the options ask for them. It stays locked until the study ends.
    work
        Returns the run-rounds that will be done: the length of the progress bar.
    start
        The model that training starts from.
    """
    from fedgft.study.protocol import contradiction

    checkpoints = options.checkpoints(folder)
    with _mention_checkpoints(checkpoints), bar() as progress:
        study = options.open(metrics, alphas, progress, start=start, checkpoints=checkpoints)
        if len(alphas) > 1 and study.kind not in ("dirichlet", "pure"):
            raise FedgftError(f"`alpha`: a partition by {study.kind} has no concentration to vary")
        images = study.rows_per_round(alphas[0]) if study.dataset.images else None
        progress.expect(work(study), images=images)
        yield study
    for text in study.dataset.notes:
        note(text)
    for metric in metrics:
        if text := contradiction(study.dataset, metric):
            note(text)
    if options.fedbn:
        note("--fedbn: test rows, and a saved model, have the mean of the clients' BatchNorm")


@contextmanager
def _mention_checkpoints(checkpoints: "Checkpoints | None") -> Iterator[None]:
    """Lock the checkpoints; after an interrupt, say where they are."""
    with nullcontext() if checkpoints is None else checkpoints.guarded():
        try:
            yield
        except KeyboardInterrupt:
            if checkpoints is not None and checkpoints.found():
                note(f"checkpoints are kept in {checkpoints.folder}: --resume goes on from there")
            raise


def run_comparison(
    options: Options,
    methods: Sequence[str],
    metrics: Sequence[str],
    alphas: Sequence[float],
    *,
    folder: Path | None,
) -> "Comparison":
    """Check the options and train all cells under one progress bar; duplicates count once."""
    from fedgft.study import compare_methods

    methods, names = (list(dict.fromkeys(values)) for values in (methods, metrics))
    alphas = list(dict.fromkeys(alphas))
    wanted = check_cells(options, methods, names, alphas)

    def work(study: "Study") -> int:
        return study.work(alphas, methods, names)

    with open_study(options, wanted, alphas, folder=folder, work=work) as study:
        return compare_methods(study, methods, wanted, alphas)


def print_comparison(found: "Comparison") -> None:
    """Print both tables, and note what was chosen on inner splits."""
    from fedgft.study import choices

    out.print(comparison(found.rows))
    out.print(decisions(found.rows))
    for text in choices(found.study, found.results):
        note(f"chosen on inner splits, {text}")


def clear_checkpoints(study: "Study") -> None:
    """Delete the checkpoints of a study whose results are written."""
    if study.checkpoints is not None:
        study.checkpoints.clear()
