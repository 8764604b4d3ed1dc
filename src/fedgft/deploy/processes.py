"""Start Flower's processes on this host, and stop them with all their children."""

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
from fedgft.store import make_private_folder, open_private_file

# No telemetry, no check for updates, no packages downloaded for every run.
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL


def flower_commands_folder() -> str:
    """The folder of Flower's commands, which is that of the running Python, with a separator."""
    folder = Path(sys.executable).parent
    if not (folder / "flower-superlink").exists():
        raise FedgftError("Flower's commands are not installed: pip install 'fedgft[flower]'")
    return f"{folder}{os.sep}"


def environment(home: Path) -> dict[str, str]:
    """Environment variables of the processes; one thread each, since they share the cores.

    Parameters
    ----------
    home
        Flower's home folder, with its configuration and state.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {
        **os.environ,
        **FLOWER_ENVIRONMENT,
        "FLWR_HOME": str(home),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
    }


def _die_with_us() -> None:
    """Ask Linux to end this child if its parent is killed; other systems do not offer this."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(wanted: int | None = None) -> int:
    """Return a free port on loopback.

    Parameters
    ----------
    wanted
        Return this port; an error if it is in use. None: any free port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError) as error:
            raise FedgftError(f"`port` {wanted}: cannot be used ({error})") from None
        return int(probe.getsockname()[1])


@dataclass
class Processes:
    """Named processes, each the leader of its own session, so that its children end with it.

    Use it as a context manager: leaving the block stops all processes.

    Parameters
    ----------
    folder
        Working folder of the processes.
    home
        Flower's home folder.
    logs
        Folder for their output, one file per process; None: the output of this process.
    variables
        Further environment variables.
    running
        The processes by name.
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
                make_private_folder(self.logs)
                output = stack.enter_context(open_private_file(self.logs / f"{name}.log", "wb"))
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
        """Run a short command and return what it prints; an error if it fails or takes too long."""
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment(self.home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise FedgftError(
                f"{Path(command[0]).name} {command[1]}: no answer in {timeout:g} s"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise FedgftError(f"{Path(command[0]).name} {command[1]} failed: {' '.join(said[-3:])}")
        return done.stdout.decode("utf-8", "replace")

    def is_alive(self, name: str) -> bool:
        return self.running[name].poll() is None

    def wait_for_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        """Wait until a process listens on a port; an error with its last output if it ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_alive(name):
                raise FedgftError(f"{name} ended at once: {self.last_log_lines(name)}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.1)
        raise FedgftError(f"{name} does not listen on port {port} after {seconds:g} s")

    def last_log_lines(self, name: str, lines: int = 3) -> str:
        if self.logs is None:
            return "see above"
        with suppress(OSError):
            text = (self.logs / f"{name}.log").read_text("utf-8", "replace").strip()
            return " | ".join(line.strip() for line in text.splitlines()[-lines:]) or "no output"
        return "no output"

    def stop(self) -> None:
        """Stop all processes and their children; a second Ctrl-C does not interrupt this."""
        with _undisturbed():
            self._stop()

    def _stop(self) -> None:
        groups = {p.pid: list_descendants(p.pid) for p in self.running.values()}
        for sign, wait in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            for leader in groups:
                groups[leader] |= list_descendants(leader)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, sign)
            all_pids = set().union(*groups.values()) if groups else set()
            for pid in all_pids:
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


def list_descendants(session: int) -> set[int]:
    """Process ids of a session and all its descendants; empty without /proc."""
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
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
