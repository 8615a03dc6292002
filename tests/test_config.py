import pytest
from pydantic import ValidationError

from raymoe.config import Settings
from raymoe.errors import ConfigError


def test_file_then_environment_then_options_win(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("groups: {count: 3, threads: 2}\nserver: {port: 9000}\n")
    settings = Settings.load(
        file,
        {"RAYMOE_GROUPS__COUNT": "4", "RAYMOE_SERVER__PORT": "9001", "OTHER": "x"},
        {"server.port": 9002},
    )
    assert (settings.groups.count, settings.groups.threads, settings.server.port) == (4, 2, 9002)
    assert Settings.load(None, {}, {"groups.count": None}) == Settings()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"groups": {"cuont": 2}}, r"unknown setting groups.cuont .* accepted here: count, threads"),
        ({"group": {}}, r"unknown setting group .* accepted here: model, groups, router, server"),
        ({"groups": {"count": 0}}, r"groups.count: .* got 0"),
        ({"server": {"port": "http"}}, r"server.port"),
        ({"groups": 3}, r"groups"),
        ({"server": {"app": "Not A Name"}}, r"server.app"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_accepted(values, text):
    with pytest.raises(ConfigError, match=text):
        Settings.build(values)


def test_an_unknown_environment_variable_is_an_error():
    with pytest.raises(ConfigError, match="RAYMOE_GROUPS is unknown"):
        Settings.load(None, {"RAYMOE_GROUPS": "2"})
    with pytest.raises(ConfigError, match=r"unknown setting groups.size .*RAYMOE_GROUPS__SIZE"):
        Settings.load(None, {"RAYMOE_GROUPS__SIZE": "2"})
    with pytest.raises(ConfigError, match=r"RAYMOE_GROUPS__COUNT: '\[1' is not YAML"):
        Settings.load(None, {"RAYMOE_GROUPS__COUNT": "[1"})
    assert Settings.load(None, {"RAYMOE_CACHE": "/tmp"}) == Settings()


@pytest.mark.parametrize("text", ["- a\n- b\n", "{", "groups:\n  count: [\n"])
def test_a_file_that_is_no_mapping_is_named(tmp_path, text):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        Settings.load(file, {})
    with pytest.raises(ConfigError, match="can't be read"):
        Settings.load(tmp_path / "absent.yaml", {})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().groups.count = 5
