"""The server of a federation: a SuperLink on loopback, and the gate in front of it."""

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

from fedgft.deploy.control import register_nodes
from fedgft.deploy.engine import check_engine
from fedgft.deploy.folder import DATABASE, Folder
from fedgft.deploy.gate import Gate, KeyFolder, Limits, Signatures, log, server_tls
from fedgft.deploy.keys import fingerprint, registered_keys
from fedgft.deploy.processes import Processes
from fedgft.errors import FedgftError
from fedgft.files import whole
from fedgft.flower.roster import NODES

LOOK = 2.0  # seconds between looks at the SuperLink and the sites' keys


def run_server(folder: Folder, *, bind: str) -> None:
    """SuperLink and gate, until a signal comes or the SuperLink ends.

    `bind` is the address on which the gate listens. Sites whose keys are in the folder are
    registered; so are those whose keys are put there later.
    """
    check_engine()
    registered_keys(folder.nodes)
    _private(folder.engine / DATABASE)
    with Processes(folder.path, folder.engine, None, {NODES: str(folder.names)}) as processes:
        processes.start("SuperLink", folder.superlink_command())
        processes.await_port("SuperLink", folder.inner)
        register_sites(folder)

        def look() -> None:
            if not processes.alive("SuperLink"):
                raise FedgftError("the SuperLink ended; start the server again: sites and finished "
                                  "rounds are kept")  # fmt: skip

        asyncio.run(_serve(folder, bind, look))


def run_gate(folder: Folder, *, bind: str) -> None:
    """The gate alone, in front of a SuperLink that was started otherwise."""
    check_engine()
    registered_keys(folder.nodes)
    asyncio.run(_serve(folder, bind, lambda: None))


async def _serve(folder: Folder, bind: str, look: Any, limits: Limits | None = None) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_broken_connection)
    ended = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:  # as nohup and background jobs want it
            loop.add_signal_handler(sign, ended.set)
    keys = KeyFolder(folder.nodes)
    gate = Gate(
        f"127.0.0.1:{folder.inner}",
        authority=folder.path / "ca.crt",
        signatures=Signatures(keys),
        limits=limits,
    )
    tls = server_tls(folder.path / "server.crt", folder.path / "server.tls")
    try:
        server = await gate.serve(bind, folder.port, tls)
    except OSError as error:
        raise FedgftError(f"port {folder.port} of {bind}: cannot be used "
                          f"({error.strerror})") from None  # fmt: skip
    log.info("open for %d site(s) on %s, port %d", len(keys()), bind, folder.port)
    known = keys()
    try:
        while not ended.is_set():
            look()
            if keys() is not known:
                known = keys()
                log.info("the sites' keys have changed; now %s", ", ".join(known.values()))
                try:
                    await asyncio.to_thread(register_sites, folder)
                except FedgftError as error:
                    log.error("%s", error)
            try:
                async with asyncio.timeout(LOOK):
                    await ended.wait()
            except TimeoutError:
                pass
    finally:
        server.close()
        await gate.close()


def _broken_connection(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A handshake that failed, such as plain text on a TLS port, is one line of the log."""
    log.info("a connection was given up: %s", context.get("exception") or context.get("message"))


def register_sites(folder: Folder) -> None:
    """Register every key in the folder that the SuperLink does not know, and note which node is
    which site."""
    keys = registered_keys(folder.nodes)
    try:
        named, new = register_nodes(folder, keys)
    except Exception as error:
        raise FedgftError(f"the SuperLink does not register sites: {error}") from None
    for key in new:
        log.info("registered site '%s', key %s", keys[key], fingerprint(key))
    with whole(folder.names) as part:
        part.write_text(json.dumps(named), "utf-8")


def _private(path: Path) -> None:
    """Make the file, if need be, and let only its owner read it."""
    path.touch(mode=0o600)
    path.chmod(0o600)
