"""The worker side of the `processes` engine: makes plans and runs pieces, with one JSON message per line.

    {"plan": id, "encoded": ..., "file": f}             ->  {"plan": id, "fingerprint": ...}
    {"piece": id, "plan": id, "tasks": ..., "file": f}  ->  {"finished": id, "results": ..., "file": f}
    {"forget": id}                                      ->  nothing

After a failure, a reply has its id and "error", a traceback. Arrays are in files that both sides map into memory (see
`shared_memory`); a message only names the file. The worker ends with its standard input, so it never outlives the
process that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from ...core.algorithm import NamedTensors
from ...core.messages import Task
from ...parties import Population
from ...rounds.party_side import TaskResult, perform_tasks
from ...rounds.plan import Plan, make_population
from ...serialization.references import decode
from ...serialization.wire import TensorPool, from_fields, to_fields
from ...storage.mapped_tensors import map_tensors
from .shared_memory import SharedTensorFile

RESULT_FILES = 3
"""Files that a worker writes results to in turn: one that is being read, and one for each of its two pieces."""

WORKER_ENV = "DESCANT_WORKER"
"""The environment variable that is set in a worker."""


def plan_fingerprint(plan: Plan) -> str:
    """Return a digest of what two processes must share: the model's shapes and constants, and the parties' data.

    Of the data it has names, sizes and the beginning of the first and last party's.
    """
    parts = (plan.net.layout.digest, plan.net.constants_digest, sorted(plan.population.samples.items()))
    hasher = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    for name in (plan.population.names[0], plan.population.names[-1]):  # enough to detect data drawn without a seed
        for data in plan.population[name].data[:2]:
            hasher.update(data[:1000].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def read_population(plan_json: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Population:
    """Return the parties of an encoded plan."""
    return make_population(decode(plan_json["data"], arrays))


def read_plan(plan_json: Mapping[str, Any], arrays: Mapping[str, Tensor], population: Population) -> Plan:
    """Return an encoded plan with these parties."""
    settings = {name: decode(part, arrays) for name, part in plan_json.items() if name != "data"}
    return Plan.create(data=population, **settings)


def read_tasks(
    message: Mapping[str, Any], arrays: Mapping[str, Tensor], remote_states: Iterable[NamedTensors] = ()
) -> tuple[list[Task], list[NamedTensors]]:
    """Return the tasks of a message and their party states; None in it means the next remote state."""
    tasks = [from_fields(fields, arrays, Task) for fields in message["tasks"]]
    remote = iter(remote_states)
    state_keys = message["party_states"]
    return tasks, [next(remote) if keys is None else {name: arrays[keys[name]] for name in keys} for keys in state_keys]


def write_task_results(results: Sequence[TaskResult]) -> tuple[list[dict[str, Any]], TensorPool]:
    """Return results as JSON values, and the pool of their arrays."""
    pool = TensorPool()
    return [
        {"reply": to_fields(reply, pool), "party_state": None if party_state is None else pool.add(party_state)}
        for reply, party_state in results
    ], pool


class EngineWorker:
    """The plans of a worker by id, and the parties that several plans may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: dict[int, Plan] = {}
        self._result_count = 0
        self._buffers: dict[str, SharedTensorFile] = {}
        self._population: tuple[str, Population] | None = None  # made last; the plans of a comparison share it

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a message; an exception becomes an error in it."""
        if "forget" in message:
            self.plans.pop(message["forget"], None)
            self._buffers = {file: buffer for file, buffer in self._buffers.items() if buffer.file.exists()}
            return {}
        is_plan = "encoded" in message
        try:
            return self._make_plan(message) if is_plan else self._run_tasks(message)
        except Exception:
            subject = {"plan": message["plan"]} if is_plan else {"finished": message["piece"]}
            return {**subject, "error": traceback.format_exc()}

    def _make_plan(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = map_tensors(Path(message["file"])) if message["file"] else {}
        encoded = message["encoded"]
        data_key = json.dumps(encoded["data"])
        if self._population is None or self._population[0] != data_key or arrays:  # arrays are not in the key
            self._population = (data_key, read_population(encoded, arrays))
        plan = self.plans[message["plan"]] = read_plan(encoded, arrays, self._population[1])
        return {"plan": message["plan"], "fingerprint": plan_fingerprint(plan)}

    def _run_tasks(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = self._buffer(message["file"]).read()
        results, pool = write_task_results(perform_tasks(self.plans[message["plan"]], *read_tasks(message, arrays)))
        self._result_count += 1
        file = str(self.folder / f"results-{os.getpid()}-{self._result_count % RESULT_FILES}")
        self._buffer(file).write(pool.arrays)
        return {"finished": message["piece"], "results": results, "file": file}

    def _buffer(self, file: str) -> SharedTensorFile:
        return self._buffers.setdefault(file, SharedTensorFile(Path(file)))


def serve_requests(folder: Path, requests: TextIO, replies: TextIO) -> None:
    """Handle messages until the input ends."""
    worker = EngineWorker(folder)
    for line in requests:
        reply = worker.handle(json.loads(line))
        if reply:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    shutil.rmtree(folder, ignore_errors=True)  # the process that started this one may have been killed


def main() -> None:
    """Run a worker process."""
    settings = json.loads(sys.argv[1])
    os.environ[WORKER_ENV] = "1"
    sys.path[:] = settings["path"]
    torch.set_num_threads(settings["threads"])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output printed by user code must not mix with the replies
    serve_requests(Path(settings["folder"]), sys.stdin, replies)
