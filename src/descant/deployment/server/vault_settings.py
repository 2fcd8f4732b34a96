"""The vault that a federation's recipe names: looked for before anybody is let in."""

from __future__ import annotations

from typing import Any

from ...config import Recipe
from ...config.sections import vault_settings as read_vault_settings
from ...errors import SettingError
from ...storage.vault.vault_location import VaultLocation


def checked_vault_settings(recipe: Recipe, with_key: bool) -> dict[str, Any]:
    """[vault] as settings of a federation, if that vault is there and opens with its key.

    A key that is in no file is looked for, or asked for, only if it is said that it is needed.
    """
    found = read_vault_settings(recipe.tables.get("vault", {}))
    vault: VaultLocation | None = found.get("vault")
    if vault is None and recipe.algorithm().coreset_proxy is not None:
        raise SettingError("Stand-ins need a [vault] in the recipe: parties on machines of their own seal their rows.")
    if vault is not None:
        vault.without_key  # noqa: B018  a vault that is not there is said before its key is
        if with_key or vault.key is not None:
            vault.with_key  # noqa: B018
    return found
