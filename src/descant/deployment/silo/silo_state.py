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
from ...storage import atomic, write_errors

_PROGRESS_FILE = "rounds.json"
SHARED_ROWS_FILE = "shared_rows.safetensors"
DAILY_TASKS_FILE = "daily_tasks.json"
_MAX_DAYS = 32  # days that are known
_DAY_SECONDS = 24 * 3600.0
RETRY_AFTER = "retry_after"
"""The metric by which a party that has had its rounds for the day says for how many seconds it rests."""


class DailyLimitReached(EngineError):
    """The party has had its rounds for the day."""

    @property
    def seconds_left(self) -> float:
        """Until the next day, in UTC."""
        return _DAY_SECONDS - time.time() % _DAY_SECONDS


@dataclass(frozen=True)
class RoundProgress:
    """Which memories count."""

    accepted_round: int = 0  # the last round whose report was accepted; 0: none yet
    pending_round: int = 0  # the round whose fate is not known; 0: none
    pending_task_digest: str = ""  # a digest of the task of that round
    answered_round: int = 0  # the last round in which it was answered at all; 0: none yet


@dataclass(frozen=True)
class DailyTasks:
    """Which letters of training were taken up on the days that the party's clock has shown, the one shown last last."""

    task_digests: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a digest each, by day: 2026-03-29, in UTC

    def digests_on(self, day: str) -> Sequence[str]:
        """Those of a day: none of one that is new, but a day before all others goes on with those of the first.

        So a clock that goes back wins nothing, and one that was ahead for a while costs a day, and not all until then.
        """
        known = sorted(self.task_digests)
        if day in self.task_digests or (known and day < known[0]):
            return self.task_digests[max(day, known[0])]
        return ()

    def with_digests(self, day: str, digests: Sequence[str]) -> DailyTasks:
        """The same with these letters on a day; those that were shown longest ago are forgotten."""
        others = [(other, held) for other, held in self.task_digests.items() if other != day]
        return DailyTasks({**dict(others[1 - _MAX_DAYS :]), day: digests})


StateFile = TypeVar("StateFile", RoundProgress, DailyTasks)


class SiloState:
    """One party's folder. It is on the disk when a method returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with write_errors(folder):
            atomic.make_folder(folder, 0o700)
        self.progress = self._read(_PROGRESS_FILE, RoundProgress)

    def confirm_accepted(self, accepted: int) -> bool:
        """The last round that counted, as the server says; False if its memory is not here.

        Then there is nothing to go on with, and the party begins anew.
        """
        if self.progress.pending_round and self.progress.pending_round == accepted:
            self._mark_accepted(accepted)
        elif self.progress.pending_round:
            self._mark_accepted(self.progress.accepted_round)
        if self.progress.accepted_round != accepted:
            self._mark_accepted(accepted)
            return False
        return not accepted or self._party_state_file(accepted).exists()

    def load_party_state(self, accepted: object = None) -> dict[str, Tensor]:
        """What counts; of the round that waits, if it is said to be accepted: nothing is settled by that."""
        use_pending = self.progress.pending_round and self.progress.pending_round == accepted
        round = self.progress.pending_round if use_pending else self.progress.accepted_round
        return self._load(self._party_state_file(round)) if round else {}

    def count_task(self, task: bytes, max_per_day: int) -> None:
        """Count a letter to its day, whatever comes of it; an error if the day has had its letters.

        One that comes again is not counted again.
        """
        days = self._read(DAILY_TASKS_FILE, DailyTasks)
        now = today_in_utc()
        digest = _digest(task)
        digests = days.digests_on(now.isoformat())
        if any(digest in held for held in days.task_digests.values()):
            return
        counted = [*digests, digest] if len(digests) < max_per_day else digests
        self._replace(
            DAILY_TASKS_FILE, days.with_digests(now.isoformat(), counted)
        )  # a day that has none left is one that was there, too
        if len(digests) < max_per_day:
            return
        resume_day = now + timedelta(days=1)
        while len(days.digests_on(resume_day.isoformat())) >= max_per_day:
            resume_day += timedelta(days=1)
        raise DailyLimitReached(
            f"Its policy is {max_per_day} rounds a day, and {now} has had them. It goes on at {resume_day}, UTC."
        )

    def shared_rows(self) -> Tensor | None:
        """The numbers of all rows that ever left the party, in rounds that did not count, too."""
        recovery_hint = "Restore it: without it nobody knows which rows have left"
        return self._load(self.folder / SHARED_ROWS_FILE, recovery_hint).get("rows")

    def record_shared_rows(self, rows: Tensor) -> None:
        """These rows are about to leave, with all that left before."""
        with write_errors(self.folder):
            atomic.replace(
                self.folder / SHARED_ROWS_FILE,
                save({"rows": rows.contiguous()}),
                f".{SHARED_ROWS_FILE}",
                atomic.PRIVATE_MODE,
            )

    def _load(self, file: Path, recovery_hint: str = "Restore it, or `descant silo forget`") -> dict[str, Tensor]:
        if not file.exists():
            return {}
        try:
            return load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise StateError(f"{file} cannot be read: {error}. {recovery_hint}.") from error

    def stored_reply(self, round: int, task: bytes) -> bytes | None:
        """The answer that was given to this very task, if it has one."""
        file = self.folder / f"answer-{round}"
        is_repeated = (
            self.progress.pending_round == round
            and self.progress.pending_task_digest == _digest(task)
            and file.exists()
        )
        return file.read_bytes() if is_repeated else None

    def store_pending(self, round: int, task: bytes, party_state: Mapping[str, Tensor], reply: bytes) -> None:
        """What came of a task, until the server says whether it counts."""
        with write_errors(self.folder):
            held = save({name: tensor.detach().clone().contiguous() for name, tensor in party_state.items()})
            atomic.write(self._party_state_file(round), held, atomic.PRIVATE_MODE)
            atomic.write(self.folder / f"answer-{round}", reply, atomic.PRIVATE_MODE)
        self._set_progress(
            RoundProgress(
                self.progress.accepted_round,
                round,
                _digest(task),
                answered_round=max(round, self.progress.answered_round),
            )
        )

    def _party_state_file(self, round: int) -> Path:
        return self.folder / f"memory-{round}.safetensors"

    def _read(self, name: str, kind: type[StateFile]) -> StateFile:
        file = self.folder / name
        try:
            return kind(**json.loads(file.read_text())) if file.exists() else kind()
        except (OSError, ValueError, TypeError) as error:
            raise StateError(
                f"{file} is not as Descant wrote it: {error}. Restore it, or remove the folder."
            ) from error

    def _mark_accepted(self, round: int) -> None:
        """Nothing waits any more."""
        self._set_progress(RoundProgress(accepted_round=round, answered_round=self.progress.answered_round))

    def _replace(self, name: str, content: RoundProgress | DailyTasks) -> None:
        with write_errors(self.folder):
            atomic.replace(self.folder / name, json.dumps(asdict(content)).encode(), f".{name}", atomic.PRIVATE_MODE)

    def _set_progress(self, progress: RoundProgress) -> None:
        """Another stand counts from now on; what it does not speak of goes."""
        with write_errors(self.folder):
            self._replace(_PROGRESS_FILE, progress)
            self.progress = progress
            kept_names = {
                f"memory-{progress.accepted_round}.safetensors",
                f"memory-{progress.pending_round}.safetensors",
            }
            kept_names.add(f"answer-{progress.pending_round}")
            for file in [*self.folder.glob("memory-*"), *self.folder.glob("answer-*")]:
                if file.name not in kept_names:
                    atomic.remove(file)


def _digest(task: bytes) -> str:
    return hashlib.blake2b(task, digest_size=16).hexdigest()


def today_in_utc() -> date:
    """The day that this machine's clock shows."""
    return datetime.now(UTC).date()
