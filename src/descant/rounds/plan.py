"""What a federation is made of: model, parties, algorithm, solver and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from ..core import seeds
from ..core.algorithm import Algorithm, Loss, LossTerm
from ..core.interfaces import Solver
from ..core.metrics import Metric, has_class_labels, is_cross_entropy
from ..errors import PartyError, SettingError
from ..models.flat import MODULE_LOCK, Net, bind
from ..parties.population import Population
from ..serialization.references import resolve
from ..storage import DEFAULT_BUDGET
from ..storage.spill import spill_buffer

if TYPE_CHECKING:
    from ..storage.vault.coreset_rows import CoresetLimit
    from ..storage.vault.vault_location import VaultLocation

RECEIVED_MODEL_LOSS = "received_loss"  # the metric that an algorithm's `measure` asks for


VALIDATION_LOSS = "validation"  # the loss of the centre on the server's own set, where there is one


RESET = "reset"  # the setting by which a task tells a party to forget what it keeps for itself


ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module] | str
"""A module, a class or a function that makes one, or the address of such a thing: "package.module:name"."""


PopulationSource: TypeAlias = Population | Callable[[], Population] | str
"""Parties, a function that makes them, or its address."""


@dataclass(frozen=True)
class Plan:
    """What a federation is made of; it does not change while it runs. The algorithm's patterns are bound to columns."""

    net: Net
    population: Population
    algorithm: Algorithm
    solver: Solver
    loss: Loss
    metric: Metric
    seed: int
    memory_budget: int = DEFAULT_BUDGET  # bytes of party state in memory; the rest is on disk
    origin: tuple[ModelSource, PopulationSource] | None = (
        None  # what net and people were made of, for engines that make them elsewhere
    )
    vault: VaultLocation | None = None  # where parties' coresets are kept, sealed; None: they stay with the parties
    coreset_limit: CoresetLimit | None = (
        None  # how many of its rows a party lets go, at most; None: as many as it is asked for
    )
    deadline: float = 600.0  # seconds that a party has for a task
    vault_fingerprint: str = (
        ""  # the fingerprint of the only vault that a party on a machine of its own seals for; "": any
    )
    secret: bytes = field(default=b"", repr=False)  # of a party on a machine of its own: what its keys are made of

    @classmethod
    def create(cls, model: ModelSource, data: PopulationSource, algorithm: Algorithm, seed: int, **rest: Any) -> Plan:
        """A plan whose net and parties are made here, of what may be an address; the same on every machine."""
        make = resolve(model) if isinstance(model, str) else model
        make_buffer = partial(spill_buffer, budget=rest.get("memory_budget", DEFAULT_BUDGET))
        net = Net.from_model(make, seeds.torch_seed(seed, 0, seeds.ALL_PARTIES, "model"), make_buffer)
        population = make_population(data)
        return cls(net, population, bind(algorithm, net), seed=seed, origin=(model, data), **rest)

    @cached_property
    def samples(self) -> int:
        """How many samples all parties train on."""
        return sum(self.population.samples.values())

    @cached_property
    def party_indices(self) -> dict[str, int]:
        """Where each party stands among all of them."""
        return {name: index for index, name in enumerate(self.population)}

    @cached_property
    def classes(self) -> int | None:
        """How many labels the model knows; None where targets are no labels."""
        party = self.population[self.population.names[0]]
        row = self.net.copy_initial_row()
        size = self.net.layout.trainable_width
        if not has_class_labels(party.y):
            return None
        with MODULE_LOCK, torch.inference_mode(False), torch.no_grad():
            self.net.module.eval()
            output, _ = self.net.apply(row[:size], row[size:], party.x[:2].clone())
        return output.shape[1] if output.dim() == 2 and output.shape[1] > 1 else None

    @cached_property
    def terms(self) -> tuple[LossTerm, ...]:
        """What a party adds to its loss. A term times 0 is none: the rest is then what it is without, bit for bit."""
        return tuple(term for term in self.algorithm.terms if isinstance(term, LossTerm) and term.strength != 0)

    @cached_property
    def private_layers(self) -> tuple[str, ...]:
        """The tensors that never leave their party."""
        patterns = self.algorithm.private_layers
        if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SettingError(
                f"The 'private' of {self.algorithm.name} must be a tuple of name patterns. Got {patterns!r}."
            )
        return self.net.layout.matching_names(patterns)


def check_labels(plan: Plan) -> None:
    """Raise if a party has a label for which the model has no output, where the loss tells that targets are classes."""
    if not plan.samples or not is_cross_entropy(plan.loss) or getattr(plan.loss, "ignore_index", -1) >= 0:
        return
    classes = plan.classes
    found = "" if classes is None else plan.population.find_invalid_label(classes)
    if classes and found:
        known = f"the model has {classes} outputs: labels go from 0 to {classes - 1}"
        raise PartyError(f"{found}, and {known}. Mend the labels, or give the model more outputs.")


def make_population(data: PopulationSource) -> Population:
    """The parties, made if need be."""
    found = resolve(data) if isinstance(data, str) else data
    population = found() if callable(found) else found
    if not isinstance(population, Population):
        raise PartyError(
            f"Give parties (or their maker) made by descant.parties, such as from_arrays(...). Got {type(population)}."
        )
    return population
