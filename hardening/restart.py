"""A SuperLink that is killed in the middle of a run, and started again: sites stay, and the resumed
run ends with the model of a run that nothing disturbed, byte for byte.

python hardening/restart.py [--out results/hardening] [--rounds 4]

A server and three sites as real processes, through the gate, twice. The second time the server
(gate and SuperLink) gets SIGKILL after round 1 of the run, whatever it does then, and is started
again. No site is started again. Writes restart.md.
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

from fedgft.deploy.control import status_of
from fedgft.deploy.folder import Folder
from fedgft.deploy.local import Plan, federation, nodes_of, start_server, submit, watch
from fedgft.deploy.outcome import progress
from fedgft.deploy.processes import Processes, members

SITES = ("north", "south", "east")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        expected = run(base / "undisturbed", args.rounds, kill=False)
        found = run(base / "killed", args.rounds, kill=True)
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
    if not same or found["sites' processes started"] != len(SITES):
        raise SystemExit(1)


def run(out: Path, rounds: int, *, kill: bool) -> dict[str, object]:
    """One federation; what came of it."""
    config = {"rounds": rounds, "sites": 3, "out": str(out), "data": "compas", "lam": 5.0}
    plan = Plan(SITES, nodes_of(SITES, []), config, out, limit=600.0)
    began = time.monotonic()
    down = 0.0
    with federation(plan) as (folder, processes):
        before = {site: processes.running[site].pid for site in SITES}
        nodes = json.loads(folder.names.read_text("utf-8"))
        number = submit(folder, processes, plan)
        if kill:
            await_round(out, 1)
            down = restart(folder, processes)
            again = replace(plan, config={**config, "resume": True}, resume=True)
            number = submit(folder, processes, again)
            plan = again
        status = watch(processes, plan, number, lambda row: None)
        assert status == "finished:completed", status
        assert status_of(folder, number) == status
        alive = [site for site in SITES if processes.alive(site)]
        assert alive == list(SITES) and nodes == json.loads(folder.names.read_text("utf-8"))
        same = [site for site in SITES if processes.running[site].pid == before[site]]
    rows = [row for row in progress(out) if "round" in row]
    return {
        "rounds": rows[-1]["round"],
        "sites heard in the last round": rows[-1]["clients"],
        "sites' processes started": len(same),
        "seconds without a server": round(down, 1),
        "seconds in all": round(time.monotonic() - began),
        "model": sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }


def await_round(out: Path, number: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(row.get("round") == number for row in progress(out)):
        assert time.monotonic() < deadline, "the round was not finished"
        time.sleep(0.2)


def restart(folder: Folder, processes: Processes) -> float:
    """Kill the server with all of its children, and start it again; seconds in between."""
    began = time.monotonic()
    family = members(processes.running["server"].pid)
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
