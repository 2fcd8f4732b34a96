"""A team's own Python file: its model, its data, and what it lets go."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn import functional

from ...core.settings import check_settings, setting
from ...errors import PartyError, SettingError
from ...parties import Agent, Desk, Population, from_arrays
from ...parties.party import Party
from ...rl.agent import single_party
from ...serialization.references import import_module_or_file

_DEFAULT_TEST_SHARE = 0.2  # the share of its rows that is held out, where the file does not say
_REQUIRED_FUNCTIONS = {
    "model": "a class or a function without arguments that makes the torch module",
    "data": "a function that gives (x, y) or (x, y, x_test, y_test), or one party, as parties.agents(count=1) is",
}
_DATA_RETURNS = "must give (x, y), (x, y, x_test, y_test) or one party, as parties.agents(count=1) is"


@dataclass(frozen=True)
class PartyWording:
    """How one speaks of a party of some kind."""

    trained_unit: str  # on so many of these
    tested_unit: str  # on each of so many
    private_data: str
    test_setting: str  # what its file must give, that it can be tested


_WORDING = {
    Party: PartyWording("samples", "test sample", "the data", test_setting="a share, test = 0.2"),
    Agent: PartyWording(
        "steps",
        "test episode",
        "its environment, and all that it saw and did there",
        test_setting="episodes: agents(..., test=20)",
    ),
    Desk: PartyWording(
        "days",
        "test day",
        "its prices, the names of its assets, and what it held of them",
        test_setting="days that it is tested on",
    ),
}


@dataclass(frozen=True)
class SharingPolicy:
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
            raise SettingError(f"There is no file {self.path}. It must define {_format_items(_REQUIRED_FUNCTIONS)}.")
        if self.path.suffix != ".py":
            raise SettingError(
                f"{self.path} must be a Python file, name and all (.py). It defines {_format_items(_REQUIRED_FUNCTIONS)}."
            )
        if (folder := str(self.path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # it may import what stands beside it, which hides nothing that is installed
        found = import_module_or_file(str(self.path))
        missing = {name: what for name, what in _REQUIRED_FUNCTIONS.items() if not callable(getattr(found, name, None))}
        if missing:
            raise SettingError(f"{self.path} must define {_format_items(missing)}.")
        for name in _REQUIRED_FUNCTIONS:
            if asked := _required_arguments(getattr(found, name)):
                raise SettingError(f"{name} of {self.path} is called without arguments, and asks for {asked}.")
        if not callable(loss := getattr(found, "loss", functional.cross_entropy)):
            raise SettingError(f"The loss of {self.path} must be a function of outputs and labels. Got {loss!r:.80}.")
        test = getattr(found, "test", _DEFAULT_TEST_SHARE)
        if not isinstance(test, int | float) or not 0 <= test < 1:
            raise SettingError(f"The test of {self.path} must be a share from 0 up to 1, as 0.2 is. Got {test!r:.80}.")
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
    def policy(self) -> SharingPolicy:
        """What it lets go."""
        given = getattr(self._module, "policy", {})
        known = [each.name for each in fields(SharingPolicy)]
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise SettingError(
                f"The policy of {self.path} must be a dict with some of {', '.join(known)}. Got {given!r:.80}."
            )
        policy = SharingPolicy(**given)
        check_settings(policy, f"policy of {self.path}")
        if not isinstance(dropped := policy.columns_dropped, list | tuple):
            raise SettingError(f"The 'columns_dropped' of policy of {self.path} must be a list. Got {dropped!r:.80}.")
        return policy

    @cached_property
    def population(self) -> Population:
        """The one party whose data are here."""
        data = self._module.data()
        if isinstance(data, Population):
            if len(data) != 1:
                raise PartyError(
                    f"data() of {self.path} {_DATA_RETURNS}. Got {len(data)} parties: subset(['0']) is one."
                )
            data = data[data.names[0]]
        if isinstance(data, Agent | Desk):
            return single_party(data, self.party)
        if isinstance(data, Party):
            data = data.data
        if not isinstance(data, tuple | list) or len(data) not in (2, 4):
            much = f" of {len(data)}" if isinstance(data, tuple | list) else ""
            raise PartyError(f"data() of {self.path} {_DATA_RETURNS}. Got {type(data).__name__}{much}.")
        return from_arrays({self.party: data}, test=float(getattr(self._module, "test", _DEFAULT_TEST_SHARE)))

    @property
    def party_data(self) -> Any:
        """The party itself: a `Party` with rows, or an `Agent` or a `Desk`."""
        return self.population[self.party]

    @property
    def has_rows(self) -> bool:
        """Whether it learns from rows of data, and not in an environment or by prices."""
        return isinstance(self.party_data, Party)

    @property
    def row_only_settings(self) -> list[str]:
        """What it says that only parties with rows have a use for."""
        names = [name for name in ("loss", "test") if hasattr(self._module, name)]
        return names + [name for name in ("share", "columns_dropped") if getattr(self.policy, name)]

    @property
    def wording(self) -> PartyWording:
        """How one speaks of it."""
        return next(words for kind, words in _WORDING.items() if isinstance(self.party_data, kind))


def _required_arguments(function: Callable[..., Any]) -> str:
    """The arguments without which it cannot be called, if that can be seen."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(one.name for one in given if one.default is one.empty and one.kind not in free)


def _format_items(names: dict[str, str]) -> str:
    return ", and ".join(f"{name}: {what}" for name, what in names.items())
