"""The service at a site: a Flower SuperNode and a task runner.

The SuperNode connects to the server's gate. The runner answers its messages with the app that is
installed at the site, never with code that the server sends. `find_refusal` asks the server first
and reports why it refuses this site (clock, key, certificate).
"""

import importlib
import os
import secrets
import signal
import ssl
import sys
import tempfile
import time
import tomllib
import traceback
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, ErrorCode, SubStatus
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TaskType,
)
from flwr.supercore.date import now
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.runtime.tracing import RuntimeTracingInterceptor
from flwr.supernode.runtime import run_clientapp as engine

from fedgft.deploy.init import (
    create_authority,
    issue_certificate,
    packaged_app,
    read_private_key,
    write_new,
)
from fedgft.deploy.processes import (
    LOOPBACK,
    POLL,
    Processes,
    check_flower_version,
    format_options,
    free_port,
)
from fedgft.errors import FedgftError, import_extra
from fedgft.formatting import one_line, printable

# Seconds during which the node may fail before the site gives up. The server lists a killed site
# for 60 seconds.
FAILURE_WINDOW = 100.0
RETRY_SECONDS = 5.0  # seconds between two attempts
TASK_POLL_SECONDS = 0.5  # seconds between requests for a task
ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"  # the one call that the node's secret protects


@dataclass(frozen=True)
class SitePlan:
    """What a site needs to take part in a federation.

    Parameters
    ----------
    server
        HOST:PORT of the server's gate.
    certificate
        File with the certificate of the federation's authority.
    key
        File with the site's private key.
    node_config
        Configuration of the Flower node in one line, such as ``data="x.csv"``.
    app
        Folder of the Flower app that the site runs. Default: the app of this library.
    poll
        Seconds between two requests for work.
    """

    server: str
    certificate: Path
    key: Path
    node_config: str
    app: Path = field(default_factory=packaged_app)
    poll: float = 1.0


def run_site(plan: SitePlan, note: Callable[[str], None]) -> None:
    """Serve this site until a signal arrives.

    Parameters
    ----------
    plan
        Server, keys and app.
    note
        Called with one line whenever the site waits and tries again.

    Raises
    ------
    FedgftError
        With the reason, if the server refuses this site for good.
    """
    check_flower_version()
    if reason := _ask_server(plan):
        note(f"{reason}; trying again until it answers")
    app = load_app(plan.app)
    with tempfile.TemporaryDirectory(prefix="fedgft-site-") as name:
        work = Path(name)
        issue_certificate(work, "node", create_authority(work), [LOOPBACK])
        secret = secrets.token_bytes(32)
        write_new(work / "secret", secret)
        (work / "engine").mkdir(mode=0o700)
        authority = (work / "ca.crt").read_bytes()
        failing_since = time.monotonic()
        while True:
            began = time.monotonic()
            port = free_port()
            variables = {POLL: str(plan.poll)}
            with Processes(Path.cwd(), work / "engine", None, variables) as processes:
                processes.start("node", _node_command(plan, work, port))
                preload_modules()  # while the node starts
                runner = TaskRunner(app, port=port, authority=authority, secret=secret)
                runner.run(lambda: processes.is_alive("node"))
            reason = _ask_server(plan)
            ended = time.monotonic()
            failing_since = ended if ended - began > FAILURE_WINDOW else failing_since
            if ended - failing_since > FAILURE_WINDOW and not reason:
                raise FedgftError("the site's node ends again and again; its messages are above")
            reason = reason or "the server may still count an earlier process of this site"
            note(f"{reason}; trying again")
            time.sleep(RETRY_SECONDS)


def _ask_server(plan: SitePlan) -> str:
    """Return why the server refuses this site for now, if it does; raise if it always will."""
    reason, temporary = find_refusal(plan)
    if reason and not temporary:
        raise FedgftError(f"the server refuses this site: {reason}")
    return reason


def _node_command(plan: SitePlan, work: Path, port: int) -> list[str]:
    """Return the command of the site's SuperNode, which listens on a port for the runner."""
    options = {
        "root-certificates": plan.certificate,
        "superlink": plan.server,
        "auth-supernode-private-key": plan.key,
        "ssl-ca-certfile": work / "ca.crt",
        "ssl-certfile": work / "node.crt",
        "ssl-keyfile": work / "node.tls",
        "host": LOOPBACK,
        "port": port,
        "isolation": "process",
        "superexec-auth-secret-file": work / "secret",
        "node-config": plan.node_config,
    }
    command = [sys.executable, "-m", "fedgft.deploy.processes", "supernode"]
    return [*command, *format_options(options)]


def find_refusal(plan: SitePlan) -> tuple[str, bool]:
    """Send the server a signed request for messages, as the node will.

    Returns
    -------
    reason
        Why the server refuses this site; empty if it does not.
    temporary
        Whether the reason may pass without action, for example while the server is down.
    """
    key = read_private_key(plan.key)
    try:
        tls = ssl.create_default_context(cafile=str(plan.certificate))
    except OSError as error:  # ssl.SSLError is an OSError
        raise FedgftError(
            f"{plan.certificate}: not the certificate of an authority ({error.strerror or error})"
        ) from None
    try:
        answer = httpx.post(
            f"https://{plan.server}/v1/fleet/pull-messages",
            content=PullMessagesRequest().SerializeToString(),  # names no node: 401 means success
            headers=signed_headers(key),
            verify=tls,
            timeout=10.0,
            trust_env=False,
        )
    except httpx.TransportError as error:
        return _reason_no_answer(plan, error)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        raise FedgftError(f"server {plan.server}: write HOST:PORT") from None
    return _reason_in_answer(answer)


def signed_headers(key: Any) -> dict[str, str]:
    """Return the headers of a request to the fleet interface, as Flower's SuperNode signs them."""
    time_now = now().isoformat()
    return {
        "content-type": PROTOBUF_MEDIA_TYPE,
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, time_now.encode())).decode(),
        TIMESTAMP_HEADER: time_now,
    }


def _reason_in_answer(answer: Any) -> tuple[str, bool]:
    """Return the reason in an HTTP answer: the gate's message, or a clock that is wrong."""
    if answer.status_code in (502, 503, 504):
        return "the server is starting, or its SuperLink is down", True
    try:
        detail = printable(str(answer.json()["detail"]))[:400]
    except (ValueError, KeyError, TypeError):
        detail = ""
    if answer.status_code == 401:  # from the SuperLink: the request named no node
        return _clock_difference(answer), False
    if answer.status_code >= 400:
        return detail or f"it answers {answer.status_code}", False
    return "", False


def _clock_difference(answer: Any) -> str:
    """Return how far this host's clock is from the answer's date; empty if it is close enough."""
    try:
        theirs = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return ""
    ahead = time.time() - theirs
    if -300 < ahead < SYSTEM_TIME_TOLERANCE + 2:
        return ""
    direction = "ahead of" if ahead > 0 else "behind"
    return f"clock: this host's is {abs(ahead):.0f} s {direction} the server's; switch on NTP"


def _reason_no_answer(plan: SitePlan, error: Exception) -> tuple[str, bool]:
    """Return why no answer arrived, and whether the cause may pass without action."""
    details = one_line(error, 200) or type(error).__name__
    text = str(error).lower()
    if "certificate" in text:
        return (
            f"its certificate was not issued by the authority in {plan.certificate} for this "
            f"name, or is out of date ({details}): ask for the federation's ca.crt and the right "
            "host name"
        ), False
    if "ssl" in text or "tls" in text or "eof" in text:
        return f"{plan.server} does not speak TLS ({details})", False
    return f"{plan.server} cannot be reached ({details})", True


def load_app(folder: Path) -> Any:
    """Load the ClientApp that the pyproject.toml of a Flower app names.

    Raises
    ------
    FedgftError
        If there is no app in the folder, it cannot be imported, or it is not a ClientApp.
    """
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        reference = str(project["tool"]["flwr"]["app"]["components"]["clientapp"])
        module, _, attribute = reference.partition(":")
        sys.path.insert(0, str(folder))
        app = getattr(importlib.import_module(module), attribute)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise FedgftError(f"app {folder}: no Flower app can be loaded there ({error})") from None
    if not isinstance(app, ClientApp):
        raise FedgftError(f"app {folder}: {reference} is not a ClientApp")
    return app


def preload_modules() -> None:
    """Import the modules that handle messages, so that forked processes need not do it."""
    if find_spec("torch") is not None:  # networks need it, linear models do not
        torch = import_extra("torch")
        torch.set_num_threads(1)
        # Creating an optimizer imports about a second's worth of further modules.
        torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    for name in ("fedgft.engine", "fedgft.flower.client_app"):
        importlib.import_module(name)


class TaskRunner:
    """Takes tasks from the site's node and runs the installed app on them.

    Every message is handled in a forked process, which starts in milliseconds because everything
    is imported already.

    Parameters
    ----------
    app
        The ClientApp.
    port
        Port of the node on this host.
    authority
        Certificate (PEM) of the authority that issued the node's certificate.
    secret
        Secret that the node and this runner share.
    """

    def __init__(self, app: Any, *, port: int, authority: bytes, secret: bytes) -> None:
        if not hasattr(os, "fork"):
            raise FedgftError("a site needs Linux or macOS: this system cannot fork processes")
        self.app = app
        self.address = f"{LOOPBACK}:{port}"
        self.authority = authority
        self.secret = secret
        self.running: set[int] = set()

    def run(self, is_alive: Callable[[], bool]) -> None:
        """Handle tasks until `is_alive()` is false."""
        credentials = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods={ACQUIRE_TASK}
        )
        client = self._connect(credentials, retry=False)
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP])
        try:
            while is_alive():
                self._collect_ended()
                try:
                    answer = client.AcquireTask(request)
                    if answer.HasField("task") and answer.token:
                        self._fork(answer.token, foreign=answer.task.type != TaskType.CLIENT_APP)
                        continue
                except httpx.TransportError:
                    pass  # the node is starting, or has ended
                except httpx.HTTPStatusError as error:
                    _log(f"the site's node does not hand out work: {error.response.status_code}")
                time.sleep(TASK_POLL_SECONDS)
        finally:
            client.close()
            self.stop()

    def stop(self) -> None:
        """Kill the processes that still run."""
        for pid in self.running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.running:
            self._collect_ended(wait=True)

    def _collect_ended(self, *, wait: bool = False) -> None:
        """Collect the processes that have ended; with `wait`, wait for all of them."""
        for pid in list(self.running):
            found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if found:
                self.running.discard(pid)
                if status and not wait:
                    _log(f"the process for a message ended with status {status}")

    def _fork(self, token: str, *, foreign: bool) -> None:
        """Handle a task in a process of its own.

        Parameters
        ----------
        token
            The node's token for this task.
        foreign
            Whether the task is for another kind of app, which this site refuses.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.running.add(pid)
            return
        status = 1
        try:
            for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sign, signal.SIG_DFL)
            self._handle(token, foreign=foreign)
            status = 0
        except BaseException as error:
            _log(f"a message could not be answered: {error!r}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _handle(self, token: str, *, foreign: bool) -> None:
        """Handle one message: read it from the node, run the app, send the reply to the node."""
        client = self._connect(RuntimeTokenHttpInterceptor(token), retry=True)
        if foreign:
            why = "this site runs only client apps"
            engine.push_task_output(client, None, SubStatus.FAILED, why)
            return
        HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
        message, context, _, _ = engine.pull_task_input(client)  # the submitted app is not opened
        status = SubStatus.COMPLETED
        details = ""
        try:
            reply = self.app(message=message, context=context)
        except Exception as error:
            status = SubStatus.FAILED
            details = f"{type(error)}:<'{error}'>"
            if isinstance(error, FedgftError):  # one line for the site's operator
                _log(str(error))
            else:
                traceback.print_exception(error)
            failure = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details)
            reply = Message(failure, reply_to=message)
        engine.push_message(client, reply, context)
        engine.push_task_output(client, context, status, details)

    def _connect(self, interceptor: Any, *, retry: bool) -> Any:
        """Return a client of the node.

        Parameters
        ----------
        interceptor
            Adds this client's credentials to its requests.
        retry
            Whether to retry requests that fail, as a task under way needs it.
        """
        component = "flwr-clientapp" if retry else "SuperExec"
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.authority,
            interceptors=[
                RuntimeTracingInterceptor(),
                RuntimeVersionHttpInterceptor(component_name=component),
                interceptor,
            ],
            retry_invoker=make_simple_http_retry_invoker() if retry else None,
        )


def _log(text: str) -> None:
    """Write a line for the site's operator."""
    sys.stderr.write(f"fedgft: {text}\n")
