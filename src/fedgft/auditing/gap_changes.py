r"""What moved a gap: its change as an exact sum over groups and sites.

The gap of groups a and b in period t is R_at - R_bt, and the rate of a group is R_gt = sum over
sites k of s_gkt r_gkt, where s is the share of the group's rows that are at the site, and r is the
group's rate there. Averages over the periods of a regime have the same form, with s_gk = sum over t
of w_t s_gkt and r_gk = sum of w_t s_gkt r_gkt over s_gk. The change of a group's rate is then

    R'_g - R_g = sum over k of (s'_gk + s_gk)/2 (r'_gk - r_gk)
                             + ((r'_gk + r_gk)/2 - c_g) (s'_gk - s_gk)

(Kitagawa 1955), where c_g = (R'_g + R_g)/2 does not change the sum because shares add up to 1. The
first term is the site's own change, the second that of the mix: its part in a group grew or shrank.
A site that is new or has left has one rate only, so all of its effect is mix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class SiteCounts(NamedTuple):
    """Hits and rows of two groups at each site in one period.

    Parameters
    ----------
    sites
        The names of the sites.
    hits, rows
        (site, 2): numerators and denominators of the rates of the two groups.
    """

    sites: tuple[str, ...]
    hits: np.ndarray
    rows: np.ndarray


class SiteShift(NamedTuple):
    """What one site added to the change of a gap, in the gap's unit.

    Parameters
    ----------
    own
        Through the rates of the two groups at the site.
    mix
        Through the shares of the two groups that are at the site.
    """

    own: float
    mix: float

    @property
    def total(self) -> float:
        """Both parts together."""
        return self.own + self.mix


@dataclass(frozen=True)
class ShiftParts:
    """The change of a gap as sums: over the two groups, and over the sites.

    Parameters
    ----------
    groups
        What each of the two groups added: the change of the first group's rate, and minus the
        change of the second group's rate.
    sites
        What each site added.
    """

    groups: tuple[float, float]
    sites: dict[str, SiteShift]

    @property
    def change(self) -> float:
        """The change of the gap."""
        return sum(self.groups)


@np.errstate(divide="ignore", invalid="ignore")
def split_change(
    before: Sequence[SiteCounts],
    after: Sequence[SiteCounts],
    weights_before: np.ndarray,
    weights_after: np.ndarray,
) -> ShiftParts:
    """Return what each group and each site added to the change of a gap.

    Parameters
    ----------
    before, after
        The counts of each period before and after the change.
    weights_before, weights_after
        (period,): the weights of the periods, which add up to 1. A period without rows of one of
        the groups has the weight 0.
    """
    sites = list(dict.fromkeys(name for part in (*before, *after) for name in part.sites))
    share, hits = _average(before, weights_before, sites)
    share_after, hits_after = _average(after, weights_after, sites)
    rate = np.where(share != 0, hits / share, np.nan)
    rate_after = np.where(share_after != 0, hits_after / share_after, np.nan)
    rate, rate_after = (
        np.nan_to_num(np.where(np.isnan(one), other, one))
        for one, other in ((rate, rate_after), (rate_after, rate))
    )
    center = (hits.sum(0) + hits_after.sum(0)) / 2
    sign = np.array([1.0, -1.0])
    own = sign * (share + share_after) / 2 * (rate_after - rate)
    mix = sign * ((rate + rate_after) / 2 - center) * (share_after - share)
    groups = sign * (hits_after.sum(0) - hits.sum(0))
    return ShiftParts(
        (float(groups[0]), float(groups[1])),
        {name: SiteShift(float(own[k].sum()), float(mix[k].sum())) for k, name in enumerate(sites)},
    )


def _average(
    periods: Sequence[SiteCounts], weights: np.ndarray, sites: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean shares (site, 2) of the groups' rows and hits at each site."""
    position = {name: k for k, name in enumerate(sites)}
    share, hits = np.zeros((2, len(sites), 2))
    for part, weight in zip(periods, weights, strict=True):
        if weight > 0:
            at = [position[name] for name in part.sites]
            total = part.rows.sum(0)
            share[at] += weight * part.rows / total
            hits[at] += weight * part.hits / total
    return share, hits
