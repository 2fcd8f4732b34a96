"""The server's side of coreset proxies: requests for coresets, their records, and tasks for proxies."""

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
    """The round's record of deposited coresets: one entry per party, in their order."""

    generation: Tensor  # [parties] int64, of its newest coreset; 0: it has deposited none
    samples: Tensor  # [parties] int64, |D_i| as it last reported it (ERRATA 34)
    pending: (
        Tensor  # [parties] bool, a new one is due: it was away since it last counted, or the vault rejected its last
    )
    digest: Tensor  # [parties, 32] uint8, of its encrypted coreset; 0: it is not in a vault

    @classmethod
    def from_state(cls, plan: Plan, state: State) -> DepositedCoresets:
        """Read the record from a state; a state without one gives an empty record."""
        saved = state.server_state.get("proxy")
        if saved is not None:
            return cls(**saved)
        zeros = torch.zeros(len(plan.population), dtype=torch.int64)
        return cls(zeros, zeros.clone(), zeros.bool(), torch.zeros(len(zeros), 32, dtype=torch.uint8))

    def to_tensors(self) -> NamedTensors:
        """Return the record as tensors, to be saved."""
        return dict(vars(self))

    def coreset_requests(
        self, plan: Plan, parties: Collection[str]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the task settings that request a coreset, by party, and the error of each party that cannot be asked.

        A party is asked when it joins for the first time and when it returns. A party that declined is not asked again
        before it returns.
        """
        requests: dict[str, dict[str, Any]] = {}
        faults: dict[str, str] = {}
        if plan.algorithm.coreset_proxy is None:
            return requests, faults
        # A folder that is no vault is an error of the run; a fault below is one party's rejection.
        vault = None if plan.vault is None else plan.vault.without_key
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
        """Yield a task for each absent party with a deposited coreset: τ′ units of work, eq. (6)."""
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
        """Return the record after a round, and a rejection for each coreset that was not deposited or not accepted."""
        new = DepositedCoresets(**{name: tensor.clone() for name, tensor in vars(self).items()})
        rejections = []
        seen = self.samples.nonzero().flatten().tolist()
        new.pending[[k for k in seen if plan.population.names[k] not in present]] = True
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
                    fault = f"its coreset was not accepted: {error}"
            elif not reason and report.party in faults:
                fault = f"it was not asked for a coreset: {faults[report.party]}"
            new.pending[index] = bool(fault)
            if reason or fault:
                rejections.append(Rejection(report.party, report.round, reason or fault, tensor=CORESET_KEY))
        return new, rejections


def _invitation_settings(vault: Vault, party: str) -> dict[str, Any]:
    """Return the settings with which a party encrypts its coreset."""
    public, generation = vault.invite(party)
    return {"public": public.hex(), "generation": generation, "run": vault.run}


def _digest_tensor(encrypted: bytes) -> Tensor:
    name = bytes.fromhex(ciphertext_digest(encrypted)) if encrypted else bytes(32)
    return torch.tensor(list(name), dtype=torch.uint8)


def _store_coreset(plan: Plan, report: Reply) -> int:
    """Store a coreset in the vault and return its generation; 0 without a vault."""
    if plan.vault is None:
        return 0
    samples = int(report.metrics["samples"])
    plan.vault.without_key.store(report.party, report.encrypted_coreset, proxy_training.expected_coreset(plan, samples))
    return read_coreset_header(report.encrypted_coreset).generation


def check_coreset_proxies(plan: Plan) -> None:
    """Raise if the settings of coreset proxies, vault and coreset limit are not valid together."""
    algorithm = plan.algorithm
    name = plan.algorithm.name
    given: object
    for setting_name, given, kind, example in (
        ("vault", plan.vault, VaultLocation, "descant.VaultLocation('folder', 'key')"),
        ("coreset_limit", plan.coreset_limit, CoresetLimit, "descant.CoresetLimit(share=0.05)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise SettingError(f"The {setting_name!r} of Federation must be such as {example}. Got {given!r:.60}.")
    if plan.coreset_limit is not None:
        check_settings(plan.coreset_limit)
    if algorithm.coreset_proxy is None:
        if plan.vault is not None:
            raise SettingError(
                f"{name} has no coreset proxies to use a vault. Wrap it in CoresetProxies, or leave 'vault' out."
            )
        return
    if algorithm.quorum is not None:
        raise SettingError(
            f"{name} does not wait for all parties (its quorum is {algorithm.quorum}): a proxy would count in every "
            "version, and its party would not. Use coreset proxies with a method that waits, such as FedAvg."
        )
    selection: object = algorithm.coreset_proxy.selection
    if not isinstance(selection, Selection):
        raise SettingError(
            f"The selection of {name} must be such as parties.Selection(share=0.05). Got {selection!r:.60}."
        )
    if not plan.samples:
        raise SettingError(f"{name} deposits rows of the parties' data, and agents and desks have none.")
    if plan.vault is not None:
        replace(plan.vault).without_key  # noqa: B018  check that it exists, on a copy: the plan's own is sent to other processes


def dry_run_selection(plan: Plan, row: Tensor, selection: Selection) -> None:
    """Choose one of a party's first two rows, to find errors before the run starts."""
    first = plan.population[plan.population.names[0]]
    two = Party(first.name, first.x[:2], first.y[:2], x_test=first.x[:0], y_test=first.y[:0])
    features = None if selection.space == "input" else FEATURE_SPACES[selection.space](plan.net.module_from_row(row))
    smallest = {"share": 0.5} if selection.count is None else {"count": 1}
    replace(selection, **smallest).choose(two, plan.seed, features)
