"""A team's own Python file: its model, its data, and what it lets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn import functional

from ..address import module_at
from ..errors import PartyError, SettingError
from ..parties import People, from_arrays
from ..parties.party import Party
from ..settings import check, setting

_NEEDED = {
    "model": "a class or a function without arguments that makes the torch module",
    "data": "a function that gives (x, y) or (x, y, x_test, y_test)",
}


@dataclass(frozen=True)
class Policy:
    """What a team lets go: ``policy = {"share": 0.02, "columns_dropped": [3], "rounds_a_day": 24}`` in its file."""

    share: float = setting(0.0, "the largest share of its rows that it leaves as a coreset; 0: none", least=0, most=1)
    columns_dropped: Sequence[int] = setting((), "columns of x that are 0 in a coreset", least=0, whole=True)
    rounds_a_day: int | None = setting(None, "rounds that it trains in a day, at most; None: all", least=1, whole=True)


@dataclass(frozen=True)
class SiloFile:
    """The file, read once; what it names is made when it is asked for."""

    path: Path
    party: str

    @cached_property
    def _module(self) -> ModuleType:
        if not self.path.is_file():
            raise SettingError(f"There is no file {self.path}. It must define {_told(_NEEDED)}.")
        found = module_at(str(self.path))
        missing = {name: what for name, what in _NEEDED.items() if not callable(getattr(found, name, None))}
        if missing:
            raise SettingError(f"{self.path} must define {_told(missing)}.")
        return found

    @property
    def model(self) -> Callable[[], nn.Module]:
        """What makes the model."""
        return self._module.model  # type: ignore[no-any-return]

    @property
    def loss(self) -> Callable[..., Any]:
        """What is minimised: cross-entropy, unless the file has a ``loss``."""
        return getattr(self._module, "loss", functional.cross_entropy)

    @property
    def has_loss(self) -> bool:
        """Whether it minimises a loss of its own."""
        return hasattr(self._module, "loss")

    @cached_property
    def policy(self) -> Policy:
        """What it lets go."""
        given = getattr(self._module, "policy", {})
        known = [each.name for each in fields(Policy)]
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise SettingError(
                f"The policy of {self.path} must be a dict with some of {', '.join(known)}. Got {given!r:.80}."
            )
        policy = Policy(**given)
        check(policy, f"policy of {self.path}")
        if not isinstance(dropped := policy.columns_dropped, list | tuple):
            raise SettingError(f"The 'columns_dropped' of policy of {self.path} must be a list. Got {dropped!r:.80}.")
        return policy

    @cached_property
    def people(self) -> People:
        """The one party whose data are here."""
        given = self._module.data()
        if not isinstance(given, tuple | list) or len(given) not in (2, 4):
            raise PartyError(
                f"data() of {self.path} must give (x, y) or (x, y, x_test, y_test). Got {type(given).__name__}."
            )
        return from_arrays({self.party: given}, test=float(getattr(self._module, "test", 0.2)))

    @property
    def own(self) -> Party:
        """The party itself."""
        return self.people[self.party]


def _told(names: dict[str, str]) -> str:
    return ", and ".join(f"{name}: {what}" for name, what in names.items())
