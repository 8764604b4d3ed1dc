"""Gaps within strata.

Mantel-Haenszel gaps pooled over strata (of three sites together), where groups are spread
differently over strata and every stratum has the same gap; and the gap of a single stratum.
"Sparse" strata hold about 20 rows each. "Weighted" rows have lognormal weights that say nothing
about the decision.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from rows import Row

from fedgft.auditing.between_sites import estimate_metric
from fedgft.auditing.conditional import pool_strata, summarize_strata
from fedgft.auditing.rates import list_views, pool_sites
from fedgft.metrics import get_metric
from fedgft.site_sums import COUNT, ROWS, SQUARES, MeasurementSpec, SiteSums, SiteTables

GAP = 0.06


def simulate(strata: int, rows: int, weighted: bool, rng: np.random.Generator) -> SiteSums:
    """Return the sums of three sites; the rates of stratum s rise with s."""
    spec = MeasurementSpec(("0", "1"), ("sex",), given=("job",), weight="w" if weighted else "")
    sites = {}
    for k in range(3):
        job = rng.integers(0, strata, rows)
        sex = (rng.random(rows) < np.linspace(0.2, 0.7, strata)[job]).astype(int)
        chance = np.linspace(0.2, 0.6, strata)[job] + GAP * sex
        hit = (rng.random(rows) < chance).astype(int)
        w = np.exp(rng.normal(0, 0.6, rows)) if weighted else np.ones(rows)
        tables = {}
        for g in (0, 1):
            for s in range(strata):
                table = spec.empty_table()
                for d in (0, 1):
                    mine = w[(sex == g) & (job == s) & (hit == d)]
                    numbers = (mine.sum(), len(mine), (mine**2).sum())
                    table[0, d, [COUNT, ROWS, SQUARES] if weighted else [COUNT]] = (
                        numbers if weighted else numbers[:1]
                    )
                tables[("fm"[g], f"job {s:03}")] = table
        sites[f"s{k}"] = SiteTables(tables)
    return SiteSums(spec, sites)


def check(sums: SiteSums) -> tuple[bool | None, bool | None]:
    """Return whether the interval of the pooled gap and of one stratum contain the truth."""
    pool = pool_sites(sums)
    (view,) = list_views(pool)
    estimate = estimate_metric(get_metric("sp"), view)
    strata = pool_strata(pool)
    if strata is None:
        return None, None
    found = summarize_strata(strata, [view], [{"sp": estimate}])["views"]["sex"]["sp"]
    truth = GAP if found["pair"] == ["m", "f"] else -GAP
    single = found["strata"]["job 000"]
    return _contains(found["pooled"], truth), _contains(single, truth)


def _contains(found, truth: float) -> bool | None:
    low, high = found["low"], found["high"]
    if low is None or low != low:
        return None
    return bool(low <= truth <= high)


def run(federations: int) -> Iterator[Row]:
    """Yield a row for each setting and kind of interval."""
    settings = {
        "6 strata, 3 sites of 600 rows": partial(simulate, 6, 600, False),
        "6 strata, 3 sites of 600 weighted rows": partial(simulate, 6, 600, True),
        "100 sparse strata, 3 sites of 700 rows": partial(simulate, 100, 700, False),
        "30 strata, 3 sites of 2,000 weighted rows": partial(simulate, 30, 2000, True),
    }
    for setting, draw in settings.items():
        rng = np.random.default_rng(3)
        found = [check(draw(rng)) for _ in range(federations)]
        for i, interval in enumerate(("pooled within strata", "the gap in one stratum")):
            known = [each[i] for each in found if each[i] is not None]
            if known:
                yield Row(setting, interval, sum(known), len(known))
