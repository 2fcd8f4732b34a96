"""The round's side of stand-ins: whom to ask for a coreset, who is away, and who answers for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import Hyper, NamedTensors
from ..core.messages import CORESET_KEY, Reply, Task
from ..core.settings import check_settings
from ..errors import SettingError, StateError, VaultError
from ..parties.party import Party
from ..rounds.dispatch import make_tasks
from ..rounds.plan import Plan
from ..rounds.state import State
from ..rounds.validation import Rejection
from ..storage.vault.coreset_rows import CoresetLimit
from ..storage.vault.encryption import read_coreset_header
from ..storage.vault.party_entries import ciphertext_digest
from ..storage.vault.vault_folder import Vault
from ..storage.vault.vault_location import VaultLocation
from . import proxy_training
from .features import FEATURE_SPACES
from .selection import Selection


@dataclass(frozen=True)
class DepositedCoresets:
    """What parties have left behind, as the round knows it: one number a party, in their order."""

    generation: Tensor  # [parties] int64, of its newest coreset; 0: it has left none
    samples: Tensor  # [parties] int64, |D_i| as it last reported it (ERRATA 34)
    pending: Tensor  # [parties] bool, whether it owes one: it was away since it last counted, or the vault took none
    digest: Tensor  # [parties, 32] uint8, of that coreset as it is sealed; 0: it is not in a vault

    @classmethod
    def from_state(cls, plan: Plan, state: State) -> DepositedCoresets:
        """As a state has it."""
        saved = state.server_state.get("proxy")
        if saved is not None:
            return cls(**saved)
        zeros = torch.zeros(len(plan.population), dtype=torch.int64)
        return cls(zeros, zeros.clone(), zeros.bool(), torch.zeros(len(zeros), 32, dtype=torch.uint8))

    def to_tensors(self) -> NamedTensors:
        """As tensors, to be saved."""
        return dict(vars(self))

    def coreset_requests(
        self, plan: Plan, parties: Collection[str]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Settings by party that ask for a coreset, and why others that should be asked cannot be.

        Who comes for the first time is asked, and who returns; who does not want to leave one is not asked again.
        """
        requests: dict[str, dict[str, Any]] = {}
        faults: dict[str, str] = {}
        if plan.algorithm.coreset_proxy is None:
            return requests, faults
        vault = (
            None if plan.vault is None else plan.vault.without_key
        )  # what is no vault is an error; the rest are refusals
        for party in parties:
            index = plan.party_indices[party]
            if self.samples[index] and not self.pending[index]:
                continue
            try:
                requests[party] = {CORESET_KEY: {} if vault is None else _invitation_settings(vault, party)}
            except (VaultError, StateError) as error:
                faults[party] = str(error)
        return requests, faults

    def proxy_tasks(
        self, plan: Plan, state: State, hyper: Hyper, present: Collection[str], index: int
    ) -> Iterator[Task]:
        """A task for everybody who has left a coreset and is not there: τ′ units of work, eq. (6)."""
        if plan.algorithm.coreset_proxy is None:
            return
        names = plan.population.names
        away = [names[k] for k in self.generation.nonzero().flatten().tolist() if names[k] not in present]
        work = plan.algorithm.coreset_proxy.work
        hypers = dict.fromkeys(away, hyper if work is None else replace(hyper, work=work))
        settings = {party: self._coreset_version(plan.party_indices[party]) for party in away}
        yield from make_tasks(plan, state, hypers, kind="proxy", index=index, party_settings=settings)

    def _coreset_version(self, index: int) -> dict[str, Any]:
        digest = bytes(self.digest[index].tolist()).hex()
        return {"samples": int(self.samples[index]), "coreset_version": (int(self.generation[index]), digest)}

    def after_round(
        self, plan: Plan, trained: Sequence[Reply], present: Collection[str], faults: Mapping[str, str]
    ) -> tuple[DepositedCoresets, list[Rejection]]:
        """The same when a round is over, and which coresets were not left or not taken, and why."""
        new = DepositedCoresets(**{name: tensor.clone() for name, tensor in vars(self).items()})
        rejections = []
        known = self.samples.nonzero().flatten().tolist()
        new.pending[[k for k in known if plan.population.names[k] not in present]] = True
        for report in trained:
            index = plan.party_indices[report.party]
            reason = report.reason
            fault = ""
            new.samples[index] = int(report.metrics["samples"])
            if not reason and CORESET_KEY in report.metrics:
                try:
                    new.generation[index] = _store_coreset(plan, report) or int(self.generation[index]) + 1
                    new.digest[index] = _digest_tensor(report.encrypted_coreset)
                except (VaultError, StateError) as error:
                    fault = f"its coreset was not taken: {error}"
            elif not reason and report.party in faults:
                fault = f"it was not asked for a coreset: {faults[report.party]}"
            new.pending[index] = bool(fault)
            if reason or fault:
                rejections.append(Rejection(report.party, report.round, reason or fault, tensor=CORESET_KEY))
        return new, rejections


def _invitation_settings(vault: Vault, party: str) -> dict[str, Any]:
    """What a party seals with."""
    public, generation = vault.invite(party)
    return {"public": public.hex(), "generation": generation, "run": vault.run}


def _digest_tensor(encrypted: bytes) -> Tensor:
    name = bytes.fromhex(ciphertext_digest(encrypted)) if encrypted else bytes(32)
    return torch.tensor(list(name), dtype=torch.uint8)


def _store_coreset(plan: Plan, report: Reply) -> int:
    """The generation of the coreset that the vault has taken; 0 where there is no vault."""
    if plan.vault is None:
        return 0
    samples = int(report.metrics["samples"])
    plan.vault.without_key.store(report.party, report.encrypted_coreset, proxy_training.expected_coreset(plan, samples))
    return read_coreset_header(report.encrypted_coreset).generation


def check_coreset_proxies(plan: Plan) -> None:
    """What can be told of stand-ins, of where their rows are kept, and of how many were agreed on."""
    algorithm = plan.algorithm
    name = plan.algorithm.name
    given: object
    for setting_name, given, kind, example in (
        ("vault", plan.vault, VaultLocation, "descant.VaultAt('folder', 'key')"),
        ("coreset_limit", plan.coreset_limit, CoresetLimit, "descant.Agreed(share=0.05)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise SettingError(f"The {setting_name!r} of Federation must be such as {example}. Got {given!r:.60}.")
    if plan.coreset_limit is not None:
        check_settings(plan.coreset_limit)
    if algorithm.coreset_proxy is None:
        if plan.vault is not None:
            raise SettingError(f"{name} has no stand-ins to open a vault. Wrap it in StandIns, or leave 'vault' out.")
        return
    if algorithm.quorum is not None:
        raise SettingError(
            f"{name} does not wait for all parties (its quorum is {algorithm.quorum}): a stand-in would count in every "
            "version, and its party would not. Take stand-ins with a method that waits, such as FedAvg."
        )
    selection: object = algorithm.coreset_proxy.selection
    if not isinstance(selection, Selection):
        raise SettingError(
            f"The selection of {name} must be such as parties.Selection(share=0.05). Got {selection!r:.60}."
        )
    if not plan.samples:
        raise SettingError(f"{name} leaves rows of the parties' data behind, and agents and desks have none.")
    if plan.vault is not None:
        replace(plan.vault).without_key  # noqa: B018  is it there? a copy: the plan's own goes to other processes


def dry_run_selection(plan: Plan, row: Tensor, selection: Selection) -> None:
    """One of a party's first two rows is chosen, as all will be."""
    first = plan.population[plan.population.names[0]]
    two = Party(first.name, first.x[:2], first.y[:2], x_test=first.x[:0], y_test=first.y[:0])
    features = None if selection.space == "input" else FEATURE_SPACES[selection.space](plan.net.module_from_row(row))
    smallest = {"share": 0.5} if selection.count is None else {"count": 1}
    replace(selection, **smallest).choose(two, plan.seed, features)
