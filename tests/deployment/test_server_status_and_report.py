"""What an organiser has of a training: the status, the report and the common model, without a row of anybody's data."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from descant.cli import app
from descant.config import read_recipe
from descant.core.messages import Reply, Task
from descant.core.timeouts import WaitLimits
from descant.deployment.pki.roster import Roster
from descant.deployment.server import HandshakeTransport, presence
from descant.deployment.server.presence import PresenceRecorder
from descant.deployment.server.training_session import TrainingSession
from descant.models.flat import Net
from descant.serialization.references import address_of
from descant.serialization.wire import pack, unpack
from descant.storage.lock import FolderLock
from descant.tracking import read_run as recorded
from silo_file_templates import MODEL_AND_METHOD_TABLES
from test_server_silo_protocol import InMemoryTransport, SimulatedKill, silo_handlers, simulated_federation
from toy_problems import network
from write_faults import disk_full_error, inject_faults

NAMES = ("0", "1", "2")
RUN = "[run]\nseed = 5\nrounds = 4\npoints = 2\n"


class Lab:
    """A federation in a folder, whose letters go by hand."""

    def __init__(self, folder: Path, method: str = "fedgeomed+", more: str = "", run: str = RUN) -> None:
        self.folder = folder
        self.text = run + MODEL_AND_METHOD_TABLES.format(method=method) + more
        (folder / "recipe.toml").write_text(self.text)
        self.call("server", "init", "lab", "recipe.toml")
        self.roster = Roster(folder / "lab")
        for name in NAMES:
            self.roster.invite(name, folder / f"{name}.invite")
        self.post = InMemoryTransport(silo_handlers(folder / "silos", NAMES))

    def call(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == code, done.output
        return done.output

    def parties(self) -> dict[str, dict[str, str]]:
        """Each party, as the status has it."""
        return {row["name"]: row for row in json.loads(self.call("server", "status", "lab", "--json"))["parties"]}

    def train(self, say: Callable[[str], None] = lambda text: None, gather: int = 3) -> dict[str, object]:
        chosen = read_recipe(self.text)
        net = Net.from_model(network, 0)
        loss = address_of(torch.nn.functional.cross_entropy)
        meeting = HandshakeTransport(
            self.post, chosen, "lab", net=net, loss=loss, log=lambda text: None, record_join=self.roster.record_join
        )
        patience = WaitLimits(min_parties=gather, quorum=None if gather == 3 else gather, deadline=0.2, grace=0)
        return TrainingSession(self.roster.run_folder, chosen, meeting, limits=patience, log=say).run_to_completion(
            lambda: NAMES
        )


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lab]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Lab(tmp_path, *arguments)


def test_who_must_go_on_is_told_the_options_that_the_server_had(
    made: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them rounds would begin with whoever is first, and it would be another training."""
    lab = made()
    monkeypatch.setattr(
        "descant.deployment.server.serve.FederationServer._serve_with_restarts", lambda *_: {"global_model": ""}
    )
    options = ["--deadline", "20.5", "--quorum", "2", "--gather", "3"]
    lab.call("server", "start", "lab", *options)

    def dies(said: str) -> None:
        if said.startswith("Round 1:"):
            raise SimulatedKill

    with suppress(SimulatedKill):
        lab.train(dies)
    for command in (("server", "status", "lab"), ("runs", "lab")):
        assert f"{' '.join(options)}\n" in lab.call(*command)


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_the_common_model_is_in_a_file_that_a_module_loads(made: Callable[..., Lab], method: str) -> None:
    lab = made(method)
    assert json.loads(lab.call("server", "status", "lab", "--json"))["global_model"] is None
    file = str(lab.train()["global_model"])
    model = network()
    twin = simulated_federation(read_recipe(lab.text), 4, NAMES)
    model.load_state_dict(load_file(file))
    whole = twin.global_model_.state_dict()
    assert all(torch.equal(tensor, whole[key]) for key, tensor in model.state_dict().items())
    assert Path(json.loads(lab.call("server", "status", "lab", "--json"))["global_model"]).samefile(file)
    Path(file).unlink()  # as after a kill before it was written: the same command does it
    lab.post.unreachable.clear()
    assert lab.train()["global_model"] == file and Path(file).exists()
    assert f"load_file({str(Path('lab') / 'run' / 'center.safetensors')!r})" in lab.call("server", "status", "lab")


def test_the_status_has_what_each_party_said_last_and_of_which_round(made: Callable[..., Lab]) -> None:
    """Who was away when the last models were judged stands there with what it said before."""
    lab = made()

    def leaves(said: str) -> None:
        if said.startswith("Round 3:"):
            lab.post.unreachable = {"1"}

    lab.train(leaves, gather=2)
    rows = {row["name"]: row for row in json.loads(lab.call("server", "status", "lab", "--json"))["parties"]}
    held = recorded(lab.roster.run_folder / "training").numbers
    assert held.scored_rounds.tolist() == [2, 4]
    for k, name in enumerate(NAMES):
        judged = 0 if name == "1" else 1
        for column in ("personal", "global_model"):
            assert rows[name][column] == held.scores[column][judged, k]
        assert (rows[name]["evaluated"], rows[name]["rounds"]) == ((2, 3) if name == "1" else (4, 4))
    shown = lab.call("server", "status", "lab")
    assert "accuracy of its own model and of the common one" in shown and f"{rows['0']['personal']:.3f}" in shown


def test_before_anything_was_judged_the_status_has_no_scores(made: Callable[..., Lab]) -> None:
    lab = made()

    def dies(said: str) -> None:
        if said.startswith("Round 1:"):
            raise SimulatedKill

    with suppress(SimulatedKill):
        lab.train(dies)
    told = json.loads(lab.call("server", "status", "lab", "--json"))
    assert told["round"] == 1 and told["metric"] is None and told["parties"][0]["personal"] is None
    assert "global_model" not in lab.call("server", "status", "lab")
    assert "descant server start" in lab.call("report", "lab", code=1)
    assert "descant server start" in lab.call("runs", "lab")


@pytest.mark.parametrize("folder", ["lab", "lab/run/training"])
def test_a_report_of_a_server_has_what_its_parties_said_and_who_was_there(
    made: Callable[..., Lab], folder: str
) -> None:
    lab = made("fedavg", 'wrap = [{wrapper = "local_dp", noise = 8.0, budget = 50.0}]\n')
    assert "has not begun yet" in lab.call("report", folder, code=1)

    def away(said: str) -> None:
        if said.startswith("Round 2:"):
            lab.post.unreachable = {"1"}

    lab.train(away, gather=2)
    told = json.loads(lab.call("report", folder, "--json"))
    held = recorded(lab.roster.run_folder / "training").numbers
    assert [row["rounds"] for row in told["table"]] == [4, 2, 4]
    assert told["table"][0]["global_model"] == held.scores["global_model"][-1, 0]
    assert "After round 4, as judged by 2 of 3 parties" in told["verdict"] and "descant silo judge" in told["verdict"]
    assert any("Privacy of a party: ε=" in one and "of a budget of 50" in one for one in told["findings"])
    page = Path(told["report"]).read_text()
    assert (
        "data:image/png" in page and "Who was there" in page and "first seed" not in page and "Round by round" in page
    )
    assert told["verdict"] in lab.call("report", folder)


def test_a_report_of_a_server_names_what_was_refused(made: Callable[..., Lab]) -> None:
    lab = made()
    lab.post.corrupt_reply = lambda task, answer: answer[:-9] if task.party == "1" and task.kind == "train" else answer
    with pytest.warns(UserWarning, match="refused"):
        lab.train()
    told = json.loads(lab.call("report", "lab", "--json"))
    assert any("'1'" in one and "refused" in one for one in told["findings"])


@pytest.mark.parametrize("baseline_warnings", [["0"], ["0", "2"]])
def test_a_model_that_is_no_better_than_the_most_frequent_label_is_called_that(
    made: Callable[..., Lab], ruined: list[str]
) -> None:
    """A model that always gives one answer is exactly as good as that, and not below it."""
    lab = made("fedavg")

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.kind != "evaluate":
            return answer
        report = unpack(answer, Reply)
        own = report.metrics["majority"] + (0.0 if task.party in ruined else 0.1)
        return pack(replace(report, metrics={**report.metrics, "personal": own}))

    lab.post.corrupt_reply = spoil
    lab.train()
    told = json.loads(lab.call("server", "status", "lab", "--json"))
    assert [row["learned"] for row in told["parties"]] == [name not in ruined for name in NAMES]
    [said] = told["baseline_warnings"]
    assert said.startswith(
        f"No better than always answering the most frequent label: the model of {', '.join(ruined)},"
    )
    assert f"{len(ruined)} of 3 parties" in said and ("this training is ruined" in said) is (len(ruined) == 2)
    assert said in lab.call("server", "status", "lab") and said in lab.call("report", "lab")
    assert said in Path(json.loads(lab.call("report", "lab", "--json"))["report"]).read_text()


def test_a_training_that_has_lost_what_it_had_learned_is_called_a_collapse(made: Callable[..., Lab]) -> None:
    lab = made("fedavg", "", RUN.replace("rounds = 4", "rounds = 7"))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.kind != "train":
            return answer
        report = unpack(answer, Reply)
        return pack(
            replace(report, metrics={**report.metrics, "loss": 2.0 - task.round / 2 if task.round < 4 else 9.0})
        )

    lab.post.corrupt_reply = spoil
    lab.train()
    assert "was lost at round 4 and stayed lost: collapse." in lab.call("server", "status", "lab")


def test_where_no_label_is_the_most_frequent_nobody_is_held_against_one(made: Callable[..., Lab]) -> None:
    lab = made("fedavg")

    def spoil(task: Task, answer: bytes) -> bytes:
        report = unpack(answer, Reply)
        return pack(replace(report, metrics={n: v for n, v in report.metrics.items() if n != "majority"}))

    lab.post.corrupt_reply = spoil
    lab.train()
    told = json.loads(lab.call("server", "status", "lab", "--json"))
    assert told["baseline_warnings"] == [] and {row["learned"] for row in told["parties"]} == {None}
    assert "majority" not in lab.call("server", "status", "lab")


def test_the_status_says_who_is_there_away_has_left_or_never_came(made: Callable[..., Lab]) -> None:
    lab = made()
    assert {one["presence"] for one in lab.parties().values()} == {"invited"}
    served = FolderLock(lab.roster.run_folder / ".lock")
    for name in ("0", "1"):
        lab.roster.record_join(name, "a machine")
    post = PresenceRecorder(lab.post, lab.roster.run_folder)
    lab.post.unreachable = {"2"}
    post.connected_parties()
    first = lab.parties()
    assert {name: one["presence"] for name, one in first.items()} == {
        "0": "connected",
        "1": "connected",
        "2": "invited",
    }
    assert "The server runs: process" in lab.call("server", "status", "lab")
    lab.post.unreachable = {"0", "1", "2"}
    lab.post.departed = {"1"}
    post.connected_parties()
    away = lab.parties()
    assert {name: one["presence"] for name, one in away.items()} == {"0": "disconnected", "1": "left", "2": "invited"}
    assert first["0"]["last_seen"] <= away["0"]["last_seen"] and away["2"]["last_seen"] is None
    lab.post.departed = set()
    post = PresenceRecorder(
        lab.post, lab.roster.run_folder
    )  # as after a kill: who has left has, and nobody is there before it was seen
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "disconnected",
        "1": "left",
        "2": "invited",
    }
    lab.post.unreachable = {"2"}
    post.connected_parties()
    lab.roster.revoke("1")
    served.release()
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "was connected",
        "1": "revoked",
        "2": "invited",
    }
    shown = lab.call("server", "status", "lab")
    assert "not running" in shown and "was connected" in shown and lab.parties()["0"]["last_seen"] in shown


def test_when_a_party_was_last_heard_of_is_noted_while_nothing_else_changes(
    made: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a disk that is full, or a file that was damaged, ends nothing."""
    lab = made()
    lab.roster.record_join("0", "a machine")
    now = [100.0]
    monkeypatch.setattr(presence.time, "monotonic", lambda: now[0])
    post = PresenceRecorder(lab.post, lab.roster.run_folder)
    file = lab.roster.run_folder / "presence.json"
    post.connected_parties()
    file.write_text("{}")
    post.connected_parties()
    assert lab.parties()["0"]["presence"] == "disconnected"
    now[0] += 11
    post.connected_parties()
    assert lab.parties()["0"]["presence"] == "was connected"
    file.write_text("[1, 2")
    assert lab.parties()["0"]["presence"] == "disconnected"
    now[0] += 11
    with inject_faults(0, error=disk_full_error) as found:
        assert post.connected_parties().keys() == set(NAMES)
    assert found.reached


def test_who_was_told_that_the_training_is_over_is_done(made: Callable[..., Lab]) -> None:
    lab = made()
    lab.train()
    lab.roster.revoke("1")
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "finished",
        "1": "revoked",
        "2": "finished",
    }
    assert lab.parties()["1"]["last_seen"] is None  # nobody has noted that it was there


@pytest.mark.parametrize("file", ["party_descriptions.json", "notified_parties.json"])
@pytest.mark.parametrize("text", ["{", "3"])
def test_a_file_of_the_server_that_is_damaged_is_named(made: Callable[..., Lab], file: str, text: str) -> None:
    lab = made()
    lab.train()
    (lab.roster.run_folder / file).write_text(text)
    assert f"{file} is not as Descant wrote it" in "".join(lab.call("server", "status", "lab", code=1).split("\n"))
