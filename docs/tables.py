"""Fill the tables of the README and the docs from the files in results/: `python docs/tables.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `make bench` and
`make results` run this script; `--check` only says which pages are out of date.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WORKLOADS = {
    "W1": "W1: 10 clients, 20 rounds",
    "W1x20": "W1x20: 20 replicates in one call",
    "W2a": "W2a: 100 clients",
    "W2b": "W2b: 1,000 clients",
    "mlp": "W1 with a hidden layer of 64",
}


def read_rows(name: str) -> list[dict[str, Any]]:
    """The records of a JSON-lines file in results/."""
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def speed() -> str:
    """Seconds of the simulator and of a plain PyTorch loop (results/speed.jsonl)."""
    rows = {(row["case"], row["executor"]): row for row in read_rows("speed.jsonl")}
    table = format_table(
        ("workload", "executor", "ours, s", "plain loop, s", "times faster", "accuracy, both"),
        (
            (
                WORKLOADS[case],
                executor,
                f"{row['seconds']:.3f}",
                f"{row['plain_seconds']:.1f}",
                f"{row['ratio']:.{0 if row['ratio'] >= 10 else 1}f}",
                f"{row['accuracy']:.4f} / {row['plain_accuracy']:.4f}",
            )
            for (case, executor), row in rows.items()
            if case in WORKLOADS
        ),
    )
    penalty = rows["penalty", "fused"]["ratios"]
    return (
        f"{table}\n\nA round among 100,000 clients with a cohort of 100 costs "
        f"{rows['growth', 'fused']['ratio']:.1f} times what it costs among 1,000. FedGFT takes "
        f"{penalty['W1x20 both']:.2f} times as long as FedAvg where both are measured on the "
        f"clients' rows every round, and {penalty['W1x20 test']:.2f} times where FedAvg is "
        "measured on test rows alone: its constants are one more pass over the data. A fresh "
        f"process has W1 done after {rows['startup', 'fused']['seconds']:.1f} s."
    )


def peers() -> str:
    """Seconds of other simulators on the same runs (results/peers.jsonl)."""
    header = ("simulator", "workload", "theirs, s", "ours, s", "times faster", "accuracy, both")
    return format_table(
        header,
        (
            (
                f"{row['peer']} {row['version']}",
                row["workload"],
                f"{row['peer_seconds']:.1f}",
                f"{row['seconds']:.3f}",
                row["ratio"],
                f"{row['peer_accuracy']:.4f} / {row['accuracy']:.4f}",
            )
            for row in read_rows("peers.jsonl")
        ),
    )


def gpu() -> str:
    """Images per second of ResNet-18 on a GPU (results/celeba/speed.jsonl)."""
    rows = read_rows("celeba/speed.jsonl")
    lines = []
    for size in sorted({row["size"] for row in rows}):
        *plain, fedavg, fair = [row for row in rows if row["size"] == size]
        counts = [f"{row['images_per_second']:,}" for row in (*plain, fedavg, fair)]
        lines.append((size, *counts, f"{fair['seconds'] / fedavg['seconds']:.2f}"))
    header = (
        "pixels",
        "plain loop, tf32",
        "plain loop, bf16",
        "FedAvg, bf16",
        "FedGFT, bf16",
        "FedGFT's round / FedAvg's",
    )
    return format_table(header, lines)


def claims() -> str:
    """How many claims of the paper hold (results/README.md, results/celeba/README.md)."""
    counts = []
    for folder in ("", "celeba/"):
        text = (RESULTS / folder / "README.md").read_text("utf-8")
        found = re.search(r"^\| all \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
        assert found, f"results/{folder}README.md has no line with all claims"
        counts.append(tuple(map(int, found.groups())))
    (all_claims, holding, failing), (all_celeba, holding_celeba, _) = counts
    return (
        f"{failing} of {all_claims} claims that were checked on Adult and COMPAS do not hold "
        f"({holding} hold, the others cannot be decided); on CelebA {holding_celeba} of "
        f"{all_celeba} claims holds."
    )


def demo() -> str:
    """What `fedgft demo` printed when results/ was made (results/demo.txt)."""
    text = (RESULTS / "demo.txt").read_text("utf-8").rstrip()
    tables, _, sentences = text.rpartition("\n\n")
    return f"```text\n{tables.strip()}\n```\n\n{' '.join(sentences.split())}"


TABLES = {"speed": speed, "peers": peers, "gpu": gpu, "claims": claims, "demo": demo}


def fill(text: str) -> str:
    """The page with every marked block written anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text("utf-8")
        if fill(text) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(fill(text), "utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
