"""The server makes any Flower strategy fair over the rows of all sites."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp, strategy

from fairapp.task import make
from fedgft.flower.server_app import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    name = str(config["strategy"])
    options = {
        "fraction_evaluate": 1.0 if config["channel"] == "evaluate" else 0.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    if name in ("FedAdam", "FedYogi", "FedAdagrad"):
        options["eta"] = config["server-lr"]
    elif name == "FedProx":
        options["proximal_mu"] = config["proximal-mu"]
    elif name == "QFedAvg":
        options["client_learning_rate"] = config["lr"] or 0.01
    elif name == "FedXgbCyclic":  # one site per round
        options = {"fraction_evaluate": 0.0, "min_available_nodes": 1}
    serve(grid, context, getattr(strategy, name)(**options), make_module=make)
