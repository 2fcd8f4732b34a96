"""The other side of the `processes` engine: a process that makes plans and answers pieces, one message a line.

    {"plan": id, "spelled": ..., "file": f}             ->  {"plan": id, "mark": ...}, or {"plan": id, "why": traceback}
    {"piece": id, "plan": id, "tasks": ..., "file": f}  ->  {"answered": id, "answers": ..., "file": f}, or {..., "why"}
    {"forget": id}                                      ->  nothing

Arrays lie in files that both sides map into memory (see `shelf`); a message only says where. It ends when its standard
input does, so that it never outlives the process that started it.
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

ANSWER_FILES = 3
"""Files that a worker answers in by turns: the one that is being read, and those of the two pieces that it may have."""

WORKER_ENV = "DESCANT_WORKER"
"""Set in the environment of a worker."""


def plan_fingerprint(plan: Plan) -> str:
    """What two processes must agree on before they share work: the model's shapes and constants, names and sizes."""
    parts = (plan.net.layout.digest, plan.net.constants_digest, sorted(plan.population.samples.items()))
    hasher = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    for name in (
        plan.population.names[0],
        plan.population.names[-1],
    ):  # enough to find out what is drawn anew every time
        for data in plan.population[name].data[:2]:
            hasher.update(data[:1000].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def read_population(plan_json: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Population:
    """The parties of a plan that was spelled out."""
    return make_population(decode(plan_json["data"], arrays))


def read_plan(plan_json: Mapping[str, Any], arrays: Mapping[str, Tensor], population: Population) -> Plan:
    """The plan that was spelled out, of these parties."""
    settings = {name: decode(part, arrays) for name, part in plan_json.items() if name != "data"}
    return Plan.create(data=population, **settings)


def read_tasks(
    message: Mapping[str, Any], arrays: Mapping[str, Tensor], remote_states: Iterable[NamedTensors] = ()
) -> tuple[list[Task], list[NamedTensors]]:
    """The tasks of a message and what their parties remember; what is None in it comes from afar."""
    tasks = [from_fields(fields, arrays, Task) for fields in message["tasks"]]
    remote = iter(remote_states)
    state_keys = message["party_states"]
    return tasks, [next(remote) if keys is None else {name: arrays[keys[name]] for name in keys} for keys in state_keys]


def write_task_results(results: Sequence[TaskResult]) -> tuple[list[dict[str, Any]], TensorPool]:
    """Answers as JSON values, and the arrays that they speak of."""
    tensor_pool = TensorPool()
    return [
        {"report": to_fields(report, tensor_pool), "party_state": None if memory is None else tensor_pool.add(memory)}
        for report, memory in results
    ], tensor_pool


class EngineWorker:
    """Plans by number, and the parties that several of them may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: dict[int, Plan] = {}
        self._answer_count = 0
        self._buffers: dict[str, SharedTensorFile] = {}
        self._population: tuple[str, Population] | None = None  # the data made last: plans that are compared share it

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """What comes of one message."""
        if "forget" in message:
            self.plans.pop(message["forget"], None)
            self._buffers = {file: shelf for file, shelf in self._buffers.items() if shelf.file.exists()}
            return {}
        number = {"plan": message["plan"]} if "spelled" in message else {"answered": message["piece"]}
        try:
            return self._make_plan(message) if "spelled" in message else self._run_tasks(message)
        except Exception:
            return {**number, "why": traceback.format_exc()}

    def _make_plan(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = map_tensors(Path(message["file"])) if message["file"] else {}
        data_key = json.dumps(message["spelled"]["data"])
        if self._population is None or self._population[0] != data_key or arrays:  # arrays are not in the key
            self._population = (data_key, read_population(message["spelled"], arrays))
        plan = self.plans[message["plan"]] = read_plan(message["spelled"], arrays, self._population[1])
        return {"plan": message["plan"], "mark": plan_fingerprint(plan)}

    def _run_tasks(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = self._buffer(message["file"]).read()
        answers, crate = write_task_results(perform_tasks(self.plans[message["plan"]], *read_tasks(message, arrays)))
        self._answer_count += 1
        file = str(self.folder / f"answer-{os.getpid()}-{self._answer_count % ANSWER_FILES}")
        self._buffer(file).write(crate.arrays)
        return {"answered": message["piece"], "answers": answers, "file": file}

    def _buffer(self, file: str) -> SharedTensorFile:
        return self._buffers.setdefault(file, SharedTensorFile(Path(file)))


def serve_requests(folder: Path, requests: TextIO, replies: TextIO) -> None:
    """Answer messages until there are no more."""
    worker = EngineWorker(folder)
    for line in requests:
        answer = worker.handle(json.loads(line))
        if answer:
            replies.write(json.dumps(answer) + "\n")
            replies.flush()
    shutil.rmtree(folder, ignore_errors=True)  # whoever started it has died, and cannot do so itself


def main() -> None:
    """The whole life of a worker process."""
    settings = json.loads(sys.argv[1])
    os.environ[WORKER_ENV] = "1"
    sys.path[:] = settings["path"]
    torch.set_num_threads(settings["threads"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's own code prints must not come between the answers
    serve_requests(Path(settings["folder"]), sys.stdin, answers)
