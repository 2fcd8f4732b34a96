"""The vault of a federation's recipe, checked before any party is let in."""

from __future__ import annotations

from typing import Any

from ...config import Recipe
from ...config.sections import vault_settings as read_vault_settings
from ...errors import SettingError
from ...storage.vault.vault_location import VaultLocation


def checked_vault_settings(recipe: Recipe, with_key: bool) -> dict[str, Any]:
    """Return [vault] as settings of a federation, or raise unless the vault exists and opens with its key.

    A key that is in no file is looked for, or asked for, only with `with_key`.
    """
    settings = read_vault_settings(recipe.tables.get("vault", {}))
    vault: VaultLocation | None = settings.get("vault")
    if vault is None and recipe.algorithm().coreset_proxy is not None:
        raise SettingError("Coreset proxies need a [vault] in the recipe: silos encrypt their rows for it.")
    if vault is not None:
        vault.without_key  # noqa: B018  reports a missing vault before a missing key
        if with_key or vault.key is not None:
            vault.with_key  # noqa: B018
    return settings
