"""Flower's processes on this host: start them, and stop them with all their children.

`python -m fedgft.deploy.processes superlink ...` starts a SuperLink that answers only processes of
the user who started it. `... supernode ...` starts a SuperNode that asks for work more often. Both
use internals of Flower, as do the gate and the site's runner: `check_flower_version` refuses a
release that was not tested.
"""

import ctypes
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedgft.errors import FedgftError
from fedgft.store import make_private_folder, open_private_file

# Switch off telemetry, the check for updates and the download of packages in every run.
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
COLOR_VARIABLES = (
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
)  # Jupyter sets them; Flower would color its JSON
STOP_SECONDS = 5.0  # seconds between SIGTERM and SIGKILL
TESTED_FLOWER = "1.41"  # the tested release; pyproject.toml names it too
POLL = "FEDGFT_POLL"  # environment variable: seconds between a SuperNode's requests for work
SOCKETS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}  # sockets and their owners
ESTABLISHED = "01"
LOOPBACK = "127.0.0.1"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def flower_commands_folder() -> str:
    """Return the folder of Flower's commands: that of the running Python, with a separator."""
    folder = Path(sys.executable).parent
    if not (folder / "flower-superlink").exists():
        raise FedgftError("Flower's commands are not installed: pip install 'fedgft[flower]'")
    return f"{folder}{os.sep}"


def format_options(options: Mapping[str, Any]) -> list[str]:
    """Return {"port": 1} as command-line arguments: ["--port", "1"]."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def _end_with_parent() -> None:
    """Ask Linux to end this child if its parent is killed; other systems do not offer this."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(wanted: int | None = None) -> int:
    """Return a free port on loopback.

    Parameters
    ----------
    wanted
        The port to return; an error is raised if it is in use. None: any free port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted or 0))
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

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables; each process gets one thread, since all share the cores."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        settings = {"FLWR_HOME": str(self.home), "PATH": path, "OMP_NUM_THREADS": "1"}
        given = {name: v for name, v in os.environ.items() if name not in COLOR_VARIABLES}
        return {**given, **FLOWER_ENVIRONMENT, **settings, **self.variables}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process under a name; its output goes to NAME.log."""
        with ExitStack() as stack:
            output = None
            if self.logs is not None:
                make_private_folder(self.logs)
                output = stack.enter_context(open_private_file(self.logs / f"{name}.log", "wb"))
            self.running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """Run a short command.

        Parameters
        ----------
        command
            Program and arguments.
        timeout
            Seconds after which it is stopped.

        Returns
        -------
        str
            What it printed. Raises a `FedgftError` if it fails or takes too long.
        """
        what = f"{Path(command[0]).name} {command[1]}"
        try:
            completed = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise FedgftError(f"{what}: no answer in {timeout:g} s") from None
        output = completed.stdout.decode("utf-8", "replace")
        if completed.returncode:
            text = completed.stderr.decode("utf-8", "replace") or output
            raise FedgftError(f"{what} failed: {' '.join(text.strip().splitlines()[-3:])}")
        return output

    def is_alive(self, name: str) -> bool:
        """Return whether the process runs."""
        return self.running[name].poll() is None

    def wait_for_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        """Wait until a process listens on a port of this host.

        Raises a `FedgftError` if the process ends first, with its last output, or if it takes
        longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_alive(name):
                raise FedgftError(f"{name} ended at once: {self.last_log_lines(name)}")
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
                return
            time.sleep(0.1)
        raise FedgftError(f"{name} does not listen on port {port} after {seconds:g} s")

    def last_log_lines(self, name: str, lines: int = 3) -> str:
        """Return the end of a process's output in one line."""
        if self.logs is None:
            return "see above"
        with suppress(OSError):
            text = (self.logs / f"{name}.log").read_text("utf-8", "replace").strip()
            return " | ".join(line.strip() for line in text.splitlines()[-lines:]) or "no output"
        return "no output"

    def stop(self) -> None:
        """Stop all processes and their children; a second Ctrl-C does not interrupt this."""
        with _ignore_signals():
            self._stop()

    def _stop(self) -> None:
        """Send SIGTERM to all processes and their descendants, and SIGKILL to those that remain."""
        groups = {p.pid: list_descendants(p.pid) for p in self.running.values()}
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for leader in groups:
                groups[leader] |= list_descendants(leader)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, sign)
            pids = set().union(*groups.values())
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and self._any_runs(pids):
                time.sleep(0.05)
        self.running.clear()

    def _any_runs(self, pids: set[int]) -> bool:
        """Return whether any of the processes still runs."""
        alive = [self.is_alive(name) for name in self.running]  # polls all, which ends zombies
        return any(alive) or any(map(_is_running, pids))

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM within the block; do nothing outside the main thread."""
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
    """Return the process ids of a session and all its descendants; empty without /proc."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            fields = _read_stat(pid)
            parents[pid] = int(fields[1])
            if int(fields[3]) == session:
                found.add(pid)
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def _read_stat(pid: int) -> list[str]:
    """Return what Linux records of a process: state, parent, group, session, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie counts as ended."""
    try:
        return _read_stat(pid)[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def check_flower_version() -> None:
    """Raise an error unless the installed Flower is a release whose internals were tested."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise FedgftError("fedgft deploy needs Flower: pip install 'fedgft[flower]'") from None
    if found != TESTED_FLOWER and not found.startswith(f"{TESTED_FLOWER}."):
        raise FedgftError(
            f"fedgft deploy was tested with Flower {TESTED_FLOWER}, and {found} is "
            f"installed: pip install 'flwr=={TESTED_FLOWER}.*'"
        )


class OwnUserOnly:
    """ASGI middleware: answer only connections that a process of this user opened.

    Every local user can reach a port on 127.0.0.1, and Flower's control and runtime interfaces ask
    for no credentials. But Linux records the owner of every local socket.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.allows(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        sys.stderr.write(f"fedgft: refused {scope.get('client')}: another user of this host\n")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        body = b'{"detail": "this SuperLink answers only the user who started it"}'
        await send({"type": "http.response.body", "body": body})

    @staticmethod
    def allows(scope: Scope) -> bool:
        """Whether the other end of the connection belongs to this process's user."""
        client = scope.get("client")
        server = scope.get("server")
        if client is None or server is None:
            return False
        return socket_owner(client, server) == os.getuid()


def socket_owner(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Return the user id of the open local socket with these two ends; None if there is none.

    Linux lists a socket that its owner closed as root's, so only established ones count.
    """
    kind = ipaddress.ip_address(local[0]).version
    ends = [_hexadecimal(*local), _hexadecimal(*remote)]
    try:
        lines = SOCKETS[kind].read_text("ascii").splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[1:3] == ends and fields[3] == ESTABLISHED and fields[9] != "0":
            return int(fields[7])
    return None


def _hexadecimal(address: str, port: int) -> str:
    """Return an address as /proc/net/tcp writes it: words of 32 bits in the machine's order."""
    packed = ipaddress.ip_address(address).packed
    words = [packed[k : k + 4] for k in range(0, len(packed), 4)]
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{text}:{port:04X}"


def start_superlink(arguments: list[str]) -> None:
    """Run `flower-superlink` for this user's processes only, if the system can identify them."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    if SOCKETS[4].exists():
        extensions.get_middleware = lambda: (Middleware(OwnUserOnly),)
    else:
        sys.stderr.write(
            "fedgft: this system does not report who opened a connection: other users of "
            "this host can reach the SuperLink's control interface\n"
        )
    # Otherwise its web server would trust a header that claims another address.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def start_supernode(arguments: list[str]) -> None:
    """Run `flower-supernode`; it asks for work every FEDGFT_POLL seconds instead of every 3."""
    from flwr.supernode.cli import flower_supernode

    worker: Any = import_module("flwr.supernode.start_client_internal")
    max_seconds = float(os.environ.get(POLL, "3"))
    worker.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, max_seconds)))
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def main(arguments: list[str]) -> None:
    """Start a SuperLink or a SuperNode: the first argument says which."""
    try:
        check_flower_version()
    except FedgftError as error:
        sys.exit(f"fedgft: {error}")
    {"superlink": start_superlink, "supernode": start_supernode}[arguments[0]](arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
