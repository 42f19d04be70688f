"""Server-sent events out of a byte stream that is cut anywhere: the payload of each event, nothing else."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Gathers bytes and gives back the data of every event that is complete (HTML Living Standard, 9.2.6).

    Lines end with LF, CR or CRLF; an event's `data` lines are joined by LF; comments and other fields are passed over;
    an event without data is none. Works on bytes, so that a character cut in two by the network is no matter.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that this chunk completes, in order."""
        if not self._rest and not self._data and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"):
            payloads = chunk[6:-2].split(b"\n\ndata: ")
            if not any(b"\n" in payload or b"\r" in payload for payload in payloads):
                self._started = True
                return payloads  # whole events of one line each, as servers send them
        return self._slowly(chunk)

    def finish(self) -> list[bytes]:
        """The event that the end of the stream left without its blank line, which some servers forget."""
        return self._slowly(b"\n\n") if self._rest or self._data else []

    def _slowly(self, chunk: bytes) -> list[bytes]:
        text = self._rest + chunk
        if not self._started and text:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            text, self._started = text.removeprefix(b"\xef\xbb\xbf"), True
        held = b""
        if text.endswith(b"\r"):  # the LF of a CRLF may come with the next chunk
            text, held = text[:-1], b"\r"
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        payloads = []
        for line in lines:
            if not line:
                if self._data:
                    payloads.append(b"\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return payloads
