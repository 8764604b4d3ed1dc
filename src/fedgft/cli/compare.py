"""`fedgft compare`: one row per combination of method, metric and heterogeneity."""

from contextlib import nullcontext
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import MISSED, paragraph, print_json, wrote
from fedgft.cli.options import Alphas, Flag, Methods, Metrics, Options, Place
from fedgft.store import open_folder


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
    from fedgft.cli.study_session import clear_checkpoints, print_comparison, run_comparison
    from fedgft.study.training import count_missed

    with nullcontext() if out_ is None else open_folder(out_):
        found = run_comparison(options or Options(), methods, metrics, alpha, folder=out_)
        paths = [] if out_ is None else found.save(out_)
        clear_checkpoints(found.study)
    if json:
        print_json(found.rows)
    else:
        print_comparison(found)
        for row in found.rows:
            _print_target(row, found.rows)
    wrote(paths)
    if strict and any(count_missed(row) > row["seeds"] / 2 for row in found.rows):
        raise SystemExit(MISSED)


def _print_target(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """For a row with a target: print whether it was reached, and if not, what to try."""
    from fedgft.study.training import describe_target, suggest_changes

    if row["target"] is None:
        return
    cell = ("metric", "alpha")
    same = [r for r in rows if all(r[name] == row[name] for name in cell)]
    plain = next((r for r in same if r["method"] == "fedavg"), None)
    where = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    paragraph(f"{row['metric']}{where}. {describe_target(row, plain)}")
    paragraph(suggest_changes(row))
