"""A site of a federation: a SuperNode that connects to the server's gate, and a runner that answers
messages with the app installed here. A site that is refused says why."""

import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fedgft.deploy.engine import POLL, check_engine
from fedgft.deploy.folder import shipped_app
from fedgft.deploy.keys import authority, certificate_for, private_key, write_secret
from fedgft.deploy.processes import Processes, free_port
from fedgft.errors import FedgftError
from fedgft.layout import printable

HERE = "127.0.0.1"
STALE = 100.0  # seconds; for 60 the server takes a site that was killed for one that is there
AGAIN = 5.0  # seconds between tries meanwhile


@dataclass(frozen=True)
class SitePlan:
    """`server` is HOST:PORT of the gate; `told` the node's configuration, such as data="x.csv".

    `app` is the folder of the Flower app that the site runs, by default the one that is installed
    with this library. `poll` is how often, in seconds, the node asks the server for work.
    """

    server: str
    certificate: Path  # of the federation's authority
    key: Path
    told: str
    app: Path = field(default_factory=shipped_app)
    poll: float = 1.0


def run_site(plan: SitePlan, note: Callable[[str], None]) -> None:
    """Take part until a signal comes. Ends with the reason where the server refuses this site."""
    from fedgft.deploy.runner import Runner, import_everything, load_app

    check_engine()
    reason, temporary = why_refused(plan)
    if reason and not temporary:
        raise FedgftError(f"the server refuses this site: {reason}")
    if reason:
        note(f"{reason}; trying again until it answers")
    app = load_app(plan.app)
    with tempfile.TemporaryDirectory(prefix="fedgft-site-") as name:
        work = Path(name)
        issuer = authority(work)
        certificate_for(work, "node", issuer, [HERE])
        secret = secrets.token_bytes(32)
        write_secret(work / "secret", secret)
        (work / "engine").mkdir(mode=0o700)
        failing = time.monotonic()  # since when no node has lived for long
        while True:
            began = time.monotonic()
            port = free_port()
            variables = {POLL: str(plan.poll)}
            with Processes(Path.cwd(), work / "engine", None, variables) as processes:
                processes.start("node", _node_command(plan, work, port))
                import_everything()  # while the node starts
                runner = Runner(
                    app,
                    address=f"{HERE}:{port}",
                    authority=(work / "ca.crt").read_bytes(),
                    secret=secret,
                )
                runner.run(lambda: processes.alive("node"))
            reason, temporary = why_refused(plan)
            if reason and not temporary:
                raise FedgftError(f"the server refuses this site: {reason}")
            now = time.monotonic()
            failing = now if now - began > STALE else failing
            if now - failing > STALE and not reason:
                raise FedgftError("the site's node ends again and again; what it said is above")
            note(f"{reason or 'the server may still count an earlier process of this site'}; "
                 "trying again")  # fmt: skip
            time.sleep(AGAIN)


def _node_command(plan: SitePlan, work: Path, port: int) -> list[str]:
    return [
        sys.executable, "-m", "fedgft.deploy.engine", "supernode",
        "--root-certificates", str(plan.certificate), "--superlink", plan.server,
        "--auth-supernode-private-key", str(plan.key),
        "--ssl-ca-certfile", str(work / "ca.crt"), "--ssl-certfile", str(work / "node.crt"),
        "--ssl-keyfile", str(work / "node.tls"), "--host", HERE, "--port", str(port),
        "--isolation", "process", "--superexec-auth-secret-file", str(work / "secret"),
        "--node-config", plan.told,
    ]  # fmt: skip


def why_refused(plan: SitePlan) -> tuple[str, bool]:
    """Ask the server as the node will: the reason for a refusal ("" for none), and whether it may
    pass by itself, as where the server is down."""
    import httpx

    key = private_key(plan.key)
    try:
        tls = ssl.create_default_context(cafile=str(plan.certificate))
    except OSError as error:  # ssl.SSLError is one
        raise FedgftError(f"{plan.certificate}: not the certificate of an authority "
                          f"({error.strerror or error})") from None  # fmt: skip
    try:
        answer = httpx.post(
            f"https://{plan.server}/v1/fleet/pull-messages",
            content=_question(),
            headers=signed_headers(key),
            verify=tls,
            timeout=10.0,
            trust_env=False,
        )
    except httpx.TransportError as error:
        return _transport(plan, error)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        raise FedgftError(f"server {plan.server}: write HOST:PORT") from None
    return _answered(answer)


def signed_headers(key: Any) -> dict[str, str]:
    """Headers of a request to the fleet interface, as Flower's SuperNode signs them."""
    from base64 import b64encode

    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    moment = now().isoformat()
    return {
        "content-type": PROTOBUF_MEDIA_TYPE,
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, moment.encode())).decode(),
        TIMESTAMP_HEADER: moment,
    }


def _question() -> bytes:
    """A question for messages of no node: the SuperLink answers 401 to a site that it knows."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    return PullMessagesRequest().SerializeToString()


def _answered(answer: Any) -> tuple[str, bool]:
    """The reason in an answer: the gate's own words, or the clock where a proxy has none."""
    if answer.status_code in (502, 503, 504):
        return "the server is starting, or its SuperLink is down", True
    try:
        said = printable(str(answer.json()["detail"]))[:400]
    except (ValueError, KeyError, TypeError):
        said = ""
    if answer.status_code == 401:  # of the SuperLink: the question named no node
        return _clock(answer), False
    if answer.status_code >= 400:
        return said or f"it answers {answer.status_code}", False
    return "", False


def _clock(answer: Any) -> str:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE

    try:
        theirs = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return ""
    ahead = time.time() - theirs
    if -300 < ahead < SYSTEM_TIME_TOLERANCE + 2:
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    return f"clock: this host's is {abs(ahead):.0f} s {way} the server's; switch on NTP"


def _transport(plan: SitePlan, error: Exception) -> tuple[str, bool]:
    """Why no answer came."""
    text = str(error).lower()
    if "certificate" in text:
        return (f"its certificate was not issued by the authority in {plan.certificate} for this "
                f"name, or is out of date ({_short(error)}): ask for the federation's ca.crt and "
                "the right host name"), False  # fmt: skip
    if "ssl" in text or "tls" in text or "eof" in text:
        return f"{plan.server} does not speak TLS ({_short(error)})", False
    return f"{plan.server} cannot be reached ({_short(error)})", True


def _short(error: Exception) -> str:
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
