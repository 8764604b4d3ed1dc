"""Write numbers in the text format of Prometheus, for the textfile collector of its node exporter.

Each metric is a gauge with a line that explains it. A number that is not known is left out.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fedgft.auditing.monitoring import Monitor

ALARMS = ("limit", "change", "model version", "not estimable")
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class Sample(NamedTuple):
    """A number with its labels; None: it is not known."""

    labels: Mapping[str, str]
    value: float | None


class Gauge(NamedTuple):
    """A name, its explanation, and its numbers."""

    name: str
    help: str
    samples: Sequence[Sample]


def write_gauges(gauges: Iterable[Gauge]) -> str:
    r"""Return the text of gauges; those without a known number are left out.

    >>> print(write_gauges([Gauge("gap", "The gap.", [Sample({"site": 'the "north"'}, 0.5)])]))
    # HELP gap The gap.
    # TYPE gap gauge
    gap{site="the \"north\""} 0.5
    <BLANKLINE>
    """
    lines = []
    for gauge in gauges:
        known = [sample for sample in gauge.samples if sample.value is not None]
        if known:
            lines.append(f"# HELP {gauge.name} {_escape(gauge.help)}")
            lines.append(f"# TYPE {gauge.name} gauge")
            lines += [_write_sample(gauge.name, sample) for sample in known]
    return "".join(f"{line}\n" for line in lines)


def _write_sample(name: str, sample: Sample) -> str:
    """Return the line of one number."""
    value = sample.value
    assert value is not None and NAME.fullmatch(name)
    quoted = (
        f'{label}="{_escape(text).replace(chr(34), chr(92) + chr(34))}"'
        for label, text in sample.labels.items()
    )
    labels = ",".join(quoted)
    number = str(int(value)) if value == int(value) else repr(round(float(value), 9))
    return f"{name}{{{labels}}} {number}" if labels else f"{name} {number}"


def _escape(text: str) -> str:
    r"""Return a text with its backslashes and line feeds escaped, as the format asks for."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def list_gauges(found: "Monitor") -> Iterator[Gauge]:
    """Yield what Prometheus learns of the last period."""
    last = found.periods[-1]
    midnight = datetime.datetime.combine(last.date, datetime.time(), datetime.UTC)
    numbers = {
        "gap": ("gap", "Largest gap between two groups in the last period, a fraction."),
        "gap_low": ("low", "Lower limit of its 95% interval."),
        "gap_high": ("high", "Upper limit of its 95% interval."),
        "gap_average": ("average", "Average gap since the last change, a fraction."),
        "gap_band_low": ("band_low", "Lower limit of its band, valid at every look."),
        "gap_band_high": ("band_high", "Upper limit of its band, valid at every look."),
    }
    for name, (key, text) in numbers.items():
        samples = [
            Sample({"metric": metric, "groups": found.groups}, getattr(gap, key))
            for metric, gap in last.gaps.items()
        ]
        yield Gauge(f"fedgft_{name}", text, samples)
    limits = [Sample({"metric": name}, limit) for name, limit in found.limits.items()]
    yield Gauge("fedgft_gap_limit", "Largest gap to accept.", limits)
    alarms = [
        Sample(
            {"metric": metric, "kind": kind},
            float(any((a.metric, a.kind) == (metric, kind) for a in found.alarms)),
        )
        for metric in found.metrics
        for kind in ALARMS
    ]
    yield Gauge("fedgft_alarm", "1 if there is an alarm, else 0.", alarms)
    changes = [
        Sample({"metric": m}, sum(c.metric == m and c.kind == "found" for c in found.changes))
        for m in found.metrics
    ]
    yield Gauge("fedgft_changes", "Number of changes that were found in all periods.", changes)
    yield Gauge("fedgft_rows", "Rows of all sites in the last period.", [Sample({}, last.rows)])
    rows = [Sample({"site": site}, rows) for site, rows in last.sites.items()]
    yield Gauge("fedgft_site_rows", "Rows of each site in the last period.", rows)
    yield Gauge("fedgft_periods", "Number of periods.", [Sample({}, len(found.periods))])
    stamp = Sample({}, midnight.timestamp())
    yield Gauge("fedgft_last_period_timestamp_seconds", "Date of the last period.", [stamp])
    model = Sample({"version": last.version}, 1)
    yield Gauge("fedgft_model_info", "Version of the model in the last period.", [model])
