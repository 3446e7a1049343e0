"""The Python API. `import lmkit` gives its public names."""

from lmkit.api.generation import GenerationConfig
from lmkit.api.pipeline import Pipeline, pipeline
from lmkit.api.response import Response, Session

__all__ = ["GenerationConfig", "Pipeline", "Response", "Session", "pipeline"]
