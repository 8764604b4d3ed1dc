"""Measure a model's fairness over data that cannot be pooled: sums leave a site, rows do not."""

from fedgft.errors import import_on_use

# A study needs the thresholds of this package, and not its readers of tables. `__init__.pyi` lists
# these names with their types.
_MODULES = {
    "Audit": "fedgft.auditing.report",
    "Comparison": "fedgft.auditing.comparison",
    "Estimate": "fedgft.auditing.audit_results",
    "Gap": "fedgft.auditing.audit_results",
    "Rate": "fedgft.auditing.audit_results",
    "Monitor": "fedgft.auditing.monitoring",
    "RegressionAudit": "fedgft.auditing.regression",
    "RegressionSums": "fedgft.site_sums.regression_sums",
    "Results": "fedgft.auditing.audit_results",
    "Site": "fedgft.auditing.audit_results",
    "SiteGap": "fedgft.auditing.audit_results",
    "SiteSums": "fedgft.site_sums",
    "audit": "fedgft.auditing.report",
    "audit_regression": "fedgft.auditing.regression",
    "compare": "fedgft.auditing.comparison",
    "measure": "fedgft.auditing.measurement",
    "measure_counts": "fedgft.auditing.database",
    "measure_database": "fedgft.auditing.database",
    "measure_file": "fedgft.auditing.measurement",
    "measure_regression": "fedgft.auditing.regression_measurement",
    "measure_regression_file": "fedgft.auditing.regression_measurement",
    "measure_regression_sites": "fedgft.auditing.regression_measurement",
    "merge": "fedgft.site_sums",
    "monitor": "fedgft.auditing.monitoring",
    "read_regression_sums": "fedgft.auditing.regression",
    "read_sums": "fedgft.auditing.site_file",
    "write_sums": "fedgft.auditing.site_file",
}
__all__ = list(_MODULES)
__getattr__ = import_on_use(__name__, _MODULES)
