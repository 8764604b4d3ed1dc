"""The types of the public names, for editors and type checkers; `__init__.py` imports lazily."""

from fedgft.auditing.audit_results import Estimate, Gap, Rate, Results, Site, SiteGap
from fedgft.auditing.comparison import Comparison, compare
from fedgft.auditing.database import measure_counts, measure_database
from fedgft.auditing.measurement import measure, measure_file
from fedgft.auditing.monitoring import Monitor, monitor
from fedgft.auditing.report import Audit, audit
from fedgft.auditing.site_file import read_sums, write_sums
from fedgft.site_sums import SiteSums, merge

__all__ = [
    "Audit",
    "Comparison",
    "Estimate",
    "Gap",
    "Monitor",
    "Rate",
    "Results",
    "Site",
    "SiteGap",
    "SiteSums",
    "audit",
    "compare",
    "measure",
    "measure_counts",
    "measure_database",
    "measure_file",
    "merge",
    "monitor",
    "read_sums",
    "write_sums",
]
