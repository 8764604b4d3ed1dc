"""`fedgft deploy`: a federation of real processes, here or between hosts."""

import json as encoding
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedgft.cli.console import err, note, out, wrote
from fedgft.cli.deploying import (
    check_config,
    check_files,
    check_numbers,
    check_terms,
    more_settings,
    site_files,
    site_names,
)
from fedgft.cli.names import Flag, Many, MetricName, Place, Some, Whole
from fedgft.errors import FedgftError
from fedgft.files import expanded

app = App(
    name="deploy", help="Train between organisations, on Flower: set up hosts, or try it here."
)


@app.command
def init(
    folder: Place,
    /,
    *,
    sites: Annotated[tuple[str, ...], Many],
    host: str,
    port: Whole = 9093,
    alias: Annotated[tuple[str, ...] | None, Some] = None,
) -> None:
    """Make a certificate authority, the server's certificate, a key for every site and the app.

    For example: fedgft deploy init federation --sites north south --host fair.example.org

    Parameters
    ----------
    folder
        A new folder, for the server's host. It holds secrets: of its files a site gets ca.crt and
        those in nodes/ that bear its name, and nothing else.
    sites
        Names of the sites: letters, digits, '-', '_' and '.'.
    host
        The server's name or address, as sites reach it.
    port
        The one port that sites connect to.
    alias
        More names and addresses of the server, for its certificate.
    """
    from fedgft.deploy.commands import instructions
    from fedgft.deploy.folder import make_folder

    if alias == ():
        raise FedgftError("--alias needs a value")
    made = make_folder(folder, sites=sites, host=host, port=port, aliases=alias or ())
    wrote([made.path])
    sys.stdout.write(instructions(made))


@app.command
def local(
    *,
    sites: Whole | None = None,
    rounds: Whole = 5,
    data: Annotated[list[str] | None, Some] = None,
    label: str = "",
    group: str = "",
    positive: str = "",
    method: str = "fedgft",
    metric: MetricName = "sp",
    target: float | None = None,
    lam: float | None = None,
    strategy: str = "FedAvg",
    channel: str = "train",
    alpha: float = 0.5,
    seed: Whole = 0,
    epsilon: float | None = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")
    ] = None,
    app_: Annotated[Place | None, Parameter(name="--app")] = None,
    port: Whole | None = None,
    timeout: float = 3600.0,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-deploy"),
    resume: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Run a whole federation on this host: one server and N sites as processes of their own, with
    TLS and node authentication, as it would run between organisations.

    For example: fedgft deploy local --sites 3 --rounds 5

    Parameters
    ----------
    sites
        How many sites [default: 3, or one for every file of --data].
    rounds
        Rounds of training.
    data
        A public data set, which is cut between the sites [default: adult], or one CSV or Parquet
        file for every site.
    label
        Of such files: the column with what is true.
    group
        The column with the group; "race,sex" for intersections.
    positive
        Which of two labels is the positive one.
    method
        fedgft, fairfed, or measured (the strategy as it is, its gap measured).
    metric
        sp, eop, eo, cal, acc or fpr; several at once with weights: sp+0.5*eop.
    target
        The gap of decisions that is to be reached [default: 0].
    lam
        Instead of a target: the strength of the paper's penalty.
    strategy
        Any of flwr.serverapp.strategy: FedAvg, FedAdam, FedProx, Krum, ...
    channel
        train (no further message), query (exact, one more a round) or evaluate.
    alpha
        Dirichlet concentration of the cut: small is heterogeneous.
    seed
        Of the cut, the start and the order of rows.
    epsilon
        Noise on the statistics, with this budget for the whole run.
    set_
        More settings of the app: --set lr=0.005 'model="mlp"' min-count=10.
    app_
        Your own app instead of the one that ships.
    port
        The server's port [default: one that is free].
    timeout
        Seconds after which the run is given up.
    out_
        A new folder for the model, the history, the report and the logs.
    resume
        Go on in --out from the last round that was finished there.
    json
        Print one line of JSON at the end, and nothing else, to stdout.
    """
    from fedgft.deploy.local import Plan, nodes_of, run_local

    if data == [] or set_ == []:
        raise FedgftError(f"{'--data' if data == [] else '--set'} needs a value")
    if target is not None and lam is not None:
        raise FedgftError("--target or --lam: choose one of the two")
    files = site_files(data, sites)
    names = site_names(len(files) or (3 if sites is None else sites))
    if not files and (label or positive):
        note("--label and --positive are for files of your own: a public data set has its own")
    place = expanded(out_).resolve()
    config: dict[str, Any] = {
        "rounds": rounds, "sites": len(names), "out": str(place), "label": label, "group": group,
        "data": "csv" if files else (data or ["adult"])[0], "positive": positive, "method": method,
        "metric": metric, "target": target or 0.0, "lam": -1.0 if lam is None else lam,
        "strategy": strategy, "channel": channel, "alpha": alpha, "seed": seed,
        "epsilon": epsilon or 0.0,
    }  # fmt: skip
    check_numbers(config, port=port, timeout=timeout)
    check_config(config, files=bool(files), lam=lam, epsilon=epsilon)
    check_files(files, label, group)
    own = None if app_ is None else expanded(app_).resolve()
    config["resume"] = resume
    config |= more_settings(set_ or [], own, taken=config)
    check_terms(config, len(names))
    plan = Plan(names, nodes_of(names, files), config, place, port, own, timeout, resume)
    for sign in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sign) != signal.SIG_IGN:  # nohup means it
            signal.signal(sign, _ended)
    said: set[str] = set()
    made = run_local(plan, lambda row: _told(row, rounds, metric, said), note)
    if json:
        sys.stdout.write(encoding.dumps(made) + "\n")
        sys.stdout.flush()
    if made["status"] != "finished:completed":
        logs = place / "logs"
        raise FedgftError(f"the run ended as {made['status']}: {made['why']} (logs in {logs})")
    if not json:
        out.print(_closing(made, metric), markup=False, highlight=False, soft_wrap=True)
    wrote([place / name for name in ("model.safetensors", "history.json", "report.html")
           if (place / name).exists()])  # fmt: skip


def _ended(*_: Any) -> None:
    """A polite request to end is answered like Ctrl-C: the processes are ended first."""
    raise KeyboardInterrupt


def _told(row: dict[str, Any], rounds: int, metric: str, said: set[str]) -> None:
    """One line a round, on stderr; and whatever the server noticed."""
    if "round" not in row:
        text = row.get("note")  # an error is said at the end, and the same thing once
        if text is not None and text not in said:
            said.add(text)
            note(text)
        return
    private = "epsilon" in row  # then only what was asked for is known at all
    told = {
        "accuracy": (row["accuracy"], "%"),
        f"{metric} gap of decisions": (row["gap_hard"], " points"),
        f"{metric} gap of scores": (row["gap_soft"], " points"),
    }
    said_now = [f"{name} {_share(*value)}" for name, value in told.items()
                if not (private and value[0] is None)]  # fmt: skip
    err.print(
        f"round {row['round']} of {rounds}: {', '.join(said_now)} on the sites' training rows; "
        f"{row['clients']} sites heard, {row['alive']} of {row['sites']} alive",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if "epsilon" in row:
        err.print(
            f"  epsilon {row['epsilon']:.3g} so far (delta {row['delta']:g}); the noise puts a "
            f"standard error of {_share(row['gap_error'])} points on the gap",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _share(value: float | None, unit: str = "") -> str:
    return "not estimable" if value is None else f"{100 * value:.1f}{unit}"


def _closing(made: dict[str, Any], metric: str) -> str:
    said = _share(made["gap_hard"], " points")
    text = f"{metric} gap of decisions on the training rows of {made['sites']} site(s): {said}."
    held = made.get("held_out")
    if held is not None and held["gap_hard"] is not None:
        low, high = _share(held["gap_hard_low"]), _share(held["gap_hard_high"])
        right = f"{_share(held['accuracy_low'])} to {_share(held['accuracy_high'])}"
        text += (f" On the rows that they held out: {_share(held['gap_hard'], ' points')} (95% "
                 f"interval {low} to {high}), accuracy {_share(held['accuracy'], '%')} "
                 f"({right}).")  # fmt: skip
    elif held is not None:
        text += " On the rows that they held out it is not estimable: too few rows, or noise."
    return text + f" {made['rounds']} round(s), {made['seconds']:.0f} s."
