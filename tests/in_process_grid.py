"""A Flower grid in one process, for tests and benchmarks. It copies messages, as real grids do.

It uses one private part of Flower, the identity of a task, which every message needs.
"""

import copy
import logging
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from tempfile import mkdtemp
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedgft.data.dataset import Federation
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.engine import Settings, predict_proba, simulate
from fedgft.flower import Site, register
from fedgft.flower.client import client_site, first_arrays
from fedgft.metrics import get_metric
from fedgft.sums import Sums

TaskIdentity.run_id = 1
TaskIdentity.node_id = 1
TaskIdentity.task_id = 1
logging.getLogger("flwr").setLevel(logging.WARNING)

Handler = Callable[[Message, Context], Message]


class InProcessGrid(Grid):
    """`apps[i]` is node 100 + i. If `lose(node, message)` is true, the node does not reply.

    Every site stores its state in its own folder, unless its configuration names one.
    """

    def __init__(self, apps: list[Handler], configs: list[dict[str, Any]] | None = None) -> None:
        self.apps = {100 + i: app for i, app in enumerate(apps)}
        self.folder = mkdtemp(prefix="fedgft-sites-")
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.contexts = {}
        for node, config in zip(self.apps, configs or [{}] * len(apps), strict=True):
            site_config = {"state": f"{self.folder}/{node}", **config}
            self.contexts[node] = Context(
                run_id=1, node_id=node, node_config=site_config, state=RecordDict(), run_config={}
            )
        self.messages: Counter[str] = Counter()
        self.lose: Callable[[int, Message], bool] = lambda node, message: False
        self.gone: set[int] = set()
        self._sent = 0
        self._replies: dict[str, Message] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.messages[message.metadata.message_type] += 1
            if node in self.gone or self.lose(node, message):
                continue
            received = copy.deepcopy(message)
            try:
                replies.append(copy.deepcopy(self.apps[node](received, self.contexts[node])))
            except Exception as error:  # as the engine does
                reason = f"{type(error)}:<'{error}'>"
                replies.append(Message(Error(code=2, reason=reason), reply_to=received))
        return replies

    def restart(self, *nodes: int) -> None:
        """Restart the processes of these nodes: Flower's in-memory state is lost."""
        for node in nodes:
            self.contexts[node].state = RecordDict()

    def new_run(self) -> None:
        """Start another run with the same sites."""
        for context in self.contexts.values():
            context.run_id += 1
            context.state = RecordDict()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.apps if node not in self.gone]

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        made = []
        for message in messages:
            self._sent += 1
            made.append(f"message-{self._sent}")
            for reply in self.send_and_receive([message]):
                reply.metadata.__dict__["_reply_to_message_id"] = made[-1]
                self._replies[made[-1]] = reply
        return made

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]


def app_of(site: Site) -> ClientApp:
    return register(ClientApp(), lambda message, context: site)


def grid_of(federation: Federation, model: Any = "logistic") -> InProcessGrid:
    """A grid with one node per client."""
    sites = [client_site(federation, k, model) for k in range(federation.num_clients)]
    return InProcessGrid([app_of(site) for site in sites])


SEED = 7
LR = 0.01
BATCH = 64


def biased(clients: int = 3, rows: int = 1500) -> Federation:
    """A population whose most accurate model is unfair, divided between a few clients."""
    data = synthetic(rows=rows, features=4, gap=0.4)
    return partition(data, clients=clients, alpha=1.0, seed=1)


def start_of(made: Federation, model: Any = "logistic"):
    data = made.dataset
    return first_arrays(
        model, features=data.features.shape[1], classes=len(data.classes), seed=SEED
    )


def train_config(**more: Any) -> ConfigRecord:
    return ConfigRecord({"lr": LR, "epochs": 1, "batch-size": BATCH, "seed": SEED, **more})


def options(**more: Any) -> dict[str, Any]:
    """Options of a Flower strategy: all clients train, none evaluates."""
    return {"fraction_evaluate": 0.0, "min_train_nodes": 2, "min_available_nodes": 2, **more}


def simulated(made: Federation, algorithm: Any, rounds: int, **more: Any) -> np.ndarray:
    settings = Settings(
        rounds=rounds, batch_size=BATCH, **{"schedule": "constant", "state": "reset", **more}
    )
    return simulate([made], "logistic", algorithm, settings, seeds=[SEED], lr=LR).params[0]


def gap_of(made: Federation, params: np.ndarray, metric: str = "sp", kind: str = "soft") -> float:
    """The gap on the training rows of all clients."""
    data = made.dataset
    rows = made.rows
    probs = predict_proba(made, "logistic", params, rows)
    tally = Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))
    return float(tally.gap(get_metric(metric), kind))
