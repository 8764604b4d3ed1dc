"""Targets: the file that a site hands over, and an audit that is compared with another."""

import json
import warnings
from functools import cache

import numpy as np

from fedgft.auditing import audit, measure, read_sums
from fedgft.auditing.report import Audit, compare
from fedgft.auditing.site_file import gather
from fedgft.auditing.summary import read_summary
from fedgft.site_sums import SiteSums
from fuzzing import Target
from fuzzing.temporary_files import each, file

UTF8 = "utf-8"


@cache
def other() -> bytes:
    """Another site, asked the same as that of the seeds."""

    return site("other").to_json().encode()


def site(name: str, **how):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 60)
    g = rng.choice(["f", "m"], 60)
    p = np.clip(0.5 * y + 0.4 * rng.random(60), 0, 1).round(3)
    return measure(y, p, sensitive_features={"sex": g}, site=name, **{"bins": 4} | how)


def sums(data: bytes) -> None:
    """Alone and beside another site, to the end: all that a report shows."""
    path = file("site.json", data)
    second = file("other.json", other())
    each(
        lambda: shown(audit(read_sums(path))),
        lambda: adjusted(read_sums(path)),
        lambda: shown(audit(gather([path, second]))),
    )


def adjusted(sums: SiteSums) -> None:
    if sums.histogram:
        audit(sums, adjust_to={"sp": 0.05}).to_json()


def shown(made: Audit) -> None:
    made.to_json().encode(UTF8)
    made.to_markdown().encode(UTF8)
    made.lead()
    for figure in made.report(figures=True).figures:
        json.dumps(figure.spec, ensure_ascii=False).encode(UTF8)


@cache
def summary() -> dict:
    return json.loads(audit(site("north")).to_json())


def report(data: bytes) -> None:
    """An audit.json, as the old and as the new one of two."""
    found = read_summary(file("audit.json", data))
    for old, new in ((found, summary()), (summary(), found), (found, found)):
        made = compare(old, new)
        for text in (made.to_json(), made.to_markdown(), made.to_html()):
            text.encode(UTF8)
        made.verdict()


TARGETS = [Target("site-file", sums, "json"), Target("audit-json", report, "json")]
warnings.filterwarnings("ignore", category=RuntimeWarning)
