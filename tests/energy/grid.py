"""A server on loopback with the documented shapes of the three services, and with faults."""

import base64
import contextlib
import json
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

HOUR = 3600


def iso(when):
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


class Grid:
    """What the server says; tests change it while it runs."""

    def __init__(self, now):
        self.times = [int(now) - HOUR + n * HOUR for n in range(8)]
        self.shares = [30.0, 40.5, None, 104.2, 95.0, 60.0, 20.0, 10.0]
        self.lights = [0, 1, None, 2, 2, 1, 0, -1]
        self.grams = [400, 380, 300, 90, 100, 250, 410, 450]
        self.fault = None
        self.asked = []
        self.headers = []

    def answer(self, path, query, headers):
        self.asked.append((path, query))
        self.headers.append(headers)
        if self.fault is not None:
            return self.fault
        if path == "/signal":
            if query["country"] != "de":
                detail = [{"loc": ["query", "country"], "msg": "unknown country", "type": "value"}]
                return 422, {"detail": detail}
            return 200, {
                "unix_seconds": self.times,
                "share": self.shares,
                "signal": self.lights,
                "substitute": False,
                "deprecated": False,
            }
        if path == "/ren_share_forecast":
            return 200, {
                "unix_seconds": self.times,
                "ren_share": [50.0] * 8,
                "solar_share": None,
                "substitute": True,
                "deprecated": False,
            }
        if path == "/public_power":
            return 200, {
                "unix_seconds": self.times,
                "production_types": [
                    {"name": "Solar", "data": [1000.0] * 8},
                    {"name": "Renewable share of load", "data": self.shares},
                ],
                "deprecated": False,
            }
        if path.startswith("/v3/carbon-intensity/"):
            if headers.get("auth-token") != "secret":
                return 401, {"error": "Invalid auth-token"}
            points = [
                {"carbonIntensity": g, "datetime": iso(t)}
                for t, g in zip(self.times, self.grams, strict=True)
            ]
            if path.endswith("past-range"):
                return 200, {"zone": query["zone"], "data": points}
            if path.endswith("latest"):
                return 200, {"zone": query["zone"], **points[1], "isEstimated": False}
            return 200, {"zone": query["zone"], "forecast": points[2:]}
        if path == "/login":
            right = "Basic " + base64.b64encode(b"me:pw").decode()
            good = headers.get("authorization") == right
            return (200, {"token": "t0k"}) if good else (403, {"error": "no"})
        if path in {"/v3/forecast", "/v3/historical"}:
            if headers.get("authorization") != "Bearer t0k":
                return 401, {"error": "no"}
            data = [
                {"point_time": iso(t), "value": g / 0.45359237}
                for t, g in zip(self.times, self.grams, strict=True)
            ]
            return 200, {"data": data, "meta": {"units": "lbs_co2_per_mwh"}}
        return 404, {}


@contextlib.contextmanager
def serving(grid):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            found = grid.answer(parts.path, query, {k.lower(): v for k, v in self.headers.items()})
            if found == "hang":
                time.sleep(1)
                return
            status, body, *extra = found
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (extra[0] if extra else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
