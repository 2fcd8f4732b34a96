"""Trackers for TensorBoard, MLflow and Weights & Biases: callables for the loop's body.

    log = TensorBoard("logs")
    for round in federation.rounds(50):
        log(federation.history_[-1])
    log.close()

They write to a local folder and send nothing, unless given a server's address or an online mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import SettingError

INSTALL_HINT = "pip install 'descant[track]'"


class TensorBoard:
    """Tracker that writes scalars to a TensorBoard event file."""

    def __init__(self, folder: str | Path) -> None:
        self._writer = _import_library("torch.utils.tensorboard", "TensorBoard").SummaryWriter(str(folder))

    def __call__(self, entry: Mapping[str, Any]) -> None:
        for name, value in _finite_numbers(entry).items():
            self._writer.add_scalar(name, value, entry["round"])

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """Tracker that writes metrics to one MLflow run; ``store`` is a folder or the address of a server."""

    def __init__(self, store: str | Path, experiment: str = "descant") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        self._mlflow = _import_library("mlflow", "MLflow")
        remote = isinstance(store, str) and "://" in store
        self._mlflow.set_tracking_uri(store if remote else Path(store).resolve().as_uri())
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run()

    def __call__(self, entry: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(_finite_numbers(entry), step=entry["round"])

    def close(self) -> None:
        self._mlflow.end_run()


class WeightsAndBiases:
    """Tracker that writes to a W&B run, offline unless ``mode="online"``; `wandb sync` uploads it later."""

    def __init__(self, folder: str | Path, project: str = "descant", mode: str = "offline") -> None:
        if mode not in ("offline", "online"):
            raise SettingError(f"The 'mode' of WeightsAndBiases must be one of 'offline', 'online'. Got {mode!r}.")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._run = _import_library("wandb", "Weights & Biases").init(project=project, dir=str(folder), mode=mode)

    def __call__(self, entry: Mapping[str, Any]) -> None:
        self._run.log(_finite_numbers(entry), step=entry["round"])

    def close(self) -> None:
        self._run.finish()


def _finite_numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an entry, without the round itself."""
    numbers = {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "round"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _import_library(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise SettingError(f"{name} is not installed here. Install it with: {INSTALL_HINT}") from error
