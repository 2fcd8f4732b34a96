"""A run as a folder: JSON and safetensors, written whole or not at all, and read without executing anything."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import __version__
from .core import Store
from .errors import StateError
from .gate import Refusal
from .piece import Plan
from .run import State
from .settings import describe
from .store import PartyStore, replacing

_VERSION = 1
_FILES = ("state.json", "center.safetensors", "server.safetensors", "own-*.safetensors", "memory-*.safetensors")
_PART = 2**28  # bytes a file
_SEPARATOR = "\x1f"  # between a party's name and a tensor's


def digest(state: State, memory: Store) -> str:
    """A digest of the centre, of what the server remembers, and of every party's model and memory, by tensor."""
    sha = hashlib.sha256()
    _feed(sha, "center", state.center)
    for name, tensor in sorted(_server(state).items()):
        _feed(sha, name, tensor)
    for label, store in (("own", state.own), ("memory", memory)):
        for party in store.names():
            for name, tensor in sorted(store.get(party).items()):
                _feed(sha, f"{label}{_SEPARATOR}{party}{_SEPARATOR}{name}", tensor)
    return sha.hexdigest()


def _feed(sha: Any, name: str, tensor: Tensor) -> None:
    sha.update(name.encode())
    sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _server(state: State) -> dict[str, Tensor]:
    """What the server's answers remember, in one mapping."""
    return {
        f"{answer}{_SEPARATOR}{name}": tensor
        for answer, memory in state.memories.items()
        for name, tensor in memory.items()
    }


def save(
    folder: Path,
    plan: Plan,
    state: State,
    memory: Store,
    history: Sequence[Mapping[str, Any]],
    refusals: Sequence[Refusal],
) -> Path:
    """Write the run as it stands, whole or not at all: a save that is killed leaves the old one as it was."""
    manifest = {**_identity(plan), "round": state.round, "way": state.way, "feedback": _finite(state.feedback)}
    manifest |= {
        "history": [_finite(entry) for entry in history],
        "refusals": [asdict(refusal) for refusal in refusals],
    }
    manifest |= {"descant": __version__, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    with replacing(folder, _FILES) as new:
        models = {"center": state.center.clone(), "initial": state.initial.clone()}  # safetensors wants them apart
        save_file(models, new / "center.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in _server(state).items()}, new / "server.safetensors")
        for label, store in (("own", state.own), ("memory", memory)):
            for number, part in enumerate(_parts(store)):
                save_file(part, new / f"{label}-{number:04d}.safetensors")
        manifest["digest"] = digest(state, memory)
        (new / "state.json").write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
    return folder


def load(folder: Path, plan: Plan, memory: Store) -> tuple[State, list[dict[str, Any]], list[Refusal]]:
    """The state, the history and the refusals of a saved run; the memories go into the store."""
    try:
        manifest = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "center.safetensors")
        server = load_file(folder / "server.safetensors")
        _check_identity(folder, manifest, _identity(plan))
        index = manifest["round"]
        own, remembered = _read(folder, "own", index), _read(folder, "memory", index)
        memories: dict[str, dict[str, Tensor]] = {}
        for key, tensor in server.items():
            answer, name = key.split(_SEPARATOR, 1)
            memories.setdefault(answer, {})[name] = tensor
        models = (tensors["center"], tensors["initial"])
        state = State(index, *models, manifest["way"], own, memories, manifest["feedback"])
        if digest(state, remembered) != manifest["digest"]:
            raise StateError(f"{folder} is damaged: its tensors do not have the digest that was saved with them.")
        refusals = [Refusal(**entry) for entry in manifest["refusals"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise StateError(f"{folder} does not hold a run that can be continued: {error}") from error
    memory.clear()
    for party in remembered.names():
        memory.stage(party, remembered.get(party))
    memory.commit(index, remembered.names())
    return state, manifest["history"], refusals


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be equal for a run to go on as if it had never stopped; the parties' data is taken on trust."""
    people = json.dumps(plan.people.samples).encode()
    return {
        "version": _VERSION,
        "seed": plan.seed,
        "layout": plan.net.layout.digest,
        "algorithm": describe(plan.algorithm),
        "solver": describe(plan.solver),
        "loss": describe(plan.loss),
        "parties": hashlib.sha256(people).hexdigest()[:16],
    }


def _check_identity(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], within: str = "") -> None:
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
            _check_identity(folder, other, value, f"{within}{key}.")
        elif json.loads(json.dumps(value)) != other:
            raise StateError(
                f"{folder} was saved by another federation: {within}{key} {other!r:.80}, here {value!r:.80}."
            )


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no nan and no infinity."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in numbers.items()}


def _parts(store: Store) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for party in store.names():
        for name, tensor in store.get(party).items():
            part[f"{party}{_SEPARATOR}{name}"] = tensor.contiguous()
            size += tensor.numel() * tensor.element_size()
        if size > _PART:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _read(folder: Path, label: str, index: int) -> PartyStore:
    store = PartyStore()
    for file in sorted(folder.glob(f"{label}-*.safetensors")):
        try:
            tensors: Mapping[str, Tensor] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise StateError(f"{file} is damaged: {error}") from error
        parties: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            party, name = key.rsplit(_SEPARATOR, 1)
            parties.setdefault(party, {})[name] = tensor
        for party, kept in parties.items():
            store.stage(party, kept)
        store.commit(index, parties)
    store.commit(index, ())
    return store
