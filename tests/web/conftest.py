import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests are marked `anyio` (whose pytest plugin comes with httpx) and run on asyncio."""
    return "asyncio"
