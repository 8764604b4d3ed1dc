"""What a site remembers between messages, runs and restarts, in files that only it can read.

The files are in one folder per site, ``state="..."`` in the node's configuration; by default it is
a folder below ``$XDG_STATE_HOME/fedgft``, which is ``~/.local/state/fedgft``:

    salt           the secret that decides which rows are held out
    identity.key   the key that signs in secure sums, unless the configuration names one (`key`)
    cohort.json    the sites of its first secure sum, unless the configuration names some (`peers`)
    ledger.json    what was released, by run and model (or the file that `ledger` names)

Flower's own state ends with its process. A site that forgot its releases would draw new noise, and
two draws reveal more than one.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedgft.errors import FedgftError
from fedgft.privacy.noise import epsilon_of
from fedgft.store import atomic_write, open_private_file, parse_json

FORMAT = "fedgft-ledger-2"
MAX_RHO = 1e4  # far more than any limit allows


@runtime_checkable
class SiteContext(Protocol):
    """The part of Flower's `Context` that concerns privacy: run and configuration of the node."""

    @property
    def run_id(self) -> int: ...

    @property
    def node_config(self) -> Mapping[str, Any]: ...


# Files of a site


def site_folder(context: SiteContext, site: str) -> Path:
    """Return the site's own folder; create it, accessible only by its owner, if it is missing.

    Its default name is the site's name and a digest of the name, of the table and of the partition
    in the node's configuration, so that two sites on one host have two folders.
    """
    config = context.node_config
    if "state" in config:
        path = Path(str(config["state"])).expanduser()
    else:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        identity = [site, str(config.get("data", "")), str(config.get("partition-id", ""))]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", site)[:40]
        path = Path(home) / "fedgft" / f"{name}-{digest}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FedgftError(
            f"site '{site}': its folder {path} cannot be made ({error.strerror}); name another "
            "with state=... in the node's configuration",
            kind="file",
        ) from None
    return path


def read_salt(context: SiteContext, site: str) -> bytes:
    """Return the site's 32 secret bytes, which are drawn once."""
    path = site_folder(context, site) / "salt"
    text = write_once(path, lambda: secrets.token_hex(32).encode())
    try:
        salt = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        salt = b""
    if len(salt) != 32:
        raise FedgftError(
            f"site '{site}': {path}: not the 32 bytes that were written there", kind="file"
        )
    return salt


def write_once(path: Path, make_content: Callable[[], bytes]) -> bytes:
    """Return the content of a file that only its owner can read; create it if it is missing.

    If several processes find no file, one of them writes it and all return its content.
    """
    try:
        if not path.exists():
            part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
            try:
                with open_private_file(part, "wb") as file:
                    file.write(make_content())
                    file.flush()
                    os.fsync(file.fileno())
                os.link(part, path)  # fails if another process was faster
            except FileExistsError:
                pass
            finally:
                part.unlink(missing_ok=True)
        return path.read_bytes()
    except OSError as error:
        raise FedgftError(
            f"{path}: cannot be written or read ({error.strerror})", kind="file"
        ) from None


def model_digest(arrays: Mapping[str, Any]) -> str:
    """Return a digest that identifies a model.

    `arrays` maps names to Flower arrays (with `dtype`, `shape` and `data`), as an `ArrayRecord`.
    """
    digest = hashlib.sha256()
    for name, array in arrays.items():
        head = json.dumps([name, array.dtype, list(array.shape), len(array.data)])
        digest.update(head.encode() + array.data)
    return digest.hexdigest()


# The ledger


@dataclass
class RunRecord:
    """What a site released in one run.

    Attributes
    ----------
    terms
        The budget of the first release; it must not change during a run.
    released
        Number of releases so far.
    counts
        The counts as they were released.
    rows
        The number of rows that the site declared.
    cohort
        Identifies the sites of its secure sums.
    answers
        Released numbers by kind of sums and model.
    reports
        Files of sums on held-out rows by model.
    """

    terms: list[float] = field(default_factory=list)
    released: int = 0
    counts: list[float] | None = None
    rows: float | None = None
    cohort: str | None = None
    answers: dict[str, list[float]] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)


@dataclass
class Ledger:
    """The account of all runs of a site; `rho` is what they have spent, in zCDP."""

    site: str
    rho: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    runs: dict[str, RunRecord] = field(default_factory=dict)

    def run(self, number: int, terms: list[float]) -> RunRecord:
        """Return the record of a run, with the terms of its first release.

        At the start of a run the answers and reports of earlier runs are deleted; what they spent
        stays on the account.
        """
        name = f"{number} {self.site}"
        if name not in self.runs:
            for other in self.runs.values():
                other.answers.clear()
                other.reports = dict.fromkeys(other.reports, "")
            self.runs[name] = RunRecord(list(terms))
        record = self.runs[name]
        if record.terms != terms:
            raise FedgftError(
                f"site '{self.site}': the server changed the privacy budget during a run",
                kind="conflict",
            )
        return record

    def charge(self, rho: float, *, limit: float | None, delta: float, file: str) -> None:
        """Enter a release before it happens; `limit` is the epsilon of all runs, at `delta`."""
        total = self.rho + rho
        epsilon = epsilon_of(total, delta)
        if limit is not None and epsilon > limit * (1 + 1e-6):
            raise FedgftError(
                f"site '{self.site}': with this release all its runs would come to epsilon "
                f"{epsilon:.3g} at delta {delta:g}, above its max-epsilon, {limit:g} "
                f"(ledger {file})"
            )
        self.rho = total
        self.epsilon = epsilon
        self.delta = delta


def ledger_file(context: SiteContext, site: str) -> Path:
    """Return the path of the site's ledger."""
    if "ledger" in context.node_config:
        return Path(str(context.node_config["ledger"])).expanduser()
    return site_folder(context, site) / "ledger.json"


@contextmanager
def open_ledger(context: SiteContext, site: str) -> Iterator[Ledger]:
    """Open the ledger for changes, which are written before anything is released.

    If the body fails, the file stays as it was. Runs that come at the same time take turns.
    """
    path = ledger_file(context, site)
    with atomic_write(path, private=True) as part:
        ledger = read_ledger(path, site)
        yield ledger
        part.write(_to_json(ledger).encode())
        part.flush()
        os.fsync(part.fileno())  # the account must survive a power cut


def read_ledger(path: Path, site: str) -> Ledger:
    """Return the ledger in a file, an empty one if there is none.

    A ledger of version 0.1 holds only the sums. A damaged one is an error: it would allow
    everything again.
    """
    try:
        if not path.exists():
            return Ledger(site)
        found = parse_json(path.read_text("utf-8"))
        rho = found["rho"]
        if type(rho) not in (int, float) or not 0 <= rho < MAX_RHO:  # NaN would allow everything
            raise ValueError(f"rho is {str(rho)[:40]}")
        if found.get("format", FORMAT) != FORMAT:
            raise ValueError(f"its format is {str(found['format'])[:40]}")
        runs = {name: _read_record(record) for name, record in found.get("runs", {}).items()}
        return Ledger(site, rho, found.get("epsilon", 0.0), found.get("delta", 0.0), runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedgftError(f"site '{site}': {path}: not a ledger ({error})", kind="file") from None


def _read_record(found: Any) -> RunRecord:
    record = RunRecord(**found)
    lists = [record.terms, record.counts or [], *record.answers.values()]
    valid = type(record.released) is int and record.released >= 0
    valid &= all(isinstance(values, list) for values in lists)
    numbers = [record.rows or 0.0, *(number for values in lists for number in values)]
    valid &= all(type(number) in (int, float) for number in numbers)
    valid &= isinstance(record.cohort or "", str)
    valid &= all(isinstance(text, str) for text in record.reports.values())
    if not valid:
        raise ValueError("a run's record is damaged")
    return record


def _to_json(ledger: Ledger) -> str:
    account = {"format": FORMAT, "rho": ledger.rho, "epsilon": ledger.epsilon}
    runs = {name: vars(record) for name, record in ledger.runs.items()}
    return json.dumps({**account, "delta": ledger.delta, "runs": runs})
