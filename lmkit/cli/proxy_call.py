"""Requests of the commands to the admin API of a running proxy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lmkit.errors import LMKitError

DEFAULT_PROXY = "http://127.0.0.1:8080"
ProxyOption = Annotated[str, typer.Option("--proxy", help="Address of the running proxy.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        help="One of its admin_keys; default the one that a proxy of yours here has made, else LMKIT_API_KEY."
    ),
]


def call(method: str, proxy: str, admin_key: str | None, path: str = "/admin/nodes", **arguments: Any) -> Any:
    """One admin request. Raises LMKitError if the proxy cannot be reached or refuses the request."""
    import httpx

    from lmkit.environment import environment
    from lmkit.web.running import admin_key_at
    from lmkit.web.tls import trusting

    key = admin_key or admin_key_at(proxy) or environment().api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.request(
            method,
            proxy.rstrip("/") + path,
            headers=headers,
            timeout=15,
            trust_env=False,
            verify=trusting(httpx.create_ssl_context(trust_env=False)),
            **arguments,
        )
        is_table = response.headers.get("content-type", "").startswith("text/csv")
        answer: Any = response.text if is_table else response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LMKitError(f"no proxy answers at {proxy}: {error or type(error).__name__}") from None
    except (ValueError, UnicodeError):
        raise LMKitError(f"{proxy} answered {response.status_code}, and not as a proxy does") from None
    if not response.is_success:
        message = (
            answer["error"]["message"] if isinstance(answer.get("error"), dict) else f"HTTP {response.status_code}"
        )
        raise LMKitError(f"{proxy}: {message}")
    return answer
