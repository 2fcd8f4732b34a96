"""What agents earned and how a trained one plays, as pictures."""

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
from descant.studies.recorded_run import evaluate_run, study_from_run, write_report
from descant.tracking import Run


class Right(nn.Module):
    """Always to the right: the pole falls after some ten steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0]]).expand(len(x), 2)


class Upright(nn.Module):
    """Towards where the pole falls: it stands for hundreds of steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lean = x[:, 2] + 0.5 * x[:, 3] + 0.05 * x[:, 0] + 0.1 * x[:, 1]
        return torch.stack([-lean, lean], 1)


def learned(count: int = 3, algorithm: Any = None, rounds: int = 2) -> Federation:
    people = parties.agents("CartPole-v1", count=count, test_episodes=1)
    method = algorithms.FedRL() if algorithm is None else algorithm
    solver = Dqn(steps=120, learning_starts=10)
    net = partial(models.mlp, 4, 2, (8,))
    return Federation(net, people, method, solver=solver).fit(rounds, progress=False)


def test_what_each_agent_earned_is_in_the_history_and_drawn_with_the_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_rewards

    def spy(file: Path, rewards: Any, steps: Any, **settings: Any) -> Path:
        drawn.update(rewards=rewards, steps=steps, merged=settings["aggregates"])
        return real(file, rewards, steps, **settings)

    monkeypatch.setattr("descant.analysis.federation_plots.draw_rewards", spy)
    fed = learned()
    assert [set(entry["rewards"]) for entry in fed.history_] == [{"0", "1", "2"}] * 2
    mean = np.mean(list(fed.history_[0]["rewards"].values()))
    assert fed.history_[0]["reward"] == pytest.approx(mean) and fed.history_[0]["steps"] == 120
    assert fed.plot("rewards", tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert drawn["steps"].tolist() == [120, 240] and drawn["merged"]
    assert drawn["rewards"]["1"].tolist() == [entry["rewards"]["1"] for entry in fed.history_]
    learned(algorithm=algorithms.Local()).plot("rewards", tmp_path / "alone.png")
    assert not drawn["merged"], "who trains alone never merges"


def test_of_many_agents_the_mean_is_drawn_and_of_none_nothing(tmp_path: Path) -> None:
    many = learned(101, rounds=1)
    assert "rewards" not in many.history_[0] and "reward" in many.history_[0]
    assert many.plot("rewards", tmp_path / "many.png").exists()
    assert learned(9).plot("rewards", tmp_path / "nine.png").exists()
    with pytest.raises(SettingError, match="no round was run by agents"):
        learned(rounds=0).plot("rewards", tmp_path / "none.png")


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


def test_the_reports_of_runs_and_of_comparisons_show_what_the_agents_earned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_reward_lines

    def spy(file: Path, lines: Any, merges: Any, labels: Any) -> Path:
        drawn.update(lines=lines, merges=merges.tolist())
        return real(file, lines, merges, labels)

    monkeypatch.setattr("descant.studies.study_report.draw_reward_lines", spy)
    recipe = read_recipe(RECIPE)
    with Run.start(tmp_path / "run", recipe.federation(), recipe=recipe.text) as run:
        list(run.rounds(3, score_every=1))
        evaluate_run(run)
        earned = [entry["reward"] for entry in run.federation.history_]
    page = write_report(study_from_run(tmp_path / "run"), tmp_path / "run").read_text()
    assert "Rewards of the agents" in page and drawn["merges"] == [60, 120, 180]
    assert drawn["lines"]["FedRL"].y.tolist() == earned and set(drawn["lines"]) == {"Local", "FedRL"}
    study = recipe.with_values("run.seeds=2").study(progress=False)
    assert study.plot("rewards", tmp_path / "rewards.png").exists() and len(drawn["lines"]["Local"].low) == 3
    again = type(study).load(study.save(tmp_path / "study"))
    assert again.plot("rewards", tmp_path / "again.png").read_bytes() == (tmp_path / "rewards.png").read_bytes()


@pytest.mark.parametrize(("policy", "least", "most"), [(Right(), 5, 20), (Upright(), 100, 501)])
def test_a_film_shows_an_episode_from_its_beginning_to_its_end(
    tmp_path: Path, policy: nn.Module, least: int, most: int
) -> None:
    world = rl.make_environment("CartPole-v1")
    with Image.open(rl.film(policy, world, tmp_path / "pole.gif")) as film:
        frames = getattr(film, "n_frames", 1)
    assert least <= 4 * frames <= most + 4
    with Image.open(rl.film(policy, world, tmp_path / "pole.png")) as strip:
        assert strip.width > 6 * strip.height


def test_a_policy_with_a_value_beside_its_actions_plays_by_its_actions(tmp_path: Path) -> None:
    class Critic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([Right()(x), torch.full((len(x), 1), 9.0)], 1)

    both = [
        rl.film(p, rl.make_environment("CartPole-v1"), tmp_path / f"{k}.gif") for k, p in enumerate((Right(), Critic()))
    ]
    assert both[0].read_bytes() == both[1].read_bytes()


def test_what_cannot_be_filmed_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"a \.gif file, or a strip in a \.png file. Got 'pole.mp4'"):
        rl.film(Right(), rl.make_environment("CartPole-v1"), tmp_path / "pole.mp4")
    with pytest.raises(SettingError, match="Only CartPole can be filmed"):
        rl.film(Right(), rl.make_environment("MountainCar-v0"), tmp_path / "car.gif")  # type: ignore[arg-type]
