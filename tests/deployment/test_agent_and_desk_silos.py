"""Agents and desks as silos: their environments and prices stay there, and the numbers equal the simulation."""

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
from descant.deployment.silo.local_comparison import _train_locally, compare_with_local
from descant.deployment.silo.result_files import PERSONAL_MODEL_FILE, SiloResults, write_model
from descant.deployment.silo.silo_state import SiloState
from descant.engines.remote import Silos
from descant.errors import PartyError, SettingError, StateError
from descant.models.flat import Net
from descant.parties import Agent
from descant.parties.datasets.digits import digits
from descant.parties.remote_parties import describe_party, remote_population
from descant.portfolio.desk import desks
from descant.rl.agent_parties import agents, single_party
from descant.rounds.checkpoint import digest_of_models
from descant.serialization.references import address_of
from descant.serialization.wire import pack, unpack
from descant.tracking import read_run
from recipe_matrix import SILO_CASES, RecipeCase
from silo_file_templates import AGENT_SILO_FILE, DESK_SILO_FILE, simulated_population
from test_deployment_in_memory import (
    InMemoryTransport,
    RestartingTransport,
    SimulatedKill,
    count_survived_kills,
    silo_handlers,
)
from toy_problems import cartpole_agents

ACTORS = ["FedRL, DQN", "FedAvgPlus, policy gradient", "FedGeoMedPlus, desks"]
NAMES = ("0", "1", "2")


def make_recipe(case: RecipeCase, rounds: int = 3) -> Recipe:
    return read_recipe(f"[run]\nseed = 5\nrounds = {rounds}\n" + case.recipe_text)


def make_handlers(
    folder: Path, case: RecipeCase, names: Collection[str] = NAMES, log: Callable[[str], None] = lambda text: None
) -> dict[str, Callable[[], TaskHandler]]:
    return silo_handlers(folder, names, log, case.silo_file_template)


def make_handshakes(
    transport: InMemoryTransport, recipe: Recipe, log: Callable[[str], None] = lambda text: None
) -> HandshakeTransport:
    loss = address_of(torch.nn.functional.cross_entropy)
    return HandshakeTransport(transport, recipe, "lab", net=Net.from_model(recipe.model(), 0), loss=loss, log=log)


def deploy(transport: InMemoryTransport, recipe: Recipe) -> Federation:
    handshakes = make_handshakes(transport, recipe)
    population = remote_population(handshakes.wait_for_quorum(len(transport.connected_parties())))
    engine = Silos(handshakes, WaitLimits(), lambda text: None)
    return Federation(recipe.model(), population, recipe.algorithm(), solver=recipe.solver(), seed=5, engine=engine)


def simulate(folder: Path, recipe: Recipe, names: tuple[str, ...] = NAMES) -> Federation:
    population = simulated_population([SiloFile(folder / f"team{name}.py", name) for name in names])
    return Federation(recipe.model(), population, recipe.algorithm(), solver=recipe.solver(), seed=5)


def assert_equal(ours: Federation, theirs: Federation, folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """Assert equal models and party states: replay buffer, position in the episode, holdings."""
    assert digest_of_models(ours.state) == digest_of_models(theirs.state)
    for name in names:
        expected = theirs.engine_.party_states.get(name)
        stored = SiloState(folder / f"at-{name}").load_party_state(ours.state.round)
        assert expected.keys() == stored.keys()
        assert all(torch.equal(expected[key], stored[key]) for key in expected)


@pytest.mark.parametrize("name", ACTORS)
def test_deployment_equals_the_simulation_bit_for_bit(tmp_path: Path, name: str) -> None:
    """The handler is built again for every task, as after a kill: all its state is in its folder."""
    recipe = make_recipe(SILO_CASES[name])
    fed = deploy(InMemoryTransport(make_handlers(tmp_path, SILO_CASES[name])), recipe).fit(3, progress=False)
    twin = simulate(tmp_path, recipe).fit(3, progress=False)
    assert_equal(fed, twin, tmp_path)
    for column in ("personal", "global_model", "majority"):
        ours, theirs = (getattr(one.scores(), column).values for one in (fed, twin))
        np.testing.assert_array_equal(ours, theirs)
    assert [entry.get("reward") for entry in fed.history_] == [entry.get("reward") for entry in twin.history_]
    assert fed.history_[-1]["reward"] is not None
    assert len(SiloState(tmp_path / "at-0").load_party_state(3)) > 2


@pytest.mark.parametrize("name", ACTORS)
def test_a_silo_killed_at_any_write_gives_the_same_models(tmp_path: Path, name: str) -> None:
    recipe = make_recipe(SILO_CASES[name])
    two = NAMES[:2]
    make_handlers(tmp_path, SILO_CASES[name], two)
    twin = simulate(tmp_path, recipe, two).fit(2, progress=False)

    def run(folder: Path) -> None:
        transport = RestartingTransport(make_handlers(folder, SILO_CASES[name], two))
        assert_equal(deploy(transport, recipe).fit(2, progress=False), twin, folder, two)

    assert count_survived_kills(tmp_path, run, every=3) > 15


@pytest.mark.parametrize("name", ACTORS)
def test_a_restarted_server_continues_with_late_agents(tmp_path: Path, name: str) -> None:
    """All it knows is in its folder; invited parties that have not joined yet are part of the training."""
    case = SILO_CASES[name]
    log_lines = list[str]()
    recipe = make_recipe(case, 4)

    def training(transport: InMemoryTransport) -> TrainingSession:
        return TrainingSession(
            tmp_path / "run",
            recipe,
            make_handshakes(transport, recipe, log_lines.append),
            limits=WaitLimits(min_parties=2),
            log=log_lines.append,
        )

    (tmp_path / "run").mkdir()
    transport = InMemoryTransport(make_handlers(tmp_path, case))
    transport.unreachable = {"2"}
    ends = [2]

    def until(task: Task, payload: bytes) -> bytes:
        ends[0] -= task.kind == "train" and task.party == "0"
        if ends[0] < 0:
            raise SimulatedKill
        return payload

    transport.corrupt_reply = until
    with pytest.raises(SimulatedKill):
        training(transport).run_to_completion(lambda: NAMES)
    assert read_descriptions(tmp_path / "run")["2"]["described_after"] is None
    again = InMemoryTransport(make_handlers(tmp_path, case))
    training(again).run_to_completion(lambda: NAMES)
    descriptions = read_descriptions(tmp_path / "run")
    assert {name: one["test_count"] for name, one in descriptions.items()} == {
        name: SiloFile(tmp_path / f"team{name}.py", name).party_data.test_count for name in NAMES
    }
    found = read_run(tmp_path / "run" / "training").numbers
    assert found.rounds.tolist() == [1, 2, 3, 4] and found.accepted[:2, 2].tolist() == [False, False]
    assert found.accepted[-1].all()
    what = "an environment of its own" if case.silo_file_template == AGENT_SILO_FILE else "4 assets to trade"
    assert f"0 has connected with {what}." in log_lines


@pytest.mark.parametrize("name", ACTORS)
def test_every_field_of_a_reply_is_listed_by_the_dry_run(tmp_path: Path, name: str) -> None:
    """No reply holds a number of an environment or of prices, or the name of an asset."""
    replies = list[Reply]()
    case = SILO_CASES[name]
    transport = InMemoryTransport(make_handlers(tmp_path, case))

    def record(task: Task, payload: bytes) -> bytes:
        replies.append(unpack(payload, Reply))
        payloads.append(payload)
        return payload

    transport.corrupt_reply = record
    payloads = list[bytes]()
    deploy(transport, make_recipe(case)).fit(2, progress=False).scores()
    own = SiloFile(tmp_path / "team0.py", "0").party_data
    unseen = {
        "state_reset",
        "retry_after",
        *([] if isinstance(own, Agent) else ["real_only"]),
    }  # these events do not happen here
    leaves = dry_run(SiloFile(tmp_path / "team0.py", "0"))["outgoing"]
    for kind, when in (
        ("handshake", "on joining"),
        ("train", "after training"),
        ("evaluate", "after evaluation"),
    ):
        found = {key for payload in replies if payload.kind == kind for key in payload.metrics}
        named = {one for key in leaves[when] for one in key.split(", ")}
        assert found == named - {"arrays", "forget"} - unseen, kind
    assert replies[0].metrics["data_description"] == describe_party(own)
    assert not [secret for secret in secrets_of(own) for payload in payloads if secret in payload]


def secrets_of(own: Any) -> list[bytes]:
    """Return numbers of an environment or of prices in every form of at least eight bytes, and names of assets."""
    if isinstance(own, Agent):
        physics = [getattr(own.environment, name) for name in ("gravity", "length", "force_mag")]
        return [form for value in physics for form in (repr(value).encode(), np.float64(value).tobytes())]
    prices = [
        row.astype(kind).tobytes() for row in (*own.prices, *own.test_prices) for kind in (np.float32, np.float64)
    ]
    return [*(name.encode() for name in own.assets), *prices]


def test_silo_check_reports_the_initial_return_of_an_agent(tmp_path: Path) -> None:
    for name, text, first in (
        ("agent", AGENT_SILO_FILE, "first return"),
        ("desk", DESK_SILO_FILE, "first annual return"),
    ):
        (tmp_path / f"{name}.py").write_text(text.format(name="1"))
        result = CliRunner().invoke(app, ["silo", "check", str(tmp_path / f"{name}.py"), "--name", "north"])
        assert result.exit_code == 0, result.output
        assert f"{first}:" in result.output and "first loss" not in result.output
        assert {"agent": "its environment, its obs", "desk": "its prices, the names"}[name] in result.output
        found = dry_run(SiloFile(tmp_path / f"{name}.py", "north"))
        assert math.isfinite(found[first]) and found["party"] == "north"


INVALID_FILES = {
    "two parties": ("return cartpole_agents()", "Got 3 parties"),
    "rows that leave": (
        "return cartpole_agents().subset(['0'])\npolicy = {'share': 0.1}",
        "share of .*: they apply to rows",
    ),
    "a loss": ("return cartpole_agents().subset(['0'])\nloss = print", "loss of .*: they apply to rows"),
    "too few outputs": (
        "return cartpole_agents().subset(['0'])\n"
        "from descant import models\ndef model(): return models.mlp(4, 1, (8,))",
        r"an agent needs outputs \[8, 2\] or \[8, 3\]",
    ),
    "one number": ("return 3", "must return .* one party"),
}


@pytest.mark.parametrize("case", INVALID_FILES)
def test_a_file_that_cannot_take_part_is_rejected_with_a_reason(tmp_path: Path, case: str) -> None:
    text, reason = INVALID_FILES[case]
    (tmp_path / "team.py").write_text(
        f"from toy_problems import policy_network as model, cartpole_agents\ndef data():\n    {text}\n"
    )
    with pytest.raises(Exception, match=reason):
        dry_run(SiloFile(tmp_path / "team.py", "north"))


def test_a_file_may_return_a_party_with_rows(tmp_path: Path) -> None:
    text = "from functools import partial\nfrom descant import models, parties\nmodel = partial(models.mlp, 64, 10)\n"
    (tmp_path / "team.py").write_text(f"{text}def data():\n    return parties.digits(count=3).subset(['1'])\n")
    own = SiloFile(tmp_path / "team.py", "north").party_data
    expected = digits(count=3)["1"]
    assert own.name == "north" and all(map(torch.equal, own.data, expected.data))


def rejection_of(folder: Path, case: RecipeCase, team: str) -> str:
    """Return the log line about a party that joins with another file than the others."""
    log_lines = list[str]()
    transport = InMemoryTransport(make_handlers(folder, case))
    (folder / "team2.py").write_text(team.format(name="2"))
    handshakes = make_handshakes(transport, make_recipe(case), log_lines.append)
    for _ in range(3):
        handshakes.connected_parties()
    assert set(handshakes.data_descriptions) == {"0", "1"}
    return next(text for text in log_lines if text.startswith("2 has connected"))


ROWS = """
import torch
from toy_problems import policy_network as model

def data():
    return torch.zeros(8, 4), torch.zeros(8).long()
"""


@pytest.mark.parametrize("name", ACTORS)
def test_a_party_with_rows_is_rejected_among_agents_and_desks(tmp_path: Path, name: str) -> None:
    """Although the model accepts the rows; the reason is in the silo's own log."""
    case = SILO_CASES[name]
    net = "policy_network" if case.silo_file_template == AGENT_SILO_FILE else "trading_network"
    size = "8, 4" if case.silo_file_template == AGENT_SILO_FILE else "8, 4, 11"
    line = rejection_of(tmp_path, case, ROWS.replace("policy_network", net).replace("8, 4", size))
    assert line.endswith("cannot take part: PartyError. The party's own log says more.")


def test_an_agent_is_rejected_among_parties_with_rows(tmp_path: Path) -> None:
    """Although the model can act there."""
    rows = RecipeCase("fedavg", network_address="toy_problems:policy_network", silo_file_template=ROWS)
    assert rejection_of(tmp_path, rows, AGENT_SILO_FILE).endswith(
        "cannot take part: PartyError. The party's own log says more."
    )


def test_agents_with_different_actions_cannot_share_a_federation(tmp_path: Path) -> None:
    description = {"observations": [4], "actions": 2, "test_count": 2}
    remote_population({"a": description, "b": {**description, "test_count": 9}})
    with pytest.raises(PartyError, match="They must agree"):
        remote_population({"a": description, "b": {**description, "actions": 3}})
    lies = [{"actions": 0}, {"observations": [2**40]}, {"actions": "2"}, {"test_count": -1}, {"observations": 4}]
    lies += [
        {"observations": ["a", 10**9]},
        {"observations": [10**9] * 20_000},
        {"actions": 2**22},
        {"test_count": True},
    ]
    lies += [{"observations": [2**26]}, {"observations": [2**12] * 2}]
    for case in lies:
        with pytest.raises(PartyError, match="is invalid"):
            remote_population({"a": {**description, **case}})
    traded = describe_party(desks("generated", count=1, assets=3)["0"])
    for case in (
        {"assets": 0},
        {"window": 1},
        {"assets": 2**22},
        {"assets": 2**20, "window": 9},
        {"test_count": None},
        {"window": "30"},
    ):
        with pytest.raises(PartyError, match="is invalid"):
            remote_population({"a": {**traded, **case}})


@pytest.mark.parametrize("name", ACTORS)
def test_a_party_whose_check_raises_is_rejected_and_the_server_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Any error, including a lack of memory, leaves the other parties accepted."""
    recipe = make_recipe(SILO_CASES[name])
    log_lines = list[str]()
    handshakes = make_handshakes(InMemoryTransport(make_handlers(tmp_path, SILO_CASES[name])), recipe, log_lines.append)
    real = type(handshakes._solver).execution_modes

    def execution_modes(solver: Any, net: Net, loss: Any, terms: Any, party: Any, count: int) -> dict[str, str]:
        if party.name == "1" and net is handshakes.net:
            raise MemoryError("8 GB")
        return real(solver, net, loss, terms, party, count)

    monkeypatch.setattr(type(handshakes._solver), "execution_modes", execution_modes)
    assert handshakes.wait_for_quorum(2).keys() == {"0", "2"}
    assert any(
        text.startswith("1 has connected and cannot take part: ") and "MemoryError" in text for text in log_lines
    )


def falsify_descriptions(transport: InMemoryTransport, lies: dict[str, dict[str, int]]) -> None:
    """Make some parties describe their data falsely."""

    def corrupt(task: Task, payload: bytes) -> bytes:
        reply = unpack(payload, Reply)
        if task.kind != "handshake" or task.party not in lies:
            return payload
        description = {**reply.metrics["data_description"], **lies[task.party]}
        return pack(replace(reply, metrics={**reply.metrics, "data_description": description}))

    transport.corrupt_reply = corrupt


def test_a_party_that_left_does_not_fix_the_form_of_the_others(tmp_path: Path) -> None:
    """A returning party is compared with the parties connected by then: the model takes any number of assets."""
    case = SILO_CASES["FedGeoMedPlus, desks"]
    log_lines = list[str]()
    transport = InMemoryTransport(make_handlers(tmp_path, case))
    falsify_descriptions(transport, {"0": {"assets": 5}})
    handshakes = make_handshakes(transport, make_recipe(case), log_lines.append)
    transport.unreachable = {"1", "2"}
    handshakes.connected_parties()
    assert handshakes.connected_parties().keys() == {"0"}
    transport.unreachable = {"0"}
    handshakes.connected_parties()
    assert handshakes.connected_parties().keys() == {"1", "2"}
    transport.unreachable = set()
    handshakes.connected_parties()
    assert (
        handshakes.connected_parties().keys() == {"1", "2"}
        and "its assets is 5, and the federation's is 4" in log_lines[-1]
    )


def test_a_returning_party_must_keep_the_form_of_the_training(tmp_path: Path) -> None:
    """Even if no other party is connected: otherwise the next party to join would end the training."""
    case = SILO_CASES["FedGeoMedPlus, desks"]
    log_lines = list[str]()
    recipe = make_recipe(case, 4)
    transport = InMemoryTransport(make_handlers(tmp_path, case))
    (tmp_path / "run").mkdir()
    transport.unreachable = {"1", "2"}
    lies = dict[str, dict[str, int]]()
    train_count = [0]
    falsify_descriptions(transport, lies)
    falsify = transport.corrupt_reply

    def corrupt(task: Task, payload: bytes) -> Any:
        train_count[0] += task.kind == "train"
        if task.kind == "train" and train_count[0] == 2:
            transport.session_ids["0"], transport.unreachable = "again", set()
            lies.update({name: {"assets": 5} for name in ("0", "1")})
        return falsify(task, payload)

    transport.corrupt_reply = corrupt
    TrainingSession(
        tmp_path / "run",
        recipe,
        make_handshakes(transport, recipe, log_lines.append),
        limits=WaitLimits(min_parties=1),
        log=log_lines.append,
    ).run_to_completion(lambda: ["0"])
    assert {name: one["assets"] for name, one in read_descriptions(tmp_path / "run").items()} == {"0": 4, "2": 4}
    assert sum("its assets is 5, and the federation's is 4" in text for text in log_lines) == 2


def test_the_server_cannot_act_in_a_remote_environment() -> None:
    population = remote_population({"north": describe_party(agents(count=1)["0"])})
    with pytest.raises(PartyError, match="The environment of 'north' is on its own machine"):
        population["north"].environment.make_vector([], ["north"])  # type: ignore[attr-defined]
    assert "an environment of its own" in population.describe()


@pytest.mark.parametrize("name", ACTORS)
def test_silo_evaluation_of_an_agent_equals_the_simulation(tmp_path: Path, name: str) -> None:
    """The numbers equal the simulation; the verdict counts episodes or days."""
    case = SILO_CASES[name]
    recipe = make_recipe(case)
    fed = deploy(InMemoryTransport(make_handlers(tmp_path, case)), recipe).fit(3, progress=False)
    fed.scores()
    file = SiloFile(tmp_path / "team1.py", "1")
    table = compare_with_local(file, tmp_path / "at-1")
    twin = simulate(tmp_path, recipe).fit(3, progress=False)
    [row], theirs = table.rows, next(row for row in twin.table().rows if row["party"] == "1")
    baseline = trivial_baseline(recipe.solver().metric.name).split()[0]  # type: ignore[union-attr]
    for column in ("personal", "global_model", "local", baseline):
        assert row[column] == theirs[column], column
    assert f"{file.party_data.test_count} {file.wording.tested_unit}s" in table.verdict
    assert "test sample" not in table.verdict


def balancing(sign: float) -> dict[str, torch.Tensor]:
    """Return a model that pushes the cart to the side to which its pole falls; with -1, to the other side."""
    first = torch.zeros(8, 4)
    last = torch.zeros(2, 8)
    first[0], first[1] = torch.tensor([0, 0, 1.0, 0.5]), torch.tensor([0, 0, -1.0, -0.5])
    last[1, 0] = last[0, 1] = sign
    return {"1.weight": first, "1.bias": torch.zeros(8), "3.weight": last, "3.bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("sign", "verdict"), [(1.0, "Joining helped: return "), (0.0, "No significant difference on 40 test ep")]
)
def test_the_significance_test_pairs_episodes_or_days(tmp_path: Path, sign: float, verdict: str) -> None:
    """A personal model that is far better than the local one, and one that is equal."""
    many = "from descant import parties\ndef many(): return parties.agents(count=3, test_episodes=40)\n"
    team = many + AGENT_SILO_FILE.replace("cartpole_agents()", "many()")
    case = RecipeCase("fedavg", "", SILO_CASES["FedRL, DQN"].training_table, "toy_problems:policy_network", team)
    deploy(InMemoryTransport(make_handlers(tmp_path, case)), make_recipe(case)).fit(1, progress=False).scores()
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
    assert compare_with_local(file, folder).verdict.startswith(verdict)


def test_evaluation_rejects_a_file_with_rows_for_an_agent(tmp_path: Path) -> None:
    case = SILO_CASES["FedRL, DQN"]
    deploy(InMemoryTransport(make_handlers(tmp_path, case)), make_recipe(case)).fit(1, progress=False).scores()
    (tmp_path / "rows.py").write_text(ROWS)
    with pytest.raises(
        StateError, match=r"another kind than the one that took part.*Give the file with which it joined"
    ):
        compare_with_local(SiloFile(tmp_path / "rows.py", "0"), tmp_path / "at-0")


def test_an_untested_agent_is_told_which_setting_adds_tests(tmp_path: Path) -> None:
    untested = "from descant import parties\ndef few(): return parties.agents(count=3, test_episodes=0)\n"
    case = replace(
        SILO_CASES["FedRL, DQN"], silo_file_template=untested + AGENT_SILO_FILE.replace("cartpole_agents()", "few()")
    )
    deploy(InMemoryTransport(make_handlers(tmp_path, case)), make_recipe(case)).fit(1, progress=False).scores()
    assert (
        "agents(..., test_episodes=20)"
        in compare_with_local(SiloFile(tmp_path / "team0.py", "0"), tmp_path / "at-0").verdict
    )


FAILING_ENVIRONMENT_FILE = """
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
    return parties.agents("Odd-{name}", count=1, test_episodes=2)
"""


def test_a_failing_environment_costs_one_round_and_leaks_nothing(tmp_path: Path) -> None:
    """Each silo registers its own environment by its own name, and no reply holds that name."""
    pytest.importorskip("gymnasium")
    silo_lines = list[str]()
    (tmp_path / "net.py").write_text("from descant import models\ndef net(): return models.mlp(3, 2, (8,))\n")
    case = RecipeCase(
        "fedavg", "", SILO_CASES["FedRL, DQN"].training_table, f"{tmp_path / 'net.py'}:net", FAILING_ENVIRONMENT_FILE
    )
    transport = InMemoryTransport(make_handlers(tmp_path, case, log=silo_lines.append))
    replies = list[bytes]()
    fed = deploy(transport, make_recipe(case)).fit(1, progress=False)

    def record(task: Task, payload: bytes) -> bytes:
        replies.append(payload)
        return payload

    transport.corrupt_reply = record
    (tmp_path / "team1.py.mark").touch()
    with pytest.warns(DescantWarning, match="party '1'"):
        fed.fit(1, progress=False)
    (tmp_path / "team1.py.mark").unlink()
    fed.fit(1, progress=False)
    assert [entry["presence"] for entry in fed.history_] == ["ppp", "pap", "ppp"]
    assert any("4711" in text for text in silo_lines)
    assert not any(word in payload for payload in replies for word in (b"4711-0815", b"Odd-1"))


def test_status_and_report_of_agents_use_their_terms(tmp_path: Path) -> None:
    case = SILO_CASES["FedRL, DQN"]
    recipe = make_recipe(case, 2)
    (tmp_path / "run").mkdir()
    transport = InMemoryTransport(make_handlers(tmp_path, case))
    TrainingSession(
        tmp_path / "run",
        recipe,
        make_handshakes(transport, recipe),
        limits=WaitLimits(min_parties=3),
        log=lambda text: None,
    ).run_to_completion(lambda: NAMES)
    found = training_status(tmp_path / "run")
    assert found["metric"] == "return" and found["scores"]["0"]["random"] == found["scores"]["0"]["majority"]
    table, page = write_report(tmp_path / "run" / "training")
    assert table.columns[-1] == "random" and "Random: acting at random" in page.read_text()
    assert not [text for text in found["baseline_warnings"] if "label" in text]
    assert json.dumps(found)


def test_recipes_of_agents_can_be_served_and_impossible_ones_are_rejected(tmp_path: Path) -> None:
    for name in ACTORS:
        assert check_servable(make_recipe(SILO_CASES[name]), with_key=False) == {}
    desk = SILO_CASES["FedGeoMedPlus, desks"]
    trading = replace(desk, training_table=desk.training_table.replace("batch = 8", "batch = 2000000000"))
    with pytest.raises(SettingError, match=r"fits no kind of party that can be a silo: .*too few for batches"):
        check_servable(make_recipe(trading), with_key=False)
    measuring = 'wrap = [{wrapper = "adaptive", lr = [0.1, 0.2], reward = "clients", loss_samples = 4}]'
    case = RecipeCase("fedavg", measuring, SILO_CASES["FedRL, DQN"].training_table, "toy_problems:policy_network")
    with pytest.raises(
        SettingError, match="measures the loss on own samples of the parties, and agents and desks have none"
    ):
        check_servable(make_recipe(case), with_key=False)


def test_a_renamed_agent_keeps_its_environment() -> None:
    """Only the draws that are keyed by its name differ."""
    one: Any = cartpole_agents()["2"]
    other: Any = single_party(one, "north")["north"]
    assert other.name == "north" and other.environment == one.environment and other.test_count == one.test_count
    assert other.test_episode_key(0) != one.test_episode_key(0)
    assert single_party(one, "2")["2"].test_episode_key(0) == one.test_episode_key(0)  # type: ignore[attr-defined]
