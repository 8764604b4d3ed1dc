"""The engine's processes on this host: started alike, and ended without remainder."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedgft.errors import FedgftError
from fedgft.files import open_private, private_folder

# For a closed network: no telemetry, no check for updates, no packages fetched for every run.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
GRACE = 5.0  # seconds between asking a process to end and ending it


def programs() -> str:
    """Where the engine's commands lie: beside the Python that runs this."""
    folder = Path(sys.executable).parent
    if not (folder / "flower-superlink").exists():
        raise FedgftError("Flower's commands are not installed: pip install 'fedgft[flower]'")
    return f"{folder}{os.sep}"


def environment(home: Path) -> dict[str, str]:
    """One thread a process: there are several of them, and they share the cores."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}


def _die_with_us() -> None:
    """Asks Linux to end this child if its parent is killed; elsewhere there is no such favour."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(wanted: int | None = None) -> int:
    """A port that nobody listens on; one that was asked for must be such a one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError) as error:
            raise FedgftError(f"--port {wanted}: cannot be used ({error})") from None
        return int(probe.getsockname()[1])


@dataclass
class Processes:
    """Named processes, each the leader of its own session, so that its children end with it.

    What they say goes to `logs`, or, where that is None, to where this process's output goes.
    `variables` are added to their environment.
    """

    folder: Path
    home: Path
    logs: Path | None
    variables: dict[str, str] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str]) -> None:
        with ExitStack() as stack:
            output = None
            if self.logs is not None:
                private_folder(self.logs)
                output = stack.enter_context(open_private(self.logs / f"{name}.log", "wb"))
            self.running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment(self.home) | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_us,
            )

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """A short command to its end; what it prints."""
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment(self.home), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=timeout, check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FedgftError(
                f"{Path(command[0]).name} {command[1]}: no answer in {timeout:g} s"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise FedgftError(f"{Path(command[0]).name} {command[1]} failed: {' '.join(said[-3:])}")
        return done.stdout.decode("utf-8", "replace")

    def alive(self, name: str) -> bool:
        return self.running[name].poll() is None

    def await_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        """Until the process listens; its own last words if it ends instead."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.alive(name):
                raise FedgftError(f"{name} ended at once: {self.last_words(name)}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.1)
        raise FedgftError(f"{name} does not listen on port {port} after {seconds:g} s")

    def last_words(self, name: str, lines: int = 3) -> str:
        if self.logs is None:
            return "see above"
        with suppress(OSError):
            text = (self.logs / f"{name}.log").read_text("utf-8", "replace").strip()
            return " | ".join(line.strip() for line in text.splitlines()[-lines:]) or "no output"
        return "no output"

    def stop(self) -> None:
        """All of them with their children; a second Ctrl-C does not keep us from it."""
        with _undisturbed():
            self._stop()

    def _stop(self) -> None:
        groups = {p.pid: members(p.pid) for p in self.running.values()}
        for sign, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
            for leader in groups:
                groups[leader] |= members(leader)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, sign)
            everybody = set().union(*groups.values()) if groups else set()
            for pid in everybody:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and self._remaining(groups):
                time.sleep(0.05)
        self.running.clear()

    def _remaining(self, groups: dict[int, set[int]]) -> bool:
        waited = [process.poll() is None for process in self.running.values()]
        return any(waited) or any(_exists(pid) for pids in groups.values() for pid in pids)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def _undisturbed() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def members(session: int) -> set[int]:
    """All processes of a session and their descendants, where /proc tells; else none."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            rest = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = (int(rest[1]), int(rest[3]))
    found = {pid for pid, (_, own) in parents.items() if own == session}
    while more := {pid for pid, (up, _) in parents.items() if up in found} - found:
        found |= more
    return found


def _exists(pid: int) -> bool:
    """Running, and not merely waiting to be counted."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
