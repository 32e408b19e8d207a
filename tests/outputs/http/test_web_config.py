"""The web configuration file: which files are good, and the refusals of the others."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import textwrap
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.certificates import authority, key_pem
from tests.support.programs import Starter
from tests.support.tools import find
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebConfigFile

CERT = "cert_file: server.crt\nkey_file: server.key\n"
MUTUAL = CERT + "client_auth_type: RequireAndVerifyClientCert\nclient_ca_file: ca.crt\n"
HASH = "$2b$04$jTuKnKtM5zJUSWlpZRTbNuPeO09N.EAxIzqpIGOue/q17/HH6Zev2"


def section(name: str, body: str) -> str:
    """A section of a configuration with an indented body."""
    return f"{name}:\n{textwrap.indent(body, '  ')}"


def server(body: str) -> str:
    """A configuration with a TLS section."""
    return section("tls_server_config", body)


def http(body: str) -> str:
    """A configuration with response headers."""
    return section("http_server_config", section("headers", body))


def users(body: str) -> str:
    """A configuration with users."""
    return section("basic_auth_users", body)


def limit(body: str) -> str:
    """A configuration with a rate limit."""
    return section("rate_limit", body)


def inline(name: str) -> str:
    """A placeholder for PEM text in the configuration, filled in by `written`."""
    return f"|\n    <{name}>\n"


GOOD = {
    "empty": "",
    "tls inline": server(f"cert: {inline('server.crt')}key: {inline('server.key')}"),
    "mutual": server(MUTUAL),
    "mutual if given": server(MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")),
    "sans": server(MUTUAL + "client_allowed_sans: [prometheus, 10.0.0.1, a@b.c, 'spiffe://d/e']\n"),
    "ciphers and a curve": server(CERT + "cipher_suites: [TLS_AES_128_GCM_SHA256]\ncurve_preferences: [X25519]\n"),
    "http2": "http_server_config: {http2: true}\n",
    "headers": http("Strict-Transport-Security: max-age=31536000\nX-Frame-Options: deny\nContent-Security-Policy:\n"),
    "users": users(f"alice: {HASH}\njörg m: {HASH.replace('2b', '2a')}\n'7': {HASH.replace('2b', '2y')}\n3: {HASH}\n"),
    "rate limit": limit("interval: 1s\nburst: 20\n"),
}

BAD: dict[str, tuple[str, str]] = {
    "not yaml": (users(f'"alice": {HASH}: x\n'), "YAML"),
    "unknown section": ("tls_config:\n  cert_file: server.crt\n", "tls_config"),
    "unknown key": (server(CERT + "cert_fil: a\n"), "cert_fil"),
    "user twice": (users(f"alice: {HASH}\nalice: {HASH}\n"), "alice"),
    "cert without key": (server("cert_file: server.crt\n"), "key_file"),
    "key of another": (server("cert_file: server.crt\nkey_file: other.key\n"), "does not belong"),
    "key encrypted": (server("cert_file: server.crt\nkey_file: locked.key\n"), "encrypted"),
    "inline key is junk": (server("cert_file: server.crt\nkey: SECRET\n"), "holds no private key"),
    "ca without a type": (server(CERT + "client_ca_file: ca.crt\n"), "client_auth_type"),
    "type without ca": (server(CERT + "client_auth_type: RequireAndVerifyClientCert\n"), "client_ca_file"),
    "no sans": (server(MUTUAL + "client_allowed_sans: []\n"), "client_allowed_sans"),
    "tls 1.0": (server(CERT + "min_version: TLS10\n"), "TLS10"),
    "versions crossed": (server(CERT + "min_version: TLS13\nmax_version: TLS12\n"), "version"),
    "cipher unknown": (server(CERT + "cipher_suites:\n- TLS_AES_128_GCM_SHA256\n- TLS_NEVER_HEARD_OF\n"), "TLS_NEVER_HEARD_OF"),
    "header of two lines": (http('Content-Security-Policy: "a\\r\\nX: b"\n'), "Content-Security-Policy"),
    "password in plain text": (users("alice: SECRET\n"), "alice"),
    "hash too short": (users(f"bob: {HASH}\nalice: {HASH[:-1]}\n"), "alice"),
    "cost too high": (users(f"alice: {HASH.replace('$04', '$15')}\n"), "15"),
    "interval without unit": (limit("interval: 5\nburst: 1\n"), "interval"),
}
"""Wrong configurations, and a word that the refusal must contain."""


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the table's configurations name."""
    made = tmp_path_factory.mktemp("web")
    authority().issue("dns:localhost").write(made, "server")
    authority().issue().write(made, "other")
    (made / "ca.crt").write_text(authority().pem)
    (made / "locked.key").write_text(key_pem(ec.generate_private_key(ec.SECP256R1()), b"password"))
    return made


def written(directory: Path, text: str) -> Path:
    """A configuration file beside the others, with `<file>` replaced by what is in that file."""
    for indent, name in re.findall(r"^( +)<(\S+)>$", text, re.MULTILINE):
        text = text.replace(f"{indent}<{name}>\n", textwrap.indent((directory / name).read_text(), indent))
    path = directory / "web.yml"
    path.write_bytes(text.encode())
    return path


def load(directory: Path, text: str) -> WebConfigFile:
    """The configuration of this text."""
    return WebConfigFile(str(written(directory, text)))


def test_good_files_are_taken(directory: Path) -> None:
    """A good file is loaded."""
    for text in GOOD.values():
        load(directory, text)


def test_a_key_where_memory_files_are_denied(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in the configuration is loaded where a sandbox denies files in memory."""

    def denied(_name: str) -> int:
        raise PermissionError(errno.EPERM, "seccomp")

    monkeypatch.setattr(os, "memfd_create", denied)
    assert load(directory, GOOD["tls inline"]).current.tls is not None


def test_bad_files_are_refused(directory: Path) -> None:
    """A bad file is a ValueError of one line that names the file and the fault, and shows no secret."""
    for text, word in BAD.values():
        with pytest.raises(ValueError, match=re.escape(word)) as raised:
            load(directory, text)
        refusal = str(raised.value)
        assert HASH[10:] not in "".join(traceback.format_exception(raised.value))
        assert refusal.startswith(str(directory / "web.yml"))
        assert "SECRET" not in refusal
        assert HASH[10:20] not in refusal
        assert "\n" not in refusal


STRICTER = {
    *("type without ca", "no sans", "tls 1.0", "versions crossed", "header of two lines", "hash too short", "cost too high"),
}
"""Bad files that Prometheus takes: it then admits no client or too many, or a check takes seconds of the training's time."""


@pytest.mark.full
@pytest.mark.server
def test_promtool_has_the_same_verdict(directory: Path) -> None:
    """Prometheus' own check agrees on every file of the table but for the differences that are meant."""
    texts = GOOD | {name: text for name, (text, _) in BAD.items()}
    taken = set()
    for name, text in texts.items():
        if "rate_limit" not in text:  # Debian's promtool is too old for it
            command = [find("promtool"), "check", "web-config", written(directory, text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ("SUCCESS" in done.stderr) is (done.returncode == 0)
            if done.returncode == 0:
                taken.add(name)
    assert taken == {name for name in GOOD if name != "rate limit"} | STRICTER


# The settings


def test_headers_users_and_intervals(directory: Path) -> None:
    """Blank headers are left out, a number is text, a user's name may look like one, and durations are like in Go."""
    text = http("X-XSS-Protection: 0\nContent-Security-Policy: ''\nX-Frame-Options: sameorigin\n")
    settings = load(directory, text + users(f"0x10: {HASH}\n")).current
    assert dict(settings.headers) == {"X-XSS-Protection": "0", "X-Frame-Options": "sameorigin"}
    assert settings.users == {"0x10": HASH}
    for duration, seconds in (("1s", 1), ("+1m30s", 90), ("1h0.5m", 3630), ("250ms", 0.25), ("2µs", 2e-6), (".5s", 0.5)):
        rate = load(directory, limit(f"interval: {duration}\nburst: 7\n")).current.rate_limit
        assert rate is not None
        assert rate == RateLimit(pytest.approx(seconds), 7)


# The optional packages

ABSENT = """
import sys, torch
from torch_grad_exporter import start_exporter
start_exporter(torch.nn.Linear(1, 1), 0, addr="127.0.0.1").close()
assert not {"yaml", "msgspec", "bcrypt"} & sys.modules.keys()
for name in ("yaml", "msgspec", "bcrypt"):
    sys.modules[name] = None
    try:
        start_exporter(torch.nn.Linear(1, 1), 0, addr="127.0.0.1", web_config_file="web.yml")
    except ValueError as error:
        print(error)
    del sys.modules[name]
"""


@pytest.mark.process
def test_only_a_web_configuration_needs_packages(starter: Starter) -> None:
    """A server without one imports none of its packages; with one and without them the error says what to install."""
    done = starter.start(ABSENT)
    assert done.wait() == 0, done.err.read_text()
    lines = done.out.read_text().splitlines()
    assert [name in line for name, line in zip(("yaml", "msgspec", "bcrypt"), lines, strict=True)] == [True] * 3
    assert all("pip install pyyaml msgspec bcrypt" in line for line in lines)
