"""The plan of a federation: model, parties, algorithm, solver and their settings."""

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

RECEIVED_MODEL_LOSS = "received_loss"  # the metric that an algorithm's `loss_samples` requests


VALIDATION_LOSS = "validation"  # the loss of the global model on the server's validation set, if there is one


RESET = "reset"  # the setting of a task that resets the party's state


ModelSource: TypeAlias = nn.Module | Callable[[], nn.Module] | str
"""A module, a class or function that builds one, or its address: "package.module:name"."""


PopulationSource: TypeAlias = Population | Callable[[], Population] | str
"""Parties, a function that builds them, or its address."""


@dataclass(frozen=True)
class Plan:
    """The parts of a federation, fixed during a run. The algorithm's name patterns are bound to columns."""

    net: Net
    population: Population
    algorithm: Algorithm
    solver: Solver
    loss: Loss
    metric: Metric
    seed: int
    memory_budget: int = DEFAULT_BUDGET  # bytes of party state in memory; the rest is on disk
    origin: tuple[ModelSource, PopulationSource] | None = None  # sources, for engines that rebuild net and parties
    vault: VaultLocation | None = None  # location of the encrypted coresets; None: they stay with the parties
    coreset_limit: CoresetLimit | None = None  # limit of the rows that leave a party; None: no limit
    deadline: float = 600.0  # seconds that a party has for a task
    vault_fingerprint: str = ""  # fingerprint of the only vault that a silo encrypts for; "": any
    secret: bytes = field(default=b"", repr=False)  # of a silo: its keys are derived from it

    @classmethod
    def create(cls, model: ModelSource, data: PopulationSource, algorithm: Algorithm, seed: int, **rest: Any) -> Plan:
        """Build the net and the parties from their sources, which is the same on every machine."""
        make = resolve(model) if isinstance(model, str) else model
        make_buffer = partial(spill_buffer, budget=rest.get("memory_budget", DEFAULT_BUDGET))
        net = Net.from_model(make, seeds.torch_seed(seed, 0, seeds.ALL_PARTIES, "model"), make_buffer)
        population = make_population(data)
        return cls(net, population, bind(algorithm, net), seed=seed, origin=(model, data), **rest)

    @cached_property
    def samples(self) -> int:
        """Return the number of training samples of all parties."""
        return sum(self.population.samples.values())

    @cached_property
    def party_indices(self) -> dict[str, int]:
        """Return the index of each party."""
        return {name: index for index, name in enumerate(self.population)}

    @cached_property
    def classes(self) -> int | None:
        """Return the number of classes of the model; None where targets are not labels."""
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
        """Return the loss terms; a term of strength 0 is left out, so results equal those without it bit for bit."""
        return tuple(term for term in self.algorithm.terms if isinstance(term, LossTerm) and term.strength != 0)

    @cached_property
    def private_layers(self) -> tuple[str, ...]:
        """Return the tensors that never leave their party."""
        patterns = self.algorithm.private_layers
        if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SettingError(
                f"The 'private_layers' of {self.algorithm.name} must be a tuple of name patterns. Got {patterns!r}."
            )
        return self.net.layout.matching_names(patterns)


def check_labels(plan: Plan) -> None:
    """Raise if a party has a class label for which the model has no output; only checked for the cross-entropy."""
    if not plan.samples or not is_cross_entropy(plan.loss) or getattr(plan.loss, "ignore_index", -1) >= 0:
        return
    classes = plan.classes
    invalid = "" if classes is None else plan.population.find_invalid_label(classes)
    if classes and invalid:
        known = f"the model has {classes} outputs: labels go from 0 to {classes - 1}"
        raise PartyError(f"{invalid}, and {known}. Correct the labels, or give the model more outputs.")


def make_population(data: PopulationSource) -> Population:
    """Return the parties, built from their source if needed."""
    source = resolve(data) if isinstance(data, str) else data
    population = source() if callable(source) else source
    if not isinstance(population, Population):
        raise PartyError(
            "Give parties (or a function that returns them) made by descant.parties, such as from_arrays(...). "
            f"Got {type(population)}."
        )
    return population
