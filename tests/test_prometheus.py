"""metrics.prom, read by a strict parser of Prometheus' text format that is written here."""

import datetime
import re

import numpy as np
import pytest

from dated_sites import draw_history, make_sums, month_ends
from fedgft.auditing import monitor
from fedgft.auditing.prometheus import Gauge, Sample, write_gauges

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
HELP = re.compile(rf"# HELP ({NAME}) ((?:[^\\\n]|\\\\|\\n)*)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge|histogram|summary|untyped)")
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?Inf|NaN")
UNESCAPE = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(text: str) -> dict[str, dict[frozenset, float]]:
    """Return the numbers by name and labels; fail for anything that the format forbids."""
    assert text.endswith("\n")
    found: dict[str, dict[frozenset, float]] = {}
    helped = typed = None
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            match = HELP.fullmatch(line)
            assert match, line
            helped = match[1]
            assert helped not in found, "the lines of a name must be together"
        elif line.startswith("# TYPE "):
            match = TYPE.fullmatch(line)
            assert match, line
            typed = match[1]
            assert typed == helped and typed not in found
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            assert name == typed and NUMBER.fullmatch(value), line
            pairs = re.findall(r'([a-zA-Z_0-9]+)="((?:[^"\\]|\\.)*)"', labels or "")
            assert len({key for key, _ in pairs}) == len(pairs)
            key = frozenset((k, re.sub(r'\\[\\"n]', lambda m: UNESCAPE[m[0]], v)) for k, v in pairs)
            assert key not in found.setdefault(name, {}), "the same labels twice"
            found[name][key] = float(value)
    return found


def label(**labels) -> frozenset:
    return frozenset(labels.items())


def test_the_parser_refuses_what_the_format_forbids():
    for wrong in (
        "a 1",
        "a 1\n",
        "# HELP a A.\n# TYPE a gauge\na 1,0\n",
        '# HELP a A.\n# TYPE a gauge\na{b="x"y"} 1\n',
        "# HELP a A.\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a A.\n# TYPE a gauge\nb 1\n",
    ):
        with pytest.raises(AssertionError):
            parse(wrong)


def test_the_numbers_are_those_of_the_last_period():
    history = list(draw_history(np.random.default_rng(3), change=0.09, versions=["1.0"] * 24))
    found = monitor(history, fail_above={"sp": 0.03})
    numbers = parse(found.to_prometheus())
    gap = found.periods[-1].gaps["sp"]
    here = label(metric="sp", groups="sex")
    assert numbers["fedgft_gap"][here] == pytest.approx(gap.gap, abs=1e-9)
    assert numbers["fedgft_gap_low"][here] == pytest.approx(gap.low, abs=1e-9)
    assert numbers["fedgft_gap_high"][here] == pytest.approx(gap.high, abs=1e-9)
    assert numbers["fedgft_gap_band_low"][here] == pytest.approx(gap.band_low, abs=1e-9)
    assert numbers["fedgft_gap_band_high"][here] == pytest.approx(gap.band_high, abs=1e-9)
    assert numbers["fedgft_gap_average"][here] == pytest.approx(gap.average, abs=1e-9)
    assert numbers["fedgft_gap_limit"] == {label(metric="sp"): 0.03}
    assert numbers["fedgft_alarm"][label(metric="sp", kind="limit")] == 1
    assert numbers["fedgft_alarm"][label(metric="eop", kind="limit")] == 0
    assert sum(numbers["fedgft_changes"].values()) == len(found.changes)
    assert numbers["fedgft_rows"] == {frozenset(): 12000}
    assert numbers["fedgft_site_rows"][label(site="north")] == 4000
    assert numbers["fedgft_model_info"] == {label(version="1.0"): 1}
    stamp = numbers["fedgft_last_period_timestamp_seconds"][frozenset()]
    assert datetime.datetime.fromtimestamp(stamp, datetime.UTC).date() == found.periods[-1].date


def test_names_from_data_are_escaped_and_unknown_numbers_left_out():
    evil = 'a"} 1\nfake 2 \\'
    parts = [
        make_sums({"f": (30, 20, 20, 30)}, site=evil.replace("\n", " "), date=date)
        for date in month_ends(2)
    ]
    numbers = parse(monitor(parts).to_prometheus())
    assert "fake" not in numbers and "fedgft_gap" not in numbers
    assert numbers["fedgft_site_rows"] == {label(site=evil.replace("\n", " ")): 100}
    text = write_gauges([Gauge("a", "x\\y\nz", [Sample({"b": evil}, 1e-9), Sample({}, None)])])
    assert parse(text) == {"a": {label(b=evil): 1e-9}}


def test_prometheus_client_reads_it():
    parser = pytest.importorskip("prometheus_client.parser")
    text = monitor(list(draw_history(np.random.default_rng(0), months=3))).to_prometheus()
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    ours = parse(text)
    assert set(families) == set(ours)
    for name, family in families.items():
        assert {frozenset(s.labels.items()): s.value for s in family.samples} == ours[name]
