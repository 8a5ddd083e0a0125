"""Opens the sockets that the server listens on, before anything costly is started. Knows addresses, no HTTP."""

import errno
import socket


class ListenError(Exception):
    """The address cannot be listened on; the message is for the operator."""


def listen(host: str, port: int, *, knob: str = "--port") -> list[socket.socket]:
    """Listening sockets, one for each address that `host` stands for (`localhost`: IPv4 and IPv6); all on one port,
    which `port` 0 leaves to the system. `knob` is the flag that names the port, for messages.

    Raises:
        ListenError: the port is taken or forbidden, or the host has no address here; nothing stays open.
    """
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # the latter of names that can be none
        raise ListenError(f"--host {host!r} cannot be resolved: {_reason(error)}") from error
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                listeners.append(socket.create_server((address[0], port, *address[2:]), family=family))
            except OSError as error:
                # A family without an address on this machine counts only if it is the only one.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(found) == 1:
                    raise
                continue
            port = listeners[0].getsockname()[1]
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "no such address here")
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} is in use on {host}; choose another with {knob}") from error
        raise ListenError(f"cannot listen on {host}, port {port}: {_reason(error)}") from error
    return listeners


def _reason(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def base_url(host: str, port: int) -> str:
    """What a browser on this machine opens, e.g. `http://127.0.0.1:8000/`."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"
