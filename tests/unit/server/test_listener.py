import socket

import pytest

from server.listener import ListenError, base_url, listen


def test_port_0_is_one_free_port_for_all_addresses() -> None:
    listeners = listen("localhost", 0)
    try:
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 1
        with socket.create_connection(("127.0.0.1", ports.pop()), timeout=5):
            pass
    finally:
        for listener in listeners:
            listener.close()


def test_taken_port_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^port {port} is in use on 127\.0\.0\.1; choose another with --port$"):
            listen("127.0.0.1", port)


def test_taken_port_of_another_flag_is_named_with_that_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError, match=r"with --metrics-port$"):
        listen("127.0.0.1", taken.getsockname()[1], knob="--metrics-port")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 80, "a..b"])
def test_host_that_cannot_be_resolved_is_named(host: str) -> None:
    with pytest.raises(ListenError, match=f"^--host '{host}' cannot be resolved: .") as caught:
        listen(host, 0)
    assert "\n" not in str(caught.value)


def test_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1, port 0"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
        ("fd00::1", "http://[fd00::1]:80/"),
        ("box.example", "http://box.example:80/"),
    ],
)
def test_url_can_be_opened(host: str, url: str) -> None:
    assert base_url(host, 80) == url
