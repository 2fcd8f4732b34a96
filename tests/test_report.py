"""The report: pictures with content, one page that needs nothing else, and a folder that is whole or not there."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from descant import DescantError, Study, algorithms
from descant.evaluate import Column, Scores
from descant.report import FILES, draw, page, write
from descant.settings import describe
from descant.store import check_replaceable
from descant.study import Result

NASTY = "<script>alert('x')</script> & \"$x^$\""


def study_of(parties=4, seeds=2, methods=("Local", "FedAvg"), higher=True, names=None, gain=0.1, metric="accuracy"):
    """A study that nobody had to train for: method number m scores gain·m above Local at every party."""
    names = tuple(names or (f"p{i}" for i in range(parties)))
    base = np.linspace(0.5, 0.6, len(names))
    results = []
    for number, method in enumerate(methods):
        for seed in range(seeds):
            own = base + gain * number + 0.01 * seed
            columns = (Column(values, higher) for values in (own, own - 0.2, base - 0.3))
            curve = tuple((at, float(own.mean()) - 0.1 / at, 0.3) for at in (1, 5, 10))
            results.append(Result(method, seed, Scores(names, metric, *columns), curve, 1.0, 0))
    records = [describe(algorithms.Local()), describe(algorithms.FedAvg())]
    return Study(tuple(results), {"rounds": 10, "seeds": seeds, "note": NASTY, "algorithms": records})


def pixels(file):
    from matplotlib.image import imread

    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return imread(file)[..., :3]


def has_color(image, code, least=40):
    color = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return (np.abs(image - color).max(-1) < 0.02).sum() >= least


@pytest.mark.parametrize("parties", [4, 31])
@pytest.mark.parametrize("kind", ["curves", "parties"])
def test_a_picture_shows_every_method_in_its_colour(tmp_path, kind, parties):
    image = pixels(draw(study_of(parties, methods=("Local", "FedAvg", "RFA")), kind, tmp_path / "made" / "it.png"))
    assert image.shape[0] >= 600 and image.shape[1] >= 1000
    assert all(has_color(image, code) for code in ("#000000", "#0072B2", "#D55E00"))
    assert not has_color(image, "#009E73")  # that would be a third method


def test_gain_shows_on_the_side_that_the_title_names(tmp_path):
    for gain, above in ((0.1, True), (-0.1, False)):
        image = pixels(draw(study_of(gain=gain), "parties", tmp_path / "it.png"))[100:-150, 150:1150]  # inside the axes
        blue = np.abs(image - np.array([0, 0x72, 0xB2]) / 255).max(-1) < 0.02
        black = image.max(-1) < 0.02
        assert bool(np.nonzero(blue)[0].mean() < np.nonzero(black)[0].mean()) is above


@pytest.mark.parametrize("kind", ["curves", "parties"])
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
def test_pictures_of_odd_studies(tmp_path, kind, study):
    assert pixels(draw(study, kind, tmp_path / "it.png")).std() > 0.05


def test_a_study_without_test_sets_still_has_pictures(tmp_path):
    study = study_of(gain=float("nan"), methods=("FedAvg", "Local"))
    blind = study_of()
    for result in blind.results:
        result.scores.own.values[:] = np.nan
    for kind in ("curves", "parties"):
        draw(study, kind, tmp_path / "one.png")
        draw(blind, kind, tmp_path / "none.png")


def test_an_unknown_picture_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(DescantError, match=r"no picture 'curve'\. Did you mean 'curves'"):
        study_of().plot("curve", tmp_path / "it.png")
    assert not list(tmp_path.iterdir())


class Links(HTMLParser):
    """What a page would fetch or run."""

    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_needs_nothing_else_and_escapes_everything(tmp_path):
    text = (write(study_of(methods=("Local", NASTY), metric=NASTY), tmp_path / "s") / "report.html").read_text("utf-8")
    found = Links()
    found.feed(text)
    assert len(found.links) == 2 and all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert "url(" not in text and "@import" not in text
    assert "<script" not in text and text.count("&lt;script&gt;") >= 4  # verdict, table, metric, settings


def test_the_page_gives_the_verdict_first_then_table_pictures_and_settings():
    text = page(study_of(), {"curves": b"1", "parties": b"2"})
    assert "FedAvg served the parties best: 0.655 accuracy against 0.555 alone. 4 of 4" in text
    marks = ["served the parties best", "<td>FedAvg</td>", "base64,MQ==", "base64,Mg==", "<th>seeds</th><td>0, 1</td>"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    assert re.search(r"<th>Local</th><td>start: Mix\(init_mix=0\), advance: stay, keep: keep_own</td>", text)


def test_the_verdict_does_not_praise_a_method_that_lost_to_training_alone():
    assert study_of(gain=-0.1).verdict().startswith("Nothing beat training alone; FedAvg came closest: 0.455")
    assert study_of(gain=-0.1, higher=False).verdict().startswith("FedAvg served the parties best")
    assert study_of(gain=0.0).verdict().endswith("0 of 4 parties gained by joining, 0 lost, on average over the seeds.")


def test_a_folder_is_written_whole_and_an_older_study_is_replaced(tmp_path):
    folder = tmp_path / "deep" / "study"
    assert study_of(gain=0.1).save(folder) == folder
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    before = json.loads((folder / "study.json").read_text("utf-8"))
    study_of(gain=0.2).save(folder)
    after = json.loads((folder / "study.json").read_text("utf-8"))
    assert before["verdict"] != after["verdict"] and len(after["results"]) == 4
    assert [entry.name for entry in folder.parent.iterdir()] == ["study"]  # no temporary folders stay


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "s").mkdir()
    write(study_of(), tmp_path / "s")
    assert (tmp_path / "s" / "report.html").exists()


def notes(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def study_with_notes(folder):
    write(study_of(), folder)
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
def test_what_is_not_a_study_is_never_touched(tmp_path, occupy):
    folder = tmp_path / "home" / "s"
    folder.parent.mkdir()
    occupy(folder)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for attempt in (lambda place: check_replaceable(place, FILES), lambda place: write(study_of(), place)):
        with pytest.raises(DescantError, match=r"home.s (holds|is a file|cannot be written).*Give"):
            attempt(folder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_failure_while_writing_leaves_the_older_study_whole(tmp_path, monkeypatch):
    folder = write(study_of(), tmp_path / "s")
    before = (folder / "report.html").read_bytes()
    monkeypatch.setattr("descant.report.page", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DescantError, match="No space left on device"):
        write(study_of(gain=0.2), folder)
    assert (folder / "report.html").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
