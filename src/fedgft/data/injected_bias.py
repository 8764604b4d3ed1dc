"""Bias that is put into the training rows of some clients, to see whether a method removes it.

FeDa4Fair (Heilmann et al., arXiv 2506.21095) makes clients biased in two ways: a share of the rows
with a given group and label is dropped, or gets the other label. The share is that of the matching
rows of each client, rounded to a whole number of rows (halves up). Each client's rows are drawn
with its own random numbers, so that the other clients make no difference. Test rows stay as they
are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.data.encode import suggest_name
from fedgft.data.partition import INJECTED_BIAS_STREAM
from fedgft.errors import FedgftError
from fedgft.formatting import format_count
from fedgft.settings import check_setting
from fedgft.validation import check_choice, check_instance, check_number, format_value

Injection = Literal["drop", "flip"]
VERBS: dict[str, str] = {"drop": "dropped", "flip": "with a flipped label"}


def inject_bias(
    federation: Federation,
    kind: Injection,
    *,
    share: float,
    clients: Sequence[int | str] | None = None,
    group: int | str | None = None,
    label: int | str | None = None,
    seed: int = 0,
) -> Federation:
    """Drop training rows of some clients, or flip their labels.

    Parameters
    ----------
    federation
        Clients and rows, from `partition`. It stays as it is.
    kind
        "drop": rows are no longer any client's; "flip": rows get the other of two labels.
    share
        Share of the matching rows of each client, from 0 to 1.
    clients
        Numbers of clients, or names of a client column; None (default): all clients.
    group, label
        The group and the label of matching rows, by name or index; None (default): any.
    seed
        Seed of the draw (default: 0).

    Returns
    -------
    Federation
        The same clients. "drop" drops the scaling, which has to come from the remaining rows: call
        `standardize` afterwards. "flip" keeps it, and gives the data set its own labels; runs of
        one `simulate` share their labels, so they may share this federation, but cannot each have
        their own flipped labels. The last of the data set's notes counts the rows.

    Raises
    ------
    FedgftError
        No row matches; a client would lose all its rows; or a row whose label is to be flipped is
        also a test row or another client's.

    Examples
    --------
    >>> import fedgft
    >>> federation = fedgft.partition(fedgft.load("loans"), "column", seed=0)
    >>> where = {"clients": ["east", "south"], "group": "woman", "label": "yes"}
    >>> biased = fedgft.data.inject_bias(federation, "drop", share=0.5, **where)
    >>> biased
    Federation('loans', 3 clients, 31,615 training rows, 14,400 test rows)
    >>> print(biased.dataset.notes[-1])
    injected bias: 1,985 rows dropped at 2 clients (group 'woman', label 'yes')
    """
    check_instance("federation", federation, Federation, "partition() makes one of a Dataset")
    check_choice("kind", kind, tuple(VERBS))
    check_setting("seed", seed)
    if not 0 <= check_number("share", share) <= 1:
        raise FedgftError(f"`share` must lie between 0 and 1, not {share:g}")
    data = federation.dataset
    chosen = _find_clients(federation, clients)
    matches = np.ones(len(data), np.bool_)
    where = []
    for name, value, names, of_rows in (
        ("group", group, data.group_names, data.groups),
        ("label", label, data.classes, data.labels),
    ):
        if value is not None:
            index = _find_index(name, value, names)
            matches &= of_rows == index
            where.append(f"{name} '{names[index]}'")
    selected = {k: _draw_rows(federation, k, matches, share=share, seed=seed) for k in chosen}
    if all(rows is None for rows in selected.values()):
        wanted = f" with {', '.join(where)}" if where else ""
        at = format_count(len(chosen), "client")
        raise FedgftError(f"no training row{wanted} at {at}", kind="data")
    found = {k: rows for k, rows in selected.items() if rows is not None and len(rows)}
    made = _drop(federation, found) if kind == "drop" else _flip(federation, found)
    count = sum(map(len, found.values()))
    text = f"{format_count(count, 'row')} {VERBS[kind]} at {format_count(len(chosen), 'client')}"
    note = f"injected bias: {text}" + (f" ({', '.join(where)})" if where else "")
    return replace(made, dataset=replace(made.dataset, notes=(*made.dataset.notes, note)))


def _find_clients(federation: Federation, clients: Sequence[int | str] | None) -> list[int]:
    """Return the numbers of the clients; each once."""
    if clients is None:
        return list(range(federation.num_clients))
    if isinstance(clients, str) or not len(clients):
        raise FedgftError(f"`clients` must be a list of clients, not {format_value(clients)}")
    names = federation.dataset.client_names
    if len(names) != federation.num_clients:  # the column was not used to make this federation
        names = tuple(map(str, range(federation.num_clients)))
    return sorted({_find_index("clients", client, names) for client in clients})


def _find_index(field: str, value: int | str, names: Sequence[str]) -> int:
    """Return the index of a name; an index stands for itself."""
    if isinstance(value, str):
        if value not in names:
            raise FedgftError(f"`{field}`: there is no '{value}'{suggest_name(value, names)}")
        return names.index(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise FedgftError(f"`{field}` must be a name or an index, not {format_value(value)}")
    if not 0 <= value < len(names):
        raise FedgftError(f"`{field}` must lie between 0 and {len(names) - 1}, not {value}")
    return int(value)


def _draw_rows(
    federation: Federation, k: int, matches: np.ndarray, *, share: float, seed: int
) -> np.ndarray | None:
    """Return the rows of client k that are changed, ascending; None if none of its rows match."""
    rows = np.unique(federation.client(k))
    rows = rows[matches[rows]]
    if not len(rows):
        return None
    rng = np.random.default_rng([seed, INJECTED_BIAS_STREAM, int(federation.keys[k])])
    return np.sort(rng.permutation(rows)[: int(share * len(rows) + 0.5)])


def _drop(federation: Federation, selected: dict[int, np.ndarray]) -> Federation:
    """Return the federation without the selected rows of each client, and without its scaling."""
    is_kept = np.ones(len(federation.rows), np.bool_)
    for k, rows in selected.items():
        held = ~np.isin(federation.client(k), rows)
        if not held.any():
            text = f"client {k} would lose all its {format_count(len(rows), 'row')}"
            raise FedgftError(f"`share`: {text}; lower the share or leave the client out")
        is_kept[federation.offsets[k] : federation.offsets[k + 1]] = held
    before = np.concatenate(([0], np.cumsum(is_kept)))
    offsets = before[federation.offsets]
    rows = federation.rows[is_kept]
    return replace(federation, rows=rows, offsets=offsets, mean=None, spread=None)


def _flip(federation: Federation, selected: dict[int, np.ndarray]) -> Federation:
    """Return the federation with its own labels, flipped in the selected rows of each client."""
    data = federation.dataset
    if len(data.classes) != 2:
        text = f"labels of {len(data.classes)} classes cannot be flipped; drop rows instead"
        raise FedgftError(f"`kind`: {text}", kind="unsupported")
    labels = data.labels.copy()
    owner = np.repeat(np.arange(federation.num_clients), federation.sizes)
    for k, rows in selected.items():
        elsewhere = np.isin(rows, np.concatenate((federation.rows[owner != k], federation.test)))
        if elsewhere.any():
            text = f"row {rows[elsewhere][0]} of client {k} is also a test row or another client's"
            problem = f"{text}, whose label would change, too; use `protocol_test` disjoint"
            raise FedgftError(f"`kind`: {problem}", kind="conflict")
        labels[rows] = 1 - labels[rows]
    return replace(federation, dataset=replace(data, labels=labels))
