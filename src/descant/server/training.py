"""The rounds of a federation whose parties come and go, by whatever post: all that it knows is in its folder.

    folder/parties.json   who is part of the training, and what each of them said of its data
    folder/training/      the run (see `record`)

Who was invited when the training began is part of it from the beginning, and may come late. Who was invited later is
part of it from the round on before which it has come: the run is closed behind a round, and goes on with one more. But
what a private run promises is reckoned for those with whom it began, so that it stays with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Recipe
from ..config.parts import sealing
from ..engines.silos import Silos
from ..federation import Federation, ScoredRound
from ..parties.elsewhere import SINCE, elsewhere
from ..patience import Patience
from ..record import Run, is_run
from ..spending import promised
from ..store import clear_errors, disk
from .meeting import Meeting

TRAINING = "training"
BUDGET = 2**25  # bytes of models in memory, of those that grow with the number of parties; the rest is on disk
_MET = "parties.json"
Met = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Training:
    """One training, from its folder."""

    folder: Path
    recipe: Recipe
    meeting: Meeting
    patience: Patience
    say: Callable[[str], None] = print
    barred: Callable[[], Collection[str]] = tuple  # whom nobody stands in for any more

    def until_done(self, invited: Sequence[str]) -> dict[str, Any]:
        """Do the rounds of the recipe, as far as they are not done."""
        met = met_in(self.folder) or self._gathered(invited)
        self.meeting.described |= met  # whoever comes must be like them
        federation = self._federation(met)
        while came := self._rounds(federation, met):
            met = {**met, **came}
            federation = self._federation(met)
            self.say(f"Invited after the training began, and part of it from now on: {', '.join(came)}.")
        self.meeting.part(federation.state.round)
        return {"folder": str(self._place), "rounds": federation.state.round, "hash": federation.hash()}

    def _rounds(self, federation: Federation, met: Met) -> Met:
        """Rounds until all are done, or somebody has come who is not part of them yet: who that is."""
        rounds, private = self.recipe.length.rounds, promised(federation._plan) is not None
        with self._run(federation) as run:
            for round in run.rounds(max(0, rounds - run.round), max(1, rounds // self.recipe.length.points)):
                self.say(_told(round))
                came = {} if private else self._newcomers(met, round.index)
                if came and round.index < rounds:
                    return came
        return {}

    def _gathered(self, invited: Sequence[str]) -> Met:
        """Everybody who is invited; who has not come yet counts with one sample."""
        came = self.meeting.gather(min(self.patience.gather, len(invited)))
        unknown = {**next(iter(came.values())), "samples": 1, "tested": 0}
        return {name: came.get(name, unknown) for name in invited}

    def _newcomers(self, met: Met, round: int) -> Met:
        """Who has come and is not part of the training yet."""
        came = [name for name in self.meeting.here() if name not in met]
        return {name: {**self.meeting.described[name], SINCE: round} for name in came}

    def _run(self, federation: Federation) -> Run:
        if is_run(self._place):
            return Run.resume(self._place, federation)
        return Run.start(self._place, federation, self.recipe.text, "always")

    @property
    def _place(self) -> Path:
        return self.folder / TRAINING

    def _federation(self, met: Met) -> Federation:
        settings = {key: value for key, value in self.recipe.settings().items() if key != "engine"}
        settings |= sealing(self.recipe.tables.get("vault", {}))
        federation = Federation(
            self.recipe.model(),
            elsewhere(met),
            self.recipe.algorithm(),
            seed=self.recipe.length.seed,
            engine=Silos(self.meeting, self.patience, self.say, self.barred),
            deadline=self.patience.limit,
            budget=BUDGET,
            **settings,
        )
        federation.state  # noqa: B018  whoever does not fit is found before it is noted as one who does
        self.meeting.net = federation._plan.net  # the same once more would be one model more in memory
        with clear_errors(self.folder):
            disk.replace(self.folder / _MET, json.dumps(met).encode(), f".{_MET}", disk.PRIVATE)
        return federation


def met_in(folder: Path) -> Met:
    """Who is part of the training in a folder; nobody before it has begun."""
    file = folder / _MET
    found: Met = json.loads(file.read_text()) if file.exists() else {}
    return found


def first_rounds(folder: Path) -> dict[str, int]:
    """The first round that each party of the training in a folder could take part in."""
    return {name: said.get(SINCE, 0) + 1 for name, said in met_in(folder).items()}


def _told(round: ScoredRound) -> str:
    without = "".join(f"; without {refusal.party}: {refusal.reason}" for refusal in round.round.refusals)
    return f"Round {round.index}: {round.round.told}, {len(round.round.accepted)} parties{without}"
