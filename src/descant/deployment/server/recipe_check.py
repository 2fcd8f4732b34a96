"""Check that a recipe can be served to silos, before there is a server or any data."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...config import Recipe
from ...config.recipe_tables import TABLES
from ...config.sections import EXECUTION_KEYS
from ...errors import PartyError, SettingError
from ...federation import Federation
from ...parties.remote_parties import PLACEHOLDER_DESCRIPTIONS, remote_population
from ...rounds.loop import check_without_data
from ..silo.handshake_reply import training_part
from .training_session import MEMORY_BUDGET
from .vault_settings import checked_vault_settings

_SIMULATED_PARTICIPATION_KEYS = (
    "participation_probability",
    "redraw_every",
    "participation_interval",
    "first_rounds",
    "last_rounds",
    "schedule",
)
_SIMULATION_ONLY_REASONS = {
    "speeds": "the speed of silos is their own",
    "presence": "silos come and go by themselves, and take part when they are connected",
    "byzantine": "the server would falsify the updates of real parties",
    "metric": "silos evaluate by the metric of their loss",
    "sweep": "one federation is one training. Choose one value of each",
}
_UNUSED_REASONS = {
    "parties": "the parties are the ones that you invite, each with its own data",
    "methods": "one federation is one training, by [method]",
    "quick": "the full form is served",
    "paper": "figures are compared by descant compare",
    "seeds": "one federation is one training, with the first seed",
    **dict.fromkeys(EXECUTION_KEYS, "parties work on their own machines"),
    "share": "each silo's own policy limits the rows that may leave it",
    "count": "each silo's own policy limits the rows that may leave it",
}


def unused_settings(recipe: Recipe) -> dict[str, str]:
    """Return the settings of a recipe that only a simulation uses, each with the reason."""
    tables = ("parties", "methods", "quick", "paper")
    unused_tables = {
        f"[{name}]" if name in TABLES else f"[[{name}]]": _UNUSED_REASONS[name] for name in tables if _has(recipe, name)
    }
    keys = (("run", "seeds"), *(("run", key) for key in EXECUTION_KEYS), ("vault", "share"), ("vault", "count"))
    return unused_tables | {
        f"The {key!r} of [{table}]": _UNUSED_REASONS[key] for table, key in keys if _has(recipe, table, key)
    }


def _simulation_only_settings(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the settings that would make the served training differ from the simulated one, each with the reason."""
    keys = [("run", "speeds", "speeds"), ("model", "metric", "metric")]
    keys += [(table, key, "presence") for table in ("training", "method") for key in _SIMULATED_PARTICIPATION_KEYS]
    for table, key, reason in keys:
        if _has(recipe, table, key):
            yield f"The {key!r} of [{table}]", _SIMULATION_ONLY_REASONS[reason]
    wraps = [*recipe.tables.get("wrap", []), *recipe.tables.get("method", {}).get("wrap", [])]
    if any(wrap.get("wrapper") == "byzantine" for wrap in wraps):
        yield "The wrap 'byzantine'", _SIMULATION_ONLY_REASONS["byzantine"]
    if _has(recipe, "sweep"):
        yield "[sweep]", _SIMULATION_ONLY_REASONS["sweep"]


def _has(recipe: Recipe, table: str, key: str = "") -> bool:
    contents = recipe.tables.get(table, {})
    return key in contents if key else bool(contents)


def check_servable(recipe: Recipe, with_key: bool, invited: Sequence[str] = ()) -> dict[str, Any]:
    """Return the vault settings of a federation (see `checked_vault_settings`) if the recipe can be served.

    Everything that would end the training before its first round, or that a party would reject, is an error. `invited`
    are the parties of the training, as far as they are known.
    """
    for setting, reason in _simulation_only_settings(recipe):
        raise SettingError(f"{setting} of {recipe.name} is for simulations: {reason}. Leave it out to serve it.")
    training_part(recipe.tables)
    vault = checked_vault_settings(recipe, with_key)
    _check_all_party_kinds(recipe, vault, invited)
    gc.collect()  # free the trial model, which may be large
    return vault


def _check_all_party_kinds(recipe: Recipe, vault: Mapping[str, Any], invited: Sequence[str]) -> None:
    """Run the checks of a simulation that need no data, for each kind of party until one is accepted."""
    algorithm = recipe.algorithm()
    names = invited or [
        f"party {k}"
        for k in range(2 if algorithm.secure_aggregation is None else algorithm.secure_aggregation.min_parties)
    ]
    settings = {key: value for key, value in recipe.settings().items() if key != "engine"}
    settings |= {**vault, "seed": recipe.length.seed, "memory_budget": MEMORY_BUDGET}
    failures = list[str]()
    for description in PLACEHOLDER_DESCRIPTIONS:  # one per kind of party; a solver accepts its own kind
        federation = Federation(
            recipe.model(), remote_population(dict.fromkeys(names, description)), algorithm, **settings
        )
        try:
            return check_without_data(federation.plan_)
        except PartyError as error:
            failures.append(str(error))
    raise SettingError(f"{recipe.name} fits no kind of party that can be a silo: {' '.join(failures)}")
