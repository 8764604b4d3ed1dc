"""Tables, models and images that are wrong, for `train`, `compare`, `predict` and `measure`."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bad_cases import QUICK, TABLE, Case, case, cut, dangling, fifo, folder, locked

ROWS = "".join(f"{i % 7},{'fm'[i % 2]},{i // 2 % 2},s{i % 3}\n" for i in range(60))
GOOD = "x,sex,ok,site\n" + ROWS
LONG = "n" * 20_000

# What a file can hold, and what must be said of it beside its name, whoever reads it.
UNREADABLE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": (b"", ("empty",)),
    "header only": ("x,sex,ok\n", ("no rows",)),
    "blank lines": (b"\n\n\n", ()),
    "the same column twice": ("x,sex,ok,ok\n1,f,0,1\n2,m,1,0\n", ("'ok'", "more than once")),
    "rows of different lengths": ("x,sex,ok\n1,f,0,9,9\n2,m\n3,f,1\n", ()),
    "a quote that never closes": ('x,sex,ok\n1,"f,0\n2,m,1\n3,f,0\n', ()),
    "binary junk": (bytes(range(256)) * 40, ()),
    "UTF-16": (GOOD.encode("utf-16"), ("UTF-8",)),
    "Latin-1": (GOOD.replace("f", "\xfc").encode("latin-1"), ()),
    "a gzip called csv": (gzip.compress(GOOD.encode(), mtime=0), ("compressed",)),
    "no header": (ROWS, ("column",)),
    "a zip": (b"PK\x03\x04" + bytes(200), ()),
    "a folder": (folder, ()),
    "a pipe": (fifo, ()),
    "a link to nothing": (dangling, ("no such file",)),
}
# What `train` must refuse of a table that can be read.
UNFIT: dict[str, tuple[str, tuple[str, ...]]] = {
    "one row": ("x,sex,ok\n1,f,0\n", ("'ok'", "one class")),
    "one class": (GOOD.replace(",0,", ",1,"), ("'ok'", "one class")),
    "a label of fractions": (
        "x,sex,ok\n" + "".join(f"1,f,{i}.5\n" for i in range(9)),
        ("'ok'", "fractions"),
    ),
    "a label of 10,000 classes": (
        "x,sex,ok\n" + "".join(f"{i % 5},{'fm'[i % 2]},c{i}\n" for i in range(10_000)),
        ("'ok'",),
    ),
    "a label with a gap": (GOOD.replace("1,m,0", "1,m,"), ("'ok'", "lacks")),
    "a label of NaN": (GOOD.replace("1,m,0", "1,m,NaN"), ("'ok'",)),
    "a label column that is all missing": (
        GOOD.replace(",0,", ",,").replace(",1,", ",,"),
        ("'ok'",),
    ),
    "a group column that is all missing": (
        GOOD.replace(",f,", ",,").replace(",m,", ",,"),
        ("'sex'",),
    ),
    "inf in a feature": (GOOD.replace("3,", "inf,", 1), ("'x'", "infinite")),
    "-inf in a feature": (GOOD.replace("3,", "-inf,", 1), ("'x'", "infinite")),
    "NaN in a feature": (GOOD.replace("3,", "NaN,", 1), ("'x'",)),
    "1e308 in a feature": (GOOD.replace("3,", "1e308,", 1), ("'x'",)),
    "1e309 in a feature": (GOOD.replace("3,", "1e309,", 1), ("'x'",)),
    "a stray word among numbers": (
        "x,sex,ok\n"
        + "".join(f"{i},{'fm'[i % 2]},{i // 2 % 2}\n" for i in range(60))
        + "oops,f,1\n",
        ("'x'", "oops"),
    ),
    "a name in every row": (
        "x,sex,ok\n" + "".join(f"p{i},{'fm'[i % 2]},{i // 2 % 2}\n" for i in range(1200)),
        ("'x'",),
    ),
    "NUL in the header": ("x\0,sex\0,ok\0\n" + "1,f,0\n2,m,1\n" * 9, ("'ok'",)),
    "escape sequences in the header": (GOOD.replace("ok", "\x1b[31mok\x1b[0m"), ("'ok'",)),
    "a column name of 20,000 letters": (
        GOOD.replace("x,", LONG + ",", 1).replace("ok", "no"),
        ("'ok'",),
    ),
}


def cases() -> Iterator[Case]:
    yield from _files()
    yield from _train()
    yield from _predict()
    yield from _measure()
    yield from _images()


def _files() -> Iterator[Case]:
    """Each unreadable file for each command that reads tables."""
    lines = (
        f"train --data t.csv --label ok --group sex {QUICK}",
        "compare --data t.csv --label ok --group sex --rounds 1 --seeds 1",
        "measure t.csv --label ok --group sex --score x",
        "predict model.safetensors t.csv",
    )
    for about, (content, says) in UNREADABLE.items():
        for line in lines:
            if "predict" in line and "'ok'" in says:
                says = tuple(s for s in says if s != "'ok'")
            yield case(line, "t.csv", *says, about=about, t_csv=content)
    for line in lines:
        wrong = line.replace("t.csv", "t.parquet")
        yield case(wrong, "t.parquet", about="half a Parquet", t_parquet=cut("table.parquet", 0.5))
        yield case(wrong, "t.parquet", about="an empty Parquet", t_parquet=b"")
        yield case(wrong, "t.parquet", about="a CSV called parquet", t_parquet=GOOD)
        yield case(wrong.replace("t.parquet", "none.parquet"), "none.parquet", about="no rows")
        yield case(line.replace("t.csv", "absent.csv"), "absent.csv", "no such file")
        yield case(line.replace("t.csv", "t.xlsx"), "t.xlsx", ".csv or .parquet")
        made = case(line, "t.csv", about="no permission to read", t_csv=locked("table.csv"))
        yield Case(made.arguments, made.says, made.about, made.files, powerless=True)
    for line in lines[:3]:
        nested = line.replace("t.csv", "nested.parquet")
        yield case(nested, "nested.parquet", "'x'", "List", about="a column of lists")


def _train() -> Iterator[Case]:
    line = f"train --data t.csv --label ok --group sex {QUICK}"
    alone = GOOD.replace(",f,", ",m,")
    yield case(line, "t: ", "--group", "'m'", about="one group", t_csv=alone)
    for about, (content, says) in UNFIT.items():
        yield case(line, "t.csv", *says, about=about, t_csv=content)
    good = f"train {{}} {QUICK}"
    for given, *says in (
        ("--data table.csv", "--label"),
        ("--data table.csv --label ok", "--group"),
        ("--data table.csv --label OK --group sex", "'OK'", "'ok'"),
        ("--data table.csv --label ok --group sxe", "'sxe'", "'sex'"),
        ("--data table.csv --label '' --group sex", "''", "--label"),
        ("--data table.csv --label ok --group ''", "--group"),
        ("--data table.csv --label ok --group sex,", "--group"),
        ("--data table.csv --label ok --group ok", "'ok'", "--label", "--group"),
        ("--data table.csv --label ok --group sex,sex", "'sex'", "--group"),
        (f"{TABLE} --client ok", "'ok'", "--client"),
        (f"{TABLE} --client stie", "'stie'", "'site'"),
        (f"{TABLE} --split town", "'town'", "train"),
        (f"{TABLE} --split sex", "'sex'", "--split"),
        (f"{TABLE} --positive 7", "'7'", "'ok'"),
        (f"{TABLE} --partition column", "--client"),
        (f"{TABLE} --clients 100000", "--clients"),
        (f"{TABLE} --cohort 3", "--cohort"),
        (f"{TABLE} --client site --cohort 3", "--cohort"),
        (f"{TABLE} --train-rows 100000", "--train-rows"),
        (f"{TABLE} --test-rows 100000", "--test-rows"),
        (f"{TABLE} --init absent.safetensors", "absent.safetensors", "no such file"),
        (f"{TABLE} --init table.csv", "table.csv", "not a model"),
        (f"{TABLE} --init model.safetensors --model mlp", "model.safetensors", "mlp"),
        (f"{TABLE} --init model.safetensors --positive 0", "model.safetensors", "classes"),
        (f"{TABLE} --init model.safetensors --client site", "model.safetensors", "columns"),
        (f"{TABLE} --out table.csv", "table.csv"),
        (f"{TABLE} --out table.csv/deeper", "table.csv"),
        (f"{TABLE} --out ''", "--out"),
        ("--data adlut", "'adlut'", "'adult'"),
        ("--data ''", "--data"),
        ("--data .", "."),
        ("--data adult --label income", "--label", "adult"),
        ("--data synthetic --label ok", "--label", "synthetic"),
        ("--data ~nobody-at-all/t.csv --label ok --group sex", "~nobody-at-all"),
    ):
        line = good.format(given)
        if "--cohort" in given or "--clients" in given:
            line = line.replace("--clients 2", "" if "--clients 1" in given else "--clients 2")
        if "--client site" in given or "--client " in given:
            line = line.replace("--clients 2", "")
        yield case(line, *says)
    made = case(
        f"train {TABLE} {QUICK} --out there/deep",
        "--out",
        "there",
        about="no permission to write",
        there=locked(""),
    )
    yield Case(made.arguments, made.says, made.about, made.files, powerless=True)


def _predict() -> Iterator[Case]:
    for given, *says in (
        ("", "MODEL"),
        ("model.safetensors", "FILE"),
        ("absent.safetensors table.csv", "absent.safetensors", "no such file"),
        ("table.csv table.csv", "table.csv", "not a model"),
        ("model.safetensors table.csv --out x.txt", "x.txt", ".csv or .parquet"),
        ("model.safetensors table.csv --out ''", "--out"),
        ("model.safetensors table.csv --out table.csv/x.csv", "table.csv"),
        ("model.safetensors table.csv more.csv", "more.csv"),
        ("model.safetensors table.csv --format json", "--format"),
        ("model.safetensors table.csv --out", "--out"),
    ):
        yield case(f"predict {given}", *says)
    line = "predict model.safetensors t.csv"
    yield case(
        f"{line} --out x.csv",
        "t.csv",
        "'x'",
        about="a column is missing",
        t_csv="town,sex,site\nUlm,f,north\n",
    )
    yield case(
        line,
        "t.csv",
        "'x'",
        "a",
        about="words where numbers were",
        t_csv="x,town,sex,site\na,Ulm,f,north\n",
    )
    yield case(line, "t.csv", "'x'", about="inf", t_csv="x,town,sex,site\ninf,Ulm,f,north\n")
    yield case(
        line,
        "t.csv",
        "'score'",
        about="it has a column score",
        t_csv="x,town,sex,site,score\n1,Ulm,f,north,1\n",
    )
    yield case("predict nested.parquet table.csv", "nested.parquet")
    for share in (0.0, 0.01, 0.5, 0.99):
        yield case(
            "predict m.safetensors table.csv",
            "m.safetensors",
            about=f"{share:.0%} of it",
            m_safetensors=cut("model.safetensors", share),
        )
    head = b'{"__metadata__":{"fedgft":"{}"}}'
    for about, content in {
        "junk": b"garbage" * 99,
        "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
        "a header that is no JSON": (4).to_bytes(8, "little") + b"{{{{",
        "a model of somebody else": (len(head)).to_bytes(8, "little") + head,
        "a folder": folder,
        "a pipe": fifo,
        "a link to nothing": dangling,
        "one that says it is ours and holds nothing": _claims({"format": "fedgft-model-1"}),
        "a version to come": _claims({"format": "fedgft-model-2"}),
        "a header that is a list": _claims([1, 2]),
    }.items():
        yield case(
            "predict m.safetensors table.csv", "m.safetensors", about=about, m_safetensors=content
        )


def _claims(about: Any) -> bytes:
    import json

    head = json.dumps({"__metadata__": {"fedgft": json.dumps(about)}}).encode()
    return len(head).to_bytes(8, "little") + head


def _measure() -> Iterator[Case]:
    for given, *says in (
        ("", "--data"),
        ("said.csv", "--label"),
        ("said.csv --label y", "--group"),
        ("said.csv --label y --group g", "--score"),
        ("said.csv --label Y --group g --score p", "'Y'", "--label", "'y'"),
        ("said.csv --label y --group gg --score p", "'gg'", "--group"),
        ("said.csv --label y --group g --score q", "'q'", "--score"),
        ("said.csv --label y --group g --decision dd", "'dd'", "--decision"),
        ("said.csv --label y --group y --score p", "'y'"),
        ("said.csv --label y --group g --group g --score p", "'g'"),
        ("said.csv --label y --group g= --score p", "--group"),
        ("said.csv --label y --group g=f --score p", "'m'", "--group"),
        ("said.csv --label y --group p --score p", "'p'"),
        ("said.csv --label p --group g --decision d", "decision", "--classes"),
        ("said.csv --label y --group g --score g", "'g'"),
        ("said.csv --label y --group g --score p --positive 9", "'9'", "--positive"),
        ("said.csv --label y --group g --score p --classes", "--classes"),
        ("said.csv --label y --group g --score p --classes 0", "classes"),
        ("said.csv --label y --group g --score p --classes 0 0", "classes"),
        ("said.csv --label y --group g --score p --classes no yes", "'0'", "--classes"),
        ("said.csv --label y --group g --score p --score d", "add up to 1"),
        ("said.csv --label y --group g --score p --name ''", "--name"),
        ("said.csv --label y --group g --score p --out said.csv", "said.csv"),
        ("said.csv --label y --group g --score p --out north.json", "'north'"),
        ("said.csv --label y --group g --score p --epsilon 1 --min-cell 5", "--min-cell"),
        ("said.csv --label y --group g --score p --delta 0.1", "--delta"),
        ("said.csv --label y --group g --score p --bins 10001", "--bins"),
        ("said.csv --label y --group g --score p --threshold 1.5", "--threshold"),
        ("said.csv --label y --group g --score p --epsilon 1 --delta 1", "--delta"),
        ("said.csv said.csv --label y --group g --score p", "said.csv"),
    ):
        yield case(f"measure {given}", *says)
    line = "measure t.csv --label y --group g --score p"
    for about, content, *says in (
        ("a score above 1", "y,g,p\n1,f,0.5\n0,m,7\n", "'p'", "7"),
        ("a negative score", "y,g,p\n1,f,0.5\n0,m,-0.1\n", "'p'", "-0.1"),
        ("a score of inf", "y,g,p\n1,f,0.5\n0,m,inf\n", "'p'", "inf"),
        ("a score that is a word", "y,g,p\n1,f,0.5\n0,m,high\n", "'p'", "high"),
        ("no score anywhere", "y,g,p\n1,f,\n0,m,\n", "t.csv"),
        ("no label anywhere", "y,g,p\n,f,0.1\n,m,0.2\n", "t.csv"),
        ("one unknown class", "y,g,p\na,f,0.1\na,m,0.2\n", "'a'", "--classes"),
        ("300 labels", "y,g,p\n" + "".join(f"c{i},f,0.5\n" for i in range(300)), "'y'"),
        ("300 groups", "y,g,p\n" + "".join(f"1,c{i},0.5\n" for i in range(300)), "'g'"),
        ("three classes, one score", "y,g,p\n0,f,0.1\n1,m,0.2\n2,m,0.3\n", "--score"),
    ):
        yield case(line, "t.csv", *says, about=about, t_csv=content)


def _images() -> Iterator[Case]:
    base = "train --data faces.csv --label ok --group sex --images faces"
    quick = "--method fedavg --rounds 1 --seeds 1 --lr 0.01 --clients 2 --size 8"
    for given, *says in (
        ("--size 4", "--size"),
        ("--size 100000", "--size"),
        ("--crop 0", "--crop"),
        ("--crop 99999", "--crop"),
        ("--image n", "faces"),
        ("--image nn", "'nn'"),
        ("--image sex", "'sex'", "--image"),
        ("--model mlp", "--model"),
        ("--weights absent.pt", "--weights", "absent.pt"),
        ("--weights table.csv", "table.csv"),
        ("--valid test", "--valid"),
        ("--augment rotate", "--augment", "flip"),
        ("--norm layer", "--norm"),
    ):
        size = "" if "--size" in given else quick
        yield case(f"{base} {given} {size or quick.replace(' --size 8', '')}", *says)
    for given, *says in (
        ("train --data celeba", "--images"),
        ("train --data celeba --images faces", "faces"),
        ("train --data celeba --images nowhere", "nowhere"),
        ("train --data adult --images faces", "--images"),
        ("train --size 64", "--size", "--images"),
        ("train --model resnet18", "--model", "--images"),
        ("train --norm group", "--norm", "resnet18"),
        ("train --data faces.csv --images faces", "--label"),
        ("train --data faces.csv --images nowhere --label ok --group sex", "nowhere"),
        ("train --data faces.csv --images table.csv --label ok --group sex", "table.csv"),
        ("train --data adlut --images faces --label ok --group sex", "adlut"),
    ):
        yield case(given, *says)
    for about, change in _SPOILED.items():
        yield case(f"{base} {quick}", "faces", about=about, faces=_album(change))
    table = "image,sex,ok\n../x.png,f,1\n1.png,m,0\n"
    yield case(
        f"{base} {quick}".replace("faces.csv", "t.csv"),
        "t.csv",
        "'image'",
        about="a name that leads out of the folder",
        t_csv=table,
    )


_SPOILED: dict[str, Any] = {
    "an image is missing": lambda place: (place / "3.png").unlink(),
    "half an image": lambda place: (place / "3.png").write_bytes(
        (place / "3.png").read_bytes()[:45]
    ),
    "an empty image": lambda place: (place / "3.png").write_bytes(b""),
    "words called png": lambda place: (place / "3.png").write_text("no image"),
    "an image that says it has 10^9 x 10^9 pixels": lambda place: (place / "3.png").write_bytes(
        _absurd((place / "3.png").read_bytes())
    ),
    "a folder called png": lambda place: ((place / "3.png").unlink(), (place / "3.png").mkdir()),
}


def _absurd(png: bytes) -> bytes:
    """With another size in its header, whose sum is right."""
    from zlib import crc32

    head = b"IHDR" + (10**9).to_bytes(4, "big") * 2 + png[24:29]
    return png[:12] + head + crc32(head).to_bytes(4, "big") + png[33:]


def _album(change: Any) -> Any:
    def make(path: Path, pantry: Path) -> None:
        import shutil

        shutil.copytree(pantry / "faces", path)
        change(path)

    return make
