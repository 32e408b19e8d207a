"""Files of the web configuration that change while the server runs."""

from __future__ import annotations

import ssl

import pytest

from tests.outputs.http.support import ALICE, MUTUAL, RIGHT, TLS, Site, Training, basic, changing, fetch, hashed, tls_client
from tests.support.certificates import authority, client_context
from torch_grad_exporter.outputs.http.server import MetricsServer


def shown(server: MetricsServer) -> str:
    """Return the certificate that the server shows."""
    with tls_client(server) as client:
        return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"")


def test_a_replaced_certificate_is_shown(training: Training, site: Site) -> None:
    """A second after the last look the next client gets the new certificate, also one behind a link that points elsewhere."""
    other = site.directory / "other"
    other.mkdir()
    with changing(training, site, TLS) as server:
        old = shown(server)
        issued = authority().issue("ip:127.0.0.1")
        site.certificate(issued)
        training.now += 1
        assert shown(server) == issued.cert != old
        linked = authority().issue("ip:127.0.0.1")
        for path in linked.write(other, "server"):
            (site.directory / path.name).unlink()
            (site.directory / path.name).symlink_to(path)
        training.now += 1
        assert shown(server) == linked.cert
    assert training.errors == []


def test_a_changed_password_holds(training: Training, site: Site) -> None:
    """A changed password and a removed user are refused from the next client on, though remembered, and new ones pass."""
    bob, carol, changed = basic("bob", "sesame"), basic("carol", "new"), basic("alice", "changed")
    with changing(training, site, f"{ALICE}  bob: {hashed('sesame')}\n") as server:
        assert [fetch(server, Authorization=user).status for user in (RIGHT, bob)] == [200, 200]
        site.path.write_text(f"basic_auth_users:\n  alice: {hashed('changed')}\n  carol: {hashed('new')}\n")
        training.now += 1
        users = (RIGHT, bob, changed, carol)
        assert [fetch(server, Authorization=user).status for user in users] == [401, 401, 200, 200]
    assert training.errors == []


def test_a_changed_ca_and_changed_names_hold(training: Training, site: Site) -> None:
    """Clients of a new CA are let in and those of the old one are not; then names are demanded."""
    ours, theirs = (client_context(shows=site.client(by=by)) for by in (authority(), authority("theirs")))
    with changing(training, site, MUTUAL) as server:
        assert fetch(server, tls=ours).status == 200
        (site.directory / "ca.crt").write_text(authority("theirs").pem)
        training.now += 1
        assert fetch(server, tls=theirs).status == 200
        with pytest.raises(OSError, match=r".+"):
            fetch(server, tls=ours)
        site.path.write_text(MUTUAL + "  client_allowed_sans: [a]\n")
        training.now += 1
        assert fetch(server, tls=theirs).status == 403


def test_a_broken_change_is_reported_once(training: Training, site: Site) -> None:
    """With a broken file the server keeps what it had and reports each change once; a good one is taken again."""

    def errors() -> list[str]:
        training.now += 1
        assert fetch(server, Authorization=RIGHT).status == 200
        return [f"{source}: {error}" for source, error in training.errors]

    with changing(training, site, TLS + ALICE) as server:
        site.path.write_text(TLS + ALICE + "oops: 1\n")
        (only,) = errors()
        assert only.startswith(f"web_config: {site.path}")
        assert "oops" in only
        assert len(errors()) == 1
        (site.directory / "server.key").write_text("junk")
        assert len(errors()) == 2  # the configuration is still the broken one, but this is another change
        site.path.write_text(TLS + ALICE)
        assert "key_file" in errors()[2]
        renewed = authority().issue("ip:127.0.0.1")
        site.certificate(renewed)
        assert len(errors()) == 3
        assert shown(server) == renewed.cert


def test_no_change_takes_protection_away(training: Training, site: Site) -> None:
    """A weaker file, such as one cut off while it is written, opens nothing, and each is reported."""
    protected = MUTUAL + "  client_allowed_sans: [a]\n" + ALICE
    known, stranger = (client_context(shows=site.client(name)) for name in ("dns:a", "dns:b"))
    weaker = ["", MUTUAL + "  client_allowed_sans: [a]\n", MUTUAL + ALICE, TLS + ALICE]
    with changing(training, site, protected) as server:
        for text in weaker:
            site.path.write_text(text)
            training.now += 1000
            assert fetch(server, tls=known).status == 401
            assert fetch(server, tls=known, Authorization=RIGHT).status == 200
            assert fetch(server, tls=stranger).status == 403
            with pytest.raises(OSError, match=r".+"):
                fetch(server)
    assert [source for source, _ in training.errors] == ["web_config"] * len(weaker)


def test_tls_is_not_turned_on_while_running(training: Training, site: Site) -> None:
    """A server of plain HTTP stays one, since its address is known as http; other changes of the same file wait with it."""
    with changing(training, site, "") as server:
        site.path.write_text(TLS + ALICE)
        training.now += 1
        assert fetch(server).status == 200
        site.path.write_text(ALICE)
        training.now += 1
        assert fetch(server).status == 401
    assert len(training.errors) == 1
