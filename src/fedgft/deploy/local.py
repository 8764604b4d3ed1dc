"""A federation of real processes on this host: a server (SuperLink and gate) and N sites, with TLS
and node keys, as `fedgft deploy server` and `fedgft deploy site` start them elsewhere."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgft.deploy.control import status_of
from fedgft.deploy.folder import CONNECTION, Folder, load_folder, make_folder
from fedgft.deploy.outcome import GIVEN_UP, progress, summary
from fedgft.deploy.processes import Processes, free_port, programs
from fedgft.errors import FedgftError
from fedgft.files import open_folder, open_private
from fedgft.flower.journal import CHECKPOINT, FILE, HISTORY, SCHEMA

ENGINE = "engine"  # of the engine's own files, while it runs
LEFTOVERS = {ENGINE, "logs", FILE, SCHEMA}
POLL = 1.0  # seconds between looks at the progress
STATUS_EVERY = 2.0  # seconds between questions to the engine
HERE = "127.0.0.1"
OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """`nodes`: further arguments of each site's command (`nodes_of`); `config`: the run's own."""

    sites: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]
    config: dict[str, Any]
    out: Path
    port: int | None = None
    app: Path | None = None
    limit: float = 3600.0
    resume: bool = False


@contextmanager
def federation(plan: Plan) -> Iterator[tuple[Folder, Processes]]:
    """The server up, all sites registered and started; everything ended on the way out."""
    work = plan.out / ENGINE
    programs()
    port = free_port(plan.port)
    folder = make_folder(
        work, sites=plan.sites, host=HERE, port=port, inner=free_port(), make_keys=True
    )
    with Processes(folder.path, folder.engine, plan.out / "logs") as processes:
        start_server(folder, processes)
        for site, told in zip(plan.sites, plan.nodes, strict=True):
            start_site(folder, processes, site, told, app=plan.app)
        yield folder, processes


def start_server(folder: Folder, processes: Processes) -> None:
    """The server, until its gate listens."""
    command = ["deploy", "server", str(folder.path), "--bind", HERE]
    processes.start("server", [sys.executable, "-m", "fedgft", *command])
    processes.await_port("server", folder.port)


def start_site(
    folder: Folder,
    processes: Processes,
    site: str,
    told: Sequence[str],
    *,
    app: Path | None = None,
) -> None:
    """A site whose private key the folder holds. `told` are further arguments of its command."""
    processes.start(site, [
        sys.executable, "-m", "fedgft", "deploy", "site", site, "--server", folder.address,
        "--ca", str(folder.path / "ca.crt"), "--key", str(folder.nodes / f"{site}.key"),
        "--peers", str(folder.nodes),
        *(["--app", str(app)] if app else []), *told,
    ])  # fmt: skip


def run_local(plan: Plan, on_progress: OnProgress, note: Callable[[str], None]) -> dict[str, Any]:
    """One run to its end. Success is what the engine says it is."""
    began = time.monotonic()
    _check_place(plan)
    settings(plan)  # can be said at all
    with open_folder(plan.out):
        try:
            shutil.rmtree(plan.out / ENGINE, ignore_errors=True)  # of a run that was killed
            if not plan.resume:
                (plan.out / FILE).unlink(missing_ok=True)
            note(f"starting a server and {len(plan.sites)} sites; what they say is in "
                 f"{plan.out / 'logs'}")  # fmt: skip
            with federation(plan) as (folder, processes):
                run = submit(folder, processes, plan)
                status = watch(processes, plan, run, on_progress)
        finally:
            shutil.rmtree(plan.out / ENGINE, ignore_errors=True)  # keys that nobody needs any more
    seconds = time.monotonic() - began
    return summary(plan.out, status, seconds=seconds, sites=len(plan.sites), limit=plan.limit)


def _check_place(plan: Plan) -> None:
    """A new folder, or one of ours to go on in."""
    if plan.out.exists() and not plan.out.is_dir():
        raise FedgftError(f"--out {plan.out}: is a file; name a folder")
    held = {path.name for path in plan.out.iterdir()} if plan.out.exists() else set()
    if not plan.resume and held <= LEFTOVERS:  # of a run that came to nothing
        return
    if not held:
        raise FedgftError(f"--resume: there is no run in {plan.out}")
    if not plan.resume:
        raise FedgftError(f"--out {plan.out}: is not empty; name another folder, or go on there "
                          "with --resume")  # fmt: skip
    if not (plan.out / CHECKPOINT).is_file():
        raise FedgftError(f"--resume: {plan.out} holds no finished round of a run")
    if (plan.out / HISTORY).exists():
        raise FedgftError(f"--resume: the run in {plan.out} was finished; name another --out")


def settings(plan: Plan) -> str:
    """The run's configuration, as the engine takes it."""
    return configuration(plan.config)


def configuration(held: dict[str, Any]) -> str:
    """Settings of a run or a node, in one line as the engine's commands take them."""
    return " ".join(f"{key}={_toml(value)}" for key, value in held.items())


def submit(folder: Folder, processes: Processes, plan: Plan) -> int:
    """Hand in the app; the engine's number for the run."""
    app = str(plan.app or folder.app)
    command = ("run", app, CONNECTION, "--run-config", settings(plan), "--format", "json")
    said = processes.run(f"{programs()}flwr", *command)
    found = _json(said)
    if not found.get("success") or "run-id" not in found:
        raise FedgftError(f"flwr run: {found.get('error-message') or said.strip()[-300:]}")
    return int(found["run-id"])


def watch(processes: Processes, plan: Plan, run: int, on_progress: OnProgress) -> str:
    """Tell what happens until the engine says that the run has ended, and how."""
    seen, asked = (len(progress(plan.out)) if plan.resume else 0), time.monotonic()
    deadline = asked + plan.limit
    while True:
        rows = progress(plan.out)
        for row in rows[seen:]:
            alive = sum(processes.alive(site) for site in plan.sites)
            on_progress({**row, "alive": alive, "sites": len(plan.sites)})
        seen = len(rows)
        if not processes.alive("server"):
            raise FedgftError(f"the server ended: {processes.last_words('server')}")
        if not any(processes.alive(site) for site in plan.sites):
            words = processes.last_words(plan.sites[0])
            raise FedgftError(f"all sites have ended; {plan.sites[0]} said last: {words}")
        if time.monotonic() - asked > STATUS_EVERY or (plan.out / HISTORY).exists():
            status = status_of(load_folder(processes.folder), run)
            if status.startswith("finished"):
                _keep_log(processes, plan, run)
                return status
            asked = time.monotonic()
        if time.monotonic() > deadline:
            return GIVEN_UP
        time.sleep(POLL)


def _keep_log(processes: Processes, plan: Plan, run: int) -> None:
    """What the app on the server said, which the engine keeps apart from what it says itself."""
    try:
        said = processes.run(f"{programs()}flwr", "log", str(run), CONNECTION, "--show")
    except FedgftError as error:
        said = str(error)
    with open_private(plan.out / "logs" / "run.log", "wb") as log:
        log.write(said.encode())


def _json(text: str) -> dict[str, Any]:
    """The object in a command's output, whatever stands around it."""
    start, end = text.find("{"), text.rfind("}")
    try:
        return json.loads(text[start : end + 1])
    except ValueError:
        return {}


def _toml(value: Any) -> str:
    """Strings, numbers and truth values read the same in both; but the engine splits at quotes."""
    if isinstance(value, str) and not re.fullmatch(r"[^\x00-\x1f\"'\\]*", value):
        raise FedgftError(f"{value!r}: the engine cannot be told names with quotes, backslashes or "
                          "line ends in them")  # fmt: skip
    return json.dumps(value, ensure_ascii=False)


def nodes_of(sites: Sequence[str], data: Sequence[Path]) -> tuple[tuple[str, ...], ...]:
    """Arguments of the sites' commands: a file each, or a part of a public data set each."""
    if data:
        return tuple(("--data", str(path.resolve())) for path in data)
    return tuple(
        ("--set", f"partition-id={k}", f"num-partitions={len(sites)}") for k in range(len(sites))
    )
