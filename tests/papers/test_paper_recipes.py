"""The papers' experiments: every recipe is right, our numbers stand beside the printed ones and the kept ones."""

import html
import json
import re
import tomllib
from pathlib import Path

import pytest

from descant import papers
from descant.config import read_recipe
from descant.errors import SettingError, StateError
from descant.papers import expected_results, recipe_index
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


# ── the shelf ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", papers.experiment_keys())
def test_every_recipe_is_right_in_both_forms(key):
    """Without their data: names, keywords, types, bounds; a figure's methods are those of the recipe."""
    places = {"fed_plus": ("v1", "v2"), "representation_matching": ("table",)}.get(key.partition("/")[0], ("§", "fig"))
    for recipe in (papers.load_recipe(key), papers.load_recipe(key).quick_form()):
        assert recipe.check().title and recipe.about and (recipe.length.seeds >= 2 or "one seed" in recipe.about)
        names = {"Local", *(one.name for one in papers.load_recipe(key).algorithms())}  # a quick form may have fewer
        points = [at for at, _ in papers.load_recipe(key).sweep_points()]
        for figure in recipe.paper_figures:
            assert {*figure.methods, *figure.minus} <= names and figure.source.startswith(places)
            assert figure.at in points


def test_the_experiments_of_the_papers_are_there():
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
            {"parties.split": split, "work.attend": attend} for split in ("iid", "label") for attend in (10, 5)
        ]
        named = {one.name: one for one in recipe.algorithms()}
        assert [*named][:5] == ["FA", "FA+WD", "FA+RM+AH", "FA+RM", "FA+AH"], "in the order of the tables"
        assert named["FA"].tune == named["FA+WD"].tune == named["FA+RM"].tune != named["FA+AH"].tune
        assert named["FA+AH"].tune == named["FA+RM+AH"].tune and named["FA+AH"].tune.collapse_factor is None


@pytest.mark.parametrize("key", MATCHING)
def test_every_method_of_representation_matching_is_regularised_and_the_cost_is_told(key):
    recipe = papers.load_recipe(key)
    for one in [*recipe.algorithms(), *recipe.algorithms(["local"])]:
        assert any(getattr(term, "name", "") == "entropy" for term in one.terms), "§4: in all experiments"
    assert re.search(r"About [\d.]+ hours? on one core", recipe.about) and "random part" in recipe.about
    reduced = key.endswith(("cifar10", "kws"))
    assert ("width" in recipe.title and "NOT the numbers of table" in recipe.about) == reduced
    assert ("20,000\nof the 50,000" in recipe.tables["about"] or "on 20,000 of the" in recipe.about) == ("cifar" in key)


def test_what_stands_in_for_other_data_says_so():
    keys = [key for key in papers.experiment_keys() if key.endswith("sent140")]
    assert keys and all("NOT Sent140" in papers.load_recipe(key).about for key in keys)


def test_recipes_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    assert papers.papers_folder() == ROOT / "papers"
    packed = tmp_path / "_papers"
    (packed / "mine").mkdir(parents=True)
    (packed / "mine" / "tiny.toml").write_text(TINY_RECIPE)
    monkeypatch.setattr(recipe_index, "PACKED", packed)
    assert papers.papers_folder() == packed and papers.experiment_keys() == ["mine/tiny"]
    with pytest.raises(SettingError, match=r"no experiment 'mine/tinny'. Did you mean 'mine/tiny'"):
        papers.load_recipe("mine/tinny")


def test_the_wheel_has_the_recipes_where_the_package_looks_for_them():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    package = ROOT / "src" / "descant"
    assert recipe_index.PACKAGED_FOLDER.relative_to(package.parent).as_posix() == wheel["force-include"]["papers"]


# ── ours beside the paper's ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_figure_is_the_mean_of_its_methods_less_the_others(done):
    (row,) = done.figures().rows
    assert "quick form, which is smaller" in str(done.figures())
    own = papers.method_means(done.points[0].study)
    ours = [(own["FedAvg"][i] + own["RFA+"][i]) / 2 - own["Local"][i] for i in range(2)]
    assert row["ours"] == pytest.approx(sum(ours) / 2) and row["paper"] == 0.5
    assert row["± seeds"] == pytest.approx(abs(ours[0] - ours[1]) / 2)
    assert all("both (table 1): 0.500, ours" in point.study.settings["the paper"][0] for point in done.points)


def test_a_figure_of_methods_that_were_not_asked_for_is_left_out():
    recipe = read_recipe(TINY_RECIPE + FIGURES).with_values("sweep.parties.count=[3]", "run.rounds=1", "run.seeds=1")
    assert not papers.run_experiment(recipe, ["fedavg"], progress=False).paper_table().rows


def test_a_sweep_is_a_folder_of_studies_and_a_picture(done, tmp_path):
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
    papers.check_report_folder(done.recipe, out)  # it may take its own place
    (out / "mine.txt").write_text("mine")
    with pytest.raises(StateError, match=r"holds 'mine.txt', which Descant did not write"):
        papers.check_report_folder(done.recipe, out)


@pytest.mark.parametrize(
    ("helped", "said"),
    [
        (([], []), "Nothing beat training alone at any of 2 values."),
        ((["RFA"], []), "better than training alone at 1 of 2 values: parties.count=3."),
        ((["RFA"], ["RFA", "FedAvg"]), "better than training alone at all 2 values."),
    ],
)
def test_the_page_of_a_sweep_says_first_where_joining_helped(done, tmp_path, helped, said):
    done.save(tmp_path / "out")
    manifest = tmp_path / "out" / "sweep.json"
    found = json.loads(manifest.read_text())
    for point, names in zip(found["points"], helped, strict=True):
        point["helped"] = names
    manifest.write_text(json.dumps(found))
    verdict, page = papers.write_sweep(tmp_path / "out")
    assert verdict.endswith(said) and said in page.read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"points": []}', '{"points": [{"at": 1}]}'])
def test_a_damaged_sweep_is_refused_and_its_page_stays(done, tmp_path, text):
    page = done.save(tmp_path / "out")
    before = page.read_text()
    (tmp_path / "out" / "sweep.json").write_text(text)
    with pytest.raises(StateError, match=r"out cannot be used: .* Run the sweep anew"):
        papers.write_sweep(tmp_path / "out")
    assert page.read_text() == before


def test_a_sweep_through_words_is_drawn_as_cells_with_the_papers_stars(tmp_path, monkeypatch):
    from descant.reporting import plots

    drawn = {}

    def spy(file, lines, cells, metric, printed, title):
        drawn.update(lines=lines, cells=cells, printed=printed)
        return draw(file, lines, cells, metric, printed, title)

    draw = plots.draw_cells
    monkeypatch.setattr(plots, "draw_cells", spy)
    figure = FIGURES.replace('"FedAvg", "RFA+"', '"FedAvg"').replace('against = ["Local"]\n', "")
    figure = figure.replace('"parties.count" = 3', '"parties.split" = "turns"')
    recipe = read_recipe(TINY_RECIPE + figure).with_values('sweep.parties.split=["iid", "turns"]', "run.rounds=1")
    found = papers.run_experiment(recipe, progress=False)
    file = found.save(tmp_path / "out").with_name("sweep.png")
    assert file.read_bytes().startswith(b"\x89PNG") and drawn["cells"] == ["split iid", "split turns"]
    assert drawn["printed"] == {("FedAvg", 1): 0.5}, "the star stands in its method's column of its cell"
    own = [papers.method_means(point.study)["FedAvg"] for point in found.points]
    assert drawn["lines"]["FedAvg"].y.tolist() == pytest.approx([sum(seeds) / 2 for seeds in own])
    majority = [point.study.table().rows[0]["mean"] for point in found.points]
    assert drawn["lines"]["majority class"].y.tolist() == pytest.approx(majority)
    assert drawn["lines"]["FedAvg"].high.tolist() == pytest.approx([max(seeds) for seeds in own])


def test_it_prints_tables_figures_and_cost(done):
    shown = str(done)
    assert shown.count("majority class") >= 2 and "parties.count=4\n" in shown and "table 1" in shown
    assert f"{done.seconds:.0f} s for 12 trainings at 2 points" in shown


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_kept_numbers_come_back_and_agree_with_themselves(done, tmp_path):
    assert papers.read_expected("mine/tiny", True, tmp_path) is None
    assert papers.compare_with_expected(done, None) == ["No numbers of this experiment are kept to compare with."]
    file = papers.write_expected("mine/tiny", done, tmp_path)
    assert file == tmp_path / "expected.json"
    before = papers.read_expected("mine/tiny", True, tmp_path)
    assert before.seeds == (0, 1) and before.digest == done.recipe.digest and before.seconds > 0
    assert (
        papers.read_expected("mine/tiny", False, tmp_path) is None
        and papers.read_expected("mine/other", True, tmp_path) is None
    )
    assert papers.compare_with_expected(done, before) == [
        "All 6 means are within what the kept runs span (2 seeds, ± 0.005).",
    ]


def test_parties_above_each_of_the_papers_baselines_are_kept_and_shown(done, tmp_path):
    from descant.serialization.references import resolve

    recipe = done.recipe.set("sweep={}", "run.rounds=1", "run.seeds=2")
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
    assert table(earlier).splitlines()[0].endswith("| parties above alone | parties above FedAvg |")


def test_where_silos_leave_the_course_of_each_is_kept_and_shown(done, tmp_path):
    from descant.serialization.references import resolve

    recipe = done.recipe.set("sweep={}", "run.rounds=3", "run.points=3", 'work.drops={"1"=2}')
    found = papers.run_experiment(recipe, ["fedavg"], progress=False)
    papers.write_expected("mine/tiny", found, tmp_path)
    (point,) = papers.read_expected("mine/tiny", False, tmp_path).points
    course = point["global_model_curves"]["FedAvg"]
    assert course["left"] == {"1": 2} and course["rounds"] == [1, 2, 3]
    ends = [result.scores.global_model.values[1] for result in found.points[0].study.of("FedAvg")]
    assert course["mean"][1][-1] == pytest.approx(sum(ends) / 2, abs=1e-4)
    assert course["sd"][1][-1] == pytest.approx(abs(ends[0] - ends[1]) / 2, abs=1e-4)
    assert list(point["global_model_curves"]) == ["FedAvg"], "alone there is no centre"
    alone = [result.scores.personal.values[1] for result in found.points[0].study.of("Local")]
    assert point["local"][1] == pytest.approx(sum(alone) / 2, abs=1e-4)
    shown = resolve(f"{ROOT / 'docs' / 'results.py'}:silos")(point).splitlines()
    assert len(shown) == 3 and shown[2].startswith(f"| FedAvg | 1 | {course['mean'][1][1]:.3f} |")


def test_a_mean_outside_of_the_kept_span_is_named(done, tmp_path):
    file = papers.write_expected("mine/tiny", done, tmp_path)
    found = json.loads(file.read_text())
    own = found["experiments"]["tiny"]["quick"]["points"][1]["personal"]
    own["FedAvg"] = [value + 0.1 + abs(own["FedAvg"][0] - own["FedAvg"][1]) for value in own["FedAvg"]]
    file.write_text(json.dumps(found))
    (told,) = papers.compare_with_expected(done, papers.read_expected("mine/tiny", True, tmp_path))
    assert told.startswith("FedAvg at parties.count=4 came to 0.") and "over 2 seeds" in told


def test_numbers_of_other_settings_are_not_compared(done, tmp_path):
    papers.write_expected("mine/tiny", done, tmp_path)
    before = papers.read_expected("mine/tiny", True, tmp_path)
    other = papers.Experiment(done.recipe.set("work.lr=0.5"), done.points, 1.0, True)
    assert papers.compare_with_expected(other, before) == [
        "The numbers that are kept are of other settings, and are not compared."
    ]


def test_keeping_needs_a_spread_and_a_sound_file(done, tmp_path):
    single = papers.Experiment(done.recipe.set("run.seeds=1"), done.points, 1.0)
    with pytest.raises(SettingError, match="at least --seeds 2"):
        papers.write_expected("mine/tiny", single, tmp_path)
    (tmp_path / "expected.json").write_text("{")
    with pytest.raises(StateError, match=r"expected.json is damaged"):
        papers.write_expected("mine/tiny", done, tmp_path)
    (tmp_path / "expected.json").write_text('{"version": 2, "experiments": {}}')
    with pytest.raises(StateError, match="has version 2, and this Descant reads version 1"):
        papers.read_expected("mine/tiny", True, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("key", papers.experiment_keys())
def test_the_numbers_in_the_repository_are_of_the_recipes_as_they_stand(key, quick):
    before = papers.read_expected(key, quick)
    if before is None:
        return
    recipe = papers.load_recipe(key).quick_form() if quick else papers.load_recipe(key)
    assert before.digest == recipe.digest, f"run again: descant papers run {key} --expect"
    assert expected_results.TOLERANCE < 0.01 and (len(before.seeds) >= 2 or "one seed" in recipe.about)
    names = {one.name for one in recipe.algorithms()}
    assert [dict(point["at"]) for point in before.points] == [at for at, _ in recipe.sweep_points()]
    assert all(names <= set(point["personal"]) for point in before.points)


# ── the page of results ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_pages_of_results_show_what_is_kept():
    from descant.serialization.references import resolve

    block, pages = (resolve(f"{ROOT / 'docs' / 'results.py'}:{name}") for name in ("block", "pages"))
    assert {"fed-plus.md", "portfolio.md"} <= {page.name for _, page in pages()}
    for paper, page in pages():
        assert block(paper, page) in page.read_text(encoding="utf-8"), "run python docs/results.py"
    assert all(block(paper, page) for paper, page in pages() if page.name == "fed-plus.md")
