"""What the organiser's side holds of a party's rows, and how that goes."""

from __future__ import annotations

from ...config import Recipe
from ...config.sections import vault_settings
from ...storage.vault.vault_folder import Vault
from ...storage.vault.vault_location import VaultLocation

NOTHING_HELD = "no row of it is held here"


def vault_location(recipe: Recipe) -> VaultLocation | None:
    """The vault of a recipe, if it has one."""
    found: VaultLocation | None = vault_settings(recipe.tables.get("vault", {})).get("vault")
    return found


def erase_rows(vault: VaultLocation | None, party: str) -> str:
    """Destroy what the vault has of a party, as it has wished; what was done."""
    if vault is None:
        return NOTHING_HELD
    held = Vault(vault.folder, user=f"the party {party}")
    if not any(one.party == party and one.state != "forgotten" for one in held.parties()):
        return NOTHING_HELD
    held.forget(party)
    return "the vault has destroyed its sealed rows, and its log says so"
