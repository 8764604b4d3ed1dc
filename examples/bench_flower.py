"""Enter the benchmark with Flower's own FedAvg: nothing of ours takes part in training.

Each site of the track compas-race is a Flower ClientApp with a logistic regression. Messages stay
in this process, because Flower's own simulation needs Ray. You see accuracy and gaps of the
averaged model. Needs `pip install 'fedgft[flower]'`.
"""

import logging

import numpy as np
import polars as pl
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from scipy.special import expit

from fedgft.bench import get_track, read_submission, score_submission

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a Flower process does
track = get_track("compas-race")
splits = [track.split(seed) for seed in range(track.seeds)]
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    federation = splits[message.content["config"]["seed"]].federation
    rows = federation.client(message.metadata.dst_node_id)
    x, y = federation.scale_rows(rows), federation.dataset.labels[rows]
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    for _ in range(5):
        error = expit(x @ weights[:-1] + weights[-1]) - y
        weights = weights - 0.5 * np.append(x.T @ error, error.sum()) / len(y)
    reply = {"arrays": ArrayRecord([weights]), "counts": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(reply), reply_to=message)


class Nodes:  # what a strategy uses of Flower's Grid
    get_node_ids = staticmethod(lambda: list(range(track.clients)))

    def send_and_receive(self, messages, *, timeout=None):
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        return [app(message, context) for message in messages]


tables = []
strategy = FedAvg(fraction_evaluate=0.0)
for seed, split in enumerate(splits):
    start = ArrayRecord([np.zeros(len(track.load().columns) + 1)])
    found = strategy.start(Nodes(), start, 20, train_config=ConfigRecord({"seed": seed}))
    (weights,) = found.arrays.to_numpy_ndarrays()
    scores = expit(split.federation.scale_rows(split.federation.test) @ weights[:-1] + weights[-1])
    table = {"track": track.name, "version": track.version, "seed": seed}
    tables.append(pl.DataFrame({**table, "row": split.federation.test, "score": scores}))
pl.concat(tables).write_csv("submission.csv")
score = score_submission(read_submission("submission.csv"))[0].summarize()
for name, each in score["metrics"].items():
    print(f"{name}: accuracy {score['accuracy']:.3f}, gap {each['gap']:.3f}")
