"""The fields that leave a party: every field of every reply, listed before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

from ... import __version__
from ...core.messages import CORESET_KEY, REAL_ONLY
from ...models.flat import Layout
from ...parties import Agent, Desk
from ...parties.remote_parties import describe_party
from ...privacy.secure_aggregation.party_masking import KEY_ARRAY, SAMPLES_METRIC
from ...rounds.party_evaluation import LOCAL_SCORE_NAMES
from ...rounds.plan import RECEIVED_MODEL_LOSS
from ...serialization.references import address_of
from .silo_file import SharingPolicy, SiloFile
from .silo_state import RETRY_AFTER

STATE_RESET = "state_reset"
"""The metric that reports a lost party state: the party has started again from none."""
CUSTOM_LOSS = "its own"
"""The reported name of a loss that the silo's file defines: its address would reveal the file's path."""
FORGET_REQUEST = "forget"
"""The handshake metric that asks for erasure; its value is the machine id of the party."""


def loss_name(file: SiloFile) -> str:
    """Return the loss name that a party reports."""
    return CUSTOM_LOSS if file.has_loss else address_of(file.loss)


def outgoing_fields(file: SiloFile, layout: Layout) -> dict[str, Mapping[str, str]]:
    """Return every field of every reply by occasion, each with a description of its content."""
    data_description = describe_party(file.party_data)
    return {
        "in every reply": {
            "party": file.party,
            "round, kind": "as in the task that it answers",
            "status": "ok, declined or error",
            "reason": "why it is not ok: what is wrong with the task, the type of an error (ValueError) without its "
            "text, or how the worker process ended",
        },
        "on joining": {
            "data_description": ", ".join(f"{name} {value}" for name, value in data_description.items()),
            "layout": f"{layout.digest}, the model's fingerprint; if it does not match, also 6 names of tensors",
            "version": __version__,
            "loss": loss_name(file),
            "machine": "a random number, drawn when the folder is first used",
            FORGET_REQUEST: "the same number, sent by `descant silo forget` only",
        },
        "after training": {
            "arrays": f"the {len(layout.names)} tensors of the model{_rate_limit_note(file.policy)}, without those "
            "that the recipe keeps private",
            SAMPLES_METRIC: f"number of {file.wording.trained_unit} it has trained on",
            "loss": "mean training loss, a number",
            ", ".join(LOCAL_SCORE_NAMES): "scores on its own test set, each a number, if the recipe asks for them",
            **next(
                (fields for kind, fields in _REWARD_FIELDS.items() if isinstance(file.party_data, kind)),
                _row_party_fields(file.policy),
            ),
            STATE_RESET: "that its party state was lost, if it was",
            RETRY_AFTER: "seconds until the next day, once its daily rounds are used up; the reason names the limit",
        },
        "after evaluation": {
            "global_model, personal, majority": "scores on its own test set: global model, personal model, "
            "trivial baseline",
            "test_samples": "size of that test set",
        },
        "with secure aggregation": {
            KEY_ARRAY: "a public key for the round",
            SAMPLES_METRIC: "number of samples it trains on",
            "arrays": "the same tensors as masked integers of 8 bytes: only the sum over all parties is readable",
        },
        "on the connection": {
            "certificate, node key": "the public halves of the keys in its invite",
            "heartbeats": "that it is connected, and when",
        },
    }


_REWARD_METRIC = "reward"
_REWARD_FIELDS = {
    Agent: {_REWARD_METRIC: "mean return of its episodes, a number, once one has ended"},
    Desk: {
        _REWARD_METRIC: "mean daily log return of its portfolio in training, a number",
        REAL_ONLY: "a code that says why no prices were generated, if some were requested",
    },
}
"""The additional training metrics of parties without rows."""


def _row_party_fields(policy: SharingPolicy) -> dict[str, str]:
    return {
        RECEIVED_MODEL_LOSS: "loss of the received model, a number, if the recipe asks for it",
        "encrypted_coreset": _coreset_note(policy),
        CORESET_KEY: "number of encrypted rows",
    }


def _rate_limit_note(policy: SharingPolicy) -> str:
    return "" if policy.rounds_a_day is None else f", in at most {policy.rounds_a_day} rounds a day"


def _coreset_note(policy: SharingPolicy) -> str:
    if not policy.share:
        return "no row of its data"
    dropped = ", ".join(str(column) for column in sorted(set(policy.columns_dropped)))
    zeroed_note = f", with 0 in columns {dropped}" if dropped else ""
    return f"a coreset: over time at most {policy.share:.1%} of its rows, encrypted{zeroed_note}"
