"""The nginx proxy in front of the server, configured so that parties reach only the paths that they need.

Anyone who reaches Flower's own port can start runs, that is, run code on every silo. So that port is on loopback, and
parties reach nginx. It requires a certificate of the federation's authority that was not revoked. It passes on POST
requests to `/v1/fleet/NAME`, matching the raw request line and not a normalized path. Request bodies never touch the
disk. TLS sessions are not resumed, because nginx does not check a resumed one against the revocation list.

nginx needs no privileges: all its files are in the server's folder. If root starts it, its worker does not run as root.
"""

from __future__ import annotations

import errno
import shutil
import signal
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from ..core.settings import check_settings, setting
from ..errors import EngineError, SettingError
from ..storage import atomic
from ..storage.atomic_folder import write_errors
from .child_process import ChildProcess
from .pki.certificates import AUTHORITY_NAME, REVOCATION_FILE, SERVER_NAME
from .pki.federation_setup import KEYS_FOLDER, RUN_FOLDER
from .pki.name_checks import join_address, parse_address, parse_ip

PROXY_FOLDER = "proxy"
CONFIGURATION = "nginx.conf"
ACCESS_LOG = "access.log"
ERROR_LOG = "error.log"
_NGINX_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin", "/usr/local/nginx/sbin")  # often missing in PATH
_POLL_INTERVAL = 0.02
_PORT_RELEASE_TIMEOUT = 5.0  # seconds that a worker has to end
_NGINX_MISSING = (
    "The proxy needs nginx (1.19.5 or later), which is not installed. Install it (apt-get install nginx-light, dnf "
    "install nginx, brew install nginx); its service is not needed: systemctl disable --now nginx"
)
_TEMPLATE = """\
# Written by Descant at every start: changes are lost.
daemon off;
pid nginx.pid;
error_log {errors} notice;
worker_processes 1;
worker_shutdown_timeout 30s;
events {{ worker_connections 1024; }}
http {{
    log_format parties escape=json '{{"at": "$time_iso8601", "from": "$remote_addr", "serial": "$ssl_client_serial", '
        '"verified": "$ssl_client_verify", "method": "$request_method", "path": "$uri", "status": $status, '
        '"received": $request_length, "sent": $bytes_sent}}';
    access_log {access} parties;
    server_tokens off;
    default_type text/plain;
    client_body_temp_path unused; proxy_temp_path unused; fastcgi_temp_path unused; uwsgi_temp_path unused;
    scgi_temp_path unused;
    client_header_timeout 20s;
    client_body_timeout 60s;
    server {{
        listen {listen} ssl;
        ssl_certificate {keys}/{server}.crt;
        ssl_certificate_key {keys}/{server}.key;
        ssl_client_certificate {keys}/{authority}.crt;
        ssl_crl {keys}/{revoked};
        ssl_verify_client on;
        ssl_verify_depth 1;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;
        ssl_session_cache off;
        ssl_session_tickets off;
        if ($request_method != POST) {{ return 403; }}
        if ($request_uri !~ "^/v1/fleet/[a-z0-9-]+$") {{ return 403; }}
        location / {{ return 403; }}
        location /v1/fleet/ {{
            client_max_body_size {body}m;
            proxy_pass https://127.0.0.1:{upstream};
            proxy_http_version 1.1;
            proxy_set_header Host localhost;
            proxy_pass_header Date;  # of the server: a party uses it to detect that its clock is off
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_next_upstream off;
            proxy_read_timeout {timeout}s;
            proxy_send_timeout {timeout}s;
            proxy_ssl_verify on;
            proxy_ssl_verify_depth 1;
            proxy_ssl_trusted_certificate {keys}/{authority}.crt;
            proxy_ssl_name localhost;
            proxy_ssl_server_name on;
            proxy_ssl_protocols TLSv1.2 TLSv1.3;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Proxy:
    """Settings of the proxy: ``with Proxy(upstream=8000).start(folder) as running: ...``."""

    upstream: int = setting(help="port of the server on 127.0.0.1, with TLS", least=1, most=65535, whole=True)
    host: str = setting("0.0.0.0", "address of this machine to listen at; 0.0.0.0: all")
    port: int = setting(8443, "port to listen at", least=1, most=65535, whole=True)
    max_body_megabytes: int = setting(
        16, "largest request in megabytes; Flower splits at 5", least=1, most=2**20, whole=True
    )
    timeout: int = setting(300, "seconds to wait for the server's answer", least=1, most=86400, whole=True)

    @classmethod
    def for_address(cls, upstream: int, public_address: str) -> Proxy:
        """Return the proxy of a federation with this public address; for a host name it listens on all addresses.

        >>> Proxy.for_address(8000, "[::1]:8443").host, Proxy.for_address(8000, "fl.example.org:8443").host
        ('::1', '0.0.0.0')
        """
        host, port = parse_address(public_address)
        if parse_ip(host) is None:
            host = "127.0.0.1" if host.lower() == "localhost" else "0.0.0.0"
        return cls(upstream, host, port)

    def configuration(self) -> str:
        """Return nginx's configuration; its paths are relative, so that no folder name can act as syntax."""
        check_settings(self)
        if parse_ip(self.host) is None or "%" in self.host:
            raise SettingError(f"The 'host' of Proxy must be an address such as 0.0.0.0 or ::. Got {self.host!r:.80}.")
        return _TEMPLATE.format(
            listen=join_address(self.host, self.port),
            upstream=self.upstream,
            body=self.max_body_megabytes,
            timeout=self.timeout,
            keys=f"../../{KEYS_FOLDER}",
            server=SERVER_NAME,
            authority=AUTHORITY_NAME,
            revoked=REVOCATION_FILE,
            access=ACCESS_LOG,
            errors=ERROR_LOG,
        )

    def start(self, server: str | Path, timeout: float = 20.0) -> RunningProxy:
        """Write the configuration into the server's folder, check it, start nginx, and wait until it answers."""
        check_port_free(self.host, self.port)  # before any write: a running proxy may use the files
        text = self.configuration()
        nginx = find_nginx()
        folder = Path(server).resolve() / RUN_FOLDER / PROXY_FOLDER
        with write_errors(folder):
            atomic.make_folder(folder, 0o700)
            atomic.replace(folder / CONFIGURATION, text.encode(), f"{CONFIGURATION}.new")
        running = RunningProxy(self, nginx, folder)
        try:
            running.wait_until_ready(timeout)
        except BaseException:
            running.terminate()
            raise
        return running


class RunningProxy:
    """A running nginx, to be used in a `with`; it ends with this process (see :class:`.ChildProcess`)."""

    def __init__(self, proxy: Proxy, nginx: str, folder: Path) -> None:
        self.proxy = proxy
        self.folder = folder
        self._command = [nginx, "-p", f"{folder}/", "-c", CONFIGURATION, "-e", ERROR_LOG]
        self._keys = folder.parents[1] / KEYS_FOLDER
        self._check_configuration()
        self._loaded_revocations = self._read_revocations()
        self._log_start = self._log_size()
        self._child = ChildProcess(self._command, folder / ERROR_LOG, folder)

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it answers with the certificate of this federation's server."""
        stop_at = time.monotonic() + timeout
        reason = ""
        while time.monotonic() < stop_at:
            if not self.is_alive:
                raise EngineError(
                    f"nginx has ended: {_error_line(self._read_log(self._log_start))}. See {self.folder / ERROR_LOG}."
                )
            try:
                return self._connect_once()
            except OSError as error:
                reason = str(error)
            time.sleep(_POLL_INTERVAL)
        raise EngineError(f"nginx does not answer at port {self.proxy.port}: {reason}. See {self.folder / ERROR_LOG}.")

    def reload_if_revoked(self) -> bool:
        """Reload if any process has changed the revocation list; return whether it had."""
        changed = self._read_revocations() != self._loaded_revocations
        if changed:
            self.reload()
        return changed

    def reload(self, timeout: float = 20.0) -> None:
        """Reload the keys and the revocation list; when this returns, new connections use the new ones.

        Open requests may finish within 30 seconds.
        """
        self._check_configuration()
        revocations = self._read_revocations()
        log_start = self._log_size()
        self._child.send_signal(signal.SIGHUP)
        stop_at = time.monotonic() + timeout
        while b"gracefully shutting down" not in self._read_log(
            log_start
        ):  # logged when the old worker stops accepting connections
            if not self.is_alive or time.monotonic() > stop_at:
                raise EngineError(
                    f"nginx did not reload its keys: {_error_line(self._read_log(log_start))}. Until it is restarted, "
                    f"revoked parties are still let in. See {self.folder / ERROR_LOG}."
                )
            time.sleep(_POLL_INTERVAL)
        self._loaded_revocations = revocations

    def terminate(self) -> None:
        """Stop nginx and wait for the port: a worker whose master was killed holds it a moment longer."""
        self._child.terminate()
        stop_at = time.monotonic() + _PORT_RELEASE_TIMEOUT
        while time.monotonic() < stop_at:
            with suppress(EngineError):
                check_port_free(self.proxy.host, self.proxy.port)
                return
            time.sleep(_POLL_INTERVAL)

    def __enter__(self) -> RunningProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _check_configuration(self) -> None:
        """Raise unless nginx accepts the configuration and the files that it names."""
        done = subprocess.run(
            [*self._command, "-t", "-q"], cwd=self.folder, capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise EngineError(f"nginx rejects {self.folder / CONFIGURATION}: {_error_line(done.stderr)}")

    def _connect_once(self) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.proxy.host, self.proxy.host)
        context = ssl.create_default_context(cafile=self._keys / f"{AUTHORITY_NAME}.crt")
        with (
            socket.create_connection((host, self.proxy.port), 5.0) as plain,
            context.wrap_socket(plain, server_hostname="localhost"),
        ):
            pass

    def _read_revocations(self) -> bytes:
        return (self._keys / REVOCATION_FILE).read_bytes()

    def _log_size(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / ERROR_LOG).stat().st_size
        return 0

    def _read_log(self, offset: int) -> bytes:
        with (self.folder / ERROR_LOG).open("rb") as stream:
            stream.seek(offset)
            return stream.read()


def find_nginx() -> str:
    """Return the path of nginx, or raise with the way to install it."""
    path = shutil.which("nginx") or shutil.which("nginx", path=":".join(_NGINX_FOLDERS))
    if path is None:
        raise EngineError(_NGINX_MISSING)
    return path


def check_port_free(host: str, port: int) -> None:
    """Raise EngineError unless this process can listen at this address."""
    family = socket.AF_INET6 if isinstance(parse_ip(host), IPv6Address) else socket.AF_INET
    new_federation_hint = (
        "make a new federation, because invites name the port: descant server init NEW recipe.toml --port"
    )
    hints = {
        errno.EADDRINUSE: f"another process listens there. Stop it, or {new_federation_hint}",
        errno.EACCES: f"ports below 1024 need privileges that a server should not have: {new_federation_hint}",
        errno.EADDRNOTAVAIL: "this machine does not have that address: give one of its addresses, 0.0.0.0 for all, "
        "or a host name (descant server init), which means all",
    }
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = hints.get(error.errno or 0, error.strerror)
            raise EngineError(f"The proxy cannot listen at {join_address(host, port)}: {reason}.") from None


def _error_line(log: bytes) -> str:
    """Return the line of nginx's log with the error."""
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    error_lines = [line for line in lines if "[emerg]" in line or "[alert]" in line]
    return (error_lines or lines[-1:] or ["it printed nothing"])[0][:400]
