"""Attacks on the server of a federation, with real processes: a gate and a SuperLink behind it.

A second SuperLink runs as Flower's own command starts it. If an attack succeeds there, a test says
so: the test would notice if the gate stopped refusing the attack.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedgft.deploy.init import (
    FederationFolder,
    create_authority,
    create_federation,
    create_node_key,
    read_private_key,
    read_public_key,
    read_site_keys,
)
from fedgft.deploy.local_run import start_server
from fedgft.deploy.processes import Processes, flower_commands_folder, free_port
from fedgft.deploy.server import FLEET_PATHS, GateLimits, Refusal, SignatureChecker
from fedgft.deploy.site import SitePlan, find_refusal, signed_headers
from fedgft.errors import FedgftError

pytestmark = pytest.mark.slow


@dataclass
class Hosts:
    folder: FederationFolder
    processes: Processes
    open: int  # port of a SuperLink without a gate

    @property
    def log(self) -> str:
        assert self.processes.logs is not None
        return (self.processes.logs / "server.log").read_text("utf-8", "replace")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    base = tmp_path_factory.mktemp("attacked")
    folder = create_federation(
        base / "federation",
        sites=("north", "south"),
        host="127.0.0.1",
        port=free_port(),
        superlink_port=free_port(),
        make_keys=True,
    )
    other = free_port()
    with Processes(folder.path, folder.engine, base / "logs") as processes:
        processes.start(
            "open",
            [
                f"{flower_commands_folder()}flower-superlink",
                "--ssl-ca-certfile",
                "ca.crt",
                "--ssl-certfile",
                "server.crt",
                "--ssl-keyfile",
                "server.tls",
                "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
                "--host",
                "127.0.0.1",
                "--port",
                str(other),
            ],
        )
        start_server(folder, processes)
        processes.wait_for_port("open", other)
        yield Hosts(folder, processes, other)


def connect(hosts: Hosts, port: int, *, timeout: float = 20.0) -> ssl.SSLSocket:
    tls = ssl.create_default_context(cafile=hosts.folder.path / "ca.crt")
    wire = socket.create_connection(("127.0.0.1", port), timeout)
    return tls.wrap_socket(wire, server_hostname="127.0.0.1")


def answer(wire: ssl.SSLSocket) -> tuple[int, bytes]:
    """Status and body of one HTTP answer; status 0 where the connection ends without one."""
    held = b""
    try:
        while b"\r\n\r\n" not in held:
            part = wire.recv(65536)
            if not part:
                return 0, held
            held += part
        head, _, body = held.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length"))
        while len(body) < length:
            body += wire.recv(65536)
    except (ConnectionError, ssl.SSLError, StopIteration):
        return 0, held
    return int(head.split()[1]), body


def send(hosts: Hosts, port: int, raw: bytes) -> tuple[int, bytes]:
    with connect(hosts, port) as wire:
        wire.sendall(raw)
        return answer(wire)


def request(
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    method: str = "POST",
    version: str = "HTTP/1.1",
) -> bytes:
    given = {
        "Host": "127.0.0.1",
        "content-type": PROTOBUF_MEDIA_TYPE,
        "Content-Length": str(len(body)),
    }
    lines = [f"{method} {path} {version}"]
    lines += [f"{name}: {value}" for name, value in (given | (headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin1") + body


def signed(hosts: Hosts, site: str = "north") -> dict[str, str]:
    return signed_headers(read_private_key(hosts.folder.nodes / f"{site}.key"))


PULL = PullMessagesRequest().SerializeToString()

# What an outsider without any key may ask for


CLOSED = {  # path, body, and what Flower answers: 200, or a complaint about what was asked
    "control: list runs": ("/v1/control/list-runs", ListRunsRequest().SerializeToString(), 200),
    "control: list sites": ("/v1/control/list-nodes", b"", 200),
    "control: start a run": ("/v1/control/start-run", b"", 500),  # it misses the app
    "control: register a key": (
        "/v1/control/register-node",
        RegisterNodeRequest(public_key=b"x", name="x").SerializeToString(),
        412,
    ),
    "runtime: take a task": (
        "/v1/runtime/acquire-task",
        AcquireTaskRequest(supported_task_types=["clientapp"]).SerializeToString(),
        200,
    ),
}


@pytest.mark.parametrize("attack", CLOSED)
def test_only_the_fleet_interface_is_there(hosts: Hosts, attack: str) -> None:
    """Neither without a signature nor with a site's own."""
    path, body, reached = CLOSED[attack]
    for headers in ({}, signed(hosts)):
        status, said = send(hosts, hosts.folder.port, request(path, body, headers))
        assert status == 403 and b"only the fleet interface" in said
    assert f"POST {path}: 403" in hosts.log
    found, said = send(hosts, hosts.open, request(path, body))
    assert found == reached, f"Flower answers this to anybody: {said!r}"


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/health", "/", "*"])
def test_no_documentation_or_health(hosts: Hosts, path: str) -> None:
    status, _ = send(hosts, hosts.folder.port, request(path, method="GET"))
    assert status == 403
    assert path != "/docs" or send(hosts, hosts.open, request(path, method="GET"))[0] == 200


def test_every_path_that_passes_asks_the_superlink_for_a_signature(hosts: Hosts) -> None:
    """None of them is open, and they are Flower's own but for the two that register."""
    from flwr.superlink.routers.fleet.router import router

    theirs = {route.path.encode() for route in router.routes}
    assert theirs - FLEET_PATHS == {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node"}
    assert theirs >= FLEET_PATHS
    for path in sorted(FLEET_PATHS):
        status, said = send(hosts, hosts.folder.port, request(path.decode()))
        assert status == 400 and b"not signed" in said


def test_an_intruder_cannot_register_a_key(hosts: Hosts, tmp_path: Path) -> None:
    create_node_key(tmp_path, "intruder")
    mine = read_public_key(tmp_path / "intruder.pub")
    own = signed_headers(read_private_key(tmp_path / "intruder.key"))
    for path, body in (
        ("/v1/fleet/register-node", RegisterNodeFleetRequest(public_key=mine)),
        ("/v1/control/register-node", RegisterNodeRequest(public_key=mine, name="intruder")),
    ):
        raw = request(path, body.SerializeToString(), own)
        assert send(hosts, hosts.folder.port, raw)[0] == 403
    status, _ = send(hosts, hosts.open, raw)
    assert status == 200, "Flower registers any key"
    body = ActivateNodeRequest(public_key=mine, heartbeat_interval=30.0).SerializeToString()

    def activate(port):
        return send(
            hosts,
            port,
            request(
                "/v1/fleet/activate-node",
                body,
                signed_headers(read_private_key(tmp_path / "intruder.key")),
            ),
        )

    assert activate(hosts.open)[0] == 200, "and then the intruder is a node"
    status, said = activate(hosts.folder.port)
    assert status == 400 and b"unknown key" in said


# Path tricks and smuggling


TRICKS = [
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet//../control/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/pull-messages?x=/v1/control/list-runs",
    "/v1/fleet/pull-messages#",
    "/v1/fleet/pull-messages/",
    "/v1/fleet%2fpull-messages",
    "/V1/fleet/pull-messages",
    "//v1/control/list-runs",
    "/v1\\fleet\\..\\control\\list-runs",
    "https://127.0.0.1/v1/fleet/pull-messages",
    "http://127.0.0.1/v1/control/list-runs",
    "https://127.0.0.1/v1/control/list-runs",
    "127.0.0.1:443",
]


@pytest.mark.parametrize("path", TRICKS)
def test_path_tricks(hosts: Hosts, path: str) -> None:
    status, _ = send(hosts, hosts.folder.port, request(path, PULL, signed(hosts)))
    assert status in (400, 403)


def test_other_methods(hosts: Hosts) -> None:
    for method in ("GET", "PUT", "CONNECT", "OPTIONS", "TRACE"):
        raw = request("/v1/fleet/pull-messages", PULL, signed(hosts), method=method)
        assert send(hosts, hosts.folder.port, raw)[0] == 403, method


INNER = request("/v1/control/list-runs", b"")


def _smuggled(hosts: Hosts) -> dict[str, bytes]:
    """A second request inside the first, for a server that measures bodies otherwise."""
    head = request("/v1/fleet/pull-messages", b"", signed(hosts)).decode("latin1")
    head = head.replace("Content-Length: 0\r\n", "").removesuffix("\r\n")
    chunked = b"0\r\n\r\n" + INNER
    one = len(INNER)
    return {
        "two lengths": f"{head}Content-Length: 0\r\nContent-Length: {one}\r\n\r\n".encode() + INNER,
        "a list of lengths": f"{head}Content-Length: 0, {one}\r\n\r\n".encode() + INNER,
        "length and chunks": (
            f"{head}Content-Length: {one + 5}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            + chunked
        ),
        "chunks": f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunked,
        "odd chunks": f"{head}Transfer-Encoding: xchunked\r\n\r\n".encode() + chunked,
        "a negative length": f"{head}Content-Length: -1\r\n\r\n".encode() + INNER,
        "a signed length": f"{head}Content-Length: +{one}\r\n\r\n".encode() + INNER,
        "no length": f"{head}\r\n".encode() + INNER,
        "a space before the colon": f"{head}Content-Length : {one}\r\n\r\n".encode() + INNER,
        "a folded header": f"{head}X: a\r\n Content-Length: {one}\r\n\r\n".encode() + INNER,
        "a zero byte": f"{head}X: a\x00b\r\nContent-Length: 0\r\n\r\n".encode() + INNER,
        "HTTP/1.0": request("/v1/fleet/pull-messages", PULL, signed(hosts), version="HTTP/1.0")
        + INNER,
        "upgrade": f"{head}Upgrade: h2c\r\nContent-Length: 0\r\n\r\n".encode() + INNER,
    }


def test_smuggled_requests_do_not_arrive(hosts: Hosts) -> None:
    """Each is refused, the connection ends, and the SuperLink saw no control request."""
    before = hosts.log.count('"POST /v1/control/list-runs')
    for name in _smuggled(hosts):
        with connect(hosts, hosts.folder.port) as wire:
            wire.sendall(_smuggled(hosts)[name])
            status, _ = answer(wire)
            assert status in (400, 411, 501, 505), name
            assert answer(wire)[0] == 0, name  # nothing follows
    assert hosts.log.count('"POST /v1/control/list-runs') == before


def test_a_second_request_on_a_connection_is_checked_like_the_first(hosts: Hosts) -> None:
    """Also where both are sent at once."""
    good = request("/v1/fleet/pull-messages", PULL, signed(hosts))
    with connect(hosts, hosts.folder.port) as wire:
        wire.sendall(good + INNER)
        assert answer(wire)[0] == 401  # of the SuperLink: such a question names no node
        assert answer(wire)[0] == 403
        assert answer(wire)[0] == 0
    with connect(hosts, hosts.folder.port) as wire:  # an honest connection goes on
        for _ in range(3):
            wire.sendall(request("/v1/fleet/pull-messages", PULL, signed(hosts)))
            assert answer(wire)[0] == 401


# Signatures


def test_a_copied_signature_is_good_once(hosts: Hosts) -> None:
    """Flower signs the time alone: the same headers serve any request for five minutes there."""
    once = signed(hosts)
    raw = request("/v1/fleet/pull-messages", PULL, once)
    assert send(hosts, hosts.folder.port, raw)[0] == 401  # passed
    for path in ("/v1/fleet/pull-messages", "/v1/fleet/push-object"):
        status, said = send(hosts, hosts.folder.port, request(path, PULL, once))
        assert status == 409 and b"replay" in said
    mine = read_public_key(hosts.folder.nodes / "south.pub")
    body = RegisterNodeRequest(public_key=mine, name="south").SerializeToString()
    assert send(hosts, hosts.open, request("/v1/control/register-node", body))[0] == 200
    body = ActivateNodeRequest(public_key=mine, heartbeat_interval=30.0).SerializeToString()
    copied = signed(hosts, "south")
    raw = request("/v1/fleet/activate-node", body, copied)
    found = [send(hosts, hosts.open, raw)[0] for _ in range(2)]
    assert found[0] == 200 and found[1] != 401, "Flower lets the copy through"


def test_a_signature_in_another_form_is_a_copy_too(hosts: Hosts) -> None:
    """(r, s) and (r, -s) are both valid; so are other ways to write the key."""
    from base64 import b64decode, b64encode

    from cryptography.hazmat.primitives.asymmetric.utils import (
        decode_dss_signature,
        encode_dss_signature,
    )

    order = int(
        "FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF"
        "581A0DB248B0A77AECEC196ACCC52973",
        16,
    )
    once = signed(hosts)
    assert send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages", PULL, once))[0] == 401
    r, s = decode_dss_signature(b64decode(once[FLEET_HTTP_SIGNATURE_HEADER]))
    other = b64encode(encode_dss_signature(r, order - s)).decode()
    copied = once | {FLEET_HTTP_SIGNATURE_HEADER: other}
    status, _ = send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages", PULL, copied))
    assert status == 409
    key = b64decode(once[FLEET_HTTP_PUBLIC_KEY_HEADER]) + b"\n"
    copied = once | {FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode()}
    status, _ = send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages", PULL, copied))
    assert status == 400


def test_another_sites_signature(hosts: Hosts) -> None:
    """The key of one site and the signature of another; and no key that fits."""
    mixed = signed(hosts, "north") | {
        FLEET_HTTP_PUBLIC_KEY_HEADER: signed(hosts, "south")[FLEET_HTTP_PUBLIC_KEY_HEADER]
    }
    status, said = send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages", PULL, mixed))
    assert status == 400 and b"signature is not that of site 'south'" in said


def moved(hosts: Hosts, seconds: float) -> dict[str, str]:
    from base64 import b64encode

    key = read_private_key(hosts.folder.nodes / "north.key")
    moment = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, moment.encode())).decode(),
        TIMESTAMP_HEADER: moment,
    }


@pytest.mark.parametrize(("seconds", "says"), [(30, "30 s ahead of"), (-400, "400 s behind")])
def test_a_clock_that_is_wrong_is_named(hosts: Hosts, seconds: float, says: str) -> None:
    raw = request("/v1/fleet/pull-messages", PULL, moved(hosts, seconds))
    status, said = send(hosts, hosts.folder.port, raw)
    assert status == 400 and says in said.decode() and b"site 'north'" in said


def test_what_was_signed_before_the_gate_started_is_not_accepted(hosts: Hosts) -> None:
    """It may have been used with the gate before; an honest node signs anew after a 503."""
    raw = request("/v1/fleet/pull-messages", PULL, moved(hosts, -290))
    assert send(hosts, hosts.folder.port, raw)[0] == 503


def test_signatures_are_forgotten_only_when_they_are_too_old(tmp_path: Path, monkeypatch) -> None:
    """What the gate no longer remembers is refused for its age."""
    import fedgft.deploy.server as gate

    create_node_key(tmp_path, "a")
    key = read_private_key(tmp_path / "a.key")
    start = datetime.now(UTC)
    passed = [0.0]

    def now():
        return start + timedelta(seconds=passed[0])

    monkeypatch.setattr(gate.time, "monotonic", lambda: 1000 + passed[0])
    checks = SignatureChecker(lambda: read_site_keys(tmp_path), clock=now)
    passed[0] = 1.0
    monkeypatch.setattr("flwr.supercore.date.now", now)
    headers = {name.encode(): value.encode() for name, value in signed_headers(key).items()}
    assert checks.authenticate(headers) == "a"
    for seconds in (1.5, 100, 300, 310, 330, 5000):
        passed[0] = seconds
        with pytest.raises(Refusal) as refused:
            checks.authenticate(headers)
        assert refused.value.status == (409 if seconds < 306 else 400)


def test_a_key_that_is_taken_away_is_refused(hosts: Hosts) -> None:
    """And one that is put there is registered, without a restart."""
    path = hosts.folder.nodes / "late.pub"
    create_node_key(hosts.folder.nodes, "late")

    def ask():
        return send(
            hosts,
            hosts.folder.port,
            request("/v1/fleet/pull-messages", PULL, signed(hosts, "late")),
        )[0]

    until(lambda: ask() == 401 and "registered site 'late'" in hosts.log)
    path.unlink()
    until(lambda: ask() == 400)


def until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# Sizes and patience


def test_a_body_without_a_signature_is_not_read(hosts: Hosts) -> None:
    """The answer comes before the body: a stranger cannot fill the gate's memory."""
    for headers, length, expected in (
        ({}, 10**6, 400),
        (signed(hosts), GateLimits().body_bytes + 1, 413),
        (signed(hosts), 10**30, 400),
    ):
        with connect(hosts, hosts.folder.port) as wire:
            told = {"Content-Length": str(length), **headers}
            wire.sendall(request("/v1/fleet/push-object", b"", told))
            assert answer(wire)[0] == expected


def test_a_body_of_the_usual_size_passes(hosts: Hosts) -> None:
    from flwr.proto.message_pb2 import PushObjectRequest

    body = PushObjectRequest(object_content=b"x" * 5_300_000).SerializeToString()
    raw = request("/v1/fleet/push-object", body, signed(hosts))
    assert send(hosts, hosts.folder.port, raw)[0] == 401  # read in full, and passed on


def test_headers_without_end(hosts: Hosts) -> None:
    with connect(hosts, hosts.folder.port) as wire:
        try:
            wire.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nX: " + b"x" * 70_000)
            assert answer(wire)[0] in (0, 400, 431)
        except OSError:  # the gate has closed the connection already
            pass
    answered = send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages"))[0]
    assert answered in (400, 401)  # the gate still answers others


def test_slow_connections_are_ended_and_do_not_keep_sites_out(hosts: Hosts) -> None:
    """Half requests that never end, from one address: the gate takes 32, and drops them."""
    slow = []
    try:
        for _ in range(GateLimits().unauthenticated):
            wire = connect(hosts, hosts.folder.port)
            wire.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nX: ")
            slow.append(wire)
        status, said = send(hosts, hosts.folder.port, request("/v1/fleet/pull-messages"))
        assert status == 503 and b"too many connections" in said
        began = time.monotonic()
        assert answer(slow[0])[0] in (0, 408)
        assert time.monotonic() - began < GateLimits().header_seconds + 5

        def ask():
            return send(
                hosts, hosts.folder.port, request("/v1/fleet/pull-messages", PULL, signed(hosts))
            )[0]

        until(lambda: ask() == 401)
    finally:
        for wire in slow:
            wire.close()


def test_many_connections_of_a_site(hosts: Hosts) -> None:
    """Those that have shown a signature do not count as unauthenticated."""
    wires = []
    try:
        for _ in range(GateLimits().unauthenticated + 10):
            wire = connect(hosts, hosts.folder.port)
            wires.append(wire)
            wire.sendall(request("/v1/fleet/pull-messages", PULL, signed(hosts)))
            assert answer(wire)[0] == 401
    finally:
        for wire in wires:
            wire.close()


# TLS


def plan(hosts: Hosts, **changed) -> SitePlan:
    folder = hosts.folder
    held = {
        "server": folder.address,
        "certificate": folder.path / "ca.crt",
        "key": folder.nodes / "north.key",
        "node_config": 'site="north"',
    }
    return SitePlan(**(held | changed))


def test_plain_text_is_not_answered(hosts: Hosts) -> None:
    with socket.create_connection(("127.0.0.1", hosts.folder.port), 20) as wire:
        wire.sendall(request("/v1/fleet/pull-messages", PULL, signed(hosts)))
        with suppress(ConnectionError):
            assert b"HTTP" not in wire.recv(1000)


def test_old_tls_is_not_spoken(hosts: Hosts) -> None:
    tls = ssl.create_default_context(cafile=hosts.folder.path / "ca.crt")
    with pytest.warns(DeprecationWarning):
        tls.minimum_version = ssl.TLSVersion.TLSv1
        tls.maximum_version = ssl.TLSVersion.TLSv1_1
    tls.set_ciphers("ALL:@SECLEVEL=0")
    wire = socket.create_connection(("127.0.0.1", hosts.folder.port), 20)
    with wire, pytest.raises((ssl.SSLError, ConnectionError)):
        tls.wrap_socket(wire, server_hostname="127.0.0.1")


def test_a_refused_site_reads_why(hosts: Hosts, tmp_path: Path, monkeypatch) -> None:
    assert find_refusal(plan(hosts)) == ("", False)
    create_node_key(tmp_path, "unknown")
    said, passes = find_refusal(plan(hosts, key=tmp_path / "unknown.key"))
    assert "unknown key" in said and not passes
    create_authority(tmp_path)
    said, passes = find_refusal(plan(hosts, certificate=tmp_path / "ca.crt"))
    assert "was not issued by the authority in" in said and not passes
    said, passes = find_refusal(plan(hosts, server=f"127.0.0.1:{free_port()}"))
    assert "cannot be reached" in said and passes
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        import threading

        def greet() -> None:
            wire, _ = plain.accept()
            with wire:
                wire.recv(1000)
                wire.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        said, passes = find_refusal(plan(hosts, server=f"127.0.0.1:{plain.getsockname()[1]}"))
        thread.join()
    assert "does not speak TLS" in said and not passes

    def ahead():
        return datetime.now(UTC) + timedelta(seconds=60)

    monkeypatch.setattr("fedgft.deploy.site.now", ahead)
    said, passes = find_refusal(plan(hosts))
    assert "60 s ahead of the server's" in said and not passes
    direct = plan(hosts, server=f"127.0.0.1:{hosts.open}")  # as behind another proxy
    clock = time.time
    monkeypatch.setattr("fedgft.deploy.site.time.time", lambda: clock() + 60)
    assert "s ahead of the server's; switch on NTP" in find_refusal(direct)[0]


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    create_node_key(tmp_path, "a")
    (tmp_path / "a.key").chmod(0o640)
    with pytest.raises(FedgftError, match="chmod 600"):
        read_private_key(tmp_path / "a.key")
    (tmp_path / "b.key").write_text("no key")
    with pytest.raises(FedgftError, match="not the private key"):
        read_private_key(tmp_path / "b.key")


# Another user of the server's host


STRANGER = """
import encodings.idna, os, socket, ssl, sys
port, folder, uid, media = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
tls = ssl.create_default_context(cafile=folder + "/ca.crt")
more = f"X-Forwarded-For: {sys.argv[5]}\\r\\n" if len(sys.argv) > 5 else ""
if uid != os.getuid():
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task"):
    wire = tls.wrap_socket(socket.create_connection(("127.0.0.1", port), 20),
                           server_hostname="127.0.0.1")
    head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: {media}\\r\\n{more}"
    wire.sendall(f"{head}Content-Length: 0\\r\\n\\r\\n".encode())
    print(wire.recv(1000).split()[1].decode())
"""


def asks(hosts: Hosts, port: int, uid: int, *more: str) -> list[int]:
    told = [str(port), str(hosts.folder.path), str(uid), PROTOBUF_MEDIA_TYPE, *more]
    command = [sys.executable, "-c", STRANGER, *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_local_user_cannot_control_the_superlink(hosts: Hosts) -> None:
    nobody = 65534
    assert asks(hosts, hosts.folder.superlink_port, nobody) == [403, 403]
    with connect(hosts, hosts.folder.superlink_port) as wire:  # an address of ours to borrow
        mine = "{}:{}".format(*wire.getsockname())
        assert asks(hosts, hosts.folder.superlink_port, nobody, mine) == [403, 403]
    assert asks(hosts, hosts.open, nobody) == [200, 200], "Flower answers every user"


def test_the_same_user_can_control_the_superlink(hosts: Hosts) -> None:
    assert asks(hosts, hosts.folder.superlink_port, os.getuid()) == [200, 200]


def test_owner_of_a_socket() -> None:
    """Only while it is open: a closed one is listed as root's."""
    from fedgft.deploy.processes import socket_owner

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as ours:
            theirs, _ = listening.accept()
            ends = ours.getsockname(), ours.getpeername()
            assert socket_owner(*ends) == os.getuid()
            assert socket_owner(ends[0], (ends[1][0], 1)) is None
        assert socket_owner(*ends) is None
        theirs.close()


def test_secrets_of_the_server_are_for_its_user(hosts: Hosts) -> None:
    held = [hosts.folder.engine / "state.db", hosts.folder.path / "ca.key"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in held)
    assert hosts.folder.path.stat().st_mode & 0o077 == 0


# Flower's internals


def test_another_release_of_flower_is_refused(monkeypatch) -> None:
    from fedgft.deploy import processes as engine

    engine.check_flower_version()
    for found in ("1.42.0", "1.4.1", "2.0", "1.410.0"):
        monkeypatch.setattr(engine, "version", lambda name, found=found: found)
        with pytest.raises(FedgftError, match=f"tested with Flower 1.41, and {found} is installed"):
            engine.check_flower_version()


def test_the_extra_asks_for_the_release_that_was_tested() -> None:
    import tomllib

    from fedgft.deploy.processes import TESTED_FLOWER

    root = Path(__file__).parents[1]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = map(int, TESTED_FLOWER.split("."))
    assert f"flwr>={TESTED_FLOWER},<{major}.{minor + 1}" in extra["flower"]
    assert f"flwr=={TESTED_FLOWER}." in (root / "constraints.txt").read_text()


def test_the_attacks_left_the_server_up(hosts: Hosts) -> None:
    """Last of all: it answers sites as before, and no error of its own is in the log."""
    raw = request("/v1/fleet/pull-messages", PULL, signed(hosts))
    assert send(hosts, hosts.folder.port, raw)[0] == 401
    assert "Traceback" not in hosts.log and "an error of the gate" not in hosts.log
    assert json.loads(hosts.folder.node_names.read_text())
