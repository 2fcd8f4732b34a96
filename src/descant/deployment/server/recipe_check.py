"""Whether a recipe can be served to parties on machines of their own: found out before there is a server, or a row."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...config import Recipe
from ...config.schema import TABLES
from ...config.sections import EXECUTION_KEYS
from ...errors import PartyError, SettingError
from ...federation import Federation
from ...parties.remote_parties import PLACEHOLDER_DESCRIPTIONS, remote_population
from ...rounds.loop import check_without_data
from ..silo.handshake_reply import training_part
from .training_session import MEMORY_BUDGET
from .vault_settings import checked_vault_settings

_SIMULATED_PARTICIPATION_KEYS = ("comes", "stint", "comes_every", "comes_first", "drops", "schedule")
_SIMULATION_ONLY_REASONS = {
    "speeds": "parties on machines of their own are as fast as they are",
    "presence": "parties on machines of their own come and go by themselves, and count when they are there",
    "byzantine": "the server would falsify what real parties send",
    "metric": "parties on machines of their own judge by what goes with their loss",
    "sweep": "one federation is one training. Choose a value of each",
}
_UNUSED_REASONS = {
    "parties": "parties are those whom you invite, each with its own data",
    "methods": "one federation is one training, by [method]",
    "quick": "the whole of it is served",
    "paper": "figures are compared by descant compare",
    "seeds": "one federation is one training, by the first seed",
    **dict.fromkeys(EXECUTION_KEYS, "parties do their work on their own machines"),
    "share": "each team's own policy says how much it lets go",
    "count": "each team's own policy says how much it lets go",
}


def unused_settings(recipe: Recipe) -> dict[str, str]:
    """What a recipe says that only a simulation by it uses, and why: the rest is the same for both."""
    tables = ("parties", "methods", "quick", "paper")
    found = {
        f"[{name}]" if name in TABLES else f"[[{name}]]": _UNUSED_REASONS[name] for name in tables if _has(recipe, name)
    }
    keys = (("run", "seeds"), *(("run", key) for key in EXECUTION_KEYS), ("vault", "share"), ("vault", "count"))
    return found | {
        f"The {key!r} of [{table}]": _UNUSED_REASONS[key] for table, key in keys if _has(recipe, table, key)
    }


def _simulation_only_settings(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What would make another training of it than the one that was rehearsed, and why."""
    keys = [("run", "speeds", "speeds"), ("model", "metric", "metric")]
    keys += [(table, key, "presence") for table in ("training", "method") for key in _SIMULATED_PARTICIPATION_KEYS]
    for table, key, why in keys:
        if _has(recipe, table, key):
            yield f"The {key!r} of [{table}]", _SIMULATION_ONLY_REASONS[why]
    wraps = [*recipe.tables.get("wrap", []), *recipe.tables.get("method", {}).get("wrap", [])]
    if any(wrap.get("by") == "byzantine" for wrap in wraps):
        yield "The wrap 'byzantine'", _SIMULATION_ONLY_REASONS["byzantine"]
    if _has(recipe, "sweep"):
        yield "[sweep]", _SIMULATION_ONLY_REASONS["sweep"]


def _has(recipe: Recipe, table: str, key: str = "") -> bool:
    found = recipe.tables.get(table, {})
    return key in found if key else bool(found)


def check_servable(recipe: Recipe, with_key: bool, invited: Sequence[str] = ()) -> dict[str, Any]:
    """[vault] as settings of a federation (see `sealed`), if a training by this recipe can begin.

    Whatever it would end with before its first round, or a party refuse in it, is an error. ``invited`` are those who
    will be part of it, as far as they are known.
    """
    for what, why in _simulation_only_settings(recipe):
        raise SettingError(f"{what} of {recipe.name} is for simulations: {why}. Leave it out to serve it.")
    training_part(recipe.tables)
    vault = checked_vault_settings(recipe, with_key)
    _check_all_party_kinds(recipe, vault, invited)
    gc.collect()  # of the model that was tried, which may be large, nothing is left
    return vault


def _check_all_party_kinds(recipe: Recipe, vault: Mapping[str, Any], invited: Sequence[str]) -> None:
    """All that can be found out without a row, by the same checks as with them."""
    algorithm = recipe.algorithm()
    names = invited or [
        f"party {k}"
        for k in range(2 if algorithm.secure_aggregation is None else algorithm.secure_aggregation.min_parties)
    ]
    settings = {key: value for key, value in recipe.settings().items() if key != "engine"}
    settings |= {**vault, "seed": recipe.length.seed, "memory_budget": MEMORY_BUDGET}
    failures = list[str]()
    for description in PLACEHOLDER_DESCRIPTIONS:  # the kinds of parties that there are, of which a solver knows its own
        federation = Federation(
            recipe.model(), remote_population(dict.fromkeys(names, description)), algorithm, **settings
        )
        try:
            return check_without_data(federation.plan_)
        except PartyError as error:
            failures.append(str(error))
    raise SettingError(f"{recipe.name} is for no kind of party that can be a silo: {' '.join(failures)}")
