"""The web configuration file: which files are good, and what is said of the others."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.certificates import authority, key_pem
from tests.support.tools import REPOSITORY, find
from torch_grad_exporter.outputs.http import tls
from torch_grad_exporter.outputs.http.web_config import RateLimit, WebConfigFile

CERT = "cert_file: server.crt\nkey_file: server.key\n"
MUTUAL = CERT + "client_auth_type: RequireAndVerifyClientCert\nclient_ca_file: ca.crt\n"
HASH = "$2b$04$jTuKnKtM5zJUSWlpZRTbNuPeO09N.EAxIzqpIGOue/q17/HH6Zev2"
SALT, REST = HASH[7:29], HASH[29:]


def section(name: str, body: str) -> str:
    """A section of a configuration with an indented body, which begins in line 2."""
    return f"{name}:\n{textwrap.indent(body, '  ')}"


def server(body: str) -> str:
    """A configuration with a TLS section: what comes after `CERT` begins in line 4, after `MUTUAL` in line 6."""
    return section("tls_server_config", body)


def http(body: str) -> str:
    """A configuration with response headers; they begin in line 3."""
    return section("http_server_config", section("headers", body))


def users(body: str) -> str:
    """A configuration with users; they begin in line 2."""
    return section("basic_auth_users", body)


def limit(body: str) -> str:
    """A configuration with a rate limit, which begins in line 2."""
    return section("rate_limit", body)


def inline(name: str) -> str:
    """A placeholder for PEM text in the configuration, filled in by `written`."""
    return f"|\n    <{name}>\n"


@dataclass(frozen=True)
class Bad:
    text: str
    line: int | None
    says: str


GOOD = {
    "empty": "",
    "comment": "# nothing yet\n",
    "empty sections": "tls_server_config:\nhttp_server_config: {}\nbasic_auth_users:\nrate_limit:\n",
    "tls": server(CERT),
    "tls inline": server(f"cert: {inline('server.crt')}key: {inline('server.key')}"),
    "cert inline, key in a file": server(f"cert: {inline('server.crt')}key_file: server.key\n"),
    "nulls are absent": server(CERT + "min_version:\nclient_ca_file: ~\nclient_allowed_sans: null\n"),
    "empty text is absent": server(CERT + 'client_ca_file: ""\nclient_auth_type: ""\ncert: ""\n'),
    "no client certificate": server(CERT + "client_auth_type: NoClientCert\n"),
    "a client certificate that is not checked": server(CERT + "client_auth_type: RequestClientCert\n"),
    "mutual": server(MUTUAL),
    "mutual inline": server(CERT + f"client_auth_type: RequireAndVerifyClientCert\nclient_ca: {inline('ca.crt')}"),
    "mutual, a bundle with words in it": server(MUTUAL.replace("ca.crt", "bundle.crt")),
    "mutual if given": server(MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")),
    "sans": server(MUTUAL + "client_allowed_sans: [prometheus, 10.0.0.1, a@b.c, 'spiffe://d/e']\n"),
    "versions": server(CERT + "min_version: TLS12\nmax_version: TLS13\n"),
    "tls 1.3 only": server(CERT + "min_version: TLS13\n"),
    "tls 1.2 only": server(CERT + "max_version: TLS12\n"),
    "all ciphers": server(CERT + f"cipher_suites: [{', '.join((*tls.CIPHERS, *tls.TLS13_CIPHERS))}]\n"),
    "ciphers of tls 1.3": server(CERT + "cipher_suites: [TLS_AES_128_GCM_SHA256]\n"),
    "no ciphers": server(CERT + "cipher_suites: []\ncurve_preferences: []\n"),
    "client's preference": server(CERT + "prefer_server_cipher_suites: false\n"),
    "one curve": server(CERT + "curve_preferences: [X25519]\n"),
    "http2": "http_server_config: {http2: true}\n",
    "no http2": "http_server_config: {http2: off}\n",
    "headers": http(
        "Strict-Transport-Security: max-age=31536000\nX-Content-Type-Options: nosniff\nX-Frame-Options: deny\n"
        "X-XSS-Protection: 0\nContent-Security-Policy: \"default-src 'none'\"\n"
    ),
    "blank headers": http("X-XSS-Protection: ''\nContent-Security-Policy:\n"),
    "users": users(f"alice: {HASH}\nbob: {HASH.replace('2b', '2a')}\n'7': {HASH.replace('2b', '2y')}\n3: {HASH}\n"),
    "user with an umlaut and a blank": users(f"jörg m: {HASH}\n"),
    "hash at the highest cost": users(f"alice: $2y$14${SALT}{REST}\n"),
    "anchors": f"basic_auth_users:\n  alice: &hash {HASH}\n  bob: *hash\n",
    "rate limit": limit("interval: 1s\nburst: 20\n"),
    "no rate limit": limit("interval: 0\nburst: 20\n"),
    "byte order mark": "\ufeff" + users(f"alice: {HASH}\n"),
    "carriage returns": users(f"alice: {HASH}\n").replace("\n", "\r\n"),
}

BAD = {
    "not yaml": Bad("a: [\nb", 2, "not valid YAML"),
    "tab": Bad("tls_server_config:\n\tcert_file: a\n", 2, "not valid YAML"),
    "two documents": Bad("---\n{}\n---\n{}\n", 3, "not valid YAML"),
    "control characters": Bad("\x07", None, "control characters"),
    "nested too deeply": Bad("[" * 5000, None, "nested too deeply"),
    "no mapping": Bad("- a\n", 1, "takes keys with values"),
    "text": Bad("\ntls\n", 2, "takes keys with values"),
    "unknown section": Bad("tls_config:\n  cert_file: server.crt\n", 2, "'tls_config'.*did you mean 'tls_server_config'"),
    "unknown key": Bad(server(CERT + "cert_fil: a\n"), 4, "'cert_fil' in tls_server_config.*did you mean 'cert_file'"),
    "unknown key far from all": Bad(server(CERT + "zzz: a\n"), 4, "known are cert, key"),
    "unknown key without a value": Bad(server(CERT + "zzz:\n"), 4, "'zzz'"),
    "unknown key in http": Bad("http_server_config:\n  http3: true\n", 2, "did you mean 'http2'"),
    "unknown key in rate limit": Bad(limit("interval: 1s\nbursts: 2\n"), 3, "did you mean 'burst'"),
    "merge key": Bad(server(CERT + "<<: {}\n"), 4, "a key in tls_server_config takes text"),
    "section twice": Bad("rate_limit:\nrate_limit:\n", 2, "'rate_limit' stands twice"),
    "key twice": Bad(server(CERT + "cert_file: server.crt\n"), 4, "'cert_file' stands twice"),
    "user twice": Bad(users(f"alice: {HASH}\nalice: {HASH}\n"), 3, "'alice' stands twice"),
    "section is a list": Bad("tls_server_config: []\n", 1, "takes keys with values"),
    "cert is a list": Bad(server("cert_file: [a]\nkey_file: server.key\n"), 2, "cert_file takes text"),
    "key is a mapping": Bad(server("[a]: b\n"), 2, "takes text"),
    "tag": Bad(server("cert_file: !!python/name:os.system\nkey_file: server.key\n"), 2, "cert_file takes text"),
    "tls without certificate": Bad(server("min_version: TLS13\n"), 2, "no cert_file; add it, or remove the section"),
    "cert without key": Bad(server("cert_file: server.crt\n"), 2, "no key_file"),
    "key without cert": Bad(server("key_file: server.key\n"), 2, "no cert_file"),
    "empty paths": Bad(server('cert_file: ""\nkey_file: ""\n'), 2, "no cert_file"),
    "cert twice": Bad(server(f"cert: '<server.crt>'\n{CERT}"), 3, "cert and cert_file both stand here"),
    "cert missing": Bad(server("cert_file: none.crt\nkey_file: server.key\n"), 2, "none.crt cannot be read: No such file"),
    "cert is a directory": Bad(server("cert_file: .\nkey_file: server.key\n"), 2, "cannot be read: Is a directory"),
    "key missing": Bad(server("cert_file: server.crt\nkey_file: none.key\n"), 3, "none.key cannot be read: No such file"),
    "key of another": Bad(server("cert_file: server.crt\nkey_file: other.key\n"), 3, "does not belong to the certificate"),
    "key encrypted": Bad(server("cert_file: server.crt\nkey_file: locked.key\n"), 3, "is encrypted; decrypt it"),
    "cert is a key": Bad(server("cert_file: server.key\nkey_file: server.key\n"), 2, "holds no certificate"),
    "key is a cert": Bad(server("cert_file: server.crt\nkey_file: server.crt\n"), 3, "holds no private key"),
    "cert broken": Bad(server("cert_file: broken.crt\nkey_file: server.key\n"), 2, "cannot be used"),
    "inline cert is junk": Bad(server("cert: junk\nkey_file: server.key\n"), 2, "cert holds no certificate"),
    "inline key is junk": Bad(server("cert_file: server.crt\nkey: SECRET\n"), 3, "key holds no private key"),
    "ca without a type": Bad(server(CERT + "client_ca_file: ca.crt\n"), 4, "add client_auth_type: RequireAndVerifyClientCert"),
    "ca with no client cert": Bad(server(MUTUAL.replace("RequireAndVerify", "No")), 5, "add client_auth_type"),
    "ca with request": Bad(server(MUTUAL.replace("RequireAndVerify", "Request")), 5, "add client_auth_type"),
    "type without ca": Bad(server(CERT + "client_auth_type: RequireAndVerifyClientCert\n"), 4, "needs client_ca_file"),
    "any client cert": Bad(server(CERT + "client_auth_type: RequireAnyClientCert\n"), 4, "accepts any.*use RequireAndVerify"),
    "any client cert, old name": Bad(
        server(CERT + "client_auth_type: RequireClientCert\n"), 4, "accepts any.*use RequireAndVerify"
    ),
    "type unknown": Bad(server(CERT + "client_auth_type: requireandverifyclientcert\n"), 4, "is unknown; known are"),
    "ca missing": Bad(server(MUTUAL.replace("ca.crt", "none.crt")), 5, "none.crt cannot be read"),
    "ca without certificates": Bad(server(MUTUAL.replace("ca.crt", "server.key")), 5, "holds no certificate"),
    "ca broken": Bad(server(MUTUAL.replace("ca.crt", "broken.crt")), 5, "has a certificate that cannot be read"),
    "inline ca is junk": Bad(
        server(CERT + "client_auth_type: RequireAndVerifyClientCert\nclient_ca: junk\n"), 5, "holds no certificate"
    ),
    "sans without mutual": Bad(server(CERT + "client_allowed_sans: [a]\n"), 4, "needs client_auth_type"),
    "sans with mutual if given": Bad(
        server(MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven") + "client_allowed_sans: [a]\n"),
        6,
        "needs client_auth_type",
    ),
    "no sans": Bad(server(MUTUAL + "client_allowed_sans: []\n"), 6, "no client could connect"),
    "sans are text": Bad(server(MUTUAL + "client_allowed_sans: a\n"), 6, "takes a list"),
    "a null among sans": Bad(
        server(MUTUAL + "client_allowed_sans:\n  - a\n  -\n"), 8, "an entry of client_allowed_sans takes text"
    ),
    "tls 1.0": Bad(server(CERT + "min_version: TLS10\n"), 4, "TLS10: TLS 1.0 and 1.1 are broken"),
    "tls 1.1": Bad(server(CERT + "min_version: TLS11\n"), 4, "TLS11: TLS 1.0 and 1.1 are broken"),
    "tls 1.1 at most": Bad(server(CERT + "max_version: TLS11\n"), 4, "max_version TLS11.*use TLS12 or TLS13"),
    "version unknown": Bad(server(CERT + "min_version: TLS111\n"), 4, "'TLS111' is unknown"),
    "versions crossed": Bad(server(CERT + "min_version: TLS13\nmax_version: TLS12\n"), 2, "leave no version"),
    "ciphers and version crossed": Bad(
        server(CERT + "max_version: TLS12\ncipher_suites: [TLS_AES_128_GCM_SHA256]\n"), 2, "leave no version"
    ),
    "cipher unknown": Bad(
        server(CERT + "cipher_suites:\n- TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\n- TLS_NEVER_HEARD_OF\n"), 6, "TLS_NEVER_HEARD_OF"
    ),
    "cipher insecure": Bad(server(CERT + "cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n"), 4, "unknown or insecure"),
    "cipher by its OpenSSL name": Bad(server(CERT + "cipher_suites: [ECDHE-RSA-AES128-GCM-SHA256]\n"), 4, "known are TLS_"),
    "ciphers are text": Bad(server(CERT + "cipher_suites: TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\n"), 4, "takes a list"),
    "preference is no switch": Bad(server(CERT + "prefer_server_cipher_suites: maybe\n"), 4, "takes true or false"),
    "curve unknown": Bad(
        server(CERT + "curve_preferences: [X25519, CurveP999]\n"), 4, "'CurveP999' is unknown; known are CurveP256"
    ),
    "http2 is a number": Bad("http_server_config: {http2: 1}\n", 1, "http2 takes true or false"),
    "http2 in quotes": Bad("http_server_config: {http2: 'true'}\n", 1, "without quotes"),
    "header unknown": Bad(http("X-Powered-By: us\n"), 3, "'X-Powered-By'"),
    "header in another case": Bad(http("x-frame-options: deny\n"), 3, "did you mean 'X-Frame-Options'"),
    "frame options": Bad(http("X-Frame-Options: allow-from a\n"), 3, "use deny or sameorigin"),
    "content type options": Bad(http("X-Content-Type-Options: sniff\n"), 3, "use nosniff"),
    "header of two lines": Bad(http('Content-Security-Policy: "a\\r\\nX: b"\n'), 3, "printable ASCII on one line"),
    "header with an umlaut": Bad(http("Content-Security-Policy: ä\n"), 3, "printable ASCII"),
    "password in plain text": Bad(users("alice: SECRET\n"), 2, "'alice' is no bcrypt hash.*htpasswd"),
    "hash too short": Bad(users(f"bob: {HASH}\nalice: {HASH[:-1]}\n"), 3, "'alice' is no bcrypt hash"),
    "hash missing": Bad(users("alice:\n"), 2, "'alice' is no bcrypt hash"),
    "hash of another kind": Bad(users(f"alice: $6$rounds=5000${SALT}\n"), 2, "no bcrypt hash"),
    "hash of version 2x": Bad(users(f"alice: {HASH.replace('2b', '2x')}\n"), 2, "no bcrypt hash"),
    "hash with a salt that no program made": Bad(users(f"alice: {HASH[:28]}z{REST}\n"), 2, "no bcrypt hash"),
    "cost too high": Bad(users(f"alice: $2y$15${SALT}{REST}\n"), 2, "the cost 15.*from 10 to 14"),
    "cost too low": Bad(users(f"alice: $2y$03${SALT}{REST}\n"), 2, "the cost 3"),
    "user with a colon": Bad(users(f"'a:b': {HASH}\n"), 2, "colon"),
    "users are a list": Bad(users("- alice\n"), 2, "takes keys with values"),
    "interval without unit": Bad(limit("interval: 5\nburst: 1\n"), 2, "'5' is no duration"),
    "interval negative": Bad(limit("interval: -1s\nburst: 1\n"), 2, "no duration"),
    "interval unknown": Bad(limit("interval: 1d\nburst: 1\n"), 2, "no duration"),
    "burst missing": Bad(limit("interval: 1s\n"), 2, "refuses every request"),
    "burst negative": Bad(limit("interval: 1s\nburst: -1\n"), 2, "refuses every request"),
    "burst is text": Bad(limit("interval: 1s\nburst: '2'\n"), 3, "burst takes a whole number"),
    "burst is a fraction": Bad(limit("interval: 1s\nburst: 2.5\n"), 3, "burst takes a whole number"),
    "burst without a digit": Bad(limit("interval: 1s\nburst: !!int '_'\n"), 3, "burst takes a whole number"),
    "burst in another base": Bad(limit("interval: 1s\nburst: 0x10\n"), 3, "burst takes a whole number"),
}
if not tls.SEVERAL_CURVES:
    BAD["several curves"] = Bad(server(CERT + "curve_preferences: [X25519, CurveP256]\n"), 4, "one curve or its default")


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the table's configurations name."""
    made = tmp_path_factory.mktemp("web")
    issued = authority().issue("dns:localhost")
    cert, _ = issued.write(made, "server")
    authority().issue().write(made, "other")
    (made / "ca.crt").write_text(authority().pem)
    (made / "bundle.crt").write_text(f"Behörde Nr. 1\n{authority().pem}\nund 2\n{authority('theirs').pem}", "utf-8")
    (made / "broken.crt").write_text(cert.read_text().replace("MII", "AAA"))
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


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_taken(directory: Path, name: str) -> None:
    """A good file is loaded."""
    load(directory, GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_line(directory: Path, name: str) -> None:
    """A bad file is a ValueError that names the file, the line and what to do, and shows no secret."""
    bad = BAD[name]
    with pytest.raises(ValueError, match=bad.says) as raised:
        load(directory, bad.text)
    said = str(raised.value)
    place = str(directory / "web.yml") + ("" if bad.line is None else f", line {bad.line}")
    assert re.match(re.escape(place) + r"\b", said)
    assert raised.value.__cause__ is None
    assert "SECRET" not in said
    assert HASH[10:20] not in said
    assert "\n" not in said


def test_a_broken_line_is_not_quoted(directory: Path) -> None:
    """Where a line with a hash is no YAML, the error, and what led to it, does not show it."""
    with pytest.raises(ValueError, match="line 2: not valid YAML") as raised:
        load(directory, users(f'"alice": {HASH}: x\n'))
    assert HASH[10:] not in str(raised.value)
    assert raised.value.__suppress_context__


# Where this differs from Prometheus on purpose. What it does with each was seen by promtool and in its source.
STRICTER = {
    "merge key": "it is a way to get a key twice",
    "two documents": "Prometheus reads the first",
    "cert twice": "Prometheus takes the file and ignores the text",
    "tls without certificate": "Prometheus then serves plain HTTP",
    "empty paths": "Prometheus then serves plain HTTP",
    "ca with request": "Prometheus asks for a certificate and verifies nothing",
    "type without ca": "Prometheus then trusts every authority of the operating system",
    "any client cert": "Python's ssl cannot ask for a certificate without verifying it",
    "any client cert, old name": "as above",
    "ca without certificates": "Prometheus then admits no client",
    "ca broken": "Prometheus leaves broken ones out",
    "inline ca is junk": "Prometheus then admits no client",
    "no sans": "Prometheus then admits no client",
    "tls 1.0": "broken",
    "tls 1.1": "broken",
    "tls 1.1 at most": "broken",
    "versions crossed": "Prometheus then admits no client",
    "ciphers and version crossed": "Prometheus then admits no client",
    "several curves": "Python's ssl cannot set several",
    "header of two lines": "Prometheus sends it as one line",
    "header with an umlaut": "no header has one",
    "hash with a salt that no program made": "bcrypt's Python package refuses it",
    "hash of version 2x": "its passwords are not the same in every program",
    "hash too short": "no password has it",
    "cost too high": "a check would take seconds of the training's time",
    "user with a colon": "no client could log in",
    "a null among sans": "it allows no name",
}
# What Debian's promtool is too old for: there is no rate limit in it, and it lets these two pass, which today's source does not.
NEWER = {name for name, text in {**GOOD, **{n: b.text for n, b in BAD.items()}}.items() if "rate_limit" in text}
NEWER |= {"sans without mutual", "sans with mutual if given"}


@pytest.mark.server
def test_promtool_has_the_same_verdict(directory: Path) -> None:
    """Prometheus' own check agrees on every file of the table but for the differences that are meant."""
    expected = dict.fromkeys(GOOD, True) | dict.fromkeys(BAD, False)
    texts = GOOD | {name: bad.text for name, bad in BAD.items()}
    verdicts = {name: promtool_takes(written(directory, texts[name])) for name in sorted(expected.keys() - NEWER)}
    differ = {name for name, verdict in verdicts.items() if verdict is not expected[name]}
    assert differ == STRICTER.keys() & expected.keys()


def promtool_takes(path: Path) -> bool:
    """What promtool says of a file."""
    done = subprocess.run([find("promtool"), "check", "web-config", path], capture_output=True, text=True, check=False)
    assert ("SUCCESS" in done.stderr) is (done.returncode == 0)
    return done.returncode == 0


# What the settings come to


def test_relative_paths_are_relative_to_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another working directory, and by a relative path of its own, the file finds its certificates."""
    path = written(directory, server(CERT))
    monkeypatch.chdir(directory.parent)
    found = WebConfigFile(os.path.relpath(path, directory.parent))
    monkeypatch.chdir("/")
    assert found.path == str(path)
    assert [*found._seen] == [str(path), str(directory / "server.crt"), str(directory / "server.key")]


def context_of(directory: Path, options: str) -> ssl.SSLContext:
    """The context of a TLS section with these options after the certificate."""
    made = load(directory, server(CERT + options)).current.tls
    assert made is not None
    return made.context


def test_versions(directory: Path) -> None:
    """By default TLS 1.2 and 1.3, else what the file says; a list of TLS 1.3 ciphers alone leaves 1.3, as in Go."""
    both = context_of(directory, "")
    assert (both.minimum_version, both.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    assert context_of(directory, "min_version: TLS13\n").minimum_version is ssl.TLSVersion.TLSv1_3
    assert context_of(directory, "max_version: TLS12\n").maximum_version is ssl.TLSVersion.TLSv1_2
    assert context_of(directory, "cipher_suites: [TLS_AES_128_GCM_SHA256]\n").minimum_version is ssl.TLSVersion.TLSv1_3


def test_ciphers_are_those_of_the_file_in_its_order(directory: Path) -> None:
    """Of TLS 1.2 exactly the named ones are on, and their order is the server's unless the file says otherwise."""
    names = "[TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]"
    context = context_of(directory, f"cipher_suites: {names}\n")
    older = [cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
    assert older == ["ECDHE-ECDSA-CHACHA20-POLY1305", "ECDHE-RSA-AES128-SHA"]
    assert context.options & ssl.OP_CIPHER_SERVER_PREFERENCE
    assert not context_of(directory, "prefer_server_cipher_suites: false\n").options & ssl.OP_CIPHER_SERVER_PREFERENCE


def test_every_cipher_of_go_is_known_to_openssl(directory: Path) -> None:
    """Each name that Go has for a suite of TLS 1.2 is a suite of this OpenSSL."""
    context = context_of(directory, f"cipher_suites: [{', '.join(tls.CIPHERS)}]\n")
    assert {cipher["name"] for cipher in context.get_ciphers()} >= set(tls.CIPHERS.values())
    assert len(set(tls.CIPHERS.values())) == 10


def test_what_authenticates_is_known(directory: Path) -> None:
    """A demanded certificate authenticates and so do users; TLS alone and an optional certificate do not."""
    optional = server(MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"))
    found = [load(directory, text) for text in ("", server(CERT), server(MUTUAL), optional, users(f"alice: {HASH}\n"))]
    assert [config.authenticates for config in found] == [False, False, True, False, True]


def test_headers_and_users(directory: Path) -> None:
    """Blank headers are left out, a number is text, and so is a user's name that looks like one."""
    text = http("X-XSS-Protection: 0\nContent-Security-Policy: ''\nX-Frame-Options: sameorigin\nX-Content-Type-Options: nosniff\n")
    settings = load(directory, text + users(f"0x10: {HASH}\n")).current
    assert settings.headers == (("X-XSS-Protection", "0"), ("X-Frame-Options", "sameorigin"))
    assert settings.users == {"0x10": HASH}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("+1m30s", 90), ("1h0.5m", 3630), ("250ms", 0.25), ("1.5us", 1.5e-6), ("2µs", 2e-6), ("3ns", 3e-9), (".5s", 0.5)],
)
def test_intervals_are_read_as_go_reads_them(directory: Path, text: str, seconds: float) -> None:
    """A duration with one unit or several is so many seconds."""
    found = load(directory, limit(f"interval: {text}\nburst: 7\n")).current.rate_limit
    assert found is not None
    assert found == RateLimit(pytest.approx(seconds), 7)


def test_secrets_are_in_no_repr(directory: Path) -> None:
    """Neither a key nor a hash shows where settings are printed."""
    text = server(f"cert_file: server.crt\nkey: {inline('server.key')}") + users(f"alice: {HASH}\n")
    shown = repr(load(directory, text).current)
    assert "PRIVATE" not in shown
    assert HASH not in shown


@pytest.mark.parametrize("name", ["web.yml", "."])
def test_a_missing_file_and_a_directory_are_named(tmp_path: Path, name: str) -> None:
    """What is no file is refused with its path and what to give."""
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as raised:
        WebConfigFile(str(tmp_path / name))
    assert "give the path of a web configuration" in str(raised.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name on this system")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe, which would be waited for, is refused at once."""
    os.mkfifo(tmp_path / "web.yml")
    with pytest.raises(ValueError, match="not a regular file"):
        WebConfigFile(str(tmp_path / "web.yml"))


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    """Latin-1 is refused with the line that shows it."""
    (tmp_path / "web.yml").write_bytes(b"# a\nbasic_auth_users:\n  j\xf6rg: x\n")
    with pytest.raises(ValueError, match="line 3: not UTF-8"):
        WebConfigFile(str(tmp_path / "web.yml"))


# The optional packages

ABSENT = """
import sys
import torch_grad_exporter
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.prometheus.text import Renderer
MetricsServer(list, Renderer({}), addr="127.0.0.1", ports=(0,), on_error=print, health=dict).close()
assert not {"yaml", "bcrypt"} & sys.modules.keys()
sys.modules[sys.argv[1]] = None
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
try:
    WebConfigFile("web.yml")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("package", ["yaml", "bcrypt"])
def test_the_packages_are_needed_for_a_web_configuration_only(package: str) -> None:
    """A server without one imports neither PyYAML nor bcrypt; with one and without them the error says what to install."""
    done = subprocess.run([sys.executable, "-c", ABSENT, package], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"web.yml: a web configuration needs the package {package}" in done.stdout
    assert "pip install 'torch-grad-exporter[web]'" in done.stdout
