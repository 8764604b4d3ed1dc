"""Executors train and measure models: fused, stacked or sequential, whichever is fastest."""

import re
from dataclasses import replace

from fedgft.algorithms import Algorithm
from fedgft.engine.executors.base import Executor
from fedgft.engine.executors.fused import FusedExecutor, why_not_fused
from fedgft.engine.plan import RowIndex
from fedgft.errors import FedgftError, import_extra
from fedgft.formatting import format_count
from fedgft.models import Model
from fedgft.settings import Settings

__all__ = ["Executor", "check_devices", "choose_executor"]


def choose_executor(
    index: RowIndex, model: Model, algorithm: Algorithm, settings: Settings
) -> Executor:
    """Return the executor that `settings` names, or else the fastest one that gives exact results.

    The fused executor trains binary linear models on the CPU. The stacked executor trains modules
    that can be vectorized and become faster by it. The sequential executor trains everything else.
    The last two need torch.

    Parameters
    ----------
    index
        Rows of every client.
    model
        The model; unless the fused executor is chosen, its module is built and tried on two rows.
    algorithm
        The method; only its correction matters here.
    settings
        `settings.executor` is "auto" or the name of an executor; an error is raised if the named
        executor cannot run the simulation.
    """
    reason = why_not_fused(index, model, algorithm, settings)
    if settings.executor == "fused" and reason:
        raise FedgftError(f"`executor` fused cannot take this run: {reason}")
    if settings.executor in ("auto", "fused") and not reason:
        return FusedExecutor(index, settings)
    import_extra("torch", f"training a {model.name} model ({reason or settings.executor})")
    from fedgft.engine.executors.sequential import SequentialExecutor
    from fedgft.engine.executors.stacked import StackedExecutor, why_not_stacked
    from fedgft.engine.executors.torch_common import probe_module

    check_devices(settings)
    traits = probe_module(index, model, settings)
    if settings.executor != "sequential":
        reason = why_not_stacked(traits, index, settings)
        if algorithm.objective.has_curves:
            reason = "the price of a score depends on the score"
        if reason is None:
            stacked = StackedExecutor(index, model, settings, replace(traits, min_batch=1))
            reason = stacked.why_not_captured()
            if reason is None:
                return stacked
        if settings.executor == "stacked":
            raise FedgftError(f"`executor` stacked cannot take this model: {reason}")
    return SequentialExecutor(index, model, settings, traits)


def check_devices(settings: Settings) -> None:
    """Raise if a device of the settings does not exist; torch is loaded for CUDA devices only."""
    if settings.device == "cpu":
        return
    for device in settings.devices:
        match = re.fullmatch(r"cuda(?::(\d+))?", device)
        if match is None:
            choices = "choose cpu, cuda or cuda:0,cuda:1"
            raise FedgftError(f"`device` {device!r} is not known; {choices}")
        cuda = import_extra("torch", f"`device` {device}").cuda
        count = cuda.device_count() if cuda.is_available() else 0
        if int(match[1] or 0) >= count:
            none = "no CUDA device; use `device` cpu"
            has = f"{format_count(count, 'CUDA device')}, counted from 0" if count else none
            raise FedgftError(f"`device` {device}: this machine has {has}")
