"""The sums that a site sends: their tables, their addition, and their text.

`SiteSums` holds what any number of sites measured, one `SiteTables` per site. A `SiteTables` is not
a `fedgft.sums.Sums`: it has one table per named group, and the groups of sites differ. Its cells
are also finer: sums of scores are kept by decision too, and each count has its own noise, or its
own range if it is withheld. Both are needed to check a file and to write it again.
`fedgft.auditing.rates` adds the cells up to one `Sums` of all sites.
"""

from fedgft.site_sums.json_writer import MIN_BIN, MIN_SUM_ROWS
from fedgft.site_sums.site_sums import SiteSums, merge
from fedgft.site_sums.spelling import Spellings, describe_site
from fedgft.site_sums.tables import (
    COUNT,
    MAX_BINS,
    MAX_CLASSES,
    NOISE,
    ROWS,
    SCORES,
    SLACK,
    SQUARES,
    Group,
    MeasurementSpec,
    Privacy,
    RandomizedGroups,
    SiteTables,
    group_sort_key,
)

__all__ = [
    "COUNT",
    "MAX_BINS",
    "MAX_CLASSES",
    "MIN_BIN",
    "MIN_SUM_ROWS",
    "NOISE",
    "ROWS",
    "SCORES",
    "SLACK",
    "SQUARES",
    "Group",
    "MeasurementSpec",
    "Privacy",
    "RandomizedGroups",
    "SiteSums",
    "SiteTables",
    "Spellings",
    "describe_site",
    "group_sort_key",
    "merge",
]
