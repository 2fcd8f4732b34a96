"""What a party keeps on its own disk from round to round, whatever is killed in between.

    folder/party.json               as what it was introduced: federation, recipe, model
    folder/secret                   what its keys are made of, where work is added up unseen
    folder/left.safetensors         which rows ever left, as coresets; it stays when the rest is forgotten
    folder/days.json                which letters of training were taken up on the last days, if a policy counts them
    folder/kept.json                the round that counted last, the round that waits, the round answered last
    folder/memory-7.safetensors     what the party's solver and terms remember after round 7
    folder/answer-8                 the report of round 8, in case that it is asked for again

A round's memory waits until the server says that the report was accepted; then it counts, and what was before goes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...errors import EngineError, StateError
from ...storage import atomic, clear_errors

_POINTER = "kept.json"
LEFT = "left.safetensors"
DAYS = "days.json"
_KNOWN = 32  # days that are known
_DAY_SECONDS = 24 * 3600.0
RESTS = "rests"
"""The metric by which a party that has had its rounds for the day says for how many seconds it rests."""


class Resting(EngineError):
    """The party has had its rounds for the day."""

    @property
    def seconds(self) -> float:
        """Until the next day, in UTC."""
        return _DAY_SECONDS - time.time() % _DAY_SECONDS


@dataclass(frozen=True)
class Stand:
    """Which memories count."""

    counted: int = 0  # the last round whose report was accepted; 0: none yet
    waiting: int = 0  # the round whose fate is not known; 0: none
    asked: str = ""  # a digest of the task of that round
    answered: int = 0  # the last round in which it was answered at all; 0: none yet


@dataclass(frozen=True)
class Days:
    """Which letters of training were taken up on the days that the party's clock has shown, the one shown last last."""

    letters: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a digest each, by day: 2026-03-29, in UTC

    def on(self, day: str) -> Sequence[str]:
        """Those of a day: none of one that is new, but a day before all others goes on with those of the first.

        So a clock that goes back wins nothing, and one that was ahead for a while costs a day, and not all until then.
        """
        known = sorted(self.letters)
        if day in self.letters or (known and day < known[0]):
            return self.letters[max(day, known[0])]
        return ()

    def having(self, day: str, letters: Sequence[str]) -> Days:
        """The same with these letters on a day; those that were shown longest ago are forgotten."""
        others = [(other, held) for other, held in self.letters.items() if other != day]
        return Days({**dict(others[1 - _KNOWN :]), day: letters})


Kept = TypeVar("Kept", Stand, Days)


class Keeping:
    """One party's folder. It is on the disk when a method returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with clear_errors(folder):
            atomic.make(folder, 0o700)
        self.stand = self._read(_POINTER, Stand)

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

    def take_up(self, letter: bytes, most: int) -> None:
        """Count a letter to its day, whatever comes of it; an error if the day has had its letters.

        One that comes again is not counted again.
        """
        days, now, digest = self._read(DAYS, Days), today_in_utc(), _digest(letter)
        letters = days.on(now.isoformat())
        if any(digest in held for held in days.letters.values()):
            return
        taken = [*letters, digest] if len(letters) < most else letters
        self._replace(DAYS, days.having(now.isoformat(), taken))  # a day that has none left is one that was there, too
        if len(letters) < most:
            return
        again = now + timedelta(days=1)
        while len(days.on(again.isoformat())) >= most:
            again += timedelta(days=1)
        raise Resting(f"Its policy is {most} rounds a day, and {now} has had them. It goes on at {again}, UTC.")

    def left(self) -> Tensor | None:
        """The numbers of all rows that ever left the party, in rounds that did not count, too."""
        lost = "Restore it: without it nobody knows which rows have left"
        return self._load(self.folder / LEFT, lost).get("rows")

    def leave(self, rows: Tensor) -> None:
        """These rows are about to leave, with all that left before."""
        with clear_errors(self.folder):
            atomic.replace(self.folder / LEFT, save({"rows": rows.contiguous()}), f".{LEFT}", atomic.PRIVATE)

    def _load(self, file: Path, lost: str = "Restore it, or `descant silo forget`") -> dict[str, Tensor]:
        if not file.exists():
            return {}
        try:
            return load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise StateError(f"{file} cannot be read: {error}. {lost}.") from error

    def answered(self, round: int, task: bytes) -> bytes | None:
        """The answer that was given to this very task, if it has one."""
        file = self.folder / f"answer-{round}"
        known = self.stand.waiting == round and self.stand.asked == _digest(task) and file.exists()
        return file.read_bytes() if known else None

    def wait(self, round: int, task: bytes, memory: Mapping[str, Tensor], answer: bytes) -> None:
        """What came of a task, until the server says whether it counts."""
        with clear_errors(self.folder):
            held = save({name: tensor.detach().clone().contiguous() for name, tensor in memory.items()})
            atomic.write(self._memory(round), held, atomic.PRIVATE)
            atomic.write(self.folder / f"answer-{round}", answer, atomic.PRIVATE)
        self._point(Stand(self.stand.counted, round, _digest(task), max(round, self.stand.answered)))

    def _memory(self, round: int) -> Path:
        return self.folder / f"memory-{round}.safetensors"

    def _read(self, name: str, kind: type[Kept]) -> Kept:
        file = self.folder / name
        try:
            return kind(**json.loads(file.read_text())) if file.exists() else kind()
        except (OSError, ValueError, TypeError) as error:
            raise StateError(
                f"{file} is not as Descant wrote it: {error}. Restore it, or remove the folder."
            ) from error

    def _count(self, round: int) -> None:
        """Nothing waits any more."""
        self._point(Stand(counted=round, answered=self.stand.answered))

    def _replace(self, name: str, kept: Stand | Days) -> None:
        with clear_errors(self.folder):
            atomic.replace(self.folder / name, json.dumps(asdict(kept)).encode(), f".{name}", atomic.PRIVATE)

    def _point(self, stand: Stand) -> None:
        """Another stand counts from now on; what it does not speak of goes."""
        with clear_errors(self.folder):
            self._replace(_POINTER, stand)
            self.stand = stand
            kept = {f"memory-{stand.counted}.safetensors", f"memory-{stand.waiting}.safetensors"}
            kept.add(f"answer-{stand.waiting}")
            for file in [*self.folder.glob("memory-*"), *self.folder.glob("answer-*")]:
                if file.name not in kept:
                    atomic.remove(file)


def _digest(task: bytes) -> str:
    return hashlib.blake2b(task, digest_size=16).hexdigest()


def today_in_utc() -> date:
    """The day that this machine's clock shows."""
    return datetime.now(UTC).date()
