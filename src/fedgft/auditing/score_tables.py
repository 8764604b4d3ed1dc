"""The tables of an audit about scores and subgroups: distances, areas, the top, and the scan."""

from collections.abc import Iterator, Sequence

from fedgft.auditing.ranking import AreaGap, Ranking, Top
from fedgft.auditing.score_distributions import LargestDistance, ScoreDistances
from fedgft.auditing.subgroup_scan import SubgroupGap
from fedgft.auditing.summary import Summary
from fedgft.auditing.verdicts import rate_name
from fedgft.formatting import DASH, Table, format_count, format_interval, format_points

MAX_CROSSED = 4  # groups of a table with all cross-group areas
MAX_TOP_GROUPS = 6  # with more groups, the tables of the top have one share of people only
ONE_TOP = 0.1
Number = float | None
AMONG = {"everyone": "everyone", "positives": "true outcome “{}”"}
DISTANCES = {
    "threshold_gap": (
        "Largest gap at any threshold of the score, points",
        "No threshold that is the same for everybody gives a larger gap between two groups. The "
        "interval is a band for all thresholds at once.",
    ),
    "wasserstein": (
        "Wasserstein distance of scores, points",
        "The mean gap over all thresholds: the mean amount by which scores would have to move.",
    ),
}
POSSIBLE_NOTE = (
    "Possible: given the bins of the histograms. The interval includes this range; it is over rows."
)
WITHOUT_ROWS = "*: among the groups that have rows; over all groups it is not estimable."


def list_score_tables(summary: Summary) -> Iterator[Table]:
    """Yield the tables about scores, if there are scores, and those of the scan."""
    yield from _area_tables(summary)
    yield from _cross_tables(summary)
    yield from _distance_tables(summary)
    yield from _top_tables(summary)
    yield from list_scan_tables(summary)


def _area_tables(summary: Summary) -> Iterator[Table]:
    """Yield the table of areas under the ROC curves, and that of their differences."""
    rows = []
    for name, groups in (summary["auc"] or {}).items():
        for group, area in groups.items():
            known = area["auc"] is not None
            cells = (f"{area[key]:.3f}" if known else DASH for key in ("auc", "bin_error"))
            interval = _fractions(area["low"], area["high"])
            rows.append((group, name, *cells, interval))
    if rows:
        notes = ("The interval is over rows (DeLong) and includes the binning error.",)
        header = ("group", "class", "area", "binning error", "95% interval")
        yield Table("Area under the ROC curve", header, tuple(rows), 2, notes)
    rows = []
    for title, by_class in (summary["ranking"] or {}).items():
        for name, found in by_class.items():
            rows.append((title, name, "within groups", *_area_gap_cells(found["gap"], found)))
            rows.append((title, name, "cross-group", *_area_gap_cells(found["cross_gap"], found)))
    rows = [row for row in rows if row[3] != DASH]
    if rows:
        notes = (
            "Within groups: how well the scores rank the people of a group. Cross-group: how often "
            "positives of the first group score above negatives of the second, minus the same the "
            "other way round.",
        )
        notes += (WITHOUT_ROWS,) if any("*" in row[4] for row in rows) else ()
        header = ("groups", "class", "area", "between", "difference", "95% interval")
        yield Table("Area under the ROC curve: largest differences", header, tuple(rows), 4, notes)


def _area_gap_cells(gap: AreaGap, ranking: Ranking) -> tuple[str, str, str]:
    """Return the two groups, the difference of their areas and its interval."""
    if gap["gap"] is None:
        return DASH, DASH, DASH
    star = "*" * any(area["value"] is None for area in ranking["areas"].values())
    interval = _fractions(gap["low"], gap["high"])
    return " / ".join(gap["pair"] or ()), f"{gap['gap']:.3f}{star}", interval


def _fractions(low: Number, high: Number) -> str:
    """Return an interval of fractions with three digits."""
    return format_interval(low, high, scale=1, digits=3)


def _cross_tables(summary: Summary) -> Iterator[Table]:
    """Yield the table of the cross-group areas of a few groups by all attributes together."""
    rows = []
    for name, found in ((summary["ranking"] or {}).get(summary["groups"]) or {}).items():
        if len(found["areas"]) > MAX_CROSSED:
            return
        for area in found["cross"]:
            if area["value"] is not None:
                interval = _fractions(area["low"], area["high"])
                names = (area["positives"], area["negatives"])
                rows.append((*names, name, f"{area['value']:.3f}", interval))
    if rows:
        header = ("positives of", "negatives of", "class", "area", "95% interval")
        notes = (
            "The chance that such a positive scores above such a negative, ties counted half.",
        )
        yield Table("Area under the ROC curve across groups", header, tuple(rows), 3, notes)


def _distance_tables(summary: Summary) -> Iterator[Table]:
    """Yield a table for each of the two distances between score distributions, with all views."""
    found = summary["distributions"] or {}
    for key, (caption, note) in DISTANCES.items():
        rows = []
        for title, by_class in found.items():
            for name, distributions in by_class.items():
                for among, text in AMONG.items():
                    distances: ScoreDistances = distributions[among]  # type: ignore[literal-required]
                    largest: LargestDistance = distances[key]  # type: ignore[literal-required]
                    cells = _distance_cells(largest, incomplete=bool(distances["without_rows"]))
                    rows.append((title, name, text.format(name), *cells))
        if not rows:
            continue
        notes = (note, POSSIBLE_NOTE)
        notes += (WITHOUT_ROWS,) if any("*" in row[4] for row in rows) else ()
        header = ("groups", "class", "among", "farthest apart", "distance", "95% interval")
        yield Table(caption, (*header, "possible"), tuple(rows), 4, notes)


def _distance_cells(found: LargestDistance, *, incomplete: bool) -> tuple[str, ...]:
    """Return the cells of a distance; a star marks one that covers only some of the groups."""
    if found["value"] is None:
        return DASH, "not estimable", DASH, DASH
    return (
        " / ".join(found["pair"] or ()),
        format_points(found["value"]) + "*" * incomplete,
        format_interval(found["low"], found["high"]),
        format_interval(found["least"], found["most"]),
    )


def _top_tables(summary: Summary) -> Iterator[Table]:
    """Yield a table of who is at the top, by each attribute and by all together."""
    for title, by_class in (summary["ranking"] or {}).items():
        if title != summary["groups"] and " & " in title:
            continue
        rows = [
            row
            for name, found in by_class.items()
            for top in found["tops"]
            if len(top["groups"]) <= MAX_TOP_GROUPS or top["top"] == ONE_TOP
            for row in _top_rows(name, top)
        ]
        notes = (
            "Share of all and of the top: the group's share of all people, and of those with the "
            "highest scores for the class. Of the group: the share of the group that is there.",
        )
        header = ("top", "class", "group", "share of all", "share of the top", "95% interval")
        header += ("of the group", "95% interval")
        yield Table(f"Who is at the top by {title}, percent", header, tuple(rows), 3, notes)


def _top_rows(name: str, top: Top) -> Iterator[tuple[str, ...]]:
    """Yield a row for each group."""
    for group, found in top["groups"].items():
        yield (
            f"{100 * top['top']:g}%",
            name,
            group,
            format_points(found["of_all"]),
            format_points(found["share"], unknown="not estimable"),
            format_interval(found["share_low"], found["share_high"]),
            format_points(found["selected"], unknown="not estimable"),
            format_interval(found["selected_low"], found["selected_high"]),
        )


def list_scan_tables(summary: Summary, *, short: bool = False) -> Iterator[Table]:
    """Yield the table of subgroups that differ from everybody else, and that of pairs.

    Parameters
    ----------
    summary
        The results of the audit.
    short
        Whether the tables are for a terminal.
    """
    scan = summary["scan"]
    if scan is None:
        return
    for key, what, noun in (
        ("against_rest", "everybody else", "subgroup"),
        ("pairs", "each other", "subgroups"),
    ):
        found: Sequence[SubgroupGap] = scan[key]  # type: ignore[literal-required]
        if not found:
            continue
        looks = format_count(scan["looks"][key], "comparison")
        notes = [
            f"{looks} of {format_count(scan['subgroups'], 'subgroup')} by up to three attributes; "
            f"{scan['beyond_chance'][key] or 'none'} beyond chance. First: the largest differences "
            "that are certain."
        ]
        if key == "against_rest" or not scan["against_rest"]:
            notes.append(
                "Intervals and p-values account for all comparisons: if no rate differed, a scan "
                "would find a difference beyond chance in at most 5 of 100 audits."
            )
        if scan["too_small"]:
            small = format_count(scan["too_small"], "subgroup")
            notes.append(f"Not compared: {small} with fewer than {scan['min_rows']} rows.")
        header = ("rate", noun, "percent", "difference", "95% interval")
        rows = [_scan_row(each, several=len(summary["classes"]) > 2) for each in found]
        if short:
            rows = [row[: len(header)] for row in rows]
        else:
            header += ("p", "by", "rows")
        caption = f"Subgroups that differ most from {what}, points"
        yield Table(caption, header, tuple(rows), 2, tuple(notes))


def _scan_row(found: SubgroupGap, *, several: bool) -> tuple[str, ...]:
    """Return the row of one comparison; with `several` conditions, it names the condition."""
    other = found["other"]
    return (
        rate_name(found["metric"]) + (f" ({found['condition']})" if several else ""),
        found["group"] if other is None else f"{found['group']} / {other}",
        f"{format_points(found['rate'])} / {format_points(found['other_rate'])}",
        format_points(found["difference"], sign="+"),
        format_interval(found["low"], found["high"], sign="+"),
        "< 0.001" if found["p"] < 0.001 else f"{found['p']:.3f}",
        found["by"],
        f"{found['n']:,.0f}" + ("" if other is None else f" / {found['other_n']:,.0f}"),
    )
