"""The config of a run: pydantic models of the TOML file, overrides, checks. Never imports jax."""

from jaxrl_sync.config.errors import ConfigError as ConfigError
from jaxrl_sync.config.errors import MissingFileError as MissingFileError
from jaxrl_sync.config.load import load as load
from jaxrl_sync.config.load import parse_overrides as parse_overrides
from jaxrl_sync.config.load import render as render
from jaxrl_sync.config.load import save as save
from jaxrl_sync.config.sections import RunConfig as RunConfig
