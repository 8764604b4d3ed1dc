"""Find the dated files of sites in a folder, and put them together by period.

The date in a file decides. Only if a file has none, the date in its name or in the names of its
folders counts: ``2026-01/north.json`` and ``north-2026-01.json`` are of 31 January 2026.
"""

import calendar
import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedgft.auditing.site_file import find_nested_files, read_sums
from fedgft.errors import FedgftError
from fedgft.formatting import format_count, printable
from fedgft.site_sums import MeasurementSpec, SiteSums, Spellings, describe_site, merge
from fedgft.site_sums.dates import check_date
from fedgft.store import expand_user
from fedgft.validation import check_instance, format_value

PeriodKind = Literal["date", "week", "month", "quarter", "year"]
DATE_IN_NAME = re.compile(r"(?<!\d)(\d{4})([-_.]?)(\d{2})(?:\2(\d{2}))?(?!\d)", re.ASCII)
ADD_DATE = "measure it with its date, or put the date into its name, as in north-2026-01-31.json"


@dataclass(frozen=True, eq=False)
class DatedSums:
    """The sums of one site and date, and where they are from, for messages."""

    sums: SiteSums
    date: datetime.date
    where: str

    @property
    def site(self) -> str:
        """The name of the site."""
        return next(iter(self.sums.sites))

    @property
    def version(self) -> str:
        """The version of the model; "" if it is not stated."""
        return self.sums.require_spec().model_version


@dataclass(frozen=True, eq=False)
class PeriodSums:
    """The sums of all sites in one period.

    Parameters
    ----------
    label
        The name of the period, such as ``2026-01``.
    date
        The last date of its files.
    version
        The version of the model; "" if no file has stated one so far.
    sums
        The sums of all sites, without histograms.
    """

    label: str
    date: datetime.date
    version: str
    sums: SiteSums


@dataclass
class FolderReader:
    """Reads dated files and collects what a reader of the results should know about them.

    Parameters
    ----------
    today
        The last date that a file may have.
    """

    today: datetime.date
    dated_by_name: int = 0
    differs_from_name: int = 0

    def read(
        self, folder: str | Path, on_file: Callable[[int, int], None] | None = None
    ) -> list[DatedSums]:
        """Return the sums of all files in a folder and in the folders inside it.

        `on_file` is called after each file with the number of files read, and of all files.
        """
        root = expand_user(folder)
        paths = find_nested_files(root)
        found = []
        for i, path in enumerate(paths, 1):
            sums = read_sums(path)
            found.append(self._add_date(sums, str(path), path.relative_to(root)))
            if on_file:
                on_file(i, len(paths))
        return found

    def take(self, parts: Iterable[Any]) -> list[DatedSums]:
        """Return sums that are in memory, each of one site, with their dates."""
        out = []
        for part in parts:
            sums = check_instance("source", part, SiteSums, "or name a folder")
            if len(sums.sites) != 1:
                text = f"holds the sums of {len(sums.sites)} sites; give one per site and date"
                raise FedgftError(text, field="source")
            out.append(self._add_date(sums, describe_site(next(iter(sums.sites))), Path()))
        return out

    def notes(self) -> list[str]:
        """Return sentences about dates that are not those of the files."""
        out = []
        if self.dated_by_name:
            files = format_count(self.dated_by_name, "file")
            out.append(f"{files} without a date: the date in the name of the file or folder counts")
        if self.differs_from_name:
            files = format_count(self.differs_from_name, "file")
            out.append(f"{files} with another date in the name: the date in the file counts")
        return out

    def _add_date(self, sums: SiteSums, where: str, name: Path) -> DatedSums:
        """Return the sums with their date: that of the file or, if it has none, of its name."""
        stated = sums.require_spec().date.rpartition("/")[2]
        named = find_date(name)
        if not stated and named is None:
            looks_dated = any(DATE_IN_NAME.search(part) for part in name.parts)
            problem = "has a name with a date that does not exist" if looks_dated else "has no date"
            text = f"{printable(where)}: {problem}; {ADD_DATE}"
            raise FedgftError(text, kind="missing")
        date = datetime.date.fromisoformat(stated) if stated else named
        assert date is not None
        self.dated_by_name += not stated
        self.differs_from_name += bool(stated) and named not in (None, date)
        if date > self.today:
            text = f"{printable(where)}: is dated {date}, which is in the future; correct its date"
            raise FedgftError(text, kind="data")
        slim = replace(
            sums, histogram={}, bin_error={}, bin_rows={}
        )  # decisions need no histograms
        return DatedSums(slim, date, printable(where))


def find_date(path: Path) -> datetime.date | None:
    """Return the date in the name of a file, or else in that of the innermost folder with one.

    A month stands for its last day.

    >>> find_date(Path("2026-01/north.json")), find_date(Path("2026-01/north-20260115.json"))
    (datetime.date(2026, 1, 31), datetime.date(2026, 1, 15))
    """
    for part in (path.stem, *reversed(path.parts[:-1])):
        for year, _, month, day in DATE_IN_NAME.findall(part):
            try:
                last = calendar.monthrange(int(year), int(month))[1]
                return datetime.date(int(year), int(month), int(day or last))
            except ValueError:  # no such month or day
                continue
    return None


def name_period(date: datetime.date, kind: PeriodKind) -> str:
    """Return the name of the period of a date.

    >>> [name_period(datetime.date(2026, 1, 31), kind) for kind in ("date", "week", "quarter")]
    ['2026-01-31', '2026-W05', '2026-Q1']
    """
    if kind == "week":
        year, week, _ = date.isocalendar()
        return f"{year}-W{week:02d}"
    names = {
        "date": date.isoformat(),
        "month": f"{date:%Y-%m}",
        "quarter": f"{date.year}-Q{(date.month + 2) // 3}",
        "year": f"{date.year}",
    }
    return names[kind]


def group_periods(
    files: Sequence[DatedSums], kind: PeriodKind, *, ignore_case: bool
) -> tuple[list[PeriodSums], list[str]]:
    """Return the periods in order, and notes about spellings and thresholds.

    Files that cannot be compared raise a `FedgftError` that names them.
    """
    spellings = Spellings(ignore_case=ignore_case)
    checked = _ComparableFiles()
    by_label: dict[str, list[DatedSums]] = {}
    for each in sorted(files, key=lambda file: (file.date, file.site, file.where)):
        unified = replace(each, sums=spellings.unify(each.sums, each.where))
        by_label.setdefault(name_period(each.date, kind), []).append(unified)
    periods = []
    version = ""
    for label, parts in by_label.items():
        _refuse_repeated(parts)
        version = _find_version(parts, label) or version
        checked.check(parts, version)
        sums = merge(part.sums for part in parts)
        periods.append(PeriodSums(label, parts[-1].date, version, sums))
    _refuse_returning_versions(periods)
    return periods, [*spellings.notes, *checked.notes]


def _refuse_repeated(parts: Sequence[DatedSums]) -> None:
    """Raise a `FedgftError` if two files are of the same site and date."""
    seen: dict[tuple[str, datetime.date], DatedSums] = {}
    for part in parts:
        other = seen.setdefault((part.site, part.date), part)
        if other is not part:
            text = f"are both of {describe_site(part.site)} and {part.date}; remove one"
            raise FedgftError(f"{other.where} and {part.where}: {text}", kind="conflict")


def _find_version(parts: Sequence[DatedSums], label: str) -> str:
    """Return the version that the files of a period state; "" if none does."""
    stated = [part for part in parts if part.version]
    for part in stated:
        first = stated[0]
        if part.version != first.version:
            raise FedgftError(
                f"{first.where} and {part.where}: model versions {first.version!r} and "
                f"{part.version!r} in one period, {label}; a shorter `period` separates them",
                kind="conflict",
            )
    return stated[0].version if stated else ""


def _refuse_returning_versions(periods: Sequence[PeriodSums]) -> None:
    """Raise a `FedgftError` if the dates go back: an earlier version follows a later one."""
    first_of: dict[str, int] = {}
    for i, period in enumerate(periods):
        start = first_of.setdefault(period.version, i)
        between = next((p for p in periods[start:i] if p.version != period.version), None)
        if between is not None:
            raise FedgftError(
                f"{period.label}: model version {period.version!r} comes back after "
                f"{between.version!r} ({between.label}); correct the dates, or give it a new name",
                kind="conflict",
            )


@dataclass
class _ComparableFiles:
    """Checks that all files measured the same; a new version may have another threshold."""

    notes: list[str] = field(default_factory=list)
    _first: DatedSums | None = None
    _spec: MeasurementSpec | None = None
    _version: str = ""

    def check(self, parts: Sequence[DatedSums], version: str) -> None:
        """Check the files of the next period."""
        for part in parts:
            spec = replace(part.sums.require_spec(), model_version="")
            if self._spec is None or self._first is None:
                self._spec, self._first, self._version = spec, part, version
            if version != self._version and spec.threshold != self._spec.threshold:
                old, new = self._spec.threshold, spec.threshold
                self.notes.append(f"version {version}: threshold {new} instead of {old}")
                self._spec = replace(self._spec, threshold=new)
            self._version = version
            try:
                self._spec = self._spec.combine(spec)
            except FedgftError as error:
                text = f"{self._first.where} and {part.where}: {error}"
                raise FedgftError(text, kind="conflict") from None


def check_since(value: Any) -> datetime.date | None:
    """Return the first date whose alarms count; None: only those of the last period."""
    try:
        text = check_date(value)
    except FedgftError:
        problem = f"must be a day, such as 2026-03-31, not {format_value(value)}"
        raise FedgftError(problem, field="since") from None
    return datetime.date.fromisoformat(text) if text else None
