"""Files of sums, and folders of them, that `audit` must refuse."""

from collections.abc import Callable, Iterator
from typing import Any

from bad_cases import Case, case, changed, cut, dangling, fifo, folder, locked, taken

Change = Callable[[dict[str, Any]], Any]


def _first(**new: Any) -> Change:
    return lambda held: held["cells"][0].update(new)


def _scores(**new: Any) -> Change:
    return lambda held: held["cells"][0]["scores"]["1"].update(new)


def _top(**new: Any) -> Change:
    return lambda held: held.update(new)


def _in(part: str, **new: Any) -> Change:
    return lambda held: held[part].update(new)


ALONE: dict[str, tuple[Change, tuple[str, ...]]] = {  # wrong in itself
    "a version to come": (_top(format="fedgft-sums-4"), ("fedgft-sums-4", "fedgft-sums-3")),
    "no format": (lambda held: held.pop("format"), ("fedgft measure",)),
    "another format": (_top(format="csv"), ("fedgft measure",)),
    "a format that is a number": (_top(format=1), ("fedgft measure",)),
    "no site": (lambda held: held.pop("site"), ("site",)),
    "an empty site": (_top(site=" "), ("site",)),
    "a site that is a number": (_top(site=3), ("site",)),
    "half a character": (_top(site="a\ud800"), ("site",)),
    "no classes": (_top(classes=[]), ("classes",)),
    "one class": (_top(classes=["1"]), ("classes",)),
    "51 classes": (_top(classes=[str(i) for i in range(51)]), ("classes",)),
    "a class twice": (_top(classes=["1", "1"]), ("classes",)),
    "no groups": (_top(groups=[]), ("groups",)),
    "groups that are a word": (_top(groups="g"), ("groups",)),
    "a threshold of 2": (_top(threshold=2), ("threshold",)),
    "a threshold that is a word": (_top(threshold="half"), ("threshold",)),
    "no bins": (_top(bins=0), ("bins",)),
    "10^9 bins": (_top(bins=10**9), ("bins",)),
    "fewer bins than histograms have": (_top(bins=2), ("histogram",)),
    "rows that do not add up": (_in("rows", counted=7), ("rows.counted",)),
    "negative rows": (_in("rows", label_missing=-1), ("rows.label_missing",)),
    "no rows": (lambda held: held.pop("rows"), ("rows",)),
    "no privacy": (lambda held: held.pop("privacy"), ("privacy",)),
    "unknown noise": (_in("privacy", mechanism="magic"), ("privacy.mechanism",)),
    "noise without a scale": (_in("privacy", mechanism="discrete laplace"), ("privacy.epsilon",)),
    "a min_cell that is not kept to": (_in("privacy", min_cell=1000), ("--min-cell",)),
    "withheld cells that are not there": (
        _in("privacy", min_cell=3, suppressed_cells=9),
        ("suppressed_cells",),
    ),
    "no cells": (lambda held: held.pop("cells"), ("cells",)),
    "cells that are a number": (_top(cells=3), ("cells",)),
    "a cell that is a number": (_top(cells=[3]), ("cells[0]",)),
    "the same cell twice": (lambda held: held["cells"].append(held["cells"][0]), ("second",)),
    "a negative count": (_first(count=-5), ("cells[0].count",)),
    "half a person": (_first(count=1.5), ("cells[0].count",)),
    "a count that is a word": (_first(count="many"), ("cells[0].count",)),
    "a count that is true": (_first(count=True), ("cells[0].count",)),
    "a count of 10^30": (_first(count=10**30), ("cells[0].count",)),
    "a count with one more": (
        lambda held: held["cells"][0].update(count=held["cells"][0]["count"] + 1),
        ("cells[0]",),
    ),
    "a count withheld without a word": (_first(count=None), ("cells[0].count",)),
    "a label that is no class": (_first(label="9"), ("cells[0].label",)),
    "a group of two names": (_first(group=["f", "g"]), ("cells[0].group",)),
    "a group that is a number": (_first(group=[3]), ("cells[0].group",)),
    "no scores": (_first(scores=None), ("cells[0].scores",)),
    "a sum of scores that cannot be": (_scores(sum=1e6), ("cells[0].scores",)),
    "a sum that is a word": (_scores(sum="x"), ("cells[0].scores",)),
    "a bin below the first": (_scores(first_bin=-1), ("first_bin",)),
    "a bin beyond the last": (_scores(first_bin=99), ("histogram",)),
    "an empty histogram": (_scores(histogram=[]), ("histogram",)),
    "a negative bin": (_scores(histogram=[-1, 2]), ("histogram",)),
    "rows beyond the threshold": (
        lambda held: held["cells"][0]["scores"]["1"].update(first_bin=70),
        ("histogram",),
    ),
}
TOGETHER: dict[str, tuple[Change, tuple[str, ...]]] = {  # wrong beside north.json
    "other classes": (lambda held: _renamed(held), ("classes",)),
    "another group column": (_top(groups=["race"]), ("'g'", "'race'")),
    "another threshold": (lambda held: _emptied(held, threshold=0.7), ("threshold",)),
    "bins that do not divide": (lambda held: _emptied(held, bins=33), ("bins",)),
    "the same site again": (_top(site="north"), ("'north'", "already")),
}


def _renamed(held: dict[str, Any]) -> None:
    held["classes"] = ["no", "yes"]
    _emptied(held)


def _emptied(held: dict[str, Any], **new: Any) -> None:
    held.update(cells=[], **new)
    held["rows"]["counted"] = 0


def cases() -> Iterator[Case]:
    for about, (change, says) in ALONE.items():
        yield case(
            "audit s.json", "s.json", *says, about=about, s_json=changed("north.json", change)
        )
    for about, (change, says) in TOGETHER.items():
        yield case(
            "audit north.json s.json",
            "s.json",
            "north",
            *says,
            about=about,
            s_json=changed("south.json", change),
        )
    yield from _contents()
    for line, *says in LINES:
        yield case(line, *says)
    both = {
        "there": folder,
        "there/a.json": taken("north.json"),
        "there/b.json": taken("north.json"),
    }
    yield Case(("audit", "there"), ("'north'", "already"), "one site in two files", both)
    for name in ("report.html", "report.md", "audit.json"):
        mine = {"there": folder, f"there/{name}": "mine"}
        yield Case(
            ("audit", "north.json", "--out", "there"),
            ("--out", name),
            f"somebody's {name} is there",
            mine,
        )
    yield Case(
        ("audit", "--compare", "there", "there"),
        ("there",),
        "an empty folder twice",
        {"there": folder},
    )
    broken = {"there": folder, "there/audit.json": '{\n  "format": "fedgft-audit-1",'}
    yield Case(
        ("audit", "--compare", "there", "there"), ("audit.json",), "half an audit.json", broken
    )
    hollow = {"there": folder, "there/audit.json": '{\n  "format": "fedgft-audit-1"\n}\n'}
    yield Case(
        ("audit", "--compare", "there", "there"), ("audit.json",), "a hollow audit.json", hollow
    )
    other = {"there": folder, "there/audit.json": '{\n  "format": "fedgft-audit-9"\n}\n'}
    yield Case(("audit", "--compare", "there", "there"), ("audit.json",), "an audit to come", other)


def _contents() -> Iterator[Case]:
    for about, content in {
        "empty": b"",
        "no JSON": "hello",
        "a list": "[]",
        "null": "null",
        "a number": "7",
        "binary junk": bytes(range(256)),
        "UTF-16": "{}".encode("utf-16"),
        "a folder": folder,
        "a pipe": fifo,
        "a link to nothing": dangling,
        "half of it": cut("north.json", 0.5),
        "all but the end": cut("north.json", 0.99),
        "too deep": "[" * 100_000,
        "NaN": '{"format": "fedgft-sums-1", "threshold": NaN}',
        "Infinity": '{"format": "fedgft-sums-1", "bins": Infinity}',
        "80 MB": lambda path, _: path.write_bytes(b" " * 80_000_000),
        "a number of 10,000 digits": '{"format": "fedgft-sums-1", "bins": ' + "9" * 10_000 + "}",
    }.items():
        says = () if about == "a folder" else ("s.json",)
        yield case("audit s.json", *says, about=about, s_json=content)
    made = case(
        "audit s.json", "s.json", about="no permission to read", s_json=locked("north.json")
    )
    yield Case(made.arguments, made.says, made.about, made.files, powerless=True)


LINES = (
    ("audit", "fedgft measure"),
    ("audit ''", "empty"),
    ("audit --compare '' north.json", "--compare"),
    ("audit absent.json", "absent.json", "no such file"),
    ("audit 'absent-*.json'", "absent-*.json", "no file matches"),
    ("audit north.json absent.json", "absent.json"),
    ("audit north.json north.json", "'north'", "already"),
    ("audit table.csv", "table.csv"),
    ("audit north.json --fail-above sp", "--fail-above", "sp=0.05"),
    ("audit north.json --fail-above sp=x", "--fail-above", "sp=x"),
    ("audit north.json --fail-above sp=5", "--fail-above", "sp=5"),
    ("audit north.json --fail-above sp=nan", "--fail-above", "sp=nan"),
    ("audit north.json --fail-above sp=-1", "--fail-above", "sp=-1"),
    ("audit north.json --fail-above spp=0.1", "--fail-above", "spp"),
    ("audit north.json --fail-above sp=0.1 sp=0.2", "--fail-above", "twice"),
    ("audit north.json --fail-above ''", "--fail-above"),
    ("audit north.json --adjust sp=2", "--adjust"),
    ("audit north.json --adjust eoo=0.1", "--adjust", "eop"),
    ("audit north.json --reference-groups x", "--reference-groups", "x"),
    ("audit north.json --reference-groups g=x", "--reference-groups", "g=x"),
    ("audit north.json --bootstrap 50", "--bootstrap"),
    ("audit north.json --bootstrap 200", "site"),
    ("audit north.json south.json --bootstrap 99999999999", "--bootstrap"),
    ("audit north.json --out table.csv", "table.csv"),
    ("audit north.json --out ''", "--out"),
    ("audit north.json --compare north.json south.json", "--compare"),
    ("audit --compare north.json", "--compare"),
    ("audit --compare absent north.json", "absent"),
    ("audit --compare north.json south.json --bootstrap 200", "--compare"),
    ("audit --compare table.csv north.json", "table.csv"),
)
