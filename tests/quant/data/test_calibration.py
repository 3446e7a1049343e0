"""Calibration data: every source gives rows of tokens, the same each time, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from lmkit.errors import CheckpointError, ConfigError
from lmkit.quant.data import calibration as calib
from lmkit.quant.data import sources
from lmkit.quant.data.calibration import encode_dataset, load_calibration, parse_source
from lmkit.quant.data.sources import load_presets
from lmkit.quant.sections import CalibrationRecipe, DatasetRecipe
from lmkit.text import ChatTemplate, Tokenizer

TEXT = "".join(f"def function_{i}(value):\n    return value + {i}\n\n" for i in range(200))
CHAT = [{"role": "user", "content": "Add one."}, {"role": "assistant", "content": "value + 1"}]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model)


def ask(dataset: str | tuple[str, ...] | Path, **options: Any) -> CalibrationRecipe:
    name = str(dataset) if isinstance(dataset, Path) else dataset
    return CalibrationRecipe(**{"dataset": name, "num_samples": 4, "seq_len": 32} | options)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_text_file_gives_consecutive_tokens_of_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "code.txt"
    file.write_text(TEXT)
    data = load_calibration(ask(file, num_samples=2, seq_len=400), tokenizer)
    assert data.rows.shape == (2, 400)
    assert data.rows.dtype == torch.int64
    # One piece of 6,400 characters is enough for 400 tokens, so the rows continue each other inside the text.
    assert tokenizer.decode(data.rows.flatten().tolist()) in TEXT


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["text", "messages"])
def test_rows_of_text_and_of_messages(tmp_path: Path, tokenizer: Tokenizer, suffix: str, kind: str) -> None:
    value: Any = TEXT if kind == "text" else CHAT
    file = write_rows(tmp_path / f"rows{suffix}", [{"id": i, kind: value} for i in range(20)])
    decoded = tokenizer.decode(
        load_calibration(ask(file), tokenizer).rows.flatten().tolist(), skip_special_tokens=False
    )
    if kind == "messages":
        assert "<|im_start|>user\nAdd one.<|im_end|>\n<|im_start|>assistant\nvalue + 1<|im_end|>" in decoded
    else:
        assert decoded in TEXT


def test_folder_and_list_of_sources(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("alpha " * 300)
    write_rows(tmp_path / "sub" / "b.jsonl", [{"text": "beta " * 300}])
    (tmp_path / "ignored.csv").write_text("gamma")
    recipe = ask(tmp_path, num_samples=10)
    everything = tokenizer.decode(load_calibration(recipe, tokenizer).rows.flatten().tolist())
    assert "alpha" in everything
    assert "beta" in everything
    both = load_calibration(ask((str(tmp_path / "a.txt"), str(tmp_path / "sub")), num_samples=10), tokenizer)
    assert torch.equal(both.rows, load_calibration(recipe, tokenizer).rows)


def test_the_same_seed_gives_the_same_rows_and_hash(tokenizer: Tokenizer) -> None:
    first, second = (load_calibration(ask("demo"), tokenizer) for _ in range(2))
    other = load_calibration(ask("demo", seed=1), tokenizer)
    assert torch.equal(first.rows, second.rows)
    assert first.sha256 == second.sha256
    assert not torch.equal(first.rows, other.rows)
    assert first.sha256 != other.sha256


def test_the_demo_preset_has_text_and_conversations_for_the_default_recipe(tokenizer: Tokenizer) -> None:
    data = load_calibration(CalibrationRecipe(), tokenizer)
    start = tokenizer.backend.token_to_id("<|im_start|>")
    assert 0.02 < float((data.rows == start).any(1).float().mean()) < 0.9


def test_every_local_preset_is_small_and_whole() -> None:
    folder = sources.PRESETS.parent
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    for name, preset in load_presets().items():
        assert (preset.file is None) != (preset.path is None), name
        if preset.file is not None:
            assert preset.licence, name
            assert any(document for document in sources.documents(name))


def test_weights_share_the_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 4000)
    entries = ({"source": str(tmp_path / "alpha.txt"), "weight": 3}, str(tmp_path / "beta.txt"))
    recipe = CalibrationRecipe(
        dataset=tuple(DatasetRecipe(**e) if isinstance(e, dict) else e for e in entries), num_samples=10, seq_len=32
    )
    data = load_calibration(recipe, tokenizer)
    kinds = ["alpha" in tokenizer.decode(row.tolist()) for row in data.rows]
    assert sum(kinds) == 8  # of 7.5 and 2.5, the first of equal remainders is rounded up
    assert kinds not in ([True] * 8 + [False] * 2, [False] * 2 + [True] * 8)
    assert [(source.weight, source.samples) for source in data.sources] == [(3, 8), (1, 2)]
    again = load_calibration(recipe, tokenizer)
    assert (again.sha256, again.sources) == (data.sha256, data.sources)
    report = data.report()
    assert report["sources"][1]["source"] == str(tmp_path / "beta.txt")
    assert report["sha256"] == data.sha256


def test_a_weight_too_small_for_a_row_is_refused(tokenizer: Tokenizer) -> None:
    dataset = (DatasetRecipe("demo-text", 1), DatasetRecipe("demo-code", 0.01))
    with pytest.raises(ConfigError, match=r"demo-code: a weight of 0\.01 among 1\.01 is less than one of 4 samples"):
        load_calibration(CalibrationRecipe(dataset=dataset, num_samples=4, seq_len=32), tokenizer)


def test_weights_on_the_command_line(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1").mkdir()
    assert parse_source("demo") == "demo"
    assert parse_source("demo:0.5") == {"source": "demo", "weight": 0.5}
    assert parse_source("hub:org/name@train:2") == {"source": "hub:org/name@train", "weight": 2.0}
    assert parse_source("hub:org/name") == "hub:org/name"
    assert parse_source("a:1") == "a:1"
    with pytest.raises(ConfigError, match="the weight of demo must be a number, not 'half'"):
        load_calibration(ask("demo:half"), tokenizer)


def test_empty_and_short_rows_are_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": TEXT}, {"text": " \n"}, {"text": "short"}, {"text": ""}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level("WARNING", "lmkit"):
        (source,) = load_calibration(ask(file), tokenizer).sources
    assert (source.documents, source.empty, source.short) == (4, 2, 1)
    assert "2 of 4 rows hold no text and are left out, the first: row 2" in caplog.text
    changed = write_rows(tmp_path / "changed.jsonl", [{"text": TEXT + " "}, *rows[1:]])
    assert load_calibration(ask(changed), tokenizer).sources[0].sha256 != source.sha256
    with pytest.raises(ConfigError, match=r"blank\.jsonl: none of 2 rows holds a text"):
        load_calibration(ask(write_rows(tmp_path / "blank.jsonl", rows[1::2])), tokenizer)


def test_a_saved_dataset_and_its_splits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = datasets.Dataset.from_list([{"text": TEXT}] * 3)
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "dict")
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(tmp_path / "splits")
    plain = load_calibration(ask(tmp_path / "rows"), tokenizer)
    assert plain.sources[0].documents == 3
    assert torch.equal(load_calibration(ask(tmp_path / "dict"), tokenizer).rows, plain.rows)
    assert torch.equal(load_calibration(ask(tmp_path / "splits" / "b"), tokenizer).rows, plain.rows)
    with pytest.raises(ConfigError, match="no split `train` among a, b"):
        load_calibration(ask(tmp_path / "splits"), tokenizer)
    (tmp_path / "rows" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="rows: not a readable dataset"):
        load_calibration(ask(tmp_path / "rows"), tokenizer)


def test_a_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\n\xe9\n")
    with pytest.raises(CheckpointError, match=r"latin\.txt:3: not UTF-8 text"):
        load_calibration(ask(tmp_path / "latin.txt"), tokenizer)


def test_a_dataset_as_a_text_to_evaluate_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "code.txt").write_text(TEXT)
    ids = encode_dataset(str(tmp_path / "code.txt"), tokenizer, 500)
    assert len(ids) == 500
    assert TEXT.startswith(tokenizer.decode(ids))


def test_short_lines_stay_in_order_and_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Some datasets have a line in each row: shuffling those would leave no text."""
    file = write_rows(tmp_path / "lines.jsonl", [{"text": f"line {i}\n"} for i in range(2000)])
    decoded = tokenizer.decode(load_calibration(ask(file, num_samples=1, seq_len=200), tokenizer).rows[0].tolist())
    numbers = [int(line.split()[1]) for line in decoded.splitlines()[1:-1]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 20


def test_pieces_are_the_text_cut_at_line_ends() -> None:
    pieces = list(calib._pieces([TEXT], 500))
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == TEXT
    assert all(piece.endswith("\n") and len(piece) <= 500 for piece in pieces if isinstance(piece, str))
    unbroken = list(calib._pieces(["x" * 1200], 500))
    assert [len(piece) for piece in unbroken] == [500, 500, 201]


def test_rows_begin_with_bos_where_the_tokenizer_does(demo_model: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_pretrained(demo_model)
    tokenizer.backend.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.bos_token_id = 0
    (tmp_path / "code.txt").write_text(TEXT)
    rows = load_calibration(ask(tmp_path), tokenizer).rows
    assert rows.shape == (4, 32)
    assert (rows == 0).sum(1).tolist() == [1, 1, 1, 1]
    assert rows[:, 0].tolist() == [0, 0, 0, 0]


def wrong_sources(folder: Path) -> Iterator[tuple[Path, str]]:
    cases = {
        "empty.txt": ("  \n", "empty"),
        "latin.txt": (b"caf\xe9", "not UTF-8"),
        "broken.jsonl": ('{"text": "good"}\n{"text": \n', ":2: not a JSON object"),
        "array.jsonl": ("[1, 2]\n", ":1: not a JSON object"),
        "other.jsonl": ('{"score": 1}\n', "its columns: score; known are text; messages"),
        "number.jsonl": ('{"text": 3}\n', "none of 1 rows holds a text"),
        "silent.jsonl": ('{"messages": [{"role": "user"}]}\n', "none of 1 rows holds a text"),
        "number.json": ("[3]", "a row is not a JSON object: 3"),
        "broken.json": ('[{"text": "a"},', ":1: not a JSON object"),
        "none.jsonl": ("\n\n", "no rows"),
        "broken.parquet": (b"PAR1 not really", "not a readable Parquet"),
        "data.csv": ("text\nhello", "expected one of .txt"),
    }
    for name, (content, reason) in cases.items():
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield path, reason
    write_rows(folder / "columns.parquet", [{"score": 1}])
    yield folder / "columns.parquet", "its columns: score"
    (folder / "nothing").mkdir()
    yield folder / "nothing", "no .txt"
    yield folder / "missing.txt", "no such file or folder, and not one of demo"


def test_bad_sources_are_refused_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for path, reason in wrong_sources(tmp_path):
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load_calibration(ask(path), tokenizer)
        message = str(caught.value)
        assert path.name in message
        assert reason in message
        assert "\n" not in message


def test_too_little_text_says_how_much_there_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "short.txt").write_text("import os\n")
    with pytest.raises(ConfigError, match=r"short\.txt: \d tokens, too short for 4 samples of 32"):
        load_calibration(ask(tmp_path / "short.txt"), tokenizer)


def test_messages_need_a_chat_template_and_must_suit_it(tmp_path: Path, demo_model: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(demo_model)
    file = write_rows(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    tokenizer.chat_template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"refuses every conversation: .*roles must alternate"):
        load_calibration(ask(file), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        load_calibration(ask(file), tokenizer)


def test_conversations_that_the_template_refuses_are_left_out(
    tmp_path: Path, demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_pretrained(demo_model)
    template = "{% for m in messages %}{{ m.content or raise_exception('no content') }} {% endfor %}"
    tokenizer.chat_template = ChatTemplate(template)
    silent = [CHAT[0], {"role": "assistant", "content": ""}]
    file = write_rows(tmp_path / "chat.jsonl", [{"messages": silent if i % 3 == 0 else CHAT} for i in range(60)])
    with caplog.at_level("WARNING", "lmkit"):
        rows = load_calibration(ask(file, num_samples=2), tokenizer).rows
    assert set(tokenizer.decode(rows.flatten().tolist()).split()) <= {"Add", "one.", "value", "+", "1"}
    assert "conversations, which are left out; the first:" in caplog.text


def test_a_damaged_preset_is_refused(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "presets.yaml").write_text(sources.PRESETS.read_text())
    (tmp_path / "demo.jsonl").write_text('{"text": "changed"}\n')
    monkeypatch.setattr(sources, "PRESETS", tmp_path / "presets.yaml")
    with pytest.raises(CheckpointError, match="sha256"):
        load_calibration(ask("demo"), tokenizer)


def test_hub_presets_are_streamed_and_refused_offline(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stream(*args: Any, **options: Any) -> datasets.IterableDataset:
        asked.append((args, options))
        return datasets.IterableDataset.from_generator(lambda: iter([{"text": TEXT}] * 3))

    monkeypatch.setattr(datasets, "load_dataset", stream)
    assert load_calibration(ask("wikitext2"), tokenizer).rows.shape == (4, 32)
    assert asked[0][0] == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert asked[0][1]["streaming"] is True

    named = "hub:org/name/config@validation"
    assert load_calibration(ask(named), tokenizer).sources[0].source == named
    assert (*asked[-1][0], asked[-1][1]["split"]) == ("org/name", "config", "validation")
    assert load_calibration(ask("gsm8k"), tokenizer).sources[0].documents == 3

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nwith a second line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError, match=r"wikitext2: cannot load .* give a local"):
        load_calibration(ask("wikitext2"), tokenizer)
