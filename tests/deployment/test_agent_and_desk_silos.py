"""Agents and desks on machines of their own: what they learn in stays there, and the numbers are the simulation's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from descant import DescantWarning, Federation
from descant.cli import app
from descant.config import Recipe, read_recipe
from descant.core.interfaces import EvaluationJob
from descant.core.messages import Reply, Task
from descant.core.metrics import EPISODE_RETURN, trivial_baseline
from descant.core.timeouts import WaitLimits
from descant.deployment.server import HandshakeTransport
from descant.deployment.server.recipe_check import check_servable
from descant.deployment.server.server_report import write_report
from descant.deployment.server.training_session import TrainingSession, read_descriptions
from descant.deployment.server.training_status import training_status
from descant.deployment.silo import SiloFile, TaskHandler
from descant.deployment.silo.dry_run import dry_run
from descant.deployment.silo.result_files import PERSONAL_MODEL_FILE, SiloResults, write_model
from descant.deployment.silo.silo_evaluation import _train_locally, compare_with_local
from descant.deployment.silo.silo_state import SiloState
from descant.engines.remote import Silos
from descant.errors import PartyError, SettingError, StateError
from descant.models.flat import Net
from descant.parties import Agent
from descant.parties.datasets import digits
from descant.parties.remote_parties import describe_party, remote_population
from descant.portfolio import desk as desks
from descant.rl import agent
from descant.rounds.checkpoint import digest_of_models
from descant.serialization.references import address_of
from descant.serialization.wire import pack, unpack
from descant.tracking import read_run as recorded
from recipe_matrix import SILO_CASES, RecipeCase
from silo_file_templates import AGENT_SILO_FILE, DESK_SILO_FILE, simulated_population
from test_server_silo_protocol import InMemoryTransport, RestartingTransport, SimulatedKill, count_survived_kills
from test_server_silo_protocol import silo_handlers as desks_of
from toy_problems import cartpole_agents as three_agents

ACTORS = ["FedRL, DQN", "FedAvgPlus, policy gradient", "FedGeoMedPlus, desks"]
NAMES = ("0", "1", "2")


def recipe(way: RecipeCase, rounds: int = 3) -> Recipe:
    return read_recipe(f"[run]\nseed = 5\nrounds = {rounds}\n" + way.recipe_text)


def silos(
    folder: Path, way: RecipeCase, names: Collection[str] = NAMES, log: Callable[[str], None] = lambda text: None
) -> dict[str, Callable[[], TaskHandler]]:
    return desks_of(folder, names, log, way.silo_file_template)


def meeting(
    post: InMemoryTransport, chosen: Recipe, say: Callable[[str], None] = lambda text: None
) -> HandshakeTransport:
    loss = address_of(torch.nn.functional.cross_entropy)
    return HandshakeTransport(post, chosen, "lab", net=Net.from_model(chosen.model(), 0), loss=loss, log=say)


def deployed(post: InMemoryTransport, chosen: Recipe) -> Federation:
    met = meeting(post, chosen)
    people = remote_population(met.wait_for_quorum(len(post.connected_parties())))
    engine = Silos(met, WaitLimits(), lambda text: None)
    return Federation(chosen.model(), people, chosen.algorithm(), solver=chosen.solver(), seed=5, engine=engine)


def simulated(folder: Path, chosen: Recipe, names: tuple[str, ...] = NAMES) -> Federation:
    people = simulated_population([SiloFile(folder / f"team{name}.py", name) for name in names])
    return Federation(chosen.model(), people, chosen.algorithm(), solver=chosen.solver(), seed=5)


def same(ours: Federation, theirs: Federation, folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """The models, and all that each party remembers: its replay, where it is in its episode, what it held."""
    assert digest_of_models(ours.state) == digest_of_models(theirs.state)
    for name in names:
        known = theirs.engine_.party_states.get(name)
        kept = SiloState(folder / f"at-{name}").load_party_state(ours.state.round)
        assert known.keys() == kept.keys()
        assert all(torch.equal(known[key], kept[key]) for key in known)


@pytest.mark.parametrize("name", ACTORS)
def test_deployment_equals_the_simulation_bit_for_bit(tmp_path: Path, name: str) -> None:
    """A desk is made anew for every letter, as after a kill: all that it goes on with is in its folder."""
    chosen = recipe(SILO_CASES[name])
    fed = deployed(InMemoryTransport(silos(tmp_path, SILO_CASES[name])), chosen).fit(3, progress=False)
    twin = simulated(tmp_path, chosen).fit(3, progress=False)
    same(fed, twin, tmp_path)
    for column in ("personal", "global_model", "majority"):
        ours, theirs = (getattr(one.scores(), column).values for one in (fed, twin))
        np.testing.assert_array_equal(ours, theirs)
    assert [entry.get("reward") for entry in fed.history_] == [entry.get("reward") for entry in twin.history_]
    assert fed.history_[-1]["reward"] is not None
    assert len(SiloState(tmp_path / "at-0").load_party_state(3)) > 2


@pytest.mark.parametrize("name", ACTORS)
def test_a_silo_killed_at_any_write_gives_the_same_models(tmp_path: Path, name: str) -> None:
    chosen = recipe(SILO_CASES[name])
    two = NAMES[:2]
    silos(tmp_path, SILO_CASES[name], two)
    twin = simulated(tmp_path, chosen, two).fit(2, progress=False)

    def run(folder: Path) -> None:
        post = RestartingTransport(silos(folder, SILO_CASES[name], two))
        same(deployed(post, chosen).fit(2, progress=False), twin, folder, two)

    assert count_survived_kills(tmp_path, run, every=3) > 15


@pytest.mark.parametrize("name", ACTORS)
def test_a_restarted_server_continues_with_late_agents(tmp_path: Path, name: str) -> None:
    """All that it knows of them is in its folder; who was invited and has not come yet is part of it, too."""
    way = SILO_CASES[name]
    said = list[str]()
    chosen = recipe(way, 4)

    def training(post: InMemoryTransport) -> TrainingSession:
        return TrainingSession(
            tmp_path / "run",
            chosen,
            meeting(post, chosen, said.append),
            limits=WaitLimits(min_parties=2),
            log=said.append,
        )

    (tmp_path / "run").mkdir()
    post = InMemoryTransport(silos(tmp_path, way))
    post.unreachable = {"2"}
    ends = [2]

    def until(task: Task, answer: bytes) -> bytes:
        ends[0] -= task.kind == "train" and task.party == "0"
        if ends[0] < 0:
            raise SimulatedKill
        return answer

    post.corrupt_reply = until
    with pytest.raises(SimulatedKill):
        training(post).run_to_completion(lambda: NAMES)
    assert read_descriptions(tmp_path / "run")["2"]["described_after"] is None
    again = InMemoryTransport(silos(tmp_path, way))
    training(again).run_to_completion(lambda: NAMES)
    met = read_descriptions(tmp_path / "run")
    assert {name: one["test_count"] for name, one in met.items()} == {
        name: SiloFile(tmp_path / f"team{name}.py", name).party_data.tests for name in NAMES
    }
    found = recorded(tmp_path / "run" / "training").numbers
    assert found.rounds.tolist() == [1, 2, 3, 4] and found.accepted[:2, 2].tolist() == [False, False]
    assert found.accepted[-1].all()
    what = "an environment of its own" if way.silo_file_template == AGENT_SILO_FILE else "4 assets to trade"
    assert f"0 has come, with {what}." in said


@pytest.mark.parametrize("name", ACTORS)
def test_every_field_of_a_reply_is_listed_by_the_dry_run(tmp_path: Path, name: str) -> None:
    """And no number of an environment or of prices is in it, nor the name of an asset."""
    answers = list[Reply]()
    way = SILO_CASES[name]
    post = InMemoryTransport(silos(tmp_path, way))

    def seen(task: Task, answer: bytes) -> bytes:
        answers.append(unpack(answer, Reply))
        everything.append(answer)
        return answer

    post.corrupt_reply = seen
    everything = list[bytes]()
    deployed(post, recipe(way)).fit(2, progress=False).scores()
    own = SiloFile(tmp_path / "team0.py", "0").party_data
    odd = {
        "state_reset",
        "retry_after",
        *([] if isinstance(own, Agent) else ["real_only"]),
    }  # of what has not happened here
    leaves = dry_run(SiloFile(tmp_path / "team0.py", "0"))["outgoing"]
    for kind, when in (
        ("handshake", "when it joins"),
        ("train", "after training"),
        ("evaluate", "when models are judged"),
    ):
        found = {key for answer in answers if answer.kind == kind for key in answer.metrics}
        named = {one for key in leaves[when] for one in key.split(", ")}
        assert found == named - {"arrays", "forget"} - odd, kind
    assert answers[0].metrics["data_description"] == describe_party(own)
    assert not [secret for secret in secrets_of(own) for answer in everything if secret in answer]


def secrets_of(own: Any) -> list[bytes]:
    """Numbers of an environment or of prices in every form, eight bytes or more, and what has names."""
    if isinstance(own, Agent):
        physics = [getattr(own.environment, name) for name in ("gravity", "length", "force_mag")]
        return [form for value in physics for form in (repr(value).encode(), np.float64(value).tobytes())]
    prices = [row.astype(kind).tobytes() for row in (*own.prices, *own.test) for kind in (np.float32, np.float64)]
    return [*(name.encode() for name in own.assets), *prices]


def test_silo_check_reports_the_initial_return_of_an_agent(tmp_path: Path) -> None:
    for name, text, first in (
        ("agent", AGENT_SILO_FILE, "first return"),
        ("desk", DESK_SILO_FILE, "first annual return"),
    ):
        (tmp_path / f"{name}.py").write_text(text.format(name="1"))
        told = CliRunner().invoke(app, ["silo", "check", str(tmp_path / f"{name}.py"), "--name", "north"])
        assert told.exit_code == 0, told.output
        assert f"{first}:" in told.output and "first loss" not in told.output
        assert {"agent": "its environment, and all", "desk": "its prices, the names"}[name] in told.output
        found = dry_run(SiloFile(tmp_path / f"{name}.py", "north"))
        assert math.isfinite(found[first]) and found["party"] == "north"


WRONG = {
    "two parties": ("return cartpole_agents()", "Got 3 parties"),
    "rows that leave": (
        "return cartpole_agents().subset(['0'])\npolicy = {'share': 0.1}",
        "share of .*: these are for rows",
    ),
    "a loss": ("return cartpole_agents().subset(['0'])\nloss = print", "loss of .*: these are for rows"),
    "too few outputs": (
        "return cartpole_agents().subset(['0'])\nimport descant.models\ndef model(): return descant.models.mlp(4, 1, (8,))",
        r"an agent needs outputs \[8, 2\] or \[8, 3\]",
    ),
    "one number": ("return 3", "must give .* one party"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_cannot_take_part_is_rejected_with_a_reason(tmp_path: Path, wrong: str) -> None:
    text, told = WRONG[wrong]
    (tmp_path / "team.py").write_text(
        f"from toy_problems import policy_network as model, cartpole_agents\ndef data():\n    {text}\n"
    )
    with pytest.raises(Exception, match=told):
        dry_run(SiloFile(tmp_path / "team.py", "north"))


def test_a_file_may_return_a_party_with_rows(tmp_path: Path) -> None:
    text = (
        "from functools import partial\nfrom descant import models, parties\nmodel = partial(models.mlp, 64, 10)\n"
    )
    (tmp_path / "team.py").write_text(f"{text}def data():\n    return parties.digits(count=3).subset(['1'])\n")
    own = SiloFile(tmp_path / "team.py", "north").party_data
    there = digits(count=3)["1"]
    assert own.name == "north" and all(map(torch.equal, own.data, there.data))


def refused(folder: Path, way: RecipeCase, team: str) -> str:
    """What is said of a party that comes with another file than the others."""
    said = list[str]()
    post = InMemoryTransport(silos(folder, way))
    (folder / "team2.py").write_text(team.format(name="2"))
    met = meeting(post, recipe(way), said.append)
    for _ in range(3):
        met.connected_parties()
    assert set(met.data_descriptions) == {"0", "1"}
    return next(text for text in said if text.startswith("2 has come"))


ROWS = """
import torch
from toy_problems import policy_network as model

def data():
    return torch.zeros(8, 4), torch.zeros(8).long()
"""


@pytest.mark.parametrize("name", ACTORS)
def test_a_party_with_rows_is_rejected_among_agents_and_desks(tmp_path: Path, name: str) -> None:
    """Though the model takes them; what is wrong with its data it reads on its own machine."""
    way = SILO_CASES[name]
    net = "policy_network" if way.silo_file_template == AGENT_SILO_FILE else "trading_network"
    size = "8, 4" if way.silo_file_template == AGENT_SILO_FILE else "8, 4, 11"
    told = refused(tmp_path, way, ROWS.replace("policy_network", net).replace("8, 4", size))
    assert told.endswith("cannot take part: PartyError. The party's own log says more.")


def test_an_agent_is_rejected_among_parties_with_rows(tmp_path: Path) -> None:
    """Though the model can act there."""
    rows = RecipeCase("fedavg", network_address="toy_problems:policy_network", silo_file_template=ROWS)
    assert refused(tmp_path, rows, AGENT_SILO_FILE).endswith(
        "cannot take part: PartyError. The party's own log says more."
    )


def test_agents_with_different_actions_cannot_share_a_federation(tmp_path: Path) -> None:
    said = {"observations": [4], "actions": 2, "test_count": 2}
    remote_population({"a": said, "b": {**said, "test_count": 9}})
    with pytest.raises(PartyError, match="They must be alike"):
        remote_population({"a": said, "b": {**said, "actions": 3}})
    lies = [{"actions": 0}, {"observations": [2**40]}, {"actions": "2"}, {"test_count": -1}, {"observations": 4}]
    lies += [
        {"observations": ["a", 10**9]},
        {"observations": [10**9] * 20_000},
        {"actions": 2**22},
        {"test_count": True},
    ]
    lies += [{"observations": [2**26]}, {"observations": [2**12] * 2}]
    for wrong in lies:
        with pytest.raises(PartyError, match="is not understood"):
            remote_population({"a": {**said, **wrong}})
    traded = describe_party(desks("generated", count=1, assets=3)["0"])
    for wrong in (
        {"assets": 0},
        {"window": 1},
        {"assets": 2**22},
        {"assets": 2**20, "window": 9},
        {"test_count": None},
        {"window": "30"},
    ):
        with pytest.raises(PartyError, match="is not understood"):
            remote_population({"a": {**traded, **wrong}})


@pytest.mark.parametrize("name", ACTORS)
def test_a_party_whose_check_raises_is_rejected_and_the_server_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever is raised, for want of memory too: the others are let in."""
    chosen = recipe(SILO_CASES[name])
    said = list[str]()
    met = meeting(InMemoryTransport(silos(tmp_path, SILO_CASES[name])), chosen, said.append)
    real = type(met._solver).execution_modes

    def ways(solver: Any, net: Net, loss: Any, terms: Any, party: Any, count: int) -> dict[str, str]:
        if party.name == "1" and net is met.net:
            raise MemoryError("8 GB")
        return real(solver, net, loss, terms, party, count)

    monkeypatch.setattr(type(met._solver), "execution_modes", ways)
    assert met.wait_for_quorum(2).keys() == {"0", "2"}
    assert any(text.startswith("1 has come, and cannot take part: ") and "MemoryError" in text for text in said)


def lying(post: InMemoryTransport, lies: dict[str, dict[str, int]]) -> None:
    """Some say of themselves what is not true."""

    def spoil(task: Task, answer: bytes) -> bytes:
        report = unpack(answer, Reply)
        if task.kind != "handshake" or task.party not in lies:
            return answer
        described = {**report.metrics["data_description"], **lies[task.party]}
        return pack(replace(report, metrics={**report.metrics, "data_description": described}))

    post.corrupt_reply = spoil


def test_a_party_that_left_does_not_fix_the_form_of_the_others(tmp_path: Path) -> None:
    """A model may take any number of assets; who comes again is compared with those who are there by then."""
    way = SILO_CASES["FedGeoMedPlus, desks"]
    said = list[str]()
    post = InMemoryTransport(silos(tmp_path, way))
    lying(post, {"0": {"assets": 5}})
    met = meeting(post, recipe(way), said.append)
    post.unreachable = {"1", "2"}
    met.connected_parties()
    assert met.connected_parties().keys() == {"0"}
    post.unreachable = {"0"}
    met.connected_parties()
    assert met.connected_parties().keys() == {"1", "2"}
    post.unreachable = set()
    met.connected_parties()
    assert met.connected_parties().keys() == {"1", "2"} and "its assets is 5, and the federation's is 4" in said[-1]


def test_a_returning_party_must_keep_the_form_of_the_training(tmp_path: Path) -> None:
    """Though nobody else is there to be unlike: else whoever came next would end the training."""
    way = SILO_CASES["FedGeoMedPlus, desks"]
    said = list[str]()
    chosen = recipe(way, 4)
    post = InMemoryTransport(silos(tmp_path, way))
    (tmp_path / "run").mkdir()
    post.unreachable = {"1", "2"}
    lies = dict[str, dict[str, int]]()
    trained = [0]
    lying(post, lies)
    lie = post.corrupt_reply

    def spoil(task: Task, answer: bytes) -> Any:
        trained[0] += task.kind == "train"
        if task.kind == "train" and trained[0] == 2:
            post.session_ids["0"], post.unreachable = "again", set()
            lies.update({name: {"assets": 5} for name in ("0", "1")})
        return lie(task, answer)

    post.corrupt_reply = spoil
    TrainingSession(
        tmp_path / "run", chosen, meeting(post, chosen, said.append), limits=WaitLimits(min_parties=1), log=said.append
    ).run_to_completion(lambda: ["0"])
    assert {name: one["assets"] for name, one in read_descriptions(tmp_path / "run").items()} == {"0": 4, "2": 4}
    assert sum("its assets is 5, and the federation's is 4" in text for text in said) == 2


def test_the_server_cannot_act_in_a_remote_environment() -> None:
    people = remote_population({"north": describe_party(agent(count=1)["0"])})
    with pytest.raises(PartyError, match="The environment of 'north' is on its own machine"):
        people["north"].world.beside([], ["north"])  # type: ignore[attr-defined]
    assert "an environment of its own" in people.describe()


@pytest.mark.parametrize("name", ACTORS)
def test_silo_evaluation_of_an_agent_equals_the_simulation(tmp_path: Path, name: str) -> None:
    """By the numbers of a simulation; and chance is reckoned with episode by episode, or day by day."""
    way = SILO_CASES[name]
    chosen = recipe(way)
    fed = deployed(InMemoryTransport(silos(tmp_path, way)), chosen).fit(3, progress=False)
    fed.scores()
    file = SiloFile(tmp_path / "team1.py", "1")
    table = compare_with_local(file, tmp_path / "at-1")
    twin = simulated(tmp_path, chosen).fit(3, progress=False)
    [row], theirs = table.rows, next(row for row in twin.table().rows if row["party"] == "1")
    beside = trivial_baseline(chosen.solver().metric.name).split()[0]  # type: ignore[union-attr]
    for column in ("personal", "global_model", "local", beside):
        assert row[column] == theirs[column], column
    assert f"{file.party_data.tests} {file.wording.tested_unit}s" in table.verdict
    assert "test sample" not in table.verdict


def balancing(sign: float) -> dict[str, torch.Tensor]:
    """A model that pushes a cart to the side to which its pole falls; with -1, to the other."""
    first = torch.zeros(8, 4)
    last = torch.zeros(2, 8)
    first[0], first[1] = torch.tensor([0, 0, 1.0, 0.5]), torch.tensor([0, 0, -1.0, -0.5])
    last[1, 0] = last[0, 1] = sign
    return {"1.weight": first, "1.bias": torch.zeros(8), "3.weight": last, "3.bias": torch.zeros(2)}


@pytest.mark.parametrize(("sign", "told"), [(1.0, "Joining helped: return "), (0.0, "No difference that 40 test ep")])
def test_the_significance_test_pairs_episodes_or_days(tmp_path: Path, sign: float, told: str) -> None:
    """A model of its own that is far better than what it learns alone, and one that is the same."""
    many = "from descant import parties\ndef many(): return parties.agents(count=3, test=40)\n"
    team = many + AGENT_SILO_FILE.replace("cartpole_agents()", "many()")
    way = RecipeCase("fedavg", "", SILO_CASES["FedRL, DQN"].training_table, "toy_problems:policy_network", team)
    deployed(InMemoryTransport(silos(tmp_path, way)), recipe(way)).fit(1, progress=False).scores()
    file = SiloFile(tmp_path / "team0.py", "0")
    folder = tmp_path / "at-0"
    plan = TaskHandler(file, folder).plan
    result = SiloResults(folder)
    layout = plan.net.layout
    scores = result.scores()
    if sign:
        row = layout.join(balancing(sign))
        [found] = plan.solver.evaluate(
            EvaluationJob(plan.net, EPISODE_RETURN, [file.party_data], models=[[row]], trivial=False)
        )
        write_model(folder / PERSONAL_MODEL_FILE, layout, row, metadata={**scores, "personal": found.scores[0]})
        assert found.scores[0] > 100
    else:
        write_model(
            folder / PERSONAL_MODEL_FILE,
            layout,
            _train_locally(plan, "0", result.training_records(), progress=False),
            metadata=scores,
        )
    assert compare_with_local(file, folder).verdict.startswith(told)


def test_evaluation_rejects_a_file_with_rows_for_an_agent(tmp_path: Path) -> None:
    way = SILO_CASES["FedRL, DQN"]
    deployed(InMemoryTransport(silos(tmp_path, way)), recipe(way)).fit(1, progress=False).scores()
    (tmp_path / "rows.py").write_text(ROWS)
    with pytest.raises(StateError, match=r"another kind than took part.*Give the file with which it joined"):
        compare_with_local(SiloFile(tmp_path / "rows.py", "0"), tmp_path / "at-0")


def test_an_untested_agent_is_told_which_setting_adds_tests(tmp_path: Path) -> None:
    untested = "from descant import parties\ndef few(): return parties.agents(count=3, test=0)\n"
    way = replace(
        SILO_CASES["FedRL, DQN"], silo_file_template=untested + AGENT_SILO_FILE.replace("cartpole_agents()", "few()")
    )
    deployed(InMemoryTransport(silos(tmp_path, way)), recipe(way)).fit(1, progress=False).scores()
    assert "agents(..., test=20)" in compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0").verdict


RAISING = """
import pathlib
from functools import partial
import gymnasium
from descant import models, parties

class Odd(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample() * 0, dict()

    def step(self, action):
        self.steps += 1
        if pathlib.Path(__file__ + ".mark").exists():
            raise ValueError("account 4711-0815")
        return self.observation_space.sample() * 0 + action, float(action), self.steps >= 9, False, dict()

gymnasium.register("Odd-{name}", Odd)
model = partial(models.mlp, 3, 2, (8,))

def data():
    return parties.agents("Odd-{name}", count=1, test=2)
"""


def test_a_failing_environment_costs_one_round_and_leaks_nothing(tmp_path: Path) -> None:
    """Each team has its own file's environment, by its own name; nobody else learns that name."""
    pytest.importorskip("gymnasium")
    own = list[str]()
    (tmp_path / "net.py").write_text("from descant import models\ndef net(): return models.mlp(3, 2, (8,))\n")
    way = RecipeCase("fedavg", "", SILO_CASES["FedRL, DQN"].training_table, f"{tmp_path / 'net.py'}:net", RAISING)
    post = InMemoryTransport(silos(tmp_path, way, log=own.append))
    answers = list[bytes]()
    fed = deployed(post, recipe(way)).fit(1, progress=False)

    def seen(task: Task, answer: bytes) -> bytes:
        answers.append(answer)
        return answer

    post.corrupt_reply = seen
    (tmp_path / "team1.py.mark").touch()
    with pytest.warns(DescantWarning, match="party '1'"):
        fed.fit(1, progress=False)
    (tmp_path / "team1.py.mark").unlink()
    fed.fit(1, progress=False)
    assert [entry["presence"] for entry in fed.history_] == ["ppp", "pap", "ppp"]
    assert any("4711" in text for text in own)
    assert not any(word in answer for answer in answers for word in (b"4711-0815", b"Odd-1"))


def test_status_and_report_of_agents_use_their_terms(tmp_path: Path) -> None:
    way = SILO_CASES["FedRL, DQN"]
    chosen = recipe(way, 2)
    (tmp_path / "run").mkdir()
    post = InMemoryTransport(silos(tmp_path, way))
    TrainingSession(
        tmp_path / "run", chosen, meeting(post, chosen), limits=WaitLimits(min_parties=3), log=lambda text: None
    ).run_to_completion(lambda: NAMES)
    found = training_status(tmp_path / "run")
    assert found["metric"] == "return" and found["scores"]["0"]["random"] == found["scores"]["0"]["majority"]
    table, page = write_report(tmp_path / "run" / "training")
    assert table.columns[-1] == "random" and "Random: acting at random" in page.read_text()
    assert not [text for text in found["baseline_warnings"] if "label" in text]
    assert json.dumps(found)


def test_recipes_of_agents_can_be_served_and_impossible_ones_are_rejected(tmp_path: Path) -> None:
    for name in ACTORS:
        assert check_servable(recipe(SILO_CASES[name]), with_key=False) == {}
    desk = SILO_CASES["FedGeoMedPlus, desks"]
    trading = replace(desk, training_table=desk.training_table.replace("batch = 8", "batch = 2000000000"))
    with pytest.raises(SettingError, match=r"for no kind of party that can be a silo: .*too few for batches"):
        check_servable(recipe(trading), with_key=False)
    measuring = 'wrap = [{wrapper = "adaptive", lr = [0.1, 0.2], reward = "clients", loss_samples = 4}]'
    way = RecipeCase("fedavg", measuring, SILO_CASES["FedRL, DQN"].training_table, "toy_problems:policy_network")
    with pytest.raises(SettingError, match="measure the loss on samples of theirs, and agents and desks have none"):
        check_servable(recipe(way), with_key=False)


def test_a_renamed_agent_keeps_its_environment() -> None:
    """But for what is drawn by its name."""
    from descant.rl.agent import single_party

    one: Any = three_agents()["2"]
    other: Any = single_party(one, "north")["north"]
    assert other.name == "north" and other.world == one.world and other.tests == one.tests
    assert other.test(0) != one.test(0) and single_party(one, "2")["2"].test(0) == one.test(0)  # type: ignore[attr-defined]
