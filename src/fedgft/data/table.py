"""A user's own table, CSV or Parquet, as a data set.

Nothing is guessed that can be said: the label, the group and the client are columns the user
names. What is decided here (a missing group, a filled-in number) is written into the notes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedgft.data.dataset import Dataset
from fedgft.data.encoding import Encoder
from fedgft.data.roles import Roles, check_roles, clients_of, groups_of, labels_of, test_of
from fedgft.types import FedgftError

if TYPE_CHECKING:
    import polars as pl


def load_table(
    path: str | Path,
    *,
    label: str,
    group: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    positive: str | None = None,
) -> Dataset:
    """Read a table. `positive` names the label value that is class 1 of the two."""
    roles = Roles(label, group, client, split, positive)
    return from_frame(read_frame(path), Path(path).stem, roles=roles, source=str(path))


def read_frame(path: str | Path) -> "pl.DataFrame":
    """The raw columns of a CSV or Parquet file, told apart by the ending."""
    file = Path(path)
    ending = file.suffix.lower()
    if ending not in (".csv", ".parquet"):
        raise FedgftError(f"{path}: the ending must be .csv or .parquet")
    if not file.is_file():
        raise FedgftError(f"{path}: no such file")
    if file.stat().st_size == 0:
        raise FedgftError(f"{path}: the file is empty")
    frame = _parse(file, ending)
    if frame.height == 0:
        raise FedgftError(f"{path}: the file has no rows")
    return frame


def from_frame(
    frame: "pl.DataFrame", name: str, *, roles: Roles, source: str | None = None
) -> Dataset:
    """A data set from a frame in memory; `source` is what errors call it."""
    source = source or name
    check_roles(frame, roles, source=source)
    labels, classes = labels_of(frame, roles, source=source)
    groups, group_names, group_notes = groups_of(frame, roles, source=source)
    clients, client_names = clients_of(frame, roles, source=source)
    test = test_of(frame, roles, source=source)
    encoder = _fit(frame if test is None else frame.filter(~test), roles, source=source)
    features, notes = encoder.encode(frame, source=source)
    return Dataset(
        name=name,
        features=features,
        labels=labels,
        groups=groups,
        columns=encoder.columns,
        classes=classes,
        group_names=group_names,
        clients=clients,
        client_names=client_names,
        test=test,
        encoder=encoder,
        notes=(*group_notes, *notes),
    )


def _fit(training: "pl.DataFrame", roles: Roles, *, source: str) -> Encoder:
    """Where the user brings a split, levels and means are those of the training rows alone."""
    columns = [column for column in training.columns if column not in roles.aside]
    if not columns:
        raise FedgftError(f"{source}: no column is left to learn from")
    return Encoder.fit(training, columns, source=source)


def _parse(file: Path, ending: str) -> "pl.DataFrame":
    import polars as pl

    try:
        if ending == ".parquet":
            return pl.read_parquet(file)
        return pl.read_csv(file, infer_schema_length=None, null_values=["NA", "N/A"])
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        raise FedgftError(f"{file}: cannot be read as {ending[1:].upper()}: {reason}") from None
