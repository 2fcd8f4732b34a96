"""What can go wrong, as a tree; every message names the thing, what is allowed, what came and what to do.

DescantError
├── SettingError         a setting that does not exist, or a value out of its bounds   (also a ValueError)
├── ModelError           a model that cannot take part: no parameters, NaN at the start, mixed dtypes
├── PartyError           parties that cannot take part: none at all, shapes that differ, bad labels
├── EngineError          a task that could not be carried to its party or back
├── StateError           a saved run that is damaged, missing, or of another federation
├── BudgetError          a round that would give away more of the parties than was agreed
├── VaultError           a sealed coreset, or a key, that is refused
└── TrustError           an invite, or a certificate, that is refused

DescantWarning           what a user should know, though the work goes on
"""

from __future__ import annotations


class DescantError(Exception):
    """The base of every error that Descant raises on purpose."""


class SettingError(DescantError, ValueError):
    """A setting that does not exist, or whose value is out of bounds."""


class ModelError(DescantError):
    """A model that cannot take part as it is."""


class PartyError(DescantError):
    """Parties, or the data of one, that cannot take part as they are."""


class EngineError(DescantError):
    """A task that could not be carried to its party, or its answer back."""


class StateError(DescantError):
    """A saved run that is damaged, missing, or belongs to another federation."""


class BudgetError(DescantError):
    """A round that would give away more of the parties than was agreed."""


class VaultError(DescantError):
    """A sealed coreset, or a key, that is refused."""


class TrustError(DescantError):
    """An invite, or a certificate, that is refused."""


class DescantWarning(UserWarning):
    """Something a user should know, though the work goes on."""
