"""Find the files of a table: one file, a folder of files, a pattern, or a list of these.

All files are of one kind, CSV or Parquet. A folder stands for all such files in it and below it,
without those that programs for data leave beside the rows: their names begin with _ or a dot.
The folder `bank=north` also states that the column bank holds "north" in all rows of its files.
"""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from fedgft.data.encode import data_error
from fedgft.data.table import TABLE_ENDINGS
from fedgft.errors import FedgftError
from fedgft.store import expand_user, file_error

OTHER_ENDINGS = (  # of files with rows that are not read, and must not be left out silently
    *(".arrow", ".avro", ".bz2", ".feather", ".gz", ".orc", ".tsv", ".xlsx", ".xz", ".zip", ".zst"),
)
MANAGED_FOLDERS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
ICEBERG_ENDING = ".metadata.json"
HIDDEN = ("_", ".")  # the first character of names that are not those of rows
MISSING_FOLDER = "__HIVE_DEFAULT_PARTITION__"  # the value of a folder whose rows have none


class Part(NamedTuple):
    """One file of a table."""

    file: Path
    folder_values: Mapping[str, str | None]  # values of the columns that names of folders state

    @property
    def is_parquet(self) -> bool:
        """Whether the file is Parquet; otherwise it is CSV."""
        return self.file.suffix.lower() == ".parquet"


def find_parts(paths: Sequence[str | Path]) -> list[Part]:
    """Return the files of a table, sorted within each path.

    Parameters
    ----------
    paths
        Files, folders, and glob patterns that the shell has not expanded.

    Raises
    ------
    FedgftError
        A folder or pattern without files, files of both kinds, or a file that is found twice.
    """
    files = [file for path in paths for file in _list_files(path)]
    found: dict[Path, Path] = {}
    for file in files:
        real = file.resolve()
        if real in found:
            also = "" if file == found[real] else f", and as {found[real]}"
            raise file_error(file, f"is named twice{also}: its rows would be counted twice")
        found[real] = file
    kinds = {file.suffix.lower(): file for file in reversed(files)}
    if len(kinds) > 1 and set(kinds) <= set(TABLE_ENDINGS):
        csv, parquet = (kinds[ending] for ending in TABLE_ENDINGS)
        text = f"is CSV, and {parquet} is Parquet; a table has files of one kind: name them with a "
        raise file_error(csv, f"{text}pattern, such as '*{parquet.suffix}'")
    return [Part(file, read_folder_values(file)) for file in files]


def _list_files(path: str | Path) -> list[Path]:
    """Return the files that a path stands for."""
    place = expand_user(path)
    if place.is_dir():
        return _list_folder(place)
    if place.exists() or not glob.has_magic(str(place)):
        if not place.suffix and not place.exists():
            raise file_error(path, "no such file or folder")
        return [place]
    matches = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    files = [f for each in matches for f in (_list_folder(each) if each.is_dir() else [each])]
    if not files:
        raise file_error(path, "no file matches")
    return files


def _list_folder(folder: Path) -> list[Path]:
    """Return the tables in a folder and below it, sorted."""
    files = [file for file in _walk(folder) if not file.name.startswith(HIDDEN)]
    for file in files:
        if file.suffix.lower() in OTHER_ENDINGS:
            text = f"cannot be read; the files in {folder} must be .csv or .parquet"
            raise file_error(file, text)
    tables = [file for file in files if file.suffix.lower() in TABLE_ENDINGS]
    if not tables:
        raise file_error(folder, "a folder without .csv or .parquet files")
    return sorted(tables)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and below it; raise an error where they are not all its rows."""

    def fail(error: OSError) -> None:
        raise file_error(error.filename, f"cannot be read ({error.strerror})") from None

    seen: set[str] = set()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            raise file_error(place, "leads to a folder that is in the table already")
        seen.add(real)
        managed = [MANAGED_FOLDERS[name] for name in folders if name in MANAGED_FOLDERS]
        managed += ["Iceberg"] * any(name.endswith(ICEBERG_ENDING) for name in names)
        if managed:
            text = f"is a table of {managed[0]}, whose files may hold deleted rows: export it"
            raise FedgftError(f"{folder}: {text}", kind="unsupported")
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        yield from (Path(place, name) for name in names)


def read_folder_values(file: Path) -> dict[str, str | None]:
    """Return the columns that the names of a file's folders state, as in bank=north/year=2024.

    Parameters
    ----------
    file
        The path of the file, as the user named it.
    """
    found: dict[str, str | None] = {}
    for folder in file.parts[:-1]:
        name, equals, value = folder.partition("=")
        if not (equals and name):
            continue
        name = unquote(name)
        if name in found:
            raise data_error(file, f"two of its folders state the column '{name}'")
        found[name] = None if value == MISSING_FOLDER else unquote(value)
    return found


def choose_name(paths: Sequence[str | Path]) -> str | None:
    """Return the name of a table: that of its file or folder. None for a pattern or several paths.

    The folder `bank=north` is called north, and `scored.parquet` is called scored.
    """
    if len(paths) != 1:
        return None
    place = expand_user(paths[0])
    if place.is_dir():
        name = place.resolve().name
        name = unquote(name.partition("=")[2]) or name
        return Path(name).stem if name.lower().endswith(TABLE_ENDINGS) else name
    if not place.exists() and glob.has_magic(str(place)):
        return None
    return place.stem
