"""Wrong options of every command: most are made from the commands' own lists of options."""

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from bad_cases import TABLE, Case, case, cut, folder, taken

QUICK = "--data synthetic --seeds 1 --rounds 1"  # if it runs, not for long
COMMANDS = {  # what else the command line must have
    ("demo",): "",
    ("train",): QUICK,
    ("compare",): QUICK,
    ("frontier",): QUICK,
    ("measure",): "said.csv --label y --group g --score p",
    ("audit",): "north.json",
    ("reproduce",): "table1",
    ("deploy", "init"): "new --sites a --host h --make-keys",
    ("deploy", "local"): "",
}
HAVE_ALL = "train"  # the commands below share options with it, and are tried with their own
SHARERS = ("compare", "frontier")
BIG = "9" * 30
COUNTS = ("x", "1.5", "-1", BIG)
NUMBERS = ("x", "nan", "inf", "-1")
ZERO = (
    "clients",
    "seeds",
    "rounds",
    "epochs",
    "batch-size",
    "steps",
    "threads",
    "lanes",
    "points",
    "train-rows",
    "test-rows",
    "cohort",
    "lr",
    "alpha",
    "timeout",
    "sites",
)


def cases() -> Iterator[Case]:
    yield from _generated()
    yield from _lines()


def _generated() -> Iterator[Case]:
    from fedgft.cli.app import app

    shared = {a.name for a in _options(app[HAVE_ALL])}
    for path, rest in COMMANDS.items():
        command = app
        for word in path:
            command = command[word]
        for option in _options(command):
            if path[0] in SHARERS and option.name in shared:
                continue
            yield from _wrong(" ".join(path), option.name, option.hint, rest)


def _options(command: Any) -> list[Any]:
    found = command.assemble_argument_collection()
    return [a for a in found if a.name.startswith("--") and a.parse and not a.children]


def _wrong(command: str, option: str, hint: Any, rest: str) -> Iterator[Case]:
    kind, several = _kind(hint)
    start = " ".join(f"{command} {_without(rest, option)}".split())
    if kind is bool:
        yield case(f"{start} {option}=maybe", option, "maybe")
        return
    yield case(f"{start} {option}", option, about="no value")
    if not several and kind in (int, float):
        value = {int: 7, float: 0.5}[kind]
        yield case(f"{start} {option} {value} {option} {value}", option, about="given twice")
    if get_origin(kind) is Literal:
        known = get_args(kind)
        word = max(known, key=len)
        yield case(f"{start} {option} {word[:-1]}", option, f'Did you mean "{word}"?')
        yield case(f"{start} {option} quite-else", option, *known)
    for value in {int: COUNTS, float: NUMBERS}.get(kind, ()):
        yield case(f"{start} {option}={value}", option)
    if kind in (int, float) and option[2:] in ZERO:
        yield case(f"{start} {option} 0", option)


def _without(rest: str, option: str) -> str:
    words = rest.split()
    if option in words:
        place = words.index(option)
        del words[place : place + 2]
    return " ".join(words)


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) in (tuple, list):
        return get_args(hint)[0], True
    return hint, False


def _lines() -> Iterator[Case]:
    for line, *says in LINES:
        quick = (
            ""
            if "--data synthetic" not in line or "reproduce" in line
            else "".join(f" {option} 1" for option in ("--seeds", "--rounds") if option not in line)
        )
        yield case(line + quick, *says)
    yield case("demo --out there", "--out", about="a file is there", there=b"mine")
    yield case("frontier --out there", "--out", about="a file is there", there=b"mine")
    yield case(
        "compare --data synthetic --out there", "--out", about="a file is there", there=b"mine"
    )
    yield case("reproduce simpson --out there", "--out", about="a file is there", there=b"mine")
    readme = {"there": folder, "there/README.md": "# Mine"}
    foreign = {"there": folder, "there/index.html": "my own page"}
    yield Case(
        ("reproduce", "simpson", "--out", "there"),
        ("there", "index.html"),
        "somebody's index.html is there",
        foreign,
    )
    yield Case(
        ("reproduce", "simpson", "--out", "there"),
        ("there", "README.md"),
        "somebody's README.md is there",
        readme,
    )
    yield case(
        "data get compas --out there.csv", "there.csv", "folder", about="a folder", there_csv=folder
    )
    yield case(
        "data get compas --out table.csv/x.csv",
        "--out",
        "table.csv",
        about="in a file as if it were a folder",
        table_csv=taken("table.csv"),
    )
    yield Case(
        ("deploy", "init", "there", "--sites", "a", "--host", "h"),
        ("there", "not empty"),
        "keys are there",
        {"there": folder, "there/ca.key": "secret"},
    )
    yield case("deploy init there --sites a --host h", "there", about="a file", there=b"mine")
    local = "deploy local --label ok --group sex"
    yield Case(
        ("deploy", "local", "--out", "there"),
        ("--out", "not empty"),
        "files are there",
        {"there": folder, "there/mine.txt": "mine"},
    )
    yield case("deploy local --out there", "--out", "file", about="a file is there", there=b"mine")
    yield case(
        "deploy local --out there --resume", "--resume", about="an empty folder", there=folder
    )
    yield case(f"{local} --data t.csv", "t.csv", about="an empty file", t_csv=b"")
    yield case(f"{local} --data t.csv", "t.csv", "'ok'", about="other columns", t_csv="a,b\n1,2\n")
    yield case(
        f"{local} --data t.parquet",
        "t.parquet",
        about="half a Parquet",
        t_parquet=cut("table.parquet", 0.5),
    )


LINES = (
    ("trian", "trian", '"train"'),
    ("--data adult", "--data"),
    ("--vresion", "--vresion"),
    ("'train '", "train"),
    ("''", ""),
    ("data gte", "gte", '"get"'),
    ("deploy lcoal", "lcoal", '"local"'),
    ("train compare", "compare"),
    ("train extra", "extra"),
    ("train --sede 1", "--sede", "--seed"),
    ("train --seeds=", "--seeds"),
    ("train -x", "-x"),
    ("train ---seed 1", "---seed"),
    ("train --no-json", "--no-json"),
    ("train --json=2", "--json"),
    ("train --json --json", "--json"),
    ("train --method fedgft --target 0.1", "--target"),
    ("train --method fedgft-control --lam 1", "--lam"),
    ("train --target 1", "--target"),
    ("train --target 2", "--target", "fraction"),
    ("train --pick 1.5", "--pick"),
    ("train --pick 0.5 --cohort 2", "--pick", "--cohort"),
    ("train --pick 0.5 --noise 1", "--pick", "--noise"),
    ("train --server-lr 1", "--server-lr", "fedadam"),
    ("train --base fedprox --server-lr 1", "--server-lr"),
    ("train --lam 1e7", "--lam", "1,000,000"),
    ("train --lr 1e300", "--lr"),
    ("train --seed 9223372036854775807", "--seed"),
    ("train --data synthetic --partition column", "--client"),
    ("train --data synthetic --clients 1000000", "--clients"),
    ("train --data synthetic --clients 99999999999", "--clients"),
    ("train --data synthetic --seeds 1000000000000", "--seeds"),
    ("train --data synthetic --device tpu", "--device", "tpu"),
    ("train --data synthetic --device cuda:x", "--device"),
    ("train --data synthetic --device cuda", "--device"),
    ("train --data synthetic --device ''", "--device"),
    ("train --data synthetic --metric spp", "spp"),
    ("train --data synthetic --metric ''", "metric"),
    ("train --data synthetic --metric sp+", "sp+"),
    ("train --data synthetic --metric 0*sp", "0*sp"),
    ("train --data synthetic --metric nan*sp", "nan"),
    ("train --data synthetic --metric=-1*sp", "-1"),
    ("train --data synthetic --metric sp+sp", "sp"),
    ("train --data synthetic --split x", "--split"),
    ("train --data synthetic --positive 1", "--positive"),
    ("train --data synthetic --client x", "--client"),
    ("train --data synthetic --augment flip", "--augment"),
    ("train --data synthetic --fedbn", "--fedbn"),
    ("train --data synthetic --executor fused --model resnet18", "--model"),
    ("train --data synthetic --checkpoint-every 0 --resume", "--resume"),
    ("train --data synthetic --resume", "--resume"),
    ("train --init a --weights b", "--init", "--weights"),
    ("train --weights b", "--weights"),
    ("train --data synthetic --train-rows 10000000", "--train-rows"),
    ("train --data synthetic --test-rows 10000000", "--test-rows"),
    ("train --data synthetic --weight-decay 1e300", "--weight-decay"),
    ("train --data synthetic --rounds 3000000000", "--rounds"),
    ("train --data synthetic --batch-size 3000000000", "--batch-size"),
    ("train --data synthetic --cohort 11", "--cohort"),
    ("compare --data synthetic --methods fedavg fedgt", "fedgt", '"fedgft"'),
    ("compare --data synthetic --methods ''", "--methods"),
    ("compare --data synthetic --metrics sp xx", "xx"),
    ("compare --data synthetic --alpha 0", "--alpha"),
    ("compare --data synthetic --alpha 0.5 -1", "--alpha"),
    ("compare --data synthetic --partition iid --alpha 1 2", "--alpha", "iid"),
    ("compare --data synthetic --resume", "--resume", "--out"),
    ("compare --data synthetic --checkpoint-every 2", "--checkpoint-every", "--out"),
    ("compare --data synthetic --target 0.1 --methods fedavg", "--target"),
    ("compare --method fedavg", "--method", "--methods"),
    ("compare --metric sp", "--metric", "--metrics"),
    (f"compare {TABLE} --out table.csv", "table.csv"),
    ("frontier --data synthetic --lam 1", "--lam"),
    ("frontier --data synthetic --beta 1", "--beta"),
    ("frontier --data synthetic --control scores", "--control"),
    ("frontier --data synthetic --eval-every 2", "--eval-every"),
    ("frontier --data synthetic --points 1", "--points"),
    ("frontier --data synthetic --points 101", "--points"),
    ("frontier --data synthetic --alpha 0", "--alpha"),
    ("frontier --data synthetic --methods fedavgg", "fedavgg", '"fedavg"'),
    ("frontier --data synthetic --metric nope", "nope"),
    ("frontier --data synthetic --references --metric predictive-parity", "--references"),
    ("frontier --data synthetic --metrics sp", "--metrics", "--metric"),
    ("reproduce", "table1"),
    ("reproduce table9", "table9", '"table1"'),
    ("reproduce tabel1", "tabel1", '"table1"'),
    ("reproduce ''", "Choose from"),
    ("reproduce table1 --data adlut", "adlut", '"adult"'),
    ("reproduce table1 --data synthetic", "synthetic"),
    ("reproduce table1 --protocol papr", "papr", '"paper"'),
    ("reproduce table1 --seeds 0", "--seeds"),
    ("reproduce table1 --images faces", "--images", "celeba"),
    ("reproduce table1 --size 64", "--size", "celeba"),
    ("reproduce table1 --device cuda", "--device", "celeba"),
    ("reproduce table1 --data celeba", "--images"),
    ("reproduce table1 --data celeba --images faces", "faces"),
    ("reproduce simpson --out ''", "--out"),
    ("reproduce simpson --out ~nobody-at-all/x", "~nobody-at-all"),
    ("data get", "NAME"),
    ("data get adlut", "adlut", "adult"),
    ("data get ''", "data set"),
    ("data get celeba", "celeba"),
    ("data get synthetic", "synthetic"),
    ("data get adult compas", "compas"),
    ("data get compas --out x.txt", "--out", ".csv or .parquet"),
    ("data get compas --out", "--out"),
    ("data get compas --out ''", "--out"),
    ("data list adult", "adult"),
    ("data list --jsn", "--jsn", "--json"),
    ("demo --seeds 0", "--seeds"),
    ("demo --data adult", "--data"),
    ("deploy init", "FOLDER"),
    ("deploy init new", "--sites"),
    ("deploy init new --sites a", "--host"),
    ("deploy init new --sites --host h", "--sites"),
    ("deploy init new --sites a a --host h", "--sites"),
    ("deploy init new --sites a A --host h", "--sites"),
    ("deploy init new --sites 'a b' --host h", "--sites"),
    ("deploy init new --sites ../a --host h", "--sites"),
    ("deploy init new --sites '' --host h", "--sites"),
    ("deploy init new --sites .a --host h", "--sites"),
    ("deploy init new --sites a --host ''", "--host"),
    ("deploy init new --sites a --host h:9093", "--host"),
    ("deploy init new --sites a --host https://h", "--host"),
    ("deploy init new --sites a --host 300.1.1.1", "--host"),
    ("deploy init new --sites a --host a_b", "--host"),
    ("deploy init new --sites a --host=-h", "--host"),
    ("deploy init new --sites a --host h-.org", "--host"),
    ("deploy init new --sites a --host h..x", "--host"),
    (f"deploy init new --sites a --host {'h' * 64}", "--host"),
    (f"deploy init new --sites a --host {'h.' * 130}h", "--host"),
    ("deploy init new --sites a --host h --alias 'x y'", "--alias"),
    ("deploy init new --sites a --host h --port 0", "--port"),
    ("deploy init new --sites a --host h --port 65536", "--port"),
    (f"deploy init new --sites {' '.join(f's{i}' for i in range(1001))} --host h", "--sites"),
    ("deploy init '' --sites a --host h", "folder"),
    ("deploy init 'a\"b' --sites a --host h", "quotes"),
    ("deploy local --sites 101", "--sites"),
    ("deploy local --rounds 10001", "--rounds"),
    ("deploy local --data adlut", "adlut", "adult"),
    ("deploy local --data absent.csv", "absent.csv"),
    ("deploy local --data table.csv", "--label"),
    ("deploy local --data table.csv --label ok", "--group"),
    ("deploy local --data table.csv adult --label ok --group sex", "adult"),
    ("deploy local --data adult compas", "--data"),
    ("deploy local --data table.csv --sites 2 --label ok --group sex", "--sites"),
    ("deploy local --method fedprox", "--method", "fedgft"),
    ("deploy local --metric nope", "nope"),
    ("deploy local --target 0.1 --lam 1", "--target", "--lam"),
    ("deploy local --target 2", "--target"),
    ("deploy local --strategy FedAvgg", "--strategy", "FedAvg"),
    ("deploy local --channel post", "--channel", "train"),
    ("deploy local --method fairfed --epsilon 1", "--epsilon"),
    ("deploy local --set lr", "--set"),
    ("deploy local --set =1", "--set"),
    ("deploy local --set lrr=1", "--set", "'lr'"),
    ("deploy local --set lr=fast", "--set"),
    ("deploy local --set lr=nan", "--set"),
    ("deploy local --set rounds=3", "--rounds"),
    ("deploy local --set secure=true --sites 2", "secure"),
    ("deploy local --app nowhere", "--app"),
    ("deploy local --port 70000", "--port"),
    ("deploy local --data table.csv --label ok --group 'a\"b'", "table.csv", "--group"),
    ("deploy local --data adult --group 'a\"b'", "quotes"),
    ("deploy local --out ~nobody-at-all/x", "~nobody-at-all"),
)
