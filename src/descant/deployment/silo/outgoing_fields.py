"""What leaves a party: every field of every answer, named before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

from ... import __version__
from ...core.messages import ASKED, REAL_ONLY
from ...models.flat import Layout
from ...parties import Agent, Desk
from ...parties.remote_parties import description
from ...privacy.secure_aggregation.party_masking import KEY, SAMPLES
from ...rounds.party_evaluation import JUDGED
from ...rounds.plan import RECEIVED
from ...serialization.references import address_of
from .silo_file import Policy, SiloFile
from .silo_state import RESTS

ANEW = "began_anew"
"""The metric by which a party says that it had lost its memory, and began anew."""
OWN = "its own"
"""What a party says of a loss that its own file defines: its name would tell where the file is."""
FORGET = "forget"
"""The metric of an introduction by which a party wishes to be forgotten; its value is the mark of its machine."""


def loss_of(file: SiloFile) -> str:
    """What a party says of its loss."""
    return OWN if file.has_loss else address_of(file.loss)


def leaving(file: SiloFile, layout: Layout) -> dict[str, Mapping[str, str]]:
    """Every field of every answer that a party gives, by the letter that asks for it, and what it holds."""
    said = description(file.own)
    return {
        "in every answer": {
            "party": file.party,
            "round, kind": "as in the letter that it answers",
            "status": "ok, refused or error",
            "reason": "why it is not ok: what is wrong with the letter, the kind of an error (ValueError) and nothing "
            "of its text, or how its process has ended",
        },
        "when it joins": {
            "described": ", ".join(f"{name} {value}" for name, value in said.items()),
            "layout": f"{layout.digest}, the model's fingerprint; if it does not fit, 6 names of its tensors",
            "version": __version__,
            "loss": loss_of(file),
            "machine": "a number that is drawn by chance when its folder is first used",
            FORGET: "the same number, by `descant silo forget` alone",
        },
        "after training": {
            "arrays": f"the {len(layout.names)} tensors of the model{_paced(file.policy)}, less those that the recipe "
            "keeps private",
            SAMPLES: f"how many {file.words.trained} it has trained on",
            "loss": "its mean training loss, a number",
            ", ".join(JUDGED): "scores on its own test set, each a number, if the recipe asks for them",
            **next((told for kind, told in _EARNED.items() if isinstance(file.own, kind)), _of_rows(file.policy)),
            ANEW: "that it has lost its memory, if it has",
            RESTS: "seconds until the next day, if it has had its rounds; the reason then says how many",
        },
        "when models are judged": {
            "center, own, majority": "scores on its own test set: the common model, its own, what needs no learning",
            "test_samples": "how many they are of",
        },
        "where work is added up unseen": {
            KEY: "a public key for the round",
            SAMPLES: "how many it trains on",
            "arrays": "the same tensors as whole numbers of 8 bytes, of which only the sum of all says anything",
        },
        "on the line": {
            "certificate, node key": "of its invite, the public halves",
            "heartbeats": "that it is there, and when",
        },
    }


_REWARD = "reward"
_EARNED = {
    Agent: {_REWARD: "the mean return of its episodes, a number, once one has ended"},
    Desk: {
        _REWARD: "the mean logarithm of what its portfolio grew by in a day of training, a number",
        REAL_ONLY: "that it had no prices made up, a number, if it should have had some",
    },
}
"""What a party that has no rows leaves beside its loss."""


def _of_rows(policy: Policy) -> dict[str, str]:
    return {
        RECEIVED: "the loss of the model that came, a number, if the recipe asks for it",
        "sealed": _rows(policy),
        ASKED: "how many rows were sealed",
    }


def _paced(policy: Policy) -> str:
    return "" if policy.rounds_a_day is None else f", in at most {policy.rounds_a_day} rounds a day"


def _rows(policy: Policy) -> str:
    if not policy.share:
        return "no row of its data"
    dropped = ", ".join(str(column) for column in sorted(set(policy.columns_dropped)))
    blank = f", with 0 in place of what is in columns {dropped}" if dropped else ""
    return f"at most {policy.share:.1%} of its rows, ever, sealed, as a coreset{blank}"
