"""What a federation is made of: model, parties, algorithm, solver and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from ..core import seeds
from ..core.algorithm import Algorithm, Loss, Term
from ..core.interfaces import Solver
from ..core.metrics import Metric, is_cross_entropy, is_labels
from ..errors import PartyError, SettingError
from ..models.flat import ONE_AT_A_TIME, Net, bind
from ..parties.population import People
from ..serialization.references import find
from ..storage import DEFAULT_BUDGET
from ..storage.spill import room

if TYPE_CHECKING:
    from ..storage.vault.coreset_rows import Agreed
    from ..storage.vault.vault_location import VaultAt

RECEIVED = "received_loss"  # the metric that an algorithm's `measure` asks for


VALIDATION = "validation"  # the loss of the centre on the server's own set, where there is one


ANEW = "anew"  # the setting by which a task tells a party to forget what it keeps for itself


Model: TypeAlias = nn.Module | Callable[[], nn.Module] | str
"""A module, a class or a function that makes one, or the address of such a thing: "package.module:name"."""


Data: TypeAlias = People | Callable[[], People] | str
"""Parties, a function that makes them, or its address."""


@dataclass(frozen=True)
class Plan:
    """What a federation is made of; it does not change while it runs. The algorithm's patterns are bound to columns."""

    net: Net
    people: People
    algorithm: Algorithm
    solver: Solver
    loss: Loss
    metric: Metric
    seed: int
    budget: int = DEFAULT_BUDGET  # bytes of party state in memory; the rest is on disk
    origin: tuple[Model, Data] | None = None  # what net and people were made of, for engines that make them elsewhere
    vault: VaultAt | None = None  # where parties' coresets are kept, sealed; None: they stay with the parties
    agreed: Agreed | None = None  # how many of its rows a party lets go, at most; None: as many as it is asked for
    deadline: float = 600.0  # seconds that a party has for a task
    pinned: str = ""  # the fingerprint of the only vault that a party on a machine of its own seals for; "": any
    secret: bytes = field(default=b"", repr=False)  # of a party on a machine of its own: what its keys are made of

    @classmethod
    def made(cls, model: Model, data: Data, algorithm: Algorithm, seed: int, **rest: Any) -> Plan:
        """A plan whose net and parties are made here, of what may be an address; the same on every machine."""
        make = find(model) if isinstance(model, str) else model
        beyond = partial(room, budget=rest.get("budget", DEFAULT_BUDGET))
        net = Net.made(make, seeds.torch_seed(seed, 0, seeds.EVERYBODY, "model"), beyond)
        people = parties_of(data)
        return cls(net, people, bind(algorithm, net), seed=seed, origin=(model, data), **rest)

    @cached_property
    def samples(self) -> int:
        """How many samples all parties train on."""
        return sum(self.people.samples.values())

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each party stands among all of them."""
        return {name: place for place, name in enumerate(self.people)}

    @cached_property
    def classes(self) -> int | None:
        """How many labels the model knows; None where targets are no labels."""
        party, row, size = self.people[self.people.names[0]], self.net.row(), self.net.layout.size
        if not is_labels(party.y):
            return None
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad():
            self.net.module.eval()
            output, _ = self.net.apply(row[:size], row[size:], party.x[:2].clone())
        return output.shape[1] if output.dim() == 2 and output.shape[1] > 1 else None

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """What a party adds to its loss. A term times 0 is none: the rest is then what it is without, bit for bit."""
        return tuple(term for term in self.algorithm.terms if isinstance(term, Term) and term.strength != 0)

    @cached_property
    def private(self) -> tuple[str, ...]:
        """The tensors that never leave their party."""
        patterns = self.algorithm.private
        if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SettingError(
                f"The 'private' of {self.algorithm.name} must be a tuple of name patterns. Got {patterns!r}."
            )
        return self.net.layout.matching(patterns)


def check_labels(plan: Plan) -> None:
    """Raise if a party has a label for which the model has no output, where the loss tells that targets are classes."""
    if not plan.samples or not is_cross_entropy(plan.loss) or getattr(plan.loss, "ignore_index", -1) >= 0:
        return
    classes = plan.classes
    found = "" if classes is None else plan.people.label_beyond(classes)
    if classes and found:
        known = f"the model has {classes} outputs: labels go from 0 to {classes - 1}"
        raise PartyError(f"{found}, and {known}. Mend the labels, or give the model more outputs.")


def parties_of(data: Data) -> People:
    """The parties, made if need be."""
    found = find(data) if isinstance(data, str) else data
    people = found() if callable(found) else found
    if not isinstance(people, People):
        raise PartyError(
            f"Give parties (or their maker) made by descant.parties, such as from_arrays(...). Got {type(people)}."
        )
    return people
