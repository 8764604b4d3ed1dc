"""What to do on which host: the text that `fedgft deploy init` prints and keeps."""

import shlex

from fedgft.deploy.folder import CONNECTION, Folder
from fedgft.deploy.processes import QUIET

SWITCHES = [f"export {name}={value}" for name, value in QUIET.items() if name.startswith("FLWR_")]


def instructions(folder: Folder) -> str:
    """Commands to copy, host by host."""
    lines = [
        "# On every host: Python 3.11 or newer, and  pip install 'fedgft[flower]'.  No telemetry:",
        *SWITCHES, "",
        f"# 1. On the server ({folder.host}), in this folder; sites must reach port {folder.port}:",
        f"cd {shlex.quote(str(folder.path))}",
        f"export FLWR_HOME={shlex.quote(str(folder.engine))}",
        shlex.join(folder.server_command()), "",
        "# 2. There too, in a second shell (with the lines above): let the sites in, each once.",
        f"cd {shlex.quote(str(folder.path))}",
        f"export FLWR_HOME={shlex.quote(str(folder.engine))}",
        *(shlex.join(["flwr", "supernode", "register", f"nodes/{site}.pub", CONNECTION])
          for site in folder.sites), "",
    ]  # fmt: skip
    for number, site in enumerate(folder.sites, 3):
        node = f'site="{site}" data="/path/to/{site}.csv" key="nodes/{site}.key" peers="nodes"'
        lines += [
            f"# {number}. At {site}, in a folder with ca.crt, nodes/{site}.* (chmod 600) and the",
            "#    public keys of all sites (nodes/*.pub, for secure sums), and nothing else of",
            "#    this; max-epsilon=1 or min-count=10 there refuse to tell more",
            "#    (two nodes on one host need two ports):",
            shlex.join(folder.node_command(site, node)), "",
        ]  # fmt: skip
    config = f'data="csv" label="..." group="..." sites={len(folder.sites)} rounds=20'
    lines += [
        f"# {len(folder.sites) + 3}. On the server, in the second shell: train. Success is what",
        f"#    `flwr list {CONNECTION}` says; model and report come into fedgft-run, in the",
        "#    folder of the first shell (the setting out; one folder a run).",
        shlex.join(["flwr", "run", "app", CONNECTION, "--stream", "--run-config", config]), "",
    ]  # fmt: skip
    return "\n".join(lines)
