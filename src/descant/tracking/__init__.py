"""Durable runs: a folder that can be copied, killed at any moment and resumed, and read without the federation.

    run/run.toml        the recipe, as it was given
    run/events.jsonl    what happened: a line an event, each sealed with all before it
    run/metrics.db      numbers by round and by party, in SQLite
    run/models/         the last two snapshots, each a folder of safetensors that `Federation.load` reads too

Writing: the loop stays visible, and recording is what the iterator does.

    with Run.start("run", federation, recipe=text) as run:       # or Run.resume("run", federation), if is_run("run")
        for round in run.rounds(200 - run.round, score_every=10):
            ...
        run.log("warning", text="ρ=10 never binds")              # any event of your own

Reading: no federation, no torch.

    found = read("run")                  # Recorded: state, round, recipe, settings, events, numbers, scores
    found.to_csv("run.csv")              # and to_jsonl
    for found in runs("experiments"):    # every run below a folder, the oldest first
        print(found.folder, found.state, found.round)

What is promised. A round is acknowledged when the loop's body gets it. Everything below holds after `kill -9` and
after a power cut; a run that was resumed ends with the same model hash as one that was never disturbed.

- sync="spaced" (simulations): snapshots are spaced so that they take a few per cent of the time. A resumed
  run goes on from the last one and does the rounds since then again, with the same numbers.
- sync=n: the same with a snapshot every n rounds.
- sync="always" (deployments, where a round cannot be done again): a round's numbers and the models after it are on the
  disk, synced, before the body gets it. A snapshot that is damaged is then an error, and not passed over.

Events: begun, resumed, round, scored, refused, warning, snapshot, ended (closed in order), stopped (by an error).
"""

from typing import TYPE_CHECKING

from ..core.lazy_imports import lazy_exports

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
