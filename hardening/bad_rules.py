"""Targets that `adjust` must refuse, and rules and tables that `decide` and `predict` must."""

from collections.abc import Callable, Iterator
from typing import Any

from bad_cases import Case, case, changed, cut, dangling, fifo, folder, taken

ADJUST = "adjust north.json south.json --target sp=0.1"
DECIDE = "decide said.csv --score p"
LINES = (
    ("adjust", "--target"),
    ("adjust --target sp=0.02", "fedgft measure"),
    ("adjust north.json", "--target", "sp=0.02"),
    ("adjust '' --target sp=0.02", "empty"),
    ("adjust absent.json --target sp=0.02", "absent.json", "no such file"),
    ("adjust 'absent-*.json' --target sp=0.02", "absent-*.json", "no file matches"),
    ("adjust north.json north.json --target sp=0.02", "'north'", "already"),
    ("adjust table.csv --target sp=0.02", "table.csv", "fedgft measure"),
    ("adjust rule.json --target sp=0.02", "rule.json", "rule"),
    ("adjust north.json --target sp", "--target", "sp=0.05"),
    ("adjust north.json --target sp=nan", "--target", "sp=nan"),
    ("adjust north.json --target sp=-1", "--target", "sp=-1"),
    ("adjust north.json --target sp=200%", "--target", "sp=200%"),
    ("adjust north.json --target spp=0.1", "--target", "spp"),
    ("adjust north.json --target sp=0.1 sp=0.2", "--target", "twice"),
    ("adjust north.json --target ''", "--target"),
    ("adjust north.json --target", "--target"),
    ("adjust north.json --target sp=0.1 --local", "--local"),
    ("adjust north.json --target sp=0.1 --local x=1", "--local", "x=1"),
    ("adjust north.json --local sp=0.1", "--local", "one file", "north.json"),
    ("adjust north.json --target sp=0.1 --per-site", "--per-site", "one file"),
    ("adjust north.json south.json --local sp=0 eop=0 fpr=0", "--local", "--per-site", "--nearest"),
    ("adjust north.json --target sp=0 eop=0 fpr=0 acc=0", "--target", "nearest", "--randomized"),
    ("adjust north.json --target predictive-parity=0.02 --randomized", "predictive-parity"),
    (f"{ADJUST} --benefit 0", "--benefit", "0"),
    (f"{ADJUST} --benefit nan", "--benefit", "nan"),
    (f"{ADJUST} --benefit x", "--benefit", "'x'"),
    (f"{ADJUST} --cost -4", "--cost", "-4"),
    (f"{ADJUST} --cost inf", "--cost", "inf"),
    (f"{ADJUST} --group race", "--group", "'race'", "g"),
    (f"{ADJUST} --group ''", "--group"),
    (f"{ADJUST} --decisions", "--randomized"),
    ("adjust north.json few.json --target sp=0.1", "'few'", "--score", "--min-cell"),
    (f"{ADJUST} --randomized --json", "--out", "key"),
    (f"{ADJUST} --out north.json", "--out", "north.json", "not a decision rule"),
    (f"{ADJUST} --out table.csv", "--out", "table.csv"),
    (f"{ADJUST} --out ''", "--out"),
    (f"{ADJUST} --out faces", "--out", "faces", "folder"),
    (f"{ADJUST} --local sp=0.2 --out rule.json", "--out rule.json", "--overwrite"),
    ("decide", "FILE"),
    ("decide said.csv", "--rule", "fedgft adjust"),
    ("decide said.csv --rule rule.json", "--score", "y, g, p"),
    ("decide said.csv --rule rule.json --data table.csv", "--data"),
    ("decide absent.csv --score p --rule rule.json", "absent.csv"),
    ("decide north.json --score p --rule rule.json", "north.json", ".csv"),
    ("decide none.parquet --score p --rule rule.json", "none.parquet", "no rows"),
    ("decide nested.parquet --score x --group sex --rule rule.json", "nested.parquet", "'x'"),
    ("decide said.csv --score q --rule rule.json", "said.csv", "'q'", "--score"),
    ("decide said.csv --score g --rule rule.json", "said.csv", "'g'", "numbers"),
    ("decide said.csv --decision d --rule rule.json", "--decision", "rule.json"),
    ("decide table.csv --score ok --rule rule.json", "table.csv", "'g'", "--group"),
    ("decide table.csv --score x --group sex --rule rule.json", "--score", "probabilities"),
    (f"{DECIDE} --rule absent.json", "absent.json", "no such file"),
    (f"{DECIDE} --rule ''", "--rule"),
    (f"{DECIDE} --rule north.json", "north.json", "fedgft adjust"),
    (f"{DECIDE} --rule said.csv", "said.csv"),
    (f"{DECIDE} --rule rule.json --group", "--group"),
    (f"{DECIDE} --rule rule.json --group g d", "--group", "1 column"),
    (f"{DECIDE} --rule rule.json --group h", "said.csv", "'h'", "--group"),
    (f"{DECIDE} --rule rule.json --group y", "said.csv", "as g", "rows", "does not know"),
    (f"{DECIDE} --rule rule.json --site y", "--site", "same at all sites"),
    (f"{DECIDE} --rule rule.json --site-name north", "--site-name", "same at all sites"),
    (f"{DECIDE} --rule coins.json", "--id", "randomized"),
    (f"{DECIDE} --rule coins.json --id customer", "said.csv", "'customer'", "--id"),
    (f"{DECIDE} --rule sites.json", "--site", "--site-name"),
    (f"{DECIDE} --rule sites.json --site town", "said.csv", "'town'", "--site"),
    (f"{DECIDE} --rule sites.json --site y", "said.csv", "rows", "north, south"),
    (f"{DECIDE} --rule sites.json --site-name west", "--site-name west", "north, south"),
    (f"{DECIDE} --rule sites.json --site y --site-name north", "--site", "--site-name"),
    (f"{DECIDE} --rule rule.json --decision-name d", "'d'", "--decision-name"),
    (f"{DECIDE} --rule rule.json --decision-name ''", "--decision-name"),
    (f"{DECIDE} --rule rule.json --out table.csv", "--out table.csv"),
    (f"{DECIDE} --rule rule.json --out decided.txt", "--out decided.txt", ".csv or .parquet"),
    (f"{DECIDE} --rule rule.json --out faces", "--out faces"),
    ("predict model.safetensors table.csv --id x", "--id", "--rule"),
    ("predict model.safetensors table.csv --group sex", "--group", "--rule"),
    ("predict model.safetensors table.csv --rule absent.json", "absent.json"),
    ("predict model.safetensors table.csv --rule rule.json", "table.csv", "'g'", "--group"),
    ("predict model.safetensors table.csv --rule coins.json --group sex", "--id"),
    ("predict model.safetensors table.csv --rule sites.json --group sex --site town", "'Bonn'"),
)
Change = Callable[[dict[str, Any]], Any]


def cases() -> Iterator[Case]:
    for line, *says in LINES:
        yield case(line, *says)
    yield from _files()
    yield from _rules()
    yield from _tables()


def _files() -> Iterator[Case]:
    """Wrong files beside north.json."""
    for about, change, *says in (
        ("bins that do not divide", _with_bins, "bins", "s.json"),
        ("another group column", lambda held: held.update(groups=["race"]), "'race'"),
    ):
        made = changed("south.json", change)
        yield case("adjust north.json s.json --target sp=0.1", *says, about=about, s_json=made)
    link = {"rule.json": dangling}
    yield Case((*ADJUST.split(), "--out", "rule.json"), ("--out", "link"), "a link", link)
    mine = {"rule.json": "mine"}
    words = (*ADJUST.split(), "--overwrite")
    yield Case(words, ("--out rule.json", "not a decision rule"), "somebody's rule.json", mine)
    for about, change in (("no rows", _emptied), ("a rule of another version", _of_version_9)):
        name = "north.json" if about == "no rows" else "rule.json"
        file = {"s.json": changed(name, change)}
        says = ("no rows",) if about == "no rows" else ("s.json",)
        yield Case(("adjust", "s.json", "--target", "sp=0.1"), says, about, file)


def _rules() -> Iterator[Case]:
    """Rules that are damaged or edited."""
    line = f"{DECIDE} --rule r.json"
    for about, change in (
        ("another threshold", lambda held: held["cells"][0].update(thresholds=[0.1])),
        ("no cell", lambda held: held.update(cells=[])),
        ("no digest", lambda held: held.pop("digest")),
        ("another key", lambda held: held.update(key="00" * 32)),
        ("another version", _of_version_9),
        ("one field more", lambda held: held.update(more=1)),
    ):
        made = changed("rule.json", change)
        yield case(line, "r.json", about=f"edited by hand: {about}", r_json=made)
    for about, content in {
        "empty": b"",
        "no JSON": "hello",
        "a list": "[]",
        "binary junk": bytes(range(256)),
        "half of it": cut("rule.json", 0.5),
        "too deep": "[" * 100_000,
        "NaN": '{"format": NaN}',
        "a folder": folder,
        "a pipe": fifo,
        "a link to nothing": dangling,
    }.items():
        yield case(line, "r.json", about=about, r_json=content)


def _tables() -> Iterator[Case]:
    """Tables with single wrong cells."""
    for about, row, *says in (
        ("an unknown group", "1,x,0.5,0", "t.csv", "'x'", "as g", "1 row", "does not know"),
        ("no score", "1,f,,0", "t.csv", "--score", "1 value"),
        ("a score of NaN", "1,f,nan,0", "t.csv", "--score", "1 value"),
        ("a score above 1", "1,f,2,0", "t.csv", "--score", "2"),
        ("a score of minus infinity", "1,f,-inf,0", "t.csv", "'p'"),
        ("a word as score", "1,f,high,0", "t.csv", "'p'", "'high'"),
        ("a comma in the score", '1,f,"0,5",0', "t.csv", "'p'", "'0,5'"),
    ):
        text = f"y,g,p,d\n1,f,0.5,0\n{row}\n"
        yield case("decide t.csv --score p --rule rule.json", *says, about=about, t_csv=text)
    text = "id,g,p\n1,f,0.5\n,m,0.5\n"
    line = "decide t.csv --score p --rule coins.json --id id"
    yield case(line, "t.csv", "--id", "1 value", about="no identifier", t_csv=text)
    there = {"decided.csv": "mine\n1\n", "said.csv": taken("said.csv")}
    words = (*DECIDE.split(), "--rule", "rule.json", "--out", "decided.csv")
    yield Case(words, ("--out decided.csv", "no decisions"), "somebody's decided.csv", there)


def _with_bins(held: dict[str, Any]) -> None:
    _emptied(held)
    held["bins"] = 33


def _emptied(held: dict[str, Any]) -> None:
    held["cells"] = []
    held["rows"]["counted"] = 0


def _of_version_9(held: dict[str, Any]) -> None:
    held["format"] = "fedgft-rule-9"
