"""What a party keeps on its own disk from round to round, whatever is killed in between.

    folder/party.json               as what it was introduced: federation, recipe, model
    folder/secret                   what its keys are made of, where work is added up unseen
    folder/left.safetensors         which rows ever left, as coresets
    folder/kept.json                the round that counted last, the round that waits, the round answered last
    folder/memory-7.safetensors     what the party's solver and terms remember after round 7
    folder/answer-8                 the report of round 8, in case that it is asked for again

A round's memory waits until the server says that the report was accepted; then it counts, and what was before goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import StateError
from ..store import clear_errors, disk

_POINTER = "kept.json"
_LEFT = "left.safetensors"


@dataclass(frozen=True)
class Stand:
    """Which memories count."""

    counted: int = 0  # the last round whose report was accepted; 0: none yet
    waiting: int = 0  # the round whose fate is not known; 0: none
    asked: str = ""  # a digest of the task of that round
    answered: int = 0  # the last round in which it was answered at all; 0: none yet


class Keeping:
    """One party's folder. It is on the disk when a method returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with clear_errors(folder):
            disk.make(folder, 0o700)
        self.stand = self._read()

    def settle(self, accepted: int) -> bool:
        """The last round that counted, as the server says; False if its memory is not here.

        Then there is nothing to go on with, and the party begins anew.
        """
        if self.stand.waiting and self.stand.waiting == accepted:
            self._count(accepted)
        elif self.stand.waiting:
            self._count(self.stand.counted)
        if self.stand.counted != accepted:
            self._count(accepted)
            return False
        return not accepted or self._memory(accepted).exists()

    def memory(self, accepted: object = None) -> dict[str, Tensor]:
        """What counts; of the round that waits, if it is said to be accepted: nothing is settled by that."""
        waiting = self.stand.waiting and self.stand.waiting == accepted
        round = self.stand.waiting if waiting else self.stand.counted
        return self._load(self._memory(round)) if round else {}

    def left(self) -> Tensor | None:
        """The numbers of all rows that ever left the party, in rounds that did not count, too."""
        return self._load(self.folder / _LEFT).get("rows")

    def leave(self, rows: Tensor) -> None:
        """These rows are about to leave, with all that left before."""
        with clear_errors(self.folder):
            disk.replace(self.folder / _LEFT, save({"rows": rows.contiguous()}), f".{_LEFT}", disk.PRIVATE)

    def _load(self, file: Path) -> dict[str, Tensor]:
        if not file.exists():
            return {}
        try:
            return load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise StateError(f"{file} cannot be read: {error}. Restore it, or `descant silo forget`.") from error

    def answered(self, round: int, task: bytes) -> bytes | None:
        """The answer that was given to this very task, if it has one."""
        file = self.folder / f"answer-{round}"
        known = self.stand.waiting == round and self.stand.asked == _digest(task) and file.exists()
        return file.read_bytes() if known else None

    def wait(self, round: int, task: bytes, memory: Mapping[str, Tensor], answer: bytes) -> None:
        """What came of a task, until the server says whether it counts."""
        with clear_errors(self.folder):
            held = save({name: tensor.detach().clone().contiguous() for name, tensor in memory.items()})
            disk.write(self._memory(round), held, disk.PRIVATE)
            disk.write(self.folder / f"answer-{round}", answer, disk.PRIVATE)
        self._point(Stand(self.stand.counted, round, _digest(task), max(round, self.stand.answered)))

    def _memory(self, round: int) -> Path:
        return self.folder / f"memory-{round}.safetensors"

    def _read(self) -> Stand:
        file = self.folder / _POINTER
        try:
            return Stand(**json.loads(file.read_text())) if file.exists() else Stand()
        except (OSError, ValueError, TypeError) as error:
            raise StateError(
                f"{file} is not as Descant wrote it: {error}. Restore it, or remove the folder."
            ) from error

    def _count(self, round: int) -> None:
        """Nothing waits any more."""
        self._point(Stand(counted=round, answered=self.stand.answered))

    def _point(self, stand: Stand) -> None:
        """Another stand counts from now on; what it does not speak of goes."""
        with clear_errors(self.folder):
            text = json.dumps(asdict(stand)).encode()
            disk.replace(self.folder / _POINTER, text, f".{_POINTER}", disk.PRIVATE)
            self.stand = stand
            kept = {f"memory-{stand.counted}.safetensors", f"memory-{stand.waiting}.safetensors"}
            kept.add(f"answer-{stand.waiting}")
            for file in [*self.folder.glob("memory-*"), *self.folder.glob("answer-*")]:
                if file.name not in kept:
                    disk.remove(file)


def _digest(task: bytes) -> str:
    return hashlib.blake2b(task, digest_size=16).hexdigest()
