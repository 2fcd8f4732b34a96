"""The round's side of stand-ins: whom to ask for a coreset, who is away, and who answers for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import Hyper, Memory
from ..core.messages import ASKED, Report, Task
from ..core.settings import check
from ..errors import SettingError, StateError, VaultError
from ..parties.party import Party
from ..rounds.dispatch import tasks_for
from ..rounds.plan import Plan
from ..rounds.state import State
from ..rounds.validation import Refusal
from ..storage.vault.coreset_rows import Agreed
from ..storage.vault.encryption import header_of
from ..storage.vault.party_entries import digest
from ..storage.vault.vault_folder import Vault
from ..storage.vault.vault_location import VaultAt
from . import proxy_training
from .features import SPACES
from .selection import Selection


@dataclass(frozen=True)
class Left:
    """What parties have left behind, as the round knows it: one number a party, in their order."""

    generation: Tensor  # [parties] int64, of its newest coreset; 0: it has left none
    samples: Tensor  # [parties] int64, |D_i| as it last reported it (ERRATA 34)
    missed: Tensor  # [parties] bool, whether it owes one: it was away since it last counted, or the vault took none
    digest: Tensor  # [parties, 32] uint8, of that coreset as it is sealed; 0: it is not in a vault

    @classmethod
    def of(cls, plan: Plan, state: State) -> Left:
        """As a state has it."""
        held = state.memories.get("stand_in")
        if held is not None:
            return cls(**held)
        nothing = torch.zeros(len(plan.people), dtype=torch.int64)
        return cls(nothing, nothing.clone(), nothing.bool(), torch.zeros(len(nothing), 32, dtype=torch.uint8))

    def memory(self) -> Memory:
        """As tensors, to be saved."""
        return dict(vars(self))

    def asking(self, plan: Plan, parties: Collection[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Settings by party that ask for a coreset, and why others that should be asked cannot be.

        Who comes for the first time is asked, and who returns; who does not want to leave one is not asked again.
        """
        asked: dict[str, dict[str, Any]] = {}
        faults: dict[str, str] = {}
        if plan.algorithm.stand_in is None:
            return asked, faults
        vault = None if plan.vault is None else plan.vault.closed  # what is no vault is an error; the rest are refusals
        for party in parties:
            place = plan.places[party]
            if self.samples[place] and not self.missed[place]:
                continue
            try:
                asked[party] = {ASKED: {} if vault is None else _invitation(vault, party)}
            except (VaultError, StateError) as error:
                faults[party] = str(error)
        return asked, faults

    def stand_ins(self, plan: Plan, state: State, hyper: Hyper, there: Collection[str], index: int) -> Iterator[Task]:
        """A task for everybody who has left a coreset and is not there: τ′ units of work, eq. (6)."""
        if plan.algorithm.stand_in is None:
            return
        names = plan.people.names
        away = [names[k] for k in self.generation.nonzero().flatten().tolist() if names[k] not in there]
        work = plan.algorithm.stand_in.work
        learning = dict.fromkeys(away, hyper if work is None else replace(hyper, work=work))
        more = {party: self._known(plan.places[party]) for party in away}
        yield from tasks_for(plan, state, learning, "stand_in", index, more)

    def _known(self, place: int) -> dict[str, Any]:
        digest = bytes(self.digest[place].tolist()).hex()
        return {"samples": int(self.samples[place]), "known": (int(self.generation[place]), digest)}

    def after(
        self, plan: Plan, trained: Sequence[Report], there: Collection[str], faults: Mapping[str, str]
    ) -> tuple[Left, list[Refusal]]:
        """The same when a round is over, and which coresets were not left or not taken, and why."""
        new = Left(**{name: tensor.clone() for name, tensor in vars(self).items()})
        refusals = []
        seen = self.samples.nonzero().flatten().tolist()
        new.missed[[k for k in seen if plan.people.names[k] not in there]] = True
        for report in trained:
            place, reason, fault = plan.places[report.party], report.reason, ""
            new.samples[place] = int(report.metrics["samples"])
            if not reason and ASKED in report.metrics:
                try:
                    new.generation[place] = _taken(plan, report) or int(self.generation[place]) + 1
                    new.digest[place] = _digest(report.sealed)
                except (VaultError, StateError) as error:
                    fault = f"its coreset was not taken: {error}"
            elif not reason and report.party in faults:
                fault = f"it was not asked for a coreset: {faults[report.party]}"
            new.missed[place] = bool(fault)
            if reason or fault:
                refusals.append(Refusal(report.party, report.round, reason or fault, ASKED))
        return new, refusals


def _invitation(vault: Vault, party: str) -> dict[str, Any]:
    """What a party seals with."""
    public, generation = vault.invite(party)
    return {"public": public.hex(), "generation": generation, "run": vault.run}


def _digest(sealed: bytes) -> Tensor:
    name = bytes.fromhex(digest(sealed)) if sealed else bytes(32)
    return torch.tensor(list(name), dtype=torch.uint8)


def _taken(plan: Plan, report: Report) -> int:
    """The generation of the coreset that the vault has taken; 0 where there is no vault."""
    if plan.vault is None:
        return 0
    samples = int(report.metrics["samples"])
    plan.vault.closed.store(report.party, report.sealed, proxy_training.expected(plan, samples))
    return header_of(report.sealed).generation


def check_stand_ins(plan: Plan) -> None:
    """What can be told of stand-ins, of where their rows are kept, and of how many were agreed on."""
    algorithm, name = plan.algorithm, plan.algorithm.name
    given: object
    for told, given, kind, such in (
        ("vault", plan.vault, VaultAt, "descant.VaultAt('folder', 'key')"),
        ("agreed", plan.agreed, Agreed, "descant.Agreed(share=0.05)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise SettingError(f"The {told!r} of Federation must be such as {such}. Got {given!r:.60}.")
    if plan.agreed is not None:
        check(plan.agreed)
    if algorithm.stand_in is None:
        if plan.vault is not None:
            raise SettingError(f"{name} has no stand-ins to open a vault. Wrap it in StandIns, or leave 'vault' out.")
        return
    if algorithm.quorum is not None:
        raise SettingError(
            f"{name} does not wait for all parties (its quorum is {algorithm.quorum}): a stand-in would count in every "
            "version, and its party would not. Take stand-ins with a method that waits, such as FedAvg."
        )
    selection: object = algorithm.stand_in.selection
    if not isinstance(selection, Selection):
        raise SettingError(
            f"The selection of {name} must be such as parties.Selection(share=0.05). Got {selection!r:.60}."
        )
    if not plan.samples:
        raise SettingError(f"{name} leaves rows of the parties' data behind, and agents and desks have none.")
    if plan.vault is not None:
        replace(plan.vault).closed  # noqa: B018  is it there? a copy: the plan's own goes to other processes


def rehearse_leaving(plan: Plan, row: Tensor, selection: Selection) -> None:
    """One of a party's first two rows is chosen, as all will be."""
    first = plan.people[plan.people.names[0]]
    two = Party(first.name, first.x[:2], first.y[:2], first.x[:0], first.y[:0])
    features = None if selection.space == "input" else SPACES[selection.space](plan.net.module_of(row))
    one = {"share": 0.5} if selection.count is None else {"count": 1}
    replace(selection, **one).choose(two, plan.seed, features)
