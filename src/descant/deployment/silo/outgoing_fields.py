"""What leaves a party: every field of every answer, named before anything is sent."""

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
"""The metric by which a party says that it had lost its memory, and began anew."""
CUSTOM_LOSS = "its own"
"""What a party says of a loss that its own file defines: its name would tell where the file is."""
FORGET_REQUEST = "forget"
"""The metric of an introduction by which a party wishes to be forgotten; its value is the mark of its machine."""


def loss_name(file: SiloFile) -> str:
    """What a party says of its loss."""
    return CUSTOM_LOSS if file.has_loss else address_of(file.loss)


def outgoing_fields(file: SiloFile, layout: Layout) -> dict[str, Mapping[str, str]]:
    """Every field of every answer that a party gives, by the letter that asks for it, and what it holds."""
    data_description = describe_party(file.party_data)
    return {
        "in every answer": {
            "party": file.party,
            "round, kind": "as in the letter that it answers",
            "status": "ok, refused or error",
            "reason": "why it is not ok: what is wrong with the letter, the kind of an error (ValueError) and nothing "
            "of its text, or how its process has ended",
        },
        "when it joins": {
            "data_description": ", ".join(f"{name} {value}" for name, value in data_description.items()),
            "layout": f"{layout.digest}, the model's fingerprint; if it does not fit, 6 names of its tensors",
            "version": __version__,
            "loss": loss_name(file),
            "machine": "a number that is drawn by chance when its folder is first used",
            FORGET_REQUEST: "the same number, by `descant silo forget` alone",
        },
        "after training": {
            "arrays": f"the {len(layout.names)} tensors of the model{_rate_limit_note(file.policy)}, less those that the recipe "
            "keeps private",
            SAMPLES_METRIC: f"how many {file.wording.trained_unit} it has trained on",
            "loss": "its mean training loss, a number",
            ", ".join(LOCAL_SCORE_NAMES): "scores on its own test set, each a number, if the recipe asks for them",
            **next(
                (told for kind, told in _REWARD_FIELDS.items() if isinstance(file.party_data, kind)),
                _row_party_fields(file.policy),
            ),
            STATE_RESET: "that it has lost its memory, if it has",
            RETRY_AFTER: "seconds until the next day, if it has had its rounds; the reason then says how many",
        },
        "when models are judged": {
            "center, own, majority": "scores on its own test set: the common model, its own, what needs no learning",
            "test_samples": "how many they are of",
        },
        "where work is added up unseen": {
            KEY_ARRAY: "a public key for the round",
            SAMPLES_METRIC: "how many it trains on",
            "arrays": "the same tensors as whole numbers of 8 bytes, of which only the sum of all says anything",
        },
        "on the line": {
            "certificate, node key": "of its invite, the public halves",
            "heartbeats": "that it is there, and when",
        },
    }


_REWARD_METRIC = "reward"
_REWARD_FIELDS = {
    Agent: {_REWARD_METRIC: "the mean return of its episodes, a number, once one has ended"},
    Desk: {
        _REWARD_METRIC: "the mean logarithm of what its portfolio grew by in a day of training, a number",
        REAL_ONLY: "that it had no prices made up, a number, if it should have had some",
    },
}
"""What a party that has no rows leaves beside its loss."""


def _row_party_fields(policy: SharingPolicy) -> dict[str, str]:
    return {
        RECEIVED_MODEL_LOSS: "the loss of the model that came, a number, if the recipe asks for it",
        "encrypted_coreset": _coreset_note(policy),
        CORESET_KEY: "how many rows were sealed",
    }


def _rate_limit_note(policy: SharingPolicy) -> str:
    return "" if policy.rounds_a_day is None else f", in at most {policy.rounds_a_day} rounds a day"


def _coreset_note(policy: SharingPolicy) -> str:
    if not policy.share:
        return "no row of its data"
    dropped = ", ".join(str(column) for column in sorted(set(policy.columns_dropped)))
    zeroed_note = f", with 0 in place of what is in columns {dropped}" if dropped else ""
    return f"at most {policy.share:.1%} of its rows, ever, sealed, as a coreset{zeroed_note}"
