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

from ...core.algorithm import Memory
from ...core.messages import Task
from ...parties import People
from ...rounds.party_side import Answer, work
from ...rounds.plan import Plan, parties_of
from ...serialization.references import read
from ...serialization.wire import Crate, parcel_of, sheet
from ...storage.mapped_tensors import tensors_in
from .shared_memory import Shelf

SLOTS = 3
"""Files that a worker answers in by turns: the one that is being read, and those of the two pieces that it may have."""

INSIDE = "DESCANT_WORKER"
"""Set in the environment of a worker."""


def mark_of(plan: Plan) -> str:
    """What two processes must agree on before they share work: the model's shapes and constants, names and sizes."""
    parts = (plan.net.layout.digest, plan.net.constants, sorted(plan.people.samples.items()))
    mark = hashlib.blake2b(repr(parts).encode(), digest_size=8)
    for name in (plan.people.names[0], plan.people.names[-1]):  # enough to find out what is drawn anew every time
        for data in plan.people[name].data[:2]:
            mark.update(data[:1000].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return mark.hexdigest()


def people_of(spelled: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> People:
    """The parties of a plan that was spelled out."""
    return parties_of(read(spelled["data"], arrays))


def made(spelled: Mapping[str, Any], arrays: Mapping[str, Tensor], people: People) -> Plan:
    """The plan that was spelled out, of these parties."""
    settings = {name: read(part, arrays) for name, part in spelled.items() if name != "data"}
    return Plan.made(data=people, **settings)


def asked(
    message: Mapping[str, Any], arrays: Mapping[str, Tensor], far: Iterable[Memory] = ()
) -> tuple[list[Task], list[Memory]]:
    """The tasks of a message and what their parties remember; what is None in it comes from afar."""
    tasks, brought = [parcel_of(fields, arrays, Task) for fields in message["tasks"]], iter(far)
    spelled = message["memories"]
    return tasks, [next(brought) if keys is None else {name: arrays[keys[name]] for name in keys} for keys in spelled]


def told(answers: Sequence[Answer]) -> tuple[list[dict[str, Any]], Crate]:
    """Answers as JSON values, and the arrays that they speak of."""
    crate = Crate()
    return [
        {"report": sheet(report, crate), "memory": None if memory is None else crate.put(memory)}
        for report, memory in answers
    ], crate


class Worker:
    """Plans by number, and the parties that several of them may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: dict[int, Plan] = {}
        self._answered = 0
        self._shelves: dict[str, Shelf] = {}
        self._people: tuple[str, People] | None = None  # the data made last: plans that are compared share it

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What comes of one message."""
        if "forget" in message:
            self.plans.pop(message["forget"], None)
            self._shelves = {file: shelf for file, shelf in self._shelves.items() if shelf.file.exists()}
            return {}
        number = {"plan": message["plan"]} if "spelled" in message else {"answered": message["piece"]}
        try:
            return self._make(message) if "spelled" in message else self._work(message)
        except Exception:
            return {**number, "why": traceback.format_exc()}

    def _make(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = tensors_in(Path(message["file"])) if message["file"] else {}
        key = json.dumps(message["spelled"]["data"])
        if self._people is None or self._people[0] != key or arrays:  # arrays are not in the key
            self._people = (key, people_of(message["spelled"], arrays))
        plan = self.plans[message["plan"]] = made(message["spelled"], arrays, self._people[1])
        return {"plan": message["plan"], "mark": mark_of(plan)}

    def _work(self, message: dict[str, Any]) -> dict[str, Any]:
        arrays = self._shelf(message["file"]).read()
        answers, crate = told(work(self.plans[message["plan"]], *asked(message, arrays)))
        self._answered += 1
        place = str(self.folder / f"answer-{os.getpid()}-{self._answered % SLOTS}")
        self._shelf(place).write(crate.arrays)
        return {"answered": message["piece"], "answers": answers, "file": place}

    def _shelf(self, file: str) -> Shelf:
        return self._shelves.setdefault(file, Shelf(Path(file)))


def serve(folder: Path, asked: TextIO, answered: TextIO) -> None:
    """Answer messages until there are no more."""
    worker = Worker(folder)
    for line in asked:
        answer = worker.answer(json.loads(line))
        if answer:
            answered.write(json.dumps(answer) + "\n")
            answered.flush()
    shutil.rmtree(folder, ignore_errors=True)  # whoever started it has died, and cannot do so itself


def main() -> None:
    """The whole life of a worker process."""
    settings = json.loads(sys.argv[1])
    os.environ[INSIDE] = "1"
    sys.path[:] = settings["path"]
    torch.set_num_threads(settings["threads"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's own code prints must not come between the answers
    serve(Path(settings["folder"]), sys.stdin, answers)
