"""The proxy: only invited parties pass, only to the fleet paths; rejected requests never reach the server."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from descant.deployment.child_process import ChildProcess
from descant.deployment.nginx_proxy import Proxy, check_port_free, find_nginx
from descant.deployment.pki.certificates import Authority, CertificateAndKey
from descant.deployment.pki.invite import CredentialFiles
from descant.deployment.pki.roster import Roster
from descant.errors import EngineError, SettingError

try:
    find_nginx()
    MISSING = ""
except EngineError as error:
    MISSING = str(error)
needs_nginx = pytest.mark.skipif(bool(MISSING), reason=MISSING)
BODY = 16  # megabytes, the default limit; Flower splits messages at 5
OK = b"the server has it"


class Upstream(ThreadingHTTPServer):
    """A fake of Flower's SuperLink that answers all requests and records them."""

    daemon_threads = True

    def __init__(self, keys: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.seen: list[tuple[str, str, bytes]] = []
        self.begun = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, which some tests make."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_POST(self) -> None:
        self.server.begun.set()
        if self.headers["Transfer-Encoding"] == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):  # no number if the connection broke
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.seen.append((self.command, self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(OK)))
        self.end_headers()
        self.wfile.write(OK)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_POST

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Scene:
    """A federation with a recording server behind a proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipe.toml").write_text("[run]\nrounds = 1\n")
        self.roster = Roster.create(folder / "a server; 'of' $ours {1}", folder / "recipe.toml")
        self.upstream = Upstream(self.roster.keys_folder)
        self.proxy = Proxy(self.upstream.server_address[1], "127.0.0.1", free_port())

    def party(self, name: str) -> CredentialFiles:
        return self.roster.invite(name, self.folder / f"{name}.invite").unpack(self.folder / name)

    def context(self, who: CredentialFiles | None, tls: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.roster.keys_folder / "ca.crt")
        if who is not None:
            context.load_cert_chain(who.certificate, who.key)
        if tls is not None:
            context.set_ciphers("ALL:@SECLEVEL=0")  # or this side would reject it
            context.minimum_version = context.maximum_version = tls
        return context

    def connect(self, who: CredentialFiles | None) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.proxy.port, timeout=20, context=self.context(who))

    def ask(
        self, who: CredentialFiles | None, path: str, body: bytes = b"x", method: str = "POST"
    ) -> tuple[int, bytes]:
        connection = self.connect(who)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def scene_in(folder: Path) -> Iterator[Scene]:
    made = Scene(folder)
    try:
        yield made
    finally:
        made.upstream.shutdown()
        made.upstream.server_close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A scene for tests that revoke, stop or break something."""
    yield from scene_in(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, CredentialFiles]]:
    """A running proxy for tests that only send requests."""
    for made in scene_in(tmp_path_factory.mktemp("proxy")):
        with made.proxy.start(made.roster.folder):
            yield made, made.party("north")


def eventually(condition: Callable[[], bool], timeout: float = 15.0) -> bool:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@needs_nginx
@pytest.mark.parametrize("path", ["/v1/fleet/x", "/v1/fleet/push-object", "/v1/fleet/send-node-heartbeat"])
def test_invited_party_reaches_the_fleet_api_with_its_whole_body(
    shared: tuple[Scene, CredentialFiles], path: str
) -> None:
    scene, north = shared
    body = os.urandom(1_500_000)
    assert scene.ask(north, path, body) == (200, OK)
    assert scene.upstream.seen.pop() == ("POST", path, body)


HIDDEN = ["/", "/v1/control/x", "/v1/runtime/x", "/v1/fleet", "/v1/fleet/", "/v1/fleetx/y", "/V1/FLEET/x", "/health"]
TURNS = ["../", "%2e%2e/", "..%2f", "%2e%2e%2f", "%252e%252e/", ".%2e/", "..%5c", "..\\", ".//../", "x/../../", "..;/"]
CLOSE = [
    *(f"/v1/fleet/{turn}control/start-run" for turn in TURNS),
    *(f"/v1/control/{turn}fleet/x" for turn in TURNS),
    *("//v1/fleet/x", "/v1//fleet/x", "/v1/fleet//x", "/v1/fleet/./x", "/v1/fleet/x/", "/v1/fleet/x/y"),
    *("/v1/fleet/x?y=1", "/v1/fleet/x%00", "/v1/fleet/x%0d%0aA:b", "/v1/fleet/%78", "/v1/fleet/x#y", "/v1/fleet/x;y"),
    *("http://127.0.0.1/v1/control/x", "http://localhost/v1/fleet/../control/x", "*", "v1/fleet/x"),
]


@needs_nginx
@pytest.mark.parametrize("path", [*HIDDEN, *CLOSE])
def test_other_paths_are_rejected_before_the_server(shared: tuple[Scene, CredentialFiles], path: str) -> None:
    scene, north = shared
    assert scene.ask(north, path)[0] in (400, 403)
    assert scene.upstream.seen == []


@needs_nginx
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "post"])
def test_only_post_requests_are_passed_on(shared: tuple[Scene, CredentialFiles], method: str) -> None:
    scene, north = shared
    assert scene.ask(north, "/v1/fleet/x", b"", method)[0] in (400, 403, 405)
    assert scene.upstream.seen == []


@needs_nginx
def test_smuggled_second_request_does_not_pass(shared: tuple[Scene, CredentialFiles]) -> None:
    """Contradicting lengths can hide a request in the body of another."""
    scene, north = shared
    hidden = b"POST /v1/control/start-run HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(hidden) + 5)
    twice = b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    odd = b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n"
    for lengths in (both, twice, odd, b"Content-Length: 0\r\n\r\n"):
        with (
            socket.create_connection(("127.0.0.1", scene.proxy.port), 5) as plain,
            scene.context(north).wrap_socket(plain, server_hostname="localhost") as stream,
        ):
            stream.sendall(b"POST /v1/fleet/x HTTP/1.1\r\nHost: localhost\r\n" + lengths + hidden)
            stream.settimeout(1.0)
            answers = b""
            try:
                while data := stream.recv(65536):
                    answers += data
            except OSError:
                pass
        assert answers.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 501")), answers[:80]
        assert all(path == "/v1/fleet/x" and body == b"" for _, path, body in scene.upstream.seen)
        scene.upstream.seen.clear()


@needs_nginx
def test_only_certificates_of_this_authority_pass(shared: tuple[Scene, CredentialFiles], tmp_path: Path) -> None:
    scene, _ = shared
    keys = scene.roster.keys_folder
    name = f"descant {scene.roster.federation}"
    own, pair = Authority.new(name, 9)
    wrong = {
        "another's": own.issue_party_certificate("north", 9),
        "signed by itself": pair,
        "the server's": CertificateAndKey((keys / "server.crt").read_bytes(), (keys / "server.key").read_bytes()),
    }
    for folder, one in wrong.items():
        (tmp_path / folder).mkdir()
        one.write(tmp_path / folder, "party")
    for who in (None, *(CredentialFiles(tmp_path / folder) for folder in wrong)):
        for path in ("/v1/fleet/x", "/v1/control/x", "/"):
            status, body = scene.ask(who, path)
            assert status == 400 and b"SSL certificate" in body
    assert scene.upstream.seen == []


@needs_nginx
def test_expired_certificate_is_rejected(shared: tuple[Scene, CredentialFiles], tmp_path: Path) -> None:
    scene, north = shared
    expired = CredentialFiles(tmp_path)
    scene.roster.authority.issue_party_certificate("north", 0).write(tmp_path, "party")
    time.sleep(1.1)  # until it expires
    assert scene.ask(expired, "/v1/fleet/x")[0] == 400
    assert scene.upstream.seen == []
    assert scene.ask(north, "/v1/fleet/x")[0] == 200
    scene.upstream.seen.clear()


@needs_nginx
def test_old_tls_versions_are_rejected(shared: tuple[Scene, CredentialFiles]) -> None:
    scene, north = shared

    def greet(version: ssl.TLSVersion) -> str | None:
        with (
            socket.create_connection(("127.0.0.1", scene.proxy.port), 5) as plain,
            scene.context(north, version).wrap_socket(plain, server_hostname="localhost") as stream,
        ):
            return stream.version()

    assert [greet(version) for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)] == ["TLSv1.2", "TLSv1.3"]
    with pytest.warns(DeprecationWarning), pytest.raises(OSError):
        greet(ssl.TLSVersion.TLSv1_1)


@needs_nginx
def test_too_large_body_is_rejected(shared: tuple[Scene, CredentialFiles]) -> None:
    scene, north = shared
    assert scene.ask(north, "/v1/fleet/x", bytes(BODY * 2**20)) == (200, OK)
    scene.upstream.seen.clear()
    connection = scene.connect(north)
    connection.putrequest("POST", "/v1/fleet/x")
    connection.putheader("Content-Length", str(BODY * 2**20 + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    connection = scene.connect(north)  # a body without a length
    try:
        connection.request("POST", "/v1/fleet/x", (bytes(2**16) for _ in range(16 * BODY + 1)), encode_chunked=True)
        assert connection.getresponse().status == 413
    except OSError:  # the connection may break before the status arrives
        pass
    connection.close()
    assert scene.upstream.seen == []  # the server has seen at most the beginning of the body


def test_body_limit_is_16_megabytes_by_default() -> None:
    for proxy, size in ((Proxy(8000), BODY), (Proxy(8000, max_body_megabytes=3), 3)):
        assert re.findall(r"client_max_body_size (\S+);", proxy.configuration()) == [f"{size}m"]


@needs_nginx
def test_http_without_tls_is_rejected(shared: tuple[Scene, CredentialFiles]) -> None:
    scene, _ = shared
    connection = http.client.HTTPConnection("localhost", scene.proxy.port, timeout=20)
    connection.request("POST", "/v1/fleet/x", b"x")
    answer = connection.getresponse()
    assert answer.status == 400 and b"plain HTTP request was sent to HTTPS port" in answer.read()
    connection.close()
    assert scene.upstream.seen == []


@needs_nginx
def test_access_log_has_callers_and_no_bodies(shared: tuple[Scene, CredentialFiles]) -> None:
    scene, north = shared
    scene.ask(north, "/v1/fleet/x", b"a canary that sings", "POST")
    scene.ask(north, "/v1/control/x?token=canary%0a", b"a canary that sings", "POST")
    scene.upstream.seen.clear()
    place = scene.roster.run_folder / "proxy"
    (held,) = (entry for entry in scene.roster.parties() if entry.name == "north")
    assert eventually(lambda: b"/v1/control/x" in (place / "access.log").read_bytes())
    lines = [json.loads(line) for line in (place / "access.log").read_text().splitlines()]
    (last,) = [line for line in lines if line["path"] == "/v1/control/x"][-1:]
    assert int(last["serial"], 16) == int(held.serial, 16) and last["status"] == 403
    everything = b"".join(file.read_bytes() for file in place.rglob("*") if file.is_file())
    assert b"canary" not in everything
    assert not list((place / "unused").rglob("*"))  # passed requests never touch the disk


@needs_nginx
def test_revoked_party_is_shut_out_and_others_stay(scene: Scene) -> None:
    north = scene.party("north")
    south = scene.party("south")
    with scene.proxy.start(scene.roster.folder) as running:
        kept = scene.connect(north)  # a connection that stays open
        kept.request("POST", "/v1/fleet/x", b"1")
        assert kept.getresponse().read() == OK and scene.ask(south, "/v1/fleet/x")[0] == 200
        assert not running.reload_if_revoked()
        Roster(scene.roster.folder).revoke("north")  # as another process would
        scene.upstream.seen.clear()
        assert running.reload_if_revoked() and not running.reload_if_revoked()
        assert scene.ask(north, "/v1/fleet/x")[0] == 400
        with pytest.raises((http.client.HTTPException, OSError)):
            kept.request("POST", "/v1/fleet/x", b"2")
            kept.getresponse()
        assert scene.upstream.seen == []
        assert scene.ask(south, "/v1/fleet/x")[0] == 200
        kept.close()
    with scene.proxy.start(scene.roster.folder):  # also after a restart
        assert scene.ask(north, "/v1/fleet/x")[0] == 400 and scene.ask(south, "/v1/fleet/x")[0] == 200


@needs_nginx
def test_tls_sessions_are_not_resumed(scene: Scene) -> None:
    """A resumed session skips the revocation list, so sessions are off."""
    north = scene.party("north")
    context = scene.context(north)
    with scene.proxy.start(scene.roster.folder) as running:

        def status(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None, bool | None]:
            with (
                socket.create_connection(("127.0.0.1", scene.proxy.port), 5) as plain,
                context.wrap_socket(plain, server_hostname="localhost", session=session) as stream,
            ):
                stream.sendall(b"POST /v1/fleet/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
                return stream.recv(12), stream.session, stream.session_reused

        first, session, _ = status(None)
        again, _, reused = status(session)
        assert first == again == b"HTTP/1.1 200" and not reused
        scene.roster.revoke("north")
        running.reload()
        assert status(session)[0] == b"HTTP/1.1 400"


@needs_nginx
def test_unreadable_revocation_list_is_an_error_and_the_old_one_holds(scene: Scene) -> None:
    north = scene.party("north")
    with scene.proxy.start(scene.roster.folder) as running:
        (scene.roster.keys_folder / "revoked.pem").write_text("no list")
        with pytest.raises(EngineError, match="nginx rejects"):
            running.reload_if_revoked()
        assert scene.ask(north, "/v1/fleet/x")[0] == 200
        Roster(scene.roster.folder)  # restores the list
        assert running.reload_if_revoked() and scene.ask(north, "/v1/fleet/x")[0] == 200


@needs_nginx
def test_proxy_talks_only_to_the_server_of_its_authority(scene: Scene, tmp_path: Path) -> None:
    north = scene.party("north")
    (tmp_path / "elsewhere").mkdir()
    for other in scene_in(tmp_path / "elsewhere"):
        port = other.upstream.server_address[1]
        proxy = Proxy(port, "127.0.0.1", scene.proxy.port)
        with proxy.start(scene.roster.folder):  # the listener has a certificate of another authority
            assert scene.ask(north, "/v1/fleet/x")[0] == 502
        assert other.upstream.seen == []
    with Proxy(free_port(), "127.0.0.1", scene.proxy.port).start(scene.roster.folder):
        assert scene.ask(north, "/v1/fleet/x")[0] == 502


@needs_nginx
def test_body_is_streamed_to_the_server(scene: Scene) -> None:
    """The server sees a request before its last byte is sent: the proxy does not buffer."""
    north = scene.party("north")
    with scene.proxy.start(scene.roster.folder):
        connection = scene.connect(north)
        connection.putrequest("POST", "/v1/fleet/x")
        connection.putheader("Content-Length", "200000")
        connection.endheaders(bytes(100_000))
        assert scene.upstream.begun.wait(10) and scene.upstream.seen == []
        connection.send(bytes(100_000))
        assert connection.getresponse().read() == OK
        connection.close()


@needs_nginx
def test_proxy_stops_with_its_block_and_restarts_on_the_same_port(scene: Scene) -> None:
    for _ in range(2):
        with scene.proxy.start(scene.roster.folder) as running:
            assert running.is_alive and listens(scene.proxy.port)
        assert not running.is_alive and not listens(scene.proxy.port)
        running.terminate()


@needs_nginx
def test_nginx_worker_of_a_killed_master_is_stopped(scene: Scene) -> None:
    with scene.proxy.start(scene.roster.folder) as running:
        running._child.send_signal(signal.SIGKILL)
        assert eventually(lambda: not running.is_alive)
        with pytest.raises(EngineError, match="did not reload its keys"):
            running.reload()
        assert listens(scene.proxy.port)  # by the worker, which no longer reloads
    assert eventually(lambda: not listens(scene.proxy.port))


STARTED = """
import sys, time
from descant.deployment.nginx_proxy import Proxy
running = Proxy(int(sys.argv[1]), "127.0.0.1", int(sys.argv[2])).start(sys.argv[3])
print("started", flush=True)
time.sleep(60)
"""


@needs_nginx
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent is killed")
def test_proxy_stops_when_its_parent_is_killed(scene: Scene) -> None:
    port = scene.proxy.port
    command = [sys.executable, "-c", STARTED, str(scene.proxy.upstream), str(port), str(scene.roster.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n" and listens(port)
        parent.kill()
    assert eventually(lambda: not listens(port))


@needs_nginx
def test_port_in_use_is_a_clear_error(scene: Scene) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", scene.proxy.port))
        other.listen()
        with pytest.raises(EngineError, match=r"listens there\. Stop it, .* server init NEW .* --port"):
            scene.proxy.start(scene.roster.folder)
    with pytest.raises(EngineError, match="does not have that address"):
        check_port_free("192.0.2.1", 8443)


@needs_nginx
def test_configuration_that_nginx_rejects_is_reported(scene: Scene) -> None:
    (scene.roster.keys_folder / "server.crt").write_text("no certificate")
    with pytest.raises(EngineError, match=r"nginx rejects .*server\.crt"):
        scene.proxy.start(scene.roster.folder)
    assert not listens(scene.proxy.port)


@needs_nginx
def test_another_listener_is_not_mistaken_for_nginx(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take the port between the check and the start of nginx."""
    monkeypatch.setattr("descant.deployment.nginx_proxy.check_port_free", lambda host, port: None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", scene.proxy.port))
        other.listen()
        with pytest.raises(EngineError, match=r"Address already in use|does not answer"):
            scene.proxy.start(scene.roster.folder, timeout=8.0)


def test_missing_nginx_gets_install_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(EngineError, match="apt-get install nginx-light"):
        find_nginx()


@pytest.mark.parametrize(
    "proxy",
    [
        *(Proxy(8000, host) for host in ("", "localhost", "0.0.0.0; return 200", "fe80::1%a;b", "1.2.3.4\n")),
        *(Proxy(8000, port=port) for port in (0, 65536, True, 1.5, "1; x")),  # type: ignore[arg-type]
        *(Proxy(8000, max_body_megabytes=body) for body in (0, -1, "1m; x")),  # type: ignore[arg-type]
        *(Proxy(0), Proxy("8000/x"), Proxy(8000, timeout=0)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_unsafe_proxy_settings_are_rejected(proxy: Proxy) -> None:
    with pytest.raises(SettingError, match="of Proxy must be"):
        proxy.configuration()


def test_child_process_stops_with_its_descendants(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "sleep 60 & echo $!; trap '' TERM; while true; do sleep 0.1; done"
    with ChildProcess(["/bin/sh", "-c", script], log) as child:
        assert eventually(lambda: log.read_text().endswith("\n"))
        assert child.is_alive and child.terminate(timeout=0.2) == -signal.SIGKILL
    assert not child.is_alive and child.terminate() == -signal.SIGKILL

    def gone() -> bool:
        state = Path(f"/proc/{int(log.read_text())}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    assert sys.platform != "linux" or eventually(gone)
