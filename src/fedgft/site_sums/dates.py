"""The date and the model's version in the file of a site.

A date is that of the measured rows, or the last day of their period: ``2026-03-31``. Sums of
several dates have a span, in the notation of ISO 8601: ``2026-01-31/2026-03-31``.
"""

import datetime
import re
from typing import Any

from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.sums import is_text
from fedgft.validation import format_value

ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
MAX_VERSION = 100  # characters of the version of a model


def check_date(value: Any, *, span: bool = False) -> str:
    """Return a date as ``2026-03-31``; raise a `FedgftError` about `date` for anything else.

    Parameters
    ----------
    value
        A text, or a `datetime.date`. None and "": there is no date, which returns "".
    span
        Whether two dates, the earlier one first, are allowed too: ``2026-01-31/2026-03-31``.
    """
    if isinstance(value, datetime.datetime):
        value = value.date()
    if isinstance(value, datetime.date):
        return value.isoformat()
    if value is None or value == "":
        return ""
    parts = value.split("/") if isinstance(value, str) else []
    days = [_parse_day(part) for part in parts]
    if not 1 <= len(days) <= 1 + span or None in days or days != sorted(set(filter(None, days))):
        text = f"must be a day, such as 2026-03-31, not {format_value(value)}"
        raise FedgftError(text, field="date")
    return value


def _parse_day(text: str) -> datetime.date | None:
    """Return the day that the text names; None if it is not YYYY-MM-DD or no such day exists."""
    if not ISO_DATE.fullmatch(text):
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def check_version(value: Any) -> str:
    """Return the version of a model as a text; raise a `FedgftError` about `model_version`.

    None and "": the version is not stated, which returns "".
    """
    if value is None or value == "":
        return ""
    if not is_text(value) or not value.strip() or value != printable(value):
        text = f"must be a text such as 2.1, not {format_value(value)}"
        raise FedgftError(text, field="model_version")
    if len(value) > MAX_VERSION:
        raise FedgftError(f"must have at most {MAX_VERSION} characters", field="model_version")
    return value.strip()


def combine_dates(first: str, second: str) -> str:
    """Return the span of two dates or spans. A date that is not stated ("") leaves the other.

    >>> combine_dates("2026-03-31", "2026-01-31"), combine_dates("", "2026-01-31")
    ('2026-01-31/2026-03-31', '2026-01-31')
    """
    days = sorted({*first.split("/"), *second.split("/")} - {""})
    return "/".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def describe_dates(dates: str) -> str:
    """Return a date or a span in words: ``2026-01-31 to 2026-03-31``."""
    return dates.replace("/", " to ")


def combine_versions(first: str, second: str) -> str:
    """Return the version that both share; one that is not stated ("") agrees with any.

    Two different versions raise a `FedgftError` of kind "conflict".
    """
    if first and second and first != second:
        text = f"differs: {first!r} and {second!r}; audit one version at a time"
        raise FedgftError(text, field="model_version", kind="conflict")
    return first or second
