"""A run as a folder: JSON and safetensors, written whole or not at all, and read without executing anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import __version__
from .core import Store
from .errors import StateError
from .piece import Plan
from .run import State
from .settings import describe
from .store import PartyStore, replacing

_VERSION = 1
_FILES = ("state.json", "center.safetensors", "own-*.safetensors", "memory-*.safetensors")
_PART = 2**28  # bytes a file
_SEPARATOR = "\x1f"  # between a party's name and a tensor's


def digest(state: State, memory: Store) -> str:
    """A digest of the centre and of every party's model and memory, tensor by tensor."""
    sha = hashlib.sha256()
    _feed(sha, "center", state.center)
    for label, store in (("own", state.own), ("memory", memory)):
        for party in store.names():
            for name, tensor in sorted(store.get(party).items()):
                _feed(sha, f"{label}{_SEPARATOR}{party}{_SEPARATOR}{name}", tensor)
    return sha.hexdigest()


def _feed(sha: Any, name: str, tensor: Tensor) -> None:
    sha.update(name.encode())
    sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def save(folder: Path, plan: Plan, state: State, memory: Store, history: list[dict[str, Any]]) -> Path:
    """Write the run as it stands, whole or not at all: a save that is killed leaves the old one as it was."""
    manifest = {**_identity(plan), "round": state.round, "way": state.way, "history": history}
    manifest |= {"descant": __version__, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    with replacing(folder, _FILES) as new:
        models = {"center": state.center.clone(), "initial": state.initial.clone()}  # safetensors wants them apart
        save_file(models, new / "center.safetensors")
        for label, store in (("own", state.own), ("memory", memory)):
            for number, part in enumerate(_parts(store)):
                save_file(part, new / f"{label}-{number:04d}.safetensors")
        (new / "state.json").write_text(json.dumps({**manifest, "digest": digest(state, memory)}, indent=1))
    return folder


def load(folder: Path, plan: Plan, memory: Store) -> tuple[State, list[dict[str, Any]]]:
    """The state and the history of a saved run; the memories go into the store."""
    try:
        manifest = json.loads((folder / "state.json").read_text())
        tensors = load_file(folder / "center.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise StateError(f"{folder} does not hold a run that can be continued: {error}") from error
    for key, ours in _identity(plan).items():
        if manifest.get(key) != ours:
            found = manifest.get(key)
            raise StateError(f"{folder} was saved by another federation: {key} {found!r}, here {ours!r}.")
    own, remembered = _read(folder, "own"), _read(folder, "memory")
    state = State(manifest["round"], tensors["center"], tensors["initial"], manifest["way"], own)
    if digest(state, remembered) != manifest["digest"]:
        raise StateError(f"{folder} is damaged: its tensors do not have the digest that was saved with them.")
    memory.clear()
    for party in remembered.names():
        memory.stage(party, remembered.get(party))
        memory.commit()
    return state, manifest["history"]


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be equal for a run to go on as if it had never stopped."""
    return {
        "version": _VERSION,
        "seed": plan.seed,
        "layout": plan.net.layout.digest,
        "algorithm": describe(plan.algorithm),
        "solver": describe(plan.solver),
        "parties": len(plan.people),
    }


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


def _read(folder: Path, label: str) -> PartyStore:
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
        store.commit()
    return store
