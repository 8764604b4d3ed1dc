"""Estimates as plain values that JSON can hold: null where something is not estimable."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import numpy as np

from fedgft.audit.bootstrap import Redrawn
from fedgft.audit.curves import curves
from fedgft.audit.locality import Locality
from fedgft.audit.rates import Gap, Rates, apart, quotient
from fedgft.audit.sums import Sums
from fedgft.audit.views import View
from fedgft.metrics import Metric
from fedgft.metrics.intervals import wilson

Plain = dict[str, Any]


def metric_plain(
    metric: Metric, seen: View, rates: Rates, gap: Gap, drawn: Redrawn | None, reference: int | None
) -> Plain:
    unknown = bool(np.isnan(rates.rate).any())
    limits = rates.interval() if drawn is None else drawn.rates
    conditions = metric.conditions(len(seen.classes))
    names = [_condition(c, seen.classes) for c in conditions]
    shown = gap.condition or 0
    named = [seen.names[g] for g in gap.pair or ()]
    numbers = {k: v for k, v in asdict(gap).items() if k not in ("condition", "pair")}
    out: Plain = {name: None if unknown else value for name, value in numbers.items()}
    out["among_estimable"] = numbers if unknown and gap.gap is not None else None
    out["pair"] = named or None
    out["signed_gap"] = numbers["gap"]  # of the pair: the first minus the second
    out["condition"] = names[shown]
    out["groups"] = _groups(seen, rates, limits, shown)
    if len(conditions) > 1:
        out["conditions"] = {n: _groups(seen, rates, limits, v) for v, n in enumerate(names)}
    if reference is not None:
        out["reference"] = seen.names[reference]
        out["against_reference"] = _against(seen, rates, shown, reference)
    return out


def _condition(text: str, classes: Sequence[str]) -> str:
    """`class 1 given label 0` in the data's own words."""
    words = text.split(" given ")
    said = {f"{w} {i}": f"{w} {c}" for i, c in enumerate(classes) for w in ("class", "label")}
    return " given ".join(said.get(word, word) for word in words)


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
    local = zip(where.local.tolist(), where.low.tolist(), where.high.tolist(), strict=True)
    rest = zip(where.gap.tolist(), where.contribution.tolist(), local, strict=True)
    for site, (gap, contribution, seen) in zip(by_site, rest, strict=True):
        site["gap"][name] = number(gap)
        site["contribution"][name] = number(contribution)
        site["local"][name] = dict(zip(keys, map(number, seen), strict=True))


def areas(seen: View) -> Plain:
    """Area under the ROC curve of each group, one class against the rest."""
    classes = [1] if len(seen.classes) == 2 else range(len(seen.classes))
    return {
        seen.classes[c]: {
            curve.group: {"auc": number(curve.auc), "bin_error": number(curve.auc_error)}
            for curve in curves(seen, s)
        }
        for s, c in enumerate(classes)
    }


def rows(sums: Sums, seen: View) -> Plain:
    return {
        "counted": count(sums.rows()),
        "not_recorded": count(seen.tally.count[..., -1].sum()),
        "label_missing": count(sum(site.label_missing for site in sums.sites.values())),
        "prediction_missing": count(sum(s.prediction_missing for s in sums.sites.values())),
    }


def accuracy(seen: View) -> Plain:
    tally = seen.tally.sum()
    n, rate = float(tally.rows()), float(np.clip(tally.accuracy(), 0.0, 1.0))
    low, high = wilson(np.array(rate), np.array(n)) if n > 0 else (math.nan, math.nan)
    return {"rate": number(rate), "low": number(low), "high": number(high), "n": count(n)}


def privacy(sums: Sums) -> Plain:
    """How many sites did what, and the largest budget that one row was exposed to."""
    used: dict[str, int] = {}
    for site in sums.sites.values():
        for how in site.privacy or (None,):
            kind = "none" if how is None else how.mechanism if not how.min_cell else "min cell"
            used[kind] = used.get(kind, 0) + 1
    spent = [sum(p.epsilon for p in site.privacy) for site in sums.sites.values()]
    return {"sites": used, "largest_epsilon": max(spent, default=0.0) or None}


def views_of(summary: Plain) -> dict[str, Plain]:
    """By each attribute, and by all of them together, which is the summary's own."""
    return {**summary["attributes"], summary["groups"]: summary}


def to_json(summary: Plain) -> str:
    """Indented for people; a site is one line, however many there are."""
    held, token = [], uuid4().hex  # a place holder that no name in the data can be

    def without_sites(look: Plain) -> Plain:
        lines = [f"{_line(name)}: {_line(site)}" for name, site in look["sites"].items()]
        held.append("{\n    " + ",\n    ".join(lines) + "\n  }")
        return look | {"sites": f"{token} {len(held) - 1}"}

    bare = without_sites(summary)
    bare["attributes"] = {t: without_sites(look) for t, look in summary["attributes"].items()}
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


def count(value: Any) -> int | float:
    found = float(value)
    return int(found) if found == int(found) else found
