"""The state that a silo keeps on its own disk between rounds; it survives a kill at any write.

    folder/handshake.json             the accepted handshake: federation, recipe, model
    folder/secret                     the secret from which secure aggregation derives keys
    folder/shared_rows.safetensors    the rows that ever left in coresets; it stays when the rest is forgotten
    folder/daily_tasks.json           the train tasks of recent days, if the policy limits them
    folder/rounds.json                the last accepted round, the pending round, the last answered round
    folder/party-state-7.safetensors  the party state after round 7
    folder/reply-8                    the reply of round 8, in case the task comes again

A round's party state stays pending until the server confirms that the reply was accepted. Then it replaces the previous
one.
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
_MAX_DAYS = 32  # days that are recorded
_DAY_SECONDS = 24 * 3600.0
RETRY_AFTER = "retry_after"
"""The metric that says for how many seconds a party pauses when its daily rounds are used up."""


class DailyLimitReached(EngineError):
    """Raised when the party has used up its training rounds for the day."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the next day in UTC."""
        return _DAY_SECONDS - time.time() % _DAY_SECONDS


@dataclass(frozen=True)
class RoundProgress:
    """The rounds whose party state is accepted or pending."""

    accepted_round: int = 0  # the last round whose reply was accepted; 0: none yet
    pending_round: int = 0  # the round whose outcome is unknown; 0: none
    pending_task_digest: str = ""  # the digest of that round's task
    answered_round: int = 0  # the last round that was answered; 0: none yet


@dataclass(frozen=True)
class DailyTasks:
    """The digests of train tasks, by the day that the silo's clock showed; the day written last comes last."""

    task_digests: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by day in UTC, such as 2026-03-29

    def digests_on(self, day: str) -> Sequence[str]:
        """Return the digests of a day: none for a new day, those of the first day for a day before all recorded ones.

        So a clock that is set back gains no rounds, and a clock that was ahead for a while costs one day only.
        """
        recorded_days = sorted(self.task_digests)
        if day in self.task_digests or (recorded_days and day < recorded_days[0]):
            return self.task_digests[max(day, recorded_days[0])]
        return ()

    def with_digests(self, day: str, digests: Sequence[str]) -> DailyTasks:
        """Return a copy with these digests on a day; the days that appeared longest ago are dropped."""
        others = [item for item in self.task_digests.items() if item[0] != day]
        return DailyTasks({**dict(others[1 - _MAX_DAYS :]), day: digests})


StateFile = TypeVar("StateFile", RoundProgress, DailyTasks)


class SiloState:
    """The state in one party's folder. Every method returns after its change is on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with write_errors(folder):
            atomic.make_folder(folder, 0o700)
        self.progress = self._read(_PROGRESS_FILE, RoundProgress)

    def confirm_accepted(self, accepted: int) -> bool:
        """Mark the server's last accepted round; return False if its party state is missing here.

        Then there is nothing to continue from, and the party starts again without state.
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
        """Return the accepted party state, or the pending one if its round is `accepted`; change nothing."""
        use_pending = self.progress.pending_round and self.progress.pending_round == accepted
        round = self.progress.pending_round if use_pending else self.progress.accepted_round
        return self._load(self._party_state_file(round)) if round else {}

    def count_task(self, task: bytes, max_per_day: int) -> None:
        """Count a train task for today, whatever its outcome; raise if the daily limit is reached.

        A repeated task is not counted again.
        """
        days = self._read(DAILY_TASKS_FILE, DailyTasks)
        now = today_in_utc()
        digest = _digest(task)
        digests = days.digests_on(now.isoformat())
        if any(digest in known for known in days.task_digests.values()):
            return
        counted = [*digests, digest] if len(digests) < max_per_day else digests
        # A day whose rounds are used up is recorded too: it has appeared.
        self._replace(DAILY_TASKS_FILE, days.with_digests(now.isoformat(), counted))
        if len(digests) < max_per_day:
            return
        resume_day = now + timedelta(days=1)
        while len(days.digests_on(resume_day.isoformat())) >= max_per_day:
            resume_day += timedelta(days=1)
        raise DailyLimitReached(
            f"Its policy allows {max_per_day} rounds a day, and {now} has used them. It continues on {resume_day}, UTC."
        )

    def shared_rows(self) -> Tensor | None:
        """Return the indices of all rows that ever left the party, including rounds that were rejected."""
        recovery_hint = "Restore it: it is the only record of the rows that have left"
        return self._load(self.folder / SHARED_ROWS_FILE, recovery_hint).get("rows")

    def record_shared_rows(self, rows: Tensor) -> None:
        """Record all rows that have left or are about to."""
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
        """Return the reply that was given to this task before, if any."""
        file = self._reply_file(round)
        is_repeated = (
            self.progress.pending_round == round
            and self.progress.pending_task_digest == _digest(task)
            and file.exists()
        )
        return file.read_bytes() if is_repeated else None

    def store_pending(self, round: int, task: bytes, party_state: Mapping[str, Tensor], reply: bytes) -> None:
        """Store the outcome of a task until the server says whether it was accepted."""
        with write_errors(self.folder):
            packed = save({name: tensor.detach().clone().contiguous() for name, tensor in party_state.items()})
            atomic.write(self._party_state_file(round), packed, atomic.PRIVATE_MODE)
            atomic.write(self._reply_file(round), reply, atomic.PRIVATE_MODE)
        self._set_progress(
            RoundProgress(
                accepted_round=self.progress.accepted_round,
                pending_round=round,
                pending_task_digest=_digest(task),
                answered_round=max(round, self.progress.answered_round),
            )
        )

    def _party_state_file(self, round: int) -> Path:
        return self.folder / f"party-state-{round}.safetensors"

    def _reply_file(self, round: int) -> Path:
        return self.folder / f"reply-{round}"

    def _read(self, name: str, kind: type[StateFile]) -> StateFile:
        file = self.folder / name
        try:
            return kind(**json.loads(file.read_text())) if file.exists() else kind()
        except (OSError, ValueError, TypeError) as error:
            raise StateError(
                f"{file} is not as Descant wrote it: {error}. Restore it, or remove the folder."
            ) from error

    def _mark_accepted(self, round: int) -> None:
        """Record an accepted round; nothing is pending afterwards."""
        self._set_progress(RoundProgress(accepted_round=round, answered_round=self.progress.answered_round))

    def _replace(self, name: str, content: RoundProgress | DailyTasks) -> None:
        with write_errors(self.folder):
            atomic.replace(self.folder / name, json.dumps(asdict(content)).encode(), f".{name}", atomic.PRIVATE_MODE)

    def _set_progress(self, progress: RoundProgress) -> None:
        """Write the new progress, then remove files of rounds that it does not name."""
        with write_errors(self.folder):
            self._replace(_PROGRESS_FILE, progress)
            self.progress = progress
            kept_files = {
                self._party_state_file(progress.accepted_round),
                self._party_state_file(progress.pending_round),
                self._reply_file(progress.pending_round),
            }
            for file in [*self.folder.glob("party-state-*"), *self.folder.glob("reply-*")]:
                if file not in kept_files:
                    atomic.remove(file)


def _digest(task: bytes) -> str:
    return hashlib.blake2b(task, digest_size=16).hexdigest()


def today_in_utc() -> date:
    """Return today's date in UTC by this machine's clock."""
    return datetime.now(UTC).date()
