"""Checkpoints: a folder of JSON and safetensors, written atomically, and read without executing anything."""

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
from ..core.formats import RUN_FORMAT, earlier_format_error
from ..core.interfaces import Store
from ..core.settings import to_json_values
from ..errors import StateError
from ..parties.fingerprints import data_fingerprints, tensor_fingerprint
from ..serialization.wire import unshare_storage
from ..storage import PartyStore, atomic, check_replaceable, write_errors
from ..storage.compressed_list import CompressedList, manifest_chunks
from ..storage.event_log import replace_non_finite
from ..storage.mapped_tensors import map_tensors
from .plan import Plan
from .state import NEVER_SEEN, LocalScores, State, pad_for_parties
from .validation import Rejection

_FILES = (
    "state.json",
    "state-*.json",
    "global_model-*.safetensors",
    "server_state-*.safetensors",
    "personal-*.safetensors",
    "party_state-*.safetensors",
)
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
_MAX_FILE_BYTES = 2**28  # bytes a file
_WRITE_BYTES = 2**16  # bytes of a manifest that are written at once
_SEPARATOR = "\x1f"  # between a party's name and a tensor's
_PROXY_DIGEST_KEY = f"proxy{_SEPARATOR}digest"  # sealing draws fresh keys: two equal runs differ here


def make_history(entries: Iterable[dict[str, Any]] = ()) -> CompressedList[dict[str, Any]]:
    """Return a history with one record a round."""
    return CompressedList(entries, dict, dict)


def make_rejections(entries: Iterable[Rejection] = ()) -> CompressedList[Rejection]:
    """Return a list of rejections."""
    return CompressedList(entries, asdict, _rejection_from_dict)


def _rejection_from_dict(entry: dict[str, Any]) -> Rejection:
    return Rejection(**entry)


def run_digest(state: State, party_states: Store) -> str:
    """Return a digest of the global model, the server state, and every party's model and state."""
    sha = hashlib.sha256()
    _hash_tensor(sha, "global_model", state.global_model)
    for name, tensor in sorted(_flatten_server_state(state).items()):
        if name != _PROXY_DIGEST_KEY:
            _hash_tensor(sha, name, tensor)
    for label, store in (("personal", state.personal_models), ("party_state", party_states)):
        _hash_store(sha, label, store)
    return sha.hexdigest()


def digest_of_models(state: State) -> str:
    """Return a digest of the models alone, for commands to print: party states stay on the silos' machines."""
    sha = hashlib.sha256()
    _hash_tensor(sha, "global_model", state.global_model)
    _hash_store(sha, "personal", state.personal_models)
    return sha.hexdigest()


def _hash_store(sha: Any, label: str, store: Store) -> None:
    for party in store.names():
        for name, tensor in sorted(store.get(party).items()):
            _hash_tensor(sha, f"{label}{_SEPARATOR}{party}{_SEPARATOR}{name}", tensor)


def _hash_tensor(sha: Any, name: str, tensor: Tensor) -> None:
    sha.update(name.encode())
    sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():  # torch cannot view an empty one as bytes
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _flatten_server_state(state: State) -> dict[str, Tensor]:
    """Return the server state in one mapping."""
    return {
        f"{part}{_SEPARATOR}{name}": tensor
        for part, memory in state.server_state.items()
        for name, tensor in memory.items()
    }


def save(
    folder: Path,
    plan: Plan,
    state: State,
    party_states: Store,
    history: CompressedList[dict[str, Any]],
    rejections: CompressedList[Rejection],
) -> Path:
    """Write the current state: new files beside the old ones, then one atomic rename of the manifest.

    After a kill or a power cut the folder holds the old run or the new one, complete, and the new one once this
    returns; the next save removes files that are left over.
    """
    manifest = {
        **_identity(plan),
        "round": state.round,
        "execution_mode": state.execution_mode,
        "feedback": replace_non_finite(state.feedback),
    }
    manifest |= {
        "local_scores": {
            name: [found.round, repr(found.before), repr(found.after)] for name, found in state.local_scores.items()
        },
        "history": history,
        "rejections": rejections,
    }
    manifest |= {"descant": __version__, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    check_replaceable(folder, _FILES, in_place=True)
    target = folder.resolve()
    save_id = secrets.token_hex(4)
    written_files: list[str] = []
    is_complete = False
    with write_errors(folder):
        atomic.make_folder(target)
        try:
            for label, tensors in _tensor_files(state, party_states):
                written_files.append(f"{label}-{save_id}-{len(written_files):04d}.safetensors")
                atomic.write_with(target / written_files[-1], partial(save_file, tensors))
            manifest |= {"files": written_files, "digest": run_digest(state, party_states)}
            text = _join_chunks(manifest_chunks({**manifest, "seal": _manifest_digest(manifest)}))
            atomic.replace(target / "state.json", text, f"state-{save_id}.json")
            is_complete = True
        finally:
            _remove_unlisted(target, written_files if is_complete else _files_in_manifest(target))
    history.compress()
    rejections.compress()
    return folder


def _tensor_files(state: State, party_states: Store) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "global_model", unshare_storage({"global_model": state.global_model, "initial": state.initial_model})
    yield "server_state", unshare_storage(_flatten_server_state(state))
    for label, store in (("personal", state.personal_models), ("party_state", party_states)):
        for part in _split_into_files(store):
            yield label, part


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return a digest of the manifest, which itself contains the digest of the tensors."""
    sha = hashlib.sha256()
    for piece in manifest_chunks(manifest, sort_keys=True):
        sha.update(piece)
    return sha.hexdigest()


def _join_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces of bytes to larger ones."""
    chunk = b""
    for piece in pieces:
        chunk += piece
        if len(chunk) >= _WRITE_BYTES:
            yield chunk
            chunk = b""
    yield chunk


def _files_in_manifest(folder: Path) -> list[str]:
    """Return the files named by the manifest of a folder, if there is one."""
    file = folder / "state.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["files"]) if file.exists() else []


def _remove_unlisted(folder: Path, listed: Iterable[str]) -> None:
    """Remove files that the manifest does not name: of an older save, or of one that failed."""
    listed_files = {"state.json", *listed}
    for entry in (entry for pattern in _FILES for entry in folder.glob(pattern)):
        if entry.name not in listed_files:
            atomic.remove(entry)


def load(
    folder: Path, plan: Plan, party_states: Store
) -> tuple[State, CompressedList[dict[str, Any]], CompressedList[Rejection]]:
    """Return the state, history and rejections of a saved run; after all checks, fill the store of party states.

    The run may be older than some of the parties.
    """
    try:
        manifest = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if manifest.get("version", RUN_FORMAT) in range(RUN_FORMAT):
            raise earlier_format_error(folder)
        _check_identity(
            folder, manifest, _identity(replace(plan, population=plan.population.at_round(manifest["round"])))
        )
        manifest_digest = manifest.pop("seal")
        state, loaded_party_states = _read_tensors(folder, plan, manifest)
        if (
            manifest_digest != _manifest_digest(manifest)
            or run_digest(state, loaded_party_states) != manifest["digest"]
        ):
            raise StateError(f"{folder} is damaged: it does not have the digest that was saved with it.")
        state = pad_for_parties(state, len(plan.population))
        history = make_history(
            _pad_history_entry(_restore_nan(entry), len(plan.population)) for entry in manifest["history"]
        )
        rejections = make_rejections(Rejection(**entry) for entry in manifest["rejections"])
    except _UNREADABLE as error:
        raise StateError(f"{folder} does not hold a run that can be continued: {error}") from error
    party_states.clear()
    for party in loaded_party_states.names():
        party_states.stage(party, loaded_party_states.get(party))
        party_states.commit(state.round, [party])
    party_states.commit(state.round, ())
    return state, history, rejections


def _read_tensors(folder: Path, plan: Plan, manifest: Mapping[str, Any]) -> tuple[State, PartyStore]:
    """Read every file of the manifest and check it against the model."""
    stores = {"personal": PartyStore(plan.memory_budget), "party_state": PartyStore(plan.memory_budget)}
    server_state: dict[str, dict[str, Tensor]] = {}
    models: dict[str, Tensor] = {}
    for name in manifest["files"]:
        label = name.split("-")[0]
        for key, tensor in map_tensors(folder / Path(name).name).items():
            if label == "global_model":
                models[key] = tensor
            elif label == "server_state":
                part, inner = key.split(_SEPARATOR, 1)
                server_state.setdefault(part, {})[inner] = tensor
            else:
                party, inner = key.rsplit(_SEPARATOR, 1)
                stores[label].stage(party, {**stores[label].get(party), inner: tensor})
                stores[label].commit(manifest["round"], [party])
    for store in stores.values():
        store.commit(manifest["round"], ())
    rows = [
        models["global_model"],
        models["initial"],
        *(stores["personal"].get(party)["model"] for party in stores["personal"].names()),
    ]
    width = plan.net.layout.width
    dtype = plan.net.layout.dtype
    if any(row.shape != (width,) or row.dtype != dtype or not torch.isfinite(row).all() for row in rows):
        raise StateError(f"{folder} is damaged: its models are not rows of {width} finite {dtype} numbers.")
    initial = (
        plan.net.initial_row if torch.equal(models["initial"], plan.net.initial_row) else models["initial"]
    )  # not kept twice
    numbers = (manifest["round"], models["global_model"], initial, manifest["execution_mode"])
    local_scores = {
        name: LocalScores(at, float(a), float(b)) for name, (at, a, b) in manifest.get("local_scores", {}).items()
    }
    return State(*numbers, stores["personal"], server_state, _restore_nan(manifest["feedback"]), local_scores), stores[
        "party_state"
    ]


def _identity(plan: Plan) -> dict[str, Any]:
    """Return what must be equal to resume a run exactly, the fingerprints of the parties' data included."""
    sample_counts = json.dumps(plan.population.samples).encode()
    validation = plan.population.validation
    return {
        "version": RUN_FORMAT,
        "seed": plan.seed,
        "layout": plan.net.layout.digest,
        "constants": plan.net.constants_digest,
        "algorithm": to_json_values(plan.algorithm),
        "solver": to_json_values(plan.solver),
        "loss": to_json_values(plan.loss),
        "metric": plan.metric.name,
        "parties": hashlib.sha256(sample_counts).hexdigest()[:16],
        "data": data_fingerprints(plan.population),
        "validation": None if validation is None else tensor_fingerprint(*validation),
        "vault": None if plan.vault is None or plan.algorithm.coreset_proxy is None else plan.vault.identity,
    }


def _check_identity(folder: Path, saved: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> None:
    for key, value in expected.items():
        other = saved.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
            _check_identity(folder, other, value, prefix=f"{prefix}{key}.")
        elif json.loads(json.dumps(value)) != other:
            raise StateError(
                f"{folder} was saved by another federation: {prefix}{key} {other!r:.80}, here {value!r:.80}."
            )


def _restore_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace None by nan: JSON has no nan."""
    return {key: math.nan if value is None else value for key, value in numbers.items()}


def _pad_history_entry(entry: dict[str, Any], count: int) -> dict[str, Any]:
    """Extend a round's record to parties that joined later."""
    if "presence" in entry:
        entry["presence"] = entry["presence"].ljust(count, NEVER_SEEN)
    if "global_model_scores" in entry:
        entry["global_model_scores"] = [
            *entry["global_model_scores"],
            *[math.nan] * (count - len(entry["global_model_scores"])),
        ]
    return entry


def _split_into_files(store: Store) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for party in store.names():
        for name, tensor in store.get(party).items():
            part[f"{party}{_SEPARATOR}{name}"] = tensor
            size += tensor.numel() * tensor.element_size()
        if size > _MAX_FILE_BYTES:
            yield unshare_storage(part)  # logs of several parties may share one array
            part = {}
            size = 0
    if part:
        yield unshare_storage(part)
