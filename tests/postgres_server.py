"""A real PostgreSQL server for tests: started in a folder of its own, stopped at the end."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OWNER = "owner"  # who may do everything, and connects without a password on the socket
READER = "reader"  # who may read one table, with a password
PASSWORD = "p@ss/w:rd?#100%"  # with all characters that are special in a URL
OUTSIDER = "outsider"  # who may connect, and read nothing


@dataclass(frozen=True)
class PostgresServer:
    """A running server.

    Parameters
    ----------
    folder
        The folder of its files, and of its socket.
    port
        Its port on 127.0.0.1.
    """

    folder: Path
    port: int

    def url(self, database: str = "postgres") -> str:
        """Return the URL for the owner, who needs no password on the socket."""
        return f"postgresql://{OWNER}@/{database}?host={self.folder}&port={self.port}"

    def read_log(self) -> str:
        """Return what the server has logged."""
        return (self.folder / "log").read_text(errors="replace")


def find_programs() -> Path:
    """Return the folder of PostgreSQL's programs; skip the test where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return Path(on_path).parent if on_path else found[-1].parent


def find_user() -> str | None:
    """Return the user who runs the server: root may not. None: whoever runs the tests."""
    if os.geteuid() != 0:
        return None
    from pwd import getpwnam

    for name in ("postgres", "nobody"):
        try:
            return getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


@contextmanager
def start_postgres(settings: Sequence[str] = ()) -> Iterator[PostgresServer]:
    """Start a server with its own data, and stop it at the end.

    Parameters
    ----------
    settings
        Lines of its configuration.
    """
    programs = find_programs()
    user = find_user()
    folder = Path(tempfile.mkdtemp(prefix="fedgft-postgres-"))
    folder.chmod(0o755)
    if user is not None:
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, capture_output=True, text=True, cwd=folder, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(
        *(str(programs / "initdb"), "-D", str(data), "-U", OWNER, "--encoding=UTF8"),
        *("--locale=C.UTF-8", "--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync"),
    )
    lines = [f"port = {port}", f"unix_socket_directories = '{folder}'", "fsync = off"]
    lines += ["listen_addresses = '127.0.0.1'", "log_statement = 'all'", *settings]
    with (data / "postgresql.conf").open("a") as file:
        file.write("\n".join(lines) + "\n")
    control = [str(programs / "pg_ctl"), "-D", str(data), "-w"]
    try:
        run(*control, "-l", str(folder / "log"), "start")
        yield PostgresServer(folder, port)
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], user=user, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
