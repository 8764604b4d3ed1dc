"""Over time: the band, false alarms, and planted changes.

Three sites send a file every month, and `monitor` follows statistical parity and equal opportunity.
The band is looked at after every month and covers if *every* one of its looks contains the truth.
It is conservative: it holds if one looks forever. The usual interval of the same average is beside
it. A quiet history is one in which nothing changes. A change of three points is planted in month 13
of 24; its delay is the number of months until it is found, 1 for its first month.
"""

import datetime
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from rows import Row

from fedgft.auditing import Monitor, monitor
from fedgft.metrics.intervals import Z95
from fedgft.site_sums import MeasurementSpec, SiteSums, SiteTables

SITES = ("north", "south", "east")
PLANTED = 12  # months before the change
CHANGE = 0.03
GAP = 0.03
START = datetime.date(2000, 1, 31)


def draw_history(
    generator: np.random.Generator,
    *,
    months: int,
    rows: int,
    change: float = 0.0,
    rate: float = 0.4,
    gap: float = GAP,
    groups: Sequence[str] = ("f", "m"),
) -> Iterator[SiteSums]:
    """Yield the sums of every site and month; the last group has the higher selection rate."""
    for t in range(months):
        date = str(START + datetime.timedelta(days=30 * t))
        spec = MeasurementSpec(("0", "1"), ("sex",), date=date)
        for k, site in enumerate(SITES):
            sizes = generator.multinomial(rows, np.full(len(groups), 1 / len(groups)))
            tables = {}
            for group, size in zip(groups, sizes, strict=True):
                more = gap + change * (t >= PLANTED) if group == groups[-1] else 0.0
                chosen = rate * (1 + 0.1 * (k - 1)) + more
                shares = [0.5 * (1 - chosen), 0.5 * chosen] * 2
                table = spec.empty_table()
                table[..., 0] = generator.multinomial(size, shares).reshape(2, 2)
                tables[(group,)] = table
            yield SiteSums(spec, {site: SiteTables(tables)})


def _covers(found: Monitor, truth: float) -> bool:
    """Return whether the band of every month contains the truth."""
    looks = [period.gaps["sp"] for period in found.periods]
    return all(
        g.band_low is not None and g.band_high is not None and g.band_low <= truth <= g.band_high
        for g in looks
    )


def _naive_covers(found: Monitor, truth: float) -> bool:
    """Return whether the usual 95% interval of the average contains the truth every month."""
    rates = [period.gaps["sp"] for period in found.periods]
    first, second = "f", "m"
    d = np.array([g.rates[second] - g.rates[first] for g in rates])
    v = np.array([sum(g.rates[x] * (1 - g.rates[x]) / g.rows[x] for x in (first, second))
                  for g in rates])  # fmt: skip
    mean = np.cumsum(d / v) / np.cumsum(1 / v)
    return bool((np.abs(mean - truth) <= Z95 / np.sqrt(np.cumsum(1 / v))).all())


def _run_band(setting: str, options: dict[str, Any], seed: int, federations: int) -> Iterator[Row]:
    """Yield the coverage of the band over 100 looks."""
    covered = naive = 0
    truth = options.get("gap", GAP)
    for k in range(federations):
        generator = np.random.default_rng((seed, k))
        found = monitor(draw_history(generator, months=100, **options), metrics=["sp"])
        covered += _covers(found, truth)
        naive += "groups" not in options and _naive_covers(found, truth)
    yield Row(setting, "band, at all 100 looks", covered, federations, "conservative")
    if "groups" not in options:
        note = "what the band is for"
        yield Row(setting, "usual interval, at all 100 looks", naive, federations, note)


def _run_quiet(setting: str, options: dict[str, Any], seed: int, federations: int) -> Iterator[Row]:
    """Yield the share of quiet histories without a false alarm."""
    quiet = 0
    for k in range(federations):
        generator = np.random.default_rng((seed, k))
        quiet += not monitor(draw_history(generator, **options)).changes
    note = f"false alarms: {100 * (1 - quiet / federations):.2f}%"
    yield Row(setting, "no change found (sp, eop)", quiet, federations, note)


def _run_planted(rows: int, federations: int) -> Iterator[Row]:
    """Yield how often the planted change is found, and how often its interval contains it."""
    found = covered = again = 0
    delays: list[int] = []
    for k in range(federations):
        generator = np.random.default_rng((20, rows, k))
        history = draw_history(generator, months=24, rows=rows, change=CHANGE)
        result = monitor(history, metrics=["sp"])
        labels = [period.label for period in result.periods]
        places = [(labels.index(c.found_in or ""), c) for c in result.changes]
        after = [each for each in places if each[0] >= PLANTED]
        again += len(after) > 1
        if after:
            found += 1
            delays.append(after[0][0] - PLANTED + 1)
            covered += after[0][1].low <= CHANGE <= after[0][1].high
    setting = f"3 points in month 13 of 24, 3 sites x {rows:,} rows"
    months = np.median(delays) if delays else float("nan")
    note = f"median delay {months:g} months, 90% within {np.quantile(delays, 0.9):g}"
    note += f"; a second change in {100 * again / federations:.1f}%"
    yield Row(setting, "change found", found, federations, note)
    note = "interval of its size; conservative"
    yield Row(setting, "change, where it was found", covered, found, note)


RARE = {"rows": 300, "rate": 0.03, "gap": 0.01}
BANDS: list[tuple[str, dict[str, Any], int]] = [
    ("2 groups, 3 sites x 1,000 rows", {"rows": 1000}, 0),
    ("2 groups, no gap, 3 sites x 1,000 rows", {"rows": 1000, "gap": 0.0}, 1),
    ("2 groups, rate 3%, 3 sites x 300 rows", RARE, 2),
    ("4 groups, 3 sites x 1,000 rows", {"rows": 1000, "groups": ("a", "b", "c", "d")}, 3),
]
QUIET: list[tuple[str, dict[str, Any], int]] = [
    ("quiet, 24 months, 3 sites x 4,000 rows", {"months": 24, "rows": 4000}, 10),
    ("quiet, 100 months, 3 sites x 1,000 rows", {"months": 100, "rows": 1000}, 11),
    ("quiet, 24 months, rate 3%, 3 sites x 300 rows", {"months": 24, **RARE}, 12),
]
PARTS = (
    *(partial(_run_band, *case) for case in BANDS),
    *(partial(_run_quiet, *case) for case in QUIET),
    *(partial(_run_planted, rows) for rows in (4000, 2000, 1000)),
)


def run(federations: int) -> Iterator[Row]:
    """Yield the rows of this section."""
    for part in PARTS:
        yield from part(federations)
