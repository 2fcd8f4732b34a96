"""`descant silo judge`: whether joining helped this party, which trains alone for it. Nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Local
from ...analysis.scores import Column, Scores, party_table
from ...core.algorithm import Memory
from ...core.interfaces import Exam
from ...core.messages import Kind, Report, Task
from ...core.metrics import Metric, by_chance, trivial
from ...core.progress import bar
from ...errors import PartyError, StateError
from ...models.flat import ONE_AT_A_TIME, bind
from ...parties import Agent, Party
from ...reporting.table import Table
from ...rounds.party_side import work
from ...rounds.plan import Plan
from ...rounds.validation import finite
from .handshake_reply import check_kind, in_words, introduced
from .result_files import Result, Work
from .silo_file import SiloFile, Words
from .task_handler import Desk

_CHANCE = 0.05  # ours: what chance gives as often as that is no difference
_NEAR = 0.005  # ours: so far may scores of a model be apart on two machines


def judged(file: SiloFile, folder: Path, progress: bool = False) -> Table:
    """The party's own model, the common one, and what it reaches alone by the same work in the same rounds."""
    result, plan = Result(folder), Desk(file, folder).plan
    found, worked = result.scores(), result.worked()
    if not worked:
        raise StateError(f"The party has not trained in {folder} yet. Join first: descant silo join.")
    local = replace(plan, algorithm=bind(Local(), plan.net))
    _check_same(file, folder, local, found)
    row = _alone(local, file.party, worked, progress)
    alone, scores = (_scores(plan, file.party, numbers) for numbers in (_examined(local, file.party, row), found))
    table = party_table(file.people, scores, alone, {file.party: len(worked)})
    chance = by_chance(_differences(plan, file.own, result.own(plan.net.layout), row)) if found["test_samples"] else 1.0
    return replace(table, verdict=_verdict(scores, alone, found, chance, file.words))


def _check_same(file: SiloFile, folder: Path, plan: Plan, found: Mapping[str, Any]) -> None:
    """An error unless the file has the model and, as far as scores can tell, the test set that took part.

    Else training alone would be by other rows than the party's own model, and be judged on other ones.
    """
    layout, then = plan.net.layout, f"Give the file with which it joined: descant silo judge {folder.parent} FILE"
    if layout.digest != (joined := introduced(folder)["layout"]):
        raise StateError(f"The model of {file.path} is {in_words(layout)}, and {joined} took part. {then}")
    try:
        check_kind(file, plan)
    except PartyError as error:
        raise StateError(f"The party of {file.path} is of another kind than took part: {error} {then}") from error
    now = _examined(plan, file.party, Result(folder).own(layout))
    alike = {"test_samples": 0.0, "majority": 1e-6, **({"own": _NEAR} if file.has_rows else {})}
    for name, near in alike.items():  # one step more or less of an episode is far, and may be the machine's
        was, here = (float(each.get(name, math.nan)) for each in (found, now))
        if not math.isclose(was, here, rel_tol=near, abs_tol=near) and not math.isnan(was) and not math.isnan(here):
            what = trivial(plan.metric.name) if name == "majority" else name
            raise StateError(
                f"The data of {file.path} are not those that took part: {what} was {was:.6g} on their test set, and "
                f"is {here:.6g} on this one. {then}"
            )


def _alone(plan: Plan, party: str, worked: Mapping[int, Work], progress: bool) -> Tensor:
    """The model of a party that learns from nobody, by the work that it was given and with the same draws."""
    row, memory = plan.net.row(), dict[str, Tensor]()
    with bar(disable=not progress) as shown:
        line = shown.add_task("training alone", total=len(worked), told="–")
        for each in worked.values():
            settings = {"lr": each.lr, "work": each.work}
            report, after = _answer(plan, party, each.round, "train", row, memory, each.way, settings)
            trained = plan.net.layout.join(report.arrays)
            if finite(trained):  # else the round would not have counted, alone or not
                row, memory = trained, dict(after if after is not None else memory)
            shown.update(line, advance=1)
    return row


def _examined(plan: Plan, party: str, row: Tensor) -> Mapping[str, Any]:
    return _answer(plan, party, 0, "evaluate", row, {}, "", {})[0].metrics


def _answer(
    plan: Plan, party: str, round: int, kind: Kind, row: Tensor, memory: Memory, way: str, more: Mapping[str, Any]
) -> tuple[Report, Memory | None]:
    settings = {"seed": plan.seed, "way": way, "layout": plan.net.layout.digest, **more}
    [(report, after)] = work(plan, [Task(party, round, kind, {"center": row, "own": row}, settings)], [memory])
    if report.status != "ok":
        raise PartyError(f"Training alone failed in round {round}: {report.reason}")
    return report, after


def _scores(plan: Plan, party: str, found: Mapping[str, Any]) -> Scores:
    """What the models that came last reached on the party's own test set."""

    def column(name: str) -> Column:
        return Column(np.array([found.get(name, math.nan)], dtype=float), plan.metric.higher_is_better)

    return Scores((party,), plan.metric.name, *map(column, ("own", "center", "majority", "before", "after")))


def _differences(plan: Plan, party: Any, own: Tensor, alone: Tensor) -> Tensor:
    """How much better the party's own model is than the one that it has alone, test sample by test sample.

    Of an agent it is episode by episode, and of a desk day by day. Two models that fail do not differ.
    """
    better = (_tested(plan, party, own) - _tested(plan, party, alone)) * (1 if plan.metric.higher_is_better else -1)
    return better.nan_to_num(0.0, math.inf, -math.inf)


def _tested(plan: Plan, party: Any, row: Tensor) -> Tensor:
    """How good a model is, test sample by test sample; where it fails, it is as bad as can be."""
    found, worst = list[Tensor](), -math.inf if plan.metric.higher_is_better else math.inf

    def noted(output: Tensor, target: Tensor) -> Tensor:
        found.append(_each(plan.metric, party, output, target).double())
        return found[-1].mean()

    exam = Exam(plan.net, replace(plan.metric, value=noted), [party], [[row]], False)
    with ONE_AT_A_TIME, torch.inference_mode(False):
        plan.solver.examine(exam)
    return torch.cat(found).nan_to_num(worst, math.inf, -math.inf)


def _each(metric: Metric, party: Any, output: Tensor, target: Tensor) -> Tensor:
    """A metric of each by itself; of the days of a desk, whose metric is of them all, what adds up to it."""
    if isinstance(party, Party):
        some = range(len(output))
        return torch.stack([metric.value(output[i : i + 1], target[i : i + 1]).double().mean() for i in some])
    return metric.value(output, target) if isinstance(party, Agent) else output.log()


def _verdict(scores: Scores, alone: Scores, found: Mapping[str, Any], chance: float, words: Words) -> str:
    own, local, samples = scores.own.mean, alone.own.mean, int(found["test_samples"])
    if math.isnan(own) or math.isnan(local):
        return f"The party has no test set, so nobody can say whether joining helped: give its file {words.to_test}."
    tests = f"{samples} {words.tested}{'s' * (samples != 1)}"
    told = "Joining helped" if scores.own.gained(alone.own) else "Joining did not help"
    if chance > _CHANCE:
        told = f"No difference that {tests} could show"
    each = f", of which each is {1 / samples:.3f}" if scores.metric == "accuracy" else ""
    return (
        f"{told}: {scores.metric} {own:.3f} after round {found['round']}, and {local:.3f} alone with the same work, "
        f"on {tests}{each}. The common model has {scores.center.mean:.3f}."
    )
