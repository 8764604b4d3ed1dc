"""What `audit` takes: the sums of sites, or a mapping from the names of sites to rows or sums.

Rows are measured on the spot. All sites have the same classes, so the classes are those of all
sites together: at one site a class may be missing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.auditing.arrays import are_scores, holds_text, to_series
from fedgft.auditing.measurement import measure
from fedgft.auditing.measurement_task import KNOWN_PAIRS
from fedgft.data.encode import as_text
from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.site_sums import (
    MAX_CLASSES,
    MeasurementSpec,
    SiteSums,
    Spellings,
    describe_site,
    group_sort_key,
    merge,
)
from fedgft.site_sums.regression_sums import RegressionSums
from fedgft.site_sums.spelling import LABEL
from fedgft.sums import is_text
from fedgft.validation import as_array, check_instance, format_value

if TYPE_CHECKING:
    Sites = SiteSums | Iterable[SiteSums] | Mapping[str, SiteSums | tuple[Any, Any, Any]]
else:  # `combine_sites` checks what it gets, and its errors name the site
    Sites = Any

MAX_NAME = 60  # most characters of a site's name in a message
NUMBERS = "audit_regression takes RegressionSums"
ROWS = "(y_true, y_pred or scores, sensitive_features)"


def combine_sites(sums: Sites, *, ignore_case: bool = False) -> SiteSums:
    """Return the sums of all sites.

    Parameters
    ----------
    sums
        A `SiteSums`, several of them, or a mapping from the name of a site to its `SiteSums` or to
        its rows: (y_true, y_pred or scores, sensitive_features).
    ignore_case
        Merge names of groups and classes that differ only in case or spaces. By default they are an
        error.
    """
    spellings = Spellings(ignore_case=ignore_case)
    if isinstance(sums, SiteSums):
        return spellings.unify(sums)
    if isinstance(sums, str | Path):
        raise FedgftError(f"`sums` takes sums, not a path: read_sums({str(sums)!r})")
    if isinstance(sums, Mapping):
        if not sums:
            raise FedgftError("`sums` is empty: name at least one site", kind="missing")
        return merge(_measure_sites(sums, spellings))
    if isinstance(sums, RegressionSums):
        raise FedgftError(f"`sums` are of a numeric outcome: {NUMBERS}", kind="conflict")
    if not isinstance(sums, Iterable):
        kinds = f"a SiteSums, a list of them, or a mapping {{site name: {ROWS}}}"
        raise FedgftError(f"`sums` must be {kinds}, not {format_value(sums)}")
    hint = f"or give {{site name: {ROWS}}}"
    parts = (check_instance("sums", part, SiteSums, hint) for part in sums)
    return merge(spellings.unify(part) for part in parts)


def _measure_sites(sites: Mapping[Any, Any], spellings: Spellings) -> Iterator[SiteSums]:
    """Yield the sums of each site, under its name; errors name the site."""
    for name in sites:
        if not is_text(name) or not name.strip():
            problem = f"has the site name {format_value(name)}: a site's name is a text, not empty"
            raise FedgftError(f"`sums` {problem}")
    classes = _find_classes(sites, spellings)
    rows = [given for given in sites.values() if not isinstance(given, SiteSums)]
    scored = any(y_pred is not None and are_scores(y_pred) for _, y_pred, _ in rows)
    first = ""
    spec: MeasurementSpec | None = None
    for name, given in sites.items():
        with _name_site(name):
            if isinstance(given, SiteSums):
                part = _rename(given, name)
            else:
                y_true, y_pred, features = given
                # Scores that are all 0 or 1, as a tree may give at one site, are scores, too.
                certain = scored and as_array("y_pred", y_pred).dtype.kind == "f"
                task: dict[str, Any] = {"scores": y_pred} if certain else {}
                part = measure(
                    y_true,
                    None if certain else y_pred,
                    sensitive_features=features,
                    site=name,
                    classes=classes,
                    ignore_case=spellings.ignore_case,
                    **task,
                )
        part = spellings.unify(part)
        with _name_site(f"{first}' and '{name}" if first else name):
            spec = part.require_spec() if spec is None else spec.combine(part.require_spec())
        first = first or name
        yield part


@contextmanager
def _name_site(name: str) -> Iterator[None]:
    """Put the name of the site into the errors of the block."""
    try:
        yield
    except FedgftError as error:
        text = error.message.removeprefix("measure(): ")
        if error.field == "classes":
            text += "; measure(...) takes them, and its sums can be given instead of the rows"
        where = f"`sums` of site '{printable(name)[: 2 * MAX_NAME]}'"
        raise FedgftError(f"{where}: {text}", field="sums", kind=error.kind) from None


def _rename(sums: SiteSums, name: str) -> SiteSums:
    """Return the sums of one site under the name that the mapping gives to it."""
    if len(sums.sites) != 1:
        raise FedgftError(f"these are the sums of {len(sums.sites)} sites, not of one")
    (known,) = sums.sites
    if known not in ("", name):
        problem = f"its sums are those of site '{printable(known)[:MAX_NAME]}'; use one name"
        raise FedgftError(problem, kind="conflict")
    return sums.named(name)


def _find_classes(sites: Mapping[str, Any], spellings: Spellings) -> tuple[str, ...]:
    """Return the classes of all sites; () where `measure` finds the same ones at every site.

    If some sites are given as sums, their classes are those of all sites. Otherwise, the classes
    are all labels that occur; if there is only one, all decisions are classes too.
    """
    labels: set[str] = set()
    decisions: set[str] = set()
    for name, given in sites.items():
        if isinstance(given, SiteSums):
            if given.spec is not None:
                return given.spec.classes
            continue
        with _name_site(name):
            if not isinstance(given, tuple | list) or len(given) != 3:
                raise FedgftError(f"must be {ROWS} or a SiteSums, not {format_value(given)}")
            y_true, y_pred, _ = given
            texts = sorted(_list_texts("y_true", y_true))
            labels |= set(spellings.unify_names(LABEL, texts, describe_site(name)))
            if y_pred is not None and not are_scores(y_pred):
                texts = sorted(_list_texts("y_pred", y_pred))
                decisions |= set(spellings.unify_names(LABEL, texts, describe_site(name)))
    classes = labels if len(labels) > 1 else labels | decisions
    is_known = any(labels | decisions <= set(pair) for pair in KNOWN_PAIRS)
    if is_known or not 2 <= len(classes) <= MAX_CLASSES:
        return ()
    rows = [given for given in sites.values() if not isinstance(given, SiteSums)]
    if any(holds_text(y_true) for y_true, _, _ in rows):
        return tuple(sorted(classes))
    return tuple(sorted(classes, key=lambda text: group_sort_key((text,))))


def _list_texts(name: str, values: Any) -> set[str]:
    """Return the different values of a column, as text."""
    return set(as_text(to_series(name, values)).drop_nulls().unique())
