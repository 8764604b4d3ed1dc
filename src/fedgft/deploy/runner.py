"""A site's runner: it takes tasks as flower-superexec does, and runs the app that the site has
installed, never the one that a run was submitted with.

Everything is imported once; each message is handled in a fork, which starts in milliseconds where a
new process takes seconds. It uses internals of Flower: `engine.check_engine` pins the release.
"""

import importlib
import os
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError

POLL = 0.5  # seconds between questions for a task
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"  # the one call that the node's secret protects


def load_app(folder: Path) -> Any:
    """The ClientApp of the Flower app in a folder, as its pyproject.toml names it."""
    from flwr.clientapp import ClientApp

    try:
        held = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        reference = str(held["tool"]["flwr"]["app"]["components"]["clientapp"])
        module, _, attribute = reference.partition(":")
        sys.path.insert(0, str(folder))
        app = getattr(importlib.import_module(module), attribute)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise FedgftError(f"app {folder}: no Flower app can be loaded there ({error})") from None
    if not isinstance(app, ClientApp):
        raise FedgftError(f"app {folder}: {reference} is not a ClientApp")
    return app


def import_everything() -> None:
    """What a message needs, before the first comes: a fork then has it."""
    import torch

    torch.set_num_threads(1)
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports a second's worth of modules
    for name in ("data", "data.partition", "data.scaling", "flower.local", "flower.reporting",
                 "flower.tables", "flower.running", "flower.masks", "engine"):  # fmt: skip
        importlib.import_module(f"fedgft.{name}")


class Runner:
    """Tasks of the node at `address`, whose certificate `authority` issued; `secret` is what the
    node and this runner share."""

    def __init__(self, app: Any, *, address: str, authority: bytes, secret: bytes) -> None:
        if not hasattr(os, "fork"):
            raise FedgftError("a site needs Linux or macOS: this system cannot fork processes")
        self.app = app
        self.address = address
        self.authority = authority
        self.secret = secret
        self.busy: set[int] = set()

    def run(self, alive: Callable[[], bool]) -> None:
        """Handle tasks until `alive` says that the node has ended."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        proof = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={ACQUIRE})
        client = self._connect(proof, patient=False)
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP])
        try:
            while alive():
                self._collect()
                try:
                    got = client.AcquireTask(wanted)
                    if got.HasField("task") and got.token:
                        self._fork(got.token, foreign=got.task.type != TaskType.CLIENT_APP)
                        continue
                except httpx.TransportError:
                    pass  # the node is starting, or has ended
                except httpx.HTTPStatusError as error:
                    _say(f"the site's node does not hand out work: {error.response.status_code}")
                time.sleep(POLL)
        finally:
            client.close()
            self.stop()

    def stop(self) -> None:
        """End what still runs."""
        for pid in self.busy:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.busy:
            self._collect(wait=True)

    def _collect(self, *, wait: bool = False) -> None:
        for pid in list(self.busy):
            found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if found:
                self.busy.discard(pid)
                if status and not wait:
                    _say(f"the process for a message ended with status {status}")

    def _fork(self, token: str, *, foreign: bool) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.busy.add(pid)
            return
        status = 1
        try:
            for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sign, signal.SIG_DFL)
            self._handle(token, foreign=foreign)
            status = 0
        except BaseException as error:
            _say(f"a message could not be answered: {error!r}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _handle(self, token: str, *, foreign: bool) -> None:
        """One message: its input from the node, the app's reply to the node."""
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime import run_clientapp as engine

        client = self._connect(RuntimeTokenHttpInterceptor(token), patient=True)
        if foreign:
            why = "this site runs client apps alone"
            engine.push_task_output(client, None, SubStatus.FAILED, why)
            return
        HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
        message, context, _, _ = engine.pull_task_input(client)  # the submitted app is not opened
        status, details = SubStatus.COMPLETED, ""
        try:
            reply = self.app(message=message, context=context)
        except Exception as error:
            status, details = SubStatus.FAILED, f"{type(error)}:<'{error}'>"
            _tell(error)
            failure = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details)
            reply = Message(failure, reply_to=message)
        engine.push_message(client, reply, context)
        engine.push_task_output(client, context, status, details)

    def _connect(self, interceptor: Any, *, patient: bool) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supercore.runtime.tracing import RuntimeTracingInterceptor

        component = "flwr-clientapp" if patient else "SuperExec"
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.authority,
            interceptors=[
                RuntimeTracingInterceptor(),
                RuntimeVersionHttpInterceptor(component_name=component),
                interceptor,
            ],
            retry_invoker=make_simple_http_retry_invoker() if patient else None,
        )


def _tell(error: Exception) -> None:
    """The site's operator reads what went wrong: one line, or all of it where it is our fault."""
    if isinstance(error, FedgftError):
        _say(str(error))
    else:
        traceback.print_exception(error)


def _say(text: str) -> None:
    sys.stderr.write(f"fedgft: {text}\n")
