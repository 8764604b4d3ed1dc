"""What a site remembers between messages, runs and restarts, in files that only it can read.

They lie in one folder a site, `state="..."` in the node's configuration (unless said, a folder of
its own below `$XDG_STATE_HOME/fedgft`, which is `~/.local/state/fedgft` by default):

    salt           the secret by which rows are held out
    identity.key   the key that signs in secure sums, where the configuration names none (`key`)
    cohort.json    with which sites it adds up its sums, where it names none (`peers`)
    ledger.json    what was released, by run and model (or the file that `ledger` names)

The engine's own state ends with its process. A site that forgot what it released would draw its
noise anew, and two draws tell more than one.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context

from fedgft.errors import FedgftError
from fedgft.files import parsed, whole
from fedgft.flower.private import epsilon_of

FORMAT = "fedgft-ledger-2"
MOST_RHO = 1e4  # far beyond what any limit allows


def site_folder(context: Context, site: str) -> Path:
    """The site's own folder; it is made, with access for its owner alone, where it is missing.

    Its default name is that of the site, with a digest of the name, of the table and of the part
    that the node's configuration names, so that two sites on one host have two folders.
    """
    node = context.node_config
    if "state" in node:
        path = Path(str(node["state"])).expanduser()
    else:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        told = json.dumps([site, str(node.get("data", "")), str(node.get("partition-id", ""))])
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", site)[:40]
        path = Path(home) / "fedgft" / f"{plain}-{digest}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FedgftError(
            f"site '{site}': its folder {path} cannot be made ({error.strerror}); name another "
            "with state=... in the node's configuration"
        ) from None
    return path


def salt_of(context: Context, site: str) -> bytes:
    """32 secret bytes, drawn once."""
    path = site_folder(context, site) / "salt"
    salt = write_once(path, lambda: secrets.token_hex(32).encode())
    try:
        found = bytes.fromhex(salt.decode("ascii"))
    except ValueError:
        found = b""
    if len(found) != 32:
        raise FedgftError(f"site '{site}': {path}: not the 32 bytes that were written there")
    return found


def write_once(path: Path, made: Callable[[], bytes]) -> bytes:
    """The content of a file that only its owner can read; of several processes that find none,
    one writes it."""
    try:
        if not path.exists():
            part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
            try:
                write_private(part, made())
                os.link(part, path)  # fails where another was faster
            except FileExistsError:
                pass
            finally:
                part.unlink(missing_ok=True)
        return path.read_bytes()
    except OSError as error:
        raise FedgftError(f"{path}: cannot be written or read ({error.strerror})") from None


def write_private(path: Path, content: bytes) -> None:
    """Onto the disk, readable by its owner alone from the first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(handle, "wb") as file:
        os.chmod(path, 0o600)
        file.truncate()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def digest_of(arrays: ArrayRecord) -> str:
    """Names a model: two models with one digest are the same."""
    whole_model = hashlib.sha256()
    for name, array in arrays.items():
        head = json.dumps([name, array.dtype, list(array.shape), len(array.data)])
        whole_model.update(head.encode() + array.data)
    return whole_model.hexdigest()


@dataclass
class RunRecord:
    """What one run was told.

    `terms`: the budget of its first release. `counts`: as they were released. `rows`: the number of
    rows that it was told. `cohort`: names the sites of its secure sums. `answers`: by kind and
    model, the released numbers. `reports`: by model, the file of sums on held-out rows.
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
    """The account of all runs. `rho`: what they have spent, in zero-concentrated DP."""

    site: str
    rho: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    runs: dict[str, RunRecord] = field(default_factory=dict)

    def run(self, number: int, terms: list[float]) -> RunRecord:
        """The record of a run. Its terms stay those of its first release; of earlier runs, what
        was answered about which model is forgotten, and what was spent is not."""
        name = f"{number} {self.site}"
        if name not in self.runs:
            for other in self.runs.values():
                other.answers.clear()
                other.reports = dict.fromkeys(other.reports, "")
            self.runs[name] = RunRecord(list(terms))
        found = self.runs[name]
        if found.terms != terms:
            raise FedgftError(
                f"site '{self.site}': the server changed the privacy budget during a run"
            )
        return found

    def charge(self, rho: float, *, limit: float | None, delta: float, file: str) -> None:
        """Before a release; `limit`: epsilon for all runs together, at `delta`."""
        spent = self.rho + rho
        after = epsilon_of(spent, delta)
        if limit is not None and after > limit * (1 + 1e-6):
            raise FedgftError(
                f"site '{self.site}': with this release all its runs would come to epsilon "
                f"{after:.3g} at delta {delta:g}, above its max-epsilon, {limit:g} (ledger {file})"
            )
        self.rho = spent
        self.epsilon = after
        self.delta = delta


def ledger_file(context: Context, site: str) -> Path:
    if "ledger" in context.node_config:
        return Path(str(context.node_config["ledger"])).expanduser()
    return site_folder(context, site) / "ledger.json"


@contextmanager
def open_ledger(context: Context, site: str) -> Iterator[Ledger]:
    """The ledger, to be changed. It is written before anything is released; where the work fails
    it stays as it was. Several runs may come at once: each waits for the one before."""
    path = ledger_file(context, site)
    with whole(path, private=True) as part:
        found = read_ledger(path, site)
        yield found
        part.write_bytes(_to_json(found).encode())
        part.file.flush()
        os.fsync(part.file.fileno())  # what was charged must outlive a power cut


def read_ledger(path: Path, site: str) -> Ledger:
    """Of version 0.1 only the sum is there."""
    try:
        if not path.exists():
            return Ledger(site)
        held = parsed(path.read_text("utf-8"))
        spent = held["rho"]
        if type(spent) not in (int, float) or not 0 <= spent < MOST_RHO:  # NaN would allow all
            raise ValueError(f"rho is {str(spent)[:40]}")
        if held.get("format", FORMAT) != FORMAT:
            raise ValueError(f"its format is {str(held['format'])[:40]}")
        runs = {name: _record(one) for name, one in held.get("runs", {}).items()}
        return Ledger(site, spent, held.get("epsilon", 0.0), held.get("delta", 0.0), runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedgftError(f"site '{site}': {path}: not a ledger ({error})") from None


def _record(held: Any) -> RunRecord:
    made = RunRecord(**held)
    lists = [made.terms, made.counts or [], *made.answers.values()]
    numbers = [made.released, made.rows or 0.0]
    right = type(made.released) is int and made.released >= 0
    right &= all(isinstance(values, list) for values in lists)
    right &= all(type(n) in (int, float) for n in [*numbers, *(n for v in lists for n in v)])
    right &= isinstance(made.cohort or "", str)
    right &= all(isinstance(text, str) for text in made.reports.values())
    if not right:
        raise ValueError("a run's record is damaged")
    return made


def _to_json(ledger: Ledger) -> str:
    told = {"format": FORMAT, "rho": ledger.rho, "epsilon": ledger.epsilon, "delta": ledger.delta}
    runs = {name: vars(record) for name, record in ledger.runs.items()}
    return json.dumps(told | {"runs": runs})
