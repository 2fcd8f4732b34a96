"""The tree of exceptions; every message names the thing, what is allowed, what was given and what to do.

DescantError
├── SettingError         an unknown setting, or a value out of its bounds   (also a ValueError)
├── ModelError           an unusable model: no parameters, NaN at the start, mixed dtypes
├── PartyError           unusable parties: none at all, different shapes, bad labels
├── EngineError          a task or reply that could not be delivered
├── StateError           saved state that is damaged, missing, of another federation or of an earlier version
├── BudgetError          a round that would exceed the privacy budget
├── VaultError           an encrypted coreset or a key that is rejected
└── TrustError           an invite or a certificate that is rejected

DescantWarning           something the user should know that does not stop the run
"""

from __future__ import annotations


class DescantError(Exception):
    """The base of every error that Descant raises deliberately."""


class SettingError(DescantError, ValueError):
    """An unknown setting, or a value out of its bounds."""


class ModelError(DescantError):
    """A model that cannot be trained as it is."""


class PartyError(DescantError):
    """Parties, or the data of a party, that cannot be used as they are."""


class EngineError(DescantError):
    """A task or reply that could not be delivered."""


class StateError(DescantError):
    """Saved state that is damaged, missing, of another federation or of an earlier version."""


class BudgetError(DescantError):
    """A round that would exceed the privacy budget."""


class VaultError(DescantError):
    """An encrypted coreset or a key that is rejected."""


class TrustError(DescantError):
    """An invite or a certificate that is rejected."""


class DescantWarning(UserWarning):
    """Something the user should know that does not stop the run."""
