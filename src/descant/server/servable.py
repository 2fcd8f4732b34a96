"""Whether a recipe can be served to parties on machines of their own: found out before there is a server, or a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Recipe
from ..errors import PartyError, SettingError
from ..federation import Federation
from ..parties.elsewhere import elsewhere
from ..run import check_unseen
from ..silo.desk import reduced
from .training import BUDGET

_ROWS: dict[str, Any] = {"x": [0], "x_dtype": "float32", "y": [0], "y_dtype": "int64", "samples": 10**9, "tested": 0}
"""What no party has said of its data: as many samples as there can be, so that ε is the least, and nothing in them."""


def check_servable(recipe: Recipe, sealed: Mapping[str, Any], invited: Sequence[str] = ()) -> None:
    """Raise for whatever a training by this recipe would end with before its first round, or a party refuse in it.

    ``invited`` are those who will be part of it, as far as they are known.
    """
    reduced(recipe.tables)
    algorithm = recipe.algorithm()
    names = invited or [f"party {k}" for k in range(2 if algorithm.secure is None else algorithm.secure.least)]
    settings = {key: value for key, value in recipe.settings().items() if key != "engine"}
    people = elsewhere(dict.fromkeys(names, _ROWS))
    settings |= {**sealed, "seed": recipe.length.seed, "budget": BUDGET}
    federation = Federation(recipe.model(), people, algorithm, **settings)
    try:
        check_unseen(federation._plan)
    except PartyError as error:
        raise SettingError(f"{recipe.name} is not for silos, whose teams bring rows: {error}") from error
