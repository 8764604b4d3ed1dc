"""Decision rules in `FairClassifier` and in studies: they keep targets, and decide as saved."""

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft import FairClassifier, FedgftError
from fedgft.fair_classifier import name_rule_file

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
    with pytest.raises(FedgftError, match=r"'sex=m'.*tells the group of every row"):
        known = table.with_columns(sex=pl.Series(sex))
        FairClassifier(postprocess="blind", lr=0.05, rounds=5).fit(known, y, sensitive_features=sex)


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
