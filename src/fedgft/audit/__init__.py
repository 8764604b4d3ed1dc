"""Measure a model's fairness over data that no one may pool: sums leave the sites, no row does."""

from fedgft.audit.measuring import measure, measure_file
from fedgft.audit.sitefile import read_sums, write_sums
from fedgft.audit.summary import Audit, audit
from fedgft.audit.sums import Sums, merge

__all__ = [
    "Audit",
    "Sums",
    "audit",
    "measure",
    "measure_file",
    "merge",
    "read_sums",
    "write_sums",
]
