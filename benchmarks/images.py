"""Training images a second of a whole round on one accelerator: ResNet-18, 10 clients, batch 64.

    python benchmarks/images.py --size 64 224

Beside each other, in one run: a plain loop as anybody writes it (torch.optim.Adam, one client after
another, data already on the device), and `simulate`, for FedAvg and FedGFT. Pictures are noise; the
speed does not depend on what they show. It needs torch and numpy alone. One JSON line a case.
"""

import argparse
import copy
import json
import time

import numpy as np
import torch

from fedgft.algorithms import fedavg, fedgft
from fedgft.data.dataset import Dataset
from fedgft.data.partition import partition
from fedgft.engine import Settings, simulate
from fedgft.metrics import get_metric
from fedgft.models import ResNet18
from fedgft.optimizers import Optimizer

WARM = 3  # rounds before the clock starts: graphs are captured, convolutions chosen


def pictures(rows: int, size: int) -> Dataset:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (rows, size, size, 3), np.uint8)
    return Dataset(
        name="noise",
        features=pixels.transpose(0, 3, 1, 2),
        columns=("red", "green", "blue"),
        labels=rng.integers(0, 2, rows),
        groups=rng.integers(0, 2, rows),
    )


def sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def plain(data: Dataset, parts: list[np.ndarray], args: argparse.Namespace, half: bool) -> float:
    """Seconds of a round of the loop that anybody would write."""
    device = args.device
    x = torch.as_tensor(np.ascontiguousarray(data.features), device=device)
    y = torch.as_tensor(data.labels, device=device)
    torch.backends.cudnn.benchmark = True
    model = ResNet18().module(features=3, classes=2).to(device)
    rows = [torch.as_tensor(p, device=device) for p in parts]
    total = sum(map(len, parts))
    for round in range(args.plain_rounds + 1):
        if round == 1:
            sync(device)
            began = time.perf_counter()
        mean = {n: torch.zeros_like(t, dtype=torch.float32) for n, t in model.state_dict().items()}
        for own in rows:
            local = copy.deepcopy(model).train()
            optimizer = torch.optim.Adam(local.parameters(), 1e-3)
            for batch in own[torch.randperm(len(own), device=device)].split(args.batch_size):
                with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=half):
                    scores = local(x[batch].float() / 127.5 - 1)
                    loss = torch.nn.functional.cross_entropy(scores, y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, tensor in local.state_dict().items():
                mean[name] += tensor * (len(own) / total)
        model.load_state_dict({n: t.to(model.state_dict()[n].dtype) for n, t in mean.items()})
    sync(device)
    return (time.perf_counter() - began) / args.plain_rounds


def ours(federation, method, args: argparse.Namespace, **options) -> tuple[float, float]:
    """Seconds of a round, and of what comes before the clock starts."""
    stamps = [time.perf_counter()]

    def on_round(done: int, total: int) -> None:
        sync(args.device)
        stamps.append(time.perf_counter())

    settings = Settings(
        rounds=WARM + args.rounds,
        batch_size=args.batch_size,
        device=args.device,
        eval_every=0,
        eval_on="test",
        optimizer=Optimizer("adam"),
        **{"schedule": "constant", "state": "reset", **options},
    )
    simulate([federation], ResNet18(), method, settings, seeds=[0], lr=1e-3, on_round=on_round)
    return float(np.median(np.diff(stamps)[WARM:])), stamps[WARM] - stamps[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, nargs="+", default=[64])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain-rounds", type=int, default=2)
    parser.add_argument("--lanes", type=int, nargs="+", default=[0], help="0: chosen by itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for size in args.size:
        compare(size, args)


def compare(size: int, args: argparse.Namespace) -> None:
    data = pictures(args.rows + 64, size)
    share = 64 / len(data)
    federation = partition(data, clients=args.clients, alpha=args.alpha, test_share=share)
    rows = len(federation.rows)
    parts = [federation.client(k) for k in range(args.clients)]

    def tell(what: str, seconds: float, **more) -> None:
        about = {"size": size, "batch_size": args.batch_size, "clients": args.clients}
        speed = {"seconds": round(seconds, 4), "images_per_second": round(rows / seconds)}
        print(json.dumps({**about, "what": what, **speed, **more}), flush=True)

    for half in (False, True) if args.plain_rounds else ():
        name = "plain loop, bf16" if half else "plain loop, fp32 (tf32 convolutions)"
        tell(name, plain(data, parts, args, half))
    for lanes in args.lanes:
        for name, method in (("FedAvg", fedavg()), ("FedGFT", fedgft(get_metric("sp"), 10.0))):
            seconds, warm = ours(federation, method, args, precision="bf16", lanes=lanes or None)
            tell(f"fedgft, {name}, bf16", seconds, lanes=lanes or "auto", warm=round(warm, 1))


if __name__ == "__main__":
    main()
