"""`audit`: from the sums of all sites to everything that is said of them, as plain values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedgft.audit import alerts, plain
from fedgft.audit.bootstrap import FEW_SITES, redraw
from fedgft.audit.locality import Locality, locality
from fedgft.audit.rates import apart, rates_of, widest
from fedgft.audit.references import reference_of
from fedgft.audit.sums import Sums, merge
from fedgft.audit.thresholds import WARNING, adjust
from fedgft.audit.views import Pool, View, pool, views
from fedgft.metrics import CATALOG, get_metric
from fedgft.types import FedgftError

FORMAT = "fedgft-audit-1"
Plain = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Audit:
    """Everything the sums say: a plain summary, and the views it was made from."""

    summary: Plain
    pooled: Pool
    views: tuple[View, ...]  # by attribute, all of them together last

    def to_dict(self) -> Plain:
        return self.summary

    @property
    def view(self) -> View:
        return self.views[-1]

    def difference(self, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """rate(first) - rate(second) and its 95% interval, of a metric with one condition."""
        rates = rates_of(get_metric(metric), self.view, "hard")
        if len(rates.rate) != 1:
            raise FedgftError(f"{metric} compares several rates; name one with a single one")
        one, other = (rates.of(0, self.view.index(name)) for name in (first, second))
        value, low, high = (float(x) for x in apart(one, other))
        return value, low, high

    def to_json(self) -> str:
        return plain.to_json(self.summary)

    def to_markdown(self) -> str:
        from fedgft.audit.text import markdown

        return markdown(self.summary)

    def to_html(self) -> str:
        """One page that needs no network and no other file."""
        from fedgft.audit.page import html

        return html(self)

    @cached_property
    def warnings(self) -> list[str]:
        return self.summary["warnings"]


def audit(
    sums: Sums | Iterable[Sums],
    *,
    reference_groups: Sequence[str] = (),
    bootstrap: int = 0,
    adjust_to: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Audit:
    """All metrics over all sites and site by site, from sums alone.

    `reference_groups` compares every group with one; `bootstrap` draws sites instead of rows;
    `adjust_to` ({"sp": 0.02}) looks for thresholds by group.

    >>> from fedgft.audit import measure
    >>> site = measure([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> audit(site).to_dict()["metrics"]["sp"]["gap"]
    0.5
    """
    total = sums if isinstance(sums, Sums) else merge(sums)
    pooled = pool(total)
    seen = tuple(views(pooled))
    _check_references(reference_groups, seen)
    looks = [_look(view, pooled.sites, reference_groups, bootstrap, seed) for view in seen]
    warnings = [*alerts.about_rows(total, pooled, seen)]
    if bootstrap and len(pooled.sites) < FEW_SITES:
        warnings.append(
            f"{len(pooled.sites)} sites are few to draw again from: intervals are rough."
        )
    for look in looks:
        warnings += look.pop("warnings")
    adjusted = [_adjusted(name, seen[-1], t) for name, t in (adjust_to or {}).items()]
    summary: Plain = {
        "format": FORMAT,
        "rows": plain.rows(total, seen[-1]),
        "classes": list(pooled.question.classes),
        "groups": seen[-1].title,
        "threshold": pooled.question.threshold,
        "interval": f"percentile bootstrap over sites, {bootstrap} draws" if bootstrap else
                    "Wilson (rates), Newcombe and Tukey (differences), Donner & Zou (ratios)",
        "accuracy": plain.accuracy(seen[-1]),
        **looks[-1],
        "attributes": {v.title: look for v, look in zip(seen[:-1], looks[:-1], strict=True)},
        "adjusted": adjusted,
        "privacy": plain.privacy(total),
        "warnings": list(dict.fromkeys(warnings)),
    }  # fmt: skip
    if adjusted:
        summary["warnings"].append(WARNING)
    return Audit(summary, pooled, seen)


def _look(
    seen: View, sites: Sequence[str], references: Sequence[str], bootstrap: int, seed: int
) -> Plain:
    """One view: every metric, every site."""
    out: Plain = {"metrics": {}, "scores": {}, "heterogeneity": {}, "tv": {}, "bound": {},
                  "within": {}, "warnings": []}  # fmt: skip
    rows = seen.tally.count[..., :-1].sum((1, 2))
    by_site = [{"n": plain.count(n), "gap": {}, "contribution": {}, "local": {}}
               for n in rows.tolist()]  # fmt: skip
    reference = reference_of(seen, references)
    for name, metric in CATALOG.items():
        rates = rates_of(metric, seen, "hard")
        gap, drawn = widest(rates), None
        if bootstrap:
            drawn = redraw(metric, seen, draws=bootstrap, seed=seed)
            gap = drawn.of(gap)
        out["metrics"][name] = plain.metric_plain(metric, seen, rates, gap, drawn, reference)
        out["warnings"] += alerts.about_groups(metric, seen, rates)
        where = locality(metric, seen, gap)
        plain.add_locality(out, by_site, name, where)
        if gap.pair is not None:
            whole = _signed(where)
            out["warnings"] += alerts.about_sites(metric, seen, gap, where, sites, whole)
        if seen.scored:
            soft = rates_of(metric, seen, "soft")
            out["scores"][name] = plain.metric_plain(metric, seen, soft, widest(soft), None, None)
    if seen.scored:
        out["auc"] = plain.areas(seen)
    out["sites"] = dict(zip(sites, by_site, strict=True))
    return out


def _signed(where: Locality) -> tuple[float, float]:
    """The interval of the global signed gap between the two groups that are compared."""
    _, low, high = apart(where.pair[0], where.pair[1])
    return float(low), float(high)


def _adjusted(name: str, seen: View, tolerance: float) -> Plain:
    return asdict(adjust(get_metric(name), seen, tolerance))


def _check_references(references: Sequence[str], seen: Sequence[View]) -> None:
    for name in references:
        if all(reference_of(view, [name]) is None for view in seen):
            known = [n for view in seen for n in view.names]
            raise FedgftError(
                f"--reference-groups {name}: no such group; there are: {', '.join(known[:12])}"
            )


def read_summary(path: Path) -> Plain:
    """An audit.json that `fedgft audit --out` wrote."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedgftError(f"{path}: not a whole audit ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FedgftError(f"{path}: not an audit that this version of fedgft wrote")
    return found
