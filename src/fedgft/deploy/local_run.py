"""Run a whole federation on this host: a server (SuperLink and gate) and several sites.

The processes are those that `fedgft deploy server` and `fedgft deploy site` start on real hosts,
with TLS and node keys.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgft.deploy.init import CONNECTION, FederationFolder, create_federation, load_federation
from fedgft.deploy.processes import (
    LOOPBACK,
    Processes,
    flower_commands_folder,
    format_options,
    free_port,
)
from fedgft.deploy.server import get_run_status
from fedgft.errors import FedgftError
from fedgft.flower.server_app import CHECKPOINT, HISTORY, PROGRESS, SCHEMA
from fedgft.formatting import format_count
from fedgft.store import LOCK_NAME, open_folder, open_private_file, parse_json

TIMED_OUT = "given up"
MEASURED_KEYS = ("accuracy", "gap_soft", "gap_hard")
REPORTED_KEYS = (
    "target",
    "target_of",
    "reached",
    "collapsed",
    "accuracy_constant",
    "balanced_accuracy",
    "selection_rates",
)


def summarize_run(
    folder: Path, status: str, *, seconds: float, sites: int, limit: float
) -> dict[str, Any]:
    """Summarize a run from the files that it left.

    Parameters
    ----------
    folder
        The run's output folder.
    status
        Status of the run, as `wait_for_run` returns it.
    seconds, sites, limit
        Duration, number of sites and time limit.

    Returns
    -------
    dict
        Accuracy and gaps of the final model on the sites' training rows, and under "held_out" on
        the rows that they held out; "rule" for a decision rule; "why" if the run did not finish.
    """
    rounds = [row.get("round") for row in read_progress(folder)]
    out: dict[str, Any] = {
        "rounds": max((n for n in rounds if type(n) is int), default=0),
        **dict.fromkeys(MEASURED_KEYS),
        "sites": sites,
        "status": status,
        "seconds": round(seconds, 1),
    }
    if status == TIMED_OUT:
        out["why"] = f"it was not done after {limit:g} s (`timeout`)"
    elif status != "finished:completed":
        out["why"] = find_error(folder)
    path = folder / HISTORY
    if not path.exists():
        return out
    try:
        history = parse_json(path.read_text("utf-8"))
        row = history["about"]["measured"] or {}
        out |= {key: row.get(key) for key in MEASURED_KEYS}
        out |= {key: row[key] for key in REPORTED_KEYS if key in row}
        out["sites"] = len(history["sites"]) or sites
        if history.get("rule") is not None:
            out["rule"] = _summarize_rule(history["rule"])
        return out | _summarize_held_out(history["held_out"], history["about"]["metric"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # damaged file
        raise FedgftError(f"{path}: not the history of a run ({error})") from None


def list_closing_lines(summary: dict[str, Any], metric: str) -> list[str]:
    """Return the last lines of a run: gap, target, whether it was met, and what to try next.

    Parameters
    ----------
    summary
        The run's summary (`summarize_run`).
    metric
        Name of the metric.
    """
    gap = format_share(summary["gap_hard"], " points")
    sites = format_count(summary["sites"], "site")
    lines = [f"Training rows of {sites}: {metric} gap of decisions {gap}."]
    if summary.get("target") is not None:
        lines.append(f"Target {100 * summary['target']:.1f} points: {_verdict(summary)}.")
    held_out = summary.get("held_out")
    if held_out is not None and held_out["gap_hard"] is not None:
        low, high = (format_share(held_out[f"gap_hard_{end}"]) for end in ("low", "high"))
        worst, best = (format_share(held_out[f"accuracy_{end}"]) for end in ("low", "high"))
        gap = format_share(held_out["gap_hard"], " points")
        accuracy = format_share(held_out["accuracy"], "%")
        lines.append(f"Held-out rows: gap {gap} (95% interval {low} to {high}).")
        lines.append(f"Held-out rows: accuracy {accuracy} (95% interval {worst} to {best}).")
    elif held_out is not None:
        lines.append("Held-out rows: the gap is not estimable, because of too few rows or noise.")
    if summary.get("accuracy_constant") is not None:
        constant = format_share(summary["accuracy_constant"], "%")
        lines.append(
            f"Always predicting the most frequent class: right on {constant} of training rows."
        )
    if summary.get("collapsed"):
        lines.append("The model has collapsed: it gives nearly everybody the same decision.")
    lines += _list_rule_lines(summary.get("rule"))
    if summary.get("target") is not None and summary.get("reached") is False:
        lines.append("What to try: more rounds, another learning rate, or a larger target.")
    lines.append(f"{format_count(summary['rounds'], 'round')}, {summary['seconds']:.0f} s.")
    return lines


def _verdict(summary: dict[str, Any]) -> str:
    """Return whether the target was met; name its kind unless it is for decisions."""
    of = "" if summary["target_of"] == "decisions" else f" (for {summary['target_of']})"
    return {None: "cannot be judged", True: "met", False: "missed"}[summary["reached"]] + of


def format_share(value: float | None, unit: str = "") -> str:
    """Return a fraction in percent or points, with one digit."""
    return "not estimable" if value is None else f"{100 * value:.1f}{unit}"


def _summarize_held_out(audit: dict[str, Any], metric: str) -> dict[str, Any]:
    """Return estimates on held-out rows; None where there is no interval (few rows, much noise)."""
    if metric not in audit.get("metrics", {}):  # no report, or several metrics at once
        return {}
    gap = audit["metrics"][metric]
    accuracy = audit["accuracy"]
    summary: dict[str, Any] = {"accuracy": accuracy["rate"], "gap_hard": gap["gap"]}
    for name, interval in (("accuracy", accuracy), ("gap_hard", gap)):
        summary |= {f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
        if None in (interval["low"], interval["high"]):
            summary[name] = None
    return {"held_out": summary}


def _summarize_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """Return accuracy and gap of a decision rule on training rows and on held-out rows.

    The gap is that of the first metric with a target. Without a rule, "why" has the reason.
    """
    if rule["file"] is None:
        return {"why": str(rule["why"])}
    (metric, target) = next(iter((rule["target"] or rule["local"]).items()))
    target = None if metric not in rule["target"] else target
    expected = rule["expected"]
    gap = next(each for each in expected["gaps"] if each["metric"] == metric)
    summary = {"metric": metric, "target": target, "accuracy": expected["accuracy"]["after"]}
    summary |= {"gap": gap["after"], "held_out": None}
    if rule["held_out"] is not None:
        gap = next(each for each in rule["held_out"]["gaps"] if each["metric"] == metric)
        accuracy = rule["held_out"]["accuracy"]
        summary["held_out"] = {"accuracy": accuracy["rate"], "gap": gap["gap"]}
        for name, interval in (("accuracy", accuracy), ("gap", gap)):
            summary["held_out"] |= {f"{name}_{end}": interval[end] for end in ("low", "high")}
    return summary


def _list_rule_lines(rule: dict[str, Any] | None) -> list[str]:
    """Return the closing lines about a decision rule."""
    if rule is None:
        return []
    if "why" in rule:
        return [f"No decision rule: {rule['why']}."]
    gap, accuracy = format_share(rule["gap"], " points"), format_share(rule["accuracy"], "%")
    of = "" if rule["target"] is None else f", target {format_share(rule['target'], ' points')}"
    lines = [
        f"Decision rule on training rows: {rule['metric']} gap {gap}{of}; accuracy {accuracy}."
    ]
    held_out = rule["held_out"]
    if held_out is not None:
        shown = []
        for name, unit in (("gap", " points"), ("accuracy", "%")):
            low, high = (format_share(held_out[f"{name}_{end}"]) for end in ("low", "high"))
            value = format_share(held_out[name], unit)
            shown.append(f"{name} {value} (95% interval {low} to {high})")
        lines.append(f"Decision rule on held-out rows: {'; '.join(shown)}.")
    return lines


def find_error(folder: Path) -> str:
    """Return the app's last error message, or Flower's if the app reported none."""
    errors = [str(row["error"]) for row in read_progress(folder) if "error" in row]
    if errors:
        return errors[-1]
    try:
        text = (folder / "logs" / "run.log").read_text("utf-8", "replace")
    except OSError:
        return "there is no log"
    found = re.findall(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception): .*)", text, re.MULTILINE)
    return (found or ["see the log"])[-1].strip()


def read_progress(folder: Path) -> list[dict[str, Any]]:
    """Return the records that the server has written so far, one per event."""
    rows = []
    with suppress(OSError):
        for line in (folder / PROGRESS).read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # a line that is still being written
                rows.append(parse_json(line))
    return [row for row in rows if isinstance(row, dict)]


ENGINE = "engine"  # folder of Flower's own files during the run
LEFTOVERS = {ENGINE, "logs", PROGRESS, SCHEMA}
PROGRESS_SECONDS = 1.0  # seconds between two checks of the progress
STATUS_SECONDS = 2.0  # seconds between two requests for the run's status
FEDGFT = (sys.executable, "-m", "fedgft")
OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LocalRunPlan:
    """A federation on this host and the run to submit to it.

    Parameters
    ----------
    sites
        Names of the sites.
    nodes
        Further arguments of each site's command (`site_arguments`).
    config
        Configuration of the run.
    out
        Output folder.
    port
        Port of the gate; None: any free port.
    app
        Folder of the user's own Flower app; None: the app of this library.
    limit
        Seconds after which the run is stopped.
    resume
        Continue the run in `out` from its last finished round.
    """

    sites: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]
    config: dict[str, Any]
    out: Path
    port: int | None = None
    app: Path | None = None
    limit: float = 3600.0
    resume: bool = False


def ignore_note(text: str) -> None:
    """Do nothing with a note."""


@contextmanager
def start_federation(
    plan: LocalRunPlan, note: Callable[[str], None] = ignore_note
) -> Iterator[tuple[FederationFolder, Processes]]:
    """Start the server and all sites; leaving the block stops them.

    Parameters
    ----------
    plan
        The sites and their data.
    note
        Called with a sentence for each step, before it is done.
    """
    flower_commands_folder()  # raises an error if Flower is not installed
    note(f"making keys and certificates for {len(plan.sites)} sites")
    folder = create_federation(
        plan.out / ENGINE,
        sites=plan.sites,
        host=LOOPBACK,
        port=free_port(plan.port),
        superlink_port=free_port(),
        make_keys=True,
    )
    with Processes(folder.path, folder.engine, plan.out / "logs") as processes:
        note(f"starting the server; logs: {plan.out / 'logs'}")
        start_server(folder, processes)
        note(f"starting the sites: {', '.join(plan.sites)}")
        for site, arguments in zip(plan.sites, plan.nodes, strict=True):
            start_site(folder, processes, site, arguments, app=plan.app)
        yield folder, processes


def start_server(folder: FederationFolder, processes: Processes) -> None:
    """Start the server and wait until its gate listens."""
    processes.start("server", [*FEDGFT, "deploy", "server", str(folder.path), "--bind", LOOPBACK])
    processes.wait_for_port("server", folder.port)


def start_site(
    folder: FederationFolder,
    processes: Processes,
    site: str,
    arguments: Sequence[str],
    *,
    app: Path | None = None,
) -> None:
    """Start a site whose private key is in the folder.

    Parameters
    ----------
    folder, processes
        The federation and its processes.
    site
        Name of the site.
    arguments
        Further arguments of `fedgft deploy site`.
    app
        Folder of the app; None: the app of this library.
    """
    options = {
        "server": folder.address,
        "ca": folder.path / "ca.crt",
        "key": folder.nodes / f"{site}.key",
        "peers": folder.nodes,
    } | ({"app": app} if app else {})
    processes.start(site, [*FEDGFT, "deploy", "site", site, *format_options(options), *arguments])


def run_local(
    plan: LocalRunPlan, on_progress: OnProgress, note: Callable[[str], None]
) -> dict[str, Any]:
    """Run a federation on this host to its end.

    Parameters
    ----------
    plan
        Sites, data and configuration.
    on_progress
        Called with each record of progress.
    note
        Called with notes for the user.

    Returns
    -------
    dict
        The run's summary (`summarize_run`).
    """
    began = time.monotonic()
    _check_output_folder(plan)
    format_config(plan.config)  # raises an error if Flower cannot take a value
    with open_folder(plan.out):
        try:
            shutil.rmtree(plan.out / ENGINE, ignore_errors=True)  # left by a killed run
            if not plan.resume:
                (plan.out / PROGRESS).unlink(missing_ok=True)
            with start_federation(plan, note) as (folder, processes):
                note("submitting the run; Flower takes about half a minute until the first round")
                run = submit_run(folder, processes, plan)
                status = wait_for_run(processes, plan, run, on_progress)
        finally:
            shutil.rmtree(plan.out / ENGINE, ignore_errors=True)  # it holds private keys
    seconds = time.monotonic() - began
    return summarize_run(plan.out, status, seconds=seconds, sites=len(plan.sites), limit=plan.limit)


def _check_output_folder(plan: LocalRunPlan) -> None:
    """Raise an error unless the folder is new or, to resume, holds an unfinished run."""
    if plan.out.exists() and not plan.out.is_dir():
        raise FedgftError(f"`out` {plan.out}: is a file; name a folder")
    names = {path.name for path in plan.out.iterdir()} if plan.out.exists() else set()
    names.discard(LOCK_NAME)
    if not plan.resume and names <= LEFTOVERS:  # files of a run that failed at once
        return
    if not names:
        raise FedgftError(f"`resume`: there is no run in {plan.out}")
    if not plan.resume:
        raise FedgftError(
            f"`out` {plan.out}: is not empty; name another folder, or continue there with `resume`"
        )
    if not (plan.out / CHECKPOINT).is_file():
        raise FedgftError(f"`resume`: {plan.out} holds no finished round of a run")
    if (plan.out / HISTORY).exists():
        raise FedgftError(f"`resume`: the run in {plan.out} was finished; name another `out`")


def format_config(config: dict[str, Any]) -> str:
    """Return a configuration in one line, as Flower's commands take it."""
    return " ".join(f"{key}={_format_toml(value)}" for key, value in config.items())


def submit_run(folder: FederationFolder, processes: Processes, plan: LocalRunPlan) -> int:
    """Submit the app and return the number that Flower gives the run."""
    app = str(plan.app or folder.app)
    options = {"run-config": format_config(plan.config), "format": "json"}
    output = _run_flwr(processes, "run", app, CONNECTION, *format_options(options))
    try:
        answer = json.loads(output[output.find("{") : output.rfind("}") + 1])
    except ValueError:
        answer = {}
    if not answer.get("success") or "run-id" not in answer:
        raise FedgftError(f"flwr run: {answer.get('error-message') or output.strip()[-300:]}")
    return int(answer["run-id"])


def _run_flwr(processes: Processes, *arguments: str) -> str:
    """Run Flower's command `flwr` and return what it prints."""
    return processes.run(f"{flower_commands_folder()}flwr", *arguments)


def wait_for_run(
    processes: Processes, plan: LocalRunPlan, run: int, on_progress: OnProgress
) -> str:
    """Report progress until the run has ended, and return its status."""
    rows_reported = len(read_progress(plan.out)) if plan.resume else 0
    asked = time.monotonic()
    deadline = asked + plan.limit
    while True:
        rows = read_progress(plan.out)
        for row in rows[rows_reported:]:
            alive = sum(processes.is_alive(site) for site in plan.sites)
            on_progress({**row, "alive": alive, "sites": len(plan.sites)})
        rows_reported = len(rows)
        if not processes.is_alive("server"):
            raise FedgftError(f"the server ended: {processes.last_log_lines('server')}")
        if not any(processes.is_alive(site) for site in plan.sites):
            words = processes.last_log_lines(plan.sites[0])
            raise FedgftError(f"all sites have ended; the last line of {plan.sites[0]}: {words}")
        if time.monotonic() - asked > STATUS_SECONDS or (plan.out / HISTORY).exists():
            status = get_run_status(load_federation(processes.folder), run)
            if status.startswith("finished"):
                _save_app_log(processes, plan, run)
                return status
            asked = time.monotonic()
        if time.monotonic() > deadline:
            return TIMED_OUT
        time.sleep(PROGRESS_SECONDS)


def _save_app_log(processes: Processes, plan: LocalRunPlan, run: int) -> None:
    """Save the log of the server's app, which Flower keeps apart from its own."""
    try:
        output = _run_flwr(processes, "log", str(run), CONNECTION, "--show")
    except FedgftError as error:
        output = str(error)
    with open_private_file(plan.out / "logs" / "run.log", "wb") as log:
        log.write(output.encode())


def _format_toml(value: Any) -> str:
    """Return a value as TOML. Flower splits at quotes, so strings must not contain any."""
    if isinstance(value, str) and not re.fullmatch(r"[^\x00-\x1f\"'\\]*", value):
        raise FedgftError(f"{value!r}: Flower takes no quotes, backslashes or line ends in texts")
    return json.dumps(value, ensure_ascii=False)


def site_arguments(sites: Sequence[str], data: Sequence[Path]) -> tuple[tuple[str, ...], ...]:
    """Return each site's further arguments: its file, or its part of a public data set."""
    if data:
        return tuple(("--data", str(path.resolve())) for path in data)
    count = len(sites)
    return tuple(("--set", f"partition-id={k}", f"num-partitions={count}") for k in range(count))
