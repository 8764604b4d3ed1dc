"""What messages carry besides the model: clients send sums, and the server sends prices.

A client's reply holds a record named "fedgft": the `Sums` of a model over the client's rows, by
label and group. The server's message holds the price of each score, by label and group, in its
configuration under the prefix "fedgft." (Flower's mods require a single configuration). The server
turns any metric, penalty or target into prices before it sends them. So clients need to know none
of these, and the server can change them without an update of the clients.
"""

import logging
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedgft.errors import FedgftError
from fedgft.formatting import one_line
from fedgft.sums import Names, RecordReader, Sums
from fedgft.types import Price

RECORD = "fedgft"
PREFIX = "fedgft."
TRAINED = "fedgft.trained"  # sums of the locally trained model, if a weighting needs them
QUERY = "query.fedgft"
REPORT = "fedgft_report"
VERSION = 1
MAX_SITE_NAME = 100  # characters
Request = dict[str, Any]
"What the server asks a client for, without the prefix: see `make_request`."
log = logging.getLogger("flwr")  # Flower's logger, so that there is only one log


def warn(text: str) -> None:
    """Write a warning into Flower's log."""
    log.warning("fedgft: %s", text)


def pack_sums(sums: Sums, names: Names, *, site: str) -> ConfigRecord:
    """Return a client's sums as a record of its reply."""
    return ConfigRecord({"version": VERSION, **sums.to_record(names, site=site)})


def unpack_sums(record: Any, *, node: str) -> tuple[str, Names, Sums]:
    """Read a client's sums from its reply; raise a `FedgftError` if their form is wrong.

    Parameters
    ----------
    record
        The reply's content under the name `RECORD`; its form is not checked yet.
    node
        The name to use for a client whose reply holds no name.

    Returns
    -------
    site, names, sums
        The client's name, the names of its classes and groups, and its sums.
    """
    named = record.get("site", node) if isinstance(record, ConfigRecord) else node
    site = one_line(named, MAX_SITE_NAME)
    if not isinstance(record, ConfigRecord):
        raise FedgftError(f"site '{site}' sent no record of settings under '{RECORD}'", kind="data")
    check_version(record, f"site '{site}'")
    reader = RecordReader(record, f"site '{site}'")
    names = Names.from_record(reader)
    return site, names, Sums.from_record(reader, names)


def make_request(
    price: Price | None, names: Names | None, *, statistics: str, privacy: dict[str, float]
) -> Request:
    """Return the server's request.

    Parameters
    ----------
    price
        (c, k, c): the price of each score by label and group; None before there is a price.
    names
        The classes and groups of the federation, if they are known.
    statistics
        The models whose sums the reply must hold: "received", "both" or "none".
    privacy
        The settings of the noise that clients must add, by name.
    """
    request: Request = {"version": VERSION, "statistics": statistics}
    if names is not None:
        request |= {"classes": list(names.classes), "groups": list(names.groups)}
    if price is not None:
        request["price"] = np.asarray(price, np.float64).ravel().tolist()
    return request | {f"privacy.{key}": float(value) for key, value in privacy.items()}


def put_request(content: RecordDict, request: Request) -> None:
    """Add a request to a copy of the message's configuration: the strategy owns the original."""
    configs = content.config_records
    name = next(iter(configs), "config")
    ours = {f"{PREFIX}{key}": value for key, value in request.items()}
    content[name] = ConfigRecord({**configs.get(name, {}), **ours})


def read_request(message: Message) -> Request:
    """Return the request in a message; empty if the server does not use fedgft."""
    return {
        key.removeprefix(PREFIX): value
        for config in message.content.config_records.values()
        for key, value in config.items()
        if key.startswith(PREFIX)
    }


def read_price(request: Request, names: Names, *, site: str) -> np.ndarray:
    """Return the price (c, k, c) in a request; zeros if it has none."""
    server = f"the server (seen from site '{site}')"
    reader = RecordReader(request, server)
    if request:
        check_version(request, server)
    if "classes" in request:
        Names.from_record(reader).check(names, site=site)
    if "price" not in request:
        return np.zeros(names.shape)
    price = reader.array("price", names.shape)
    if not np.isfinite(price).all():
        raise FedgftError(f"{server} sent prices that are not finite", kind="data")
    return price


def check_version(record: Any, sender: str) -> None:
    """Raise a `FedgftError` unless the sender uses the same version of the record."""
    found = record.get("version")
    if found != VERSION:
        problem = f"{sender} uses version {found} of the fairness record, not {VERSION}"
        raise FedgftError(f"{problem}: install the same fedgft everywhere", kind="conflict")
