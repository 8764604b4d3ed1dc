"""Dated sums of sites with known rates, for tests of `fedgft monitor`."""

import calendar
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedgft.site_sums import MeasurementSpec, SiteSums, SiteTables

SITES = ("north", "south", "east")


def month_ends(months: int, year: int = 2015) -> list[str]:
    """The last days of months, from January on."""
    out = []
    for k in range(months):
        y, m = year + k // 12, k % 12 + 1
        out.append(f"{y}-{m:02d}-{calendar.monthrange(y, m)[1]}")
    return out


def make_sums(
    counts: Mapping[str, Sequence[int]], *, site: str, date: str, version: str = ""
) -> SiteSums:
    """Sums of a site with (true negatives, false positives, false negatives, true positives)."""
    spec = MeasurementSpec(("0", "1"), ("sex",), date=date, model_version=version)
    tables = {}
    for group, (tn, fp, fn, tp) in counts.items():
        table = spec.empty_table()
        table[..., 0] = [[tn, fp], [fn, tp]]
        tables[(group,)] = table
    return SiteSums(spec, {site: SiteTables(tables)})


def draw_history(
    generator: np.random.Generator,
    *,
    months: int = 24,
    rows: int = 4000,
    change: float = 0.0,
    at: int = 12,
    site: str | None = None,
    gap: float = 0.02,
    versions: Sequence[str] = (),
) -> Iterator[SiteSums]:
    """Yield the sums of three sites for each month; from month `at` on, the gap is larger.

    Parameters
    ----------
    generator
        The random numbers.
    months, rows
        The number of months, and of rows per site and month.
    change, at, site
        How much the selection rate of men rises, from which month on, and at which site (None: at
        all sites).
    gap
        The gap before.
    versions
        The version of the model in each month.
    """
    for t, date in enumerate(month_ends(months)):
        for k, name in enumerate(SITES):
            women = int(generator.binomial(rows, 0.45))
            more = change if t >= at and site in (None, name) else 0.0
            counts = {}
            base = 0.40 + 0.03 * k
            for group, n, rate in (("f", women, base), ("m", rows - women, base + gap + more)):
                positive = int(generator.binomial(n, 0.5))
                parts = []
                for size in (n - positive, positive):
                    chosen = int(generator.binomial(size, rate))
                    parts += [size - chosen, chosen]
                counts[group] = parts
            version = versions[t] if versions else ""
            yield make_sums(counts, site=name, date=date, version=version)


def write_history(folder: Path, parts: Iterator[SiteSums]) -> Path:
    """Write the files of a history, one folder per date."""
    for part in parts:
        (site,) = part.sites
        place = folder / part.require_spec().date
        place.mkdir(parents=True, exist_ok=True)
        part.save(place / f"{site}.json")
    return folder
