"""The server asks every site for a file of sums about the finished model, and checks the replies.

A reply that is damaged, or that uses another node's name, is left out with a warning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.messages import REPORT, Replies, Request, make_query, make_request, warn
from fedgft.flower.strategy import FairStrategy
from fedgft.formatting import one_line
from fedgft.site_sums import SiteSums


class SiteFile(NamedTuple):
    """A site's file of sums: the node that sent it, its text, and what the text says."""

    node: int
    text: str
    sums: SiteSums


@dataclass(frozen=True, eq=False)
class FinalModel:
    """The final model of a run, and the channel to the sites.

    Parameters
    ----------
    grid
        Flower's grid.
    arrays
        The model.
    strategy
        The strategy that trained it; it knows the sites.
    config
        The settings that sites receive with each message.
    timeout
        Seconds to wait for replies.
    """

    grid: Grid
    arrays: ArrayRecord
    strategy: FairStrategy
    config: ConfigRecord
    timeout: float

    def ask(
        self,
        kind: str,
        what: str,
        *,
        make_extras: Callable[[int], Request] = lambda node: {},
        check: Callable[[int, str, SiteSums], None] = lambda node, site, sums: None,
    ) -> dict[str, SiteFile]:
        """Ask all sites for a file of sums.

        Parameters
        ----------
        kind
            The kind of the message, such as `REPORT`.
        what
            What the file is called in warnings, such as "report".
        make_extras
            Returns what the request to a node holds besides the privacy settings.
        check
            `check(node, site, sums)` raises a `FedgftError` for sums that cannot be true.

        Returns
        -------
        dict
            Site -> its file. Sites that do not answer are missing.
        """
        owners = self.strategy.aggregator.validator.owners
        privacy = self.strategy.budget.to_request("hard")
        request = make_request(None, None, statistics="none", privacy=privacy)
        messages = [
            make_query(self.arrays, self.config, request | make_extras(node), node, f"query.{kind}")
            for node in sorted(self.grid.get_node_ids())
        ]
        replies = Replies.of(self.grid.send_and_receive(messages, timeout=self.timeout))
        files: dict[str, SiteFile] = {}
        for node, record in sorted(replies.take().items()):
            try:
                found = _read(node, record, what)
                (site,) = found.sums.sites
                check(node, site, found.sums)
            except (FedgftError, KeyError, TypeError, ValueError) as error:
                warn(f"a {what} is left out: {one_line(error)}")
                continue
            if site in files or owners.get(site, node) != node:
                name = one_line(site, 100)
                warn(f"the {what} of node {node} is left out: '{name}' is another node's name")
            else:
                files[site] = found
        return files


def _read(node: int, record: Any, what: str) -> SiteFile:
    text = str(record["sums"])
    return SiteFile(node, text, SiteSums.from_json(text, source=f"the {what} of node {node}"))


def collect_reports(model: FinalModel) -> dict[str, SiteFile]:
    """Ask all sites for their files of sums on held-out rows.

    Returns
    -------
    dict
        Site -> its file. Sites that do not answer are missing, and so is a report under a name that
        belongs to another node.
    """
    return model.ask(REPORT, "report")
