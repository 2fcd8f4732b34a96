"""A silo's Python file: its model, its data, and its sharing policy."""

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
from ...rl.agent_parties import single_party
from ...serialization.references import import_module_or_file

_DEFAULT_TEST_SHARE = 0.2  # the share of rows held out for tests, unless the file sets `test`
_REQUIRED_FUNCTIONS = {
    "model": "a class or a function without arguments that returns the torch module",
    "data": "a function that returns (x, y), (x, y, x_test, y_test) or one party, such as parties.agents(count=1)",
}
_DATA_RETURNS = "must return (x, y), (x, y, x_test, y_test) or one party, such as parties.agents(count=1)"


@dataclass(frozen=True)
class PartyWording:
    """The words that messages use for one kind of party."""

    trained_unit: str  # the plural unit of training data: "trained on 96 samples"
    tested_unit: str  # the singular unit of a test
    private_data: str  # the data that never leave
    test_setting: str  # the setting that gives it a test set


_WORDING = {
    Party: PartyWording("samples", "test sample", "the data", test_setting="a share, test = 0.2"),
    Agent: PartyWording(
        "steps",
        "test episode",
        "its environment, its observations and its actions",
        test_setting="episodes: agents(..., test_episodes=20)",
    ),
    Desk: PartyWording(
        "days",
        "test day",
        "its prices, the names of its assets, and its holdings",
        test_setting="test days",
    ),
}


@dataclass(frozen=True)
class SharingPolicy:
    """Limits on sharing: ``policy = {"share": 0.02, "columns_dropped": [3], "rounds_a_day": 24}`` in a silo's file."""

    share: float = setting(0.0, "largest share of its rows that ever leave as a coreset; 0: none", least=0, most=1)
    columns_dropped: Sequence[int] = setting((), "columns of x that are set to 0 in a coreset", least=0, whole=True)
    rounds_a_day: int | None = setting(None, "most training rounds per day; None: no limit", least=1, whole=True)


@dataclass(frozen=True)
class SiloFile:
    """A silo's file, imported once; model and data are built on first use."""

    path: Path
    party: str

    @cached_property
    def _module(self) -> ModuleType:
        if not self.path.is_file():
            raise SettingError(f"There is no file {self.path}. It must define {_format_items(_REQUIRED_FUNCTIONS)}.")
        if self.path.suffix != ".py":
            raise SettingError(
                f"{self.path} must be a Python file whose name ends in .py. "
                f"It defines {_format_items(_REQUIRED_FUNCTIONS)}."
            )
        if (folder := str(self.path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # last in the path: its neighbors can be imported and hide nothing installed
        module = import_module_or_file(str(self.path))
        missing = {
            name: what for name, what in _REQUIRED_FUNCTIONS.items() if not callable(getattr(module, name, None))
        }
        if missing:
            raise SettingError(f"{self.path} must define {_format_items(missing)}.")
        for name in _REQUIRED_FUNCTIONS:
            if required := _required_arguments(getattr(module, name)):
                raise SettingError(f"{name} of {self.path} is called without arguments, but requires {required}.")
        if not callable(loss := getattr(module, "loss", functional.cross_entropy)):
            raise SettingError(f"The loss of {self.path} must be a function of outputs and labels. Got {loss!r:.80}.")
        test = getattr(module, "test", _DEFAULT_TEST_SHARE)
        if not isinstance(test, int | float) or not 0 <= test < 1:
            raise SettingError(
                f"The test of {self.path} must be a share from 0 up to 1, such as 0.2. Got {test!r:.80}."
            )
        return module

    @property
    def model(self) -> Callable[[], nn.Module]:
        """Return the function that builds the model."""
        return self._module.model  # type: ignore[no-any-return]

    @property
    def loss(self) -> Callable[..., Any]:
        """Return the loss function: cross-entropy, unless the file defines ``loss``."""
        return getattr(self._module, "loss", functional.cross_entropy)

    @property
    def has_loss(self) -> bool:
        """Return True if the file defines its own loss."""
        return hasattr(self._module, "loss")

    @cached_property
    def policy(self) -> SharingPolicy:
        """Return the sharing policy of the file."""
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
        """Return the population of one: the party whose data are in this file."""
        data = self._module.data()
        if isinstance(data, Population):
            if len(data) != 1:
                raise PartyError(
                    f"data() of {self.path} {_DATA_RETURNS}. Got {len(data)} parties. Choose one: subset(['0'])."
                )
            data = data[data.names[0]]
        if isinstance(data, Agent | Desk):
            return single_party(data, self.party)
        if isinstance(data, Party):
            data = data.data
        if not isinstance(data, tuple | list) or len(data) not in (2, 4):
            length = f" of {len(data)}" if isinstance(data, tuple | list) else ""
            raise PartyError(f"data() of {self.path} {_DATA_RETURNS}. Got {type(data).__name__}{length}.")
        return from_arrays({self.party: data}, test=float(getattr(self._module, "test", _DEFAULT_TEST_SHARE)))

    @property
    def party_data(self) -> Any:
        """Return the party itself: a `Party` with rows, an `Agent` or a `Desk`."""
        return self.population[self.party]

    @property
    def has_rows(self) -> bool:
        """Return True if the party learns from rows of data, not in an environment or from prices."""
        return isinstance(self.party_data, Party)

    @property
    def row_only_settings(self) -> list[str]:
        """Return the names of the file's settings that only apply to parties with rows."""
        names = [name for name in ("loss", "test") if hasattr(self._module, name)]
        return names + [name for name in ("share", "columns_dropped") if getattr(self.policy, name)]

    @property
    def wording(self) -> PartyWording:
        """Return the words that messages use for this party."""
        return next(words for kind, words in _WORDING.items() if isinstance(self.party_data, kind))


def _required_arguments(function: Callable[..., Any]) -> str:
    """Return the arguments that a call needs, as far as the signature shows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(one.name for one in parameters if one.default is one.empty and one.kind not in free)


def _format_items(names: dict[str, str]) -> str:
    return ", and ".join(f"{name}: {what}" for name, what in names.items())
