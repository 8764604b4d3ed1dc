"""Files of sites: readable JSON that contains only sums.

`fedgft.site_sums` writes the text of a file and checks every field when it reads one.
"""

import glob
import json
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import get_args

from fedgft.auditing.report_files import FormName, ReportKind, write_starts
from fedgft.errors import FedgftError
from fedgft.site_sums import MIN_BIN, MeasurementSpec, SiteSums, Spellings, merge
from fedgft.store import expand_user, read_text_file
from fedgft.validation import check_instance

MAX_BYTES = 64 * 2**20  # largest size of a file
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")  # of files with rows
WRITTEN = (*get_args(ReportKind), *get_args(FormName))
REPORT_PREFIXES = tuple(write_starts(name)[2].encode() for name in WRITTEN)
RULE_PREFIX = b'{\n  "format": "fedgft-rule'


def write_sums(sums: SiteSums, path: str | Path, *, min_bin: int = MIN_BIN) -> Path:
    """Write the sums of one site to a file and return its path: see `SiteSums.save`.

    Parameters
    ----------
    sums
        The sums of one site, with a name.
    path
        The path of the file. An existing file is replaced only when the new one is complete.
    min_bin
        The smallest number of rows that a number about scores may cover.
    """
    check_instance("sums", sums, SiteSums, "measure() makes them")
    return sums.save(path, min_bin=min_bin)


def combine_revealed(contents: Iterable[str]) -> dict[str, int]:
    """Return how many counts the files of sites hold, and how many cover only few people.

    The keys are those of the field `reveals` of a file. `cells` and `score_counts` are the numbers
    of counts of people and of scores. `cells_below_10` and `score_counts_below_5` are the numbers
    of those counts that are below 10 and below 5. `smallest_cell` and `smallest_score_count` are
    the smallest counts that are not zero; 0 if there is none.

    Parameters
    ----------
    contents
        The texts of the files.
    """
    total: dict[str, int] = {}
    for text in contents:
        for name, value in json.loads(text)["reveals"].items():
            known = total.get(name, 0)
            if name.startswith("smallest"):
                total[name] = min(filter(None, (known, value)), default=0)
            else:
                total[name] = known + value
    return total


def read_sums(path: str | Path) -> SiteSums:
    """Read and check the file of one site.

    Parameters
    ----------
    path
        A file that `SiteSums.save` or `fedgft measure` wrote.

    Returns
    -------
    SiteSums
        The sums of the site.

    Examples
    --------
    >>> import tempfile
    >>> import fedgft
    >>> sums = fedgft.measure([1, 0], [1, 0], sensitive_features=["f", "m"], site="north")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = sums.save(f"{folder}/north.json")
    ...     fedgft.read_sums(f"{folder}/north.json").rows()
    2.0
    """
    return _read_with_digest(path)[0]


def _read_with_digest(path: str | Path) -> tuple[SiteSums, str]:
    """Return the sums in a file and the SHA-256 of its bytes, which are read once."""
    _refuse_table(expand_user(path))
    content = read_text_file(path, what="a file of sums that fedgft wrote", most=MAX_BYTES)
    sums = SiteSums.from_json(content.decode("utf-8"), source=str(path))
    return sums, sha256(content).hexdigest()


def _refuse_table(file: Path) -> None:
    """Raise a `FedgftError` if the file is a table of rows: a site measures it first."""
    if file.suffix.lower() in TABLE_SUFFIXES and file.is_file():
        command = f"fedgft measure {file} --label ... --group ... --score ... --out "
        text = f"{file}: is a table, not a file of sums; first run: {command}{file.stem}.json"
        raise FedgftError(text, kind="file")


def find_site_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of sites, sorted within each path.

    A path is a file, a folder, or a glob pattern that the shell has not expanded. A folder stands
    for its .json files, except the reports of `fedgft audit`. Rules of `fedgft adjust` are left
    out: they may lie beside the files of the sites.
    """
    found: list[Path] = []
    for path in paths:
        place = expand_user(path)
        inside = [place]
        _refuse_table(place)
        if place.is_dir():
            inside = [f for f in place.glob("*.json") if f.is_file() and not is_report(f)]
        elif not place.exists() and glob.has_magic(str(place)):
            inside = [Path(name) for name in glob.glob(str(place))]
        if not inside:
            problem = "a folder without .json files" if place.is_dir() else "no file matches"
            if place.is_dir():
                for file in sorted(place.iterdir()):
                    _refuse_table(file)
            raise FedgftError(f"{path}: {problem}", kind="file")
        found += sorted(inside)
    rules = [path for path in found if _is_rule(path)]
    if rules and len(rules) == len(found):
        text = f"{rules[0]}: is a decision rule, not a file of sums"
        raise FedgftError(text, kind="file")
    found = [path for path in found if path not in rules] if rules else found
    if not found:
        text = "name the files of sums that the sites made with `fedgft measure`"
        raise FedgftError(text, kind="missing")
    return found


def find_nested_files(folder: Path) -> list[Path]:
    """Return the files of sites in a folder and in the folders inside it, sorted.

    Reports and rules of `fedgft` are left out, and hidden files and folders.
    """
    if not folder.is_dir():
        _refuse_table(folder)
        problem = (
            "is a file; name the folder that it is in" if folder.exists() else "no such folder"
        )
        raise FedgftError(f"{folder}: {problem}", kind="file")
    inside = (path for path in sorted(folder.rglob("*.json")) if path.is_file())
    visible = (p for p in inside if not any(x.startswith(".") for x in p.relative_to(folder).parts))
    found = [path for path in visible if not is_report(path) and not _is_rule(path)]
    if not found:
        text = f"{folder}: holds no files of sums; `fedgft measure --date 2026-03-31` makes them"
        raise FedgftError(text, kind="file")
    return found


def is_report(path: Path) -> bool:
    """Return whether `fedgft audit --out` wrote the file, as a report or a form.

    Such a file may lie in the same folder as the files of the sites.
    """
    with path.open("rb") as file:
        return file.read(40).startswith(REPORT_PREFIXES)


def _is_rule(path: Path) -> bool:
    """Return whether `fedgft adjust` wrote the file."""
    try:
        if not path.is_file():  # a pipe would wait for its other end
            return False
        with path.open("rb") as file:
            return file.read(40).startswith(RULE_PREFIX)
    except OSError:  # reading it as a file of sums says why
        return False


def gather(
    files: Iterable[Path],
    on_file: Callable[[int], None] | None = None,
    *,
    ignore_case: bool = False,
) -> SiteSums:
    """Read files of sites and merge their sums.

    Two files of the same site, or sites that measured different things, are errors. Files are read
    one at a time, because the histograms of ten thousand sites would not fit into memory, but their
    sum does.

    Parameters
    ----------
    files
        One file per site.
    on_file
        Called after each file with the number of files read.
    ignore_case
        Merge names of groups and classes that differ only in case or spaces. By default they are an
        error.
    """
    return merge(read_each_site(files, on_file, ignore_case=ignore_case))


def read_each_site(
    files: Iterable[Path],
    on_file: Callable[[int], None] | None = None,
    *,
    ignore_case: bool = False,
    digests: MutableMapping[str, str] | None = None,
) -> Iterator[SiteSums]:
    """Yield the sums of each file, which is read when its turn comes.

    Two files of the same site, or sites that measured different things, are errors.

    Parameters
    ----------
    files, on_file, ignore_case
        See `gather`.
    digests
        Receives the SHA-256 of each file, by the name of its site.
    """
    spellings = Spellings(ignore_case=ignore_case)
    file_of: dict[str, Path] = {}
    stated: list[Path] = []  # files that state the version of the model
    spec: MeasurementSpec | None = None
    for file in files:
        sums, digest = _read_with_digest(file)
        (site,) = sums.sites
        if site in file_of:
            raise FedgftError(
                f"{file}: site '{site}' is in {file_of[site]} already; a site counts once "
                "(measure the other site under another name)",
                kind="conflict",
            )
        file_of[site] = file
        if digests is not None:
            digests[site] = digest
        sums = spellings.unify(sums, str(file))
        try:
            spec = sums.require_spec() if spec is None else spec.combine(sums.require_spec())
        except FedgftError as error:
            first = next(iter(file_of.values()))
            if error.field == "model_version":  # the first file that states a version
                first = stated[0]
            raise FedgftError(f"{first} and {file}: {error}", kind="conflict") from None
        if sums.require_spec().model_version:
            stated.append(file)
        yield sums
        if on_file:
            on_file(len(file_of))
