"""Settings: flag over variable over file over default, each with its origin; wrong values name where they came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from paddock_manager.paths import setting_variable
from paddock_manager.settings import SETTINGS
from paddock_runner.cli import parser
from paddock_runner.config import MANAGERS, Config, knobs, read_config, unknown_variables
from paddock_runner.errors import FileError, UsageError


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nmax_batch = 2\nthreads = 3\nhost = "::1"\n')
    env = {"PADDOCK_PORT": "10", "PADDOCK_MAX_BATCH": "20", "PADDOCK_CONFIG": str(file)}
    config = read_config({"port": "100"}, env)
    assert (config.port, config.max_batch, config.threads, config.max_queue) == (100, 20, 3, 1024)
    assert config.origin["port"] == "flag --port" and config.origin["max_batch"] == "PADDOCK_MAX_BATCH"
    assert config.origin["threads"] == str(file) and config.is_default("max_queue") and not config.is_default("port")


def test_settings_may_stand_in_a_runner_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[runner]\nallow_origin = ["https://a.example", "https://b.example"]\nauth = false\n')
    config = read_config({"config": str(file)}, {})
    assert config.allow_origin == ("https://a.example", "https://b.example") and config.auth is False


def test_variable_that_no_setting_has_is_found_with_the_one_that_is_meant() -> None:
    env = {"PADDOCK_MAX_CTX": "1", "PADDOCK_NO_AUTH": "1", "PADDOCK_KV_DTYPE": "1", "PADDOCK_TREADS": "1", "PADDOCK_FOO_BAR": "1", "PADDOCK_THREADS": "1", "PADDOCK_SERVE_PROT": "1", "PADDOCK_TEST_PACK": "x", "HOME": "/"}
    expected = [("PADDOCK_FOO_BAR", ""), ("PADDOCK_KV_DTYPE", "PADDOCK_KV_FORMAT"), ("PADDOCK_MAX_CTX", "PADDOCK_MAX_CTX_TOKENS"), ("PADDOCK_NO_AUTH", "PADDOCK_AUTH"), ("PADDOCK_TREADS", "PADDOCK_THREADS")]
    assert unknown_variables(env) == expected
    assert ("PADDOCK_SERVE_PROT", "PADDOCK_SERVE_PORT") in unknown_variables(env, ["PADDOCK_SERVE_PORT"])


def test_variables_of_the_managers_settings_begin_as_the_runner_believes() -> None:
    assert {setting_variable(s.key)[0].rsplit("_", s.key.count("_") + 1)[0] + "_" for s in SETTINGS} == set(MANAGERS)


@pytest.mark.parametrize(
    "flags, env, words",
    [
        ({"port": "x"}, {}, "--port: 'x' is not a whole number"),
        ({"port": "70000"}, {}, "--port: 70000 is above 65,535"),
        ({"threads": "999999999"}, {}, "--threads: 999999999 is above 1,024"),
        ({"port": "-1"}, {}, "below 0"),
        ({}, {"PADDOCK_MAX_BATCH": "0"}, "PADDOCK_MAX_BATCH: 0 is below 1"),
        ({}, {"PADDOCK_AUTH": "maybe"}, "PADDOCK_AUTH: 'maybe' is not true or false"),
        ({"device": "tpu"}, {}, "--device: 'tpu' is not one of auto, cpu, cuda"),
        ({"kv_format": "q4"}, {}, "--kv-dtype"),
        ({"max_body_mib": "many"}, {}, "is not a number"),
        ({"memory_gib": "inf"}, {}, "--memory-gib: 'inf' is not a number"),
        ({}, {"PADDOCK_LONG_PROMPT_DELAY": "1e999"}, "PADDOCK_LONG_PROMPT_DELAY: '1e999' is not a number"),
        ({"prefill_share": "nan"}, {}, "is not a number"),
        ({"memory_gib": "1e300"}, {}, "--memory-gib: 1e+300 is above 1,000,000,000"),
        ({}, {"PADDOCK_MAX_QUEUE": "9" * 30}, "PADDOCK_MAX_QUEUE: 1e+30 is above"),
    ],
)
def test_wrong_value_names_where_it_came_from(flags: dict[str, str], env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(flags, env)
    assert words in str(caught.value)


def test_configuration_file_that_is_wrong_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, error, words in (("port = ", UsageError, "not TOML"), ("prot = 1", UsageError, "no setting 'prot'"), ('port = "x"', UsageError, "port"), ("port = 1.5", UsageError, "whole number")):
        file.write_text(text)
        with pytest.raises(error, match=words):
            read_config({"config": str(file)}, {})
    with pytest.raises(FileError, match="cannot be read"):
        read_config({"config": str(tmp_path / "none")}, {})


def test_every_knob_has_a_flag_a_variable_a_doc_line_and_parses_its_default() -> None:
    found = knobs()
    assert len({k.flag for k in found}) == len(found) == len({k.variable for k in found})
    for knob in found:
        assert knob.doc and knob.flag.startswith("--") and knob.variable.startswith("PADDOCK_")
        if knob.default not in (None, "", ()):
            value = knob.default if knob.kind == "bool" else str(knob.default)
            assert knob.parse(value, "here") == knob.default


def test_command_line_reaches_every_knob() -> None:
    words = []
    for knob in knobs():
        value = knob.choices[-1] if knob.choices else {"int": "7", "float": "7.5"}.get(knob.kind, "word")
        words += [knob.flag] if knob.kind == "bool" else [knob.flag, value]
    found = vars(parser().parse_args(words))
    found.pop("config")
    config = read_config(found, {})
    assert all(not config.is_default(k.name) for k in knobs() if k.name != "config")
    assert config.auth is False and config.model == Path("word") and config.allow_host == ("word",)


def test_model_name_is_the_files_or_folders_name() -> None:
    assert Config(model=Path("/a/b.c.gguf")).model_name == "b.c"
    assert Config(model=Path("/a/b.gguf"), name="x").model_name == "x"
    with pytest.raises(UsageError, match="no model"):
        _ = Config().model_path
