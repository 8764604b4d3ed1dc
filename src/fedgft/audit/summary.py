"""`audit`: from the sums of all sites to everything that is said of them, as plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.arguments import names, real_number, shown, whole_number
from fedgft.audit import alerts, plain
from fedgft.audit.bootstrap import check as check_draws
from fedgft.audit.bootstrap import redraw
from fedgft.audit.locality import locality
from fedgft.audit.rates import apart, rates_of, widest
from fedgft.audit.references import reference_of
from fedgft.audit.sums import Sums, merge
from fedgft.audit.tabulated import few_tables
from fedgft.audit.text import about, markdown
from fedgft.audit.thresholds import ESTIMATED, WARNING, adjust
from fedgft.audit.verdict import verdict
from fedgft.audit.views import Pool, View, pool, views
from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.layout import Table, printable
from fedgft.metrics import CATALOG, get_metric

FORMAT = "fedgft-audit-1"
COUNTED = "Wilson (rates), Newcombe and Tukey (differences), Donner & Zou (ratios)"
COMPARED = ("classes", "groups", "accuracy", "metrics", "attributes")  # parts of an audit
DRAWN = "rates, gaps and ratios: bootstrap over sites, {} draws; all else over rows"
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

    def lead(self) -> str:
        return about(self.summary)

    def verdict(self) -> list[tuple[bool | None, str]]:
        return verdict(self.summary)

    def tables(self) -> list[Table]:
        """What fits a terminal; the report has more."""
        return list(few_tables(self.summary))

    def to_markdown(self) -> str:
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
    if isinstance(sums, str | Path):
        raise FedgftError(f"audit takes sums, not a path: read_sums({str(sums)!r})")
    whole_number("bootstrap", bootstrap)
    whole_number("seed", seed, least=0)
    if not isinstance(sums, Iterable | Sums):
        raise FedgftError(f"sums must be Sums or a list of them, not {shown(sums)}")
    if isinstance(reference_groups, Mapping):
        raise FedgftError(
            f"reference_groups must be a list of names, not {shown(reference_groups)}"
        )
    reference_groups = names("reference_groups", reference_groups)
    if adjust_to is not None and not isinstance(adjust_to, Mapping):
        raise FedgftError(f"adjust_to must be like {{'sp': 0.02}}, not {shown(adjust_to)}")
    if bootstrap < 0:
        raise FedgftError(f"bootstrap={bootstrap}: must be 0 or more draws")
    total = sums if isinstance(sums, Sums) else merge(sums)
    pooled = pool(total)
    if bootstrap:
        check_draws(pooled)
    seen = tuple(views(pooled))
    _check_references(reference_groups, seen)
    kinds = [*[plain.FEW_KINDS] * (len(seen) - 1), plain.ALL_KINDS]
    looks = [_look(view, plain.sites(view, kind), pooled.sites, reference_groups, bootstrap, seed)
             for view, kind in zip(seen, kinds, strict=True)]  # fmt: skip
    said = [text for look in looks for text in look.pop("warnings")]
    adjusted = [_adjusted(name, seen[-1], t) for name, t in (adjust_to or {}).items()]
    summary: Plain = {
        "format": FORMAT,
        "rows": plain.rows(total, seen[-1]),
        "classes": list(pooled.question.classes),
        "groups": seen[-1].title,
        "threshold": pooled.question.threshold,
        "interval": DRAWN.format(bootstrap) if bootstrap else COUNTED,
        "accuracy": plain.accuracy(seen[-1]),
        **looks[-1],
        **plain.scores(seen[-1]),
        "attributes": {v.title: look for v, look in zip(seen[:-1], looks[:-1], strict=True)},
        "adjusted": adjusted,
        "privacy": plain.privacy(total),
        "warnings": [
            *_about_names(total),
            *alerts.about_rows(total, pooled, seen),
            *alerts.about_privacy(total, seen[-1]),
            *alerts.about_draws(bootstrap, len(pooled.sites)),
            *said,
            *([WARNING] if adjusted else []),
            *([ESTIMATED] if adjusted and seen[-1].blur is not None else []),
        ],
    }
    return Audit(summary, pooled, seen)


def _about_names(sums: Sums) -> list[str]:
    if not sums.numbered:
        return []
    first, last = sums.numbered[0], sums.numbered[-1]
    some = first if first == last else f"{first} to {last}"
    return [
        f"{len(sums.numbered)} of the sums came without the name of their site; each is taken as a "
        f"site of its own, called {some} in the order given: measure(..., site=...) names them"
    ]


def _look(
    seen: View,
    by_site: list[Plain],
    sites: Sequence[str],
    references: Sequence[str],
    bootstrap: int,
    seed: int,
) -> Plain:
    """One view: every metric, every site."""
    out: Plain = {"metrics": {}, "scores": {} if seen.complete else None, "heterogeneity": {},
                  "tv": {}, "bound": {}, "within": {}, "warnings": []}  # fmt: skip
    reference = reference_of(seen, references)
    for name, metric in CATALOG.items():
        rates = rates_of(metric, seen, "hard")
        gap, drawn = widest(rates), None
        if bootstrap:
            drawn = redraw(metric, seen, rates.valid, draws=bootstrap, seed=seed)
            gap = drawn.of(gap)
        where = locality(metric, seen, gap)
        out["metrics"][name] = plain.metric_plain(metric, seen, rates, gap, drawn, reference)
        out["metrics"][name] |= plain.signed(where)
        plain.add_locality(out, by_site, name, where)
        out["warnings"] += alerts.about_groups(metric, seen, rates)
        if gap.pair is not None:
            out["warnings"] += alerts.about_sites(metric, seen, gap, where, sites)
        if seen.complete:
            soft = rates_of(metric, seen, "soft")
            out["scores"][name] = plain.metric_plain(metric, seen, soft, widest(soft), None, None)
    out["sites"] = dict(zip(sites, by_site, strict=True))
    return out


def _adjusted(name: str, seen: View, tolerance: float) -> Plain:
    real_number(f"adjust_to[{name!r}]", tolerance)
    found = asdict(adjust(get_metric(name), seen, tolerance))
    gaps = ("gap", "accuracy", "gap_before", "accuracy_before")
    return found | {key: plain.number(np.clip(found[key], 0.0, 1.0)) for key in gaps}


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
        found = parsed(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FedgftError(f"{path}: not a whole audit ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FedgftError(f"{path}: not an audit that this version of fedgft wrote")
    if lost := [name for name in COMPARED if name not in found]:
        raise FedgftError(f"{path}: an audit that lacks a part ({lost[0]!r}); make it again")
    return _cleaned(found)


def _cleaned(value: Any) -> Any:
    """Names are shown; whoever wrote the file may have put anything into them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): _cleaned(item) for key, item in value.items()}
    return value
