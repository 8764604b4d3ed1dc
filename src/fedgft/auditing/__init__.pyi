"""The types of the public names, for editors and type checkers; `__init__.py` imports lazily."""

from fedgft.auditing.audit_results import Estimate, Gap, Rate, Results, Site, SiteGap
from fedgft.auditing.comparison import Comparison, compare
from fedgft.auditing.database import measure_counts, measure_database
from fedgft.auditing.measurement import measure, measure_file
from fedgft.auditing.monitoring import Monitor, monitor
from fedgft.auditing.regression import RegressionAudit, audit_regression, read_regression_sums
from fedgft.auditing.regression_measurement import (
    measure_regression,
    measure_regression_file,
    measure_regression_sites,
)
from fedgft.auditing.report import Audit, audit
from fedgft.auditing.site_file import read_sums, write_sums
from fedgft.site_sums import SiteSums, merge
from fedgft.site_sums.regression_sums import RegressionSums

__all__ = [
    "Audit",
    "Comparison",
    "Estimate",
    "Gap",
    "Monitor",
    "Rate",
    "RegressionAudit",
    "RegressionSums",
    "Results",
    "Site",
    "SiteGap",
    "SiteSums",
    "audit",
    "audit_regression",
    "compare",
    "measure",
    "measure_counts",
    "measure_database",
    "measure_file",
    "measure_regression",
    "measure_regression_file",
    "measure_regression_sites",
    "merge",
    "monitor",
    "read_regression_sums",
    "read_sums",
    "write_sums",
]
