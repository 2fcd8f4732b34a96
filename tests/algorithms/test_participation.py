"""Participation by draws, by rules and by timetables, and errors in timetables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import Federation, algorithms
from descant.algorithms import (
    Dropouts,
    FirstParties,
    PeriodicParticipation,
    PresenceSpan,
    RandomAvailability,
    Sample,
    Stragglers,
    Timetable,
)
from descant.algorithms.participation import all_parties
from descant.config import read_recipe
from descant.core.algorithm import Hyper, Participation, ParticipationContext
from descant.errors import SettingError
from descant.rounds.state import presence_from_arrays
from tiny_recipe import TINY_RECIPE
from toy_problems import classification_parties, network

NAMES = ("a", "b", "c")


def make_context(round: int, names: tuple[str, ...] = NAMES, seed: int = 0) -> ParticipationContext:
    return ParticipationContext(
        round, names, Hyper(work=20), rng=np.random.default_rng(round), seed=seed, all_parties=NAMES
    )


def participants_by_round(participation: Participation, rounds: int = 8, names: tuple[str, ...] = NAMES) -> list[str]:
    """Return the participants of each round."""
    return ["".join(participation(make_context(round, names))) for round in range(1, rounds + 1)]


def test_parties_join_late_leave_and_return() -> None:
    table = Timetable.from_records(
        [{"party": "a", "from": 1, "to": 2}, {"party": "a", "from": "6", "to": ""}, {"party": "b", "from": 4, "to": 4}]
    )
    assert participants_by_round(table) == ["ac", "ac", "c", "bc", "c", "ac", "ac", "ac"]
    assert participants_by_round(Dropouts({"b": 3, "c": 0})) == ["ab"] * 3 + ["a"] * 5
    assert participants_by_round(PeriodicParticipation(3, {"a": 2, "c": 6})) == [
        "b",
        "ab",
        "b",
        "b",
        "ab",
        "bc",
        "b",
        "ab",
    ]


spans = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=4)


@given(st.dictionaries(st.sampled_from(NAMES), spans, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_timetable_a_trace_and_their_files_agree(gaps: dict[str, list[tuple[int, int]]]) -> None:
    """Compare records, a file of spans and a trace of 0 and 1."""
    rows: list[dict[str, Any]] = []
    for party, pairs in gaps.items():
        at = 0
        for gap, length in pairs:
            rows.append({"party": party, "from": at + gap, "to": at + gap + length})
            at += gap + length
    rounds = max((row["to"] for row in rows), default=1)
    present = {p: {r for row in rows if row["party"] == p for r in range(row["from"], row["to"] + 1)} for p in NAMES}
    listed = {row["party"] for row in rows}
    expected = ["".join(p for p in NAMES if r in present[p] or p not in listed) for r in range(1, rounds + 1)]
    assert participants_by_round(Timetable.from_records(rows), rounds) == expected
    lines = ["party,from,to", *(f"{row['party']},{row['from']},{row['to']}" for row in rows)]
    head = ",".join(["party", *map(str, range(1, rounds + 1))])
    trace = [head, *(",".join([p, *(str(int(r in present[p])) for r in range(1, rounds + 1))]) for p in sorted(listed))]
    for text in (lines, trace) if rows else ():
        assert participants_by_round(Timetable.read(_file(text)), rounds) == expected


def _file(lines: list[str]) -> Path:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False) as stream:
        stream.write("\n".join(lines) + "\n")
    return Path(stream.name)


def test_parties_are_absent_after_the_last_round_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("party,1,2,3\na,1,0,1\nb,0,0,0\n")
    assert participants_by_round(Timetable.read(tmp_path / "trace.csv"), 5) == ["ac", "c", "ac", "c", "c"]


def test_random_availability_of_a_party_is_independent_of_others() -> None:
    """Other available parties do not change the draw of a party; a draw lasts for its rounds."""
    availability = RandomAvailability(0.5)
    single = participants_by_round(availability, 60, ("b",))
    assert [("b" in day) for day in participants_by_round(availability, 60)] == [day == "b" for day in single]
    assert 15 < sum(map(len, single)) < 45
    lasting = participants_by_round(RandomAvailability(0.5, rounds_per_draw=4), 60, ("b",))
    assert all(len(set(lasting[at : at + 4])) == 1 for at in range(0, 60, 4)) and len(set(lasting)) == 2
    assert (
        participants_by_round(RandomAvailability(1.0)) == ["abc"] * 8
        and participants_by_round(RandomAvailability(0.0)) == [""] * 8
    )
    assert [availability(make_context(1, seed=seed)).keys() for seed in range(9)] != [
        availability(make_context(1)).keys()
    ] * 9


def test_participation_rules_compose() -> None:
    drops = Dropouts({"a": 1}, Sample(1))
    assert {len(day) for day in participants_by_round(drops)} == {1} and "a" not in "".join(
        participants_by_round(drops)[1:]
    )
    assert participants_by_round(FirstParties(2, Dropouts({"a": 1}))) == ["ab"] + ["b"] * 7
    hypers = Stragglers(1.0, Dropouts({"a": 1}))(make_context(2))
    assert hypers.keys() == {"b", "c"} and all(hyper.work < 20 for hyper in hypers.values())


INVALID: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown party": (
        [{"party": "a"}, {"party": "bb"}],
        "Row 2 of the schedule: There is no party 'bb'. Did you mean 'b'",
    ),
    "reversed": ([{"party": "a", "from": 5, "to": 3}], "Row 1 of the schedule: party 'a' is present from round 5 to 3"),
    "overlapping": (
        [{"party": "a", "from": 4, "to": 6}, {"party": "b"}, {"party": "a", "from": 1, "to": 4}],
        "Rows 3 and 1 of the schedule overlap: party 'a' is present from round 1 to 4, and from 4 on",
    ),
    "behind an open end": ([{"party": "a"}, {"party": "a", "from": 9}], "from round 1 to the end, and from 9 on"),
    "no number": ([{"party": "a", "from": "soon"}], "The 'from' in row 1 of the schedule must be a round"),
    "zero": ([{"party": "a", "from": 0}], "The 'from' in row 1 of the schedule must be a round: a whole number >= 1"),
    "half": ([{"party": "a", "to": 2.5}], "whole number >= 0, or nothing. Got '2.5'"),
    "no party": ([{"from": 1}], "Row 1 of the schedule names no party"),
    "another key": ([{"party": "a", "until": 1}], "Row 1 of the schedule: There is no key 'until'"),
}


@pytest.mark.parametrize("name", INVALID)
def test_error_in_a_schedule_names_its_row(name: str) -> None:
    rows, message = INVALID[name]
    with pytest.raises(SettingError, match=message):
        Timetable.from_records(rows)(make_context(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The first line of .* must be party,from,to or"),
        ("who,from,to\na,1,2\n", "The first line of .* must be party,from,to or"),
        ("party,2,3\na,1,0\n", "The first line of .* must be party,from,to or"),
        ("party,from,to\n", "The schedule .*table.csv has no row below its first line"),
        ("party,1,2\n\n", "The schedule .*table.csv has no row below its first line"),
        ("party,from,to\n\na,1,4,9,12\n", "Row 3 of .*table.csv must be party,from,to. Got 5 cells: 'a,1,4,9,12'"),
        ("party,1,2\na,1\n", "Row 2 of .* must be a party and 2 times 0 or 1"),
        ("party,1,2\na,1,x\n", "Row 2 of .* must be a party and 2 times 0 or 1"),
        ("party,from,to\na,1,2\n\nz,1,2\n", "Row 4 of .*table.csv: There is no party 'z'"),
        ("party,from,to\na,x,2\n", "The 'from' in row 2 of .*table.csv must be a round"),
        ("party,1,2\nz,1,0\n", "Row 2 of .*table.csv: There is no party 'z'"),
        ("party,1,2\na,1,0\nb,1,0\na,0,1\n", "Rows 2 and 4 of .*table.csv both name party 'a'. Join them"),
    ],
)
def test_invalid_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(SettingError, match=message):
        Timetable.read(tmp_path / "table.csv")(make_context(1))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"The schedule .*none.csv cannot be read: No such file"):
        Timetable.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (Dropouts({"9": 2}), "Row 1 of the dropouts: There is no party '9'"),
        (PeriodicParticipation(2, {"9": 1}), "The 'first_rounds' of PeriodicParticipation: There is no party '9'"),
        (Timetable((PresenceSpan("0", 0),)), "The 'first' of Timetable must be a whole number >= 1. Got 0"),
        (RandomAvailability(1.5), "The 'probability' of RandomAvailability must be >= 0 and <= 1"),
        (
            PeriodicParticipation(2, {"0": 0}),
            "The 'first_rounds' of PeriodicParticipation must be rounds: whole numbers >= 1. Got 0",
        ),
        (PeriodicParticipation(0), "The 'period' of PeriodicParticipation must be a whole number >= 1"),
    ],
)
def test_invalid_rules_are_rejected_before_training(participation: Participation, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        algorithm = replace(algorithms.FedAvg(), participation=participation)
        Federation(network(), classification_parties(3), algorithm, steps=1).state  # noqa: B018


def test_round_without_parties_changes_nothing() -> None:
    fed = Federation(
        network(),
        classification_parties(3),
        algorithms.FedAvg(),
        steps=1,
        participation=Dropouts({"0": 1, "1": 1, "2": 1}),
    )
    fed.fit(1, progress=False)
    before = fed.state.global_model
    with pytest.warns(UserWarning, match="no reply was accepted"):
        fed.fit(1, progress=False)
    assert torch.equal(fed.state.global_model, before)
    assert [entry["presence"] for entry in fed.history_] == ["ppp", "aaa"]


@pytest.mark.filterwarnings("ignore::descant.errors.DescantWarning")
def test_presence_letters_match_the_accepted_parties() -> None:
    fed = Federation(
        network(),
        classification_parties(4),
        algorithms.FedAvg(),
        steps=1,
        participation=RandomAvailability(0.4),
        seed=3,
    )
    accepted = np.zeros((6, 4), dtype=bool)
    for done in fed.rounds(6):
        accepted[done.index - 1] = [name in done.round.accepted for name in fed.population]
    presence = [entry["presence"] for entry in fed.history_]
    assert presence_from_arrays(accepted, np.zeros_like(accepted)) == presence
    assert {"p", "a", "."} <= set("".join(presence))


def test_presence_plot_without_scores_has_no_score_panel(tmp_path: Path) -> None:
    fed = Federation(
        network(), classification_parties(3), algorithms.FedAvg(), steps=1, participation=Dropouts({"0": 1})
    ).fit(2, progress=False)
    bare = fed.plot("presence", tmp_path / "bare.png").read_bytes()
    for done in fed.rounds(1):
        assert done.scores.names == ("0", "1", "2")
    scored = fed.plot("presence", tmp_path / "scored.png").read_bytes()
    bare_height, height = (int.from_bytes(png[20:24], "big") for png in (bare, scored))
    assert height - bare_height == pytest.approx(3.2 * 150, abs=1)


def test_presence_is_not_recorded_for_many_parties() -> None:
    fed = Federation(network(), classification_parties(101), algorithms.FedAvg(), steps=0).fit(1, progress=False)
    assert "presence" not in fed.history_[0]
    with pytest.raises(SettingError, match="too many parties"):
        fed.plot("presence", "nowhere.png")


def test_recipes_set_participation(tmp_path: Path) -> None:
    (tmp_path / "who.csv").write_text("party,from,to\n0,1,4\n")
    table = Timetable.from_records([{"party": "0", "from": 1, "to": 4}], Sample(3))
    for line in (
        f'schedule = "{tmp_path}/who.csv"',
        'schedule = [{party = "0", from = 1, to = 4}]',
        'last_rounds = {"0" = 4}',
    ):
        found = read_recipe(TINY_RECIPE.replace("participation = 3", f"participation = 3\n{line}"))
        assert found.algorithms()[0].participation == table
    for line, participation in (
        ("participation_probability = 0.5", RandomAvailability(0.5, participation=all_parties)),
        ("participation_probability = 0.5\nredraw_every = 4", RandomAvailability(0.5, 4)),
        ('participation_interval = 7\nfirst_rounds = {"0" = 1, "1" = 3}', PeriodicParticipation(7, {"0": 1, "1": 3})),
        ('schedule = [{party = "0", to = 0}]', Timetable((PresenceSpan("0", 1, 0),))),
    ):
        assert (
            read_recipe(TINY_RECIPE.replace("participation = 3", line)).algorithms()[0].participation == participation
        )
    for line, message in (
        ("schedule = 3", r"The 'schedule' of \[training\] must be a text in quotes or a list"),
        ("last_rounds = 4", r"The 'last_rounds' of \[training\] must be a table"),
        ("redraw_every = 2", "give 'participation_probability', too"),
        ("participation_interval = 7", "Give participation_interval and first_rounds together"),
        ('first_rounds = {"0" = 1}', "Give participation_interval and first_rounds together"),
        ("participation_probability = 2.0", r"The 'participation_probability' of \[training\] must be >= 0 and <= 1"),
    ):
        with pytest.raises(SettingError, match=message):
            read_recipe(TINY_RECIPE.replace("participation = 3", line)).algorithms()


def test_schedule_is_found_beside_its_recipe_and_stored_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "who.csv").write_text("party,1,2\n0,1,0\n1,0,0\n2,1,1\n")
    text = (
        TINY_RECIPE.replace("participation = 3", 'schedule = "who.csv"') + '\n[quick.training]\nschedule = "who.csv"\n'
    )
    (tmp_path / "sub" / "tiny.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(Path("sub") / "tiny.toml")
    participation = recipe.algorithm().participation
    stored_text = recipe.text
    digest = recipe.digest
    assert participation == Timetable((PresenceSpan("0", 1, 1), PresenceSpan("1", 1, 0), PresenceSpan("2", 1, 2)))
    assert recipe.quick_form().algorithm().participation == participation
    monkeypatch.chdir(tmp_path / "sub")
    assert read_recipe("tiny.toml").digest == read_recipe(text).digest == digest  # recipe text has no folder
    assert read_recipe(text).with_values("training.schedule=who.csv").algorithm().participation == participation
    (tmp_path / "sub" / "who.csv").unlink()
    assert (
        read_recipe(stored_text).algorithm().participation == participation
        and read_recipe(stored_text).text == stored_text
    )
    with pytest.raises(SettingError, match=r"The schedule who\.csv cannot be read"):
        read_recipe("tiny.toml").algorithm()
