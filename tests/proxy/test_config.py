from pathlib import Path

import msgspec
import pytest

from lmkit.config import parse
from lmkit.errors import ConfigError
from lmkit.proxy.config import ROUTES, NodeConfig, ProxyConfig, Registration, load_config, node_url


def write(tmp_path: Path, text: str, name: str = "proxy.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_loads_yaml_and_json(tmp_path: Path) -> None:
    yaml = "port: 9000\nnodes:\n  - url: http://a:1/\n    models: [x, y]\n    api_key: k\n  - {url: http://b:2}\n"
    json = (
        '{"port": 9000, "nodes": [{"url": "http://a:1", "models": ["x", "y"], "api_key": "k"},\n{"url": "http://b:2"}]}'
    )
    first, second = load_config(write(tmp_path, yaml)), load_config(write(tmp_path, json, "proxy.json"))
    assert first == second
    assert first.nodes[0] == NodeConfig(url="http://a:1", models=("x", "y"), api_key="k")
    assert first.nodes[1] == NodeConfig(url="http://b:2")


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("port: 1\nnodes:\n  - url: http://a:1\n    urll: x\n", 4, "urll"),
        ("port: 1\nhealth_interval: fast\n", 2, "Expected `float`"),
        ("port: 1\nnodes:\n  - url: http://a:1\n  - url: http://b:1/v1\n", 4, "/v1"),
        ("port: 1\nnodes:\n  - models: [a]\n", 3, "url"),
        ("port: 1\nhost: a\nport: 2\n", 3, "twice"),
        ("port: [1\nhost: a\n", 2, "expected ',' or ']'"),
        ("port: 70000\n", 1, "<= 65535"),
        ('port: "8000"\n', 1, "Expected `int`"),
        ("\napi_keys: secret\n", 2, "Expected `array`"),  # one string is not a list of its letters
        ("api_keys: ['']\n", 1, "entry 1"),
        (
            "policy: fastest\n",
            1,
            "Invalid enum value 'fastest' - at `$.policy`; expected least_in_flight, least_tokens, ",
        ),
        ("nodes:\n- url: http://a:1\n- url: http://A:1/\n", 1, "given twice"),
        ("- a\n", 1, "Expected `object`"),
        ('{"port": 1,\n "prot": 2}', 2, "prot"),
    ],
)
def test_refuses_with_file_and_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert part in message
    assert "\n" not in message


def test_refuses_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"host: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_no_message_tells_a_key(tmp_path: Path) -> None:
    for text in (
        "api_keys: [sesame]\nadmin_keys: [sesame]",
        "api_keys: ['sesame with space']",
        "api_keys: {sesame: 1}",
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(write(tmp_path, text))
        assert "sesame" not in str(caught.value)


def test_state_file_is_beside_the_configuration(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "state_file: s.json")).state_file == str(tmp_path / "s.json")
    assert load_config(write(tmp_path, "state_file: /x/s.json")).state_file == "/x/s.json"
    assert load_config(None, state_file="s.json").state_file == "s.json"


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 1\nhost: ::1\nnodes: [{url: 'http://a:1'}]\n")
    config = load_config(path, nodes=[NodeConfig(url="http://b:1")], port=2, host=None)
    assert (config.port, config.host, [node.url for node in config.nodes]) == (2, "::1", ["http://a:1", "http://b:1"])
    with pytest.raises(ConfigError, match="given twice"):
        load_config(path, nodes=[NodeConfig(url="http://a:1")])


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("http://h:1", "http://h:1"),
        ("HTTP://H:80/", "http://h"),
        ("https://h/prefix/", "https://h/prefix"),
        ("http://[::1]:8/", "http://[::1]:8"),
    ],
)
def test_node_url_is_canonical(text: str, canonical: str) -> None:
    assert node_url(text) == canonical
    assert node_url(canonical) == canonical


@pytest.mark.parametrize(
    "text",
    ["", "h:1", "ftp://h", "http://", "http://u:p@h", "http://h?x", "http://h#x", "http://h\\@evil", "http://h/v1",
     "http://h/v1/",
     "http://0.0.0.0:1", "http://[::]:1", "http://h:99999", "http://h:x", "http://a b", "http://h/%2e%2e",
     "http://h\n", "file:///etc/passwd",
     "http://[::1", "http://h/..\\"],
)  # fmt: skip
def test_node_url_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        node_url(text)
    with pytest.raises(ConfigError, match="--node"):
        parse({"url": text}, NodeConfig, "--node")


def test_configurations_are_immutable() -> None:
    with pytest.raises(AttributeError):
        ProxyConfig().port = 1  # type: ignore[misc]
    assert "url" in msgspec.structs.asdict(NodeConfig(url="http://a"))


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[fd00:ec2::254]", "100.100.100.200",
     "metadata.google.internal", "METADATA.google.internal.", "0.0.0.0", "[::]", "224.0.0.1", "[ff02::1]", "2130706433",
     "0x7f.1", "0177.0.0.1", "127.1", "0x7f000001", "0.1.2.3", "255.255.255.255"],
)  # fmt: skip
def test_addresses_that_are_never_a_node(host: str) -> None:
    for kind in (NodeConfig, Registration):
        with pytest.raises(ValueError):  # noqa: PT011 - the reasons differ
            kind(url=f"http://{host}:8000")


@pytest.mark.parametrize("host", ["169.254.1.1", "[fe80::1]", "[::ffff:169.254.7.7]"])
def test_link_local_addresses_come_from_the_configuration_only(host: str) -> None:
    assert NodeConfig(url=f"http://{host}:8000")
    with pytest.raises(ValueError, match="link-local"):
        Registration(url=f"http://{host}:8000")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.5", "192.168.1.2", "[fd00::5]", "[::1]", "gpu-3", "node4.lan"])
def test_private_addresses_may_be_registered(host: str) -> None:
    assert Registration(url=f"http://{host}:8000")


def test_the_number_of_nodes_is_bounded() -> None:
    nodes = tuple(NodeConfig(url=f"http://n{i}") for i in range(3))
    with pytest.raises(ValueError, match="max_nodes is 2"):
        ProxyConfig(nodes=nodes, max_nodes=2)


def test_the_default_routes_can_be_written_into_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, f"forwarded_routes: [{', '.join(ROUTES)}]\n")
    assert load_config(path).forwarded_routes == ROUTES


@pytest.mark.parametrize("route", ["/admin", "/metrics", "/dashboard", "/v1", "/v2/../admin", "/rerank/x"])
def test_no_other_page_is_forwarded(tmp_path: Path, route: str) -> None:
    with pytest.raises(ConfigError, match="forwarded_routes"):
        load_config(write(tmp_path, f"forwarded_routes: [{route}]\n"))
