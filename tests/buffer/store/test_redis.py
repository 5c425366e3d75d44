"""Connections to Redis: password, TLS, outages."""

import asyncio
import datetime
import ipaddress
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from slipstream.buffer.store.redis import (
    LOG_AFTER_S,
    Outage,
    connect,
    connect_async,
    redis_error,
    retry_through_outage,
    set_all,
)
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, DeadlineError, SlipstreamError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.tools.launch.redis import redis_command, wait_until_ready
from tests.conftest import free_port

PASSWORD = 'a "strange" \\ päss\nwörd #1'


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run whose embedded server has a password."""
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, PASSWORD)
    return RunConfig.model_validate(
        {
            "run": {"name": "locked", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "redis": {"port": free_port(), "deadline_s": 5.0, "outage_deadline_s": 20.0},
        }
    )


@contextmanager
def started(config: RunConfig) -> Iterator["subprocess.Popen[bytes]"]:
    command = redis_command(config.redis, config.paths.redis)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_ready(config.redis, 20)
            yield server
        finally:
            server.kill()


# --- password -------------------------------------------------------------------------------------------------------


async def test_wrong_password_fails_at_once(own: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(own):
        connect(own.redis).set("key", "value")
        async with connect_async(own.redis) as client:
            assert await client.get("key") == b"value"
        for wrong, remedy in (("", "requires a password"), ("guess", "check the password")):
            monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, wrong)
            for refused in (
                lambda: retry_through_outage(own.redis, connect(own.redis).ping),
                lambda: wait_until_ready(own.redis, 20),
            ):
                with pytest.raises(SlipstreamError, match=f"{own.redis.address} .*{remedy}") as caught:
                    refused()
                assert not isinstance(caught.value, DeadlineError)
                assert "guess" not in str(caught.value)
            async with connect_async(own.redis) as client:
                with pytest.raises(SlipstreamError, match=f"{remedy}.*{REDIS_PASSWORD_VARIABLE}"):
                    await client.get("key")


def test_password_file_is_private(own: RunConfig) -> None:
    words = redis_command(own.redis, own.paths.redis)
    assert not any("requirepass" in word or PASSWORD in word for word in words)
    assert PASSWORD not in repr(own) + own.model_dump_json()
    file = own.paths.redis / "password.conf"
    assert words[1] == str(file.resolve())
    assert file.stat().st_mode & 0o777 == 0o600


def test_removed_password_is_not_required(own: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_command(own.redis, own.paths.redis)
    monkeypatch.delenv(REDIS_PASSWORD_VARIABLE)
    with started(own):
        assert connect(own.redis).ping()
    assert not (own.paths.redis / "password.conf").exists()


# --- outages --------------------------------------------------------------------------------------------------------


class PatientReader:
    """A thread that reads `key` through an outage; it has failed once when it is made."""

    def __init__(self, config: RunConfig, client: redis.Redis) -> None:
        self._client = client
        self._failed = threading.Event()
        self._answers: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(retry_through_outage(config.redis, self._read))
        )
        self._thread.start()
        assert self._failed.wait(20)

    def answer(self) -> Any:
        self._thread.join(20)
        (answer,) = self._answers
        return answer

    def _read(self) -> Any:
        try:
            return self._client.get("key")
        except redis.exceptions.RedisError:
            self._failed.set()
            raise


def test_reader_continues_after_outage(own: RunConfig) -> None:
    client = connect(own.redis)
    with started(own):
        client.set("key", "value")
    reader = PatientReader(own, client)
    with started(own):
        assert reader.answer() == b"value"


async def test_retries_log_start_and_end_of_outage(own: RunConfig) -> None:
    outage = Outage(own.redis)
    with structlog.testing.capture_logs() as logs:
        async with connect_async(own.redis, outage) as client:
            asked = asyncio.ensure_future(client.get("anything"))
            async with asyncio.timeout(own.redis.deadline_s):
                while not logs:
                    await asyncio.wait([asked], timeout=0.05)
            with started(own):
                assert await asked is None
        outage.recovered()
    assert [line["event"] for line in logs] == ["waiting for Redis", "Redis is back"]
    assert LOG_AFTER_S <= logs[0]["for_s"] <= logs[1]["after_s"]


def test_busy_server_is_waited_for(own: RunConfig) -> None:
    with started(own):
        client = connect(own.redis)
        client.config_set("busy-reply-threshold", 1)
        script = threading.Thread(target=run_endless_script, args=(own,))
        script.start()
        with pytest.raises(redis.exceptions.ResponseError, match="BUSY"):
            while script.is_alive():
                client.get("key")
        reader = PatientReader(own, client)
        connect(own.redis).script_kill()
        assert reader.answer() is None
        script.join(20)


def run_endless_script(config: RunConfig) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match="killed"):
        connect(config.redis, deadline_s=60).eval("while true do end", 0)


def test_outage_past_deadline_names_address(own: RunConfig) -> None:
    config = own.redis.model_copy(update={"outage_deadline_s": 0.2})
    with pytest.raises(DeadlineError, match=f"{config.address} .*outage_deadline_s=0.2"):
        retry_through_outage(config, connect(config).ping)


def test_old_server_version_is_reported(own: RunConfig) -> None:
    of_redis_6 = "Error compiling script (new function): user_script:1: unexpected symbol near '#'"
    error = redis_error(own.redis, redis.exceptions.ResponseError(of_redis_6))
    assert str(error).endswith(f"{of_redis_6}; it must be Redis 7.0 or later, or Valkey")


# --- many values ----------------------------------------------------------------------------------------------------


async def test_out_of_memory_error_omits_values(own: RunConfig) -> None:
    values: dict[str, bytes | memoryview] = {"small": b"1", "large": memoryview(b"value" * 100_000)}
    with started(own):
        async with connect_async(own.redis) as client:
            await set_all(client, values)
            assert [await client.get(name) for name in values] == list(values.values())
            await client.config_set("maxmemory", "1")
            with pytest.raises(redis.exceptions.OutOfMemoryError) as refused:
                await set_all(client, values)
    assert "value" not in str(refused.value)


# --- TLS ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1."""

    cert: Path
    key: Path


def certificate(folder: Path, name: str) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.pem")
    made.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


@contextmanager
def behind_tls(redis_port: int, context: ssl.SSLContext) -> Iterator[int]:
    """The port of a TLS proxy before a server without TLS; two threads per connection."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass  # one side has disconnected
        finally:
            sink.close()
            source.close()

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return  # closed
            try:
                near = context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue  # a refused client
            far = socket.create_connection(("127.0.0.1", redis_port))
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


@pytest.fixture
def server_certificate(tmp_path: Path) -> Certificate:
    return certificate(tmp_path, "server")


@pytest.fixture
def client_certificate(tmp_path: Path) -> Certificate:
    return certificate(tmp_path, "client")


@pytest.fixture
def tls_port(redis_url: str, server_certificate: Certificate) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_certificate.cert, server_certificate.key)
    with behind_tls(port_of(redis_url), context) as port:
        yield port


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None, url
    return port


def over_tls(port: int, **changes: object) -> RedisConfig:
    return RedisConfig.model_validate({"url": f"rediss://127.0.0.1:{port}/0", "deadline_s": 20.0, **changes})


async def test_tls_with_trusted_certificate(tls_port: int, server_certificate: Certificate) -> None:
    config = over_tls(tls_port, ca_file=server_certificate.cert)
    assert connect(config).ping()
    async with connect_async(config) as client:
        assert await client.ping()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_certificate_is_verified(
    tls_port: int, server_certificate: Certificate, client_certificate: Certificate, host: str
) -> None:
    other_name = host == "localhost"
    for ca_file in (server_certificate.cert,) if other_name else (None, client_certificate.cert):
        config = over_tls(tls_port, ca_file=ca_file, url=f"rediss://{host}:{tls_port}/0")
        error = "Hostname mismatch" if other_name else "CERTIFICATE_VERIFY_FAILED"
        with pytest.raises(redis.exceptions.ConnectionError, match=error):
            connect(config).ping()


async def test_untrusted_certificate_is_not_retried(tls_port: int) -> None:
    began = time.monotonic()
    client = connect_async(over_tls(tls_port))
    with pytest.raises(SlipstreamError, match=r"CERTIFICATE_VERIFY_FAILED.*redis\.ca_file"):
        await client.ping()
    with pytest.raises(SlipstreamError, match=r"CERTIFICATE_VERIFY_FAILED.*redis\.ca_file"):
        retry_through_outage(over_tls(tls_port), connect(over_tls(tls_port)).ping)
    assert time.monotonic() - began < 15.0, "below either deadline"
    await client.aclose()


def test_client_certificate_is_sent(
    redis_url: str, server_certificate: Certificate, client_certificate: Certificate
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_certificate.cert, server_certificate.key)
    context.load_verify_locations(client_certificate.cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with behind_tls(port_of(redis_url), context) as port:
        ours = {"cert_file": client_certificate.cert, "key_file": client_certificate.key}
        assert connect(over_tls(port, ca_file=server_certificate.cert, **ours)).ping()
        with pytest.raises(redis.exceptions.ConnectionError):
            connect(over_tls(port, ca_file=server_certificate.cert)).ping()


@pytest.mark.parametrize("make", [connect, connect_async])
def test_invalid_tls_files_are_named(
    make: Callable[[RedisConfig], object],
    tmp_path: Path,
    server_certificate: Certificate,
    client_certificate: Certificate,
) -> None:
    ours = client_certificate.cert
    with pytest.raises(ConfigError, match=rf"redis\.ca_file={tmp_path}/none"):
        make(over_tls(1, ca_file=tmp_path / "none"))
    (tmp_path / "none").write_text("no PEM")
    locked = serialization.load_pem_private_key(client_certificate.key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked").write_bytes(locked)
    with pytest.raises(ConfigError, match=rf"redis\.ca_file={tmp_path}/none"):
        make(over_tls(1, ca_file=tmp_path / "none"))
    for key in (server_certificate.key, tmp_path / "none", tmp_path / "locked"):
        with pytest.raises(ConfigError, match=rf"redis\.cert_file={ours} .*redis\.key_file={key}"):
            make(over_tls(1, cert_file=ours, key_file=key))
