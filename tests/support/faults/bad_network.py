"""What lies between a client and the server, and fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests


@contextmanager
def network_that_loses_answers(url: str, path: str) -> Iterator[str]:
    """A way to `url` on which every request arrives, and the answers of `path` do not."""

    class Way(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand_on(requests.get(url + self.path, timeout=60))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {"Content-Type": "application/json"}
            answer = requests.post(url + self.path, data=body, headers=headers, timeout=60)
            if self.path == path:
                self.close_connection = True
            else:
                self._hand_on(answer)

        def _hand_on(self, answer: requests.Response) -> None:
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Way) as way:
        thread = threading.Thread(target=way.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{way.server_address[1]}"
        finally:
            way.shutdown()
            thread.join()
