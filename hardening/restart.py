"""A SuperLink that is killed in the middle of a run, and started again: sites stay, and the resumed
run ends with the model of a run that nothing disturbed, byte for byte.

python hardening/restart.py [--out results/hardening] [--rounds 4]

A server and three sites as real processes, through the gate; two runs with equal settings. In the
second the server (gate and SuperLink) gets SIGKILL after round 1, whatever it does then, and is
started again; no site is. Writes restart.md.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fedgft.deploy.init import FederationFolder
from fedgft.deploy.local_run import (
    LocalRunPlan,
    read_progress,
    site_arguments,
    start_federation,
    start_server,
    submit_run,
    wait_for_run,
)
from fedgft.deploy.processes import Processes, list_descendants

SITES = ("north", "south", "east")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        expected, found = both(Path(name), args.rounds)
    same = expected["model"] == found["model"]
    lines = [
        "# A server that is killed and started again",
        "",
        "Made by `python hardening/restart.py`.",
        "",
        f"COMPAS, three sites through the gate, {args.rounds} rounds, FedGFT on FedAvg.",
        "",
        "| | undisturbed | server killed (SIGKILL) after round 1, started again, run resumed |",
        "| --- | --- | --- |",
        *(f"| {key} | {expected[key]} | {found[key]} |" for key in expected),
        "",
        f"The models are {'byte-identical' if same else 'NOT identical'}.",
    ]
    print("\n".join(lines), flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "restart.md").write_text("\n".join(lines) + "\n", "utf-8")
    if not same or found["sites that were started again"]:
        raise SystemExit(1)


def both(base: Path, rounds: int) -> tuple[dict[str, object], dict[str, object]]:
    """What came of the undisturbed run, and of the one whose server was killed."""
    plan = LocalRunPlan(SITES, site_arguments(SITES, []), {}, base / "federation", limit=600.0)
    with start_federation(plan) as (folder, processes):
        started = {site: processes.running[site].pid for site in SITES}
        nodes = json.loads(folder.node_names.read_text("utf-8"))
        expected = run(folder, processes, plan, base / "undisturbed", rounds, kill=False)
        found = run(folder, processes, plan, base / "killed", rounds, kill=True)
        assert nodes == json.loads(folder.node_names.read_text("utf-8"))
        for row in (expected, found):
            row["sites that were started again"] = sum(
                processes.running[site].pid != started[site] or not processes.is_alive(site)
                for site in SITES
            )
    return expected, found


def run(
    folder: FederationFolder,
    processes: Processes,
    plan: LocalRunPlan,
    out: Path,
    rounds: int,
    *,
    kill: bool,
) -> dict[str, object]:
    """One run to its end."""
    config = {"rounds": rounds, "sites": 3, "out": str(out), "data": "compas", "lam": 5.0}
    plan = replace(plan, config=config, out=out)
    began = time.monotonic()
    down = 0.0
    number = submit_run(folder, processes, plan)
    if kill:
        await_round(out, 1)
        down = restart(folder, processes)
        plan = replace(plan, config={**config, "resume": True}, resume=True)
        number = submit_run(folder, processes, plan)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    status = wait_for_run(processes, plan, number, lambda row: None)
    assert status == "finished:completed", (status, read_progress(out)[-1])
    rows = [row for row in read_progress(out) if "round" in row]
    return {
        "rounds": rows[-1]["round"],
        "sites heard in the last round": rows[-1]["clients"],
        "seconds from the kill to an open gate": round(down, 1),
        "seconds in all": round(time.monotonic() - began),
        "model": sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }


def await_round(out: Path, number: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(row.get("round") == number for row in read_progress(out)):
        assert time.monotonic() < deadline, "the round was not finished"
        time.sleep(0.2)


def restart(folder: FederationFolder, processes: Processes) -> float:
    """Kill the server with all of its children, and start it again; seconds in between."""
    began = time.monotonic()
    family = list_descendants(processes.running["server"].pid)
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    processes.running.pop("server").wait()
    start_server(folder, processes)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
