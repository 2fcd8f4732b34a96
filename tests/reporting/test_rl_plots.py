"""Pictures of agents: rewards by round, and films of a policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from descant import Dqn, Federation, algorithms, models, parties, rl
from descant.config import read_recipe
from descant.errors import SettingError
from descant.reporting import plots
from descant.studies.run_versus_local import evaluate_run, study_from_run, write_report
from descant.tracking import Run


class AlwaysRight(nn.Module):
    """Always pushes to the right: the pole falls after about ten steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0]]).expand(len(x), 2)


class Balancing(nn.Module):
    """Pushes toward the side of the fall: the pole stands for hundreds of steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lean = x[:, 2] + 0.5 * x[:, 3] + 0.05 * x[:, 0] + 0.1 * x[:, 1]
        return torch.stack([-lean, lean], 1)


def trained_agents(count: int = 3, algorithm: Any = None, rounds: int = 2) -> Federation:
    population = parties.agents("CartPole-v1", count=count, test_episodes=1)
    method = algorithms.FedRL() if algorithm is None else algorithm
    solver = Dqn(steps=120, learning_starts=10)
    net = partial(models.mlp, 4, 2, (8,))
    return Federation(net, population, method, solver=solver).fit(rounds, progress=False)


def test_rewards_by_agent_are_in_the_history_and_drawn_with_aggregations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_rewards

    def spy(file: Path, rewards: Any, steps: Any, **settings: Any) -> Path:
        drawn.update(rewards=rewards, steps=steps, aggregates=settings["aggregates"])
        return real(file, rewards, steps, **settings)

    monkeypatch.setattr("descant.analysis.federation_plots.draw_rewards", spy)
    fed = trained_agents()
    assert [set(entry["rewards"]) for entry in fed.history_] == [{"0", "1", "2"}] * 2
    mean = np.mean(list(fed.history_[0]["rewards"].values()))
    assert fed.history_[0]["reward"] == pytest.approx(mean) and fed.history_[0]["steps"] == 120
    assert fed.plot("rewards", tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert drawn["steps"].tolist() == [120, 240] and drawn["aggregates"]
    assert drawn["rewards"]["1"].tolist() == [entry["rewards"]["1"] for entry in fed.history_]
    trained_agents(algorithm=algorithms.Local()).plot("rewards", tmp_path / "alone.png")
    assert not drawn["aggregates"], "Local never aggregates"


def test_the_mean_of_many_agents_is_drawn_and_without_agents_it_raises(tmp_path: Path) -> None:
    many = trained_agents(101, rounds=1)
    assert "rewards" not in many.history_[0] and "reward" in many.history_[0]
    assert many.plot("rewards", tmp_path / "many.png").exists()
    assert trained_agents(9).plot("rewards", tmp_path / "nine.png").exists()
    with pytest.raises(SettingError, match="no round was run by agents"):
        trained_agents(rounds=0).plot("rewards", tmp_path / "none.png")


RECIPE = """
[run]
rounds = 3
[parties]
population = "agents"
count = 2
test_episodes = 1
[model]
net = "mlp"
inputs = 4
outputs = 2
hidden = [8]
[training]
solver = "dqn"
steps = 60
learning_starts = 10
[method]
algorithm = "fedrl"
"""


def test_reports_of_runs_and_studies_show_the_rewards_of_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_reward_lines

    def spy(file: Path, lines: Any, steps: Any, labels: Any) -> Path:
        drawn.update(lines=lines, steps=steps.tolist())
        return real(file, lines, steps, labels)

    monkeypatch.setattr("descant.studies.study_report.draw_reward_lines", spy)
    recipe = read_recipe(RECIPE)
    with Run.start(tmp_path / "run", recipe.federation(), recipe=recipe.text) as run:
        list(run.rounds(3, score_every=1))
        evaluate_run(run)
        rewards = [entry["reward"] for entry in run.federation.history_]
    page = write_report(study_from_run(tmp_path / "run"), tmp_path / "run").read_text()
    assert "Rewards of the agents" in page and drawn["steps"] == [60, 120, 180]
    assert drawn["lines"]["FedRL"].y.tolist() == rewards and set(drawn["lines"]) == {"Local", "FedRL"}
    study = recipe.with_values("run.seeds=2").study(progress=False)
    assert study.plot("rewards", tmp_path / "rewards.png").exists() and len(drawn["lines"]["Local"].low) == 3
    again = type(study).load(study.save(tmp_path / "study"))
    assert again.plot("rewards", tmp_path / "again.png").read_bytes() == (tmp_path / "rewards.png").read_bytes()


@pytest.mark.parametrize(("policy", "least", "most"), [(AlwaysRight(), 5, 20), (Balancing(), 100, 501)])
def test_a_film_shows_a_whole_episode(tmp_path: Path, policy: nn.Module, least: int, most: int) -> None:
    world = rl.make_environment("CartPole-v1")
    with Image.open(rl.film(policy, world, tmp_path / "pole.gif")) as film:
        frames = getattr(film, "n_frames", 1)
    assert least <= 4 * frames <= most + 4
    with Image.open(rl.film(policy, world, tmp_path / "pole.png")) as strip:
        assert strip.width > 6 * strip.height


def test_a_value_output_does_not_change_the_actions_of_a_policy(tmp_path: Path) -> None:
    class Critic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([AlwaysRight()(x), torch.full((len(x), 1), 9.0)], 1)

    both = [
        rl.film(p, rl.make_environment("CartPole-v1"), tmp_path / f"{k}.gif")
        for k, p in enumerate((AlwaysRight(), Critic()))
    ]
    assert both[0].read_bytes() == both[1].read_bytes()


def test_what_cannot_be_filmed_raises(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"a \.gif file, or a strip of pictures as a \.png file\. Got 'pole\.mp4'"):
        rl.film(AlwaysRight(), rl.make_environment("CartPole-v1"), tmp_path / "pole.mp4")
    with pytest.raises(SettingError, match="Only CartPole can be filmed"):
        rl.film(AlwaysRight(), rl.make_environment("MountainCar-v0"), tmp_path / "car.gif")  # type: ignore[arg-type]
