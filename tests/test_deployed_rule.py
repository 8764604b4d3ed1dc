"""A decision rule at the end of a deployed run: sums in, rule and its held-out numbers out."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp import strategy as flower

import fedgft
from fedgft.deploy.local_run import list_closing_lines, summarize_run
from fedgft.errors import FedgftError
from fedgft.fair_model import load_model
from fedgft.flower.client_app import make_client_app
from fedgft.flower.messages import SCORES
from fedgft.flower.server_app import serve
from in_process_grid import InProcessGrid, options

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[1] / "examples" / "flower" / "pyproject.toml"
SITES = ("north", "south", "east")


def write_tables(folder: Path, rows: int = 600) -> list[dict[str, Any]]:
    """Three sites whose groups differ; return their node configurations."""
    rng = np.random.default_rng(0)
    nodes = []
    for k, name in enumerate(SITES):
        sex = rng.choice(["f", "m"], rows, p=[0.3 + 0.2 * k, 0.7 - 0.2 * k])
        x = rng.normal(size=rows).round(3) + 0.6 * (sex == "m")
        ok = np.where(x + rng.normal(size=rows) > 0.4, "yes", "no")
        split = np.where(rng.random(rows) < 0.4, "test", "train")
        frame = pl.DataFrame({"x": x, "sex": sex, "ok": ok, "part": split})
        frame.write_csv(folder / f"{name}.csv")
        nodes.append({"site": name, "data": str(folder / f"{name}.csv")})
    return nodes


class Run:
    """A run of the app in one process; `change` replaces a site's reply."""

    def __init__(self, folder: Path, nodes: list[dict[str, Any]] | None = None) -> None:
        self.folder = folder
        self.nodes = nodes or write_tables(folder)
        self.grid = InProcessGrid([make_client_app()] * len(self.nodes), self.nodes)
        self.sent: dict[str, str] = {}  # site -> the text of its scores

    def serve(self, name: str = "run", **settings: Any) -> dict[str, Any]:
        config = tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]["config"]
        config |= {"data": "csv", "label": "ok", "group": "sex", "split": "part", "sites": 3}
        config |= {"rounds": 2, "method": "measured", "timeout": 1.0, "lr": 0.1}
        config |= {"out": str(self.folder / name), **settings}
        for context in self.grid.contexts.values():
            context.run_config = config
        server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        kind = getattr(flower, config["strategy"])
        serve(self.grid, server, kind(**options()))
        self.out = self.folder / name
        return json.loads((self.out / "history.json").read_text())

    def notes(self) -> str:
        rows = map(json.loads, (self.out / "progress.jsonl").read_text().splitlines())
        return "\n".join(row.get("note", "") for row in rows)

    def score(self, part: str, site: str) -> pl.DataFrame:
        """Score a site's rows with the saved model, independently of the messages."""
        frame = pl.read_csv(self.folder / f"{site}.csv").filter(pl.col("part") == part)
        path = next(
            self.out / n for n in ("model.safetensors", "model.json") if (self.out / n).exists()
        )
        return load_model(path).add_predictions(frame, source=site)[0]

    def change(self, node: int, kind: str, edit: Any) -> None:
        """Let `edit` change the JSON of a site's file of sums."""
        app = self.grid.apps[node]

        def lie(message, context):
            reply = app(message, context)
            if message.metadata.message_type == f"query.{kind}":
                record = reply.content["fedgft"]
                record["sums"] = edit(str(record["sums"]))
            return reply

        self.grid.apps[node] = lie


def measured(run: Run, part: str) -> list[fedgft.SiteSums]:
    """What `fedgft measure` says about the same rows, as files of sums."""
    parts = []
    for site in SITES:
        rows = run.score(part, site)
        sums = fedgft.measure(
            rows["ok"].to_list(),
            rows["score"].to_numpy(),
            sensitive_features={"sex": rows["sex"].to_list()},
            site=site,
            classes=("no", "yes"),
            values={"sex": ("f", "m")},
        )
        parts.append(fedgft.SiteSums.from_json(sums.to_json()))
    return parts


def rounded(values: Any) -> Any:
    """Return nested values with nine digits: the order of summation may differ."""
    return json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("logistic", {"adjust": "sp=0.02"}),
        ("logistic", {"adjust": "sp=0.05", "adjust-local": "sp=0.15", "adjust-per-site": True}),
        ("trees", {"adjust": "eop=0.03, sp=0.2"}),
        ("mlp", {"adjust": "fpr=0.02"}),
        ("xgboost", {"adjust": "sp=0.05", "strategy": "FedXgbBagging"}),
    ],
)
def test_the_rule_is_the_best_one_for_the_sums_of_the_training_rows(
    model: str, asked: dict, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    found = run.serve(model=model, **asked)["rule"]
    rule = fedgft.load_rule(run.out / "rule.json")
    by_hand = fedgft.adjust(
        measured(run, "train"),
        target=found["target"],
        local=found["local"],
        per_site=found["per_site"],
    )
    assert rule.cells == by_hand.cells and rule.attributes == ("sex",)
    for name in ("accuracy", "gaps", "local"):
        assert rounded(rule.expected[name]) == rounded(by_hand.expected[name])
        assert rounded(rule.expected[name]) == rounded(found["expected"][name])
    assert (run.out / "rule.json").stat().st_mode & 0o777 == 0o600
    assert found["fitted_on"]["rows"] == "training" and found["fitted_on"]["missing"] == []
    # on held-out rows: the decisions of `rule.decide`
    right, rows, yes = 0, 0, {"f": [], "m": []}
    for site in SITES:
        table = run.score("test", site)
        sites = site if rule.per_site else None
        decided = rule.decide(table["score"].to_numpy(), table["sex"], sites=sites)
        right += int((decided == (table["ok"] == "yes").to_numpy()).sum())
        rows += table.height
        for group, each in yes.items():
            each += decided[(table["sex"] == group).to_numpy()].tolist()
    held_out = found["held_out"]
    assert held_out["measured"] == "decisions" and held_out["rows"] == rows
    assert held_out["accuracy"]["rate"] == pytest.approx(right / rows, abs=1e-12)
    gap = next(each for each in held_out["gaps"] if each["metric"] == "sp")
    assert gap["gap"] == pytest.approx(abs(np.mean(yes["f"]) - np.mean(yes["m"])), abs=1e-12)
    assert gap["low"] <= gap["gap"] <= gap["high"]
    summary = summarize_run(run.out, "finished:completed", seconds=1, sites=3, limit=9)
    assert summary["rule"]["held_out"]["accuracy"] == held_out["accuracy"]["rate"]
    rule_lines = [line for line in list_closing_lines(summary, "sp") if "Decision rule on" in line]
    assert len(rule_lines) == 2 and "training rows" in rule_lines[0]
    # anybody who has the sums can repeat it
    files = sorted((run.out / "scores").iterdir())
    assert len(files) == 3 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_a_randomized_rule_is_measured_with_coins_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, write_tables(tmp_path, rows=4000))
    messages = []
    run.grid.lose = lambda node, message: messages.append(message)
    asked = {"adjust": "eo=0.0", "adjust-randomized": True}
    found = run.serve(**asked)["rule"]
    rule = fedgft.load_rule(run.out / "rule.json")
    assert rule.is_random and len(rule.key) == 64
    assert found["expected"]["gaps"][0]["after"] == pytest.approx(0.0, abs=1e-6)
    assert not any(rule.key in repr(message.content) for message in messages)
    chances, truth, groups = [], [], []
    for site in SITES:
        table = run.score("test", site)
        chances.append(rule.probabilities(table["score"].to_numpy(), table["sex"]))
        truth.append((table["ok"] == "yes").to_numpy())
        groups.append((table["sex"] == "m").to_numpy())
    q, y, m = map(np.concatenate, (chances, truth, groups))
    held_out = found["held_out"]
    assert held_out["measured"] == "decisions" and held_out["rows"] == len(q)
    assert held_out["accuracy"]["rate"] == pytest.approx(np.where(y, q, 1 - q).mean(), abs=0.02)
    gap = next(each for each in held_out["gaps"] if each["metric"] == "sp")
    assert gap["gap"] == pytest.approx(abs(q[m].mean() - q[~m].mean()), abs=0.03)


def test_noise_is_charged_and_known(tmp_path: Path) -> None:
    """The scores take a part of the budget of the rounds, and the ledger adds up to the budget."""
    from fedgft.privacy.noise import total_rho

    nodes = write_tables(tmp_path, rows=4000)
    for node in nodes:
        node |= {"max-epsilon": 8.0, "max-delta": 1e-5}
    Run(tmp_path, nodes=[{k: n[k] for k in ("site", "data")} for n in nodes]).serve(
        "plain", rounds=1
    )
    run = Run(tmp_path, nodes)
    schema = str(tmp_path / "plain" / "schema.json")
    found = run.serve(epsilon=4.0, adjust="sp=0.05", schema=schema)["rule"]
    assert found["file"] == "rule.json" and found["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert found["held_out"]["measured"].startswith("chances")
    assert not found["expected"]["exact"]
    for file in (run.out / "scores").iterdir():
        sums = fedgft.SiteSums.from_json(file.read_text())
        (site,) = sums.sites.values()
        assert site.privacy[0].mechanism == "discrete gaussian" and site.privacy[0].variance > 1
    for node in run.grid.contexts:
        ledger = json.loads((Path(run.grid.folder) / str(node) / "ledger.json").read_text())
        spent = 2 * total_rho(4.0, 1e-6)  # training rows, and held-out rows
        assert ledger["rho"] == pytest.approx(spent, rel=1e-4)


def test_a_site_releases_the_noisy_scores_of_one_model_only() -> None:
    from flwr.app import ConfigRecord

    from fedgft.flower.messages import make_query, make_request
    from fedgft.privacy.noise import Budget
    from in_process_grid import biased, grid_of, start_of

    made = biased(rows=3000)
    grid, arrays = grid_of(made), start_of(made)

    def ask(model: Any, **extras: Any) -> str:
        budget = Budget(1.0, releases=4).to_request("hard")
        request = make_request(None, None, statistics="none", privacy=budget) | extras
        message = make_query(model, ConfigRecord(), request, 100, kind=f"query.{SCORES}")
        (reply,) = grid.send_and_receive([message])
        if reply.has_error():
            raise FedgftError(reply.error.reason)
        return reply.content["fedgft"]["sums"]

    for wrong in ({}, {"rule.releases": 0}, {"rule.releases": "2"}):
        with pytest.raises(FedgftError, match="no whole number above 0"):
            ask(arrays, **wrong)
    with pytest.raises(FedgftError, match="budget in this run is spent"):
        ask(arrays, **{"rule.releases": 5})
    first = ask(arrays, **{"rule.releases": 2})
    grid.restart(100)
    assert ask(arrays, **{"rule.releases": 2}) == first
    other = start_of(made)
    from flwr.app import Array

    for name, array in other.items():
        other[name] = Array(array.numpy() + np.float32(0.1))
    with pytest.raises(FedgftError, match="budget in this run is spent"):
        ask(other, **{"rule.releases": 1})


def test_a_site_that_withholds_small_cells_sends_no_histogram(tmp_path: Path) -> None:
    nodes = write_tables(tmp_path)
    nodes[1]["min-count"] = 5
    run = Run(tmp_path, nodes)
    found = run.serve(adjust="sp=0.02")["rule"]
    assert found["file"] is None and "south withheld the histograms" in found["why"]
    assert "adjust-randomized" in found["why"] and found["why"] in run.notes()
    assert (run.out / "model.safetensors").exists() and not (run.out / "rule.json").exists()
    found = run.serve("again", **{"adjust": "sp=0.02", "adjust-randomized": True})["rule"]
    assert found["reads"] == "decision" and found["expected"]["gaps"][0]["after"] <= 0.02 + 1e-6
    assert found["held_out"]["rows"] > 500


def test_a_site_that_withholds_scores_gives_no_decisions_of_thresholds(tmp_path: Path) -> None:
    nodes = write_tables(tmp_path)
    nodes[1]["min-count"] = 5
    run = Run(tmp_path, nodes)
    run.grid.lose = lambda node, message: (
        node == 101 and message.metadata.message_type == f"query.{SCORES}"
    )
    found = run.serve(adjust="sp=0.2")["rule"]
    assert found["reads"] == "score" and found["fitted_on"]["missing"] == ["south"]
    assert found["held_out"]["missing"] == ["south"]
    assert "withholds its scores (min-count)" in run.notes()


def test_a_target_that_no_rule_meets_is_named_and_the_model_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = run.serve(adjust="sp=0.0, eo=0.0")["rule"]
    assert found["file"] is None and "the nearest: sp <= 0.0" in found["why"]
    assert "try adjust-randomized" in found["why"] and found["why"] in run.notes()
    assert (run.out / "model.safetensors").exists() and (run.out / "report.html").exists()
    summary = summarize_run(run.out, "finished:completed", seconds=1, sites=3, limit=9)
    assert summary["rule"] == {"why": found["why"]}
    assert f"No decision rule: {found['why']}." in list_closing_lines(summary, "sp")


def test_a_lost_site_is_named_and_the_others_fit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.grid.lose = lambda node, message: (
        node == 101 and message.metadata.message_type in (f"query.{SCORES}", "query.fedgft_report")
    )
    found = run.serve(adjust="sp=0.05")["rule"]
    assert found["fitted_on"]["sites"] == ["east", "north"]
    assert found["fitted_on"]["missing"] == ["south"] == found["held_out"]["missing"]
    assert "the decision rule is fitted without south" in run.notes()
    run.grid.lose = lambda node, message: message.metadata.message_type == f"query.{SCORES}"
    assert run.serve("none", adjust="sp=0.05")["rule"]["why"] == "no site sent its scores"


def more_rows(text: str) -> str:
    content = json.loads(text)
    cell = content["cells"][0]
    (scores,) = cell["scores"].values()
    scores.pop("sum", None)
    cell["count"] += 50
    scores["histogram"][0] += 50
    content["rows"]["counted"] += 50
    return json.dumps(content)


def renamed(name: str, value: Any):
    return lambda text: json.dumps(json.loads(text) | {name: value})


def noisy(text: str) -> str:
    privacy = {"mechanism": "discrete gaussian", "epsilon": 1, "delta": 1e-6, "scale": 1e6}
    content = json.loads(text)
    for cell in content["cells"]:  # a noisy file has a histogram of every cell, without widths
        first = 0 if cell["decision"] == "no" else 50
        cell["scores"] = {"yes": {"first_bin": first, "histogram": [cell["count"]]}}
    return json.dumps(content | {"privacy": {**privacy, "variance": 1e12}})


@pytest.mark.parametrize(
    ("kind", "edit", "says"),
    [
        (SCORES, lambda text: text[:100], "node 101: not a whole file of sums"),
        (SCORES, lambda text: "", "node 101: not a whole file of sums"),
        (SCORES, more_rows, "site 'south': its scores are of"),
        (SCORES, renamed("site", "north"), "site 'south' now calls itself 'north'"),
        (SCORES, renamed("site", "west"), "site 'south' now calls itself 'west'"),
        (
            SCORES,
            renamed("groups", ["race"]),
            "site 'south': its sums are of other labels or groups",
        ),
        (SCORES, renamed("threshold", None), "site 'south' sent no scores with the threshold 0.5"),
        (SCORES, noisy, "site 'south': the noise on its scores is not the agreed one"),
        (
            SCORES,
            lambda text: text.replace('["f"]', '["x"]'),
            "site 'south': the federation has no group 'x'",
        ),
        ("fedgft_decisions", renamed("site", "west"), "site 'west' sent no report"),
        ("fedgft_decisions", lambda text: text[:100], "node 101: not a whole file of sums"),
    ],
)
def test_false_sums_are_refused_with_the_name_of_the_site(
    kind: str, edit: Any, says: str, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.change(101, kind, edit)
    found = run.serve(adjust="sp=0.05", rounds=1)["rule"]
    assert says in run.notes(), run.notes()
    missing = found["fitted_on"] if kind == SCORES else found["held_out"]
    assert missing["missing"] == ["south"] and missing["sites"] == ["east", "north"]


def test_decisions_about_other_rows_are_refused(tmp_path: Path) -> None:
    def fewer(text: str) -> str:
        content = json.loads(text)
        content["cells"][0]["count"] -= 1
        content["rows"]["counted"] -= 1
        return json.dumps(content)

    run = Run(tmp_path)
    run.change(102, "fedgft_decisions", fewer)
    found = run.serve(adjust="sp=0.05", rounds=1)["rule"]
    assert "site 'east': its decisions are of" in run.notes()
    assert found["held_out"]["missing"] == ["east"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adjust": "sp=0.02", "secure": True, "channel": "query"}, "secure sums carry none"),
        ({"adjust": "sp=0.02", "min-count": 5}, "min-count withholds"),
        ({"adjust": "sp=2"}, "adjust sp=2: write METRIC=GAP"),
        ({"adjust": "sp"}, "adjust sp: write METRIC=GAP"),
        ({"adjust": "sp+eop=0.1"}, "one gap for each metric"),
        ({"adjust": "magic=0.1"}, "adjust magic=0.1"),
        ({"adjust-per-site": True}, "adjust_per_site needs a target"),
        ({"adjust": "predictive-parity=0.1", "adjust-local": "sp=0.1"}, "only alone"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_the_run(
    settings: dict, says: str, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    with pytest.raises(FedgftError) as wrong:
        run.serve(**settings)
    assert says in str(wrong.value) and not run.grid.messages


def test_three_classes_are_refused_before_the_first_round(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for node in run.nodes:
        frame = pl.read_csv(node["data"])
        late = np.where(np.arange(frame.height) % 3 == 0, "late", frame["ok"].to_numpy())
        frame.with_columns(ok=pl.Series(late)).write_csv(node["data"])
    with pytest.raises(FedgftError, match="two classes, and the labels have 3"):
        run.serve(adjust="sp=0.02")
    assert set(run.grid.messages) == {"query.fedgft_describe"}


def test_a_rule_for_intersections_reads_the_columns_one_by_one(tmp_path: Path) -> None:
    nodes = write_tables(tmp_path, rows=1500)
    for node in nodes:
        frame = pl.read_csv(node["data"])
        old = (np.arange(frame.height) % 2).astype(str)
        frame.with_columns(old=pl.Series(old)).write_csv(node["data"])
    run = Run(tmp_path, nodes)
    found = run.serve(adjust="sp=0.05", group="sex,old")["rule"]
    rule = fedgft.load_rule(run.out / "rule.json")
    assert rule.attributes == ("sex", "old") and len(rule.cells) == 4
    assert found["held_out"]["measured"] == "decisions" and found["held_out"]["rows"] > 1500
    table = run.score("test", "north")
    decided = rule.decide(table["score"].to_numpy(), {n: table[n] for n in ("sex", "old")})
    assert 0 < decided.mean() < 1
