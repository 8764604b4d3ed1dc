"""`fedgft bench tracks`, `rows` and `score`: what somebody from outside needs to take part."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedgft.cli import console
from fedgft.cli.console import note, paragraph, print_json, print_table, wrote
from fedgft.cli.options import Flag, Place, Whole
from fedgft.errors import LazyModule
from fedgft.formatting import Table, format_interval, format_points

if TYPE_CHECKING:
    from fedgft.bench.tracks import Track

json_text = LazyModule("json")
submissions = LazyModule("fedgft.bench.submissions")
track_tables = LazyModule("fedgft.bench.track_tables")
tracks_module = LazyModule("fedgft.bench.tracks")
store = LazyModule("fedgft.store")
METRIC_NAMES = {"sp": "statistical parity", "eop": "equal opportunity", "eo": "equalized odds"}


def tracks(name: str | None = None, /, *, json: Annotated[bool, Flag] = False) -> None:
    """List the tracks of the benchmark, or print the datasheet of one.

    The datasheet counts rows, groups and sites in the data themselves, which are fetched if needed.

    Parameters
    ----------
    name
        A track. Default: a list of all.
    json
        Print JSON to stdout, and nothing else.

    Examples
    --------
    fedgft bench tracks
    fedgft bench tracks adult-sex
    """
    if name is not None:
        track = tracks_module.get_track(name)
        sheet = {**_describe(track), "counts": track_tables.count_track(track)}
        if json:
            print_json(sheet)
        else:
            _print_sheet(track, sheet["counts"])
        return
    known = list(tracks_module.TRACKS.values())
    if json:
        print_json([_describe(track) for track in known])
        return
    header = ("track", "version", "title", "rows are dealt to sites")
    cells = [(t.name, str(t.version), t.title, _describe_deal(t)) for t in known]
    print_table(Table("Tracks of the benchmark", header, tuple(cells), stubs=4))


def rows(
    *,
    track: str,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    csv: Annotated[bool, Flag] = False,
) -> None:
    """Write the rows of a track, with the site and the part of each row for every seed.

    Train on the training rows with any program, decide about the test rows, and score the decisions
    with `fedgft bench score`.

    Parameters
    ----------
    track
        The track, from `fedgft bench tracks`.
    out
        A folder [default: the name of the track].
    csv
        Write CSV files instead of Parquet.

    Examples
    --------
    fedgft bench rows --track compas-race --out rows
    """
    found = tracks_module.get_track(track)
    wrote(track_tables.write_rows(found, out or Path(track), csv=csv))


def score(
    submission: Place,
    /,
    *,
    seeds: Whole | None = None,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Check a submission, and print its accuracy and gaps on the test rows of each track.

    The file has the columns track, version, seed, row, and score (a probability) or decision (0 or
    1): every test row of every seed once. A file that breaks a rule is refused in one line.

    Parameters
    ----------
    submission
        A CSV or Parquet file.
    seeds
        How many seeds the file holds, from 0 on, for a preliminary score [default: all].
    out
        Write the numbers to this JSON file as well.
    json
        Print the numbers to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft bench score predictions.parquet
    """
    found = submissions.read_submission(submission, seeds=seeds)
    scores = [each.summarize() for each in submissions.score_submission(found)]
    if out is not None:
        with store.atomic_write(out) as file:
            file.write((json_text.dumps(scores, indent=2) + "\n").encode())
    if json:
        print_json(scores)
    else:
        for each in scores:
            print_table(_tabulate_score(each))
    for each in scores:
        if each["seeds"] < each["seeds_of_track"]:
            text = f"{each['seeds']} of {each['seeds_of_track']} seeds: a preliminary score"
            note(f"{each['track']}: {text}")
    wrote([out] if out is not None else [])


def _describe(track: "Track") -> dict[str, Any]:
    """Return what a datasheet says without a look at the data."""
    sheet = track.sheet
    names = ("source", "license", "row", "label", "groups", "sites")
    found: dict[str, Any] = {"track": track.name, "version": track.version, "title": track.title}
    found |= {name: getattr(sheet, name) for name in names}
    found |= {"problems": list(sheet.problems), "seeds": track.seeds}
    return found | {"metrics": list(track.metrics), "sha256": track.sha256}


def _describe_deal(track: "Track") -> str:
    """Return how rows get their site, for the list of tracks."""
    if track.kind == "column":
        return f"{track.clients}, by a column"
    return f"{track.clients}, Dirichlet {track.alpha:g} per group"


def _print_sheet(track: "Track", counts: dict[str, Any]) -> None:
    """Print a datasheet: texts, then counts."""
    sheet = track.sheet
    paragraph(f"{track.name}, version {track.version}: {track.title}")
    lines = {
        "source": sheet.source,
        "license": sheet.license,
        "a row": sheet.row,
        "label 1": sheet.label,
        "groups": sheet.groups,
        "sites": sheet.sites,
    }
    for title, text in lines.items():
        paragraph(f"{title}: {text}")
    for text in sheet.problems:
        paragraph(f"known problem: {text}")
    console.out.print()
    header = ("group", "rows", "label 1, %")
    cells = [(g["name"], f"{g['rows']:,}", format_points(g["positive"])) for g in counts["groups"]]
    cells.append(("all rows", f"{counts['rows']:,}", format_points(counts["positive"])))
    missing = counts["unknown_groups"]
    notes = (f"{missing:,} rows have no group",) if missing else ()
    print_table(Table("Rows by group", header, tuple(cells), stubs=1, notes=notes))
    print_table(_tabulate_splits(track, counts))


def _tabulate_splits(track: "Track", counts: dict[str, Any]) -> Table:
    """Return the table of parts and sites over all seeds."""
    names = {
        "train_rows": "training rows",
        "inner_rows": "inner rows",
        "test_rows": "test rows",
        "site_rows": "rows of one site",
        "sites_with_local_gap": "sites with 20 test rows in every group",
    }
    rows = [(text, *(f"{count:,}" for count in counts[name])) for name, text in names.items()]
    floors = ", ".join(f"{name} {100 * value:.2f}" for name, value in counts["floors"].items())
    notes = (
        f"{counts['sites']} sites, {counts['features']} features; "
        f"accuracy of a constant: {format_points(counts['constant_accuracy'])}",
        f"noise floor of test gaps, in points: {floors}",
    )
    title = f"Sizes over {track.seeds} seeds"
    return Table(title, ("", "least", "most"), tuple(rows), stubs=1, notes=notes)


def _tabulate_score(score: dict[str, Any]) -> Table:
    """Return the table of one submission on one track."""
    rows = [
        (
            METRIC_NAMES.get(name, name),
            format_points(each["gap"]),
            format_interval(each["gap_low"], each["gap_high"]),
            format_points(each["floor"]),
            format_points(each["local_gap"]),
        )
        for name, each in score["metrics"].items()
    ]
    spread = score["accuracy_se"]
    error = "" if spread is None else f" (standard error {100 * spread:.2f})"
    title = f"{score['track']}, version {score['version']}, {score['seeds']} seeds"
    return Table(
        f"{title}: accuracy {100 * score['accuracy']:.2f}{error}",
        ("gap on test rows, points", "mean", "95% interval of one seed", "noise floor", "one site"),
        tuple(rows),
        stubs=1,
    )
