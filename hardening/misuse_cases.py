"""Wrong, odd and unusual calls of the public Python interface, and what each should answer.

A case is a call with one argument replaced. `answer` is what the oracle says: a value, `ANY` where
the arguments are meant to be taken, or None where they mean nothing, and the call must raise.
"""

from pathlib import Path

from misuse_audit import audit_cases, flower_cases, theory_cases
from misuse_columns import function_cases, measure_cases
from misuse_data import dataset_cases, federation_cases, synthetic_cases
from misuse_oracle import Case
from misuse_sums import penalty_cases, tally_cases
from misuse_training import method_cases, settings_cases, simulate_cases


def cases(folder: Path) -> list[Case]:
    """All of them, in a fixed order. `folder` is a place for small files."""
    return [
        *function_cases(),
        *measure_cases(),
        *tally_cases(),
        *penalty_cases(),
        *dataset_cases(),
        *federation_cases(),
        *synthetic_cases(),
        *settings_cases(),
        *method_cases(),
        *simulate_cases(),
        *audit_cases(folder),
        *theory_cases(),
        *flower_cases(),
    ]
