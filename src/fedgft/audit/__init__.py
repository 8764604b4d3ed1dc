"""Measure a model's fairness over data that cannot be pooled: sums leave a site, rows do not."""

from fedgft.audit.measurement import measure, measure_file
from fedgft.audit.report import Audit, audit
from fedgft.audit.site_file import read_sums, write_sums
from fedgft.sums import SiteSums, merge

__all__ = [
    "Audit",
    "SiteSums",
    "audit",
    "measure",
    "measure_file",
    "merge",
    "read_sums",
    "write_sums",
]
