"""Recipes, and the objects built from them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithms.method_aliases import canonical_method_name
from ..core.settings import check_settings, unknown_name_error
from ..errors import SettingError
from . import toml_io
from .arguments import parse_keywords
from .file_paths import base_name, inline_paths, resolve_paths
from .method_builder import (
    LOCAL,
    align_total,
    make_method,
    rounds_from_total,
    warn_if_exceeding_total,
    with_canonical_names,
)
from .recipe_tables import check_shape
from .sections import (
    EXECUTION_KEYS,
    PARTICIPATION_KEYS,
    PaperFigure,
    RunSettings,
    make_engine,
    parse_record,
    resolve_address,
    resolve_choice,
    vault_settings,
)

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..core.interfaces import Solver
    from ..federation import EngineFactory, Federation
    from ..rounds.plan import ModelSource, PopulationSource
    from ..studies.result_cache import ResultCache
    from ..studies.study import Study


@dataclass(frozen=True)
class Recipe:
    """The tables of a recipe, checked as far as possible before anything is built."""

    tables: Mapping[str, Any]
    name: str = "recipe"

    @property
    def text(self) -> str:
        """Return the recipe as TOML, overrides included: a run's folder keeps it, and it needs no other file."""
        return toml_io.write(inline_paths(self.tables))

    @property
    def title(self) -> str:
        return str(self.tables.get("title", self.name))

    @property
    def about(self) -> str:
        return " ".join(str(self.tables.get("about", "")).split())

    @property
    def length(self) -> RunSettings:
        settings = RunSettings(**parse_keywords(RunSettings, self._table("run"), "[run]"))
        check_settings(settings, "[run]")
        if settings.total is None:
            return settings
        if "rounds" in self._table("run"):
            raise SettingError("Give [run] 'rounds', or a 'total' of work from which they follow, not both.")
        return replace(settings, rounds=rounds_from_total(settings.total, self.solver().hyper.work, self._methods()))

    @property
    def seeds(self) -> list[int]:
        return list(range(self.length.seed, self.length.seed + self.length.seeds))

    @property
    def paper_figures(self) -> list[PaperFigure]:
        """Return the numbers that the paper prints."""
        return [
            PaperFigure(**parse_keywords(PaperFigure, one, "[[paper]]", convert=parse_record))
            for one in self._list("paper")
        ]

    @property
    def digest(self) -> str:
        """Return a digest of what decides the results: not of texts, seeds, engine or the location of data."""
        inlined = replace(self, tables=inline_paths(self.tables, convert_path=base_name))
        digested = {key: dict(inlined._table(key)) for key in ("run", "parties", "model", "training", "sweep")}
        excluded_keys = {"run": ("seeds", "seed", *EXECUTION_KEYS), "parties": ("data",), "model": ("data",)}
        for table, keys in excluded_keys.items():
            digested[table] = {key: value for key, value in digested[table].items() if key not in keys}
        wrapped = {"wrap": self._list("wrap")} if self._list("wrap") else {}
        methods = {"methods": inlined._list("methods"), "method": inlined._table("method")}
        written = toml_io.write({**digested, **methods, **wrapped})
        return hashlib.blake2b(written.encode(), digest_size=8).hexdigest()

    @property
    def has_sweep(self) -> bool:
        """Return whether the recipe has a [sweep]."""
        return bool(self._table("sweep"))

    def quick_form(self) -> Recipe:
        """Return the short form, by [quick]."""
        changes = self._table("quick")
        if not changes:
            raise SettingError(f"{self.name} has no [quick] form.")
        rest = {key: value for key, value in self.tables.items() if key != "quick"}
        return check_recipe(replace(self, tables=toml_io.merge_tables(rest, changes)))

    def with_values(self, *assignments: str) -> Recipe:
        """Return the recipe with other values, each "table.key=value" with TOML or a bare word as its value."""
        tables = self.tables
        for assignment in assignments:
            path, equals, value = assignment.partition("=")
            if not equals or not path.strip():
                raise SettingError(f"--set takes table.key=value, such as run.rounds=20. Got {assignment!r}.")
            tables = toml_io.with_value(tables, path.strip().split("."), toml_io.parse_value(value.strip()), assignment)
        return check_recipe(replace(self, tables=tables))

    def with_data_folder(self, data: str | Path | None) -> Recipe:
        """Return the recipe with a data folder for the population and network that read one."""
        factories = {"parties": self._population()[0], "model": self._network()[0]}
        tables_with_data = [
            name for name, make in factories.items() if data is not None and "data" in signature(make).parameters
        ]
        return replace(
            self, tables=toml_io.merge_tables(self.tables, {name: {"data": str(data)} for name in tables_with_data})
        )

    def sweep_points(self) -> Iterator[tuple[dict[str, Any], Recipe]]:
        """Yield every combination of values in [sweep] with its recipe; without a sweep, one empty combination."""
        lists = dict(toml_io.flatten_tables(self._table("sweep")))
        rest = replace(self, tables={key: value for key, value in self.tables.items() if key != "sweep"})
        for values in itertools.product(*lists.values()):
            point = dict(zip(lists, values, strict=True))
            tables = rest.tables
            for path, one in point.items():
                tables = toml_io.with_value(tables, path.split("."), one, path)
            yield point, check_recipe(replace(rest, tables=tables))

    def model(self) -> ModelSource:
        """Return the function that builds the model."""
        factory, keywords = self._network()
        return partial(factory, **parse_keywords(factory, keywords, "[model]", convert=parse_record))

    def population(self) -> PopulationSource:
        """Return the function that builds the parties."""
        factory, keywords = self._population()
        return partial(factory, **parse_keywords(factory, keywords, "[parties]", convert=parse_record))

    def solver(self) -> Solver:
        """Return the solver that `solver` in [training] names; by default Sgd."""
        from ..training import SOLVERS

        training = dict(self._table("training"))
        named = training.pop("solver", "sgd")
        if named not in SOLVERS:
            raise unknown_name_error("solver", str(named), SOLVERS)
        make = SOLVERS[named]
        allowed = ["solver", *signature(make).parameters, *PARTICIPATION_KEYS]
        for key in training:
            if key not in allowed:
                raise unknown_name_error("key of [training]", key, allowed)
        given = {key: value for key, value in training.items() if key not in PARTICIPATION_KEYS}
        solver = make(**parse_keywords(make, given, "[training]", convert=parse_record))
        check_settings(solver, "[training]")
        return solver

    def algorithms(self, names: Sequence[str] = ()) -> list[Algorithm]:
        """Return the methods to compare: those of [[methods]] (or [method]), or those in ``names``.

        A name is an algorithm or the name that the recipe gives a method; the recipe's settings for it apply.
        """
        listed = self._list("methods") or [one for one in self._list("method") if one]
        if names:
            by_name = {one.get(key): one for key in ("algorithm", "name") for one in reversed(listed)}
            listed = [
                by_name.get(name) or by_name.get(canonical_method_name(name)) or {"algorithm": name}
                for name in dict.fromkeys(names)
            ]
        if not listed:
            raise SettingError(f'{self.name} names no method: add [[methods]] with algorithm = "fedavg", or [method].')
        compared = [self._algorithm(with_canonical_names(one), "[[methods]]") for one in listed]
        names_used = [
            algorithm.name for algorithm in compared if algorithm.name != LOCAL
        ]  # Local is included once in any case
        for name in names_used:
            if names_used.count(name) > 1:
                raise SettingError(f'Two methods of {self.name} are called {name!r}. Give one its own: name = "...".')
        return compared

    def local(self) -> Algorithm:
        """Return local training, with the wrappers of every method."""
        return self._algorithm({"algorithm": "local"}, "[[methods]]")

    def algorithm(self) -> Algorithm:
        """Return the method of a single run, by [method]."""
        given = self._table("method")
        if not given:
            hint = "add one, such as --set method.algorithm=fedavg+, or use descant compare"
            raise SettingError(f"{self.name} has no [method] to run: {hint}.")
        return self._algorithm(given, "[method]")

    def engine(self) -> EngineFactory:
        """Return the engine."""
        return make_engine(self.length)

    def federation(self, seed: int | None = None) -> Federation:
        """Return the federation of a single run, by [method]."""
        from ..federation import Federation

        chosen = self.length.seed if seed is None else seed
        self._warn_if_exceeding_total()
        settings = {**self.settings(), **vault_settings(self._table("vault"))}
        return Federation(self.model(), self.population(), self.algorithm(), seed=chosen, **settings)

    def study(self, names: Sequence[str] = (), progress: bool = True, cache: ResultCache | None = None) -> Study:
        """Compare its methods (or those in ``names``); ``cache`` keeps finished trainings."""
        from ..studies.study import compare

        chosen = self.require_no_vault().algorithms(names)
        length = self.length
        self._warn_if_exceeding_total()
        settings: dict[str, Any] = {
            "rounds": length.rounds,
            "points": length.points,
            "seeds": self.seeds,
            "progress": progress,
            "cache": cache,
        }
        study = compare(chosen, self.model(), self.population(), local=self.local(), **settings, **self.settings())
        texts = {"title": self.title, "about": self.about}
        return replace(study, settings={**{k: v for k, v in texts.items() if v}, **study.settings, "recipe": self.text})

    def check(self, names: Sequence[str] | None = ()) -> Recipe:
        """Raise for errors that can be found before parties and models are built; with None, check [method] alone."""
        if names is not None:
            self.require_no_vault()
        for at in self.check_tables():
            for algorithm in [at.algorithm()] if names is None else [*at.algorithms(names), at.local()]:
                check_settings(algorithm, algorithm.name)
        return self

    def check_tables(self) -> list[Recipe]:
        """Check everything except the methods; return the recipe at every point of its sweep."""
        self.length, self.paper_figures  # noqa: B018
        points = [at for _, at in self.sweep_points()]
        for at in points:
            at.length, at.model(), at.population(), at.settings(), vault_settings(at._table("vault"))
        return points

    def require_no_vault(self) -> Recipe:
        """Return the recipe; raise if it has a [vault]."""
        if self._table("vault"):
            raise SettingError(
                f"[vault] of {self.name} is for descant run: many trainings cannot share one vault. "
                "Leave it out: --set 'vault={}'."
            )
        return self

    def _table(self, name: str) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self.tables.get(name, {})
        return table

    def _list(self, name: str) -> list[Mapping[str, Any]]:
        tables = self.tables.get(name, [])
        return [tables] if isinstance(tables, Mapping) else list(tables)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of a federation other than model, parties, algorithm and seed."""
        model = self._table("model")
        functions = {
            name: resolve_address(model[name], f"The {name!r} of [model]")
            for name in ("loss", "metric")
            if name in model
        }
        return {**functions, "solver": self.solver(), "engine": self.engine()}

    def _algorithm(self, table: Mapping[str, Any], location: str) -> Algorithm:
        ends = align_total(table, self._table("run").get("total"))
        return make_method(ends, location, self._table("training"), wrap=self._list("wrap"))

    def _methods(self) -> list[Mapping[str, Any]]:
        return [*self._list("methods"), *filter(None, self._list("method"))]

    def _warn_if_exceeding_total(self) -> None:
        work = self.solver().hyper.work
        warn_if_exceeding_total(self.length.total, work, self._methods() or [{}], rounds=self.length.rounds)

    def _population(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from ..parties import POPULATIONS

        return resolve_choice(self._table("parties"), "[parties]", "population", registry=POPULATIONS)

    def _network(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from ..models import NETWORKS

        factory, keywords = resolve_choice(self._table("model"), "[model]", "net", registry=NETWORKS)
        return factory, {key: value for key, value in keywords.items() if key not in ("loss", "metric")}


def read_recipe(source: str | Path, base_folder: Path | None = None) -> Recipe:
    """Read a recipe from a file, or from a text with a line break; paths are relative to the file's folder."""
    path = None if isinstance(source, str) and "\n" in source else Path(source)
    if path is None:
        text = str(source)
        name = "recipe"
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
            name = path.stem
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise SettingError(f"The recipe {source} cannot be read: {reason}.") from error
    tables = toml_io.read(text, f"The recipe {name}")
    return check_recipe(Recipe(tables if path is None else resolve_paths(tables, base_folder or path.parent), name))


def check_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with canonical method names; raise if its tables are not those of a recipe."""
    check_shape(recipe.tables, recipe.name)
    recipe = replace(recipe, tables=with_canonical_names(recipe.tables))
    if recipe.tables.get("quick"):
        recipe.quick_form()
    return recipe
