import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests are marked `anyio` and run on asyncio. The pytest plugin of anyio comes with httpx."""
    return "asyncio"
