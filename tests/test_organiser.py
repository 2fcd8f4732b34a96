"""What an organiser has of a training: the status, the report and the common model, without a row of anybody's data."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from descant.address import address_of
from descant.cli import app
from descant.config import read
from descant.flat import Net
from descant.patience import Patience
from descant.record import read as recorded
from descant.server import Meeting
from descant.server.training import Training
from descant.trust.roster import Roster
from problems import network
from teams import LEARNING
from test_letters import Killed, Post, desks, simulated

NAMES = ("0", "1", "2")
RUN = "[run]\nseed = 5\nrounds = 4\npoints = 2\n"


class Lab:
    """A federation in a folder, whose letters go by hand."""

    def __init__(self, folder: Path, method: str = "fedgeomed+", more: str = "") -> None:
        self.folder, self.text = folder, RUN + LEARNING.format(method=method) + more
        (folder / "recipe.toml").write_text(self.text)
        self.call("server", "init", "lab", "recipe.toml")
        self.roster = Roster(folder / "lab")
        for name in NAMES:
            self.roster.invite(name, folder / f"{name}.invite")
        self.post = Post(desks(folder / "silos", NAMES))

    def call(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == code, done.output
        return done.output

    def train(self, say: Callable[[str], None] = lambda text: None, gather: int = 3) -> dict[str, object]:
        chosen = read(self.text)
        net = Net.made(network, 0)
        loss = address_of(torch.nn.functional.cross_entropy)
        meeting = Meeting(self.post, chosen, "lab", net, loss, lambda text: None, self.roster.joined)
        patience = Patience(gather=gather, quorum=None if gather == 3 else gather, deadline=0.2, farewell=0)
        return Training(self.roster.run, chosen, meeting, patience, say).until_done(lambda: NAMES)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lab]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Lab(tmp_path, *arguments)


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_the_common_model_is_in_a_file_that_a_module_loads(made: Callable[..., Lab], method: str) -> None:
    lab = made(method)
    assert json.loads(lab.call("server", "status", "lab", "--json"))["center"] is None
    file = str(lab.train()["center"])
    model, twin = network(), simulated(read(lab.text), 4, NAMES)
    model.load_state_dict(load_file(file))
    whole = twin.center_.state_dict()
    assert all(torch.equal(tensor, whole[key]) for key, tensor in model.state_dict().items())
    assert Path(json.loads(lab.call("server", "status", "lab", "--json"))["center"]).samefile(file)
    Path(file).unlink()  # as after a kill before it was written: the same command does it
    lab.post.away.clear()
    assert lab.train()["center"] == file and Path(file).exists()
    assert f"load_file({str(Path('lab') / 'run' / 'center.safetensors')!r})" in lab.call("server", "status", "lab")


def test_the_status_has_what_each_party_said_last_and_of_which_round(made: Callable[..., Lab]) -> None:
    """Who was away when the last models were judged stands there with what it said before."""
    lab = made()

    def leaves(said: str) -> None:
        if said.startswith("Round 3:"):
            lab.post.away = {"1"}

    lab.train(leaves, gather=2)
    rows = {row["name"]: row for row in json.loads(lab.call("server", "status", "lab", "--json"))["parties"]}
    held = recorded(lab.roster.run / "training").numbers
    assert held.scored.tolist() == [2, 4]
    for k, name in enumerate(NAMES):
        judged = 0 if name == "1" else 1
        for column in ("own", "center"):
            assert rows[name][column] == held.scores[column][judged, k]
        assert (rows[name]["judged"], rows[name]["rounds"]) == ((2, 3) if name == "1" else (4, 4))
    shown = lab.call("server", "status", "lab")
    assert "accuracy of its own model and of the common one" in shown and f"{rows['0']['own']:.3f}" in shown


def test_before_anything_was_judged_the_status_has_no_scores(made: Callable[..., Lab]) -> None:
    lab = made()

    def dies(said: str) -> None:
        if said.startswith("Round 1:"):
            raise Killed

    with suppress(Killed):
        lab.train(dies)
    told = json.loads(lab.call("server", "status", "lab", "--json"))
    assert told["round"] == 1 and told["metric"] is None and told["parties"][0]["own"] is None
    assert "center" not in lab.call("server", "status", "lab")
    assert "descant server start" in lab.call("report", "lab", code=1)
    assert "descant server start" in lab.call("runs", "lab")


@pytest.mark.parametrize("folder", ["lab", "lab/run/training"])
def test_a_report_of_a_server_has_what_its_parties_said_and_who_was_there(
    made: Callable[..., Lab], folder: str
) -> None:
    lab = made("fedavg", 'wrap = [{by = "local_privacy", noise = 8.0, budget = 50.0}]\n')
    assert "has not begun yet" in lab.call("report", folder, code=1)

    def away(said: str) -> None:
        if said.startswith("Round 2:"):
            lab.post.away = {"1"}

    lab.train(away, gather=2)
    told = json.loads(lab.call("report", folder, "--json"))
    held = recorded(lab.roster.run / "training").numbers
    assert [row["rounds"] for row in told["table"]] == [4, 2, 4]
    assert told["table"][0]["center"] == held.scores["center"][-1, 0]
    assert "After round 4, as judged by 2 of 3 parties" in told["verdict"] and "descant silo judge" in told["verdict"]
    assert any("Privacy of a party: ε=" in one and "of a budget of 50" in one for one in told["findings"])
    page = Path(told["report"]).read_text()
    assert (
        "data:image/png" in page and "Who was there" in page and "first seed" not in page and "Round by round" in page
    )
    assert told["verdict"] in lab.call("report", folder)


def test_a_report_of_a_server_names_what_was_refused(made: Callable[..., Lab]) -> None:
    lab = made()
    lab.post.spoil = lambda task, answer: answer[:-9] if task.party == "1" and task.kind == "train" else answer
    with pytest.warns(UserWarning, match="refused"):
        lab.train()
    told = json.loads(lab.call("report", "lab", "--json"))
    assert any("'1'" in one and "refused" in one for one in told["findings"])
