"""The files of many sites, put together: each site once, all of them asked the same."""

import glob
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedgft.audit.sitefile import read_sums
from fedgft.audit.sums import Sums, merge
from fedgft.types import FedgftError


def site_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files as they are; of a folder, its .json files; a pattern that no shell expanded, too."""
    found: list[Path] = []
    for path in paths:
        place = Path(path).expanduser()
        if place.is_dir():
            inside = [f for f in place.glob("*.json") if f.is_file() and f.name != "audit.json"]
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


def gather(files: Iterable[Path], on_file: Callable[[int], None] | None = None) -> Sums:
    """Read and merge. Two files of one site, or sites that were asked differently, are errors."""
    parts: list[Sums] = []
    owner: dict[str, Path] = {}
    first: Path | None = None
    for file in files:
        sums = read_sums(file)
        (site,) = sums.sites
        if site in owner:
            raise FedgftError(
                f"{file}: site '{site}' is in {owner[site]} already; a site counts once "
                "(--name tells sites apart)"
            )
        owner[site] = file
        if parts and parts[0].question is not None and sums.question is not None:
            try:
                parts[0].question.meet(sums.question)
            except FedgftError as error:
                raise FedgftError(f"{first} and {file}: {error}") from None
        first = first or file
        parts.append(sums)
        if on_file:
            on_file(len(parts))
    return merge(parts)
