"""Erasure of a party's rows from the server's vault."""

from __future__ import annotations

from ...config import Recipe
from ...config.sections import vault_settings
from ...storage.vault.vault_folder import Vault
from ...storage.vault.vault_location import VaultLocation

NOTHING_HELD = "the server holds no row of it"


def vault_location(recipe: Recipe) -> VaultLocation | None:
    """Return the vault of a recipe, if it has one."""
    location: VaultLocation | None = vault_settings(recipe.tables.get("vault", {})).get("vault")
    return location


def erase_rows(vault: VaultLocation | None, party: str) -> str:
    """Destroy a party's coresets in the vault at the party's request; return what was done."""
    if vault is None:
        return NOTHING_HELD
    opened = Vault(vault.folder, user=f"the party {party}")
    if not any(one.party == party and one.state != "forgotten" for one in opened.parties()):
        return NOTHING_HELD
    opened.forget(party)
    return "the vault has destroyed its encrypted rows and logged that"
