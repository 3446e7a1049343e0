"""Paths of requests: those after a root path or without /v1, and what a 404 says.

A 404 names a route of other servers as not supported. A slip gets the route that it resembles.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.other_names import hint

MAX_PATH_CHARS = 256  # of a path that is compared with the routes

# Routes of OpenAI, vLLM, SGLang, LMDeploy, TGI, TensorRT-LLM, llama.cpp, Ollama, Anthropic and Cohere. An entry also
# stands for the paths below it.
_OTHERS = frozenset({
    "/v1/assistants", "/v1/audio/speech", "/v1/audio/voices", "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render", "/v1/containers", "/v1/decisions", "/v1/edits",
    "/v1/evals", "/v1/fine-tunes", "/v1/fine_tuning", "/v1/images", "/v1/messages/batches", "/v1/moderations",
    "/v1/organization", "/v1/realtime", "/v1/responses/compact", "/v1/skills", "/v1/systemone",
    "/v1/threads", "/v1/uploads",
    "/v1/vector_stores", "/v1/videos", "/v1/loads",
    "/v2/chat", "/v2/embed", "/anthropic", "/abort_request",
    "/abort_requests", "/collective_rpc", "/continue_generation", "/distserve", "/encode",
    "/flush_cache", "/generate_stream", "/get_load", "/get_model_info", "/get_ppl", "/get_server_info",
    "/get_weights_by_name", "/health_generate", "/inference", "/init_weights_update_group",
    "/kv_cache_events", "/load_lora_adapter", "/model_info", "/pause", "/pause_generation",
    "/perf_metrics", "/pooling", "/ready", "/readyz", "/release_memory_occupation",
    "/reset_prefix_cache", "/resume", "/resume_memory_occupation", "/server_info",
    "/start_profile", "/stop_profile", "/terminate", "/update_weights",
    "/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor",
    "/wakeup", "/chat_tokenize", "/info", "/prometheus", "/embedding",
    "/lora-adapters", "/reranking", "/docs", "/redoc", "/nodes",
    "/api/blobs", "/api/copy", "/api/create", "/api/delete", "/api/me", "/api/push", "/api/signout",
    "/api/web_fetch", "/api/web_search",
})  # fmt: skip


# Paths that llama.cpp's server has without /v1, too. A client that has the server's bare address as its base URL asks
# for them.
_SHORT = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")


class WithV1:
    """Outermost middleware: it takes `root` from the front of a path, and adds /v1 where such a path lacks it.

    All that stands behind it, such as the check of keys, sees only the new path. A path without `root` stays.
    """

    def __init__(self, app: ASGIApp, root: str = "") -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
            if self._root and f"{path}/".startswith(f"{self._root}/") and raw.startswith(self._root.encode()):
                path, raw = path.removeprefix(self._root) or "/", raw[len(self._root) :] or b"/"
            if any(f"{path}/".startswith(f"{short}/") for short in _SHORT):
                path, raw = "/v1" + path, b"/v1" + raw
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": raw}
        await self._app(scope, receive, send)


def not_found(path: str, routes: Iterable[str]) -> RequestError:
    """The error for a path that no route has. `routes` are written as `GET /health`."""
    ours = list(routes)
    path = path[:MAX_PATH_CHARS]
    if known := is_known_elsewhere(path):
        return RequestError("not_found", f"{known} is not supported by this server, which has {', '.join(ours)}")
    paths = [route.partition(" ")[2] for route in ours]
    return RequestError("not_found", f"there is no such route{hint(path, paths)}")


def is_known_elsewhere(path: str) -> str:
    """The entry that covers the path, or an empty text."""
    parts = path.split("/")
    return next((start for end in range(2, 5) if (start := "/".join(parts[:end])) in _OTHERS), "")
