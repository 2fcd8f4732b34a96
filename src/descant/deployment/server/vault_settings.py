"""The vault that a federation's recipe names: looked for before anybody is let in."""

from __future__ import annotations

from typing import Any

from ...config import Recipe
from ...config.sections import sealing
from ...errors import SettingError
from ...storage.vault.vault_location import VaultAt


def sealed(recipe: Recipe, with_key: bool) -> dict[str, Any]:
    """[vault] as settings of a federation, if that vault is there and opens with its key.

    A key that is in no file is looked for, or asked for, only if it is said that it is needed.
    """
    found = sealing(recipe.tables.get("vault", {}))
    vault: VaultAt | None = found.get("vault")
    if vault is None and recipe.algorithm().stand_in is not None:
        raise SettingError("Stand-ins need a [vault] in the recipe: parties on machines of their own seal their rows.")
    if vault is not None:
        vault.closed  # noqa: B018  a vault that is not there is said before its key is
        if with_key or vault.key is not None:
            vault.opened  # noqa: B018
    return found
