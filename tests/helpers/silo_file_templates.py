"""Silo files and training settings shared by the deployment tests over every transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from descant.deployment.silo import SiloFile
from descant.parties import Population, from_arrays
from descant.rl.agent_parties import DatalessSource

ROWS_SILO_FILE = """
from toy_problems import classification_parties, network

def model():
    return network()

def data():
    party = classification_parties(5)[{name!r}]
    return party.x, party.y, party.x[:3], party.y[:3]
"""
AGENT_SILO_FILE = """
from toy_problems import policy_network as model, cartpole_agents

def data():
    return cartpole_agents().subset([{name!r}])
"""
DESK_SILO_FILE = """
from toy_problems import trading_network as model, generated_desks

def data():
    return generated_desks().subset([{name!r}])
"""
ADAM_TRAINING = """
lr = 0.05
epochs = 1
batch = 4
optimizer = "Adam"
"""
MODEL_AND_METHOD_TABLES = f"""
[model]
net = "toy_problems:network"
[training]{ADAM_TRAINING}[method]
algorithm = "{{method}}"
"""
LEAKING_SILO_FILE = ROWS_SILO_FILE.replace("return party.x", "return rows(party.x)")
LEAKING_SILO_FILE += """
import pathlib, torch

def rows(x):
    return torch.full(x.shape, 7777.125) + torch.arange(x.numel()).view(x.shape) / 8

def loss(output, target):
    if (mark := pathlib.Path(__file__ + ".mark")).exists():
        mark.unlink()
        raise ValueError(f"a row: {{float(rows(torch.zeros(1, 6))[0, 5])}} of account 4711-0815")
    return torch.nn.functional.cross_entropy(output, target)
"""


def simulated_population(files: Sequence[SiloFile]) -> Population:
    """Return the parties of some silo files as a simulated population."""
    parties = [file.party_data for file in files]
    if files[0].has_rows:
        return from_arrays({party.name: party.data for party in parties})
    return Population([DatalessSource(party) for party in parties])  # type: ignore[misc]


def canary_bytes() -> Iterator[bytes]:
    """Yield the rows of the leaking silo in every form in which they could be written, and the text of its error.

    Each value spans at least eight bytes: four bytes occur in a ciphertext by chance.
    """
    for value in (7777.125 + k / 8 for k in range(54)):
        yield torch.tensor([value, value + 1 / 8]).numpy().tobytes()
        yield torch.tensor(value, dtype=torch.float64).numpy().tobytes()
        yield repr(value).encode()
    yield b"4711-0815"
