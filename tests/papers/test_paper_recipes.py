"""The papers' experiments: every recipe is valid, and our numbers are compared with printed and expected ones."""

import html
import json
import re
import tomllib
from pathlib import Path

import pytest

from descant import papers
from descant.config import read_recipe
from descant.errors import SettingError, StateError
from descant.papers import recipe_index, recorded_results
from tiny_recipe import TINY_RECIPE

ROOT = Path(__file__).parents[2]
FIGURES = """
[[paper]]
description = "both"
source = "table 1"
value = 0.5
methods = ["FedAvg", "RFA+"]
minus = ["Local"]
at = {"parties.count" = 3}
"""


@pytest.fixture(scope="module")
def done():
    recipe = read_recipe(TINY_RECIPE + FIGURES).with_values("sweep.parties.count=[3, 4]", "run.rounds=2")
    return papers.run_experiment(recipe, quick=True, progress=False)


@pytest.mark.parametrize("key", papers.experiment_keys())
def test_every_recipe_is_valid_in_both_forms(key):
    """Check names, keywords, types and bounds without data; the methods of a figure are in the recipe."""
    places = {"fed_plus": ("v1", "v2"), "representation_matching": ("table",)}.get(key.partition("/")[0], ("§", "fig"))
    for recipe in (papers.load_recipe(key), papers.load_recipe(key).quick_form()):
        assert recipe.check().title and recipe.about and (recipe.length.seeds >= 2 or "one seed" in recipe.about)
        names = {"Local", *(one.name for one in papers.load_recipe(key).algorithms())}  # a quick form may have fewer
        points = [at for at, _ in papers.load_recipe(key).sweep_points()]
        for figure in recipe.paper_figures:
            assert {*figure.methods, *figure.minus} <= names and figure.source.startswith(places)
            assert figure.at in points


def test_the_experiments_of_fed_plus_exist():
    named = ("synthetic", "shared", "mnist", "femnist", "sent140", "decay", "stragglers", "parties_mnist", "figure_1")
    assert {f"fed_plus/{name}" for name in named} <= set(papers.experiment_keys())
    found = [one.name for one in papers.load_recipe("fed_plus/mnist").algorithms()]
    assert found == [
        *("Local", "FedAvg", "FedProx", "RFA", "CoordinateMedian", "FedAvg, uniform", "RFA, uniform"),
        *("FedAvgPlus", "FedGeoMedPlus", "FedCoMedPlus", "FedPlusV1"),
    ]


MATCHING = [key for key in papers.experiment_keys() if key.startswith("representation_matching/")]


def test_representation_matching_has_its_tables():
    tables = {"mnist", "cifar10", "kws", "cifar10_full", "kws_full"}
    assert {key.partition("/")[2] for key in MATCHING} == {*tables, "coefficient", "kws_rescue", "kws_steps"}
    for number, name in enumerate(("mnist", "cifar10", "kws"), 1):
        recipe = papers.load_recipe(f"representation_matching/{name}")
        figures = recipe.paper_figures
        assert len(figures) == 20 and {figure.source for figure in figures} == {f"table {number}"}
        assert len({(figure.methods, *figure.at.values()) for figure in figures}) == 20
        assert [at for at, _ in recipe.sweep_points()] == [
            {"parties.split": split, "training.participation": participants}
            for split in ("iid", "label")
            for participants in (10, 5)
        ]
        named = {one.name: one for one in recipe.algorithms()}
        assert [*named][:5] == ["FA", "FA+WD", "FA+RM+AH", "FA+RM", "FA+AH"], "in the order of the tables"
        assert named["FA"].tune == named["FA+WD"].tune == named["FA+RM"].tune != named["FA+AH"].tune
        assert named["FA+AH"].tune == named["FA+RM+AH"].tune and named["FA+AH"].tune.collapse_factor is None


@pytest.mark.parametrize("key", MATCHING)
def test_every_method_of_representation_matching_has_the_entropy_term_and_its_cost_is_stated(key):
    recipe = papers.load_recipe(key)
    for one in [*recipe.algorithms(), *recipe.algorithms(["local"])]:
        assert any(getattr(term, "name", "") == "entropy" for term in one.terms), "§4: in all experiments"
    assert re.search(r"About [\d.]+ hours? on one core", recipe.about) and "random part" in recipe.about
    reduced = key.endswith(("cifar10", "kws"))
    assert ("width" in recipe.title and "NOT the numbers of table" in recipe.about) == reduced
    assert ("20,000\nof the 50,000" in recipe.tables["about"] or "on 20,000 of the" in recipe.about) == ("cifar" in key)


def test_recipes_on_substitute_data_say_so():
    keys = [key for key in papers.experiment_keys() if key.endswith("sent140")]
    assert keys and all("NOT Sent140" in papers.load_recipe(key).about for key in keys)


def test_recipes_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    assert papers.papers_folder() == ROOT / "papers"
    packed = tmp_path / "_papers"
    (packed / "mine").mkdir(parents=True)
    (packed / "mine" / "tiny.toml").write_text(TINY_RECIPE)
    monkeypatch.setattr(recipe_index, "PACKAGED_FOLDER", packed)
    assert papers.papers_folder() == packed and papers.experiment_keys() == ["mine/tiny"]
    with pytest.raises(SettingError, match=r"no experiment 'mine/tinny'. Did you mean 'mine/tiny'"):
        papers.load_recipe("mine/tinny")


def test_the_wheel_has_the_recipes_where_the_package_looks_for_them():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    package = ROOT / "src" / "descant"
    assert recipe_index.PACKAGED_FOLDER.relative_to(package.parent).as_posix() == wheel["force-include"]["papers"]


def test_a_figure_is_the_mean_of_its_methods_less_the_others(done):
    (row,) = done.paper_table().rows
    assert "quick form, which is smaller" in str(done.paper_table())
    own = papers.method_means(done.points[0].study)
    ours = [(own["FedAvg"][i] + own["RFA+"][i]) / 2 - own["Local"][i] for i in range(2)]
    assert row["ours"] == pytest.approx(sum(ours) / 2) and row["paper"] == 0.5
    assert row["± seeds"] == pytest.approx(abs(ours[0] - ours[1]) / 2)
    assert all("both (table 1): 0.500, ours" in point.study.settings["the paper"][0] for point in done.points)


def test_a_figure_without_its_methods_is_omitted():
    recipe = read_recipe(TINY_RECIPE + FIGURES).with_values("sweep.parties.count=[3]", "run.rounds=1", "run.seeds=1")
    assert not papers.run_experiment(recipe, ["fedavg"], progress=False).paper_table().rows


def test_a_sweep_is_saved_as_a_folder_of_studies_and_a_plot(done, tmp_path):
    out = tmp_path / "out"
    assert done.save(out) == out / "report.html"
    assert sorted(entry.name for entry in out.iterdir()) == [
        "parties.count=3",
        "parties.count=4",
        "report.html",
        "sweep.json",
        "sweep.png",
    ]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "parties.count=3" / "report.html").exists()
    found = json.loads((out / "sweep.json").read_text())
    assert [point["at"] for point in found["points"]] == [{"parties.count": 3}, {"parties.count": 4}]
    assert found["figures"][0]["paper"] == 0.5 and found["seconds"] > 0
    page = (out / "report.html").read_text()
    assert 'href="parties.count%3D4/report.html"' in page and "data:image/png;base64," in page and "table 1" in page
    assert all(point["verdict"].split(".")[0] in html.unescape(page) for point in found["points"])
    papers.check_report_folder(done.recipe, out)  # it may replace its own output
    (out / "mine.txt").write_text("mine")
    with pytest.raises(StateError, match=r"holds 'mine.txt', which Descant did not write"):
        papers.check_report_folder(done.recipe, out)


@pytest.mark.parametrize(
    ("helped", "verdict_end"),
    [
        (([], []), "Nothing beat training alone at any of 2 values."),
        ((["RFA"], []), "better than training alone at 1 of 2 values: parties.count=3."),
        ((["RFA"], ["RFA", "FedAvg"]), "better than training alone at all 2 values."),
    ],
)
def test_the_sweep_report_starts_with_where_joining_helped(done, tmp_path, helped, verdict_end):
    done.save(tmp_path / "out")
    manifest = tmp_path / "out" / "sweep.json"
    found = json.loads(manifest.read_text())
    for point, names in zip(found["points"], helped, strict=True):
        point["helped"] = names
    manifest.write_text(json.dumps(found))
    verdict, page = papers.write_sweep(tmp_path / "out")
    assert verdict.endswith(verdict_end) and verdict_end in page.read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"points": []}', '{"points": [{"at": 1}]}'])
def test_a_damaged_sweep_is_rejected_and_its_report_is_unchanged(done, tmp_path, text):
    page = done.save(tmp_path / "out")
    before = page.read_text()
    (tmp_path / "out" / "sweep.json").write_text(text)
    with pytest.raises(StateError, match=r"out cannot be used: .* Run the sweep again"):
        papers.write_sweep(tmp_path / "out")
    assert page.read_text() == before


def test_a_sweep_over_words_is_drawn_as_cells_with_the_paper_values(tmp_path, monkeypatch):
    from descant.reporting import plots

    drawn = {}

    def spy(file, lines, cells, metric, paper_values, title):
        drawn.update(lines=lines, cells=cells, paper_values=paper_values)
        return draw(file, lines, cells, metric=metric, paper_values=paper_values, title=title)

    draw = plots.draw_cells
    monkeypatch.setattr(plots, "draw_cells", spy)
    figure = FIGURES.replace('"FedAvg", "RFA+"', '"FedAvg"').replace('minus = ["Local"]\n', "")
    figure = figure.replace('"parties.count" = 3', '"parties.split" = "round_robin"')
    recipe = read_recipe(TINY_RECIPE + figure).with_values('sweep.parties.split=["iid", "round_robin"]', "run.rounds=1")
    found = papers.run_experiment(recipe, progress=False)
    file = found.save(tmp_path / "out").with_name("sweep.png")
    assert file.read_bytes().startswith(b"\x89PNG") and drawn["cells"] == ["split iid", "split round_robin"]
    assert drawn["paper_values"] == {("FedAvg", 1): 0.5}, "the star stands in its method's column of its cell"
    own = [papers.method_means(point.study)["FedAvg"] for point in found.points]
    assert drawn["lines"]["FedAvg"].y.tolist() == pytest.approx([sum(seeds) / 2 for seeds in own])
    majority = [point.study.table().rows[0]["mean"] for point in found.points]
    assert drawn["lines"]["majority class"].y.tolist() == pytest.approx(majority)
    assert drawn["lines"]["FedAvg"].high.tolist() == pytest.approx([max(seeds) for seeds in own])


def test_it_prints_tables_figures_and_cost(done):
    shown = str(done)
    assert shown.count("majority class") >= 2 and "parties.count=4\n" in shown and "table 1" in shown
    assert f"{done.seconds:.0f} s for 12 trainings at 2 points" in shown


def test_expected_results_round_trip_and_agree_with_themselves(done, tmp_path):
    assert papers.read_expected("mine/tiny", True, tmp_path) is None
    assert papers.compare_with_expected(done, None) == [
        "There are no expected results of this experiment to compare with."
    ]
    file = papers.write_expected("mine/tiny", done, tmp_path)
    assert file == tmp_path / "expected.json"
    before = papers.read_expected("mine/tiny", True, tmp_path)
    assert before.seeds == (0, 1) and before.digest == done.recipe.digest and before.seconds > 0
    assert (
        papers.read_expected("mine/tiny", False, tmp_path) is None
        and papers.read_expected("mine/other", True, tmp_path) is None
    )
    assert papers.compare_with_expected(done, before) == [
        "All 6 means are within the range of the expected results (2 seeds, ± 0.005).",
    ]


def test_parties_above_each_baseline_are_recorded_and_shown(done, tmp_path):
    from descant.serialization.references import resolve

    recipe = done.recipe.with_values("sweep={}", "run.rounds=1", "run.seeds=2")
    found = papers.run_experiment(recipe, ["fedavg", "fedprox", "rfa", "comed", "fedavg+"], progress=False)
    papers.write_expected("mine/tiny", found, tmp_path)
    (point,) = papers.read_expected("mine/tiny", False, tmp_path).points
    above = ["above local", "above FedAvg", "above FedProx", "above RFA", "above CoordinateMedian"]
    assert [name for name in point if name.startswith("above")] == above
    study = found.points[0].study
    assert point["above RFA"]["FedAvgPlus"] == int((study.gains("FedAvgPlus", "RFA") > 0).sum())
    table = resolve(f"{ROOT / 'docs' / 'results.py'}:table")
    assert "| parties above RFA | parties above CoordinateMedian |" in table(point).splitlines()[0]
    earlier = {name: point[name] for name in point if name not in above[2:]}
    assert table(earlier).splitlines()[0].endswith("| parties above local | parties above FedAvg |")


def test_global_model_curves_of_silos_that_leave_are_recorded_and_shown(done, tmp_path):
    from descant.serialization.references import resolve

    recipe = done.recipe.with_values("sweep={}", "run.rounds=3", "run.points=3", 'training.last_rounds={"1"=2}')
    found = papers.run_experiment(recipe, ["fedavg"], progress=False)
    papers.write_expected("mine/tiny", found, tmp_path)
    (point,) = papers.read_expected("mine/tiny", False, tmp_path).points
    curve = point["global_model_curves"]["FedAvg"]
    assert curve["left"] == {"1": 2} and curve["rounds"] == [1, 2, 3]
    ends = [result.scores.global_model.values[1] for result in found.points[0].study.of("FedAvg")]
    assert curve["mean"][1][-1] == pytest.approx(sum(ends) / 2, abs=1e-4)
    assert curve["sd"][1][-1] == pytest.approx(abs(ends[0] - ends[1]) / 2, abs=1e-4)
    assert list(point["global_model_curves"]) == ["FedAvg"], "local training has no global model"
    alone = [result.scores.personal.values[1] for result in found.points[0].study.of("Local")]
    assert point["local"][1] == pytest.approx(sum(alone) / 2, abs=1e-4)
    shown = resolve(f"{ROOT / 'docs' / 'results.py'}:silos")(point).splitlines()
    assert len(shown) == 3 and shown[2].startswith(f"| FedAvg | 1 | {curve['mean'][1][1]:.3f} |")


def test_a_mean_outside_the_expected_range_is_named(done, tmp_path):
    file = papers.write_expected("mine/tiny", done, tmp_path)
    found = json.loads(file.read_text())
    own = found["experiments"]["tiny"]["quick"]["points"][1]["personal"]
    own["FedAvg"] = [value + 0.1 + abs(own["FedAvg"][0] - own["FedAvg"][1]) for value in own["FedAvg"]]
    file.write_text(json.dumps(found))
    (message,) = papers.compare_with_expected(done, papers.read_expected("mine/tiny", True, tmp_path))
    assert message.startswith("FedAvg at parties.count=4 came to 0.") and "over 2 seeds" in message


def test_results_of_other_settings_are_not_compared(done, tmp_path):
    papers.write_expected("mine/tiny", done, tmp_path)
    before = papers.read_expected("mine/tiny", True, tmp_path)
    other = papers.Experiment(done.recipe.with_values("training.lr=0.5"), done.points, 1.0, True)
    assert papers.compare_with_expected(other, before) == [
        "The expected results have other settings and are not compared."
    ]


def test_expected_results_need_two_seeds_and_a_valid_file(done, tmp_path):
    single = papers.Experiment(done.recipe.with_values("run.seeds=1"), done.points, 1.0)
    with pytest.raises(SettingError, match="at least --seeds 2"):
        papers.write_expected("mine/tiny", single, tmp_path)
    (tmp_path / "expected.json").write_text("{")
    with pytest.raises(StateError, match=r"expected.json is damaged"):
        papers.write_expected("mine/tiny", done, tmp_path)
    (tmp_path / "expected.json").write_text('{"version": 1, "experiments": {}}')
    with pytest.raises(StateError, match="has version 1, and this Descant reads version 2"):
        papers.read_expected("mine/tiny", True, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("key", papers.experiment_keys())
def test_expected_results_in_the_repository_match_the_current_recipes(key, quick):
    before = papers.read_expected(key, quick)
    if before is None:
        return
    recipe = papers.load_recipe(key).quick_form() if quick else papers.load_recipe(key)
    assert before.digest == recipe.digest, f"run again: descant papers run {key} --update-expected"
    assert recorded_results.TOLERANCE < 0.01 and (len(before.seeds) >= 2 or "one seed" in recipe.about)
    names = {one.name for one in recipe.algorithms()}
    assert [dict(point["at"]) for point in before.points] == [at for at, _ in recipe.sweep_points()]
    assert all(names <= set(point["personal"]) for point in before.points)


def test_result_pages_show_the_expected_results():
    from descant.serialization.references import resolve

    block, pages = (resolve(f"{ROOT / 'docs' / 'results.py'}:{name}") for name in ("block", "pages"))
    assert {"fed-plus.md", "portfolio.md"} <= {page.name for _, page in pages()}
    for paper, page in pages():
        assert block(paper, page) in page.read_text(encoding="utf-8"), "run python docs/results.py"
    assert all(block(paper, page) for paper, page in pages() if page.name == "fed-plus.md")
