"""Who has come: parties are introduced to one another's recipe before any of them is given work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional

from ... import __version__
from ...config import Recipe
from ...core.messages import Reply, Task
from ...engines.remote import ServerTransport, UndeliveredError
from ...errors import DescantError, EngineError, StateError, VaultError
from ...models.flat import Net
from ...parties.party import Party
from ...parties.remote_parties import common_fields, known_fields, remote_population, summarize_description
from ...rounds.validation import printable
from ...serialization.wire import MessageBytes, MessageLimits, pack, unpack
from ..silo.forget import FORGOTTEN
from ..silo.handshake_reply import MODEL_SUMMARY, RECIPE_TEXT, layout_summary, training_part
from ..silo.outgoing_fields import CUSTOM_LOSS, FORGET_REQUEST
from ..silo.silo_worker import REASON, ROUNDS
from .row_erasure import NOTHING_HELD

_HANDSHAKE_TIMEOUT = 600.0  # that a party has to introduce itself: it reads its data first
_GOODBYE_TTL = 30.0  # that a party has to fetch why it is not wanted: another that comes for it later is not meant
_SHUTDOWN_TIMEOUT = 10.0  # in which all should have heard that it is over
_POLL_INTERVAL = 0.1
_MAX_REPLY_BYTES = 2**16  # bytes of an introduction


class HandshakeTransport:
    """A post that knows whom it carries letters to: only a party that has introduced itself, and fits, is there.

    Whoever comes again is introduced again: it may be another machine, or have lost what it kept. `text` is the recipe
    as it was written, which parties compare with what they were invited to.
    """

    def __init__(
        self,
        transport: ServerTransport,
        recipe: Recipe,
        federation: str,
        net: Net,
        loss: str,
        log: Callable[[str], None] = print,
        record_join: Callable[[str, str], object] = lambda party, machine: None,
        check_access: Callable[[], None] = lambda: None,
        recipe_text: str = "",
        erase_rows: Callable[[str], str] = lambda party: NOTHING_HELD,
    ) -> None:
        self._transport = transport
        self.net = net
        self._loss_name = loss
        self._log = log
        self._record_join = record_join
        self._check_access = check_access
        self._erase_rows = erase_rows
        self._loss_function = recipe.settings().get("loss", functional.cross_entropy)
        self._solver = recipe.solver()
        self._handshake: dict[str, Any] = {
            "recipe": training_part(recipe.tables),
            RECIPE_TEXT: recipe_text,
            "federation": federation,
            "layout": net.layout.digest,
            MODEL_SUMMARY: layout_summary(net.layout),
            "version": __version__,
        }
        self._pending: dict[str, tuple[str, str]] = {}  # letters that are out, by their number: to whom, and its mark
        self._seen_sessions: dict[str, str] = {}  # the marks of those that were introduced, or refused
        self._accepted: set[str] = set()
        self.data_descriptions: dict[str, Mapping[str, Any]] = {}
        self.common_form: Mapping[
            str, Any
        ] = {}  # what all have in common, once a training has begun: whoever comes must, too
        self.notified: set[str] = set()  # who was told that it is over
        self.forgotten: dict[str, str] = {}  # who has wished for it and not come back since, and that it has

    def connected_parties(self) -> dict[str, str]:
        """Who is there and was introduced; whoever has come is asked who it is."""
        self._check_access()
        sessions = self._transport.connected_parties()
        for disconnected in (
            () if self.common_form else self._accepted - sessions.keys()
        ):  # nobody need be like it, and others may come first
            self._accepted.discard(disconnected)
            self._seen_sessions.pop(disconnected)
        pending = set(self._pending.values())
        for party, session_id in sorted(sessions.items()):
            if self._seen_sessions.get(party) != session_id and (party, session_id) not in pending:
                self._send_handshake(party, session_id)
        for message_id, payload in (
            self._transport.fetch_replies(tuple(self._pending), _MAX_REPLY_BYTES).items() if self._pending else ()
        ):
            self._handle_reply(*self._pending.pop(message_id), payload)
        known = {party: mark for party, mark in sessions.items() if party in self._accepted}
        return {party: mark for party, mark in known.items() if self._seen_sessions.get(party) == mark}

    def _send_handshake(self, party: str, session_id: str) -> None:
        payload = pack(Task(party, 0, "handshake", arrays={}, settings=self._handshake, deadline=_HANDSHAKE_TIMEOUT))
        with suppress(UndeliveredError):  # it has gone again
            self._pending[self._transport.send(party, payload, _HANDSHAKE_TIMEOUT)] = (party, session_id)

    def _handle_reply(self, party: str, session_id: str, payload: MessageBytes | UndeliveredError) -> None:
        if isinstance(payload, UndeliveredError) and not payload.is_final:
            return
        self._seen_sessions[party] = session_id
        self._accepted.discard(party)
        try:
            if isinstance(payload, UndeliveredError):
                raise EngineError(str(payload))
            if len(payload) > _MAX_REPLY_BYTES:
                raise EngineError(f"its answer has {len(payload)} bytes")
            reply = unpack(payload, Reply, MessageLimits.for_tensors(()))
            if FORGET_REQUEST in reply.metrics:
                self._handle_forget_request(party, str(reply.metrics[FORGET_REQUEST]))
                return
            self.data_descriptions[party] = self._validate_reply(party, reply)
        except (DescantError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self._log(f"{party} has come, and cannot take part: {printable(str(error))}")
            is_server_fault = isinstance(error, StateError | VaultError)  # its text would name files of the server
            self._send_goodbye(
                party, {REASON: "the server has trouble of its own" if is_server_fault else printable(str(error))}
            )
            return
        self._accepted.add(party)
        self.forgotten.pop(party, None)
        self._log(f"{party} has come, with {summarize_description(self.data_descriptions[party])}.")

    def _handle_forget_request(self, party: str, machine: str) -> None:
        """A party wishes to be forgotten, from where it has joined: its rows go, and nobody waits for it any more."""
        self._record_join(party, machine)
        outcome = self._erase_rows(party)
        self.forgotten[party] = "it was forgotten, as it wished"
        self._log(f"{party} wishes to be forgotten: {outcome}.")
        self._send_goodbye(party, {REASON: outcome, FORGOTTEN: True})

    def _send_goodbye(self, party: str, settings: Mapping[str, Any]) -> bool:
        """Nobody waits for work that never comes: whoever cannot take part is told why, if it is still there."""
        with suppress(UndeliveredError):
            self.discard(
                [
                    self._transport.send(
                        party, pack(Task(party, 0, "goodbye", arrays={}, settings=settings)), _GOODBYE_TTL
                    )
                ]
            )
            return True
        return False

    def send_goodbyes(self, parties: Collection[str], rounds: int) -> None:
        """The training is over, and these are told so."""
        self.notified |= {party for party in parties if self._send_goodbye(party, {ROUNDS: rounds})}

    def shutdown(self, rounds: int) -> None:
        """Whoever is still there is told that it is over; who is slow to hear it is not waited for."""
        self.send_goodbyes(self._transport.connected_parties().keys() - self.notified, rounds)
        stop_at = time.monotonic() + _SHUTDOWN_TIMEOUT
        while self._transport.connected_parties() and time.monotonic() < stop_at:
            time.sleep(_POLL_INTERVAL)

    def _validate_reply(self, party: str, reply: Reply) -> Mapping[str, Any]:
        """What a party says of its data, if it fits; what is wrong is told to it, and so names nobody else."""
        if reply.status != "ok" or reply.kind != "handshake" or reply.party != party:
            raise EngineError(reply.reason or f"it answered as {reply.party!r:.40}")
        _check_same(reply.metrics, {"layout": self._handshake["layout"], "version": __version__})
        if reply.metrics.get("loss") not in (CUSTOM_LOSS, self._loss_name):
            loss_file_name = self._loss_name.rpartition("/")[2]  # where the organiser's file lies is nobody's business
            raise EngineError(
                f"its loss is {reply.metrics.get('loss')!r:.80}, and the federation's is {loss_file_name}."
            )
        self._record_join(party, str(reply.metrics.get("machine", "")))
        description = known_fields(reply.metrics["data_description"])
        population = remote_population({party: description})
        others = [self.data_descriptions[name] for name in self._accepted if name != party]
        _check_same(description, self.common_form or (common_fields(others[0]) if others else {}))
        self._check_model_accepts(population[party])
        return description

    def _check_model_accepts(self, party: Any) -> None:
        """Raise unless model and loss take what a party of this form has.

        They are anybody's code, and may raise anything. A solver of parties that have no rows says itself whether this
        is one, and whether the model can act there.
        """
        row = self.net.copy_initial_row()
        size = self.net.layout.trainable_width
        try:
            if not isinstance(party, Party) or self._solver.metric is not None:
                self._solver.execution_modes(self.net, self._loss_function, (), party, 1)
                return
            with torch.no_grad():
                output, _ = self.net.apply(row[:size], row[size:], party.x[:2].clone())
                self._loss_function(output, party.y[:2].clone())
        except DescantError:
            raise
        except Exception as error:
            raise EngineError(f"model and loss do not take what it has: {type(error).__name__}: {error}") from error

    def wait_for_quorum(
        self, at_least: int, at_most: Callable[[], float] = lambda: math.inf
    ) -> dict[str, Mapping[str, Any]]:
        """Wait until so many have been introduced, or as many as can come; what they say of themselves.

        Whoever comes from then on must be like them.
        """
        last_message = ""
        while len(connected := self.connected_parties()) < (wanted := max(1, min(at_least, at_most()))):
            message = f"{len(connected)} of {wanted} parties are there. Waiting."
            if message != last_message:
                self._log(message)
                last_message = message
            time.sleep(_POLL_INTERVAL)
        descriptions = {party: self.data_descriptions[party] for party in connected}
        self.common_form = common_fields(next(iter(descriptions.values())))
        return descriptions

    def wait_for(self, parties: Collection[str], timeout: float) -> None:
        """Wait until these are there, for so long at most."""
        stop_at = time.monotonic() + timeout
        while set(parties) - self.connected_parties().keys() and time.monotonic() < stop_at:
            time.sleep(_POLL_INTERVAL)

    def departed_parties(self) -> Collection[str]:
        return self._transport.departed_parties()

    def send(self, party: str, payload: MessageBytes, ttl: float) -> str:
        return self._transport.send(party, payload, ttl)

    def fetch_replies(self, message_ids: Collection[str], max_bytes: int) -> dict[str, MessageBytes | UndeliveredError]:
        return self._transport.fetch_replies(message_ids, max_bytes)

    def discard(self, message_ids: Collection[str]) -> None:
        self._transport.discard(message_ids)


def _check_same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, expected in ours.items():
        if theirs.get(name) != expected:
            raise EngineError(f"its {name} is {theirs.get(name)!r:.80}, and the federation's is {expected!r}.")
