"""Status, report and global model on the server, which has no data of the parties."""

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
from test_deployment_in_memory import InMemoryTransport, SimulatedKill, silo_handlers, simulated_federation
from toy_problems import network
from write_faults import disk_full_error, inject_faults

NAMES = ("0", "1", "2")
RUN = "[run]\nseed = 5\nrounds = 4\npoints = 2\n"


class ServerFixture:
    """A federation in a folder with an in-memory transport."""

    def __init__(self, folder: Path, method: str = "fedgeomed+", extra: str = "", run: str = RUN) -> None:
        self.folder = folder
        self.text = run + MODEL_AND_METHOD_TABLES.format(method=method) + extra
        (folder / "recipe.toml").write_text(self.text)
        self.call("server", "init", "lab", "recipe.toml")
        self.roster = Roster(folder / "lab")
        for name in NAMES:
            self.roster.invite(name, folder / f"{name}.invite")
        self.transport = InMemoryTransport(silo_handlers(folder / "silos", NAMES))

    def call(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == code, done.output
        return done.output

    def parties(self) -> dict[str, dict[str, str]]:
        """Return each party's row of the status."""
        return {row["name"]: row for row in json.loads(self.call("server", "status", "lab", "--json"))["parties"]}

    def train(self, log: Callable[[str], None] = lambda line: None, min_parties: int = 3) -> dict[str, object]:
        recipe = read_recipe(self.text)
        net = Net.from_model(network, 0)
        loss = address_of(torch.nn.functional.cross_entropy)
        handshakes = HandshakeTransport(
            self.transport,
            recipe,
            "lab",
            net=net,
            loss=loss,
            log=lambda text: None,
            record_join=self.roster.record_join,
        )
        limits = WaitLimits(
            min_parties=min_parties, quorum=None if min_parties == 3 else min_parties, deadline=0.2, grace=0
        )
        return TrainingSession(self.roster.run_folder, recipe, handshakes, limits=limits, log=log).run_to_completion(
            lambda: NAMES
        )


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerFixture]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: ServerFixture(tmp_path, *arguments)


def test_resume_command_has_the_options_of_the_first_start(
    make_server: Callable[..., ServerFixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, rounds would begin with fewer parties, and the result would differ."""
    lab = make_server()
    monkeypatch.setattr(
        "descant.deployment.server.serve.FederationServer._serve_with_restarts", lambda *_: {"global_model": ""}
    )
    options = ["--deadline", "20.5", "--quorum", "2", "--min-parties", "3"]
    lab.call("server", "start", "lab", *options)

    def kill(line: str) -> None:
        if line.startswith("Round 1:"):
            raise SimulatedKill

    with suppress(SimulatedKill):
        lab.train(kill)
    for command in (("server", "status", "lab"), ("runs", "lab")):
        assert f"{' '.join(options)}\n" in lab.call(*command)


@pytest.mark.parametrize("method", ["fedavg", "fedgeomed+"])
def test_global_model_file_loads_into_a_module(make_server: Callable[..., ServerFixture], method: str) -> None:
    lab = make_server(method)
    assert json.loads(lab.call("server", "status", "lab", "--json"))["global_model"] is None
    file = str(lab.train()["global_model"])
    model = network()
    twin = simulated_federation(read_recipe(lab.text), 4, NAMES)
    model.load_state_dict(load_file(file))
    whole = twin.global_model_.state_dict()
    assert all(torch.equal(tensor, whole[key]) for key, tensor in model.state_dict().items())
    assert Path(json.loads(lab.call("server", "status", "lab", "--json"))["global_model"]).samefile(file)
    Path(file).unlink()  # as after a kill before the write: the same command repeats it
    lab.transport.unreachable.clear()
    assert lab.train()["global_model"] == file and Path(file).exists()
    assert f"load_file({str(Path('lab') / 'run' / 'global_model.safetensors')!r})" in lab.call(
        "server", "status", "lab"
    )


def test_status_has_the_last_scores_of_each_party_and_their_round(make_server: Callable[..., ServerFixture]) -> None:
    """A party that missed the last evaluation keeps its earlier scores."""
    lab = make_server()

    def disconnect(line: str) -> None:
        if line.startswith("Round 3:"):
            lab.transport.unreachable = {"1"}

    lab.train(disconnect, min_parties=2)
    rows = {row["name"]: row for row in json.loads(lab.call("server", "status", "lab", "--json"))["parties"]}
    held = recorded(lab.roster.run_folder / "training").numbers
    assert held.scored_rounds.tolist() == [2, 4]
    for k, name in enumerate(NAMES):
        evaluation = 0 if name == "1" else 1
        for column in ("personal", "global_model"):
            assert rows[name][column] == held.scores[column][evaluation, k]
        assert (rows[name]["evaluated"], rows[name]["rounds"]) == ((2, 3) if name == "1" else (4, 4))
    shown = lab.call("server", "status", "lab")
    assert "accuracy of the personal and the global model" in shown and f"{rows['0']['personal']:.3f}" in shown


def test_status_has_no_scores_before_the_first_evaluation(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server()

    def kill(line: str) -> None:
        if line.startswith("Round 1:"):
            raise SimulatedKill

    with suppress(SimulatedKill):
        lab.train(kill)
    status = json.loads(lab.call("server", "status", "lab", "--json"))
    assert status["round"] == 1 and status["metric"] is None and status["parties"][0]["personal"] is None
    assert "global_model" not in lab.call("server", "status", "lab")
    assert "descant server start" in lab.call("report", "lab", code=1)
    assert "descant server start" in lab.call("runs", "lab")


@pytest.mark.parametrize("folder", ["lab", "lab/run/training"])
def test_server_report_has_scores_and_participation(make_server: Callable[..., ServerFixture], folder: str) -> None:
    lab = make_server("fedavg", 'wrap = [{wrapper = "local_dp", noise = 8.0, budget = 50.0}]\n')
    assert "has not begun yet" in lab.call("report", folder, code=1)

    def away(line: str) -> None:
        if line.startswith("Round 2:"):
            lab.transport.unreachable = {"1"}

    lab.train(away, min_parties=2)
    status = json.loads(lab.call("report", folder, "--json"))
    held = recorded(lab.roster.run_folder / "training").numbers
    assert [row["rounds"] for row in status["table"]] == [4, 2, 4]
    assert status["table"][0]["global_model"] == held.scores["global_model"][-1, 0]
    assert "After round 4, evaluated by 2 of 3 parties" in status["verdict"]
    assert "descant silo evaluate" in status["verdict"]
    assert any("Privacy of a party: ε=" in one and "of a budget of 50" in one for one in status["findings"])
    page = Path(status["report"]).read_text()
    assert all(text in page for text in ("data:image/png", "Participation and coreset proxies", "Round by round"))
    assert "first seed" not in page
    assert status["verdict"] in lab.call("report", folder)


def test_server_report_names_rejected_replies(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server()
    lab.transport.corrupt_reply = lambda task, answer: (
        answer[:-9] if task.party == "1" and task.kind == "train" else answer
    )
    with pytest.warns(UserWarning, match="rejected"):
        lab.train()
    status = json.loads(lab.call("report", "lab", "--json"))
    assert any("'1'" in one and "rejected" in one for one in status["findings"])


@pytest.mark.parametrize("ruined", [["0"], ["0", "2"]])
def test_model_no_better_than_the_majority_label_is_reported(
    make_server: Callable[..., ServerFixture], ruined: list[str]
) -> None:
    """A model that always gives one answer equals the baseline and is not below it."""
    lab = make_server("fedavg")

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.kind != "evaluate":
            return answer
        report = unpack(answer, Reply)
        own = report.metrics["majority"] + (0.0 if task.party in ruined else 0.1)
        return pack(replace(report, metrics={**report.metrics, "personal": own}))

    lab.transport.corrupt_reply = spoil
    lab.train()
    status = json.loads(lab.call("server", "status", "lab", "--json"))
    assert [row["learned"] for row in status["parties"]] == [name not in ruined for name in NAMES]
    [warning] = status["baseline_warnings"]
    assert warning.startswith(
        f"No better than always answering the most frequent label: the model of {', '.join(ruined)},"
    )
    assert f"{len(ruined)} of 3 evaluated parties" in warning
    assert ("this training has failed" in warning) is (len(ruined) == 2)
    assert warning in lab.call("server", "status", "lab") and warning in lab.call("report", "lab")
    assert warning in Path(json.loads(lab.call("report", "lab", "--json"))["report"]).read_text()


def test_lost_training_progress_is_reported_as_a_collapse(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server("fedavg", "", RUN.replace("rounds = 4", "rounds = 7"))

    def spoil(task: Task, answer: bytes) -> bytes:
        if task.kind != "train":
            return answer
        report = unpack(answer, Reply)
        return pack(
            replace(report, metrics={**report.metrics, "loss": 2.0 - task.round / 2 if task.round < 4 else 9.0})
        )

    lab.transport.corrupt_reply = spoil
    lab.train()
    assert "was lost at round 4 and stayed lost: collapse." in lab.call("server", "status", "lab")


def test_parties_without_a_majority_label_are_not_compared_with_it(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server("fedavg")

    def spoil(task: Task, answer: bytes) -> bytes:
        report = unpack(answer, Reply)
        return pack(replace(report, metrics={n: v for n, v in report.metrics.items() if n != "majority"}))

    lab.transport.corrupt_reply = spoil
    lab.train()
    status = json.loads(lab.call("server", "status", "lab", "--json"))
    assert status["baseline_warnings"] == [] and {row["learned"] for row in status["parties"]} == {None}
    assert "majority" not in lab.call("server", "status", "lab")


def test_status_shows_the_presence_of_every_party(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server()
    assert {one["presence"] for one in lab.parties().values()} == {"invited"}
    served = FolderLock(lab.roster.run_folder / ".lock")
    for name in ("0", "1"):
        lab.roster.record_join(name, "a machine")
    recorder = PresenceRecorder(lab.transport, lab.roster.run_folder)
    lab.transport.unreachable = {"2"}
    recorder.connected_parties()
    first = lab.parties()
    assert {name: one["presence"] for name, one in first.items()} == {
        "0": "connected",
        "1": "connected",
        "2": "invited",
    }
    assert "The server runs: process" in lab.call("server", "status", "lab")
    lab.transport.unreachable = {"0", "1", "2"}
    lab.transport.departed = {"1"}
    recorder.connected_parties()
    away = lab.parties()
    assert {name: one["presence"] for name, one in away.items()} == {"0": "disconnected", "1": "left", "2": "invited"}
    assert first["0"]["last_seen"] <= away["0"]["last_seen"] and away["2"]["last_seen"] is None
    lab.transport.departed = set()
    recorder = PresenceRecorder(lab.transport, lab.roster.run_folder)  # as after a kill: no party is connected yet
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "disconnected",
        "1": "left",
        "2": "invited",
    }
    lab.transport.unreachable = {"2"}
    recorder.connected_parties()
    lab.roster.revoke("1")
    served.release()
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "was connected",
        "1": "revoked",
        "2": "invited",
    }
    shown = lab.call("server", "status", "lab")
    assert "not running" in shown and "was connected" in shown and lab.parties()["0"]["last_seen"] in shown


def test_last_seen_time_is_updated_without_other_changes(
    make_server: Callable[..., ServerFixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a damaged file does not end the server."""
    lab = make_server()
    lab.roster.record_join("0", "a machine")
    now = [100.0]
    monkeypatch.setattr(presence.time, "monotonic", lambda: now[0])
    recorder = PresenceRecorder(lab.transport, lab.roster.run_folder)
    file = lab.roster.run_folder / "presence.json"
    recorder.connected_parties()
    file.write_text("{}")
    recorder.connected_parties()
    assert lab.parties()["0"]["presence"] == "disconnected"
    now[0] += 11
    recorder.connected_parties()
    assert lab.parties()["0"]["presence"] == "was connected"
    file.write_text("[1, 2")
    assert lab.parties()["0"]["presence"] == "disconnected"
    now[0] += 11
    with inject_faults(0, error=disk_full_error) as found:
        assert recorder.connected_parties().keys() == set(NAMES)
    assert found.reached


def test_party_notified_of_the_end_is_finished(make_server: Callable[..., ServerFixture]) -> None:
    lab = make_server()
    lab.train()
    lab.roster.revoke("1")
    assert {name: one["presence"] for name, one in lab.parties().items()} == {
        "0": "finished",
        "1": "revoked",
        "2": "finished",
    }
    assert lab.parties()["1"]["last_seen"] is None  # its presence was not recorded


@pytest.mark.parametrize("file", ["party_descriptions.json", "notified_parties.json"])
@pytest.mark.parametrize("text", ["{", "3"])
def test_damaged_server_file_is_named(make_server: Callable[..., ServerFixture], file: str, text: str) -> None:
    lab = make_server()
    lab.train()
    (lab.roster.run_folder / file).write_text(text)
    assert f"{file} is not as Descant wrote it" in "".join(lab.call("server", "status", "lab", code=1).split("\n"))
