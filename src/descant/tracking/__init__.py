"""Durable runs: a folder that survives a kill at any moment, and that can be copied, resumed and read by itself.

    run/run.toml        the recipe as given
    run/events.jsonl    one line per event, chained by hashes
    run/metrics.db      numbers by round and by party, in SQLite
    run/models/         the last two snapshots, each a folder of safetensors that `Federation.load` reads too

Writing: the loop stays visible; the iterator records each round.

    with Run.start("run", federation, recipe=text) as run:       # or Run.resume("run", federation), if is_run("run")
        for round in run.rounds(200 - run.round, score_every=10):
            ...
        run.log("warning", text="ρ=10 never binds")              # any event of your own

Reading: no federation, no torch.

    recorded = read_run("run")           # RecordedRun: state, round, recipe, settings, events, numbers
    recorded.to_csv("run.csv")           # and to_jsonl
    for recorded in find_runs("experiments"):    # every run below a folder, the oldest first
        print(recorded.folder, recorded.state, recorded.round)

Guarantees. A round is acknowledged when the loop's body gets it. Everything below holds after `kill -9` and after a
power cut. A resumed run ends with the same model hash as an undisturbed one.

- sync="spaced" (simulations): snapshots are spaced to take a few percent of the time. A resumed run continues from the
  last one and repeats the rounds since then, with the same numbers.
- sync=n: the same with a snapshot every n rounds.
- sync="always" (deployments, where a round cannot be repeated): a round's numbers and models are synced to disk before
  the body gets it. A damaged snapshot is then an error; otherwise the one before it is used.

Events: started, resumed, round, scored, rejected, warning, snapshot, finished (closed in order), failed (by an error).
"""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .run_reader import RecordedRun, find_runs, is_run, read_run
    from .run_writer import Run
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".run_reader": ("RecordedRun", "is_run", "read_run", "find_runs"),
            ".run_writer": ("Run",),
        },
    )

__all__ = [
    "RecordedRun",
    "Run",
    "is_run",
    "read_run",
    "find_runs",
]
