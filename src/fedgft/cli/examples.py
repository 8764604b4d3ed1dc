"""What `--help` shows below the options: lines to copy, short enough for a terminal."""

CODES = (
    "Exit codes: 0 done, 2 something to mend (said in one line), 3 a gap above --fail-above, "
    "4 a target missed (with --strict), 130 interrupted."
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "fedgft": (
        "fedgft demo",
        "fedgft train --data loans.csv --label repaid --group sex --target 0.02",
        "fedgft measure predictions.csv --label y --group sex --score p",
        "fedgft audit north.json south.json --out report",
    ),
    "demo": ("fedgft demo", "fedgft demo --seeds 5 --out my-demo"),
    "train": (
        "fedgft train --data adult --target 0.02",
        "fedgft train --data loans.csv --label repaid --group sex --client bank",
        "fedgft train --data adult --group race,sex --metric sp+0.5*eop --base scaffold",
        "fedgft train --data celeba --images ~/celeba --device cuda --precision bf16",
    ),
    "compare": (
        "fedgft compare --data compas --alpha 0.5 5 100 --metrics sp eop",
        "fedgft compare --data compas --protocol paper --methods fedavg fedgft --json",
    ),
    "frontier": (
        "fedgft frontier --data compas --metric sp --target 0.02",
        "fedgft frontier --data loans.csv --label repaid --group sex --references",
    ),
    "predict": ("fedgft predict fedgft-train/model.safetensors people.csv --out scored.csv",),
    "measure": (
        "fedgft measure predictions.csv --label y --group race --group sex --score p",
        "fedgft measure predictions.csv --label y --group sex --score p --report report",
        "fedgft measure predictions.parquet --label y --group sex --score p --epsilon 1",
    ),
    "audit": (
        "fedgft audit north.json south.json east.json --out report",
        "fedgft audit sums/ --fail-above sp=0.05 eop=0.1",
    ),
    "reproduce": (
        "fedgft reproduce table1 --data compas --out my-results",
        "fedgft reproduce all",
    ),
    "completion": (
        "source <(fedgft completion bash)",
        "fedgft completion fish > ~/.config/fish/completions/fedgft.fish",
    ),
    "data": ("fedgft data list", "fedgft data get adult --out adult.csv"),
    "data get": ("fedgft data get adult --out adult.csv",),
    "deploy": (
        "fedgft deploy local --sites 3 --rounds 5",
        "fedgft deploy init federation --sites north=north.pub --host fair.example.org",
    ),
    "deploy local": (
        "fedgft deploy local --sites 3 --rounds 5",
        "fedgft deploy local --data north.csv south.csv --label repaid --group sex",
    ),
    "deploy keys": ("fedgft deploy keys north",),
    "deploy server": ("fedgft deploy server federation",),
    "deploy gate": ("fedgft deploy gate federation",),
    "deploy site": (
        "fedgft deploy site north --server fair.example.org:9093 --data /srv/north.csv",
    ),
    "deploy init": (
        "fedgft deploy init federation --sites north=north.pub --host fair.example.org",
    ),
}


def shown(command: str) -> str:
    found = EXAMPLES[command]
    return "\n".join(("Example:" if len(found) == 1 else "Examples:", *(f"  {e}" for e in found)))
