"""Differential privacy: clipping, noise, accounting, budgets, and the rejection of unsound methods."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bytes_engine import BytesEngine
from descant import Algorithm, DescantError, DpSgd, Federation, algorithms, analysis, compare
from descant.aggregation.penalties import Norm1
from descant.algorithms import CentralDP, FedAvg, FedAvgPlus, LocalDP, PoissonSampling
from descant.core.messages import Reply, Task
from descant.engines import InProcess
from descant.errors import BudgetError, DescantWarning, ModelError, SettingError
from descant.parties import digits
from descant.privacy.dp_wrappers import sampling_rate
from descant.privacy.gaussian_mechanism import (
    PrivacySettings,
    epsilon,
    new_secret,
    secret_noise,
    seeded_noise,
    system_noise,
)
from descant.rounds.aggregate import noisy_mean
from descant.rounds.party_side import perform_tasks
from descant.tracking import Run
from descant.tracking import read_run as recorded
from descant.training.dp_sgd import clipped_sum
from toy_problems import classification_parties, network

PLAIN = FedAvg(weights="uniform")
central = partial(CentralDP, source="seed")
local = partial(LocalDP, source="seed")


def federation(algorithm: Algorithm, **settings: Any) -> Federation:
    chosen = {"lr": 0.1, "steps": 3, "batch": 4, "seed": 5, **settings}
    return Federation(network(), classification_parties(6), algorithm, **chosen)


def row(fed: Federation) -> Tensor:
    return fed.state.global_model


def released_model(algorithm: Algorithm, models: Tensor, center: Tensor, count: float, round: int = 0) -> Tensor:
    """Return the global model that a round releases from these models ``[K, d]``."""
    layout = SimpleNamespace(trainable_width=models.shape[1], column_range=None)
    plan: Any = SimpleNamespace(algorithm=algorithm, net=SimpleNamespace(layout=layout), private_layers=(), seed=0)
    state: Any = SimpleNamespace(global_model=center, round=round)
    return noisy_mean(plan, state, models, denominator=count).point


numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6),
    st.lists(numbers, min_size=3, max_size=3),
    st.floats(1e-3, 1e3),
)
def test_no_party_moves_the_mean_by_more_than_its_share_of_the_clip(
    rows: list[list[float]], at: list[float], clip: float
) -> None:
    """Neighboring data: with and without the change of one of K parties, the mean over K moves by C/K at most."""
    models = torch.tensor(rows, dtype=torch.float64)
    center = torch.tensor(at, dtype=torch.float64)
    method = central(clip=clip, noise=0.0)
    count = len(models)
    whole = released_model(method, models, center, count)
    rounding = 1e-15 * (models.abs().max() + center.abs().max()) * count
    assert torch.linalg.vector_norm(whole - center) <= clip * (1 + 1e-12) + rounding  # a mean of clipped changes
    for k in range(count):
        without = released_model(method, torch.cat([models[:k], models[k + 1 :]]), center, count)
        assert torch.linalg.vector_norm(whole - without) <= clip / count * (1 + 1e-12) + rounding


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9), st.floats(1e-6, 1e6))
def test_clipped_norms_never_exceed_the_clip_and_smaller_ones_stay(lengths: list[float], clip: float) -> None:
    given_lengths = torch.tensor(lengths, dtype=torch.float64)
    factors = PrivacySettings("server", clip=clip).clip_factors(given_lengths)
    assert (factors * given_lengths <= clip * (1 + 1e-15)).all()
    assert (factors[given_lengths <= clip] == 1).all() and (factors <= 1).all()


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-3, 0.5))
def test_update_sent_by_a_party_never_exceeds_the_clip(clip: float) -> None:
    fed = federation(local(clip=clip, noise=0.0))
    for report in reports(fed):
        changes = [(tensor - center).reshape(-1) for tensor, center in sent(fed, report)]
        assert torch.linalg.vector_norm(torch.cat(changes).double()) <= clip * (1 + 1e-5)  # float32, once it is sent


def reports(fed: Federation, round: int = 1, memories: list[dict[str, Tensor]] | None = None) -> list[Reply]:
    plan = fed.plan_
    return [report for report, _ in perform_tasks(plan, tasks(fed, round), memories or [{}] * len(plan.population))]


def tasks(fed: Federation, round: int = 1) -> list[Task]:
    task_settings = {
        "seed": fed.seed,
        "execution_mode": fed.state.execution_mode,
        "layout": fed.plan_.net.layout.digest,
    }
    task_settings |= vars(fed.plan_.solver.hyper)
    return [
        Task(name, round, "train", arrays={"global_model": row(fed)}, settings=task_settings) for name in fed.population
    ]


def sent(fed: Federation, report: Reply) -> list[tuple[Tensor, Tensor]]:
    centers = fed.plan_.net.layout.split(row(fed))
    return [(tensor, centers[name]) for name, tensor in report.arrays.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("base", [PLAIN, FedAvgPlus(), algorithms.FedProx(weights="uniform"), algorithms.pFedMe()])
@pytest.mark.parametrize("wrap", [central, local])
def test_dp_without_clip_and_noise_equals_the_base_method(
    wrap: Callable[..., Algorithm], base: Algorithm, dtype: torch.dtype
) -> None:
    if wrap is local and base.personalize is not None:
        return
    wrapped, plain = (
        Federation(network(dtype), classification_parties(6, dtype), method, lr=0.1, steps=3, batch=4).fit(
            3, progress=False
        )
        for method in (wrap(base, clip=None, noise=0.0), base)
    )
    assert torch.equal(row(wrapped), row(plain))
    for name in wrapped.population:
        ours, theirs = (nn.utils.parameters_to_vector(fed.models_[name].parameters()) for fed in (wrapped, plain))
        assert torch.equal(ours, theirs)


def has_other_deviation(values: Tensor, deviation: float) -> bool:
    """Return True if a sample's variance or mean is off by more than 5 standard errors of a normal one."""
    n = values.numel()
    ratio = float(values.double().var() / deviation**2)
    return abs(ratio - 1) > 5 * math.sqrt(2 / n) or abs(float(values.mean())) > 5 * deviation / math.sqrt(n)


@pytest.mark.parametrize("source", ["seed", "system"])
@pytest.mark.parametrize(("clip", "noise", "count"), [(0.5, 2.0, 4), (3.0, 0.1, 10)])
def test_central_noise_has_the_stated_standard_deviation(source: Any, clip: float, noise: float, count: int) -> None:
    """z·C/K in every column, whatever the parties report: here nothing. 5 standard errors: 6 in 10 million fail."""
    center = torch.zeros(200_000, dtype=torch.float64)
    method = CentralDP(PLAIN, clip=clip, noise=noise, source=source)
    found = released_model(method, torch.zeros(count, len(center), dtype=torch.float64), center, count)
    assert not has_other_deviation(found, noise * clip / count)
    assert has_other_deviation(found, 1.02 * noise * clip / count)  # the test can fail


@pytest.mark.parametrize("count", [1, 2, 7, 100_001])
def test_noise_of_every_source_is_normal(count: int) -> None:
    for drawn in (
        system_noise(count),
        secret_noise(b"s" * 32, 1, "a", message=torch.zeros(count)),
        seeded_noise(0, 1, "a", count=count),
    ):
        assert drawn.shape == (count,) and drawn.isfinite().all()
        if count > 1000:
            assert not has_other_deviation(drawn, 1.0)
            fourth = float(drawn.pow(4).mean())  # 3 for a normal number, with a variance of 96/n
            assert abs(fourth - 3) < 5 * math.sqrt(96 / count)
            below = float((drawn < 1.0).double().mean())
            assert abs(below - 0.8413447) < 5 * math.sqrt(0.1334 / count)


def test_system_noise_never_repeats_and_seeded_noise_does() -> None:
    def centers(method: Algorithm) -> list[Tensor]:
        return [row(federation(method).fit(2, progress=False)) for _ in range(2)]

    assert torch.equal(*centers(central()))
    assert not torch.equal(*centers(CentralDP()))
    assert CentralDP().privacy == PrivacySettings("server") and LocalDP().privacy == PrivacySettings("party")
    assert PrivacySettings("server").source == "system"  # what hides something is what one gets


def test_noise_is_added_when_no_party_replies() -> None:
    center = torch.zeros(3)
    found = [released_model(central(), torch.zeros(0, 3), center, 4, round) for round in (0, 1)]
    assert (found[0] != 0).all() and (found[0] != found[1]).all()


def test_private_layers_are_neither_clipped_nor_noised() -> None:
    fed = federation(central(algorithms.FedPer(), clip=0.01, noise=1.0))
    first = row(fed).clone()
    fed.fit(1, progress=False)
    layout = fed.plan_.net.layout
    for name in layout.names:
        begin, end = layout.column_range(name)
        assert torch.equal(row(fed)[begin:end], first[begin:end]) == (name in fed.plan_.private_layers)


@pytest.mark.parametrize("source", ["seed", "system"])
def test_local_noise_differs_by_party_and_round_and_never_repeats(source: Any) -> None:
    fed = federation(LocalDP(clip=1e-9, noise=1.0, source=source))  # nothing but noise is left
    seen = [
        torch.cat([(tensor - center).reshape(-1) for tensor, center in sent(fed, report)])
        for round in (1, 2, 3)
        for report in reports(federation_at(fed), round)
    ]
    values = torch.stack(seen)
    assert len({tuple(one.tolist()) for one in seen}) == len(seen) == 18
    assert not torch.corrcoef(values.double()).fill_diagonal_(0).abs().max() > 5 / math.sqrt(values.shape[1])


def federation_at(fed: Federation) -> Federation:
    """Set the global model to zeros, so that float32 does not round small noise away."""
    fed.state = replace(fed.state, global_model=torch.zeros_like(fed.state.global_model))
    return fed


def test_repeated_task_gets_the_same_private_reply() -> None:
    """Each party has its own secret, so a task repeated after a worker died gets no second answer."""
    fed = federation(LocalDP())
    first = perform_tasks(fed.plan_, tasks(fed), [{}] * 6)
    secrets = [memory["secret.noise"] for _, memory in first if memory is not None]
    assert len({bytes(secret.tolist()) for secret in secrets}) == 6
    again = perform_tasks(fed.plan_, tasks(fed), [memory or {} for _, memory in first])
    for (one, _), (other, _) in zip(first, again, strict=True):
        assert all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    elsewhere = perform_tasks(
        fed.plan_, [replace(task, round=2) for task in tasks(fed)], [memory or {} for _, memory in first]
    )
    assert not any(
        torch.equal(a.arrays["0.bias"], b.arrays["0.bias"]) for (a, _), (b, _) in zip(first, elsewhere, strict=True)
    )


def test_other_update_in_the_same_round_gets_other_noise() -> None:
    """Otherwise the difference of two replies would reveal that of the data."""
    work_of = torch.ones(50, dtype=torch.float64)
    one, other = (secret_noise(b"k", 1, "a", message=work_of * factor) for factor in (1.0, 1 + 1e-15))
    assert not (one == other).any()


def test_private_reply_holds_only_noised_values() -> None:
    for report in reports(federation(local())):
        assert dict(report.metrics) == {"samples": 1} and report.status == "ok"
    fed = federation(local()).fit(2, progress=False)
    assert "before" not in fed.history_[-1] and math.isnan(fed.history_[-1]["loss"])


def test_diverged_training_is_not_revealed() -> None:
    fed = federation(local(clip=1.0, noise=1.0), lr=1e30, steps=20)
    fed.fit(2, progress=False)
    assert not fed.rejections_ and row(fed).isfinite().all()


def test_noise_secret_survives_a_reset_of_the_local_state() -> None:
    fed = federation(LocalDP())
    (_, memory), *_ = perform_tasks(fed.plan_, tasks(fed)[:1], [{}])
    assert memory is not None
    reset = [replace(task, settings={**task.settings, "reset": True}) for task in tasks(fed)[:1]]
    (_, after), *_ = perform_tasks(fed.plan_, reset, [memory])
    assert after is not None and torch.equal(after["secret.noise"], memory["secret.noise"])


def closed_form_delta(sigma: float, spent: float) -> float:
    """δ of a Gaussian mechanism at ε: Balle & Wang (2018), Theorem 8."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    half = 1 / (2 * sigma)
    return below(half - spent * sigma) - math.exp(spent) * below(-half - spent * sigma)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 10), (4.0, 100), (20.0, 1000)])
def test_accountant_equals_the_closed_form_of_the_gaussian_mechanism(noise: float, releases: int) -> None:
    """T releases with noise σ are one with σ/√T."""
    found = epsilon(noise, releases, 1e-5)
    assert closed_form_delta(noise / math.sqrt(releases), found) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(noise / math.sqrt(releases), 1, 1e-5) == found


def test_accountant_agrees_with_the_literature_and_other_accountants() -> None:
    """Abadi et al. (2016), §1 and §5: q=0.01, σ=4, 10,000 steps have (1.26, 1e-5) by their moments accountant."""
    import dp_accounting
    import dp_accounting.pld

    assert epsilon(4.0, 10_000, 1e-5, rate=0.01) == pytest.approx(1.26, abs=0.35)
    assert epsilon(4.0, 10_000, 1e-5, rate=0.01) < 1.26  # later theorems turn Rényi's into ε with less loss
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    exact = dp_accounting.pld.PLDAccountant().compose(event, 50).get_epsilon(1e-5)
    assert exact <= epsilon(2.0, 50, 1e-5, rate=0.1) <= 1.2 * exact
    assert epsilon(2.0, 50, 1e-5, rate=0.1) < epsilon(2.0, 50, 1e-5)


def test_local_sensitivity_is_twice_the_central_one() -> None:
    """Two changes of a party lie up to 2C apart: noise of z·C is z/2 times that."""
    assert PrivacySettings("party", noise=2.0).epsilon(3) == PrivacySettings("server", noise=1.0).epsilon(3)
    assert PrivacySettings("server", noise=0.0).epsilon(1) == math.inf and PrivacySettings("server").epsilon(0) == 0


def test_without_the_accountant_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    epsilon.cache_clear()
    with pytest.raises(SettingError, match=re.escape("pip install 'descant[dp]'")):
        federation(central()).fit(1, progress=False)
    federation(central(noise=0.0)).fit(1, progress=False)  # nothing to count


@pytest.mark.parametrize("wrap", [central, local])
def test_budget_ends_a_run_just_before_it_would_be_exceeded(wrap: Callable[..., Algorithm]) -> None:
    method = wrap(noise=4.0, delta=1e-3)
    assert method.privacy is not None
    budget = (method.privacy.epsilon(4) + method.privacy.epsilon(5)) / 2
    fed = federation(wrap(noise=4.0, delta=1e-3, budget=budget))
    with pytest.warns(DescantWarning, match=r"The privacy budget of ε=.* at δ=0.001 ends the run after 4 rounds"):
        fed.fit(10, progress=False)
    assert fed.state.round == len(fed.history_) == 4
    assert [entry["epsilon"] for entry in fed.history_] == [method.privacy.epsilon(t) for t in (1, 2, 3, 4)]
    assert torch.equal(row(fed), row(federation(method).fit(4, progress=False)))  # what was reached is kept
    assert "of a budget of" in fed.findings()[-1]
    exact = federation(wrap(noise=4.0, delta=1e-3, budget=method.privacy.epsilon(2))).fit(2, progress=False)
    assert exact.state.round == 2  # a budget that is just enough is not exceeded


def test_last_round_before_the_budget_is_scored_in_a_recorded_run(tmp_path: Path) -> None:
    def private() -> Federation:
        return federation(A.CentralDP(A.FedAvg(), noise=4.0, delta=1e-3, budget=epsilon(4.0, 4, 1e-3)))

    with Run.start(tmp_path / "run", private()) as run, pytest.warns(DescantWarning, match="after 4 rounds"):
        assert len(list(run.rounds(10, score_every=3))) == 4
    with Run.resume(tmp_path / "run", private()) as run, pytest.warns(DescantWarning, match="after 4 rounds"):
        assert not list(run.rounds(6, score_every=3))
    found = recorded(tmp_path / "run")
    assert found.numbers.scored_rounds.tolist() == [3, 4]
    assert [event["round"] for event in found.events if event["event"] == "scored"] == [3, 4]


def test_budget_below_one_round_is_an_error() -> None:
    with pytest.raises(BudgetError, match="ends the run after 0 rounds"):
        federation(central(budget=0.1)).fit(1, progress=False)


def test_party_declines_tasks_beyond_its_budget() -> None:
    method = local(noise=4.0)
    assert method.privacy is not None
    fed = federation(local(noise=4.0, budget=method.privacy.epsilon(3)))
    assert all(report.status == "ok" for report in reports(fed, 3))
    assert all(report.status == "error" and "budget" in report.reason for report in reports(fed, 4))
    assert not any(report.arrays for report in reports(fed, 4))


@pytest.mark.parametrize("method", [central(budget=30.0), local(noise=2.0, budget=30.0)], ids=["central", "local"])
def test_spent_budget_survives_a_restart(method: Algorithm, tmp_path: Path) -> None:
    whole = federation(method).fit(5, progress=False)
    federation(method).fit(3, progress=False).save(tmp_path)
    again = federation(method).load(tmp_path)
    assert int(again.state.server_state["privacy"]["releases"]) == 3
    again.fit(2, progress=False)
    assert again.hash() == whole.hash()
    assert [e["epsilon"] for e in again.history_] == [e["epsilon"] for e in whole.history_]


def test_recorded_run_with_system_noise_releases_no_round_twice(tmp_path: Path) -> None:
    """Every round is on disk before its global model is released, so a resumed run never draws its noise again."""
    with Run.start(tmp_path / "run", federation(CentralDP())) as run:
        for round in run.rounds(3):
            assert (tmp_path / "run" / "models" / f"{round.index:08d}" / "state.json").exists()
        reached = row(run.federation)
    with Run.resume(tmp_path / "run", federation(CentralDP())) as run:
        assert torch.equal(row(run.federation), reached) and run.sync == "always"
        assert [round.round.to_record()["epsilon"] for round in run.rounds(1)] == [PrivacySettings("server").epsilon(4)]
    with pytest.raises(SettingError, match=r"Its 'sync' must be 'always'\. Got 10"):
        Run.start(tmp_path / "other", federation(CentralDP()), sync=10)
    Run.start(tmp_path / "seeded", federation(central()), sync=10).close()  # the same noise again: nothing new


class Watching(BytesEngine):
    """An engine that records, for each evaluation task, if its round is already in the run folder."""

    def __init__(self, plan: Any, run: Path, found: list[bool]) -> None:
        super().__init__(plan)
        self.run = run
        self.found = found

    def submit(self, tasks: Any) -> None:
        if tasks[0].kind == "evaluate":
            self.found.append((self.run / "models" / f"{tasks[0].round:08d}" / "state.json").exists())
        super().submit(tasks)


def test_unrepeatable_noise_is_on_disk_before_parties_evaluate_the_global_model(tmp_path: Path) -> None:
    found = list[bool]()
    fed = federation(CentralDP(), engine=partial(Watching, run=tmp_path / "run", found=found))
    with Run.start(tmp_path / "run", fed) as run:
        list(run.rounds(3, score_every=1))
    assert found == [True] * 3
    again = federation(CentralDP()).load(tmp_path / "run" / "models" / "00000003")
    assert [entry.keys() for entry in again.history_] == [entry.keys() for entry in fed.history_]


@pytest.mark.parametrize(
    "method",
    [central(), central(FedAvgPlus()), local(), local(algorithms.Ditto())],
    ids=lambda method: str(method.name),
)
def test_batching_never_changes_a_private_result(method: Algorithm) -> None:
    def hashed(engine: Callable[..., Any]) -> str:
        return federation(method, engine=engine).fit(3, progress=False).hash()

    cuts = [partial(InProcess, max_parties=most) for most in (1, 2, 6)] + [
        partial(BytesEngine, batch_count=pieces) for pieces in (1, 3)
    ]
    assert len({hashed(engine) for engine in cuts}) == 1


def test_rejected_party_counts_as_no_change() -> None:
    """The mean is over the parties that were asked: the number of usable updates reveals data."""

    def spoil(report: Reply) -> list[Reply]:
        bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in report.arrays.items()}
        return [replace(report, arrays=bad)] if report.party == "1" and report.kind == "train" else [report]

    spoilt = federation(central(clip=1e9, noise=0.0), engine=partial(BytesEngine, tamper=spoil))
    whole = federation(PLAIN, engine=partial(BytesEngine, absent=("1",)))
    first = row(whole).clone()
    with pytest.warns(DescantWarning, match="1 of 6 replies were rejected"):
        spoilt.fit(1, progress=False)
    whole.fit(1, progress=False)
    torch.testing.assert_close(row(spoilt) - first, (row(whole) - first) * 5 / 6)


def test_only_secret_sampling_lowers_epsilon() -> None:
    here = central().privacy
    away = CentralDP().privacy
    assert here is not None and away is not None
    hidden = PoissonSampling(0.2)
    shown = PoissonSampling(0.2, source="seed")
    assert [sampling_rate(away, attend) for attend in (hidden, shown)] == [0.2, 1.0]
    assert [sampling_rate(here, attend) for attend in (hidden, shown)] == [0.2, 0.2]
    others = (algorithms.Sample(2), algorithms.RandomAvailability(0.2), PLAIN.participation)
    assert all(sampling_rate(here, attend) == 1 for attend in others)
    assert sampling_rate(PrivacySettings("party"), hidden) == 1  # the driver knows whom it asked


def test_poisson_sampling_divides_by_the_expected_party_count() -> None:
    fed = federation(central(clip=1e9, noise=1e-15, delta=1e-3), participation=PoissonSampling(0.4, source="seed"))
    first = row(fed).clone()
    (round,) = fed.rounds(1)
    present = set(round.round.participants)
    assert 0 < len(present) < 6
    plain = federation(PLAIN, engine=partial(BytesEngine, absent=set(fed.population) - present)).fit(1, progress=False)
    torch.testing.assert_close(row(fed) - first, (row(plain) - first) * len(present) / 2.4, rtol=1e-3, atol=1e-5)
    assert len({len(round.round.participants) for round in fed.rounds(9)}) > 2  # each comes by itself


A = algorithms
REFUSED: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "geometric median": (lambda: central(A.RFA()), "cannot wrap RFA: noise of clip/K hides a party in a mean"),
    "coordinate median": (lambda: central(A.CoordinateMedian()), "can move the aggregate of CoordinateMedian by more"),
    "median of Fed+": (lambda: central(A.FedGeoMedPlus()), "can move the aggregate of Norm2 by more"),
    "v1's median": (lambda: central(A.FedPlusV1(Norm1(), A.RFA().aggregate)), "GeometricMedian by more"),
    "lying": (lambda: central(A.ByzantineParties(FedAvg())), "can move the aggregate of PoisonedAggregator by more"),
    "all": (lambda: central(FedAvgPlus(aggregate_over="all")), "counts the last models of the absent again"),
    "async": (lambda: central(A.FedAsync()), "it does not wait for all"),
    "buffered": (lambda: central(A.FedBuff()), "it does not wait for all"),
    "total": (lambda: central(FedAvg(normalize="total")), r'normalize="total" moves the global model by sample counts'),
    "rewards": (lambda: central(A.FedRL()), "weights updates by what parties report of them"),
    "coreset_proxies": (
        lambda: central(A.CoresetProxies(FedAvg())),
        "proxies are trained on rows that leave the parties",
    ),
    "tuned": (lambda: central(A.AdaptiveHyper(reward="clients")), "clients' losses reveal them without noise"),
    "alone": (lambda: central(A.Local()), "has no global model, and shares nothing"),
    "twice": (lambda: local(central()), r"FedAvg\+DP is already private"),
    "no clip": (lambda: central(clip=None), "without a 'clip' hides nothing"),
    "no noise": (lambda: central(noise=0.0, budget=1.0), "cannot keep a budget without noise"),
    "own models": (lambda: local(FedAvgPlus()), "which would be noise on noise"),
    "local total": (lambda: local(FedAvg(normalize="total")), r'normalize="total"'),
    "local proxies": (lambda: local(A.CoresetProxies(FedAvg())), "rows that leave the parties"),
    "bad clip": (lambda: central(clip=-1.0), "The 'clip' of CentralDP must be > 0. Got -1.0."),
    "bad delta": (lambda: local(delta=1.0), "The 'delta' of LocalDP must be > 0 and < 1. Got 1.0."),
    "bad source": (lambda: CentralDP(source="dice"), "The 'source' of CentralDP must be one of"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsound_methods_are_rejected_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(SettingError, match=reason):
        make()


WRAPPED: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "coreset_proxies": (lambda: A.CoresetProxies(central()), "is not private: proxies are trained on rows"),
    "tuned": (lambda: A.AdaptiveHyper(central(), reward="clients"), r"FedAvg\+DP\+AH is not private"),
    "lying": (lambda: A.ByzantineParties(central()), "can move the aggregate of PoisonedAggregator by more"),
    "quorum": (lambda: replace(central(), quorum=2), "it does not wait for all"),
    "samples": (
        lambda: replace(central(), compute_weights=FedAvg().compute_weights),
        "weights updates by what parties report of them",
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_unsound_outer_wrappers_are_rejected_before_training(name: str) -> None:
    make, reason = WRAPPED[name]
    with pytest.raises(SettingError, match=reason):
        federation(make()).fit(1, progress=False)


@pytest.mark.parametrize("method", [central(), local()], ids=["central", "local"])
def test_running_statistics_are_rejected(method: Algorithm) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ModelError, match=r"Running statistics \(1.running_mean\) cannot be hidden.*GroupNorm"):
        Federation(model, classification_parties(6), method).fit(1, progress=False)


def test_local_dp_supports_medians_and_a_tuner_sees_no_party_feedback() -> None:
    assert local(A.RFA()).aggregate == A.RFA().aggregate
    seen: list[set[str]] = []

    def watch(tuning: Any) -> Any:
        seen.append(set(tuning.feedback))
        return PLAIN.tune(tuning)

    people = classification_parties(6)
    validated = people.with_validation(people["0"].x, people["0"].y)
    Federation(network(), validated, replace(central(), tune=watch)).fit(2, progress=False)
    assert seen and all(found == {"validation"} for found in seen)


def test_interpolation_of_a_private_run_is_rejected() -> None:
    with pytest.raises(DescantError, match="An interpolation runs a trial round"):
        analysis.interpolate(federation(central()).fit(1, progress=False))


def test_comparison_continues_after_a_budget_ends(tmp_path: Path) -> None:
    people = digits(count=3, seed=0)
    method = central(noise=4.0, budget=2.0)
    with pytest.warns(DescantWarning, match="ends the run after 4 rounds"):
        study = compare([FedAvg(), method], partial(nn.Linear, 64, 10), people, rounds=5, lr=0.1, steps=2, batch=5)
    assert [result.method for result in study.results] == ["Local", "FedAvg", "FedAvg+DP"]
    assert study.save(tmp_path / "study").exists()


def test_findings_name_what_epsilon_does_not_count() -> None:
    (finding,) = federation(central()).fit(1, progress=False).findings()
    assert "not the losses, scores and participation that the server operator sees" in finding
    assert "drawn from the run's seed" in finding and "δ should be" not in finding
    (finding,) = federation(LocalDP(delta=0.5)).fit(1, progress=False).findings()
    assert "not their scores on their test sets" in finding and "δ should be below 1/6:" in finding
    assert "seed" not in finding


private_sgd = partial(DpSgd, lr=0.1, steps=3, batch=4, source="seed")


def dp_sgd_federation(solver: DpSgd, method: Algorithm = PLAIN, **settings: Any) -> Federation:
    return Federation(network(), classification_parties(6), method, solver=solver, seed=5, **settings)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_no_sample_moves_the_sum_by_more_than_the_clip(rows: list[list[float]], clip: float) -> None:
    gradients = torch.tensor(rows, dtype=torch.float64)
    privacy = PrivacySettings("sample", clip)
    whole = clipped_sum(privacy, gradients)
    for k in range(len(rows)):
        without = clipped_sum(privacy, torch.cat([gradients[:k], gradients[k + 1 :]]))
        assert torch.linalg.vector_norm(whole - without) <= clip * (1 + 1e-12) + 1e-15 * len(rows) * clip


def convolved(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    layers = (
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("made", [network, convolved])
@pytest.mark.parametrize("steps", [1, 3])
def test_per_sample_gradients_equal_a_loop_with_autograd(made: Callable[..., nn.Module], steps: int) -> None:
    """Against autograd, one sample after another, each clipped: steps of full batches without noise."""
    people = classification_parties(6, torch.float64)
    solver = DpSgd(lr=0.5, steps=steps, batch=10**6, clip=0.3, noise=0.0, source="seed")
    fed = Federation(made(torch.float64), people, PLAIN, solver=solver)
    clips = 0
    for report, party in zip(reports(fed), people.values(), strict=True):
        model = made(torch.float64)
        for _ in range(steps):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for x, y in zip(party.x, party.y, strict=True):
                loss = nn.functional.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0))
                found = torch.autograd.grad(loss, list(model.parameters()))
                length = float(torch.sqrt(sum((g**2).sum() for g in found)))
                clips += length > 0.3
                for into, gradient in zip(total, found, strict=True):
                    into += gradient * min(1.0, 0.3 / length)
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), total, strict=True):
                    p -= 0.5 * gradient / party.samples
        for tensor, p in zip(report.arrays.values(), model.parameters(), strict=True):
            torch.testing.assert_close(tensor, p.detach())
    assert clips


@pytest.mark.parametrize("base", [PLAIN, FedAvgPlus(alpha=1.0), A.FedRep()], ids=lambda base: str(base.name))
def test_dp_sgd_without_clip_and_noise_equals_full_batch_sgd(base: Algorithm) -> None:
    private = dp_sgd_federation(DpSgd(lr=0.1, steps=3, batch=10**6, clip=1e9, noise=0.0, source="seed"), base)
    plain = Federation(network(), classification_parties(6), base, lr=0.1, steps=3, batch=10**6, seed=5)
    torch.testing.assert_close(row(private.fit(3, progress=False)), row(plain.fit(3, progress=False)))


@pytest.mark.parametrize("source", ["seed", "system"])
def test_dp_sgd_noise_has_the_stated_standard_deviation(source: Any) -> None:
    """η·z·C/batch in every column and step; the clip leaves nothing of the gradients beside it."""
    model = nn.Linear(6, 3000).double()
    solver = DpSgd(lr=0.5, steps=4, batch=2, clip=1e-3, noise=1e3, source=source)
    fed = Federation(model, classification_parties(3, torch.float64), PLAIN, solver=solver)
    first = reports(fed)[0]
    change = torch.cat([(tensor - center).reshape(-1) for tensor, center in sent(fed, first)])
    assert not has_other_deviation(change, math.sqrt(4) * 0.5 * 1e3 * 1e-3 / 2)


@pytest.mark.parametrize("source", ["seed", "system"])
def test_dp_sgd_batches_are_poisson_samples(source: Any) -> None:
    """Poisson sampling, as the accountant has it: batches differ in size as a binomial number does."""
    solver = DpSgd(batch=30, source=source)
    job: Any = SimpleNamespace(parties=[SimpleNamespace(name="a")], round=1, seed=0)
    draws = solver._draws(job, new_secret() if source == "system" else None)
    uniform = torch.stack([draws(step, 100, torch.zeros(1))[0] for step in range(400)])
    sizes = (uniform < solver.sampling_rate(100)).sum(1).double()
    assert abs(float(sizes.mean()) - 30) < 5 * math.sqrt(21 / 400)
    assert abs(float(sizes.var()) / 21 - 1) < 5 * math.sqrt(2 / 400)


def test_sample_privacy_counts_steps_for_the_smallest_party() -> None:
    people = classification_parties(6).subset(["0", "1", "2"])  # 9, 13 and 17 samples
    fed = Federation(network(), people, PLAIN, solver=private_sgd(noise=2.0)).fit(3, progress=False)
    assert [entry["epsilon"] for entry in fed.history_] == [epsilon(2.0, 3 * t, 1e-5, rate=4 / 9) for t in (1, 2, 3)]
    assert "Each sample has spent" in fed.findings()[-1] and math.isnan(fed.history_[-1]["loss"])


def test_sample_budget_ends_a_run_and_survives_a_restart(tmp_path: Path) -> None:
    whole = dp_sgd_federation(private_sgd(noise=2.0)).fit(3, progress=False)
    dp_sgd_federation(private_sgd(noise=2.0)).fit(2, progress=False).save(tmp_path)
    assert dp_sgd_federation(private_sgd(noise=2.0)).load(tmp_path).fit(1, progress=False).hash() == whole.hash()
    enough = dp_sgd_federation(private_sgd(noise=2.0, budget=epsilon(2.0, 6, 1e-5)))
    with pytest.warns(DescantWarning, match="ends the run after 2 rounds"):
        enough.fit(5, progress=False)
    assert enough.state.round == 2


@pytest.mark.parametrize("base", [PLAIN, A.FedGeoMedPlus(), A.FedPer()], ids=lambda base: str(base.name))
def test_batching_never_changes_dp_sgd(base: Algorithm) -> None:
    def hashed(most: int) -> str:
        return (
            dp_sgd_federation(private_sgd(), base, engine=partial(InProcess, max_parties=most))
            .fit(2, progress=False)
            .hash()
        )

    assert hashed(1) == hashed(2) == hashed(6)


def test_repeated_task_gets_the_same_dp_sgd_reply() -> None:
    fed = dp_sgd_federation(private_sgd(source="system"))
    first = perform_tasks(fed.plan_, tasks(fed), [{}] * 6)
    again = perform_tasks(fed.plan_, tasks(fed), [memory or {} for _, memory in first])
    for (one, _), (other, _) in zip(first, again, strict=True):
        assert dict(one.metrics) == {"samples": fed.population[one.party].samples}
        assert all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    fresh = perform_tasks(fed.plan_, tasks(fed), [{}] * 6)
    assert not any(
        torch.equal(a.arrays["0.bias"], b.arrays["0.bias"]) for (a, _), (b, _) in zip(first, fresh, strict=True)
    )


UNHIDDEN: dict[str, tuple[Callable[[], Algorithm], str]] = {
    "a term": (A.FedProx, "the loss term 'proximal'.*FedPlusFixed"),
    "coreset_proxies": (
        lambda: A.CoresetProxies(FedAvg()),
        "cannot hide samples in FedAvg.*rows that leave the parties",
    ),
    "tuned": (lambda: A.AdaptiveHyper(reward="clients"), "clients' losses"),
    "twice": (central, "it hides whole parties, and DpSgd hides samples"),
    "rewards": (lambda: replace(FedAvg(), compute_weights=A.FedRL().compute_weights), "what parties report of them"),
}


@pytest.mark.parametrize("name", UNHIDDEN)
def test_methods_unsound_with_dp_sgd_are_rejected(name: str) -> None:
    make, reason = UNHIDDEN[name]
    with pytest.raises(SettingError, match=reason):
        dp_sgd_federation(private_sgd(), make()).fit(1, progress=False)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout()])
def test_models_without_per_sample_gradients_are_rejected(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3))
    with pytest.raises(ModelError, match=r"cannot be hidden|the gradient of every single sample"):
        Federation(model, classification_parties(6), PLAIN, solver=private_sgd()).fit(1, progress=False)


def test_a_recipe_wraps_a_method() -> None:
    from descant.config import read_recipe

    text = """
    [parties]
    population = "digits"
    count = 3
    [model]
    net = "mlp"
    inputs = 64
    outputs = 10
    hidden = [8]
    [method]
    algorithm = "fedavg+"
    wrap = [{wrapper = "central_dp", clip = 0.5, noise = 2.0, delta = 0.01, budget = 9.0, source = "seed"}]
    """
    found = read_recipe(text).algorithm()
    assert (
        found.privacy == PrivacySettings("server", 0.5, 2.0, delta=0.01, budget=9.0, source="seed")
        and found.name == "FedAvgPlus+DP"
    )
    again = read_recipe(text.replace("central_dp", "local_dp").replace("fedavg+", "fedavg")).algorithm()
    assert again.privacy == PrivacySettings("party", 0.5, 2.0, delta=0.01, budget=9.0, source="seed")


def test_snippets_of_the_privacy_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(DescantWarning, match="The privacy budget"):
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
