"""The audit's tables, as text in cells."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fedgft.audit.alerts import SHOWN, points
from fedgft.audit.plain import views_of
from fedgft.audit.verdict import VERDICT, leading
from fedgft.layout import Table
from fedgft.metrics import CATALOG, get_metric

Plain = dict[str, Any]
FEW_SITES_SHOWN = 40
SHOWN_FROM = 0.0005  # of the gap: what a site adds is 0.0 points otherwise
DASH = "–"
EXPLAINED = (
    "Gaps in percentage points. Within sites: the gap a person sees who stays within sites "
    "(Mantel-Haenszel). TV and DH: how differently the groups are spread over the sites. Bound: "
    "with α the largest local gap, the gap is at most α(1 − TV) + TV."
)


def tables(summary: Plain) -> Iterator[Table]:
    """All tables, the view with all attributes first."""
    first = _metrics(summary, summary["groups"])
    yield replace(first, notes=(EXPLAINED, *first.notes))
    yield _groups(summary, summary["groups"])
    for title, view in summary["attributes"].items():
        yield _metrics(view, title)
        yield _groups(view, title)
    yield from _references(summary)
    yield _sites(summary)
    yield from _adjusted(summary)
    yield from _areas(summary)


def few_tables(summary: Plain) -> Iterator[Table]:
    """What fits a terminal: gaps by each attribute, rates, and the sites that matter most."""
    for title, view in views_of(summary).items():
        yield _metrics(view, title)
    yield _groups(summary, summary["groups"])
    yield from _references(summary)
    yield _sites(summary, most=10)
    yield from _adjusted(summary)


def _metrics(view: Plain, title: str) -> Table:
    header = ("metric", "farthest apart", "gap", "95% interval", "ratio", "95% interval",
              "within sites", "TV", "bound", "DH")  # fmt: skip
    rows = []
    for name, found in view["metrics"].items():
        numbers = found if found["gap"] is not None else found["among_estimable"] or {}
        star = "" if found["gap"] is not None or not numbers else "*"
        rows.append((
            CATALOG[name].title,
            " / ".join(found["pair"] or (DASH,)),
            "not estimable" if not numbers else points(numbers["gap"]) + star,
            between(numbers.get("low"), numbers.get("high"), 100, 1),
            DASH if numbers.get("ratio") is None else f"{numbers['ratio']:.2f}",
            between(numbers.get("ratio_low"), numbers.get("ratio_high"), 1, 2),
            _with_interval(view["within"][name]),
            _plain(view["tv"][name]), points(view["bound"][name]), _heterogeneity(view, name),
        ))  # fmt: skip
    notes = []
    if any("*" in row[2] for row in rows):
        notes.append("*: among the groups that have a rate; over all groups it is not estimable.")
    return Table(f"Gaps by {title}", header, tuple(rows), 2, tuple(notes))


def _groups(view: Plain, title: str) -> Table:
    names = list(view["metrics"])
    names = [n for n in names if "conditions" not in view["metrics"][n]] or names
    groups = next(iter(view["metrics"].values()))["groups"]
    rows = [
        (group, f"{view['metrics']['acc']['groups'][group]['n']:,.0f}",
         *(_rate(view["metrics"][name]["groups"][group]) for name in names))
        for group in groups
    ]  # fmt: skip
    header = ("group", "rows", *(CATALOG[name].title for name in names))
    return Table(f"Rates by {title}, per cent", header, tuple(rows), 1)


def _rate(found: Plain) -> str:
    if found["rate"] is None:
        return f"not estimable (n={found['n']:,.0f})"
    if found["low"] is None:
        return f"{points(found['rate'])} (n={found['n']:,.0f}: too few for an interval)"
    return f"{points(found['rate'])} ({between(found['low'], found['high'], 100, 1)})"


def _references(summary: Plain) -> Iterator[Table]:
    for title, view in views_of(summary).items():
        rows = [
            (CATALOG[name].title, group, points(d["difference"]),
             between(d["low"], d["high"], 100, 1),
             DASH if d["ratio"] is None else f"{d['ratio']:.2f}",
             between(d["ratio_low"], d["ratio_high"], 1, 2))
            for name, found in view["metrics"].items()
            for group, d in found.get("against_reference", {}).items()
        ]  # fmt: skip
        if rows:
            reference = view["metrics"]["sp"]["reference"]
            header = ("metric", "group", "difference", "95% interval", "ratio", "95% interval")
            yield Table(f"{title}: every group against {reference}", header, tuple(rows), 2,
                        ("Each interval holds for itself.",))  # fmt: skip


def largest_sites(summary: Plain, metric: str, most: int = FEW_SITES_SHOWN) -> list[str]:
    """The sites that move this gap most."""
    size = lambda name: -abs(summary["sites"][name]["contribution"][metric] or 0.0)  # noqa: E731
    return sorted(summary["sites"], key=size)[:most]


def _sites(summary: Plain, most: int = FEW_SITES_SHOWN) -> Table:
    metric = leading(summary)
    names = [n for n in VERDICT if summary["metrics"][n]["pair"] is not None]
    shown = largest_sites(summary, metric, most)
    rows = []
    for site in shown:
        found = summary["sites"][site]
        local = found["local"][metric]
        rows.append((
            site, f"{found['n']:,.0f}", _with_interval(local),
            points(found["contribution"][metric]),
            *(points(found["gap"][n], "not estimable") for n in names),
        ))  # fmt: skip
    header = ("site", "rows", f"local gap, {CATALOG[metric].title}", "adds to the global gap",
              *(f"own gap, {CATALOG[n].title}" for n in names))  # fmt: skip
    pair = " minus ".join(summary["metrics"][metric]["pair"] or ())
    notes = [
        f"Rows: those with a recorded group. Local gap: {pair or DASH}, points. A site's own "
        "gap is the largest between the groups it has.",
        *_drivers(summary, metric),
    ]
    if len(summary["sites"]) > len(shown):
        notes.append(
            f"The {len(shown)} that move the gap most, of {len(summary['sites']):,} sites."
        )
    return Table("Sites", header, tuple(rows), 1, tuple(notes))


def _drivers(summary: Plain, metric: str) -> Iterator[str]:
    """Which sites make the gap, in two sentences; nothing where it is not estimable."""
    found = summary["metrics"][metric]
    known = [site["contribution"][metric] is not None for site in summary["sites"].values()]
    if found["pair"] is None or not all(known):
        return
    first, second = found["pair"]
    between_them = f"in {CATALOG[metric].title} between {first} and {second}"
    order = largest_sites(summary, metric, len(summary["sites"]))
    adds = [(site, summary["sites"][site]["contribution"][metric]) for site in order]
    more = [(site, value) for site, value in adds if value >= SHOWN_FROM]
    less = [(site, -value) for site, value in adds if value <= -SHOWN_FROM]
    if not more and not less:
        yield f"No site adds to the gap {between_them}: each adds less than 0.05 points."
    else:
        whole = f"Of the gap of {points(found['signed_gap'])} points {between_them}, "
        parts = [_amounts(more, "adds", "add"), _amounts(less, "takes away", "take")]
        yield whole + "; ".join(part for part in parts if part) + "."
    yield (
        "What a site adds is measured from the overall rate of the two groups: a site where both "
        "have that rate adds 0. Over all sites it adds up to the gap."
    )


def _amounts(sites: list[tuple[str, float]], one: str, several: str) -> str:
    """`north adds 12.3, south 4.5 and east 1.0 (2 more add less)`; nothing of no sites."""
    if not sites:
        return ""
    (first, value), *others = sites[:SHOWN]
    texts = [f"{first} {one} {points(value)}", *(f"{site} {points(v)}" for site, v in others)]
    said = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    rest = len(sites) - len(texts)
    return said + (
        f" ({rest} more {one.split()[0] if rest == 1 else several} less)" if rest else ""
    )


def _adjusted(summary: Plain) -> Iterator[Table]:
    for found in summary["adjusted"]:
        asked = f"gap at most {points(found['tolerance'])} points"
        met = asked if found["feasible"] else f"the smallest gap there is (asked: {asked})"
        rows = tuple((g, "above 1" if t > 1 else f"{t:g}") for g, t in found["thresholds"].items())
        yield Table(
            f"Thresholds by group for {get_metric(found['metric']).title}: {met}",
            ("group", "threshold"), rows, 1,
            (f"Gap {points(found['gap_before'])} → {points(found['gap'])} points, accuracy "
             f"{points(found['accuracy_before'])}% → {points(found['accuracy'])}%.",
             *([f"Not met: {found['reason']}."] if found.get("reason") else ())),
        )  # fmt: skip


def _areas(summary: Plain) -> Iterator[Table]:
    if summary.get("auc"):
        rows = tuple(
            (group, str(name), DASH if found["auc"] is None else
             f"{found['auc']:.3f} ± {found['bin_error']:.3f}")
            for name, groups in summary["auc"].items() for group, found in groups.items()
        )  # fmt: skip
        yield Table("Area under the ROC curve", ("group", "class", "area"), rows, 2,
                    ("±: what the width of the bins leaves open, not sampling.",))  # fmt: skip


def between(low: float | None, high: float | None, scale: float, digits: int) -> str:
    if low is None and high is None:
        return DASH
    shown = [DASH if x is None else f"{scale * x:.{digits}f}" for x in (low, high)]
    return " to ".join(shown)


def _with_interval(found: Plain) -> str:
    if found["gap"] is None:
        return "not estimable"
    limits = between(found["low"], found["high"], 100, 1)
    return points(found["gap"]) + (f" ({limits})" if limits != DASH else " (no interval)")


def _heterogeneity(view: Plain, name: str) -> str:
    """Infinite where a site has one of the two groups alone; an improper metric has none."""
    value = view["heterogeneity"][name]
    if value is None and view["tv"][name] is not None and CATALOG[name].proper():
        return "∞"
    return _plain(value)


def _plain(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"
