"""A user's own table, CSV or Parquet, as a data set.

Nothing is guessed that can be said: the label, the group and the client are columns the user
names. What is decided here (a missing group, a filled-in number) is written into the notes.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedgft.arguments import instance, path_of
from fedgft.data.columns import numbers_as_text
from fedgft.data.dataset import Dataset
from fedgft.data.encoding import Categorical, Encoder
from fedgft.data.roles import (
    Roles,
    check_roles,
    class_note,
    clients_of,
    groups_of,
    labels_of,
    test_of,
)
from fedgft.errors import FedgftError
from fedgft.files import expanded

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"x\x01", b"x\x9c", b"x\xda")  # gzip, zstd, zlib
UTF16 = (b"\xff\xfe", b"\xfe\xff")
MISSING = ["NA", "N/A"]  # in a CSV, beside nothing at all


def load_table(
    path: str | Path,
    *,
    label: str,
    group: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    positive: str | None = None,
    leave_out: Sequence[str] = (),
) -> Dataset:
    """Read a table. `positive` names the label value that is class 1 of the two; columns to
    `leave_out` are no features, whatever else they are."""
    path_of("path", path)
    roles = Roles(label, group, client, split, positive, tuple(leave_out))
    return from_frame(read_frame(path), Path(path).stem, roles=roles, source=str(path))


def read_frame(path: str | Path) -> "pl.DataFrame":
    """The raw columns of a CSV or Parquet file, told apart by the ending."""
    import polars as pl

    file = checked_file(path)
    with readable(file):
        if file.suffix.lower() == ".parquet":
            frame = pl.read_parquet(file, glob=False)
        else:
            frame = pl.read_csv(file, glob=False, infer_schema_length=None, null_values=MISSING)
    if frame.height == 0:
        raise FedgftError(f"{path}: the file has no rows")
    return frame


def read_rows_as_text(path: str | Path) -> list[str]:
    """Every row of a CSV or Parquet file as one line of JSON, in the order of `read_frame`.

    A row's text depends on that row alone. The cells of a CSV are taken as they are written: what
    `read_frame` makes of a column (numbers, words) depends on all its rows. In a Parquet file 1.0
    is written as 1, so that a column of whole numbers stays the same when a missing value turns
    it into floats.
    """
    import polars as pl

    file = checked_file(path)
    with readable(file):
        if file.suffix.lower() == ".parquet":
            frame = pl.read_parquet(file, glob=False).with_columns(
                pl.selectors.numeric().cast(pl.String).str.strip_suffix(".0")
            )
        else:
            frame = pl.read_csv(file, glob=False, infer_schema=False)
        return frame.select(pl.struct(pl.all()).struct.json_encode()).to_series().to_list()


def checked_file(path: str | Path) -> Path:
    """A table of the right kind, its header without repetitions."""
    file = expanded(path)
    ending = file.suffix.lower()
    if ending not in (".csv", ".parquet"):
        raise FedgftError(f"{path}: the ending must be .csv or .parquet")
    if not file.is_file():
        raise FedgftError(f"{path}: no such file")
    if file.stat().st_size == 0:
        raise FedgftError(f"{path}: the file is empty")
    with readable(file):
        foreign = _foreign(file) if ending == ".csv" else None
        twice = _repeated(file) if ending == ".csv" else []
    if foreign:
        raise FedgftError(f"{path}: {foreign}")
    if twice:
        raise FedgftError(f"{file}: column '{twice[0]}' is in the header more than once")
    return file


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """What a reader has to say about a file, in one line. Some damaged files make polars panic,
    which is no `Exception`."""
    from polars.exceptions import PanicException, PolarsError

    try:
        yield
    except FedgftError:
        raise
    except (PolarsError, PanicException, OSError, ValueError, csv.Error) as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        kind = file.suffix[1:].upper()
        raise FedgftError(f"{file}: cannot be read as {kind}: {reason}") from None


def from_frame(
    frame: "pl.DataFrame", name: str, *, roles: Roles, source: str | None = None
) -> Dataset:
    """A data set from a frame in memory; `source` is what errors call it."""
    import polars as pl

    instance("frame", frame, pl.DataFrame, "of a pandas frame: pl.DataFrame(df.to_dict('list'))")
    instance("name", name, str)
    instance("roles", roles, Roles, "for example Roles('repaid', 'sex')")
    if frame.height == 0:
        raise FedgftError("frame has no rows")
    source = source or name
    data = dataset_of(frame, source, roles=roles)
    said = [f"{source}: {class_note(data.classes, roles)}"]
    if roles.leave_out:
        said.append(f"{source}: no feature: {', '.join(map(repr, dict.fromkeys(roles.leave_out)))}")
    return replace(data, name=name, notes=(*said, *data.notes))


def dataset_of(frame: "pl.DataFrame", source: str, *, roles: Roles) -> Dataset:
    """The same, without a note on the classes: those of a public data set are known."""
    check_roles(frame, roles, source=source)
    labels, classes = labels_of(frame, roles, source=source)
    groups, group_names, group_notes = groups_of(frame, roles, source=source)
    clients, client_names = clients_of(frame, roles, source=source)
    test = test_of(frame, roles, source=source)
    encoder = _fit(frame, roles, training=None if test is None else ~test, source=source)
    features, notes = encoder.encode(frame, source=source)
    return Dataset(
        name=source,
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
        notes=(*group_notes, *_type_notes(frame, encoder, source=source), *notes),
    )


def _type_notes(frame: "pl.DataFrame", encoder: Encoder, *, source: str) -> list[str]:
    return [
        f"{source}: text column '{field.name}' holds numbers only: they are taken as "
        f"{len(field.levels)} categories"
        for field in encoder.fields
        if isinstance(field, Categorical) and numbers_as_text(frame[field.name])
    ]


def _fit(
    frame: "pl.DataFrame", roles: Roles, *, training: "np.ndarray | None", source: str
) -> Encoder:
    """Where the user brings a split, levels and means are those of the training rows alone."""
    columns = [column for column in frame.columns if column not in roles.aside]
    if not columns:
        raise FedgftError(f"{source}: no column is left to learn from")
    return Encoder.fit(frame, columns, rows=training, source=source)


def _foreign(file: Path) -> str | None:
    """Polars would unpack a file unasked, past our look at its header, and take UTF-16 as it is."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start.startswith(PACKED):
        return "is compressed; unpack it first"
    return "is UTF-16 text; save it as UTF-8" if start.startswith(UTF16) else None


def _repeated(file: Path) -> list[str]:
    """Names the header has twice: polars would rename one, and a label pass as a feature."""
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        names = next((names for names in csv.reader(lines) if names), [])
    return [name for name, count in Counter(names).items() if count > 1]
