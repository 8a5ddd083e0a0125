"""uvicorn's HTTP parser with a limit on the head of a request. Knows bytes on a connection; no routes.

httptools keeps a header however long it is; no limit of uvicorn applies to it.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequestError

MAX_HEAD_BYTES = 64 * 1024


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers do not end within `MAX_HEAD_BYTES` and one read."""

    _num_head_bytes = 0
    _is_in_head = True
    _has_ended_head = False

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        self._has_ended_head = False
        super().data_received(data)
        # A piece that holds the end of a head or of a body is not counted, whatever else it holds.
        if not was_in_head or self._has_ended_head:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._has_ended_head = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in OpenAI's shape."""
        body = InvalidRequestError(msg).body()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
