"""`lmkit serve` behind Ray Serve: `serve run ray_serve:app`. It needs `pip install lmkit 'ray[serve]'`.

Each replica runs a server as a child process and passes requests on to it, streams included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

MODEL, CORES = os.environ.get("LMKIT_MODEL", "demo"), int(os.environ.get("LMKIT_CORES", "1"))
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8},
    ray_actor_options={"num_cpus": CORES},
    max_ongoing_requests=64,
    health_check_period_s=5,
    graceful_shutdown_timeout_s=60,
)
class Server:
    """One `lmkit serve`. It ends with its replica."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "lmkit.cluster.child", str(os.getpid()), "serve", MODEL, "--port", "0"]
        environment = os.environ | {"LMKIT_NUM_THREADS": str(CORES)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("serving ")), "")
        if (found := re.search(r"on (http://\S+)", line)) is None:
            raise RuntimeError("lmkit serve did not start; its lines above say why")
        self.http = httpx.AsyncClient(base_url=found[1], timeout=600)

    async def check_health(self) -> None:
        (await self.http.get("/health", timeout=4)).raise_for_status()

    async def __call__(self, request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = self.http.build_request(request.method, path, headers=headers, content=await request.body())
        answer = await self.http.send(asked, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept)

    def __del__(self) -> None:
        self.process.terminate()


app = Server.bind()
