"""Fed+'s sentiment network: an LSTM over frozen word vectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.settings import check_settings, setting
from ..parties.text import VECTOR_SIZES, word_vectors


@dataclass(frozen=True)
class _LstmSettings:
    vectors: str = setting("glove100", "the pretrained word vectors", one_of=tuple(VECTOR_SIZES))
    hidden: int = setting(256, "units of each LSTM layer", least=1, whole=True)
    layers: int = setting(2, "LSTM layers", least=1, whole=True)
    dense: int = setting(30, "units of the dense layer after them", least=1, whole=True)
    outputs: int = setting(2, "number of classes", least=1, whole=True)
    forget_bias: float = setting(1.0, "the initial bias of the forget gates", least=0)


def lstm(
    vectors: str = "glove100",
    hidden: int = 256,
    layers: int = 2,
    dense: int = 30,
    outputs: int = 2,
    forget_bias: float = 1.0,
    data: str | Path | None = None,
) -> nn.Module:
    """Return two LSTM layers of 256 units over frozen word vectors, then 30 units and a linear layer.

    The papers have 256 units; FedProx's code has 100, and the 30 in between (ERRATA 22). Its single output with a
    sigmoid is two outputs with a cross-entropy here, which is the same model. As there, the classifier reads the LSTM's
    state after the last word, padding included. The forget gates start open (a bias of 1): no paper states this, but
    FedProx's code has it by TensorFlow's default. With torch's initialization training is much slower, because the
    state is lost in the padding. `data` is the folder of the word vectors.
    """
    check_settings(
        _LstmSettings(vectors, hidden, layers, dense=dense, outputs=outputs, forget_bias=forget_bias), "lstm"
    )
    classifier = LstmClassifier(word_vectors(vectors, data).table, hidden, layers, dense=dense, outputs=outputs)
    with torch.no_grad():
        for name, bias in classifier.lstm.named_parameters():
            if name.startswith("bias_ih"):  # the order of the gates: input, forget, cell, output
                bias[hidden : 2 * hidden] = forget_bias
    return classifier


class WordVectors(nn.Module):
    """A frozen embedding table: a buffer, so it is neither trained nor sent, and all copies share its memory."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.table)

    def __deepcopy__(self, memory: dict[int, Any]) -> WordVectors:
        """Share the table: a model per party must not mean a table per party."""
        return WordVectors(self.table)


class LstmClassifier(nn.Module):
    """Word numbers ``[batch, words]`` -> outputs ``[batch, outputs]``."""

    def __init__(self, table: Tensor, hidden: int, layers: int, dense: int, outputs: int) -> None:
        super().__init__()
        self.words = WordVectors(table)
        self.lstm = nn.LSTM(table.shape[1], hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, dense)
        self.head = nn.Linear(dense, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.words(x).to(self.head.weight.dtype))
        output: Tensor = self.head(self.dense(states[:, -1]))
        return output
