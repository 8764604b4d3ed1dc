"""The paper's experiments, each made into a section: run what is missing, say what came out."""

from collections.abc import Callable, Sequence
from typing import Any

from fedgft.experiments.paper import CONVERGENCE, EXPERIMENTS
from fedgft.experiments.published import labelled
from fedgft.experiments.run import Record, Runner
from fedgft.experiments.spec import Experiment
from fedgft.layout import Table
from fedgft.report import plots, theory
from fedgft.report.claims import CLAIMS
from fedgft.report.claims.table import price_table
from fedgft.report.section import Made, Section
from fedgft.report.tables import DATA, against_published, decisions, label


def make(
    name: str, runner: Runner, *, data: Sequence[str], protocols: Sequence[str], seeds: int
) -> Made:
    if name == "simpson":
        return theory.simpsons()
    if name == "convergence":
        paths = {spec: runner.paths(spec, seeds=seeds) for spec in CONVERGENCE}
        return theory.convergence(paths, seeds=seeds)
    return _grid(EXPERIMENTS[name], runner, data=data, protocols=protocols, seeds=seeds)


def _grid(
    experiment: Experiment, runner: Runner, *, data: Sequence[str], protocols: Sequence[str],
    seeds: int,
) -> Made:  # fmt: skip
    parts = [
        labelled(experiment.name, runner.records(experiment.cells(name, protocol, seeds=seeds)))
        for protocol in protocols for name in data
    ]  # fmt: skip
    every = [record for part in parts for record in part]
    figures: dict[str, tuple[Callable[[], Any], str]] = {}
    tables: list[Table] = []
    for part in parts:
        tables += _tables(experiment, part)
        figures |= _figures(experiment, part)
    if experiment.name == "table1" and seeds > 1:
        tables += [price_table([r for r in every if r.cell.protocol == p]) for p in protocols]
    section = Section(
        name=experiment.name, title=experiment.title, claim=experiment.claim, note=experiment.note,
        how=f"{seeds} replicates; {' and '.join(DATA[n] for n in data)}; "
        f"protocol {' and '.join(protocols)}.",
        findings=tuple(CLAIMS[experiment.name](every)), tables=tuple(tables),
        figures=tuple((n, caption) for n, (_, caption) in figures.items()),
        chosen=_chosen(experiment, every), notes=_notes(every),
    )  # fmt: skip
    return Made(section, [r.row for r in every], {n: draw for n, (draw, _) in figures.items()})


def _tables(experiment: Experiment, records: Sequence[Record]) -> list[Table]:
    if experiment.name == "trajectory":  # its cells are those of Table 1
        return []
    scores, decided = against_published(experiment, records), decisions(experiment, records)
    if experiment.name == "table1":
        return [decided, scores] if records[0].cell.protocol == "heldout" else [scores, decided]
    return [decided] if records[0].cell.protocol == "heldout" else [scores]


def _figures(
    experiment: Experiment, records: Sequence[Record]
) -> dict[str, tuple[Callable[[], Any], str]]:
    cell, out = records[0].cell, {}
    where = f"{DATA[cell.data]}, protocol {cell.protocol}"
    stem = f"{experiment.name}-{cell.data}-{cell.protocol}"
    if any(r.row["published_gap"] is not None for r in records):
        draw = lambda: plots.against_published(experiment, records)  # noqa: E731
        out[f"{stem}-published"] = draw, f"Ours on top of the published numbers: {where}."
    if experiment.name not in ("table1", "fairfed"):
        caption = f"Accuracy and gap over the rounds: {where}."
        drawn = plots.curves(experiment, records)
        out |= {name: (draw, caption) for name, draw in drawn.items()}
    elif cell.protocol == "heldout" and experiment.name == "table1":
        draw = lambda: plots.unseen(experiment, records)  # noqa: E731
        out[f"{stem}-unseen"] = draw, f"Decisions on people nobody trained on: {where}."
    return out


def _chosen(experiment: Experiment, records: Sequence[Record]) -> tuple[str, ...]:
    """What was chosen on inner splits; alpha, method and metric are in the words already."""
    names = [n for n in experiment.varied if n not in ("alpha", "method")]
    said: dict[str, None] = {}
    for record in records:
        which = label(record.cell, names)
        where = f"{DATA[record.cell.data]}, {which}, " if which else f"{DATA[record.cell.data]}, "
        said |= dict.fromkeys(where + text for text in record.chosen)
    return tuple(said)


def _notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Each note once, with the cells it is about counted."""
    said: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            about, _, text = note.partition(": ")
            where = f"{DATA[record.cell.data]}, protocol {record.cell.protocol}"
            said.setdefault(f"{where}: {text}", []).append(about)
    return tuple(f"{text} ({len(cells)} cells, first {cells[0]})" for text, cells in said.items())
