"""Files of earlier versions give the same numbers as before, or are refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.auditing import audit, read_sums
from fedgft.data.schema import Schema
from fedgft.errors import FedgftError
from fedgft.fair_model import load_model
from fedgft.study.cache import Checkpoints

OLD = Path(__file__).parent / "fixtures" / "v0.1.0"
EXPECTED = json.loads((OLD / "expected.json").read_text())
RENAMED = {"cal": "predictive-parity"}


@pytest.mark.parametrize("name", ["linear.safetensors", "mlp.safetensors"])
def test_a_model_of_0_1_0_gives_the_same_predictions(name):
    frame = pl.read_csv(OLD / "loans.csv")
    model = load_model(OLD / name)
    # Equal up to the rounding of matrix products, whose order differs between processors.
    np.testing.assert_allclose(
        model.predict_proba(frame)[:, 1], EXPECTED[name]["score"], rtol=1e-14
    )
    assert model.predict(frame).tolist() == EXPECTED[name]["decision"]


def with_todays_names(value):
    """The parts of an audit, with the name that predictive parity has had since 0.2.0."""
    if isinstance(value, list):
        return [with_todays_names(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {RENAMED.get(key, key): with_todays_names(part) for key, part in value.items()}


@pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning")
@pytest.mark.parametrize("name", ["sums-1.json", "sums-2.json", "sums-2-suppressed.json"])
def test_a_site_file_of_0_1_0_gives_the_same_audit(name):
    found = json.loads(audit(read_sums(OLD / name)).to_json())
    expected = with_todays_names(EXPECTED[name])
    for areas in (found["auc"] or {}).values():
        for area in areas.values():  # 0.1.0 had no intervals of areas
            assert area.pop("low") <= area["auc"] <= area.pop("high")
    assert {key: found[key] for key in expected} == expected


def test_a_schema_of_0_1_0_reads_rows_alike():
    schema = Schema.from_file(OLD / "schema.json")
    expected = EXPECTED["schema.json"]
    assert schema.fingerprint() == expected["fingerprint"]
    features, labels, groups, _ = schema.read(pl.read_csv(OLD / "loans.csv"), source="loans.csv")
    np.testing.assert_array_equal(features, expected["features"])
    assert labels.tolist() == expected["labels"] and groups.tolist() == expected["groups"]


def test_a_checkpoint_of_0_1_0_is_refused_in_one_line(tmp_path):
    """A checkpoint is bound to the version that wrote it: its numbers depend on the code."""
    shutil.copytree(OLD / "checkpoints", tmp_path / "checkpoints")
    kept = Checkpoints(tmp_path / "checkpoints", resume=True)
    with pytest.raises(FedgftError, match="another version") as caught:
        kept.get("0" * 32)
    assert "\n" not in str(caught.value) and caught.value.field == "resume"
