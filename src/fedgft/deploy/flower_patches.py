"""Flower's own processes, started with what its commands do not offer.

`python -m fedgft.deploy.flower_patches superlink ...` starts a SuperLink that answers only
processes of the user who started it. `... supernode ...` starts a SuperNode that asks for work
more often. Both use internals of Flower, as do the gate and the site's runner: `check_engine`
refuses a release that was not tested.
"""

import os
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedgft.errors import FedgftError

TESTED_FLOWER = (
    "1.41"  # release of Flower that fedgft.deploy was tested with; also in pyproject.toml
)
POLL = "FEDGFT_POLL"  # environment: seconds between a SuperNode's questions for work
SOCKETS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
ESTABLISHED = "01"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def check_flower_version() -> None:
    """Raise unless the installed Flower is a release whose internals were tested."""
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

    Linux keeps the owner of every local socket. A port on 127.0.0.1 can be reached by every local
    user, and Flower's control and runtime interfaces ask for no credentials.
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
    """User id of the open local socket with these two ends; None where there is none.

    A socket that was closed by its owner is listed as root's: only established ones count.
    """
    import ipaddress

    kind = ipaddress.ip_address(local[0]).version
    wanted = [_hexadecimal(*local), _hexadecimal(*remote)]
    try:
        lines = SOCKETS[kind].read_text("ascii").splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[1:3] == wanted and fields[3] == ESTABLISHED and fields[9] != "0":
            return int(fields[7])
    return None


def _hexadecimal(address: str, port: int) -> str:
    """An address as /proc/net/tcp writes it: words of 32 bits in the machine's order."""
    import ipaddress

    packed = ipaddress.ip_address(address).packed
    words = [packed[k : k + 4] for k in range(0, len(packed), 4)]
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{text}:{port:04X}"


def can_tell_users() -> bool:
    """Whether this system lists the owners of sockets (Linux does)."""
    return SOCKETS[4].exists()


def start_superlink(arguments: list[str]) -> None:
    """Flower's `flower-superlink`, for this user's processes alone where the system can tell."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    if can_tell_users():
        extensions.get_middleware = lambda: (Middleware(OwnUserOnly),)
    else:
        sys.stderr.write(
            "fedgft: this system does not tell whose a connection is: other users of "
            "this host can reach the SuperLink's control interface\n"
        )
    # Else its web server would believe a header that names another connection.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def start_supernode(arguments: list[str]) -> None:
    """Flower's `flower-supernode`, which waits POLL seconds (environment) instead of three."""
    from flwr.supernode.cli import flower_supernode

    worker: Any = import_module("flwr.supernode.start_client_internal")
    most = float(os.environ.get(POLL, "3"))
    worker.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, most)))
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def main(arguments: list[str]) -> None:
    """Start one of the two, named first."""
    try:
        check_flower_version()
    except FedgftError as error:
        sys.exit(f"fedgft: {error}")
    {"superlink": start_superlink, "supernode": start_supernode}[arguments[0]](arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
