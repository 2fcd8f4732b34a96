"""A run as a folder: JSON and safetensors, written whole or not at all, and read without executing anything."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__
from ..core.interfaces import Store
from ..core.settings import describe
from ..errors import StateError
from ..parties.fingerprints import fingerprint, fingerprints
from ..serialization.wire import apart
from ..storage import PartyStore, atomic, check_replaceable, clear_errors
from ..storage.compressed_list import Kept, pieces
from ..storage.event_log import plain
from ..storage.mapped_tensors import tensors_in
from .plan import Plan
from .state import NEVER_SEEN, Judged, State, with_room
from .validation import Refusal

_VERSION = 2
_FILES = (
    "state.json",
    "state-*.json",
    "center-*.safetensors",
    "server-*.safetensors",
    "own-*.safetensors",
    "memory-*.safetensors",
)
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
_PART = 2**28  # bytes a file
_CHUNK = 2**16  # bytes of a manifest that are written at once
_SEPARATOR = "\x1f"  # between a party's name and a tensor's
_SEALED = f"stand_in{_SEPARATOR}digest"  # sealing draws keys that nobody knows: not alike in two runs that are alike


def history_of(entries: Iterable[dict[str, Any]] = ()) -> Kept[dict[str, Any]]:
    """What happened, a record a round."""
    return Kept(entries, dict, dict)


def refusals_of(entries: Iterable[Refusal] = ()) -> Kept[Refusal]:
    """What did not count."""
    return Kept(entries, asdict, _refusal)


def _refusal(entry: dict[str, Any]) -> Refusal:
    return Refusal(**entry)


def digest(state: State, memory: Store) -> str:
    """A digest of the centre, of what the server remembers, and of every party's model and memory, by tensor."""
    sha = hashlib.sha256()
    _feed(sha, "center", state.center)
    for name, tensor in sorted(_server(state).items()):
        if name != _SEALED:
            _feed(sha, name, tensor)
    for label, store in (("own", state.own), ("memory", memory)):
        _feed_all(sha, label, store)
    return sha.hexdigest()


def models_digest(state: State) -> str:
    """The same of the models alone, for commands to print: memories stay with parties on machines of their own."""
    sha = hashlib.sha256()
    _feed(sha, "center", state.center)
    _feed_all(sha, "own", state.own)
    return sha.hexdigest()


def _feed_all(sha: Any, label: str, store: Store) -> None:
    for party in store.names():
        for name, tensor in sorted(store.get(party).items()):
            _feed(sha, f"{label}{_SEPARATOR}{party}{_SEPARATOR}{name}", tensor)


def _feed(sha: Any, name: str, tensor: Tensor) -> None:
    sha.update(name.encode())
    sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():  # torch cannot view an empty one as bytes
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
    history: Kept[dict[str, Any]],
    refusals: Kept[Refusal],
) -> Path:
    """Write the run as it stands: new files beside the old ones, then one rename of the manifest makes them count.

    Killed at any moment, or at a power cut, the folder holds the old run or the new one, whole, and the new one once
    this returns; what is left over goes with the next save.
    """
    manifest = {**_identity(plan), "round": state.round, "way": state.way, "feedback": plain(state.feedback)}
    manifest |= {
        "judged": {name: [found.round, repr(found.before), repr(found.after)] for name, found in state.judged.items()},
        "history": history,
        "refusals": refusals,
    }
    manifest |= {"descant": __version__, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    check_replaceable(folder, _FILES, in_place=True)
    place, mark = folder.resolve(), secrets.token_hex(4)
    written: list[str] = []
    saved = False
    with clear_errors(folder):
        atomic.make(place)
        try:
            for label, tensors in _files(state, memory):
                written.append(f"{label}-{mark}-{len(written):04d}.safetensors")
                atomic.fill(place / written[-1], partial(save_file, tensors))
            manifest |= {"files": written, "digest": digest(state, memory)}
            text = _chunks(pieces({**manifest, "seal": _seal(manifest)}))
            atomic.replace(place / "state.json", text, f"state-{mark}.json")
            saved = True
        finally:
            _sweep(place, written if saved else _named(place))
    history.shrink()
    refusals.shrink()
    return folder


def _files(state: State, memory: Store) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "center", apart({"center": state.center, "initial": state.initial})
    yield "server", apart(_server(state))
    for label, store in (("own", state.own), ("memory", memory)):
        for part in _parts(store):
            yield label, part


def _seal(manifest: Mapping[str, Any]) -> str:
    """A digest of the manifest itself; the tensors have one in it."""
    sha = hashlib.sha256()
    for piece in pieces(manifest, ordered=True):
        sha.update(piece)
    return sha.hexdigest()


def _chunks(some: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, many at a time."""
    chunk = b""
    for piece in some:
        chunk += piece
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = b""
    yield chunk


def _named(place: Path) -> list[str]:
    """The files that the manifest of a folder names, if there is one."""
    file = place / "state.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["files"]) if file.exists() else []


def _sweep(place: Path, named: Iterable[str]) -> None:
    """Remove what the manifest does not name: files of an older save, or of one that failed."""
    kept = {"state.json", *named}
    for entry in (entry for pattern in _FILES for entry in place.glob(pattern)):
        if entry.name not in kept:
            atomic.remove(entry)


def load(folder: Path, plan: Plan, memory: Store) -> tuple[State, Kept[dict[str, Any]], Kept[Refusal]]:
    """The state, the history and the refusals of a saved run; the memories go into the store when all is checked.

    It may be of a time when some of the parties had not come yet.
    """
    try:
        manifest = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        _check_identity(folder, manifest, _identity(replace(plan, people=plan.people.at(manifest["round"]))))
        seal = manifest.pop("seal")
        state, remembered = _read(folder, plan, manifest)
        if seal != _seal(manifest) or digest(state, remembered) != manifest["digest"]:
            raise StateError(f"{folder} is damaged: it does not have the digest that was saved with it.")
        state = with_room(state, len(plan.people))
        history = history_of(_with_room(_with_nan(entry), len(plan.people)) for entry in manifest["history"])
        refusals = refusals_of(Refusal(**entry) for entry in manifest["refusals"])
    except _UNREADABLE as error:
        raise StateError(f"{folder} does not hold a run that can be continued: {error}") from error
    memory.clear()
    for party in remembered.names():
        memory.stage(party, remembered.get(party))
        memory.commit(state.round, [party])
    memory.commit(state.round, ())
    return state, history, refusals


def _read(folder: Path, plan: Plan, manifest: Mapping[str, Any]) -> tuple[State, PartyStore]:
    """Every file that the manifest names, checked against the model."""
    stores = {"own": PartyStore(plan.budget), "memory": PartyStore(plan.budget)}
    memories: dict[str, dict[str, Tensor]] = {}
    models: dict[str, Tensor] = {}
    for name in manifest["files"]:
        label = name.split("-")[0]
        for key, tensor in tensors_in(folder / Path(name).name).items():
            if label == "center":
                models[key] = tensor
            elif label == "server":
                answer, inner = key.split(_SEPARATOR, 1)
                memories.setdefault(answer, {})[inner] = tensor
            else:
                party, inner = key.rsplit(_SEPARATOR, 1)
                stores[label].stage(party, {**stores[label].get(party), inner: tensor})
                stores[label].commit(manifest["round"], [party])
    for store in stores.values():
        store.commit(manifest["round"], ())
    rows = [
        models["center"],
        models["initial"],
        *(stores["own"].get(party)["model"] for party in stores["own"].names()),
    ]
    width, dtype = plan.net.layout.width, plan.net.layout.dtype
    if any(row.shape != (width,) or row.dtype != dtype or not torch.isfinite(row).all() for row in rows):
        raise StateError(f"{folder} is damaged: its models are not rows of {width} finite {dtype} numbers.")
    initial = plan.net.first if torch.equal(models["initial"], plan.net.first) else models["initial"]  # not held twice
    numbers = (manifest["round"], models["center"], initial, manifest["way"])
    judged = {name: Judged(at, float(a), float(b)) for name, (at, a, b) in manifest.get("judged", {}).items()}
    return State(*numbers, stores["own"], memories, _with_nan(manifest["feedback"]), judged), stores["memory"]


def _identity(plan: Plan) -> dict[str, Any]:
    """What must be equal for a run to go on as if it had never stopped, the parties' data included."""
    people = json.dumps(plan.people.samples).encode()
    validation = plan.people.validation
    return {
        "version": _VERSION,
        "seed": plan.seed,
        "layout": plan.net.layout.digest,
        "constants": plan.net.constants,
        "algorithm": describe(plan.algorithm),
        "solver": describe(plan.solver),
        "loss": describe(plan.loss),
        "metric": plan.metric.name,
        "parties": hashlib.sha256(people).hexdigest()[:16],
        "data": fingerprints(plan.people),
        "validation": None if validation is None else fingerprint(*validation),
        "vault": None if plan.vault is None or plan.algorithm.stand_in is None else plan.vault.identity,
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


def _with_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What `plain` left out is nan again."""
    return {key: math.nan if value is None else value for key, value in numbers.items()}


def _with_room(entry: dict[str, Any], count: int) -> dict[str, Any]:
    """The record of a round, where it has something of each party, for those who have come since, too."""
    if "presence" in entry:
        entry["presence"] = entry["presence"].ljust(count, NEVER_SEEN)
    if "centers" in entry:
        entry["centers"] = [*entry["centers"], *[math.nan] * (count - len(entry["centers"]))]
    return entry


def _parts(store: Store) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for party in store.names():
        for name, tensor in store.get(party).items():
            part[f"{party}{_SEPARATOR}{name}"] = tensor
            size += tensor.numel() * tensor.element_size()
        if size > _PART:
            yield apart(part)  # logs of several parties may lie in one array
            part, size = {}, 0
    if part:
        yield apart(part)
