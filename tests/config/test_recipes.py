"""Recipes run as written, read back the same, and name their errors before any training."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import Algorithm, DescantWarning, Federation, Sgd, algorithms, compare, models, parties
from descant.aggregation.aggregators import GeometricMedian
from descant.algorithms.method_aliases import METHOD_NAMES, canonical_method_name
from descant.algorithms.participation import FirstParties, Sample, Stragglers, all_parties
from descant.config import Recipe, read_recipe, toml_io
from descant.core.algorithm import Hyper, ParticipationContext
from descant.core.settings import ExponentialDecay
from descant.engines import VirtualClock
from descant.errors import SettingError
from tiny_recipe import TINY_RECIPE


def tiny(*changes: str) -> Recipe:
    return read_recipe(TINY_RECIPE).with_values(*changes)


plain = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\r"))
)
values = st.recursive(plain, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3))
tables = st.dictionaries(st.text(max_size=8), values, max_size=4)


@settings(max_examples=40)
@given(tables)
def test_tables_read_back_as_written(found):
    assert toml_io.read(toml_io.write(found), "it") == found


@given(plain)
def test_a_value_on_the_command_line_is_parsed_as_toml(one):
    assert toml_io.parse_value(toml_io.write({"x": one}).removeprefix("x = ").rstrip("\n")) == one


def test_a_recipe_with_changes_reads_back_the_same():
    changed = tiny("training.lr=0.3", "method.rho=0.5", "methods.0.name=mine").quick_form()
    again = read_recipe(changed.text)
    assert again.tables == changed.tables and again.digest == changed.digest
    assert again.solver() == Sgd(lr=0.3, steps=4) and again.length.rounds == 1
    assert [one.name for one in again.algorithms()] == ["mine", "RFA+"]


@pytest.mark.parametrize("change", ["training.lr=0.2", "parties.count=5", "methods.1.alpha=0.1", "method.rho=1.0"])
def test_the_digest_covers_what_decides_the_results(change):
    assert tiny(change).digest != tiny().digest


def test_a_total_of_work_determines_the_number_of_rounds():
    text = TINY_RECIPE.replace("rounds = ", "total = 50 # ")
    recipe = read_recipe(text).with_values("training.steps=20")
    assert "total" in text and recipe.length.rounds == 3 and recipe.with_values("training.steps=25").length.rounds == 2
    with pytest.raises(SettingError, match="or a 'total' of work from which they follow, not both"):
        recipe.with_values("run.rounds=3").length  # noqa: B018
    assert recipe.with_values("run.total=20").length.rounds == 1
    with pytest.raises(SettingError, match=r"'total' of \[run\], 19, is less than the work of one round, 20"):
        recipe.with_values("run.total=19").check()
    with pytest.warns(DescantWarning, match=r"3 rounds of 20 are 60, more than the 'total' of 50 in \[run\]"):
        recipe.study(progress=False)


AGENTS = """
[run]
total = 1000
[parties]
population = "agents"
count = 2
test_episodes = 0
[model]
net = "mlp"
inputs = 4
outputs = 2
[training]
solver = "dqn"
steps = 100
[method]
algorithm = "fedrl"
"""


def test_a_total_of_work_follows_the_period_of_the_method():
    recipe = read_recipe(AGENTS)
    assert recipe.length.rounds == 10
    assert recipe.with_values("method.period=500").length.rounds == 2
    assert recipe.with_values("method.period=100", "method.factor=2.0").length.rounds == 4  # 100, 200, 400, 300
    with pytest.raises(SettingError, match="A period of 2000 is longer than the run of 1000"):
        recipe.with_values("method.period=2000").check(None)
    with pytest.raises(SettingError, match=r"'total' of FedRL, 500, and that of \[run\], 1000, must be the same"):
        recipe.with_values("method.period=100", "method.total=500").check(None)
    two = read_recipe(
        AGENTS.replace("[method]", "[[methods]]") + '[[methods]]\nalgorithm = "fedrl"\nname = "b"\nperiod = 50\n'
    )
    with pytest.raises(SettingError, match=r"'total' of \[run\], 1000, are 10, 20 rounds.*Give 'rounds' instead"):
        two.check()
    short = recipe.with_values("run.total=30", "training.steps=10", "method.period=20")
    done = short.federation().fit(short.length.rounds, progress=False)
    assert [entry["work"] for entry in done.history_] == [20, 10]


def test_speeds_put_a_recipe_on_a_virtual_clock():
    engine = tiny().with_values('run.speeds={"0"=0.5}').engine()
    assert isinstance(engine, VirtualClock) and engine.speeds == {"0": 0.5} and engine.engine is tiny().engine()


@pytest.mark.parametrize(
    "change",
    [
        "run.seeds=9",
        "run.engine=processes",
        "run.address=here:1",
        "run.workers=3",
        "title=other",
        "parties.data=/here",
    ],
)
def test_the_digest_ignores_seeds_engine_and_texts(change):
    assert tiny(change).digest == tiny().digest


def test_a_recipe_equals_the_same_federation_in_python():
    algorithm = algorithms.FedGeoMedPlus(alpha=ExponentialDecay(1.0, 0.9), rho=0.1)
    by_hand = Federation(
        lambda: models.logistic(64, 10), parties.digits(count=4), algorithm, lr=0.1, steps=4, participation=3, seed=5
    )
    assert tiny().federation(5).fit(3, progress=False).hash() == by_hand.fit(3, progress=False).hash()


def test_the_study_of_a_recipe_equals_compare():
    methods = [
        algorithms.FedAvg(),
        dataclasses.replace(algorithms.FedPlusV1(aggregate=GeometricMedian(), alpha=0.5), name="RFA+"),
    ]
    by_hand = compare(
        methods,
        lambda: models.logistic(64, 10),
        parties.digits(count=4),
        rounds=3,
        seeds=2,
        progress=False,
        lr=0.1,
        steps=4,
        participation=3,
    )
    study = tiny().study(progress=False)
    assert study.methods == by_hand.methods == ("Local", "FedAvg", "RFA+")
    assert study.table().to_json_rows() == by_hand.table().to_json_rows()
    assert (
        study.settings["title"] == "Two methods on digits"
        and read_recipe(study.settings["recipe"]).digest == tiny().digest
    )


def test_selected_methods_keep_the_settings_of_the_recipe():
    found = tiny().algorithms(["fed+v1", "ditto"])
    assert [one.name for one in found] == ["RFA+", "Ditto"] and found[0].terms[0].strength == 0.5


def test_every_public_method_has_a_recipe_name():
    makers = {name for name in algorithms.__all__ if callable(getattr(algorithms, name))} - {
        *(
            "FirstParties",
            "RandomAvailability",
            "Dropouts",
            "PeriodicParticipation",
            "PoissonSampling",
            "Hinge",
            "Period",
            "Polynomial",
            "Sample",
            "PresenceSpan",
            "Stragglers",
            "Timetable",
        )
    }
    named = [*algorithms.ALGORITHMS.values(), *algorithms.WRAPPERS.values()]
    assert {make.__name__ for make in named} == makers
    for one in tiny().algorithms(list(algorithms.ALGORITHMS)):
        assert isinstance(one, Algorithm) and one.participation == Sample(3)


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("fedavg+", "fedavg+"),
        ("fedavgplus", "fedavg+"),
        ("FedAvgPlus", "fedavg+"),
        ("fedplus", "fed+"),
        ("rfa+", "fedgeomed+"),
        ("fedgeomed+", "fedgeomed+"),
        ("fedgeomedplus", "fedgeomed+"),
        ("comed+", "fedcomed+"),
        ("fedcomedplus", "fedcomed+"),
        ("FedPlusV1", "fed+v1"),
        ("Fed-Prox", "fedprox"),
        ("CoordinateMedian", "comed"),
        ("Standalone", "local"),
    ],
)
def test_other_spellings_of_a_method_are_stored_and_digested_under_its_canonical_name(spelling, canonical):
    method = "method={algorithm='%s'}"
    recipe = tiny(method % spelling, f"methods=[{{algorithm='{spelling}'}}]")
    assert recipe.tables["method"]["algorithm"] == recipe.tables["methods"][0]["algorithm"] == canonical
    assert recipe.digest == tiny(method % canonical, f"methods=[{{algorithm='{canonical}'}}]").digest
    assert recipe.algorithm().name == algorithms.ALGORITHMS[canonical]().name
    assert recipe.algorithms([spelling])[0].name == recipe.algorithm().name
    swept = tiny(f"sweep.method.algorithm=['{spelling}']")
    assert [at.tables["method"]["algorithm"] for _, at in swept.sweep_points()] == [canonical]


def test_every_method_is_found_by_its_name_in_python():
    assert set(METHOD_NAMES) == set(algorithms.ALGORITHMS)
    for name, make in algorithms.ALGORITHMS.items():
        assert canonical_method_name(make.__name__) == canonical_method_name(name) == name


MINE = """
from torch import nn
from descant import parties

def net(width: int = 10):
    return nn.Linear(64, width)

def population(count: int, data: str = ""):
    return parties.digits(count=count)
"""


def test_custom_models_and_parties_are_loaded_by_address(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    parts = {
        "parties": {"population": f"{tmp_path}/mine.py:population", "count": 3},
        "model": {"net": f"{tmp_path}/mine.py:net"},
    }
    recipe = read_recipe(Recipe({**tiny().tables, **parts}).text)
    assert len(recipe.federation().population) == 3
    assert recipe.with_data_folder(tmp_path).tables["parties"]["data"] == str(tmp_path)
    with pytest.raises(SettingError, match=r"no key of \[model\] 'widht'. Did you mean 'width'"):
        recipe.with_values("model.widht=3").check()
    assert "data" not in tiny().with_data_folder(tmp_path).tables["parties"]


def test_a_sweep_visits_every_combination():
    swept = tiny("sweep.parties.count=[3, 4]", "sweep.training.lr=[0.1, 0.2]")
    found = [(at, one.tables["parties"]["count"], one.solver().lr) for at, one in swept.sweep_points()]
    assert [(count, lr) for _, count, lr in found] == [(3, 0.1), (3, 0.2), (4, 0.1), (4, 0.2)]
    assert found[1][0] == {"parties.count": 3, "training.lr": 0.2}
    assert [at for at, _ in tiny().sweep_points()] == [{}] and swept.has_sweep and not tiny().has_sweep


def louder(base: Algorithm, factor: float = 2.0, words: tuple[str, ...] = ()) -> Algorithm:
    """Wrap a method with one more proximal term."""
    terms = (*base.terms, *algorithms.FedProx(mu=factor).terms)
    terms = tuple(dataclasses.replace(term, name=f"{term.name}{k}") for k, term in enumerate(terms))
    return dataclasses.replace(base, name=f"{base.name}+L{factor:g}", terms=terms)


@pytest.fixture
def wrappers(monkeypatch):
    monkeypatch.setattr(algorithms, "WRAPPERS", {"louder": louder})


def strengths(algorithm: Algorithm) -> list[float]:
    return [term.strength for term in algorithm.terms]


WRAPPED = """
[[wrap]]
wrapper = "louder"
factor = 3

"""


@pytest.mark.usefixtures("wrappers")
def test_common_wrappers_are_inside_the_wrappers_of_a_method():
    recipe = read_recipe(TINY_RECIPE + WRAPPED).with_values(
        'methods.0.wrap=[{wrapper="louder"}, {wrapper="louder", factor=4.0, words=["a"]}]'
    )
    fedavg, named = recipe.check().algorithms()
    assert strengths(fedavg) == [3, 2.0, 4.0] and fedavg.name == "FedAvg+L3+L2+L4"
    assert strengths(named) == [0.5, 3] and named.name == "RFA+", "a given name stays"
    assert recipe.algorithm().name == "FedGeoMedPlus+L3" and fedavg.participation == Sample(3)
    assert read_recipe(recipe.text).tables == recipe.tables


@pytest.mark.usefixtures("wrappers")
def test_the_local_baseline_is_wrapped_and_keeps_its_name():
    recipe = read_recipe(TINY_RECIPE + WRAPPED).with_values("run.rounds=1", "run.seeds=1")
    for names in ([], ["fedavg"], ["local", "fedavg"]):
        study = recipe.study(names, progress=False)
        local = next(one for one in study.settings["algorithms"] if one["name"] == "Local")
        assert [term["strength"] for term in local["terms"]] == [3] and study.methods.count("Local") == 1
    plain = read_recipe(TINY_RECIPE).with_values("run.rounds=1", "run.seeds=1").study(progress=False)
    assert study.of("Local")[0].scores.personal.mean != plain.of("Local")[0].scores.personal.mean


@pytest.mark.usefixtures("wrappers")
def test_wrappers_change_the_digest_and_can_be_swept():
    recipe = read_recipe(TINY_RECIPE + WRAPPED)
    assert recipe.digest not in (read_recipe(TINY_RECIPE).digest, recipe.with_values("wrap.0.factor=1.0").digest)
    own = recipe.with_values('methods.0.wrap=[{wrapper="louder"}]')
    assert own.digest != recipe.digest
    assert strengths(recipe.with_values("wrap.0.factor=1.0").algorithms()[0]) == [1.0]
    swept = own.with_values("sweep.wrap.0.factor=[1.0, 2.0]", "sweep.methods.0.wrap.0.factor=[5.0]")
    assert [strengths(one.algorithms()[0]) for _, one in swept.sweep_points()] == [[1.0, 5.0], [2.0, 5.0]]
    assert strengths(own.with_values("quick.wrap=[]").quick_form().algorithms()[0]) == [2.0]


@pytest.mark.usefixtures("wrappers")
def test_methods_can_be_selected_by_their_recipe_names():
    recipe = tiny('methods.0.name="FA"', 'methods.1={algorithm="fedavg", name="FA+L", wrap=[{wrapper="louder"}]}')
    assert [one.name for one in recipe.algorithms(["FA+L"])] == ["FA+L"]
    assert [one.name for one in recipe.algorithms(["fedavg", "FA+L"])] == ["FA", "FA+L"]


@pytest.mark.usefixtures("wrappers")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("wrap.0.wrapper=loder", "no wrapper 'loder'. Did you mean 'louder'"),
        ("wrap.0.fctor=1", r"no key of \[\[wrap\]\] louder 'fctor'. Did you mean 'factor'"),
        ("wrap.0.factor=high", r"The 'factor' of \[\[wrap\]\] louder must be a number. Got 'high'"),
        ("wrap.0.factor=-1", "The 'mu' of FedAvg.* must be >= 0. Got -1"),
        ("wrap.0.base=1", r"The 'base' of \[\[wrap\]\] louder is the method that it wraps, and cannot be given"),
        ("wrap=[{factor=1}]", r"\[\[wrap\]\] must have wrapper = one of louder, or \"module:function\""),
        ("wrap=3", r"\[\[wrap\]\] of recipe must be tables. Got 3"),
        ("wrap.0.wrapper=math:sqrt", r"no key of \[\[wrap\]\] math:sqrt 'base'"),
        ("methods.0.wrap=louder", r"The 'wrap' of \[\[methods\]\] fedavg must be tables. Got 'louder'"),
        (
            "methods.0.wrap=[{wrapper='louder', wrods=1}]",
            r"no key of the wrap of \[\[methods\]\] fedavg louder 'wrods'",
        ),
        ("methods.1.name='FedAvg+L2'", "Two methods of recipe are called 'FedAvg\\+L2'"),
    ],
)
def test_errors_in_a_wrapper_name_the_setting(change, message):
    with pytest.raises(SettingError, match=message):
        read_recipe(TINY_RECIPE + '[[wrap]]\nwrapper = "louder"\n').with_values(change).check()


def test_a_wrapper_that_cannot_wrap_local_training_is_rejected_early():
    with pytest.raises(SettingError, match="AdaptiveHyper cannot tune Local, which has no global model"):
        tiny('wrap=[{wrapper="adaptive"}]').check()


def test_the_word_none_is_accepted_where_none_is_allowed():
    (found,) = tiny(
        'methods=[{algorithm="fedavg", wrap=[{wrapper="adaptive", collapse_factor="none", lr="none"}]}]'
    ).algorithms()
    assert found.tune.collapse_factor is None and found.tune.lr is None and found.name == "FedAvg+AH"
    with pytest.raises(SettingError, match=r"The 'rho' of \[method\] fedgeomed\+ must be a number. Got 'none'"):
        tiny("method.rho=none").check(None)


def test_a_custom_wrapper_is_loaded_by_address(tmp_path):
    code = "import dataclasses\n\ndef twice(base, suffix: str = '!'):\n"
    (tmp_path / "mine.py").write_text(
        code + "    return dataclasses.replace(base, name=base.name + suffix)\n\ndef none(base):\n    return 3\n"
    )
    recipe = tiny(f'wrap=[{{wrapper="{tmp_path}/mine.py:twice", suffix="?"}}]')
    assert [one.name for one in recipe.check().algorithms()] == ["FedAvg?", "RFA+"]
    with pytest.raises(SettingError, match=r"mine.py:none must return an Algorithm. Got 3"):
        tiny(f'wrap=[{{wrapper="{tmp_path}/mine.py:none"}}]').check()


NAMES = [str(k) for k in range(20)]


@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.9]), st.integers(2, 30))
def test_both_straggler_policies_have_the_same_stragglers(seed, share, work):
    kept, dropped = (
        Stragglers(share, Sample(10), policy)(
            ParticipationContext(1, NAMES, Hyper(work=work), rng=np.random.default_rng(seed))
        )
        for policy in ("keep", "drop")
    )
    slow = {name for name, hyper in kept.items() if hyper.work < work}
    assert len(kept) == 10 and len(slow) == round(share * 10)
    assert all(1 <= kept[name].work <= work - 1 for name in slow)
    assert dropped == {name: hyper for name, hyper in kept.items() if name not in slow}


@given(st.integers(0, 1))
def test_a_straggler_never_works_more_than_asked(work):
    context = ParticipationContext(1, NAMES, Hyper(work=work), rng=np.random.default_rng(0))
    assert all(one.work == work for one in Stragglers(0.5)(context).values())


def test_a_round_that_drops_all_parties_is_rejected_early():
    with pytest.raises(SettingError, match="All 1 parties of a round straggle"):
        tiny("training.stragglers=0.9", "training.straggler_policy=drop", "training.participation=1").federation().fit(
            1, progress=False
        )


def test_only_eligible_parties_train_and_all_are_evaluated():
    fed = tiny("training.eligible_parties=2").federation().fit(3, progress=False)
    assert {name for round in range(3) for name in ("0", "1")} == set(fed.state.personal_models.names())
    assert len(fed.scores().names) == 4


def test_a_method_may_override_the_participation_of_the_recipe():
    found = tiny(
        "training.stragglers=0.5", "training.eligible_parties=2", "methods.0.straggler_policy=drop"
    ).algorithms()
    assert [one.participation for one in found] == [
        Stragglers(0.5, FirstParties(2, Sample(3)), "drop"),
        Stragglers(0.5, FirstParties(2, Sample(3)), "keep"),
    ]
    assert read_recipe(TINY_RECIPE.replace("participation = 3", "")).algorithms()[0].participation is all_parties


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.lr=fast", r"The 'lr' of \[training\] must be a number. Got 'fast'"),
        ("training.lr=-1", r"The 'lr' of \[training\] must be > 0. Got -1"),
        ("training.leer=1", r"no key of \[training\] 'leer'. Did you mean 'lr'"),
        ("training.stragglers=2.0", r"The 'stragglers' of \[training\] must be >= 0 and <= 1. Got 2.0"),
        ("training.straggler_policy=kep", "must be one of 'keep', 'drop'. Got 'kep'"),
        ("run.rounds=0", r"The 'rounds' of \[run\] must be a whole number >= 1. Got 0"),
        ("run.rounds=true", r"The 'rounds' of \[run\] must be a whole number. Got True"),
        ("run.engine=spark", "must be one of 'in-process', 'processes', 'ray'. Got 'spark'"),
        ("run.round=3", "Did you mean 'rounds'"),
        ("parties.cuont=1", r"no key of \[parties\] 'cuont'. Did you mean 'count'"),
        ("parties.count=1.5", r"The 'count' of \[parties\] must be a whole number. Got 1.5"),
        ("parties.population=digit", "no population 'digit'. Did you mean 'digits'"),
        ("parties.population=3", r"\[parties\] must have population = one of"),
        ("parties=3", r"\[parties\] of recipe must be a table"),
        ("model.net=nowhere:net", "no module 'nowhere'"),
        ("model.net=logistc", "Did you mean 'logistic'"),
        ("model.net=mine.py", r'no net \'mine.py\'. Allowed: .* One of your own is "file.py:function" or "module:func'),
        ("method.algorithm=fedavg++", "Did you mean 'fedavg\\+'"),
        ("method.algorithm=fedavgpluss", "Did you mean 'fedavg\\+'"),
        ("method.algorithm=FedGeoMadPlus", "Did you mean 'fedgeomed\\+'"),
        ("method.alpha=true", r"The 'alpha' of \[method\] fedgeomed\+ must be a number or a table"),
        ("method.alpha={stat=1}", "no key of Decay 'stat'. Did you mean 'start'"),
        ("method.alpha={is='Decays'}", "no part 'Decays'. Did you mean 'Decay'"),
        ("method.rho=-1.0", "The 'rho' of FedGeoMedPlus must be > 0. Got -1.0"),
        (
            "method.aggregate_over=some",
            r"The 'aggregate_over' of \[method\] fedgeomed\+ must be 'active' or 'all'. Got 'some'",
        ),
        ("method.name=3", "must be a text in quotes"),
        ("methods.0.mu=1", r"no key of \[\[methods\]\] fedavg 'mu'"),
        ("methods.7.mu=1", "'7' must be a number from 0 to 1"),
        ("methods=3", r"\[\[methods\]\] of recipe must be tables"),
        ("sweep.run.rounds=3", r"The 'run.rounds' of \[sweep\] must be a list"),
        ("sweep.training.lr=[-1]", r"The 'lr' of \[training\] must be > 0"),
        ("sweep.trainin.lr=[0.1, 0.2]", "no part of recipe 'trainin'. Did you mean 'training'"),
        ("sweep.run.ronds=[1, 2]", r"no key of \[run\] 'ronds'"),
        ("training.participation=0", r"The 'participation' of \[training\] must be a whole number >= 1. Got 0"),
        ("method.participation=0", r"The 'participation' of \[method\] fedgeomed\+ must be a whole number >= 1. Got 0"),
        ("training.eligible_parties=0", r"The 'eligible_parties' of \[training\] must be a whole number >= 1. Got 0"),
        ("model.loss=5", r"The 'loss' of \[model\] must be \"module:function\".*Got 5"),
        ("model.metric=math:pi", r"The 'metric' of \[model\] must be .* a function or a class. Got 'math:pi'"),
        (
            "methods.1.name=Local",
            r"'Local' is the name of local training, which every table has. Give \[\[methods\]\] ",
        ),
        ("methods.1.name=FedAvg", r"Two methods of recipe are called 'FedAvg'. Give one its own: name = "),
        ("quick.run=3", r"\[run\] of recipe must be a table"),
        ("quick.ruin=1", r"no part of \[quick\] 'ruin'. Did you mean 'run'"),
        ("partys.count=1", "no part of recipe 'partys'. Did you mean 'parties'"),
        ("version=2", "a recipe of version 2, and this Descant reads version 1 and older ones. Install a newer"),
        ("version=soon", "The 'version' of recipe must be a whole number"),
        ("title.more=1", "which is not a table"),
        ("rounds", "--set takes table.key=value"),
        (
            "paper=[{description='x', source='y', value='z', methods=[]}]",
            r"The 'value' of \[\[paper\]\] must be a number",
        ),
    ],
)
def test_errors_in_a_recipe_are_named_before_anything_is_built(change, message, monkeypatch):
    monkeypatch.setattr("descant.parties.population.from_arrays", None)
    with pytest.raises(SettingError, match=message):
        tiny(change).check().check(None)


def test_a_missing_part_of_a_recipe_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"has no \[method\] to run"):
        tiny("method={}").federation()
    with pytest.raises(SettingError, match="names no method"):
        tiny("method={}", "methods=[]").check()
    with pytest.raises(SettingError, match=r"has no \[quick\] form"):
        tiny("quick={}").quick_form()
    with pytest.raises(SettingError, match=r"is not TOML: .*line 2"):
        read_recipe("a = 1\nb\nc = 2")
    with pytest.raises(SettingError, match=r"nowhere.toml cannot be read: No such file"):
        read_recipe(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not text in UTF-8"):
        read_recipe(tmp_path / "bad.toml")


def test_infinities_round_trip_through_toml():
    assert toml_io.read(toml_io.write({"x": math.inf, "y": [-math.inf]}), "it") == {"x": math.inf, "y": [-math.inf]}


def test_unresolvable_annotations_do_not_stop_a_custom_model(tmp_path):
    code = "from __future__ import annotations\nfrom torch import nn\n\n"
    (tmp_path / "typed.py").write_text(
        code + "def net(inputs: Nowhere) -> nn.Module:\n    return nn.Linear(inputs, 10)\n"
    )
    made = tiny(f'model={{net="{tmp_path / "typed.py"}:net", inputs=64}}').check().model()
    assert made().in_features == 64


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "marked.toml").write_text(TINY_RECIPE, encoding="utf-8-sig")
    assert read_recipe(tmp_path / "marked.toml").tables == tiny().tables


def test_a_method_selected_twice_is_compared_once():
    assert [made.name for made in tiny().algorithms(["fedavg", "local", "fedavg"])] == ["FedAvg", "Local"]


DESKS = """
count = 2
assets = 2
window = 2
train = ["2019-01-01", "2019-01-06"]
test = ["2019-01-07", "2019-01-09"]
"""


@pytest.mark.parametrize(
    ("population", "key", "more"),
    [
        ("desks", "market", DESKS),
        ("csv", "file", "label_column = 'A'"),
        ("npz", "file", ""),
        ("spoken_words", "folder", ""),
    ],
)
def test_data_files_are_found_relative_to_their_recipe(tmp_path, monkeypatch, population, key, more):
    file = tmp_path / "sub" / "prices.csv"
    file.parent.mkdir()
    file.write_text("date,A,B\n" + "".join(f"2019-01-0{day},{day},{day}\n" for day in range(1, 10)))
    text = f"[parties]\npopulation = '{population}'\n{key} = 'prices.csv'\n{more}"
    (file.parent / "mine.toml").write_text(f"{text}\n[sweep.parties]\n{key} = ['prices.csv']\n")
    monkeypatch.chdir(tmp_path)
    there = read_recipe("sub/mine.toml")
    assert there.tables["parties"][key] == there.tables["sweep"]["parties"][key][0] == "sub/prices.csv"
    kept = there.text
    digest = there.digest
    monkeypatch.chdir(file.parent)
    assert read_recipe("mine.toml").digest == read_recipe(kept).digest == digest  # the location does not matter
    monkeypatch.chdir("/")
    assert read_recipe(kept).tables["parties"][key] == str(file) and read_recipe(kept).text == kept
    if population == "desks":
        assert len(read_recipe(kept).population()()) == 2


@pytest.mark.parametrize("market", ["sp500", "generated", "sp50"])
def test_names_of_markets_are_not_file_paths(tmp_path, market):
    (tmp_path / "mine.toml").write_text(f"[parties]\npopulation = 'desks'\nmarket = '{market}'\n")
    found = read_recipe(tmp_path / "mine.toml")
    assert found.tables["parties"]["market"] == market and f'"{market}"' in found.text
