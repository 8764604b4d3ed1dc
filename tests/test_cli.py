"""The command line as users see it: real code paths, files and errors."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.cli import main
from fedgft.data import SOURCES
from fedgft.data.generated import synthetic
from fedgft.fair_model import load_model

# an infinite heterogeneity is said, and is no error
pytestmark = pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")

QUICK = ["--seeds", "2", "--rounds", "3", "--lr", "0.01", "--lam", "5", "--beta", "1"]
GAPS = ("accuracy", "gap_soft", "gap_hard", "gap_soft_test", "gap_hard_test")
FIELDS = (
    *("data", "alpha", "method", "metric", "protocol", "seeds"),
    *GAPS,
    *(f"{name}_sd" for name in GAPS),
    *("gap_hard_test_low", "gap_hard_test_high", "floor", "heterogeneity", "seconds"),
)


def table(path: Path, *, rows: int = 400) -> Path:
    """A small file with numbers, text, missing values, a client and two groups."""
    data = synthetic(rows=rows, seed=1)
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "x": data.features[:, 0],
            "y <b>&": data.features[:, 1],
            "town": [("Ulm", "Bonn", None)[i] for i in rng.integers(0, 3, rows)],
            "sex": [("f", "m")[g] for g in data.groups],
            "ok": data.labels,
            "site": [("north", "south", "[b]east[/b]")[i] for i in rng.integers(0, 3, rows)],
        }
    )
    (frame.write_csv if path.suffix == ".csv" else frame.write_parquet)(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = 0
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_compare_prints_only_json_with_all_the_fields(capsys):
    code, out, _ = run(
        capsys,
        "compare",
        "--data",
        "synthetic",
        "--methods",
        "fedavg",
        "lrw",
        "lft",
        "fairfed",
        "fedgft",
        "--metrics",
        "sp",
        "eop",
        "--alpha",
        "0.5",
        "5",
        "--json",
        *QUICK,
    )
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 5 * 2 * 2
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert (
            0 <= row["gap_hard_test_low"] <= row["gap_hard_test"] <= row["gap_hard_test_high"] <= 1
        )
        assert 0.3 < row["accuracy"] <= 1  # fractions, not percent
    assert {row["alpha"] for row in rows} == {0.5, 5}


@pytest.mark.slow
def test_compare_writes_rows_rounds_and_figures(capsys, tmp_path):
    code, out, _ = run(capsys, "compare", "--data", "synthetic", "--out", tmp_path, *QUICK)
    assert code == 0
    assert "FedGFT" in out
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"rows.parquet", "rounds.parquet", "rounds.png", "rounds.svg", "run.json"}
    rounds = pl.read_parquet(tmp_path / "rounds.parquet")
    assert rounds["round"].to_list()[0] == 0
    assert rounds["round"].max() == 3
    assert len(rounds) == 4 * 5 * 2  # rounds 0 to 3, five methods, two replicates
    assert (tmp_path / "rounds.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_train_saves_a_model_that_predict_applies(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    where = ["--data", file, "--label", "ok", "--group", "sex", "--client", "site"]
    code, out, _ = run(capsys, "train", *where, "--json", "--out", tmp_path / "o", *QUICK)
    result = json.loads(out)
    assert code == 0
    assert {c["client"] for c in result["clients"]} == {"north", "south", "[b]east[/b]"}
    code, out, _ = run(capsys, "predict", tmp_path / "o/model.safetensors", file)
    assert code == 0
    predicted = pl.read_csv(out.encode())
    agree = (predicted["decision"] == predicted["ok"]).mean()
    assert predicted.columns[:6] == pl.read_csv(file).columns
    assert agree == pytest.approx(result["accuracy"], abs=0.15)
    assert ((predicted["score"] > 0.5).cast(int) == predicted["decision"]).all()


@pytest.mark.slow
def test_all_models_and_init(capsys, tmp_path):
    base = ["train", "--data", "synthetic", *QUICK, "--json"]
    run(capsys, *base, "--all-models", "--out", tmp_path / "a")
    assert (tmp_path / "a/model-1.safetensors").exists()
    _, first, _ = run(capsys, *base, "--out", tmp_path / "b")
    model = tmp_path / "a/model.safetensors"
    _, second, _ = run(capsys, *base, "--init", model, "--out", tmp_path / "c")
    assert json.loads(second)["accuracy"] >= json.loads(first)["accuracy"] - 0.02
    saved = json.loads(first)["saved"]
    rounds = pl.read_parquet(tmp_path / "c/rounds.parquet")
    start = rounds.filter((pl.col("round") == 0) & (pl.col("seed") == saved["seed"]))
    ended = pytest.approx(saved["accuracy_test"], abs=1e-9)
    assert start["accuracy"].to_list() == [ended] * 2  # FedAvg and FedGFT start where it ended


@pytest.mark.slow
def test_demo_falls_back_to_synthetic_and_says_so(capsys, tmp_path, monkeypatch):
    from fedgft.errors import FedgftError

    def unreachable(name, **options):
        raise FedgftError("no source")

    monkeypatch.setattr("fedgft.data.public.load", unreachable)
    code, out, err = run(capsys, "demo", "--seeds", "2", "--out", tmp_path)
    assert code == 0
    assert "synthetic" in err
    lines = out.splitlines()
    assert re.match(r"FedAvg +\d\d\.\d% accurate, gap \d+\.\d points \(95% interval", lines[1])
    assert lines[2].startswith("best local (") and lines[3].startswith("FedGFT ")
    assert lines[4].startswith("Always predicting the most frequent class: ")
    assert lines[5].startswith("Noise floor: ")
    assert "FedGFT control  " in out  # the name in the figure
    assert "LRW, LFT and FairFed are earlier methods" in " ".join(out.split())
    assert f"Open:  {tmp_path / 'methods.png'}" in out and "fedgft train --data loans.csv" in out
    assert "chosen on inner splits" not in err and "constant" not in out  # with --verbose only
    assert (tmp_path / "rounds.svg").exists()
    drawn = (tmp_path / "sites.svg").read_text()  # text as text
    assert all(word in drawn for word in ("gap 48", "both together"))
    drawn = (tmp_path / "methods.svg").read_text()
    assert all(word in drawn for word in ("LFT", "10 simulated clients, alpha 0.5", "held-out"))


def test_demo_says_where_the_data_came_from(capsys, tmp_path, monkeypatch):
    """The study reads the data a second time, from the cache; the first time counts."""
    from dataclasses import replace
    from itertools import chain, repeat

    from fedgft.data.generated import synthetic

    sources = chain(["the package index"], repeat("the cache"))

    def fetch(name, **options):
        return replace(synthetic(rows=600), notes=(f"adult.data: served by {next(sources)}",))

    monkeypatch.setattr("fedgft.cli.study_session.load", fetch)  # first: it imports the other
    monkeypatch.setattr("fedgft.data.public.load", fetch)
    monkeypatch.setattr("fedgft.cli.compare.DEMO_METHODS", ("fedavg", "fedgft-control"))
    code, _, err = run(capsys, "demo", "--seeds", "1", "--out", tmp_path)
    assert code == 0
    assert "served by the package index" in err and "served by the cache" not in err


@pytest.mark.slow
def test_text_from_data_is_escaped(capsys, tmp_path):
    file = table(tmp_path / "t.parquet")
    code, out, _ = run(
        capsys,
        "--verbose",
        "train",
        "--data",
        file,
        "--label",
        "ok",
        "--group",
        "sex",
        "--client",
        "site",
        "--out",
        tmp_path / "o",
        *QUICK,
    )
    assert code == 0
    assert "[b]east[/b]" in out


BAD = [
    (["--label", "okk"], r"okk.*did you mean.*ok"),
    (["--group", "sexx"], r"sexx.*did you mean.*sex"),
    (["--client", "sitte"], r"sitte.*did you mean.*site"),
    (["--alpha", "0"], "--alpha"),
    (["--alpha", "-1"], "--alpha"),
    (["--lam", "-1"], "--lam"),
    (["--beta", "-1"], "--beta"),
    (["--lr", "0"], "--lr"),
    (["--batch-size", "0"], "--batch-size"),
    (["--rounds", "0"], "--rounds"),
    (["--epochs", "0"], "--epochs"),
    (["--seeds", "0"], "--seeds"),
    (["--seed", "-1"], "--seed"),
    (["--threads", "0"], "--threads"),
    (["--clients", "0"], "--clients"),
    (["--cohort", "11"], r"--cohort.*10 clients"),
    (["--weight-decay", "-1"], "--weight-decay"),
    (["--metrics", "nonsense"], "nonsense"),
    (["--methods", "nonsense"], "nonsense"),
    (["--nonsense", "1"], "--nonsense"),
    (["--partition", "column"], "--client"),
    (["--device", "cuda"], "--device"),
    (["--executor", "fused", "--model", "mlp"], "--executor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "says"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_bad_options_are_one_line_and_code_2(extra, says, capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    base = {"--data": str(file), "--label": "ok", "--group": "sex", "--seeds": "2", "--rounds": "2"}
    given = dict(zip(extra[::2], extra[1::2], strict=True))
    arguments = [part for pair in (base | given).items() for part in pair]
    code, out, err = run(capsys, "compare", *arguments, "--out", tmp_path / "o")
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert re.search(says, err, re.IGNORECASE), err
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


def broken(path: Path, kind: str) -> Path:
    frame = pl.read_csv(table(path))
    ruined = {
        "empty": lambda: path.write_text(""),
        "header": lambda: path.write_text("x,sex,ok\n"),
        "infinite": lambda: frame.with_columns(x=pl.lit(float("inf"))).write_csv(path),
        "nan": lambda: frame.with_columns(x=pl.lit(float("nan"))).write_csv(path),
        "one group": lambda: frame.with_columns(sex=pl.lit("f")).write_csv(path),
        "one label": lambda: frame.with_columns(ok=pl.lit(1)).write_csv(path),
        "no event": lambda: frame.with_columns(
            ok=pl.when(pl.col("sex") == "f").then(0).otherwise(pl.col("ok"))
        ).write_csv(path),
    }
    ruined[kind]()
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("empty", r"t\.csv.*empty"),
        ("header", r"t\.csv.*no rows"),
        ("infinite", r"t\.csv.*'?x'?"),
        ("nan", r"t\.csv.*'?x'?"),
        ("one group", "only 'f'"),
        ("one label", "ok"),
        ("no event", "group 'f'"),
    ],
)
def test_bad_files_are_one_line_and_code_2(kind, says, capsys, tmp_path):
    file = broken(tmp_path / "t.csv", kind)
    code, out, err = run(
        capsys,
        "compare",
        "--data",
        file,
        "--label",
        "ok",
        "--group",
        "sex",
        "--metrics",
        "eop",
        *QUICK,
    )
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert re.search(says, err), err


def test_an_output_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(
        capsys, "compare", "--data", "synthetic", "--out", tmp_path / "file/x", *QUICK
    )
    assert code == 2
    assert "--out" in err


@pytest.mark.slow
def test_a_client_with_one_row_is_no_error(capsys, tmp_path):
    frame = pl.read_csv(table(tmp_path / "t.csv"))
    last = pl.Series("site", ["alone"] * 2 + frame["site"].to_list()[2:])
    split = pl.Series("part", ["train", "test"] + ["train", "train", "test"] * 133)[:400]
    frame = frame.with_columns(last, split.extend(pl.Series(["train"] * (400 - len(split)))))
    frame.write_csv(tmp_path / "t.csv")
    code, out, _ = run(
        capsys,
        "train",
        "--data",
        tmp_path / "t.csv",
        "--label",
        "ok",
        "--group",
        "sex",
        "--client",
        "site",
        "--split",
        "part",
        "--json",
        "--out",
        tmp_path / "o",
        *QUICK,
    )
    alone = next(c for c in json.loads(out)["clients"] if c["client"] == "alone")
    assert code == 0
    assert alone["rows"] == 1
    assert alone["gap_hard"] is None  # not estimable, not fair


@pytest.mark.slow
def test_help_is_quick_and_imports_nothing_heavy():
    heavy = ("torch", "numba", "polars", "matplotlib", "numpy", "jaxtyping")
    loads = "import sys; from fedgft.cli.app import app; "
    code = loads + f"print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fedgft", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert worked < 1.0  # a third of that on a quiet machine: benchmarks/speed.py --case startup


@pytest.mark.slow
def test_each_of_several_tables_is_a_client(capsys, tmp_path):
    whole = pl.read_csv(table(tmp_path / "t.csv"))
    sites = ("north", "south")
    for name in sites:
        part = whole.filter(site=name).drop("site")
        part.write_csv(tmp_path / f"{name}.csv")
    how = ["--label", "ok", "--group", "sex", "--json", *QUICK]
    files = [tmp_path / f"{name}.csv" for name in sites]
    for given in (files, ["--data", *files]):
        out = tmp_path / f"o{len(given)}"
        code, said, err = run(capsys, "train", *given, *how, "--out", out)
        assert code == 0, err
        assert {each["client"] for each in json.loads(said)["clients"]} == set(sites)
    code, said, err = run(capsys, "compare", *files, *how, "--methods", "fedavg")
    assert code == 0 and json.loads(said)[0]["alpha"] is None, err
    few = ["--points", "2", "--methods", "fedgft-control", "--out", tmp_path / "f"]
    code, _, err = run(capsys, "frontier", *files, *how[:5], "--seeds", 2, "--rounds", 2, *few)
    assert code == 0, err


@pytest.mark.slow
def test_flags_decide_how_columns_become_features(capsys, tmp_path):
    """The group, an identifier, codes and values that mean missing."""
    table(tmp_path / "t.csv")
    frame = pl.read_csv(tmp_path / "t.csv").with_row_index("number")
    codes = [(10, 20, 30)[i % 3] for i in range(len(frame))]
    texts = ["?" if i % 7 == 0 else str(i % 5) for i in range(len(frame))]
    frame = frame.with_columns(code=pl.Series(codes), income=pl.Series(texts)).drop("site")
    frame.write_csv(tmp_path / "t.csv")
    how = ["train", tmp_path / "t.csv", "--label", "ok", "--group", "sex", *QUICK, "--out"]

    def features(folder: str, *more: str) -> list[str]:
        code, _, err = run(capsys, *how, tmp_path / folder, *more)
        assert code == 0, err
        return load_model(tmp_path / folder / "model.safetensors").encoder.columns

    plain = features("plain")
    assert "sex=m" not in plain and "number" not in plain and "code" in plain
    assert "income=?" in plain and "income" not in plain
    flags = ["--keep-group", "--keep", "number", "--categorical", "code", "--missing", "?"]
    told = features("told", *flags)
    assert {"sex=m", "number", "income"} <= set(told)
    assert "code" not in told and any(name.startswith("code=") for name in told)
    assert not any(name == "income=?" for name in told)


@pytest.mark.slow
def test_columns_that_are_left_out_are_no_features(capsys, tmp_path):
    """Group and client keep their parts; `predict` asks for neither them nor the others."""
    file = table(tmp_path / "t.csv")
    where = ["--data", file, "--label", "ok", "--group", "sex", "--client", "site", *QUICK]
    left = ["--leave-out", "sex", "town", "--leave-out", "site"]
    code, out, err = run(capsys, "train", *where, *left, "--out", tmp_path / "o")
    assert code == 0, err
    printed = " ".join(out.split())
    assert "Not features: " in printed
    assert all(f"{name} (left out)" in printed for name in ("town", "sex"))
    model = tmp_path / "o/model.safetensors"
    assert load_model(model).about["columns"] == ["x", "y <b>&"]
    assert load_model(model).about["groups"] == ["f", "m"]
    pl.read_csv(file).drop("sex", "town", "site", "ok").write_csv(tmp_path / "new.csv")
    assert run(capsys, "predict", model, tmp_path / "new.csv")[0] == 0
    own = ["--data", file, "--label", "ok", "--group", "sex"]
    every = ["x", "y <b>&", "town", "sex", "site"]
    for given, says in (
        ([*own, "--leave-out", "tow"], "'tow' (--leave-out); did you mean 'town'?"),
        ([*own, "--leave-out", *every], "no column is left to learn from"),
        ([*own, "--leave-out", "ok"], "'ok' is both --label and --leave-out"),
        ([*own, "--leave-out"], "--leave-out needs a value"),
        (["--data", "adult", "--leave-out", "age"], "--leave-out: the data set"),
        (["--data", "synthetic", "--leave-out", "x0"], "--leave-out: the synth"),
        ([*own, "--images", tmp_path, "--leave-out", "x"], "is for tables"),
    ):
        code, _, err = run(capsys, "train", *given, *QUICK, "--out", tmp_path / "none")
        assert code == 2 and says in " ".join(err.split()), err
    assert not (tmp_path / "none").exists()


def test_data_list(capsys):
    code, out, _ = run(capsys, "data", "list", "--json")
    assert code == 0
    found = {d["name"]: d for d in json.loads(out)}
    assert set(found) == {*SOURCES, "acs", "celeba", "synthetic"}
    assert found["synthetic"]["rows"] is None
    _, out, _ = run(capsys, "data", "list")
    assert all(name in out for name in found) and "202,599" in out
