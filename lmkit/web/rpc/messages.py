"""The messages of generation.proto, from its compiled form. `compile_proto` in tests/serve/test_grpc.py makes it.

Descriptors are read when they are needed. Therefore no generated code has to fit the version of protobuf.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTO, COMPILED = "generation.proto", "generation.binpb"
SERVICE = "lmkit.v1.Generation"


def _messages() -> dict[str, Any]:
    raw = resources.files(__package__).joinpath(COMPILED).read_bytes()
    pool = descriptor_pool.DescriptorPool()
    names = []
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.Add(file)
        names += [f"{file.package}.{message.name}" for message in file.message_type]
    found = [pool.FindMessageTypeByName(name) for name in names]
    return {descriptor.name: message_factory.GetMessageClass(descriptor) for descriptor in found}


_CLASSES = _messages()
GenerateRequest, GenerateResponse = _CLASSES["GenerateRequest"], _CLASSES["GenerateResponse"]
Answer, Position, Token = _CLASSES["Answer"], _CLASSES["Position"], _CLASSES["Token"]
