"""Seconds per round and CPU seconds by process of `fedgft deploy local`.

python benchmarks/deployed.py [--sites 3] [--rounds 5] [--source FOLDER] [--out FILE]

`--source` names the `src` folder of another checkout, to compare with. Prints two lines, and
appends them to FILE.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil

ROLES = {  # word on the command line -> what the process does; the first that fits
    "fedgft.deploy.processes superlink": "SuperLink",
    "fedgft.deploy.processes supernode": "SuperNodes",
    "deploy server": "gate",
    "deploy site": "sites' runners",
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNodes",
    "flower-superexec": "Flower's SuperExec",
    "flwr-serverapp": "the server's app",
    "flwr-clientapp": "client apps, one process per message",
    "/flwr": "flwr commands",
    "deploy local": "deploy local",
}


def role(process: psutil.Process) -> str:
    text = " ".join(process.cmdline())
    return next((name for word, name in ROLES.items() if word in text), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(args.source), "OMP_NUM_THREADS": "1"}
    used: dict[int, tuple[str, float]] = {}
    seen: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "fedgft",
            "deploy",
            "local",
            "--sites",
            str(args.sites),
            "--rounds",
            str(args.rounds),
            "--lam",
            "5",
            "--set",
            "schedule=constant",
            "--out",
            f"{folder}/run",
            "--json",
        ]
        began = time.monotonic()
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as run:
            assert run.stderr is not None
            os.set_blocking(run.stderr.fileno(), False)
            main_process = psutil.Process(run.pid)
            text = b""
            while run.poll() is None:
                text += run.stderr.read() or b""
                while text.count(b"\nround ") + text.startswith(b"round ") > len(seen):
                    seen.append(time.monotonic() - began)
                for process in [main_process, *main_process.children(recursive=True)]:
                    try:
                        times = process.cpu_times()
                        name = used[process.pid][0] if process.pid in used else role(process)
                        used[process.pid] = (name, times.user + times.system)
                    except psutil.Error:
                        continue
                time.sleep(0.2)
        assert run.returncode == 0, text.decode()
        seconds = time.monotonic() - began
    totals: Counter[str] = Counter()
    for name, spent in used.values():
        totals[name] += spent
    rounds = [f"{b - a:.1f}" for a, b in pairwise(seen)]
    lines = [
        f"load {os.getloadavg()[0]:.1f}; {seconds:.0f} s in all; first round after {seen[0]:.0f} "
        f"s; seconds per round: {', '.join(rounds)}",
        "; ".join(f"{name} {spent:.1f}" for name, spent in totals.most_common())
        + f" CPU s; {sum(totals.values()):.1f} in all",
    ]
    print("\n".join(lines), flush=True)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
