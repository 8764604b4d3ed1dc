"""Each command once, from a table to what it writes: the end-to-end tests of `make quick`."""

import json

import numpy as np
import polars as pl
import pytest

from fedgft.cli.app import app
from test_cli import run

pytestmark = pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
COLUMNS = ("--label", "ok", "--group", "sex")
SMALL = ("--rounds", "2", "--seeds", "1", "--lr", "0.1", "--quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table of people, and one with predictions about them."""
    place = tmp_path_factory.mktemp("commands")
    generator = np.random.default_rng(0)
    x = generator.normal(size=240).round(2)
    sex = generator.choice(["f", "m"], 240)
    ok = np.where(x + generator.normal(size=240) + (sex == "m") > 0, "yes", "no")
    pl.DataFrame({"x": x, "sex": sex, "ok": ok}).write_csv(place / "people.csv")
    score = (1 / (1 + np.exp(-x))).round(3)
    frame = pl.DataFrame({"sex": sex, "ok": np.where(ok == "yes", 1, 0), "p": score})
    frame.write_csv(place / "scores.csv")
    return place


def succeed(capsys, *command) -> str:
    code, out, err = run(capsys, *command)
    assert code == 0, err
    return out


def test_train_and_predict(capsys, folder):
    people = folder / "people.csv"
    options = ("--data", people, *COLUMNS, "--clients", "3", "--target", "0.1", *SMALL)
    succeed(capsys, "train", *options, "--out", folder / "train")
    model = folder / "train" / "model.safetensors"
    succeed(capsys, "predict", model, people, "--out", folder / "scored.csv")
    assert {"score", "decision"} <= set(pl.read_csv(folder / "scored.csv").columns)


def test_compare(capsys, folder):
    options = ("--data", folder / "people.csv", *COLUMNS, "--clients", "3", *SMALL)
    rows = json.loads(succeed(capsys, "compare", "--methods", "fedavg", "lrw", *options, "--json"))
    assert {row["method"] for row in rows} == {"fedavg", "lrw"}


def test_frontier(capsys, folder):
    options = ("--data", folder / "people.csv", *COLUMNS, "--clients", "3", *SMALL)
    out = folder / "frontier"
    succeed(capsys, "frontier", *options, "--points", "2", "--out", out)
    assert list(out.glob("*.svg"))


def test_measure_and_audit(capsys, folder):
    options = (*COLUMNS, "--score", "p", "--quiet")
    succeed(capsys, "measure", folder / "scores.csv", *options, "--out", folder / "a.json")
    found = json.loads(succeed(capsys, "audit", folder / "a.json", "--json"))
    assert found["metrics"]


def test_monitor(capsys, folder):
    options = (*COLUMNS, "--score", "p", "--quiet", "--name", "north")
    for month in ("2026-01-31", "2026-02-28"):
        place = folder / "months" / f"{month}.json"
        command = ("measure", folder / "scores.csv", *options)
        succeed(capsys, *command, "--date", month, "--out", place)
    succeed(capsys, "monitor", folder / "months", "--out", folder / "followed")
    assert (folder / "followed" / "metrics.prom").exists()


def test_adjust_and_decide(capsys, folder):
    options = (*COLUMNS, "--score", "p", "--quiet")
    succeed(capsys, "measure", folder / "scores.csv", *options, "--out", folder / "b.json")
    rule = folder / "rule.json"
    succeed(capsys, "adjust", folder / "b.json", "--target", "sp=0.1", "--out", rule)
    out = succeed(capsys, "decide", folder / "scores.csv", "--score", "p", "--rule", rule)
    assert out.splitlines()[0].endswith(",decision")


def test_data(capsys):
    assert "adult" in succeed(capsys, "data", "list")


def test_reproduce(capsys, folder):
    succeed(capsys, "reproduce", "simpson", "--out", folder / "paper", "--quiet")
    assert (folder / "paper" / "simpson.md").exists()


def test_deploy_keys_and_deploy_init(capsys, folder):
    pytest.importorskip("flwr")
    succeed(capsys, "deploy", "keys", "north", "--out", folder)
    sites = ("--sites", f"north={folder / 'north.pub'}")
    succeed(capsys, "deploy", "init", folder / "server", *sites, "--host", "fair.example.org")
    assert (folder / "server" / "ca.crt").exists()


def test_completion(capsys):
    assert "fedgft" in succeed(capsys, "completion", "bash")


def test_demo(capsys, folder, monkeypatch):
    from fedgft.errors import FedgftError

    def refuse(name, **options):
        raise FedgftError("no network")

    monkeypatch.setattr("fedgft.data.load", refuse)  # synthetic data instead of Adult
    monkeypatch.setattr("fedgft.cli.compare.DEMO_METHODS", ["fedavg", "lrw", "fedgft-control"])
    succeed(capsys, "demo", "--seeds", "1", "--out", folder / "demo")
    assert (folder / "demo" / "sites.svg").exists()


def test_bench(capsys, folder, monkeypatch):
    from dataclasses import replace

    from fedgft.bench import TRACKS, tracks
    from fedgft.data import synthetic

    data = synthetic(rows=1200, seed=0)
    small = replace(TRACKS["compas-race"], name="small", read=lambda: data, sha256="")
    monkeypatch.setitem(tracks.TRACKS, "small", small)
    out = folder / "bench"
    methods = ("--methods", "fedgft-control", "fedfb", "thresholds")
    succeed(capsys, "bench", "--track", "small", *methods, "--seeds", "2", "--out", out)
    assert "FedGFT control" in (out / "README.md").read_text()


def test_every_command_is_here():
    """A new command needs its test above."""
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tested = {part for name in here for part in name.split("_and_")}
    for name in (name for name in app if not name.startswith("-")):
        assert name in tested or any(part.startswith(f"{name}_") for part in tested), name
