"""Where a vault is: by its folder and the file of its key, so that a plan can say it to another process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .private_keys import key_fingerprint, read_key
from .vault_folder import Vault
from .vault_manifest import MANIFEST


@dataclass(frozen=True)
class VaultLocation:
    """A vault by its folder. Its private key is read by whoever opens a coreset, and by nobody else.

    The fingerprint is the one that `descant vault init` has shown, as the parties were told it by another way than the
    folder: they seal for that vault only. Without it they trust the folder, and so whoever may write to it.
    """

    folder: str
    key: str | None = None  # the file of the private key; None: DESCANT_VAULT_KEY, else it is asked for
    fingerprint: str = ""

    @cached_property
    def without_key(self) -> Vault:
        """Without its key: to invite, and to store what parties sealed."""
        return Vault(self.folder)

    @property
    def identity(self) -> dict[str, str]:
        """Which vault it is, wherever it lies: a run goes on with that one only."""
        return {"run": self.without_key.run, "fingerprint": key_fingerprint(self.without_key.public)}

    @property
    def public_fingerprint(self) -> str:
        """The fingerprint that parties are told: the one given, or else the vault's own; "" before it is made."""
        exists = (Path(self.folder) / MANIFEST).exists()
        return self.fingerprint or (self.identity["fingerprint"] if exists else "")

    @cached_property
    def with_key(self) -> Vault:
        """With its key."""
        return Vault(self.folder, read_key(self.key))
