"""Sections of the reproduction: the paper's claims, our findings, tables and figures.

`make_section` trains the missing cells of an experiment and returns its section. `write_section`
puts it into a folder: rows, figures, Markdown and JSON; `write_page` shows all sections on one HTML
page, which needs no network and no other file. Text is escaped by the template; figures are
embedded as images, so nothing in them can run.
"""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.formatting import SIGNS, Table, escape_markdown, render, unescape_markdown
from fedgft.metrics import get_metric
from fedgft.paper import tables_and_figures as exhibits
from fedgft.paper.cells import (
    CONVERGENCE,
    DASH,
    DATA_NAMES,
    EXPERIMENTS,
    NAMES,
    Experiment,
    get_published,
)
from fedgft.paper.claims import CLAIMS, Finding, accuracy_table, select
from fedgft.paper.convergence import RESIDUE, SMALL, Descent, DescentPath, summarize
from fedgft.paper.runner import Record, Runner
from fedgft.store import (
    atomic_write,
    dump_checksummed,
    load_checksummed,
    refuse_link,
    require_encodable,
)
from fedgft.study.figures import save_figure, simpson_counts
from fedgft.study.training import write_rows
from fedgft.theory import (
    Example,
    analyze,
    locally_fair_globally_unfair,
    locally_unfair_globally_fair,
    simpson,
)

FORMAT = "fedgft-section-1"
TITLE = "# The paper, reproduced"
HTML = "<!doctype html>\n<!-- fedgft reproduce -->"
PAPER = (
    'Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: '
    'Beyond Local Fairness"'
)


@dataclass(frozen=True)
class Section:
    """What a reader sees of an experiment.

    Attributes
    ----------
    name, title
        Its name on the command line, and the heading.
    claim, note
        What the paper says, and what it leaves open; may be empty.
    findings, tables
        What came out, in sentences with a verdict and in numbers.
    how
        Replicates, data sets and protocols.
    figures
        Pairs of a file name without its ending, and a caption.
    chosen
        What was chosen on inner splits.
    notes
        What could not be estimated.
    """

    name: str
    title: str
    claim: str
    note: str
    how: str
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]
    figures: tuple[tuple[str, str], ...]
    chosen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SectionResult:
    """A section, its rows, and the functions that draw its figures when they are written."""

    section: Section
    rows: list[dict[str, Any]]
    figures: dict[str, Callable[[], Any]]


def make_section(
    name: str, runner: Runner, *, data: Sequence[str], protocols: Sequence[str], seeds: int
) -> SectionResult:
    """Train the missing cells of an experiment and make its section.

    Parameters
    ----------
    name
        One of `cells.NAMES`. "simpson" needs no data, and "convergence" has its own.
    runner
        Trains cells, or reads them from its cache.
    data, protocols, seeds
        Data sets, protocols, and the number of replicates.
    """
    if name == "simpson":
        return _make_simpson()
    if name == "convergence":
        paths = {spec: runner.paths(spec, seeds=seeds) for spec in CONVERGENCE}
        return _make_convergence(paths, seeds=seeds)
    experiment = EXPERIMENTS[name]
    parts = [
        label_records(name, runner.records(experiment.cells(each, protocol, seeds=seeds)))
        for protocol in protocols
        for each in data
    ]
    records = [record for part in parts for record in part]
    tables = [table for part in parts for table in exhibits.make_tables(experiment, part)]
    if name == "table1" and seeds > 1:
        tables += [accuracy_table(select(records, protocol=protocol)) for protocol in protocols]
    figures = [figure for part in parts for figure in _make_figures(experiment, part)]
    section = Section(
        name=name,
        title=experiment.title,
        claim=experiment.claim,
        note=experiment.note,
        how=f"{seeds} replicates; {' and '.join(DATA_NAMES[n] for n in data)}; "
        f"protocol {' and '.join(protocols)}.",
        findings=tuple(CLAIMS[name](records)),
        tables=tuple(tables),
        figures=tuple((figure, caption) for figure, caption, _ in figures),
        chosen=_list_choices(experiment, records),
        notes=_list_notes(records),
    )
    draw = {figure: function for figure, _, function in figures}
    return SectionResult(section, [r.row for r in records], draw)


def label_records(experiment: str, records: Sequence[Record]) -> list[Record]:
    """Return the records with the varied fields and the published numbers added to their rows.

    `experiment`: the name that the rows carry. The paper's numbers differ between its tables.
    """
    names = ("clients", "partition", "penalty", "epochs", "rule")
    labeled = []
    for record in records:
        varied = {name: getattr(record.cell, name) for name in names}
        numbers = get_published(experiment, record.cell)
        row = {"experiment": experiment, **record.row, **varied, **numbers}
        labeled.append(replace(record, row=row))
    return labeled


def _make_figures(
    experiment: Experiment, records: Sequence[Record]
) -> list[tuple[str, str, Callable[[], Any]]]:
    """File names, captions and functions that draw."""
    cell = records[0].cell
    figures = []
    where = f"{cell.data_name}, protocol {cell.protocol}"
    stem = f"{experiment.name}-{cell.data}-{cell.protocol}"
    if any(r.row["published_gap"] is not None for r in records):
        caption = f"Ours on top of the published numbers: {where}."
        draw = partial(exhibits.plot_published, experiment, records)
        figures.append((f"{stem}-published", caption, draw))
    if experiment.name not in ("table1", "fairfed"):
        caption = f"Accuracy and gap over the rounds: {where}."
        drawn = exhibits.plot_rounds(experiment, records)
        figures += [(name, caption, draw) for name, draw in drawn.items()]
    elif cell.protocol == "heldout" and experiment.name == "table1":
        caption = f"Decisions on held-out people: {where}."
        draw = partial(exhibits.plot_heldout, experiment, records)
        figures.append((f"{stem}-unseen", caption, draw))
    return figures


def _list_choices(experiment: Experiment, records: Sequence[Record]) -> tuple[str, ...]:
    """What was chosen on inner splits; the texts name alpha, method and metric already."""
    names = [n for n in experiment.varied if n not in ("alpha", "method")]
    texts: dict[str, None] = {}
    for record in records:
        where = filter(None, (record.cell.data_name, record.cell.label(names)))
        prefix = ", ".join(where)
        texts |= dict.fromkeys(f"{prefix}, {text}" for text in record.chosen)
    return tuple(texts)


def _list_notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return each distinct note once, with the number of cells that have it."""
    notes: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            about, _, text = note.partition(": ")
            where = f"{record.cell.data_name}, protocol {record.cell.protocol}"
            notes.setdefault(f"{where}: {text}", []).append(about)
    return tuple(f"{text} ({len(cells)} cells, first {cells[0]})" for text, cells in notes.items())


# Theory: Simpson's table


def _make_simpson() -> SectionResult:
    """Table 2 of the paper, and both directions of Theorem 4.1 for several C."""
    names = ("department 1", "department 2", "both together")
    lines = []
    for name, (accepted, applied) in zip(names, simpson_counts(), strict=True):
        rates = accepted / applied
        texts = map("{:.0f} of {:.0f} ({:.0f}%)".format, accepted, applied, 100 * rates)
        lines.append((name, *texts, f"{abs(rates[0] - rates[1]):.2f}"))
    rows = [_example_row("simpson", None, simpson())]
    for gap in (0.5, 0.9, 0.99):
        fair = locally_fair_globally_unfair(3, gap)
        unfair = locally_unfair_globally_fair(3, gap)
        rows.append(_example_row("locally fair, globally unfair", gap, fair))
        rows.append(_example_row("locally unfair, globally fair", gap, unfair))
    section = Section(
        name="simpson",
        title="Simpson's table: fair everywhere, unfair together",
        claim="Local fairness does not imply global fairness, nor the other way round.",
        note="",
        how="No training: the rows are constructed.",
        findings=_simpson_findings(rows),
        tables=(
            Table("Accepted applicants", ("", "women", "men", "SP gap"), tuple(lines), 1),
            _example_table(rows),
        ),
        figures=(("simpson", "Acceptance rates by department and overall."),),
    )
    return SectionResult(section, rows, {"simpson": exhibits.plot_simpson})


def _example_row(name: str, gap: float | None, example: Example) -> dict[str, Any]:
    """The gaps of a constructed example at its clients and overall; `gap`: the C that it shows."""
    analysis = analyze(get_metric("sp"), example.sums_by_client(), "hard")
    return {
        "experiment": "simpson",
        "example": name,
        "C": gap,
        "clients": len(analysis.weights),
        "rows": len(example.labels),
        "smallest_local_gap": float(analysis.local_gaps.min()),
        "largest_local_gap": float(analysis.local_gaps.max()),
        "gap": analysis.gap,
        "total_variation": analysis.total_variation,
        "bound": analysis.bound_tight,
    }


def _simpson_findings(rows: Sequence[dict[str, Any]]) -> tuple[Finding, ...]:
    """Table 2, both directions of Theorem 4.1, and our bound.

    `rows`: Simpson's table, then alternately an example that is locally fair and one that is
    locally unfair.
    """
    first = rows[0]
    holds = all(r["largest_local_gap"] == 0 and r["gap"] >= r["C"] for r in rows[1::2])
    holds &= all(r["smallest_local_gap"] >= r["C"] and r["gap"] < 1e-12 for r in rows[2::2])
    return (
        Finding(
            f"SP is {first['largest_local_gap']:.2f} in each department and {first['gap']:.2f} "
            "overall.",
            first["largest_local_gap"] == 0 and round(first["gap"], 2) == 0.48,
        ),
        Finding(
            "Theorem 4.1: with all local gaps 0 the global gap exceeds C for C = 0.5, 0.9 and "
            "0.99; with all local gaps at least C it is 0.",
            holds,
        ),
        Finding(
            "The bound α(1 − TV) + TV, sharper than the paper's α + DH, holds in every one of "
            "them.",
            all(r["gap"] <= r["bound"] + 1e-12 for r in rows),
        ),
    )


def _example_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per constructed example, from `_example_row`."""
    lines = []
    for r in rows:
        local = f"{r['smallest_local_gap']:.3f} to {r['largest_local_gap']:.3f}"
        numbers = [f"{r[name]:.3f}" for name in ("gap", "total_variation", "bound")]
        constant = DASH if r["C"] is None else f"{r['C']:g}"
        lines.append((r["example"], constant, str(r["clients"]), str(r["rows"]), local, *numbers))
    header = ("example", "C", "clients", "rows", "local gaps", "global gap", "TV", "bound")
    return Table("Theorem 4.1, both directions, as rows of data (SP)", header, tuple(lines), 1)


# Theory: convergence


def _make_convergence(
    paths: Mapping[Descent, Sequence[DescentPath]], *, seeds: int
) -> SectionResult:
    """Theorem 5.2 and Corollary 5.3.

    `paths`: for each experiment, the paths of all step rules in both modes.
    """
    rows = [
        row
        for spec, each in paths.items()
        for path in each
        for row in summarize(spec, path, seeds=seeds)
    ]
    steps = max(path.smoothness * spec.rate for spec, each in paths.items() for path in each)
    names = {spec: f"convergence-{spec.data}-{spec.lam:g}" for spec in paths}
    section = Section(
        name="convergence",
        title="Theorem 5.2 and Corollary 5.3: convergence, measured",
        claim="min ‖∇L‖² is O(1/T) for gradient descent with a constant step, O(log T/√T) for "
        "steps t^(-1/2) and O(1/log T) for steps 1/t.",
        note="J = x² and statistical parity, alpha 5, one local step per round, everybody takes "
        "part, features standardized. Gradients are exact, of the pooled objective.",
        how=f"{seeds} replicates; {DATA_NAMES[next(iter(paths)).data]}.",
        findings=_convergence_findings(rows, steps),
        tables=tuple(
            _rate_table(spec, [r for r in rows if r["lam"] == spec.lam]) for spec in paths
        ),
        figures=tuple((names[spec], f"Measured and bound, λ = {spec.lam:g}.") for spec in paths),
    )
    figures = {
        names[spec]: partial(exhibits.plot_convergence, spec, each) for spec, each in paths.items()
    }
    return SectionResult(section, rows, figures)


def _convergence_findings(rows: Sequence[dict[str, Any]], steps: float) -> tuple[Finding, ...]:
    """The bound, the rates, and the assumptions of the proof.

    `rows` are those of `summarize`; `steps`: the largest step times the smoothness seen.
    """
    below = [r["gradient"] <= r["bound"] for r in rows]
    late = [r for r in rows if r["promised"] is not None]
    slow = [
        f"λ = {r['lam']:g}, {r['mode']}, {exhibits.STEP_NAMES[r['rule']]}, T = {r['rounds']} "
        f"(×{r['decline']:.2f} against ×{r['promised']:.2f})"
        for r in late
        if r["decline"] > r["promised"]
    ]
    still = "and still below the bound" if all(below) else "as far as the bound goes"
    but = f"; slower, {still}: {'; '.join(slow)}" if slow else ""
    return (
        Finding(
            f"The smallest squared gradient is below the bound with its constants in "
            f"{sum(below)} of {len(below)} rows.",
            all(below),
        ),
        Finding(
            f"Over the last tenfold of rounds it fell at least as fast as Corollary 5.3's rate "
            f"in {len(late) - len(slow)} of {len(late)} rows{but}."
        ),
        Finding(
            f"The largest step times the smoothness seen is at most {steps:.2f}; the proof "
            "asks for no more than 1.",
            steps <= 1,
        ),
        Finding(
            "B, the dissimilarity the proof assumes bounded, is "
            f"{max(r['dissimilarity'] for r in rows):.2g} at most where ‖∇L‖² is above "
            f"{SMALL:g}, and grows on: where the gradient of L vanishes those of the clients "
            "do not, unless all clients agree. Full participation does not need it."
        ),
    )


def _rate_table(spec: Descent, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of one experiment: gradient, bound and decline at T = 10, 100, 1000, ..."""
    header = "mode|steps|T|min ‖∇L‖²|bound|since T/10|promised|smoothness|σ|B"
    lines = []
    for r in rows:
        square = f"{r['gradient']:.2g}" if r["gradient"] > RESIDUE else f"below {RESIDUE:g}"
        line = [r["mode"], exhibits.STEP_NAMES[r["rule"]], str(r["rounds"]), square]
        line.append(f"{r['bound']:.2g}")
        for name in ("decline", "promised"):
            line.append(DASH if r[name] is None else f"×{r[name]:.2g}")
        line += [f"{r[name]:.3g}" for name in ("smoothness", "sigma", "dissimilarity")]
        lines.append(tuple(line))
    title = f"λ = {spec.lam:g}, largest step {spec.rate:g}"
    return Table(title, tuple(header.split("|")), tuple(lines), 2)


# The files of one section


def write_section(made: SectionResult, folder: Path) -> list[Path]:
    """Write rows, figures, the Markdown page and last the section; return their paths.

    If the same code wrote the same section before and its files are intact, nothing is written:
    drawing takes longer than everything else in a second run.
    """
    section = made.section
    pictures = folder / "figures"
    rows, page, kept = (folder / f"{section.name}.{end}" for end in ("parquet", "md", "json"))
    drawn = [pictures / f"{name}.{end}" for name in made.figures for end in ("png", "svg")]
    paths = [rows, *drawn, page, kept]
    stamp = _stamp(made)
    if _is_current(kept, stamp, paths[:-1]):
        return paths
    kept.unlink(missing_ok=True)  # it must not vouch for files that are about to change
    refuse_link(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    write_rows(made.rows, rows)
    for name, draw in made.figures.items():
        save_figure(draw(), pictures, name)
    _write_text(page, render_markdown(section))
    digests = [_digest(path) for path in paths[:-1]]
    _write_text(
        kept, dump_checksummed({"stamp": stamp, "files": digests, **asdict(section)}, FORMAT)
    )
    return paths


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write(text.encode())


def _stamp(made: SectionResult) -> str:
    """A digest of everything the files depend on: results, texts, and the code that draws."""
    digest = hashlib.sha256(json.dumps([asdict(made.section), made.rows]).encode())
    here = Path(__file__).parent
    for file in sorted((*here.rglob("*.py"), here.parent / "formatting.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_current(kept: Path, stamp: str, paths: Sequence[Path]) -> bool:
    """Whether the files are those that were written for this stamp, byte for byte."""
    try:
        about = load_checksummed(kept.read_text("utf-8"), FORMAT)
        return about["stamp"] == stamp and about["files"] == [_digest(path) for path in paths]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_section(path: Path) -> Section | None:
    """Return a section that was written before; None if the file is not one.

    The file may hold anything: every text is checked, and figures cannot lie in another folder.
    """
    try:
        kept = load_checksummed(path.read_text("utf-8"), FORMAT)
        return Section(
            **{n: require_encodable(kept[n]) for n in ("name", "title", "claim", "note", "how")},
            findings=tuple(_read_finding(*finding) for finding in kept["findings"]),
            tables=tuple(map(_read_table, kept["tables"])),
            figures=tuple(
                (_check_figure_name(name), require_encodable(caption))
                for name, caption in kept["figures"]
            ),
            chosen=_read_texts(kept["chosen"]),
            notes=_read_texts(kept["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _read_table(kept: dict[str, Any]) -> Table:
    return Table(
        title=require_encodable(kept["title"]),
        header=_read_texts(kept["header"]),
        rows=tuple(map(_read_texts, kept["rows"])),
        stubs=int(kept["stubs"]),
        notes=_read_texts(kept["notes"]),
    )


def _read_texts(kept: Any) -> tuple[str, ...]:
    return tuple(map(require_encodable, kept))


def _read_finding(text: Any, holds: Any) -> Finding:
    if holds not in SIGNS or isinstance(holds, float):
        raise ValueError(f"{holds!r} is no verdict")
    return Finding(require_encodable(text), holds)


def _check_figure_name(name: Any) -> str:
    """The name of a file in the folder of the figures and nowhere else."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", require_encodable(name)) or ".." in name:
        raise ValueError(f"{name!r} is no name of a figure")
    return name


def render_markdown(section: Section) -> str:
    """Return the section as Markdown; every text in it is escaped."""
    clean = escape_markdown
    lines = [f"# {clean(section.title)}", ""]
    if section.claim:
        lines += [f"The paper: {clean(section.claim)}", ""]
    lines += [clean(section.how)]
    lines += ["", clean(section.note)] if section.note else []
    lines += ["", "## What came out", ""]
    lines += [f"- {SIGNS[holds]} {clean(text)}" for text, holds in section.findings]
    lines += ["", *(table.markdown() for table in section.tables)]
    for name, caption in section.figures:
        lines += [f"![{clean(caption)}](figures/{name}.svg)", ""]
    for title, texts in (("Chosen on inner splits", section.chosen), ("Notes", section.notes)):
        if texts:
            lines += [f"## {title}", "", *(f"- {clean(text)}" for text in texts), ""]
    return "\n".join(lines).rstrip() + "\n"


# The page of all sections


def check_folder(folder: Path) -> None:
    """Raise a `FedgftError` if the folder holds a README or a page that this command did not write.

    Both files begin with a line that only this command writes.
    """
    for name, start in (("README.md", TITLE), ("index.html", HTML)):
        path = folder / name
        if path.is_file() and not path.read_bytes().startswith(start.encode()):
            raise FedgftError(
                f"`out` {folder}: holds a {name} that is not ours; name another folder",
                kind="conflict",
            )


def write_page(folder: Path) -> list[Path]:
    """Write `index.html` with all sections in the folder, and `README.md`, which lists them.

    A section without all its figures is left out until it is made again.
    """
    pictures = folder / "figures"
    found = [read_section(folder / f"{name}.json") for name in NAMES]
    sections = [
        section
        for section in found
        if section and all((pictures / f"{name}.svg").exists() for name, _ in section.figures)
    ]
    _write_text(folder / "index.html", render_page(sections, folder))
    _write_text(folder / "README.md", list_pages(folder))
    return [folder / "index.html", folder / "README.md"]


def render_page(sections: Sequence[Section], folder: Path) -> str:
    """Return the page of these sections as HTML.

    Their figures are read from `folder` and embedded, so the page needs no other file.
    """

    def embed(name: str) -> str:
        content = (folder / "figures" / f"{name}.svg").read_bytes()
        return "data:image/svg+xml;base64," + b64encode(content).decode("ascii")

    return render(
        "reproduction.html",
        sections=sections,
        signs=SIGNS,
        mark=exhibits.FAR_MARK,
        paper=PAPER,
        version=version("fedgft"),
        picture=embed,
    )


def list_pages(folder: Path) -> str:
    """Return a list of the Markdown pages that are there, read from the pages themselves.

    The list counts the claims that were checked, by their signs. Pages that were written elsewhere,
    as in a fresh clone, are listed too.
    """
    lines = [
        TITLE,
        "",
        f"{PAPER}. Every number in these pages comes out of `fedgft reproduce`.",
        "",
        "| experiment | claims checked | hold | do not |",
        "| --- | ---: | ---: | ---: |",
    ]
    total = [0, 0]
    for name in NAMES:
        page = folder / f"{name}.md"
        if page.is_file():
            title, *text = page.read_text("utf-8", "replace").splitlines() or [name]
            good, bad = (
                sum(line.startswith(f"- {SIGNS[holds]} ") for line in text)
                for holds in (True, False)
            )
            title = escape_markdown(unescape_markdown(title.removeprefix("# ")))
            lines.append(f"| [{title}]({name}.md) | {good + bad} | {good} | {bad} |")
            total = [total[0] + good, total[1] + bad]
    lines.append(f"| all | {sum(total)} | {total[0]} | {total[1]} |")
    return "\n".join(lines) + "\n"
