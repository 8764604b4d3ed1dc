"""`fedgft bench tracks`, `rows` and `score`: what somebody from outside needs to take part."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fedgft.cli import console
from fedgft.cli.console import note, paragraph, print_json, print_table, wrote
from fedgft.cli.options import Flag, Place, Whole
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import DASH, Table, format_interval, format_points

if TYPE_CHECKING:
    from fedgft.bench.tracks import Track

json_text = LazyModule("json")
runner = LazyModule("fedgft.bench.bench_runner")
standings = LazyModule("fedgft.bench.standings")
submissions = LazyModule("fedgft.bench.submissions")
track_tables = LazyModule("fedgft.bench.track_tables")
tracks_module = LazyModule("fedgft.bench.tracks")
store = LazyModule("fedgft.store")


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
        counts = _count(track)
        if json:
            print_json({**_describe(track), "counts": counts})
        else:
            _print_sheet(track, counts)
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
    board: Place | None = None,
    league: Literal["blind", "aware"] | None = None,
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
    board
        A folder that `fedgft bench` has written: also print where the submission would stand.
    league
        The league on the board: aware if the group of a person may change the decision [default:
        blind].
    seeds
        How many seeds the file holds, from 0 on, for a preliminary score [default: all].
    out
        Write the numbers to this JSON file as well.
    json
        Print the numbers to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft bench score predictions.parquet
    fedgft bench score predictions.csv --board results/bench
    """
    if league is not None and board is None:
        raise FedgftError("`league` chooses a league of `board`; name a board", kind="conflict")
    if out is not None:
        store.make_folder(out.parent)
    found = submissions.score_submission(submissions.read_submission(submission, seeds=seeds))
    scores = [each.summarize() for each in found]
    if board is not None:
        methods = standings.read_board(board, found)
        own_league = league or "blind"
        places = [asdict(each) for each in standings.find_standings(found, methods, own_league)]
        for each in scores:
            each["league"] = own_league
            each["standings"] = [place for place in places if place["track"] == each["track"]]
    if out is not None:
        with store.atomic_write(out) as file:
            file.write((json_text.dumps(scores, indent=2) + "\n").encode())
    if json:
        print_json(scores)
    else:
        for each in scores:
            print_table(_tabulate_score(each))
            if board is not None:
                print_table(_tabulate_standings(each))
    for each in scores:
        if each["seeds"] < each["seeds_of_track"]:
            text = f"{each['seeds']} of {each['seeds_of_track']} seeds: a preliminary score"
            note(f"{each['track']}: {text}")
        if board is not None:
            _note_differences(each, board)
    wrote([out] if out is not None else [])


def _note_differences(score: dict[str, Any], board: Path) -> None:
    """Say what a comparison with a board lacks: other seeds, and metrics that are not there."""
    name = score["track"]
    about = runner.read_manifest(board)
    seeds = about["seeds"] or score["seeds_of_track"]
    if seeds != score["seeds"]:
        note(f"{name}: the board has {seeds} seeds, and the submission {score['seeds']}")
    compared = {place["metric"] for place in score["standings"]}
    missing = [metric for metric in score["metrics"] if metric not in compared]
    if missing:
        text = f"the board has no methods of the league {score['league']} for"
        note(f"{name}: {text} {', '.join(missing)}")


def _count(track: "Track") -> dict[str, Any] | None:
    """Return the counts of a datasheet; None if the user has to provide the rows and has not."""
    try:
        return track_tables.count_track(track)
    except FedgftError as error:
        if track.is_fetched:
            raise
        note(error.message)
        return None


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


def _print_sheet(track: "Track", counts: dict[str, Any] | None) -> None:
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
    if counts is None:
        return
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
    values = {"accuracy": (score, "accuracy")}
    values |= {f"gap, {name}": (each, "gap") for name, each in score["metrics"].items()}
    rows = [
        (
            title,
            format_points(each[name]),
            format_interval(each[f"{name}_low"], each[f"{name}_high"]),
            format_points(each.get("floor"), unknown="" if name == "accuracy" else DASH),
            format_points(each.get("local_gap"), unknown="" if name == "accuracy" else DASH),
        )
        for title, (each, name) in values.items()
    ]
    title = f"{score['track']}, version {score['version']}: test rows, {score['seeds']} seeds"
    header = ("points", "mean", "95% interval", "noise floor", "one site")
    return Table(title, header, tuple(rows), stubs=1)


def _tabulate_standings(score: dict[str, Any]) -> Table:
    """Return the table of the places that a submission would have."""
    rows = [
        (
            place["metric"],
            format_points(place["target"]),
            str(place["rank"]) if place["keeps"] else "not kept",
            str(place["kept_by"]),
            place["best"],
            format_points(place["best_accuracy"]),
        )
        for place in score["standings"]
    ]
    header = ("metric", "target", "rank", "methods that keep it", "the best", "its accuracy")
    title = f"{score['track']}: where the submission would stand, league {score['league']}"
    return Table(title, header, tuple(rows), stubs=1)
