"""What a recipe says, and what is made of it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.settings import check, unknown
from ..errors import SettingError
from . import toml_io
from .arguments import keywords_for
from .file_paths import last_part, located, self_contained
from .methods import ALONE, ending, method, rounds_of, warn_beyond
from .schema import check_shape
from .sections import ATTENDANCE, CARRIED, Figure, Length, at_address, chosen, engine_of, record_of, sealing

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..core.interfaces import Solver
    from ..federation import Federation, MakeEngine
    from ..rounds.plan import Data, Model
    from ..studies.result_cache import Finished
    from ..studies.study import Study


@dataclass(frozen=True)
class Recipe:
    """What a recipe says, checked as far as it can be before anything is made."""

    tables: Mapping[str, Any]
    name: str = "recipe"

    @property
    def text(self) -> str:
        """The whole of it as TOML, overrides included: what a run's folder keeps. It needs no file beside it."""
        return toml_io.write(self_contained(self.tables))

    @property
    def title(self) -> str:
        return str(self.tables.get("title", self.name))

    @property
    def about(self) -> str:
        return " ".join(str(self.tables.get("about", "")).split())

    @property
    def length(self) -> Length:
        found = Length(**keywords_for(Length, self._table("run"), "[run]"))
        check(found, "[run]")
        if found.total is None:
            return found
        if "rounds" in self._table("run"):
            raise SettingError("Give [run] 'rounds', or a 'total' of work from which they follow, not both.")
        return replace(found, rounds=rounds_of(found.total, self.solver().hyper.work, self._methods()))

    @property
    def seeds(self) -> list[int]:
        return list(range(self.length.seed, self.length.seed + self.length.seeds))

    @property
    def figures(self) -> list[Figure]:
        """What the paper prints."""
        return [Figure(**keywords_for(Figure, one, "[[paper]]", record_of)) for one in self._list("paper")]

    @property
    def digest(self) -> str:
        """Of what decides the numbers: not of words, seeds, engine or where the data is."""
        whole = replace(self, tables=self_contained(self.tables, place=last_part))
        counted = {key: dict(whole._table(key)) for key in ("run", "parties", "model", "work", "sweep")}
        rest = {"run": ("seeds", "seed", *CARRIED), "parties": ("data",), "model": ("data",)}
        for table, keys in rest.items():
            counted[table] = {key: value for key, value in counted[table].items() if key not in keys}
        wrapped = {"wrap": self._list("wrap")} if self._list("wrap") else {}
        methods = {"methods": whole._list("methods"), "method": whole._table("method")}
        written = toml_io.write({**counted, **methods, **wrapped})
        return hashlib.blake2b(written.encode(), digest_size=8).hexdigest()

    @property
    def swept(self) -> bool:
        """Whether it goes through values."""
        return bool(self._table("sweep"))

    # ── another recipe ────────────────────────────────────────────────────────────────────────────────────────────────

    def quick(self) -> Recipe:
        """The short form."""
        changes = self._table("quick")
        if not changes:
            raise SettingError(f"{self.name} has no [quick] form.")
        rest = {key: value for key, value in self.tables.items() if key != "quick"}
        return _checked(replace(self, tables=toml_io.merged(rest, changes)))

    def set(self, *assignments: str) -> Recipe:
        """With other values, each given as "table.key=value"; a value is TOML, and a bare word is a text."""
        tables = self.tables
        for assignment in assignments:
            path, equals, value = assignment.partition("=")
            if not equals or not path.strip():
                raise SettingError(f"--set takes table.key=value, such as run.rounds=20. Got {assignment!r}.")
            tables = toml_io.assigned(tables, path.strip().split("."), toml_io.value(value.strip()), assignment)
        return _checked(replace(self, tables=tables))

    def where(self, data: str | Path | None) -> Recipe:
        """With the folder of its data, wherever what it names reads one."""
        made = {"parties": self._population()[0], "model": self._net()[0]}
        reads = [name for name, make in made.items() if data is not None and "data" in signature(make).parameters]
        return replace(self, tables=toml_io.merged(self.tables, {name: {"data": str(data)} for name in reads}))

    def sweep(self) -> Iterator[tuple[dict[str, Any], Recipe]]:
        """Every combination of the values in [sweep], and the recipe at it; one with no values if there is no sweep."""
        lists = dict(toml_io.flat(self._table("sweep")))
        rest = replace(self, tables={key: value for key, value in self.tables.items() if key != "sweep"})
        for values in itertools.product(*lists.values()):
            at = dict(zip(lists, values, strict=True))
            tables = rest.tables
            for path, one in at.items():
                tables = toml_io.assigned(tables, path.split("."), one, path)
            yield at, _checked(replace(rest, tables=tables))

    # ── what it says, made ────────────────────────────────────────────────────────────────────────────────────────────

    def model(self) -> Model:
        """What makes the model of every party."""
        make, given = self._net()
        return partial(make, **keywords_for(make, given, "[model]", record_of))

    def people(self) -> Data:
        """What makes the parties."""
        make, given = self._population()
        return partial(make, **keywords_for(make, given, "[parties]", record_of))

    def solver(self) -> Solver:
        """How a party learns alone: by Sgd, or by what `solver` in [work] names."""
        from ..training import SOLVERS

        work = dict(self._table("work"))
        named = work.pop("solver", "sgd")
        if named not in SOLVERS:
            raise unknown("solver", str(named), SOLVERS)
        make = SOLVERS[named]
        allowed = ["solver", *signature(make).parameters, *ATTENDANCE]
        for key in work:
            if key not in allowed:
                raise unknown("key of [work]", key, allowed)
        given = {key: value for key, value in work.items() if key not in ATTENDANCE}
        solver = make(**keywords_for(make, given, "[work]", record_of))
        check(solver, "[work]")
        return solver

    def algorithms(self, names: Sequence[str] = ()) -> list[Algorithm]:
        """The methods that are compared: those of [[methods]] (or [method]), or those that are named.

        One that is named, as an algorithm or by the name that the recipe gives it, keeps the recipe's settings for it.
        """
        listed = self._list("methods") or [one for one in self._list("method") if one]
        if names:
            mine = {one.get(key): one for key in ("algorithm", "name") for one in reversed(listed)}
            listed = [mine.get(name, {"algorithm": name}) for name in dict.fromkeys(names)]
        if not listed:
            raise SettingError(f'{self.name} names no method: add [[methods]] with algorithm = "fedavg", or [method].')
        made = [self._algorithm(one, "[[methods]]") for one in listed]
        called = [algorithm.name for algorithm in made if algorithm.name != ALONE]  # alone comes once in any case
        for name in called:
            if called.count(name) > 1:
                raise SettingError(f'Two methods of {self.name} are called {name!r}. Give one its own: name = "...".')
        return made

    def local(self) -> Algorithm:
        """Training alone, with what wraps every method."""
        return self._algorithm({"algorithm": "local"}, "[[methods]]")

    def algorithm(self) -> Algorithm:
        """The method of a single run."""
        given = self._table("method")
        if not given:
            hint = "add one, say --set method.algorithm=fedavg+, or use descant compare"
            raise SettingError(f"{self.name} has no [method] to run: {hint}.")
        return self._algorithm(given, "[method]")

    def engine(self) -> MakeEngine:
        """Who does the parties' work."""
        return engine_of(self.length)

    def federation(self, seed: int | None = None) -> Federation:
        """The federation of a single run, by [method]."""
        from ..federation import Federation

        chosen = self.length.seed if seed is None else seed
        self._warn_beyond()
        settings = {**self.settings(), **sealing(self._table("vault"))}
        return Federation(self.model(), self.people(), self.algorithm(), seed=chosen, **settings)

    def study(self, names: Sequence[str] = (), progress: bool = True, kept: Finished | None = None) -> Study:
        """Its methods (or those that are named) side by side, by `compare`; finished trainings are kept in a folder."""
        from ..studies.study import compare

        chosen, length = self.unsealed().algorithms(names), self.length
        self._warn_beyond()
        settings: dict[str, Any] = {
            "rounds": length.rounds,
            "points": length.points,
            "seeds": self.seeds,
            "progress": progress,
            "kept": kept,
        }
        study = compare(chosen, self.model(), self.people(), local=self.local(), **settings, **self.settings())
        told = {"title": self.title, "about": self.about}
        return replace(study, settings={**{k: v for k, v in told.items() if v}, **study.settings, "recipe": self.text})

    def check(self, names: Sequence[str] | None = ()) -> Recipe:
        """Raise for whatever can be found wrong before parties and models are made; None leaves methods to [method]."""
        if names is not None:
            self.unsealed()
        for at in self.check_tables():
            for algorithm in [at.algorithm()] if names is None else [*at.algorithms(names), at.local()]:
                check(algorithm, algorithm.name)
        return self

    def check_tables(self) -> list[Recipe]:
        """The same of all but the methods; what is returned is the recipe at every point of its sweep."""
        self.length, self.figures  # noqa: B018
        points = [at for _, at in self.sweep()]
        for at in points:
            at.length, at.model(), at.people(), at.settings(), sealing(at._table("vault"))
        return points

    def unsealed(self) -> Recipe:
        """The same, if it has no [vault]."""
        if self._table("vault"):
            raise SettingError(
                f"[vault] of {self.name} is for descant run: here many trainings would seal coresets into one vault. "
                "Leave it out: --set 'vault={}'."
            )
        return self

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _table(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.tables.get(name, {})
        return found

    def _list(self, name: str) -> list[Mapping[str, Any]]:
        found = self.tables.get(name, [])
        return [found] if isinstance(found, Mapping) else list(found)

    def settings(self) -> dict[str, Any]:
        """What a federation takes beside model, parties, algorithm and seed."""
        model = self._table("model")
        found = {
            name: at_address(model[name], f"The {name!r} of [model]") for name in ("loss", "metric") if name in model
        }
        return {**found, "solver": self.solver(), "engine": self.engine()}

    def _algorithm(self, given: Mapping[str, Any], where: str) -> Algorithm:
        ends = ending(given, self._table("run").get("total"))
        return method(ends, where, self._table("work"), self._list("wrap"))

    def _methods(self) -> list[Mapping[str, Any]]:
        return [*self._list("methods"), *filter(None, self._list("method"))]

    def _warn_beyond(self) -> None:
        work = self.solver().hyper.work
        warn_beyond(self.length.total, work, self._methods() or [{}], self.length.rounds)

    def _population(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from ..parties import POPULATIONS

        return chosen(self._table("parties"), "[parties]", "population", POPULATIONS)

    def _net(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from ..models import NETS

        make, given = chosen(self._table("model"), "[model]", "net", NETS)
        return make, {key: value for key, value in given.items() if key not in ("loss", "metric")}


def read(source: str | Path, home: Path | None = None) -> Recipe:
    """The recipe in a file, or in a text if there is a line break in it; a file's paths go from its folder, or home."""
    path = None if isinstance(source, str) and "\n" in source else Path(source)
    if path is None:
        text, name = str(source), "recipe"
    else:
        try:
            text, name = path.read_text(encoding="utf-8-sig"), path.stem
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise SettingError(f"The recipe {source} cannot be read: {reason}.") from error
    tables = toml_io.read(text, f"The recipe {name}")
    return _checked(Recipe(tables if path is None else located(tables, home or path.parent), name))


def _checked(recipe: Recipe) -> Recipe:
    """The same, if its tables are those of a recipe."""
    check_shape(recipe.tables, recipe.name)
    if recipe.tables.get("quick"):
        recipe.quick()
    return recipe
