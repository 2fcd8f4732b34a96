"""The location of a vault: its folder and its key file, which a plan can pass to another process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .private_keys import key_fingerprint, read_key
from .vault_folder import Vault
from .vault_manifest import MANIFEST


@dataclass(frozen=True)
class VaultLocation:
    """A vault by its folder; only the process that opens a coreset reads its private key.

    The fingerprint is the one that `descant vault init` printed, sent to the parties through another channel. They
    encrypt for that vault only. Without it they trust the folder, and so anybody who may write to it.
    """

    folder: str
    key: str | None = None  # file of the private key; None: the variable DESCANT_VAULT_KEY, else a prompt
    fingerprint: str = ""

    @cached_property
    def without_key(self) -> Vault:
        """The vault without its key: enough to invite parties and to store their coresets."""
        return Vault(self.folder)

    @property
    def identity(self) -> dict[str, str]:
        """The identity of the vault, independent of its folder; a run resumes only with the same vault."""
        return {"run": self.without_key.run, "fingerprint": key_fingerprint(self.without_key.public)}

    @property
    def public_fingerprint(self) -> str:
        """The fingerprint given to parties: the configured one, else the vault's own; "" before it exists."""
        exists = (Path(self.folder) / MANIFEST).exists()
        return self.fingerprint or (self.identity["fingerprint"] if exists else "")

    @cached_property
    def with_key(self) -> Vault:
        """The vault with its private key."""
        return Vault(self.folder, read_key(self.key))
