"""What travels beside the model: sums up, prices down.

Up, in a client's reply, in a record named "fedgft": the tally of a model on its rows, by label and
group. Down, in the server's message, under the prefix "fedgft." in its configuration (Flower's
mods insist on a single one): the price of each score, by label and group. By the time it reaches a
client, any metric, penalty or target is a price, so clients need to know none of them, and the
server can change its mind about all of them without asking anybody to install anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedgft.errors import FedgftError
from fedgft.layout import printable
from fedgft.metrics import Tally
from fedgft.types import Price

RECORD = "fedgft"
PREFIX = "fedgft."
TRAINED = "fedgft.trained"  # of the locally trained model, where a weighting looks at it
QUERY = "query.fedgft"
REPORT = "fedgft_report"
VERSION = 1
Request = dict[str, Any]
MOST_NAMES = 1000  # of classes, and of groups
MOST_CELLS = 10_000  # numbers in one table of a tally


@dataclass(frozen=True)
class Names:
    """What label 0, 1, ... and group 0, 1, ... stand for, the same at every site."""

    classes: tuple[str, ...]
    groups: tuple[str, ...]

    @classmethod
    def of(cls, classes: int | Sequence[str], groups: int | Sequence[str]) -> "Names":
        return cls(_named(classes, "classes"), _named(groups, "groups"))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a table of prices or sums: labels, groups (the last: not recorded), classes."""
        return len(self.classes), len(self.groups) + 1, len(self.classes)

    def check(self, other: "Names", *, site: str) -> None:
        """The same names in the same order, or nothing that is added up means anything."""
        for what in ("classes", "groups"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours != theirs:
                raise FedgftError(
                    f"site '{site}' has the {what} {', '.join(theirs)}; the federation has "
                    f"{', '.join(ours)}, in this order: rename them at the site"
                )


def _named(names: int | Sequence[str], what: str) -> tuple[str, ...]:
    found = tuple(map(str, range(names) if isinstance(names, int) else names))
    if len(found) < 2 or len(set(found)) < len(found):
        raise FedgftError(f"{what} must be at least two different names, got {', '.join(found)}")
    return found


@dataclass(frozen=True)
class Report:
    """One client's sums."""

    site: str
    names: Names
    tally: Tally


def pack_report(report: Report) -> ConfigRecord:
    tally = report.tally
    return ConfigRecord({
        "version": VERSION,
        "site": report.site,
        "classes": list(report.names.classes),
        "groups": list(report.names.groups),
        "count": _flat(tally.count), "score": _flat(tally.score), "decision": _flat(tally.decision),
    })  # fmt: skip


def unpack_report(record: Any, *, node: str) -> Report:
    """A client's sums, right in form; whether they can be true is for `checks`."""
    named = record.get("site", node) if isinstance(record, ConfigRecord) else node
    site = printable(" ".join(str(named).split()))[:100]
    if not isinstance(record, ConfigRecord):
        raise FedgftError(f"site '{site}' sent no record of settings under '{RECORD}'")
    check_version(record, f"site '{site}'")
    try:
        names = names_in(record)
    except FedgftError as error:
        raise FedgftError(f"site '{site}': {error}") from None
    classes, cells, _ = names.shape
    shapes = {"count": (classes, cells), "score": names.shape, "decision": names.shape}
    tables = [_table(record, name, shape, site) for name, shape in shapes.items()]
    return Report(site, names, Tally(*tables))


def prices(
    price: Price | None, names: Names | None, *, statistics: str, privacy: dict[str, float]
) -> Request:
    """`statistics`: of which models the reply shall carry sums ("received", "both", "none")."""
    request: Request = {"version": VERSION, "statistics": statistics}
    if names is not None:
        request |= {"classes": list(names.classes), "groups": list(names.groups)}
    if price is not None:
        request["price"] = _flat(np.asarray(price))
    return request | {f"privacy.{key}": float(value) for key, value in privacy.items()}


def put_request(content: RecordDict, request: Request) -> None:
    """Into a copy of the message's configuration: the strategy keeps the original."""
    held = content.config_records
    name = next(iter(held), "config")
    ours = {f"{PREFIX}{key}": value for key, value in request.items()}
    content[name] = ConfigRecord({**held.get(name, {}), **ours})


def request_of(message: Message) -> Request:
    """What the server asks for; nothing where it is not ours."""
    return {
        key.removeprefix(PREFIX): value
        for config in message.content.config_records.values()
        for key, value in config.items()
        if key.startswith(PREFIX)
    }


def price_in(request: Request, names: Names, *, site: str) -> np.ndarray:
    """(c, k, c); zeros before the first constants, and where the server is not ours."""
    if request:
        check_version(request, f"the server (seen from site '{site}')")
    if "classes" in request:
        names_in(request).check(names, site=site)
    if "price" not in request:
        return np.zeros(names.shape)
    found = _table(request, "price", names.shape, f"{site}, from the server")
    if not np.isfinite(found).all():
        raise FedgftError(f"the server (seen from site '{site}') sent prices that are not finite")
    return found


def names_in(record: Any) -> Names:
    lists = [record.get(what) for what in ("classes", "groups")]
    if not all(isinstance(names, list) and len(names) <= MOST_NAMES for names in lists):
        raise FedgftError("no names of classes and groups")
    return Names.of(*(tuple(map(str, names)) for names in lists))


def check_version(record: Any, who: str) -> None:
    found = record.get("version")
    if found != VERSION:
        raise FedgftError(
            f"{who} speaks version {found} of the fairness record, not {VERSION}: "
            "install the same fedgft everywhere"
        )


site_names: dict[int, str] = {}  # node -> site, of the run that this process serves


def name_of(node: int) -> str:
    """The site behind a node, or the node's number where the site is not known."""
    return f"site '{site_names[node]}'" if node in site_names else f"node {node}"


def node_of(message: Message) -> str:
    """Whose reply this is."""
    return name_of(message.metadata.src_node_id)


def _flat(array: np.ndarray) -> list[float]:
    return [float(value) for value in array.ravel()]


def _table(record: Any, name: str, shape: tuple[int, ...], site: str) -> np.ndarray:
    values, size = record.get(name), int(np.prod(shape))
    if not isinstance(values, list) or len(values) != size or size > MOST_CELLS:
        found = len(values) if isinstance(values, list) else "no"
        raise FedgftError(f"site '{site}' sent {found} numbers as '{name}', not {size}")
    if not all(isinstance(value, (int, float)) for value in values):
        raise FedgftError(f"site '{site}' sent something else than numbers as '{name}'")
    return np.array(values, np.float64).reshape(shape)
