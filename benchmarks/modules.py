"""Which executor is faster for which kind of module: CPU seconds of 3 rounds, one thread.

python benchmarks/modules.py [NAME ...]

The table behind the rule in `engine/torch_choice.py`: `auto` takes the executor that is faster for
the kind of layers a module has. Both executors train the same models to rounding.
"""

import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from fedgft.algorithms import fedavg
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine import Settings, simulate

ROWS = 6000
STEPS = 20
WIDTH = 8
CLIENTS = 10


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.core = kind(WIDTH, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(x.reshape(-1, STEPS, WIDTH))[0][:, -1])


class OwnAttention(nn.Module):
    """Attention written out in linear layers and products: no layer of torch's shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, STEPS, WIDTH)
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 4.0
        return self.head((scores.softmax(-1) @ self.value(x)).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, STEPS, WIDTH)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.reshape(-1, STEPS, WIDTH)).mean(1))


def layers(*sizes: int):
    def make() -> nn.Module:
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            parts += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    return make


MODULES = {
    "logistic": layers(STEPS * WIDTH, 2),
    "mlp 64": layers(STEPS * WIDTH, 64, 2),
    "mlp 128-128": layers(STEPS * WIDTH, 128, 128, 2),
    "mlp 256": layers(STEPS * WIDTH, 256, 2),
    "mlp 256-256": layers(STEPS * WIDTH, 256, 256, 2),
    "mlp 1024-1024": layers(STEPS * WIDTH, 1024, 1024, 2),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "own attention": OwnAttention,
    "MultiheadAttention": Attention,
    "TransformerEncoderLayer": Transformer,
}


def federation() -> Federation:
    rng = np.random.default_rng(0)
    label, group = rng.integers(2, size=(2, ROWS))
    x = rng.standard_normal((ROWS, STEPS * WIDTH)).astype(np.float32) + 0.1 * label[:, None]
    names = tuple(f"x{i}" for i in range(STEPS * WIDTH))
    data = Dataset("sequences", x.astype(np.float32), label, group, names)
    rows = np.arange(ROWS, dtype=np.int32)
    edges = np.linspace(0, ROWS - 600, CLIENTS + 1).astype(np.int64)
    return Federation(data, rows[: ROWS - 600], edges, rows[ROWS - 600 :])


def seconds(made: Federation, make, executor: str, batch: int) -> tuple[float, str]:
    settings = Settings(rounds=3, batch_size=batch, threads=1, executor=executor, eval_every=0)
    began = time.process_time()
    found = simulate([made], make, fedavg(), settings, seeds=[0], lr=0.01)
    return time.process_time() - began, found.executor


def main() -> None:
    torch.set_num_threads(1)
    made = federation()
    seconds(made, MODULES["mlp 64"], "sequential", 64)  # what is compiled once
    print("| module | batch | sequential | stacked | auto | auto takes |")
    print("|---|---:|---:|---:|---:|---|")
    for name in sys.argv[1:] or MODULES:
        for batch in (256, 32):
            line = [name, str(batch)]
            taken = ""
            for executor in ("sequential", "stacked", "auto"):
                used, taken = seconds(made, MODULES[name], executor, batch)
                line.append(f"{used:.2f}")
            print(f"| {' | '.join(line)} | {taken} |", flush=True)


if __name__ == "__main__":
    main()
