"""The commands: where each is, its line in `fedgft --help`, and examples of it.

Nothing here imports a command, so that `fedgft --help` is quick.
"""

EXIT_CODES = (
    "Exit codes: 0 done, 2 an error to fix (printed in one line), 3 a gap above --fail-above, "
    "4 a target missed (with --strict), 130 interrupted."
)


COMMANDS = {  # by heading: the first sentence of the command's docstring, or the help of its App
    "Look around": {
        "demo": "Compare six methods on Adult, split over ten very different clients.",
        "data": "List and fetch the public data sets.",
        "reproduce": "Regenerate the paper's tables and figures, beside the published numbers.",
    },
    "Measure": {
        "measure": "Count a site's predictions. The file that comes out holds sums; no row leaves "
        "the site.",
        "audit": "Put sites' sums together: global and local gaps with intervals, who drives them, "
        "a report.",
    },
    "Train": {
        "train": "Train one method, save its model, and show every client before and after.",
        "compare": "Train several methods on the same replicates and compare accuracy and gaps.",
        "frontier": "Sweep the strength of every method, draw accuracy against gap, save the "
        "chosen model.",
        "predict": "Apply a saved model; the output is the table with the columns score and "
        "decision appended.",
        "deploy": "Train between organizations, on Flower: set up hosts, or try it here.",
    },
    "Shell": {
        "completion": "Print a script that lets a shell complete commands, options and choices."
    },
}
SUMMARIES = {name: text for group in COMMANDS.values() for name, text in group.items()}
PATHS = {  # of the others: fedgft.cli.NAME:NAME
    "data": "fedgft.cli.data:app",
    "deploy": "fedgft.cli.deploy:app",
    "compare": "fedgft.cli.compare:compare",
    "completion": "fedgft.cli.app:completion",
}
EXAMPLES: dict[str, tuple[str, ...]] = {  # by command; "fedgft" is the program without one
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
    "reproduce": ("fedgft reproduce table1 --data compas --out my-results", "fedgft reproduce all"),
    "completion": (
        "fedgft completion bash > ~/.local/share/bash-completion/completions/fedgft",
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


def format_examples(command: str) -> str:
    """Return the examples of a command as the last lines of its help; empty if it has none."""
    lines = EXAMPLES.get(command, ())
    if not lines:
        return ""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join((title, *(f"  {line}" for line in lines)))
