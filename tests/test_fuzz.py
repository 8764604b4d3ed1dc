"""For any content of a file or message, a reader returns a value or raises `FedgftError`.

The targets and their seeds are in tests/fuzzing; `hardening/fuzz.py` runs them for longer.
"""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import SEEDS, targets
from fuzzing.mutations import damaged

pytestmark = pytest.mark.slow

TARGETS = targets()
# Those that take long a time; hardening/fuzz.py has more patience.
EXAMPLES = {
    "audit-json": 6,
    "client-reply": 15,
    "secure-reply": 4,
    "section": 8,
    "server-request": 8,
    "site-file": 15,
    "table-csv": 8,
}


@pytest.fixture(autouse=True)
def quiet():
    """Damaged numbers may overflow: what counts is what comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_target_has_seeds_and_they_are_small() -> None:
    assert sorted(TARGETS) == sorted(path.name for path in SEEDS.iterdir())
    assert all(target.seeds() for target in TARGETS.values())
    assert sum(path.stat().st_size for path in SEEDS.rglob("*") if path.is_file()) < 120_000


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_of_our_writers_are_read(name: str) -> None:
    """Otherwise every damaged copy would be refused at the first check."""
    for path in TARGETS[name].seeds("good"):
        TARGETS[name].read(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_earlier_failures_still_pass(name: str) -> None:
    for path in TARGETS[name].seeds("found"):
        TARGETS[name].accepts(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_readers_raise_only_fedgft_errors(name: str) -> None:
    target = TARGETS[name]
    seeds = [path.read_bytes() for path in target.seeds()]

    @settings(
        max_examples=EXAMPLES.get(name, 25), database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        target.accepts(data.draw(damaged(data.draw(st.sampled_from(seeds)), target.form)))

    check()
