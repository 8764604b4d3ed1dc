"""Fill the tables of the README and the docs from the files in results/: `python docs/tables.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `make bench` and
`make results` run this script. With `--check` it changes nothing and lists the outdated pages.
"""

import argparse
import json
import re
import sys
import textwrap
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


def fill_lines(text: str) -> str:
    """The text in lines of at most 100 characters."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def speed() -> str:
    """Seconds of the simulator and of a plain PyTorch loop (results/speed.jsonl)."""
    rows = {(row["case"], row["executor"]): row for row in read_rows("speed.jsonl")}
    table = format_table(
        ("workload", "executor", "fedgft, s", "plain loop, s", "times faster", "accuracy of both"),
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
    sentences = (
        "With a cohort of 100 clients, a round among 100,000 clients takes "
        f"{rows['growth', 'fused']['ratio']:.1f} times as long as a round among 1,000 clients. "
        f"FedGFT takes {penalty['W1x20 both']:.2f} times as long as FedAvg if both methods are "
        "measured on the clients' rows in every round. If FedAvg is measured only on test rows, "
        f"FedGFT takes {penalty['W1x20 test']:.2f} times as long, because it needs one additional "
        "pass over the data for its constants. A fresh process "
        f"finishes W1 after {rows['startup', 'fused']['seconds']:.1f} s."
    )
    return f"{table}\n\n{fill_lines(sentences)}"


def speed_summary() -> str:
    """Seconds of the simulator beside a PyTorch loop and other simulators, for the README."""
    own = {row["case"]: row for row in read_rows("speed.jsonl") if row["executor"] == "fused"}
    others = {(row["workload"], row["peer"]): row for row in read_rows("peers.jsonl")}
    names = list(dict.fromkeys(peer for _, peer in others))
    lines = []
    for case, title in (("W1", "10 clients"), ("W2a", "100 clients")):
        theirs = [f"{others[case, name]['peer_seconds']:.1f}" for name in names]
        seconds = f"{own[case]['seconds']:.3f}"
        lines.append((title, seconds, f"{own[case]['plain_seconds']:.1f}", *theirs))
    return format_table(("", "fedgft", "PyTorch loop", *names), lines)


def peers() -> str:
    """Seconds of other simulators on the same runs (results/peers.jsonl)."""
    header = (
        "simulator",
        "workload",
        "simulator, s",
        "fedgft, s",
        "times faster",
        "accuracy of both",
    )
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
        "round of FedGFT / FedAvg",
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
    undecided = all_claims - holding - failing
    rest = f", {undecided} cannot be decided" if undecided else ""
    return fill_lines(
        f"Of {all_claims} claims checked on Adult and COMPAS, {holding} hold and {failing} do not"
        f"{rest} ([list](docs/paper-vs-code.md)). On CelebA, {holding_celeba} of {all_celeba} "
        "claims holds ([table](results/celeba/table1.md))."
    )


def demo() -> str:
    """Accuracy and gap of every method of `fedgft demo` (results/demo.txt)."""
    text = (RESULTS / "demo.txt").read_text("utf-8").partition("\n\ndecisions")[0]
    cell = r"(\d+\.\d)±\d+\.\d"
    found = re.findall(rf"^ (\w[\w ]*?) +{cell} +{cell} +(\S+)-(\S+) +(\S+)", text, re.MULTILINE)
    assert len(found) == 6, "results/demo.txt does not hold six methods"
    header = ("method", "accuracy, %", "gap", "95% interval", "noise floor")
    rows = [(name, right, gap, f"{low} to {high}", at) for name, right, gap, low, high, at in found]
    return format_table(header, rows)


TABLES = {
    "speed": speed,
    "speed-summary": speed_summary,
    "peers": peers,
    "gpu": gpu,
    "claims": claims,
    "demo": demo,
}


def fill(text: str) -> str:
    """Return the page with every marked block replaced by its table."""
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
