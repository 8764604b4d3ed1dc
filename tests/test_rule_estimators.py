"""Decision rules in `FairClassifier` and in studies: they keep targets, and decide as saved."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft import FairClassifier, FedgftError, get_metric
from fedgft.fair_classifier import name_rule_file
from fedgft.rules.federation_rule import fit_rule
from fedgft.study import Study, get_protocol
from fedgft.study.post_processing import rule_row
from test_cli import run

KINDS = ("thresholds", "blind", "derived")


def make_people(rows: int = 3000, seed: int = 0) -> tuple[pl.DataFrame, np.ndarray, np.ndarray]:
    """A table in which the columns say much about the group, and the groups' rates differ."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], rows, p=[0.4, 0.6])
    x = rng.normal(size=(rows, 3)) + 0.9 * (sex == "m")[:, None] * [1, 0, 0.5]
    job = np.where(rng.random(rows) < 0.3 + 0.4 * (sex == "m"), "office", "field")
    y = np.where(x.sum(1) + rng.normal(size=rows) > 1, "yes", "no")
    return pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "job": job}), y, sex


def gap(decisions: np.ndarray, sex: np.ndarray) -> float:
    positive = decisions == "yes"
    return abs(positive[sex == "f"].mean() - positive[sex == "m"].mean())


def options(kind: str, sex: np.ndarray) -> dict:
    """What `predict` needs besides the table."""
    found = {} if kind == "blind" else {"sensitive_features": sex}
    return found | ({"ids": np.arange(len(sex))} if kind == "derived" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_keeps_the_target_and_is_saved(kind: str, tmp_path) -> None:
    table, y, sex = make_people()
    fitted = FairClassifier(target=0.02, lr=0.05, rounds=20, postprocess=kind)
    fitted.fit(table, y, sensitive_features=sex, clients=3)
    plain = FairClassifier(lr=0.05, rounds=20, method="fedavg")
    plain.fit(table, y, sensitive_features=sex, clients=3)
    assert np.allclose(plain.predict_proba(table), fitted.predict_proba(table))  # one model
    decisions = fitted.predict(table, **options(kind, sex))
    assert set(decisions) == {"no", "yes"}
    assert gap(plain.predict(table), sex) > 0.2
    spread = 0.05 if kind == "derived" else 0.001  # coins
    assert gap(decisions, sex) <= 0.02 + spread
    audited = fitted.audit_.to_dict()["accuracy"]["rate"]
    assert audited == pytest.approx((decisions == y).mean())
    assert (decisions == y).mean() > 0.6
    assert gap(fitted.predict(table, **options(kind, sex)), sex) == gap(decisions, sex)
    path = fitted.save(tmp_path / "model.safetensors")
    assert name_rule_file(path).stat().st_mode & 0o777 == 0o600
    again = FairClassifier.load(path)
    assert (again.predict(table, **options(kind, sex)) == decisions).all()


def test_a_blind_rule_sees_no_group_and_costs_more_than_thresholds() -> None:
    table, y, sex = make_people()
    found = {}
    for kind in ("thresholds", "blind"):
        fitted = FairClassifier(target=0.0, lr=0.05, rounds=20, postprocess=kind)
        fitted.fit(table, y, sensitive_features=sex, clients=3)
        found[kind] = (fitted.predict(table, **options(kind, sex)) == y).mean()
        assert gap(fitted.predict(table, **options(kind, sex)), sex) < 0.01
    assert 0.5 < found["blind"] <= found["thresholds"] + 0.01
    assert fitted.rule_ is not None and not fitted.rule_.attributes
    with pytest.raises(FedgftError, match="group-blind: it must not see them"):
        fitted.predict(table, sensitive_features=sex)
    with pytest.raises(FedgftError, match=r"'sex'.*tells the group of every row"):
        known = table.with_columns(sex=pl.Series(sex))
        FairClassifier(postprocess="blind", lr=0.05, rounds=5).fit(known, y, sensitive_features=sex)

    for features in ([1.0, 2.0], np.full((2, 3), np.nan), np.full((2, 3), "x")):
        with pytest.raises(FedgftError, match="features") as wrong:
            fitted.rule_.decide([0.1, 0.2], features=np.array(features))
        assert "\n" not in str(wrong.value)


def test_the_rule_of_another_model_is_refused(tmp_path) -> None:
    table, y, sex = make_people(400)
    paths = []
    for name, kind, labels in (
        ("a", "thresholds", y),
        ("b", "blind", y),
        ("c", "thresholds", np.where(y == "yes", "good", "bad")),
    ):
        fitted = FairClassifier(lr=0.05, rounds=5, postprocess=kind)
        fitted.fit(table, labels, sensitive_features=sex)
        paths.append(fitted.save(tmp_path / f"{name}.safetensors"))
    for model, other in ((0, 1), (1, 0), (0, 2)):
        mine = name_rule_file(paths[model])
        kept = mine.read_bytes()
        mine.write_bytes(name_rule_file(paths[other]).read_bytes())
        with pytest.raises(FedgftError, match="is the rule of another model"):
            FairClassifier.load(paths[model])
        mine.write_bytes(kept)


@pytest.mark.parametrize("metric", ["eop", "eo", "fpr", "acc", "sp+eop"])
def test_a_blind_rule_takes_every_proper_metric(metric: str) -> None:
    table, y, sex = make_people()
    fitted = FairClassifier(metric=metric, target=0.03, lr=0.05, rounds=20, postprocess="blind")
    fitted.fit(table, y, sensitive_features=sex, clients=2)
    decided = fitted.predict(table)
    sums = fedgft.measure(y, decided, sensitive_features=sex)
    found = fedgft.audit(sums).to_dict()["metrics"]
    for name in metric.split("+"):
        assert found[name]["gap"] <= 0.031


def test_wrong_uses_are_refused() -> None:
    table, y, sex = make_people(400)

    def fit(**changes):
        made = FairClassifier(lr=0.05, rounds=10, **changes)
        return made.fit(table, y, sensitive_features=sex)

    with pytest.raises(FedgftError, match="choose from thresholds, blind, derived"):
        fit(postprocess="magic")
    with pytest.raises(FedgftError, match="keeps the target") as wrong:
        fit(postprocess="blind", method="lrw")
    assert wrong.value.field == "method"
    with pytest.raises(FedgftError, match="sensitive_features is missing"):
        FairClassifier(postprocess="blind", lr=0.05, rounds=2).fit(table, y)
    with pytest.raises(FedgftError, match="two classes, y has 3"):
        FairClassifier(postprocess="blind", lr=0.05, rounds=2).fit(
            table, np.arange(400) % 3, sensitive_features=sex
        )
    fitted = fit(postprocess="thresholds")
    with pytest.raises(FedgftError, match="sensitive_features is missing"):
        fitted.predict(table)
    with pytest.raises(FedgftError, match=r"'x'.*a group that the rule does not know"):
        fitted.predict(table, sensitive_features=np.where(sex == "f", "f", "x"))
    with pytest.raises(FedgftError, match="postprocess is None"):
        fit(method="fedavg").predict(table, sensitive_features=sex)
    with pytest.raises(FedgftError, match="ids is missing"):
        fit(postprocess="derived").predict(table, sensitive_features=sex)


# Studies


@pytest.fixture(scope="module")
def people(tmp_path_factory) -> str:
    """A table as a file."""
    table, y, sex = make_people(1500)
    path = tmp_path_factory.mktemp("people") / "people.csv"
    table.with_columns(sex=pl.Series(sex), repaid=pl.Series(y)).write_csv(path)
    return str(path)


def test_rules_have_rows_beside_trained_methods(people: str, capsys, tmp_path) -> None:
    """The gap of each rule is within the target on the clients' rows; FedAvg's is not."""
    task = (people, "--label", "repaid", "--group", "sex", "--clients", "3", "--lr", "0.05")
    size = ("--seeds", "2", "--rounds", "5", "--target", "0.02", "--json")
    code, out, err = run(
        capsys, "compare", *task, *size, "--methods", "fedavg", *KINDS, "--out", str(tmp_path / "r")
    )
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)}
    assert list(rows) == ["fedavg", *KINDS] and rows["fedavg"]["gap_hard"] > 0.15
    for kind in KINDS:
        assert rows[kind]["gap_hard"] <= 0.0201 and rows[kind]["reached"] == 2
        assert rows[kind]["gap_soft"] is None and rows[kind]["target"] == 0.02
        assert set(rows[kind]) == set(rows["fedavg"])
        assert 0.5 < rows[kind]["accuracy"] < rows["fedavg"]["accuracy"] + 0.05
    kept = pl.read_parquet(tmp_path / "r" / "rows.parquet")
    assert kept["method"].to_list() == ["fedavg", *KINDS]
    code, out, err = run(capsys, "compare", *task, *size[:-1], "--methods", "blind")
    assert code == 0 and "blind rule: a gap of at most 2.0 points" in " ".join(out.split()), err


def test_rules_are_curves_of_a_frontier(people: str, capsys, tmp_path) -> None:
    task = (people, "--label", "repaid", "--group", "sex", "--clients", "3", "--lr", "0.05")
    size = ("--seeds", "2", "--rounds", "5", "--points", "3", "--out", str(tmp_path / "f"))
    code, out, err = run(capsys, "frontier", *task, *size, "--methods", *KINDS, "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    for kind in KINDS:
        mine = [row for row in rows if row["method"] == kind]
        assert len(mine) == 3
        for row in mine:
            assert row["gap_hard"] <= row["strength"] + 0.001


def test_a_row_of_a_study_is_that_of_the_rule_on_its_rows() -> None:
    """Decisions of `fit_rule` on the clients' rows, counted here once more."""
    table, y, sex = make_people(1200)
    data = fedgft.load(
        table.with_columns(sex=pl.Series(sex), repaid=pl.Series(y)), label="repaid", group="sex"
    )
    study = Study(data, get_protocol("heldout"), [3], clients=2)
    study = replace(study, protocol=replace(study.protocol, lr=(0.05,), target=(0.03,)))
    plain = study.run(0.5, "fedavg", get_metric("eop"))
    found = rule_row(study, plain, "thresholds", get_metric("eop"))
    (federation,) = plain.federations
    model = plain.history.model()
    raw = federation.dataset.features * federation.dataset.scale + federation.dataset.center
    scores = model.predict_proba(raw)[:, 1]
    rule = fit_rule(federation, scores, "thresholds", target={get_metric("eop"): 0.03})
    rows = federation.test
    decided = rule.decide(scores[rows], sex[rows])
    truth = y[rows] == "yes"
    assert found["accuracy"] == pytest.approx((decided == truth).mean(), abs=2e-3)
    rates = [decided[truth & (sex[rows] == g)].mean() for g in ("f", "m")]
    assert found["gap_hard_test"] == pytest.approx(abs(rates[0] - rates[1]), abs=5e-3)


def test_rules_that_a_study_cannot_fit_are_refused(people: str, capsys) -> None:
    task = (people, "--label", "repaid", "--group", "sex", "--clients", "3", "--seeds", "1")
    for more, says in (
        (("--keep-group", "--methods", "blind"), "--methods blind: the column 'sex' tells"),
        (("--metrics", "predictive-parity", "--methods", "derived"), "not predictive-parity"),
        (("--methods", "nothing"), "--methods"),
    ):
        code, _, err = run(capsys, "compare", *task, *more)
        assert code == 2 and says in err and len(err.strip().splitlines()) == 1, err
