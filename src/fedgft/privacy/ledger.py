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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedgft.errors import FedgftError
from fedgft.store import atomic_write, open_private_file, parse_json

FORMAT = "fedgft-ledger-2"
MAX_RHO = 1e4  # far more than any limit allows


@runtime_checkable
class SiteContext(Protocol):
    """The part of Flower's `Context` that concerns privacy: run and configuration of the node."""

    run_id: int
    node_config: Any


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
        problem = f"cannot be created ({error.strerror}); name another one in the node's "
        problem += "configuration: state=..."
        raise FedgftError(f"site '{site}': its folder {path} {problem}", kind="file") from None
    return path


def read_salt(context: SiteContext, site: str) -> bytes:
    """Return the site's 32 secret bytes, which are drawn once."""
    path = site_folder(context, site) / "salt"
    text = write_once(path, lambda: secrets.token_hex(32).encode())
    if not re.fullmatch(rb"[0-9a-fA-F]{64}\s*", text):
        problem = "not the 32 bytes that were written there"
        raise FedgftError(f"site '{site}': {path}: {problem}", kind="file")
    return bytes.fromhex(text.decode())


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
        problem = f"cannot be written or read ({error.strerror})"
        raise FedgftError(f"{path}: {problem}", kind="file") from None


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
            problem = "the server changed the privacy budget during a run"
            raise FedgftError(f"site '{self.site}': {problem}", kind="conflict")
        return record


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
    with atomic_write(ledger_file(context, site), private=True) as part:
        ledger = read_ledger(context, site)
        yield ledger
        content = {"format": FORMAT} | asdict(ledger)
        del content["site"]
        part.write(json.dumps(content).encode())
        part.flush()
        os.fsync(part.fileno())  # the account must survive a power cut


def read_ledger(context: SiteContext, site: str) -> Ledger:
    """Return the site's ledger, an empty one if there is no file.

    A ledger of version 0.1 holds only the sums. A damaged one is an error: it would allow
    everything again.
    """
    path = ledger_file(context, site)
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
    texts = [record.cohort or "", *record.reports.values()]
    numbers = [record.rows or 0.0, *(number for values in lists for number in values)]
    valid = type(record.released) is int and record.released >= 0
    valid &= all(isinstance(values, list) for values in lists)
    valid &= all(type(number) in (int, float) for number in numbers)
    if not valid or not all(isinstance(text, str) for text in texts):
        raise ValueError("a run's record is damaged")
    return record
