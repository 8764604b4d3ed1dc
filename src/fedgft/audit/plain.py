"""Estimates as plain values that JSON can hold: null where something is not estimable."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

import numpy as np

from fedgft.audit.bootstrap import Redrawn
from fedgft.audit.curves import Curves, curves, sweep
from fedgft.audit.locality import Locality
from fedgft.audit.rates import Gap, Rates, apart, quotient, rates_of
from fedgft.audit.sums import Sums
from fedgft.audit.views import View
from fedgft.metrics import Metric, Tally, get_metric
from fedgft.metrics.decisions import condition_names

Plain = dict[str, Any]


def metric_plain(
    metric: Metric, seen: View, rates: Rates, gap: Gap, drawn: Redrawn | None, reference: int | None
) -> Plain:
    unknown = bool(np.isnan(rates.rate).any())
    limits = rates.interval() if drawn is None else drawn.rates
    names = condition_names(metric, seen.classes)
    shown = gap.condition or 0
    named = [seen.names[g] for g in gap.pair or ()]
    numbers = {k: v for k, v in asdict(gap).items() if k not in ("condition", "pair")}
    out: Plain = {name: None if unknown else value for name, value in numbers.items()}
    out["among_estimable"] = numbers if unknown and gap.gap is not None else None
    out["pair"] = named or None
    out["condition"] = names[shown]
    out["groups"] = _groups(seen, rates, limits, shown)
    if len(names) > 1:
        out["conditions"] = {n: _groups(seen, rates, limits, v) for v, n in enumerate(names)}
    if reference is not None:
        out["reference"] = seen.names[reference]
        out["against_reference"] = _against(seen, rates, shown, reference)
    return out


def signed(where: Locality) -> Plain:
    """The named pair, the first minus the second, with an interval of its own."""
    keys = ("signed_gap", "signed_low", "signed_high")
    return dict(zip(keys, map(number, where.whole), strict=True))


def _groups(seen: View, rates: Rates, limits: tuple[np.ndarray, np.ndarray], v: int) -> Plain:
    low, high = limits
    return {
        name: {"rate": number(rates.rate[v, g]), "low": number(low[v, g]),
               "high": number(high[v, g]), "n": count(rates.n[v, g])}
        for g, name in enumerate(seen.names)
    }  # fmt: skip


def _against(seen: View, rates: Rates, v: int, reference: int) -> Plain:
    base, out = rates.of(v, reference), {}
    for g, name in enumerate(seen.names):
        if g != reference:
            mine = rates.of(v, g)
            keys = ("difference", "low", "high", "ratio", "ratio_low", "ratio_high")
            values = (*apart(mine, base), *quotient(mine, base))
            out[name] = {key: number(x) for key, x in zip(keys, values, strict=True)}
    return out


def add_locality(out: Plain, by_site: list[Plain], name: str, where: Locality) -> None:
    out["heterogeneity"][name] = number(where.heterogeneity)
    out["tv"][name] = number(where.total_variation)
    out["bound"][name] = number(where.bound)
    keys = ("gap", "low", "high")
    out["within"][name] = dict(zip(keys, map(number, where.within), strict=True))
    own = dict(zip(keys, map(numbers, where.own), strict=True))
    local = [dict(zip(keys, ends, strict=True))
             for ends in zip(*map(numbers, where.local), strict=True)]  # fmt: skip
    found = own | {"ratio": numbers(where.ratio), "local": local,
                   "contribution": numbers(where.contribution)}  # fmt: skip
    for kind in (key for key in found if key in by_site[0]):
        for site, value in zip(by_site, found[kind], strict=True):
            site[kind][name] = value


ALL_KINDS = ("gap", "low", "high", "ratio", "contribution", "local")
FEW_KINDS = ("gap", "contribution")  # by single attributes


def sites(seen: View, kinds: Sequence[str]) -> list[Plain]:
    """An empty entry for each site, with its number of rows."""
    rows = seen.tally.count[..., :-1].sum((1, 2)).tolist()
    return [{"n": count(n), **{kind: {} for kind in kinds}} for n in rows]


def scores(seen: View) -> Plain:
    """Curves by class and group, and what every threshold would do; null where there are none."""
    if not seen.complete:
        return {"auc": None, "curves": None, "sweep": None}
    classes = [1] if len(seen.classes) == 2 else range(len(seen.classes))
    made = {seen.classes[c]: curves(seen, s) for s, c in enumerate(classes)}
    return {
        "auc": {c: {x.group: {"auc": number(x.auc), "bin_error": number(x.auc_error)} for x in each}
                for c, each in made.items()},
        "curves": {c: {x.group: _curve(x) for x in each} for c, each in made.items()},
        "sweep": _sweep(seen),
    }  # fmt: skip


def _curve(found: Curves) -> Plain:
    lists = {"thresholds": found.thresholds, "tpr": found.tpr, "fpr": found.fpr}
    return {k: [number(x) for x in v] for k, v in lists.items()} | {
        "calibration": found.calibration
    }


def _sweep(seen: View) -> Plain | None:
    found = sweep(seen)
    if found is None:
        return None
    groups = dict(zip(seen.names, found.selected.T, strict=True))
    return {
        "thresholds": numbers(found.thresholds),
        "accuracy": numbers(found.accuracy),
        "gaps": {name: numbers(gaps) for name, gaps in found.gaps.items()},
        "selected": {group: numbers(rates) for group, rates in groups.items()},
    }


def rows(sums: Sums, seen: View) -> Plain:
    return {
        "counted": count(sums.rows()),
        "not_recorded": count(seen.tally.count[..., -1].sum()),
        "label_missing": count(sum(site.label_missing for site in sums.sites.values())),
        "prediction_missing": count(sum(s.prediction_missing for s in sums.sites.values())),
    }


def accuracy(seen: View) -> Plain:
    """Of everyone, those without a recorded group included."""
    one = lambda a: np.stack((a.sum(2), 0 * a.sum(2)), 2)  # noqa: E731
    tally = Tally(one(seen.tally.count), one(seen.tally.score), one(seen.tally.decision))
    everyone = replace(
        seen, names=("everyone",), tally=tally, noise=one(seen.noise), slack=one(seen.slack)
    )
    rates = rates_of(get_metric("acc"), everyone, "hard")
    return _groups(everyone, rates, rates.interval(), 0)["everyone"]


def privacy(sums: Sums) -> Plain:
    """How many sites did what, and the largest budget that one row was exposed to."""
    used: dict[str, int] = {}
    for site in sums.sites.values():
        for how in site.privacy or (None,):
            kind = "none" if how is None else how.mechanism if not how.min_cell else "min cell"
            used[kind] = used.get(kind, 0) + 1
    spent = [sum(p.epsilon for p in site.privacy) for site in sums.sites.values()]
    return {
        "sites": used,
        "approximate": any(site.privacy for site in sums.sites.values()),  # counts are
        "largest_epsilon": max(spent, default=0.0) or None,
    }


def views_of(summary: Plain) -> dict[str, Plain]:
    """By each attribute, and by all of them together, which is the summary's own."""
    return {**summary["attributes"], summary["groups"]: summary}


COMPACT = ("sites", "curves", "sweep")  # many, or long: one line for each of their entries


def to_json(summary: Plain) -> str:
    """Indented for people."""
    held, token = [], uuid4().hex  # a place holder that no name in the data can be

    def without_long(look: Plain) -> Plain:
        out = dict(look)
        for key in COMPACT:
            if out.get(key):
                lines = [f"{_line(name)}: {_line(value)}" for name, value in out[key].items()]
                held.append("{\n    " + ",\n    ".join(lines) + "\n  }")
                out[key] = f"{token} {len(held) - 1}"
        return out

    bare = without_long(summary)
    bare["attributes"] = {t: without_long(look) for t, look in summary["attributes"].items()}
    text = json.dumps(bare, indent=2, allow_nan=False, ensure_ascii=False)
    for i, lines in enumerate(held):
        text = text.replace(f'"{token} {i}"', lines, 1)
    return text + "\n"


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def number(value: Any) -> float | None:
    """JSON has no NaN and no infinity: what cannot be said is null."""
    found = float(value)
    return found if math.isfinite(found) else None


def numbers(values: np.ndarray) -> list[float | None]:
    """The same for many."""
    pairs = zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    return [value if known else None for value, known in pairs]


def count(value: Any) -> int | float:
    found = float(value)
    return int(found) if found == int(found) else found
