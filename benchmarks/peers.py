"""The same federated training in other simulators, beside ours: seconds of W1 and W2a, in turns.

    pip install pfl 'flwr[simulation]'       # in an environment of its own, beside fedgft
    python benchmarks/peers.py --repeats 3

Rows, clients, model, optimizer, rounds and the test after each round are those of `workload.py`.
Each peer gets plain slices of tensors, which suit it best, and no DataLoader. A peer that is not
installed is left out. One JSON line a peer and workload.
"""

import argparse
import json
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from timing import Neighbors, in_turns
from torch.nn.functional import cross_entropy
from workload import BATCH, FEATURES, LR, ROUNDS, TRAIN, WORKLOADS, Workload, dataset

from fedgft.algorithms import fedavg
from fedgft.engine import Settings, simulate


def module(work: Workload) -> torch.nn.Module:
    made = work.model.module(features=FEATURES, classes=2)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(work.start()).float(), made.parameters())
    return made


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    data = dataset()
    return torch.from_numpy(data.features), torch.from_numpy(data.labels)


def right(net: Callable[[torch.Tensor], torch.Tensor]) -> float:
    x, y = tensors()
    with torch.no_grad():
        return float((net(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean())


def ours(work: Workload, seed: int) -> float:
    settings = Settings(
        schedule="constant", rounds=ROUNDS, batch_size=BATCH, state="reset", eval_on="test"
    )
    history = simulate(
        work.federations(), work.model, fedavg(), settings, seeds=[seed], lr=LR, init=work.start()
    )
    return float(history.test[-1].accuracy()[0])


def pfl(work: Workload, seed: int) -> float:
    """Apple's pfl-research, in process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module(work)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
            return cross_entropy(self.inner(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> dict[str, Weighted]:
            return {"accuracy": Weighted(int((self.inner(x).argmax(1) == y).sum()), len(y))}

    np.random.seed(seed)
    torch.manual_seed(seed)
    (x, y) = tensors()
    parts = [torch.from_numpy(p) for p in work.parts(0)]

    def user(k: int) -> Dataset:
        rows = parts[k][torch.randperm(len(parts[k]))]
        return Dataset([x[rows], y[rows]], user_id=str(k))

    everybody = FederatedDataset(user, MinimizeReuseUserSampler(list(range(work.clients))))
    net = Net()
    test = Dataset([x[TRAIN:], y[TRAIN:]])
    whole = NNEvalHyperParams(local_batch_size=None)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS + 1,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(everybody, everybody, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(net, torch.optim.Adam, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        model_eval_params=whole,
        callbacks=[CentralEvaluationCallback(test, whole, frequency=1)],
        send_metrics_to_platform=False,
    )
    return right(net)


def flower(work: Workload, seed: int) -> float:
    """Flower's simulation runtime, which starts Ray's workers."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client = ClientApp()
    server = ServerApp()
    last = {}
    x, y = (t.numpy() for t in tensors())
    parts = work.parts(0)
    net = module(work)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        k = context.node_config["partition-id"]
        turn = message.content["config"]["server-round"]
        own = np.random.default_rng((seed, int(k), int(turn))).permutation(parts[int(k)])
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.Adam(net.parameters(), lr=LR)
        for rows in torch.from_numpy(own).split(BATCH):
            optimizer.zero_grad()
            features = torch.from_numpy(x[rows.numpy()])
            labels = torch.from_numpy(y[rows.numpy()])
            cross_entropy(net(features), labels).backward()
            optimizer.step()
        told = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(own)}),
        }
        return Message(content=RecordDict(told), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        seen = module(work)

        def test(_: int, arrays: ArrayRecord) -> MetricRecord:
            seen.load_state_dict(arrays.to_torch_state_dict())
            last["accuracy"] = right(seen)
            return MetricRecord(last)

        every = {"min_train_nodes": work.clients, "min_available_nodes": work.clients}
        FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **every).start(
            grid=grid,
            initial_arrays=ArrayRecord(seen.state_dict()),
            num_rounds=ROUNDS,
            evaluate_fn=test,
        )

    run_simulation(
        server,
        client,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"log_to_driver": False, "logging_level": "error"},
        },
    )
    return last["accuracy"]


PEERS = {"pfl": ("pfl", pfl), "Flower simulation": ("ray", flower)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", nargs="+", default=["W1", "W2a"], choices=list(WORKLOADS))
    parser.add_argument("--peer", nargs="+", default=list(PEERS), choices=list(PEERS))
    args = parser.parse_args()
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in args.workload:
        work = WORKLOADS[name]
        ours(work, 0)  # compiled before
        for peer in args.peer:
            package, run = PEERS[peer]
            try:
                __import__(package)
            except ImportError as missing:
                print(json.dumps({"peer": peer, "left out": str(missing)}), flush=True)
                continue
            with Neighbors() as others:
                (own, theirs), (mine, other) = in_turns(
                    lambda i, w=work: ours(w, i),
                    lambda i, w=work, r=run: r(w, i),
                    repeats=args.repeats,
                )
            seconds = statistics.median(own)
            slower = statistics.median(theirs)
            print(
                json.dumps(
                    {
                        "workload": name,
                        "peer": peer,
                        "version": version(package.replace("ray", "flwr")),
                        "seconds": round(seconds, 3),
                        "peer_seconds": round(slower, 2),
                        "ratio": round(slower / seconds),
                        "accuracy": round(float(np.mean(mine)), 4),
                        "peer_accuracy": round(float(np.mean(other)), 4),
                        "others": others.cores,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
