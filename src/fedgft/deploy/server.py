"""The server of a federation: Flower's SuperLink on loopback and the gate in front of it."""

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedgft.deploy.certificates import fingerprint, read_site_keys
from fedgft.deploy.gate import Gate, KeyFolder, Signatures, log, server_tls
from fedgft.deploy.init import DATABASE, FederationFolder
from fedgft.deploy.processes import Processes, check_flower_version
from fedgft.errors import FedgftError
from fedgft.flower.replies import NODES_VARIABLE
from fedgft.store import atomic_write


@contextmanager
def control_client(folder: FederationFolder) -> Iterator[Any]:
    """Open Flower's client for the control interface, which is served on loopback only."""
    client = ControlHttpClient.from_server_address(
        f"127.0.0.1:{folder.inner}",
        insecure=False,
        root_certificates=(folder.path / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    finally:
        client.close()


def register_nodes(
    folder: FederationFolder, keys: dict[bytes, str]
) -> tuple[dict[str, str], list[bytes]]:
    """Register every key that the SuperLink does not know.

    Parameters
    ----------
    folder
        The federation.
    keys
        Public key -> name of the site (`read_site_keys`).

    Returns
    -------
    names, new
        {node: site} for all keys, and the keys that this call registered.
    """
    new = []
    with control_client(folder) as client:
        nodes = {n.public_key: n.node_id for n in client.ListNodes(ListNodesRequest()).nodes_info}
        for key, name in keys.items():
            if key not in nodes:
                made = client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                nodes[key] = made.node_id
                new.append(key)
    return {str(nodes[key]): name for key, name in keys.items()}, new


def get_run_status(folder: FederationFolder, run: int) -> str:
    """Return a run's status, such as "finished:completed"; "unknown" if no answer comes.

    The exit code of `flwr run` does not tell whether a run succeeded.
    """
    try:
        with control_client(folder) as client:
            found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
    except httpx.HTTPError:  # a busy machine may not answer in time
        return "unknown"
    return f"{found.status}:{found.sub_status}" if found.sub_status else found.status


CHECK_SECONDS = 2.0  # seconds between checks of the SuperLink and the sites' keys


def run_server(folder: FederationFolder, *, bind: str) -> None:
    """Run SuperLink and gate until a signal arrives or the SuperLink ends.

    All sites whose public keys are in the folder are registered, even if added later.

    Parameters
    ----------
    folder
        The federation's folder, as `fedgft deploy init` creates it.
    bind
        Address on which the gate listens.
    """
    check_flower_version()
    read_site_keys(folder.nodes)
    database = folder.engine / DATABASE
    database.touch(mode=0o600)
    database.chmod(0o600)  # the file may have existed with another mode
    names = {NODES_VARIABLE: str(folder.names)}
    with Processes(folder.path, folder.engine, None, names) as processes:
        processes.start("SuperLink", folder.superlink_command())
        processes.wait_for_port("SuperLink", folder.inner)
        register_sites(folder)
        asyncio.run(_serve(folder, bind, lambda: processes.is_alive("SuperLink")))


def run_gate(folder: FederationFolder, *, bind: str) -> None:
    """Run the gate alone, in front of a SuperLink that was started by other means."""
    check_flower_version()
    read_site_keys(folder.nodes)
    asyncio.run(_serve(folder, bind, lambda: True))


async def _serve(folder: FederationFolder, bind: str, is_alive: Callable[[], bool]) -> None:
    """Serve the gate until a signal arrives, and register sites whose keys are added.

    Raises a `FedgftError` as soon as `is_alive` says that the SuperLink has ended.
    """
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_broken_connection)
    ended = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:  # nohup and background jobs ignore it
            loop.add_signal_handler(sign, ended.set)
    keys = KeyFolder(folder.nodes)
    inner = f"127.0.0.1:{folder.inner}"
    gate = Gate(inner, authority=folder.path / "ca.crt", signatures=Signatures(keys))
    tls = server_tls(folder.path / "server.crt", folder.path / "server.tls")
    try:
        server = await gate.serve(bind, folder.port, tls)
    except OSError as error:
        raise FedgftError(
            f"port {folder.port} of {bind}: cannot be used ({error.strerror})"
        ) from None
    log.info("open for %d site(s) on %s, port %d", len(keys()), bind, folder.port)
    known = keys()
    try:
        while not ended.is_set():
            if not is_alive():
                raise FedgftError(
                    "the SuperLink ended; start the server again: sites and finished rounds are "
                    "kept"
                )
            if keys() is not known:
                known = keys()
                log.info("the sites' keys have changed; now %s", ", ".join(known.values()))
                try:
                    await asyncio.to_thread(register_sites, folder)
                except FedgftError as error:
                    log.error("%s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await ended.wait()
    finally:
        server.close()
        await gate.close()


def _log_broken_connection(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a failed handshake, such as plain text on a TLS port, in one line."""
    log.info("a connection was given up: %s", context.get("exception") or context.get("message"))


def register_sites(folder: FederationFolder) -> None:
    """Register every key that the SuperLink does not know; write the site of each node."""
    keys = read_site_keys(folder.nodes)
    try:
        named, new = register_nodes(folder, keys)
    except Exception as error:
        raise FedgftError(f"the SuperLink does not register sites: {error}") from None
    for key in new:
        log.info("registered site '%s', key %s", keys[key], fingerprint(key))
    with atomic_write(folder.names) as part:
        part.write(json.dumps(named).encode())
