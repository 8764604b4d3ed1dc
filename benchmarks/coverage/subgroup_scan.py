"""Scan of subgroups.

Federations of three to five sites and three attributes: 53 subgroups, about 250 comparisons with
everybody else and 1,400 pairs, for five metrics. In the fair settings no rate depends on the
attributes; "no alarm" counts the scans that name no difference as beyond chance, which should be at
least 95%. In the other settings one subgroup by two attributes has a lower rate of positive
decisions; "found" counts the scans whose first entry against everybody else is this subgroup or
part of it. "All intervals" counts the scans in which every interval of statistical parity that is
shown contains the true difference. It is conservative: Holm, Bonferroni and exact tests.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rows import Row

from fedgft.auditing.rates import View, list_views, pool_sites
from fedgft.auditing.subgroup_scan import scan_subgroups
from fedgft.site_sums import COUNT, MeasurementSpec, SiteSums, SiteTables

VALUES = (("f", "m"), ("old", "young"), tuple("abcde"))
SHOWN = 50


class Setting(NamedTuple):
    """One kind of federation: its size and the lower rate of women of group b, in points."""

    name: str
    rows: int
    drop: float


SETTINGS = (
    Setting("fair, 2,000 people", 2_000, 0.0),
    Setting("fair, 20,000 people", 20_000, 0.0),
    Setting("5 points lower, 20,000 people", 20_000, 0.05),
    Setting("10 points lower, 20,000 people", 20_000, 0.10),
    Setting("20 points lower, 20,000 people", 20_000, 0.20),
)


def simulate(
    setting: Setting, generator: np.random.Generator
) -> tuple[tuple[View, ...], np.ndarray, np.ndarray]:
    """Return the views of a federation, and the chances and true selection rates of each cell."""
    shape = tuple(map(len, VALUES))
    cells = generator.dirichlet(np.full(np.prod(shape), 2.0)).reshape(shape)
    rate = np.full(shape, generator.uniform(0.3, 0.6))
    rate[0, :, 1] -= setting.drop
    base = generator.uniform(0.2, 0.6)
    sites = int(generator.integers(3, 6))
    label = np.stack((np.full(shape, 1 - base), np.full(shape, base)), -1)
    decision = np.stack((1 - rate, rate), -1)
    chance = cells[..., None, None] * label[..., None] * decision[..., None, :]
    held = {}
    for k, rows in enumerate(
        generator.multinomial(setting.rows, generator.dirichlet([3.0] * sites))
    ):
        counts = generator.multinomial(rows, chance.ravel()).reshape(chance.shape)
        tables = {}
        for at in np.ndindex(*shape):
            group = tuple(names[i] for names, i in zip(VALUES, at, strict=True))
            table = MeasurementSpec(("0", "1"), ("sex", "age", "race")).empty_table()
            table[..., COUNT] = counts[at]
            tables[group] = table
        held[str(k)] = SiteTables(tables)
    sums = SiteSums(MeasurementSpec(("0", "1"), ("sex", "age", "race")), held)
    return list_views(pool_sites(sums)), cells, rate


def true_rate(by: str, group: str, cells: np.ndarray, rate: np.ndarray, *, rest: bool) -> float:
    """Return the true selection rate of a subgroup, or of everybody else."""
    wanted = dict(zip(by.split(" & "), group.split(" & "), strict=True))
    inside = np.ones(cells.shape, dtype=bool)
    for axis, (name, values) in enumerate(zip(("sex", "age", "race"), VALUES, strict=True)):
        if name in wanted:
            keep = np.array(values) == wanted[name]
            inside &= keep.reshape([-1 if a == axis else 1 for a in range(3)])
    inside = ~inside if rest else inside
    return float((cells * rate)[inside].sum() / cells[inside].sum())


def run(federations: int) -> Iterator[Row]:
    """Simulate this many federations per setting."""
    for seed, setting in enumerate(SETTINGS):
        generator = np.random.default_rng(200 + seed)
        quiet = found = contained = 0
        for _ in range(federations):
            views, cells, rate = simulate(setting, generator)
            scan = scan_subgroups(views, shown=SHOWN)
            quiet += not any(scan["beyond_chance"].values())
            first = scan["against_rest"][0]
            part = {"f", "b"} <= set(first["group"].split(" & "))
            found += part and first["beyond_chance"] and first["metric"] in ("sp", "acc", "eop")
            inside = True
            for each in (*scan["against_rest"], *scan["pairs"]):
                if each["metric"] == "sp":
                    other = each["other"]
                    truth = true_rate(each["by"], each["group"], cells, rate, rest=False)
                    truth -= true_rate(
                        each["by"], other or each["group"], cells, rate, rest=other is None
                    )
                    inside &= each["low"] - 1e-9 <= truth <= each["high"] + 1e-9
            contained += inside
        yield Row(setting.name, "all intervals", contained, federations, "conservative")
        if not setting.drop:
            yield Row(setting.name, "no alarm", quiet, federations, "at least 95%")
        else:
            yield Row(setting.name, "found", found, federations, "power")
