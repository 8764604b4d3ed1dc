"""The server of a federation: Flower's SuperLink on loopback and the gate in front of it.

The gate is a reverse proxy on the one port that sites reach. It terminates TLS and forwards signed
requests of known sites to the fleet interface of the SuperLink; all other requests are refused and
logged.

Flower serves its fleet, control and runtime interfaces on one port, and only the first asks for a
key. The gate reads a request in full, checks it, and sends a new request to the SuperLink, which
never receives the original bytes. A body is read only after its sender's signature was checked.
"""

import asyncio
import json
import logging
import signal
import ssl
import time
from base64 import b64decode
from binascii import Error as Base64Error
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import h11
import httpx
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedgft.deploy.init import DATABASE, FederationFolder, fingerprint, read_site_keys
from fedgft.deploy.processes import LOOPBACK, Processes, check_flower_version
from fedgft.errors import FedgftError
from fedgft.flower.messages import NODES_VARIABLE
from fedgft.formatting import format_count, printable
from fedgft.store import atomic_write

log = logging.getLogger("fedgft.gate")

FLEET_PATHS = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in (
        "activate-node",
        "confirm-message-received",
        "deactivate-node",
        "get-fab",
        "get-run",
        "pull-messages",
        "pull-object",
        "push-messages",
        "push-object",
        "send-node-heartbeat",
    )
)
FORWARDED_HEADERS = frozenset(  # request headers that are forwarded to the SuperLink
    name.encode()
    for name in (
        "accept",
        "content-type",
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        TIMESTAMP_HEADER,
        "flwr-component-name",
        "flwr-package-name",
        "flwr-package-version",
    )
)
RETURNED_HEADERS = ("content-type", "flwr-version-incompatibility-message")
MAX_SECONDS_AHEAD = float(SYSTEM_TIME_TOLERANCE)  # seconds by which a site's clock may be ahead
MAX_SECONDS_BEHIND = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
CHECK_SECONDS = 2.0  # seconds between checks of the SuperLink and the sites' keys


@dataclass(frozen=True)
class GateLimits:
    """GateLimits per request, connection, address and site.

    Parameters
    ----------
    header_bytes, body_bytes
        Largest headers and body of a request. Flower cuts arrays into parts of 5 MiB.
    answer_bytes
        Largest answer of the SuperLink.
    header_seconds
        Time for the TLS handshake, and again for the headers of each request.
    body_seconds, answer_seconds
        Time for the body of a request, and for the SuperLink's answer.
    idle_seconds
        Time between two requests of one connection.
    connections
        Largest number of open connections.
    unauthenticated
        Largest number of open connections of one address without a valid signature so far.
    requests, requests_per_site
        Largest number of requests that are handled at a time, for all sites and for one site.
    log_lines
        Largest number of refusals that are logged per minute.
    """

    header_bytes: int = 16 * 1024
    body_bytes: int = 16 * 1024**2
    answer_bytes: int = 64 * 1024**2
    header_seconds: float = 10.0
    body_seconds: float = 120.0
    answer_seconds: float = 120.0
    idle_seconds: float = 60.0
    connections: int = 2000
    unauthenticated: int = 32
    requests: int = 64
    requests_per_site: int = 8
    log_lines: int = 100


class Refusal(Exception):
    """A request that is refused.

    Parameters
    ----------
    status
        HTTP status of the answer.
    reason
        Why it is refused; this text is sent to the client.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass
class SignatureChecker:
    """Authenticates requests: the key must be known, the clock right, and the signature new.

    Flower signs only the time, so a copied header could be used again for minutes with another
    body. Here, each signature is valid for one request. A request that was signed before the gate
    started is refused, since its signature may have been used.

    Parameters
    ----------
    keys
        Returns {public key as Flower sends it: name of the site}.
    clock
        Returns the time.
    used
        The signatures that were used and when, oldest first: (site, signed time) -> seconds.
    """

    keys: Callable[[], dict[bytes, str]]
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    used: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def authenticate(self, headers: dict[bytes, bytes]) -> str:
        """Return the name of the site that signed these headers; raise a Refusal otherwise."""
        key, signature, text = self._read_signature(headers)
        name = self.keys().get(key)
        if name is None:
            reason = "this site's public key is not among those of the federation"
            raise Refusal(400, f"unknown key: {reason}; hand NAME.pub to the server's operator")
        self._check_time(text, name)
        try:
            valid = verify_signature(bytes_to_public_key(key), text.encode("ascii"), signature)
        except (ValueError, TypeError):
            valid = False
        if not valid:
            raise Refusal(400, f"the signature is not that of site '{name}'")
        self._check_new(name, text)
        return name

    def _read_signature(self, headers: dict[bytes, bytes]) -> tuple[bytes, bytes, str]:
        """Return the public key, the signature and the signed time."""
        try:
            key, signature = (
                b64decode(headers[header.encode()], validate=True)
                for header in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
            )
            return key, signature, headers[TIMESTAMP_HEADER.encode()].decode("ascii")
        except (KeyError, ValueError, Base64Error):
            raise Refusal(400, "the request is not signed with a site's key") from None

    def _check_time(self, text: str, name: str) -> None:
        """Refuse a time that is far from the clock's, or before the start of the gate."""
        try:
            signed = datetime.fromisoformat(text)
            ahead = (signed - self.clock()).total_seconds()
        except (ValueError, TypeError, OverflowError):
            raise Refusal(400, f"site '{name}' sent no time that can be read") from None
        if ahead >= MAX_SECONDS_AHEAD or -ahead >= MAX_SECONDS_BEHIND:
            direction = "ahead of" if ahead > 0 else "behind"
            reason = f"clock: that of site '{name}' is {abs(ahead):.0f} s {direction} the server's"
            limit = f"{MAX_SECONDS_AHEAD:g} s ahead and {MAX_SECONDS_BEHIND:g} s behind"
            raise Refusal(400, f"{reason}; at most {limit} are accepted; switch on NTP")
        if signed <= self.started:  # after a 503, a site tries again with a new signature
            raise Refusal(503, f"site '{name}' signed this before the gate was started")

    def _check_new(self, name: str, text: str) -> None:
        """Refuse a signature that was used before; forget those too old to be accepted."""
        now = time.monotonic()
        seconds = MAX_SECONDS_BEHIND + MAX_SECONDS_AHEAD + 10
        while self.used and now - next(iter(self.used.values())) > seconds:
            self.used.popitem(last=False)
        if (name, text) in self.used:
            raise Refusal(409, f"replay: this signature of site '{name}' was used before")
        self.used[name, text] = now


class Gate:
    """The reverse proxy.

    Parameters
    ----------
    superlink
        HOST:PORT of the SuperLink on loopback.
    authority
        File with the certificate of the authority that issued the SuperLink's certificate.
    signatures
        Finds out which site signed a request.
    """

    def __init__(self, superlink: str, *, authority: Path, signatures: SignatureChecker) -> None:
        self.limits = GateLimits()
        self.signatures = signatures
        self.open = 0
        self.unauthenticated: Counter[str] = Counter()
        self.slots = asyncio.Semaphore(self.limits.requests)
        self.site_slots: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(self.limits.requests_per_site)
        )
        self._logged_at: deque[float] = deque()
        self._unlogged = 0
        self._client = httpx.AsyncClient(
            base_url=f"https://{superlink}",
            verify=ssl.create_default_context(cafile=str(authority)),
            timeout=httpx.Timeout(self.limits.answer_seconds, connect=5.0),
            trust_env=False,
        )

    async def serve(self, host: str, port: int, tls: ssl.SSLContext) -> asyncio.Server:
        """Start to listen, and return the server at once."""
        return await asyncio.start_server(
            self._handle_connection,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=self.limits.header_seconds,
            limit=64 * 1024,
            backlog=256,
        )

    async def close(self) -> None:
        """Close the connections to the SuperLink."""
        await self._client.aclose()

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Handle the requests of one connection in turn until one is refused."""
        address = str((writer.get_extra_info("peername") or ("unknown",))[0])
        self.open += 1
        self.unauthenticated[address] += 1
        connection = _Connection(self, reader, writer, address)
        try:
            if self.open > self.limits.connections:
                raise Refusal(503, "too many connections")
            if self.unauthenticated[address] > self.limits.unauthenticated:
                raise Refusal(503, "too many connections without a valid signature")
            while await connection.handle_request():
                pass
        except Refusal as refusal:
            await connection.refuse(refusal)
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the other side went away
        except Exception:
            log.exception("an error of the gate; the connection is closed")
        finally:
            self.open -= 1
            if connection.site is None:
                self.forget_unauthenticated(address)
            with suppress(Exception):
                writer.close()

    def forget_unauthenticated(self, address: str) -> None:
        """Subtract one from the unauthenticated connections of this address."""
        self.unauthenticated -= Counter((address,))  # this drops counts of 0

    async def forward(self, path: str, headers: list[Any], body: bytes) -> httpx.Response:
        """Forward a checked request to the SuperLink.

        Returns
        -------
        httpx.Response
            The answer, with its status, body and `RETURNED_HEADERS`. Raises a Refusal if the
            SuperLink does not answer or its answer is too long.
        """
        try:
            request = self._client.build_request("POST", path, headers=headers, content=body)
            response = await self._client.send(request, stream=True)
            try:
                content = bytearray()
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self.limits.answer_bytes:
                        raise Refusal(502, "the SuperLink's answer is too long")
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            raise Refusal(504, "the SuperLink does not answer") from None
        except httpx.HTTPError:
            raise Refusal(503, "the SuperLink is not up") from None
        found = response.headers
        kept = [(name, found[name]) for name in RETURNED_HEADERS if name in found]
        return httpx.Response(response.status_code, headers=kept, content=bytes(content))

    def log_refusal(self, address: str, request: str, refusal: Refusal) -> None:
        """Log a refusal, up to `GateLimits.log_lines` per minute."""
        now = time.monotonic()
        while self._logged_at and now - self._logged_at[0] > 60:
            self._logged_at.popleft()
        if len(self._logged_at) >= self.limits.log_lines:
            self._unlogged += 1
            return
        if self._unlogged:
            log.warning("%d more refusals were not logged", self._unlogged)
            self._unlogged = 0
        self._logged_at.append(now)
        log.warning("refused %s %s: %d %s", address, request, refusal.status, refusal.reason)


class _Connection:
    """One connection: its HTTP parser, current request and authenticated site."""

    def __init__(
        self, gate: Gate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self.gate = gate
        self.reader = reader
        self.writer = writer
        self.address = address
        self.site: str | None = None
        self.request_line = "(no request)"
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=gate.limits.header_bytes)

    async def handle_request(self) -> bool:
        """Read, check, forward and answer one request; return whether another may follow."""
        limits = self.gate.limits
        seconds = limits.header_seconds if self.site is None else limits.idle_seconds
        try:
            async with asyncio.timeout(seconds):
                event = await self._next_event()
        except TimeoutError:
            if self.site is not None:
                return False  # an idle connection
            raise Refusal(408, "no request in time") from None
        if not isinstance(event, h11.Request):
            return False
        headers = self._check_headers(event)
        site = self.gate.signatures.authenticate(headers)
        if self.site is None:
            self.gate.forget_unauthenticated(self.address)
        self.site = site
        async with self.gate.site_slots[site], self.gate.slots:
            body = await self._read_body()
            kept = [(name, headers[name]) for name in headers if name in FORWARDED_HEADERS]
            answer = await self.gate.forward(event.target.decode("ascii"), kept, body)
        await self._send(answer.status_code, list(answer.headers.items()), answer.content)
        if self.parser.our_state is not h11.DONE or self.parser.their_state is not h11.DONE:
            return False
        self.parser.start_next_cycle()
        return True

    def _check_headers(self, request: h11.Request) -> dict[bytes, bytes]:
        """Return the headers of a request for the fleet interface; refuse any other request."""
        method = request.method.decode("ascii", "replace")
        self.request_line = printable(f"{method} {request.target.decode('ascii', 'replace')}")[:200]
        if request.target not in FLEET_PATHS or request.method != b"POST":
            raise Refusal(403, "only the fleet interface is served here")
        if request.http_version != b"1.1":
            raise Refusal(505, "only HTTP/1.1 is served here")
        headers: dict[bytes, bytes] = {}
        for name, value in request.headers:
            if name in headers:
                raise Refusal(400, f"two headers {printable(name.decode('ascii', 'replace'))}")
            headers[name] = value
        if b"transfer-encoding" in headers or b"upgrade" in headers:
            raise Refusal(400, "a request must come whole, with its Content-Length")
        try:
            length = int(headers[b"content-length"])
        except (KeyError, ValueError):
            raise Refusal(411, "a request must name its Content-Length") from None
        if length > self.gate.limits.body_bytes:
            raise Refusal(413, f"a request may hold {self.gate.limits.body_bytes} bytes")
        return headers

    async def _read_body(self) -> bytes:
        """Read the body of the current request, within its time limit."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.gate.limits.body_seconds):
                while not isinstance(event := await self._next_event(), h11.EndOfMessage):
                    if not isinstance(event, h11.Data):
                        raise EOFError
                    body += event.data
        except TimeoutError:
            raise Refusal(408, "the request did not come in time") from None
        return bytes(body)

    async def _next_event(self) -> Any:
        """Return the parser's next event."""
        while True:
            try:
                event = self.parser.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self.parser.receive_data(await self.reader.read(64 * 1024))
            except h11.RemoteProtocolError as error:
                raise Refusal(error.error_status_hint, "not a valid HTTP request") from None

    async def _send(self, status: int, headers: list[Any], body: bytes) -> None:
        """Send an answer, with its date and length."""
        sent = [(name, value) for name, value in headers if name.lower() != "content-length"]
        sent.append(("Date", format_datetime(datetime.now(UTC), usegmt=True)))
        sent.append(("Content-Length", str(len(body))))
        head = h11.Response(status_code=status, headers=sent)
        for part in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.writer.write(self.parser.send(part) or b"")
        async with asyncio.timeout(self.gate.limits.body_seconds):
            await self.writer.drain()

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with the reason, as Flower's client prints it, and end the connection."""
        sender = "" if self.site is None else f" of site '{self.site}'"
        self.gate.log_refusal(self.address, f"{self.request_line}{sender}", refusal)
        body = json.dumps({"code": refusal.status, "detail": refusal.reason}).encode()
        headers = [("content-type", "application/json"), ("connection", "close")]
        with suppress(h11.LocalProtocolError, OSError, TimeoutError):
            await self._send(refusal.status, headers, body)


@dataclass
class KeyFolder:
    """The sites' public keys in a folder of NAME.pub files, read again when it changes."""

    folder: Path
    _file_times: Any = None
    _checked_at: float = -1e9
    _keys: dict[bytes, str] = field(default_factory=dict)

    def __call__(self) -> dict[bytes, str]:
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return self._keys
        self._checked_at = now
        try:
            paths = sorted(self.folder.glob("*.pub"))
            file_times = [(path.name, path.stat().st_mtime_ns) for path in paths]
            if file_times != self._file_times:
                self._keys = read_site_keys(self.folder)
                self._file_times = file_times
        except (OSError, FedgftError) as error:  # the keys that were read before stay valid
            log.error("%s", error)
        return self._keys


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings of the gate: 1.2 or newer, this certificate, only HTTP/1.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


# The server


@contextmanager
def control_client(folder: FederationFolder) -> Iterator[Any]:
    """Open Flower's client for the control interface, which is served on loopback only."""
    client = ControlHttpClient.from_server_address(
        f"{LOOPBACK}:{folder.superlink_port}",
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
    with control_client(folder) as client:
        nodes = {n.public_key: n.node_id for n in client.ListNodes(ListNodesRequest()).nodes_info}
        new = [key for key in keys if key not in nodes]
        for key in new:
            request = RegisterNodeRequest(public_key=key, name=keys[key])
            nodes[key] = client.RegisterNode(request).node_id
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
    names = {NODES_VARIABLE: str(folder.node_names)}
    with Processes(folder.path, folder.engine, None, names) as processes:
        processes.start("SuperLink", folder.superlink_command())
        processes.wait_for_port("SuperLink", folder.superlink_port)
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
    superlink = f"{LOOPBACK}:{folder.superlink_port}"
    gate = Gate(superlink, authority=folder.path / "ca.crt", signatures=SignatureChecker(keys))
    tls = server_tls(folder.path / "server.crt", folder.path / "server.tls")
    try:
        server = await gate.serve(bind, folder.port, tls)
    except OSError as error:
        raise FedgftError(
            f"port {folder.port} of {bind}: cannot be used ({error.strerror})"
        ) from None
    sites = format_count(len(keys()), "site")
    log.info("open for %s on %s, port %d", sites, bind, folder.port)
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
    with atomic_write(folder.node_names) as part:
        part.write(json.dumps(named).encode())
