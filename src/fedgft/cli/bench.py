"""`fedgft bench`: run the benchmark, merge its shards, and write its pages."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from fedgft.cli import bench_submissions
from fedgft.cli.console import bar, note, output, print_json, print_table, wrote
from fedgft.cli.options import Flag, Place, Whole, read_list, require_values
from fedgft.errors import FedgftError, LazyModule

if TYPE_CHECKING:
    from fedgft.bench.tracks import Track

# Loaded when a command runs, so that help is printed at once.
entrants = LazyModule("fedgft.bench.entrants")
pages = LazyModule("fedgft.bench.page")
runner = LazyModule("fedgft.bench.bench_runner")
tracks_module = LazyModule("fedgft.bench.tracks")

OUT = Path("results/bench")
Names = Annotated[
    tuple[str, ...] | None,
    Parameter(consume_multiple=True, negative="", show_default=False, converter=read_list),
]  # `a b` or `a,b`
OutFolder = Annotated[Place, Parameter(name=("--out", "-o"))]
app = App(name="bench", help="Compare all methods on frozen tracks, on held-out rows.")


@app.default
def bench(
    *,
    track: Names = None,
    methods: Names = None,
    metrics: Names = None,
    league: Literal["blind", "aware", "both"] = "both",
    seeds: Whole | None = None,
    shard: str = "1/1",
    out_: OutFolder = OUT,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Compare all methods on frozen tracks, on held-out rows.

    An interrupted run resumes: finished cells are in --out, and are not trained again.

    Parameters
    ----------
    track
        Names from `fedgft bench tracks` [default: all whose data are here or can be fetched].
    methods
        Methods and decision rules [default: all]. FedAvg is always among them.
    metrics
        sp, eop, eo [default: all of them].
    league
        blind: decisions do not depend on the group of a person; aware: they may.
    seeds
        Number of replicates, for a quick look [default: 20, those of each track].
    shard
        i/n: run every n-th cell from the i-th on, to share the work between n computers; then join
        their folders by `fedgft bench merge`.
    out_
        Folder for the cells, the tables, the figures and the page.
    json
        Print the scores to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft bench --track compas-race --methods fedgft fedgft-control --seeds 5
    fedgft bench --shard 1/2 --out first
    """
    require_values(track=track, methods=methods, metrics=metrics)
    chosen = entrants.choose_entrants(methods, league)
    part = _read_shard(shard)
    found, skipped = _find_tracks(track)
    plan = runner.BenchPlan(tuple(found), chosen, metrics, seeds, part)
    with bar() as progress:
        progress.expect(sum(plan.count_work(cell) for cell in plan.own_cells))
        made = runner.run_bench(plan, out_, progress.advance, skipped=skipped)
    if output.verbose:
        note(f"{len(made)} of {len(plan.own_cells)} cells were run; the others were finished")
    _show(out_, json=json)


@app.command
def merge(*folders: Place, out_: OutFolder = OUT, json: Annotated[bool, Flag] = False) -> None:
    """Join the folders of shards into one, and write its pages.

    Shards must have been run by the same version with the same settings and seeds.

    Parameters
    ----------
    folders
        The folders that `fedgft bench --shard` has written.
    out_
        The folder to write.
    json
        Print the scores to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft bench merge first second --out results/bench
    """
    if not folders:
        text = "are missing: name the folders that the shards have written"
        raise FedgftError(text, field="folders", kind="missing")
    runner.merge_folders(list(folders), out_)
    _show(out_, json=json)


@app.command
def page(folder: Place = OUT, /, *, json: Annotated[bool, Flag] = False) -> None:
    """Write the tables, figures and page of a folder again, from its cells.

    Parameters
    ----------
    folder
        The folder.
    json
        Print the scores to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft bench page results/bench
    """
    _show(folder, json=json)


for _command in (bench_submissions.tracks, bench_submissions.rows, bench_submissions.score):
    app.command(_command)


def _find_tracks(names: tuple[str, ...] | None) -> tuple[list["Track"], dict[str, str]]:
    """Return the tracks with these names, and why others are left out.

    Without names, these are all tracks whose data can be read; a track that is named must be there.
    """
    if names:
        return [tracks_module.get_track(name) for name in dict.fromkeys(names)], {}
    found = []
    skipped = {}
    for track in tracks_module.TRACKS.values():
        try:
            runner.check_track(track)
            found.append(track)
        except FedgftError as error:
            skipped[track.name] = error.message
            note(f"{track.name} is left out: {error.message}")
    if not found:
        raise FedgftError("the data of no track are here", field="track", kind="missing")
    return found, skipped


def _read_shard(text: str) -> tuple[int, int]:
    """Read i/n."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if match is None:
        raise FedgftError(f"must be i/n, such as 1/4, not '{text[:40]}'", field="shard")
    return int(match[1]), int(match[2])


def _show(folder: Path, *, json: bool) -> None:
    """Write the pages of a folder, and print its scores or the overview."""
    board = pages.write_board(folder)
    if json:
        print_json([vars(score) for score in board.scores])
    else:
        for table in board.overview:
            print_table(table)
    for text in board.notes:
        note(text)
    wrote(board.paths)
