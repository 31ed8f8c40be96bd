"""Where things are on disk, and every environment variable that the manager obeys: nothing else here reads the environment.

PADDOCK_HOME    the one folder everything lives in (default: the platform's data folder for applications)
HF_ENDPOINT     the hub, or a mirror of it            HF_TOKEN, HF_TOKEN_PATH, HF_HOME    the hub token
HF_HUB_OFFLINE  1: touch no network                   NO_COLOR, TERM                      plain output
PADDOCK_TABLE_FIELD  a setting of config.toml: PADDOCK_SERVE_PORT is serve.port
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paddock_runner.errors import UsageError

DEFAULT_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class Places:
    """The folders and files under PADDOCK_HOME.

    models/ORG/REPO/FILE     checkpoints under their own names; ORG/REPO/.paddock/ holds our record, parts and hashes
    added/NAME.json          records of files used in place
    fleet/                   state of running runners, their ready files
    logs/NAME.log            what each runner said
    keys/api_key             the key of this machine's servers, mode 0600
    roots/NAME.json          what was in each other root when it was last there

    more_roots: further trees like models/, on other disks, that may be away.
    """

    home: Path
    more_roots: tuple[Path, ...] = ()

    @property
    def roots(self) -> tuple[Path, ...]:
        """All trees of checkpoints: the one at home first, then those of the setting store.roots, there or not."""
        return (self.models, *self.more_roots)

    @property
    def remembered(self) -> Path:
        """What was in each other root when it was last there."""
        return self.home / "roots"

    @property
    def models(self) -> Path:
        """Root of the readable tree of checkpoints."""
        return self.home / "models"

    @property
    def added(self) -> Path:
        """Records of checkpoints that are used where they lie."""
        return self.home / "added"

    @property
    def fleet(self) -> Path:
        """State of running runners."""
        return self.home / "fleet"

    @property
    def logs(self) -> Path:
        """Log files of runners."""
        return self.home / "logs"

    @property
    def key_file(self) -> Path:
        """The key that clients of this machine's servers present."""
        return self.home / "keys" / "api_key"

    @property
    def config_file(self) -> Path:
        """User settings."""
        return self.home / "config.toml"


def places(environment: Mapping[str, str] | None = None) -> Places:
    """PADDOCK_HOME, or the platform's data folder. Raises: UsageError when that is no folder."""
    env = os.environ if environment is None else environment
    told = env.get("PADDOCK_HOME", "").strip()
    if told:
        home = expanded(told).absolute()
    else:
        import platformdirs

        home = Path(platformdirs.user_data_dir("paddock", appauthor=False))
    if home.exists() and not home.is_dir():
        raise UsageError(f"{home} is no folder", "set PADDOCK_HOME to one", path=str(home))
    if not is_utf8(home):
        raise UsageError(f"the name of PADDOCK_HOME, {home}, is not UTF-8", "set it to a folder whose name is", path=str(home))
    return Places(home, _more_roots(home / "config.toml", env))


def is_utf8(path: Path) -> bool:
    """Whether all of its names are text. Others are bytes that no API and no record can tell of."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ as the home folder; as it is where there is no such user, since words of a prompt may begin so, too."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def setting_variable(key: str, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The variable of a setting, and what it says; "" where it is not set."""
    name = "PADDOCK_" + key.replace(".", "_").upper()
    return name, (os.environ if environment is None else environment).get(name, "").strip()


def own_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The PADDOCK_* variables that are set to something."""
    env = os.environ if environment is None else environment
    return {name: value.strip() for name, value in env.items() if name.startswith("PADDOCK_") and value.strip()}


def _more_roots(config: Path, env: Mapping[str, str]) -> tuple[Path, ...]:
    """The setting store.roots; nothing where the file cannot be read, which `settings` reports."""
    told = setting_variable("store.roots", env)[1]
    if told:
        return _absolute(told)
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    if "roots" not in text:
        return ()
    import tomllib

    try:
        told = tomllib.loads(text).get("store", {}).get("roots", "")
    except (tomllib.TOMLDecodeError, AttributeError):
        return ()
    return _absolute(str(told))


def _absolute(told: str) -> tuple[Path, ...]:
    """The absolute ones of paths that are joined as PATH is."""
    return tuple(expanded(p) for p in told.split(os.pathsep) if expanded(p).is_absolute())


@dataclass(frozen=True, slots=True)
class HubSettings:
    """How to reach the hub. The token never shows in repr."""

    endpoint: str = DEFAULT_HUB
    token: str = field(default="", repr=False)
    offline: bool = False


def hub_settings(environment: Mapping[str, str] | None = None) -> HubSettings:
    """Endpoint, token and offline switch, as the hub's own tools read them. Raises: UsageError for an endpoint that is no address."""
    env = os.environ if environment is None else environment
    endpoint = hub_endpoint(env)
    if not re.match(r"https?://[^/?#\s]", endpoint):
        raise UsageError(f"HF_ENDPOINT is {endpoint!r}, which is no address", f"unset it, or set it to one such as {DEFAULT_HUB}")
    offline = env.get("HF_HUB_OFFLINE", "").strip().lower() in {"1", "true", "yes", "on"}
    return HubSettings(endpoint, _hub_token(env), offline)


def hub_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """The hub, or a mirror of it."""
    env = os.environ if environment is None else environment
    return env.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_HUB


def _hub_token(env: Mapping[str, str]) -> str:
    """HF_TOKEN, or the file that `hf auth login` wrote."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if env.get(name, "").strip():
            return env[name].strip()
    if env.get("HF_TOKEN_PATH"):
        path = Path(env["HF_TOKEN_PATH"])
    elif env.get("HF_HOME"):
        path = Path(env["HF_HOME"]) / "token"
    else:
        path = (
            Path(env.get("XDG_CACHE_HOME") or expanded(env.get("HOME", "~")) / ".cache")
            / "huggingface"
            / "token"
        )
    try:
        return expanded(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def folders_of_others(environment: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Where other programs keep checkpoints, by program: looked into when asked, never changed."""
    env = os.environ if environment is None else environment
    home = expanded(env.get("HOME", "~"))
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(env.get("HF_HUB_CACHE") or Path(env.get("HF_HOME") or cache / "huggingface") / "hub")
    return {
        "hub cache": hub,
        "LM Studio": home / ".lmstudio" / "models",
        "LM Studio (old)": home / ".cache" / "lm-studio" / "models",
        "llama.cpp": Path(env.get("LLAMA_CACHE") or cache / "llama.cpp"),
        "Jan": home / ".local" / "share" / "Jan" / "data" / "llamacpp" / "models",
    }


def may_color(environment: Mapping[str, str] | None = None) -> bool:
    """False when the user asked for plain text."""
    env = os.environ if environment is None else environment
    return not env.get("NO_COLOR") and env.get("TERM", "") != "dumb"


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a program that we start: ours, without the hub token, and GPUs in bus order."""
    env = {k: v for k, v in os.environ.items() if k not in {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}}
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    env.update(extra or {})
    return env


def visible_gpus() -> str:
    """CUDA_VISIBLE_DEVICES, "" where it is not set; one that is set to nothing shows no GPU, as -1 does."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if told is None else told.strip() or "-1"


def file_word(name: str) -> str:
    """A name of a server as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:150]
