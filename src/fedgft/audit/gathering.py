"""The files of many sites, put together: each site once, all of them asked the same."""

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fedgft.audit.sitefile import read_sums
from fedgft.audit.sums import Question, Sums, merge
from fedgft.errors import FedgftError
from fedgft.files import expanded

REPORTS = (b'{\n  "format": "fedgft-audit', b'{\n  "format": "fedgft-comparison')


def site_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files as they are; of a folder, its .json files; a pattern that no shell expanded, too."""
    found: list[Path] = []
    for path in paths:
        place = expanded(path)
        if place.is_dir():
            inside = [f for f in place.glob("*.json") if f.is_file() and not is_report(f)]
            if not inside:
                raise FedgftError(f"{path}: a folder without .json files")
            found += sorted(inside)
        elif not place.exists() and glob.has_magic(str(place)):
            matched = sorted(Path(name) for name in glob.glob(str(place)))
            if not matched:
                raise FedgftError(f"{path}: no file matches")
            found += matched
        else:
            found.append(place)
    if not found:
        raise FedgftError("name the files of sums that the sites made with `fedgft measure`")
    return found


def is_report(path: Path) -> bool:
    """What `fedgft audit --out` wrote, which may lie beside the files it was made from."""
    with path.open("rb") as file:
        return file.read(40).startswith(REPORTS)


def gather(files: Iterable[Path], on_file: Callable[[int], None] | None = None) -> Sums:
    """Read and merge. Two files of one site, or sites that were asked differently, are errors.

    One file at a time: histograms of ten thousand sites would not fit, and their sum does.
    """
    return merge(_read(files, on_file))


def _read(files: Iterable[Path], on_file: Callable[[int], None] | None) -> Iterator[Sums]:
    owner: dict[str, Path] = {}
    first: Path | None = None
    question: Question | None = None
    for file in files:
        sums = read_sums(file)
        (site,) = sums.sites
        if site in owner:
            raise FedgftError(
                f"{file}: site '{site}' is in {owner[site]} already; a site counts once "
                "(--name tells sites apart)"
            )
        owner[site] = file
        if question is not None and sums.asked != question:
            try:
                question = question.meet(sums.asked)
            except FedgftError as error:
                raise FedgftError(f"{first} and {file}: {error}") from None
        first, question = first or file, question or sums.asked
        yield sums
        if on_file:
            on_file(len(owner))
