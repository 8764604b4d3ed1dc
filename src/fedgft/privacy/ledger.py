"""The state that a site keeps between messages, runs and restarts, in files that only it can read.

Each site has one folder for these files, which ``state="..."`` in the node's configuration names.
By default it is a folder below ``$XDG_STATE_HOME/fedgft`` (``~/.local/state/fedgft`` if the
variable is not set):

    salt           the secret that decides which rows are held out
    identity.key   the key that signs in secure sums, unless the configuration names one (`key`)
    cohort.json    the sites of its first secure sum, unless the configuration names some (`peers`)
    ledger.json    what was released, by run and model (or the file that `ledger` names)

Flower's own state is lost when its process ends. A site that lost the record of its releases would
draw new noise for the same sums, and two draws reveal more than one.
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
MAX_RHO = 1e4  # a ledger with a larger rho is damaged: no limit allows so much


@runtime_checkable
class SiteContext(Protocol):
    """The part of Flower's `Context` that privacy needs: the run and the node's configuration."""

    run_id: int
    node_config: Any


# Files of a site


def site_folder(context: SiteContext, site: str) -> Path:
    """Return the site's own folder; create it, accessible only by its owner, if it is missing.

    The default name of the folder is the site's name and a digest. The digest is of the site's name
    and of the table and partition in the node's configuration, so that two sites on one host have
    different folders.
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
    """Return the site's 32 secret bytes, which are drawn at random on first use and then kept."""
    path = site_folder(context, site) / "salt"
    text = write_once(path, lambda: secrets.token_hex(32).encode())
    if not re.fullmatch(rb"[0-9a-fA-F]{64}\s*", text):
        problem = "not the 32 bytes that were written there"
        raise FedgftError(f"site '{site}': {path}: {problem}", kind="file")
    return bytes.fromhex(text.decode())


def write_once(path: Path, make_content: Callable[[], bytes]) -> bytes:
    """Return the content of a file that only its owner can read; create it if it is missing.

    If several processes find no file at the same time, one of them writes it, and all of them
    return its content.
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
        The number of releases so far.
    counts
        The counts as they were released.
    rows
        The number of rows that the site declared.
    cohort
        An identifier of the set of sites in the run's secure sums.
    answers
        The released numbers, by kind of sums and model.
    reports
        The files of sums on held-out rows, by model.
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
    """The account of all runs of a site.

    `rho` is the cost of all releases so far in zero-concentrated DP. `epsilon` and `delta` express
    the same cost as (epsilon, delta) differential privacy.
    """

    site: str
    rho: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    runs: dict[str, RunRecord] = field(default_factory=dict)

    def run(self, number: int, terms: list[float]) -> RunRecord:
        """Return the record of a run, with the terms of its first release.

        At the start of a run, the answers and reports of earlier runs are deleted. Their cost stays
        on the account.
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
    """Open the ledger for changes, which are written when the ``with`` block ends.

    If the block raises an error, the file stays unchanged. Runs that open the ledger at the same
    time wait for each other. A caller sends numbers only after the block, so that every release is
    on the account first.
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
    """Return the site's ledger, or an empty one if there is no file.

    A ledger of version 0.1 holds only the totals, without runs. A damaged ledger is an error,
    because starting a new one would make the whole budget available again.
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
