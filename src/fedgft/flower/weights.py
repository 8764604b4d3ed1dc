"""FairFed's weights, by site, from the sums of one round: the simulator's own weighting slot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedgft.federated import Cohort, Local
from fedgft.federated.fairfed import FairFed
from fedgft.flower.wire import Report
from fedgft.metrics import stack


@dataclass
class Weights:
    rule: FairFed
    reweigh: bool = True  # clients weigh their rows by label and group, FairFed's local debiasing
    kept: dict[str, float] = field(default_factory=dict)  # site -> wbar, from round to round

    @property
    def trained(self) -> bool:
        """Whether clients must also send the sums of the model that they trained."""
        return self.rule.sees == "trained"

    def of(
        self, received: Mapping[int, Report], trained: Mapping[int, Report] | None
    ) -> dict[int, float]:
        """Node -> weight; those without statistics have none."""
        nodes = [node for node in received if trained is None or node in trained]
        if not nodes:
            return {}
        sites = _distinct({node: received[node].site for node in nodes})
        tally = stack([received[node].tally for node in nodes])
        own = None if trained is None else stack([trained[node].tally for node in nodes])
        rows = tally.rows()
        start = self.rule.init(rows[None])[0]
        state = np.array([[self.kept.get(sites[n], w) for n, w in zip(nodes, start, strict=True)]])
        count = len(nodes)
        cohort = Cohort(
            run=np.zeros(count, int), client=np.arange(count), weight=rows / rows.sum(),
            bounds=np.array([0, count]), full=True,
        )  # fmt: skip
        weight, kept = self.rule.coefficients(state, cohort, Local(tally, own, np.zeros(count)))
        self.kept |= {sites[n]: float(w) for n, w in zip(nodes, kept[0], strict=True)}
        return {node: float(w) for node, w in zip(nodes, weight, strict=True)}


def _distinct(sites: dict[int, str]) -> dict[int, str]:
    """Names of sites where they are different, of nodes where they are not."""
    if len(set(sites.values())) == len(sites):
        return sites
    return {node: f"{site}#{node}" for node, site in sites.items()}
