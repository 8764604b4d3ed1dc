"""The sequential executor: one client after another, for every module there is.

Convolutions, BatchNorm (its running statistics travel with the parameters), dropout (seeded by
client, round and epoch), data-dependent control flow. Each lane has one client at a time: on a CPU
a thread serves it, on a GPU a stream, and a few streams fill the chip where one client's batch is
too small to. A module with randomness inside has one lane, for torch's generator is one.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedgft.engine.lane import Lane, Plan
from fedgft.engine.rows import Rows
from fedgft.engine.task import Task
from fedgft.engine.work import Work, work_of
from fedgft.optim import Moments

if TYPE_CHECKING:
    from fedgft.engine.torch_executor import TorchExecutor

LANES = 10  # clients in flight on one GPU: more gain little
ROOM = 0.6  # of the GPU's free memory that lanes may take

Action = Callable[[], object]


def train(executor: "TorchExecutor", task: Task, block: Tensor, moments: Moments) -> Tensor:
    work = work_of(executor.book, executor.rows, task, moments, executor.settings)
    cuda = executor.rows.device.type == "cuda"
    with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []):
        (_in_flight if cuda else _threaded)(executor, work, block, moments)
    return block


def _program(
    lane: Lane, work: Work, unit: int, block: Tensor, moments: Moments
) -> Iterator[Action]:
    """All that one unit's round takes, piece by piece; nothing, where it has no row."""
    if work.starts[unit] == work.starts[unit + 1]:
        return
    yield lambda: lane.load(work, unit, block, moments)
    for noise, sizes in zip(work.task.noise[unit], work.batches[unit], strict=True):
        if lane.plan.random:
            torch.manual_seed(int(noise))
        for size in sizes:
            yield lambda size=size: lane.step(size, work.task)
    yield lambda: lane.store(work, unit, block, moments)


def _threaded(executor: "TorchExecutor", work: Work, block: Tensor, moments: Moments) -> None:
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in executor.lanes:
        free.put(lane)

    def client(unit: int) -> None:
        lane = free.get()
        try:
            for action in _program(lane, work, unit, block, moments):
                action()
        finally:
            free.put(lane)

    units = range(len(work.task.units))
    if len(executor.lanes) == 1:
        for unit in units:
            client(unit)
    else:
        with ThreadPoolExecutor(len(executor.lanes)) as pool:
            list(pool.map(client, units))


def _in_flight(executor: "TorchExecutor", work: Work, block: Tensor, moments: Moments) -> None:
    """A step of every lane in turn, so that none waits for work; nobody waits for the GPU."""
    lanes, home = executor.lanes, torch.cuda.current_stream(executor.rows.device)
    for lane in lanes:
        lane.stream.wait_stream(home)

    def queue_of(lane: Lane, units: Sequence[int]) -> Iterator[Action]:
        for unit in units:
            yield from _program(lane, work, unit, block, moments)

    shares = zip(lanes, _shares(work.task.steps, len(lanes)), strict=True)
    active = [(lane, queue_of(lane, units)) for lane, units in shares]
    try:
        while active:
            for lane, queue in list(active):
                action = next(queue, None)
                if action is None:
                    active.remove((lane, queue))
                    continue
                with torch.cuda.stream(lane.stream):
                    action()
    finally:  # also after Ctrl-C: nobody else gets this memory while a lane still writes to it
        for lane in lanes:
            home.wait_stream(lane.stream)


def _shares(steps: np.ndarray, lanes: int) -> list[list[int]]:
    """Units for each lane, the longest first to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(lanes)]
    load = np.zeros(lanes)
    for unit in np.argsort(-steps, kind="stable").tolist():
        least = int(np.argmin(load))
        shares[least].append(unit)
        load[least] += steps[unit]
    return shares


def make_lanes(plan: Plan, places: Sequence[Rows], *, most: int) -> list[Lane]:
    """One a thread, or as many as a GPU is quick with; `most`: units that there are in a round."""
    settings, first = plan.settings, Lane(plan, places[0])
    if plan.random:
        return [first]
    if not first.cuda:
        return [first, *(Lane(plan, places[0]) for _ in range(settings.threads - 1))]
    wanted = settings.lanes or min(LANES, _fitting(first))
    count = min(wanted * len(places), most)
    return [first, *(Lane(plan, places[i % len(places)]) for i in range(1, count))]


def _fitting(lane: Lane) -> int:
    """How many lanes the memory has room for; also the first look at whether one fits."""
    device, plan = lane.rows.device, lane.plan
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if len(lane.order) > 1:
        lane.gradient(min(plan.settings.batch_size, len(lane.order)))
    took = torch.cuda.max_memory_allocated(device) - before
    held = 8 * plan.layout.size * lane.rows.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(ROOM * free / (1.5 * took + held)))
