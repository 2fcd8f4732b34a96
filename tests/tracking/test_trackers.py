"""A round's numbers reach each tracker by its own calls, offline, and a missing library names its install command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descant.errors import SettingError
from descant.tracking.trackers import MLflow, TensorBoard, WeightsAndBiases

ENTRY = {"round": 3, "loss": 0.5, "participants": 2, "own": float("nan"), "note": "text"}
NUMBERS = {"loss": 0.5, "participants": 2.0}
MAKERS: dict[str, Callable[[Path], Any]] = {
    "torch.utils.tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


class Fake:
    """A library that notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Fake]:
        def call(*arguments: Any, **named: Any) -> Fake:
            self.calls.append((name, *arguments, *named.items()))
            return self

        return call


def calls(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    fake = Fake()
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, module, fake)  # type: ignore[arg-type]
    log = MAKERS[module](folder)
    log(ENTRY)
    log.close()
    return fake.calls


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calls("torch.utils.tensorboard", tmp_path, monkeypatch)
    assert found[0] == ("SummaryWriter", str(tmp_path))
    assert found[1:] == [*(("add_scalar", name, value, 3) for name, value in NUMBERS.items()), ("close",)]


def test_mlflow_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calls("mlflow", tmp_path, monkeypatch)
    assert found[0] == ("set_tracking_uri", tmp_path.as_uri())
    assert found[-2:] == [("log_metrics", NUMBERS, ("step", 3)), ("end_run",)]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == os.environ["DO_NOT_TRACK"] == "true"


def test_weights_and_biases_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calls("wandb", tmp_path, monkeypatch)
    assert ("mode", "offline") in found[0] and ("dir", str(tmp_path)) in found[0]
    assert found[1:] == [("log", NUMBERS, ("step", 3)), ("finish",)]
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    with pytest.raises(SettingError, match=r"must be one of 'offline', 'online'. Got 'on'"):
        WeightsAndBiases(tmp_path, mode="on")


@pytest.mark.parametrize("module", MAKERS)
def test_a_missing_library_names_its_install_command(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"not installed here. Install it with: pip install 'descant\[track\]'"):
        MAKERS[module](tmp_path)
