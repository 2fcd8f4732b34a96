"""The report of a study: pictures with content, one self-contained page, and a folder written atomically."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from torch import nn

from descant import DescantError, Federation, Study, algorithms, compare, parties
from descant.analysis import Finding, Interpolation
from descant.analysis.scores import ScoreColumn, Scores
from descant.core.settings import to_json_values
from descant.storage import check_replaceable
from descant.studies.study import TrainingResult
from descant.studies.study_report import STUDY_FILES, available_plots, draw_study_plot, study_page, write_study

NASTY = "<script>alert('x')</script> & \"$x^$\""


def study_of(parties=4, seeds=2, methods=("Local", "FedAvg"), higher=True, names=None, gain=0.1, metric="accuracy"):
    """Return a study without training: method number m scores gain·m above Local at every party."""
    names = tuple(names or (f"p{i}" for i in range(parties)))
    base = np.linspace(0.5, 0.6, len(names))
    results = []
    for number, method in enumerate(methods):
        for seed in range(seeds):
            personal = base + gain * number + 0.01 * seed
            columns = (ScoreColumn(values, higher) for values in (personal, personal - 0.2, base - 0.3))
            curve = tuple((at, float(personal.mean()) - 0.1 / at, 0.3) for at in (1, 5, 10))
            scores = Scores(
                names, metric, *columns, ScoreColumn(personal - 0.05, higher), ScoreColumn(personal, higher)
            )
            rounds = np.arange(1.0, 11.0)
            series = {"round": rounds, "loss": 1 / rounds, "change": rounds, "norm": rounds + number}
            series |= {"jump": rounds * number, "jump_sd": 0.1 * rounds}
            interpolation = Interpolation(
                names,
                metric,
                higher,
                shares=np.linspace(0, 1, 3),
                scores=np.stack([personal, personal, personal - 0.1], 1),
                previous=personal,
            )
            more = {
                "rounds_trained": np.ones(len(names)),
                "series": series,
                "interpolation": interpolation if number else None,
            }
            results.append(TrainingResult(method, seed, scores, curve, 1.0, 0, **more))
    records = [to_json_values(algorithms.Local()), to_json_values(algorithms.FedAvg())]
    return Study(tuple(results), {"rounds": 10, "seeds": seeds, "note": NASTY, "algorithms": records})


def pixels(file):
    from matplotlib.image import imread

    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return imread(file)[..., :3]


def has_color(image, code, least=40):
    color = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return (np.abs(image - color).max(-1) < 0.02).sum() >= least


@pytest.mark.parametrize("parties", [4, 31])
@pytest.mark.parametrize("kind", ["curves", "parties", "spikes", "collapse"])
def test_a_picture_shows_every_method_in_its_color(tmp_path, kind, parties):
    image = pixels(
        draw_study_plot(study_of(parties, methods=("Local", "FedAvg", "RFA")), kind, tmp_path / "made" / "it.png")
    )
    assert image.shape[0] >= 600 and image.shape[1] >= 1000
    assert all(has_color(image, code) for code in ("#000000", "#0072B2", "#D55E00"))
    assert not has_color(image, "#009E73")  # that would be a third method


def test_a_gain_is_drawn_on_the_side_that_the_title_names(tmp_path):
    for gain, above in ((0.1, True), (-0.1, False)):
        image = pixels(draw_study_plot(study_of(gain=gain), "parties", tmp_path / "it.png"))[
            100:-150, 150:1150
        ]  # inside the axes
        blue = np.abs(image - np.array([0, 0x72, 0xB2]) / 255).max(-1) < 0.02
        black = image.max(-1) < 0.02
        assert bool(np.nonzero(blue)[0].mean() < np.nonzero(black)[0].mean()) is above


@pytest.mark.parametrize("kind", ["curves", "parties", "spikes", "collapse", "interpolation"])
@pytest.mark.parametrize(
    "study",
    [
        study_of(seeds=1, methods=("Local",)),
        study_of(higher=False, metric="loss"),
        study_of(names=[NASTY, "_hidden", "two\nlines", "漢字"]),
        study_of(methods=("Local", *(f"_$method {i}" for i in range(14)))),
        study_of(parties=30, names=[f"a rather long name of a hospital, number {i}" for i in range(30)]),
    ],
    ids=["local only", "lower is better", "odd names", "many methods", "long names"],
)
def test_unusual_studies_have_pictures(tmp_path, kind, study):
    if kind not in available_plots(study):
        assert kind == "interpolation" and study.methods == ("Local",)  # there is no global model to interpolate to
        return
    assert pixels(draw_study_plot(study, kind, tmp_path / "it.png")).std() > 0.05


def test_a_study_without_test_sets_still_has_pictures(tmp_path):
    study = study_of(gain=float("nan"), methods=("FedAvg", "Local"))
    blind = study_of()
    for result in blind.results:
        result.scores.personal.values[:] = np.nan
    for kind in available_plots(study):
        draw_study_plot(study, kind, tmp_path / "one.png")
        draw_study_plot(blind, kind, tmp_path / "none.png")


def test_the_note_on_the_data_is_in_every_picture(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    footnotes = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **rest: footnotes.append(figure.get_supxlabel()))
    study = replace(study_of(), settings={"note": "digits replace the real data"})
    for kind in available_plots(study):
        draw_study_plot(study, kind, tmp_path / "it.png")
    digits = parties.digits(count=3)
    population = parties.Population(map(digits._source, digits), "digits replace the real data")
    federation = Federation(Small, population, algorithms.FedAvg(), steps=1).fit(2, progress=False)
    federation.plot("spikes", tmp_path / "it.png")
    assert footnotes == ["Data: digits replace the real data."] * 6
    draw_study_plot(replace(study, settings={}), "curves", tmp_path / "it.png")
    assert footnotes[-1] == ""


def test_an_unknown_kind_of_picture_raises_with_the_nearest(tmp_path):
    with pytest.raises(DescantError, match=r"no picture 'curve'\. Did you mean 'curves'"):
        study_of().plot("curve", tmp_path / "it.png")
    assert not list(tmp_path.iterdir())


class Links(HTMLParser):
    """Collects everything that a page would fetch or run."""

    def __init__(self):
        super().__init__()
        self.tags = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
    text = (write_study(study_of(methods=("Local", NASTY), metric=NASTY), tmp_path / "s") / "report.html").read_text(
        "utf-8"
    )
    parser = Links()
    parser.feed(text)
    assert len(parser.links) == 5 and all(link.startswith("data:image/png;base64,") for link in parser.links)
    assert not {"script", "link", "iframe", "object"} & set(parser.tags)
    assert "url(" not in text and "@import" not in text
    assert "<script" not in text and text.count("&lt;script&gt;") >= 4  # verdict, table, metric, settings


def test_the_page_has_verdict_table_pictures_and_settings_in_this_order():
    text = study_page(
        with_finding(study_of(), "FedAvg", Finding("jump", "It <broke>.")), {"curves": b"1", "parties": b"2"}
    )
    assert "FedAvg served the parties best: 0.655 accuracy against 0.555 with local training. 4 of 4" in text
    marks = ["served the parties best", "<td>FedAvg</td>", "base64,MQ==", "base64,Mg==", "<li>It &lt;broke&gt;.</li>"]
    marks += ["<th>seeds</th><td>0, 1</td>"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    changes = "local_start: MixedStart(init_mix=0), server_update: keep_global_model, personalize: keep_trained_models"
    assert f"<th>Local</th><td>{changes}</td>" in text


def test_the_verdict_never_praises_a_method_below_local_training():
    assert study_of(gain=-0.1).verdict().startswith("No method beat local training; FedAvg came closest: 0.455")
    assert study_of(gain=-0.1, higher=False).verdict().startswith("FedAvg served the parties best")
    assert (
        study_of(gain=0.0)
        .verdict()
        .endswith("0 of 4 parties gained by joining, 0 lost, over 2 seeds. Without training: majority class 0.250.")
    )
    lost = "0 of 4 parties gained by joining, 4 lost, over 2 seeds. Party p0 lost most: 10.0 points."
    assert lost in study_of(gain=-0.1).verdict()
    assert "Party p0 lost most: 0.1 in loss." in study_of(gain=0.1, higher=False, metric="loss").verdict()


def with_finding(study, method, *findings, seeds=(0, 1)):
    """Return the study with findings in some of its results."""
    results = (replace(r, findings=findings) if r.method == method and r.seed in seeds else r for r in study.results)
    return replace(study, results=tuple(results))


def test_a_collapse_is_in_the_verdict_and_findings_say_in_how_many_seeds():
    study = with_finding(study_of(), "FedAvg", Finding("collapse", "It collapsed.", 41), seeds=(1,))
    assert study.verdict().endswith(
        "FedAvg collapsed at round 41 with 1 of 2 seeds. Without training: majority class 0.250."
    )
    assert study.findings() == ("It collapsed. Found with 1 of 2 seeds.",)
    both = with_finding(study_of(), "FedAvg", Finding("coverage", "Some never trained."))
    both = with_finding(both, "Local", Finding("coverage", "Some never trained."))
    assert both.findings() == ("Some never trained.",)  # once for all methods and seeds
    assert str(both.table()).endswith("- Some never trained.") and json.loads(both.to_json())["findings"]


def test_the_table_matches_a_calculation_by_hand():
    """Two seeds, four parties at 0.5, 0.533, 0.567, 0.6; FedAvg 0.1 above, and 0.01 more with the second seed."""
    row = study_of().table().rows[2]
    assert row["method"] == "FedAvg" and row["mean"] == pytest.approx(0.655) and row["± seeds"] == pytest.approx(0.005)
    assert [row[name] for name in ("worst", "p10", "p50", "p90")] == pytest.approx(
        [0.605, 0.605, 0.605 + 0.1 / 3, 0.705]
    )
    assert (row["gained"], row["lost"], row["trained"], row["best round"]) == (4, 0, 4, 10)
    assert row["best"] == pytest.approx(0.645)  # of the curve, which ends 0.01 below
    assert row["after"] - row["before"] == pytest.approx(0.05)
    wide = study_of(methods=("Local", "A name of many characters")).table()
    assert max(map(len, str(wide).splitlines()[:-1])) <= 120


def test_gains_are_paired_over_the_seeds():
    """+0.2 with one seed and -0.1 with the other is a gain; equal changes up and down are neither gain nor loss."""
    study = study_of(parties=2, gain=0.0)
    for seed, change in ((0, (0.2, 0.1)), (1, (-0.1, -0.1))):
        study.of("FedAvg")[seed].scores.personal.values[:] += change
    row = study.table().rows[2]
    assert (row["gained"], row["lost"]) == (1, 0)
    np.testing.assert_allclose(study.gains("FedAvg"), [0.05, 0.0], atol=1e-12)


def test_untrained_parties_neither_gain_nor_lose():
    study = study_of(seeds=1)
    assert "trained mean" not in study.table().columns
    for method in ("Local", "FedAvg"):
        study.of(method)[0].rounds_trained[:3] = 0
    assert "1 of the 1 parties that ever trained gained by joining, 0 lost." in study.verdict()
    row = study.table().rows[2]
    assert (row["gained"], row["lost"]) == (1, 0) and "trained mean" in study.table().columns
    assert row["trained mean"] == pytest.approx(study.of("FedAvg")[0].scores.personal.values[3])


def test_untrained_parties_are_not_in_the_picture_of_gains(monkeypatch, tmp_path):
    study = study_of(seeds=2)
    drawn = []
    for result in study.results:
        result.rounds_trained[0] = 0
    study.of("FedAvg")[0].rounds_trained[1] = 0
    monkeypatch.setattr(
        "descant.studies.study_report.draw_party_scores",
        lambda file, names, scores, **rest: drawn.append(scores) or file,
    )
    study.plot("parties", tmp_path / "it.png")
    personal = study.of("FedAvg")[1].scores.personal.values
    assert np.isnan(drawn[0]["FedAvg"][0]) and np.isnan(drawn[0]["Local"][0])
    assert drawn[0]["FedAvg"][1] == personal[1] and not np.isnan(drawn[0]["FedAvg"][2:]).any()


def test_a_seed_without_training_does_not_count_for_the_party():
    study = study_of(seeds=2)
    first, second = study.of("FedAvg")
    first.rounds_trained[0] = 0
    local = study.of("Local")[1].scores.personal.values[0]
    assert study.gains("FedAvg")[0] == pytest.approx(second.scores.personal.values[0] - local)


def test_each_method_is_compared_with_its_own_baseline():
    """RFA has the highest mean but is below its own baseline; FedAvg is above its baseline."""
    study = study_of(seeds=1, methods=("Local", "FedAvg", "RFA"))
    rfa = replace(study.of("RFA")[0], baseline="Local, as RFA")
    better = replace(rfa.scores, personal=ScoreColumn(rfa.scores.personal.values + 0.01))
    baseline = replace(study.of("Local")[0], method="Local, as RFA", baseline="Local, as RFA", scores=better)
    study = replace(study, results=(*study.of("Local"), baseline, *study.of("FedAvg"), rfa))
    assert study.verdict().startswith(
        "FedAvg served the parties best: 0.650 accuracy against 0.550 with local training."
    )


@pytest.mark.parametrize(
    ("gains", "opening"),
    [
        ([0.1, 0.1, 0.1, -0.01], "FedAvg served the parties best: 0.622 accuracy against 0.550 with local training."),
        ([0.9, -0.01, -0.01, -0.01], "No method beat local training for most parties; FedAvg came closest"),
        ([0.0004, 0.0004, 0.0, 0.0], "No method beat local training; FedAvg is level with it: 0.550 accuracy"),
    ],
)
def test_a_method_helped_if_its_mean_rose_and_more_parties_gained_than_lost(gains, opening):
    study = study_of(seeds=1)
    study.of("FedAvg")[0].scores.personal.values[:] = study.of("Local")[0].scores.personal.values + gains
    assert study.verdict().startswith(opening)


def test_a_study_survives_saving_and_loading(tmp_path):
    study = with_finding(study_of(), "FedAvg", Finding("collapse", "It collapsed.", 3))
    study.of("FedAvg")[0].scores.personal.values[:2] = (np.nan, -np.inf)
    again = Study.load(study.save(tmp_path / "s"))
    assert again.to_json() == study.to_json()
    assert again.of("FedAvg")[0].interpolation.scores.shape == (4, 3) and again.collapse_rounds() == {"FedAvg": 3}
    assert str(again.table()) == str(study.table())
    for kind in available_plots(study):
        np.testing.assert_array_equal(
            pixels(again.plot(kind, tmp_path / "a.png")), pixels(tmp_path / "s" / f"{kind}.png")
        )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{}], "settings": {}}', '{"descant": "0.1"'])
def test_loading_anything_but_a_study_raises(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(DescantError, match="does not hold a study that this version can read"):
        Study.load(tmp_path)
    with pytest.raises(DescantError, match="does not hold a study"):
        Study.load(tmp_path / "nowhere")


def test_a_study_without_a_curve_is_saved_and_names_the_missing_picture(tmp_path):
    population = parties.digits(count=2, seed=0)
    study = compare([algorithms.FedAvg()], Small, population, rounds=2, points=0, progress=False, lr=0.1, steps=1)
    folder = study.save(tmp_path / "s")
    assert not (folder / "curves.png").exists() and (folder / "interpolation.png").exists()
    assert Study.load(folder).to_json() == study.to_json()
    with pytest.raises(DescantError, match="no numbers for the picture 'curves'"):
        study.plot("curves", tmp_path / "it.png")


class Small(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)


def test_a_folder_is_written_atomically_and_replaces_an_older_study(tmp_path):
    folder = tmp_path / "deep" / "study"
    assert study_of(gain=0.1).save(folder) == folder
    absent = {
        f"{kind}.png" for kind in ("hyperparameters", "presence", "rewards", "portfolio", "weights")
    }  # of other studies
    assert {file.name for file in folder.iterdir()} == set(STUDY_FILES) - absent
    before = json.loads((folder / "study.json").read_text("utf-8"))
    study_of(gain=0.2).save(folder)
    after = json.loads((folder / "study.json").read_text("utf-8"))
    assert before["verdict"] != after["verdict"] and len(after["results"]) == 4
    assert [entry.name for entry in folder.parent.iterdir()] == ["study"]  # no temporary folders stay


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "s").mkdir()
    write_study(study_of(), tmp_path / "s")
    assert (tmp_path / "s" / "report.html").exists()


def notes(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def study_with_notes(folder):
    write_study(study_of(), folder)
    (folder / "notes.txt").write_text("mine")


def foreign_json(folder):
    folder.mkdir()
    (folder / "study.json").write_text('{"mine": 1}')


def regular_file(folder):
    folder.write_text("mine")


def below_a_file(folder):
    folder.parent.rmdir()
    folder.parent.write_text("mine")


@pytest.mark.parametrize("occupy", [notes, study_with_notes, foreign_json, regular_file, below_a_file])
def test_files_other_than_a_study_are_never_changed(tmp_path, occupy):
    folder = tmp_path / "home" / "s"
    folder.parent.mkdir()
    occupy(folder)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for attempt in (lambda place: check_replaceable(place, STUDY_FILES), lambda place: write_study(study_of(), place)):
        with pytest.raises(DescantError, match=r"home.s (holds|cannot be written).*Give|home.s is a file.*give a new"):
            attempt(folder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_failure_while_writing_keeps_the_older_study(tmp_path, monkeypatch):
    folder = write_study(study_of(), tmp_path / "s")
    before = (folder / "report.html").read_bytes()
    monkeypatch.setattr(
        "descant.studies.study_report.render_page",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(DescantError, match="No space left on device"):
        write_study(study_of(gain=0.2), folder)
    assert (folder / "report.html").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
