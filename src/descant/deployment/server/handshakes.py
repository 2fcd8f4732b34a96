"""Handshakes: a party must show that it fits the recipe before it gets tasks."""

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

_HANDSHAKE_TIMEOUT = 600.0  # seconds for a party to reply: it reads its data first
_GOODBYE_TTL = 30.0  # seconds for a party to fetch a goodbye; later it could reach another session
_SHUTDOWN_TIMEOUT = 10.0  # seconds in which all parties should have fetched their goodbye
_POLL_INTERVAL = 0.1  # seconds
_MAX_REPLY_BYTES = 2**16


class HandshakeTransport:
    """A transport on which only parties with an accepted handshake count as connected.

    Each new session needs a new handshake: it may be another machine, or have lost its state. `recipe_text` is the text
    of the recipe file, which parties compare with their invite.
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
        self._pending: dict[str, tuple[str, str]] = {}  # by message id: party and session id of an open handshake
        self._seen_sessions: dict[str, str] = {}  # by party: the session that was accepted or rejected last
        self._accepted: set[str] = set()
        self.data_descriptions: dict[str, Mapping[str, Any]] = {}
        self.common_form: Mapping[str, Any] = {}  # fields that every party must share, once the training has begun
        self.notified: set[str] = set()  # parties that were notified of the end of the training
        self.forgotten: dict[str, str] = {}  # by party that asked to be forgotten and has not rejoined: the reason

    def connected_parties(self) -> dict[str, str]:
        """Return the accepted parties with their session ids, after processing open handshakes.

        New sessions are sent a handshake.
        """
        self._check_access()
        sessions = self._transport.connected_parties()
        if not self.common_form:  # before the training, parties need not be like one that has disconnected
            for disconnected in self._accepted - sessions.keys():
                self._accepted.discard(disconnected)
                self._seen_sessions.pop(disconnected)
        pending = set(self._pending.values())
        for party, session_id in sorted(sessions.items()):
            if self._seen_sessions.get(party) != session_id and (party, session_id) not in pending:
                self._send_handshake(party, session_id)
        if self._pending:
            for message_id, payload in self._transport.fetch_replies(tuple(self._pending), _MAX_REPLY_BYTES).items():
                self._handle_reply(*self._pending.pop(message_id), payload)
        return {
            party: session_id
            for party, session_id in sessions.items()
            if party in self._accepted and self._seen_sessions.get(party) == session_id
        }

    def _send_handshake(self, party: str, session_id: str) -> None:
        payload = pack(Task(party, 0, "handshake", arrays={}, settings=self._handshake, deadline=_HANDSHAKE_TIMEOUT))
        with suppress(UndeliveredError):  # it has disconnected again
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
                raise EngineError(f"its reply has {len(payload)} bytes")
            reply = unpack(payload, Reply, MessageLimits.for_tensors(()))
            if FORGET_REQUEST in reply.metrics:
                self._handle_forget_request(party, str(reply.metrics[FORGET_REQUEST]))
                return
            self.data_descriptions[party] = self._validate_reply(party, reply)
        except (DescantError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self._log(f"{party} has connected and cannot take part: {printable(str(error))}")
            is_server_fault = isinstance(error, StateError | VaultError)  # its text names files of the server
            reason = "an internal error of the server" if is_server_fault else printable(str(error))
            self._send_goodbye(party, {REASON: reason})
            return
        self._accepted.add(party)
        self.forgotten.pop(party, None)
        self._log(f"{party} has connected with {summarize_description(self.data_descriptions[party])}.")

    def _handle_forget_request(self, party: str, machine: str) -> None:
        """Forget a party at its own request, from its own machine: erase its rows, and stop waiting for it."""
        self._record_join(party, machine)
        outcome = self._erase_rows(party)
        self.forgotten[party] = "it was forgotten at its own request"
        self._log(f"{party} asks to be forgotten: {outcome}.")
        self._send_goodbye(party, {REASON: outcome, FORGOTTEN: True})

    def _send_goodbye(self, party: str, settings: Mapping[str, Any]) -> bool:
        """Send a party a goodbye, so that it does not wait for tasks; return whether it was sent."""
        payload = pack(Task(party, 0, "goodbye", arrays={}, settings=settings))
        with suppress(UndeliveredError):
            self.discard([self._transport.send(party, payload, _GOODBYE_TTL)])
            return True
        return False

    def send_goodbyes(self, parties: Collection[str], rounds: int) -> None:
        """Tell these parties that the training is over."""
        self.notified |= {party for party in parties if self._send_goodbye(party, {ROUNDS: rounds})}

    def shutdown(self, rounds: int) -> None:
        """Tell all connected parties that the training is over, and wait a short time for them to disconnect."""
        self.send_goodbyes(self._transport.connected_parties().keys() - self.notified, rounds)
        stop_at = time.monotonic() + _SHUTDOWN_TIMEOUT
        while self._transport.connected_parties() and time.monotonic() < stop_at:
            time.sleep(_POLL_INTERVAL)

    def _validate_reply(self, party: str, reply: Reply) -> Mapping[str, Any]:
        """Return a party's data description if it fits; else raise an error that names no other party."""
        if reply.status != "ok" or reply.kind != "handshake" or reply.party != party:
            raise EngineError(reply.reason or f"it answered as {reply.party!r:.40}")
        _check_same(reply.metrics, {"layout": self._handshake["layout"], "version": __version__})
        if reply.metrics.get("loss") not in (CUSTOM_LOSS, self._loss_name):
            loss_file_name = self._loss_name.rpartition("/")[2]  # without the server's folders
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
        """Raise unless model and loss accept data of this form.

        They may be user code and may raise anything. For parties without rows, the solver itself checks the party and
        the model.
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
            raise EngineError(f"model and loss do not accept its data: {type(error).__name__}: {error}") from error

    def wait_for_quorum(
        self, at_least: int, at_most: Callable[[], float] = lambda: math.inf
    ) -> dict[str, Mapping[str, Any]]:
        """Wait for `at_least` accepted parties, or for `at_most` if fewer can come; return their data descriptions.

        Parties that come later must have the same form.
        """
        last_message = ""
        while len(connected := self.connected_parties()) < (wanted := max(1, min(at_least, at_most()))):
            message = f"{len(connected)} of {wanted} parties are connected. Waiting."
            if message != last_message:
                self._log(message)
                last_message = message
            time.sleep(_POLL_INTERVAL)
        descriptions = {party: self.data_descriptions[party] for party in connected}
        self.common_form = common_fields(next(iter(descriptions.values())))
        return descriptions

    def wait_for(self, parties: Collection[str], timeout: float) -> None:
        """Wait until these parties are connected, or until the timeout."""
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
