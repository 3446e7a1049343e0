"""HTTP clients of a server that a user names."""

from __future__ import annotations

from typing import Any

from lmkit.errors import ConfigError


def client_options(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Arguments of httpx's clients for the server at `url`, with or without /v1. `timeout` is in seconds.

    Raises ConfigError if it is no URL.
    """
    import httpx

    from lmkit.web.tls import trusting

    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"{url!r} is not a URL: write http://HOST:PORT")
    return {
        "base_url": base,
        "headers": {"authorization": f"Bearer {api_key}"} if api_key else {},
        "timeout": httpx.Timeout(timeout, connect=5),
        "trust_env": False,
        "verify": trusting(httpx.create_ssl_context(trust_env=False)),
    }
