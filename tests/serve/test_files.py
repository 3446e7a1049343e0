"""/v1/files: uploads are streamed to the disk, bounded, and their client's alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from lmkit.config import ServerConfig
from lmkit.serve.batches.files import FILE_SECONDS, Files
from lmkit.web.data_folder import DataFolder
from tests.serve.in_process import App, ScriptedEngine
from tests.serve.live import Server

CONTENT = b'{"a": 1}\n'
FORM = {"purpose": "batch"}
PART = b"--b\r\nContent-Disposition: form-data; %s\r\n\r\n"


def app(folder: Path | None = None, **config: Any) -> App:
    if folder is not None:
        folder.chmod(0o700)
    return App(ScriptedEngine(), ServerConfig(data_dir=None if folder is None else str(folder), **config))


def upload(
    where: App, content: bytes = CONTENT, form: dict[str, str] = FORM, key: str | None = None, **headers: str
) -> httpx.Response:
    if key:
        headers["authorization"] = f"Bearer {key}"
    return where.request("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data=form, headers=headers)


def refused(answer: httpx.Response, status: int, param: str | None, says: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert says in error["message"]


def test_the_openai_client(client: openai.OpenAI) -> None:
    sent = client.files.create(
        file=("ä b.jsonl", CONTENT), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (sent.filename, sent.bytes, sent.purpose, sent.status) == ("ä b.jsonl", len(CONTENT), "batch", "processed")
    assert sent.expires_at == sent.created_at + 3600
    other = client.files.create(file=("b", b""), purpose="batch")
    assert other.expires_at == other.created_at + FILE_SECONDS
    assert client.files.retrieve(sent.id) == sent
    assert client.files.content(sent.id).read() == CONTENT
    listed = [file.id for file in client.files.list(limit=1)]  # in pages
    assert listed.index(sent.id) > listed.index(other.id)  # the newest first
    assert sent.id not in [file.id for file in client.files.list(purpose="batch_output")]
    assert client.files.delete(sent.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(sent.id)
    client.files.delete(other.id)


def test_a_large_file_is_not_held_in_memory(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    answer = server.post("/v1/files", files={"file": ("big", os.urandom(64 << 20))}, data=FORM)
    assert answer.status_code == 200
    assert process.memory_info().rss - before < 32 << 20
    assert server._client.delete(f"{server.url}/v1/files/{answer.json()['id']}").status_code == 200


def test_a_file_is_its_client_s_alone_and_no_path() -> None:
    where = app(api_keys=("one", "two"))
    file = upload(where, key="one").json()["id"]
    as_one, as_two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content"):
        assert where.request("GET", path, **as_one).status_code == 200
        assert where.request("GET", path, **as_two).status_code == 404
    assert where.request("DELETE", f"/v1/files/{file}", **as_two).status_code == 404
    assert where.request("GET", "/v1/files", **as_two).json()["data"] == []
    assert where.request("GET", f"/v1/files/{file}").status_code == 401
    for name in (f"{file}.json", "..%2Ffiles%2F" + file, "."):
        assert where.request("GET", f"/v1/files/{name}/content", **as_one).status_code == 404


@pytest.mark.parametrize(
    ("form", "param", "says"),
    [
        ({}, "purpose", "is missing"),
        ({"purpose": "fine-tune"}, "purpose", "'fine-tune' is not supported"),
        ({**FORM, "wibble": "1"}, "wibble", "unknown field"),
        ({**FORM, "purpose2": "x" * 2000}, "purpose2", "more than 1024 bytes"),
        ({**FORM, "expires_after[anchor]": "created_at"}, "expires_after", "seconds from 3600"),
        ({**FORM, "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after", "anchor"),
        ({**FORM, "expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after", "3600"),
    ],
)
def test_a_field_is_honoured_or_refused(form: dict[str, str], param: str, says: str, tmp_path: Path) -> None:
    where = app(tmp_path)
    refused(upload(where, form=form), 400, param, says)
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"x", "multipart/form-data; boundary=b", "not multipart"),
        (b"{}", "application/json", "Content-Type: multipart/form-data"),
        (b"x", "multipart/form-data", "with a boundary"),
        (PART % b'name="file"; filename="f"' + b"half", "multipart/form-data; boundary=b", "cut off"),
        (PART % b'name="purpose"' + b"batch\r\n--b--\r\n", "multipart/form-data; boundary=b", "send a file"),
        (b"--b\r\n" + b"X: y\r\n" * 100 + b"\r\n\r\n--b--\r\n", "multipart/form-data; boundary=b", "not multipart"),
    ],
)  # fmt: skip
def test_a_broken_form_is_refused(body: bytes, kind: str, says: str, tmp_path: Path) -> None:
    answer = app(tmp_path).request("POST", "/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert not list((tmp_path / "files").iterdir())


def test_a_file_twice_is_refused() -> None:
    files = [("file", ("a", b"1")), ("file", ("b", b"2"))]
    refused(app().request("POST", "/v1/files", files=files, data=FORM), 400, "file", "twice")


@pytest.mark.parametrize("size", [1001, 100_000])
def test_a_file_may_have_max_file_bytes(size: int, tmp_path: Path) -> None:
    where = app(tmp_path, max_file_bytes=1000)
    refused(upload(where, b"x" * size), 413, "file", "larger than 1000 bytes")
    assert not list((tmp_path / "files").iterdir())
    assert upload(where, b"x" * 1000).status_code == 200


def test_the_space_is_bounded_and_comes_back(tmp_path: Path) -> None:
    where = app(tmp_path, file_space=2500)
    first = upload(where, b"x" * 1000).json()["id"]
    assert upload(where, b"x" * 1000).status_code == 200
    refused(upload(where, b"x" * 1000), 413, "file", "space for files is used up")
    assert where.request("DELETE", f"/v1/files/{first}").status_code == 200
    assert upload(where, b"x" * 1000).status_code == 200


def test_the_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.serve.batches.files.MAX_FILES", 2)
    where = app()
    assert [upload(where).status_code for _ in range(3)] == [200, 200, 413]


def test_a_page_of_another_site_cannot_upload() -> None:
    where = app(cors_origins=("https://ours.example",))
    refused(upload(where, origin="https://evil.example"), 403, None, "this origin")
    assert upload(where, origin="https://ours.example").status_code == 200
    assert upload(where, origin="http://localhost").status_code == 200  # the server's own page


def test_files_last_and_leftovers_go(tmp_path: Path) -> None:
    first = app(tmp_path)
    file = upload(first).json()
    first.app.state.data.close()
    (tmp_path / "files" / "file-00000000000000000000000000000000").write_bytes(b"half of an upload")
    again = app(tmp_path)
    assert again.request("GET", f"/v1/files/{file['id']}").json() == file
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file["id"], f"{file['id']}.json"}


def test_a_file_goes_when_its_time_is_over(tmp_path: Path) -> None:
    now = 1000.0
    data = DataFolder(None)
    used: set[str] = set()
    files = Files(data, 1 << 20, 1.0, lambda: now, is_used=used.__contains__)
    for name in ("file-1", "file-2"):
        files.path(name).write_bytes(CONTENT)
        files.add(files.make(name, "me", "batch", "in.jsonl", 60))
    used.add("file-2")
    now = 1060.0
    assert [file.id for file in files.of("me")] == ["file-2"]  # a batch reads it
    assert not files.path("file-1").exists()
    used.clear()
    assert files.of("me") == []
    data.close()


@pytest.mark.parametrize("query", ["wibble=1", "limit=0", "limit=x", "order=up", "limit=1&limit=2"])
def test_a_query_is_honoured_or_refused(query: str) -> None:
    answer = app().request("GET", f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_page_after_a_file_that_is_not_there() -> None:
    answer = app().request("GET", "/v1/files?after=file-1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")
