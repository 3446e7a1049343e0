"""The Python API. `import lmkit` gives its public names."""

from lmkit.api.generation import GenerationConfig
from lmkit.api.in_process import Pipeline, pipeline
from lmkit.api.response import Response, Session

__all__ = ["GenerationConfig", "Pipeline", "Response", "Session", "pipeline"]
