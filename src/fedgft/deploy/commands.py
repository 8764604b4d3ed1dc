"""What to do on which host: the text that `fedgft deploy init` prints."""

import shlex

from fedgft.deploy.folder import CONNECTION, Folder
from fedgft.deploy.keys import fingerprint, registered_keys
from fedgft.deploy.processes import QUIET

SWITCHES = [f"export {name}={value}" for name, value in QUIET.items() if name.startswith("FLWR_")]


def instructions(folder: Folder) -> str:
    """Commands to copy, host by host."""
    place = shlex.quote(str(folder.path))
    keys = registered_keys(folder.nodes)
    lines = [
        "# On every host: Python 3.11 or newer, and  pip install 'fedgft[flower]'.",
        "",
        f"# 1. On the server ({folder.host}). Sites must reach port {folder.port}, which passes",
        "#    signed requests of these sites alone; the engine listens on 127.0.0.1, port",
        f"#    {folder.inner}. Compare the keys with the sites by telephone:",
        *(f"#      {name}  {fingerprint(key)}" for key, name in keys.items()),
        shlex.join(["fedgft", "deploy", "server", str(folder.path)]),
        "",
    ]
    for number, site in enumerate(keys.values(), 2):
        own = folder.nodes / f"{site}.key"
        made_here = f" and nodes/{site}.key, which was made here (chmod 600)" * own.exists()
        command = ["fedgft", "deploy", "site", site, "--server", folder.address]
        lines += [
            f"# {number}. At {site}, in a folder with ca.crt{made_here or f' and its {site}.key'};",
            "#    --set max-epsilon=1 or min-count=10 refuse to tell more; for secure sums add",
            "#    --peers FOLDER, with the public keys of all sites (nodes/*.pub):",
            shlex.join([*command, "--data", f"/path/to/{site}.csv"]),
            "",
        ]
    config = f'data="csv" label="..." group="..." sites={len(keys)} rounds=20'
    lines += [
        f"# {len(keys) + 2}. On the server, in a second shell: train. Success is what",
        f"#    `flwr list {CONNECTION}` says; model and report come into {place}/fedgft-run",
        "#    (the setting out; one folder per run).",
        f"cd {place}",
        f"export FLWR_HOME={shlex.quote(str(folder.engine))}",
        *SWITCHES,
        shlex.join(["flwr", "run", "app", CONNECTION, "--stream", "--run-config", config]),
        "",
    ]
    return "\n".join(lines)
