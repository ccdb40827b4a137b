"""Rules across sections, which types alone can't say. Each raises a ``ConfigError`` naming both sides."""

from __future__ import annotations

from pathlib import Path

from jaxrl_sync.config.errors import ConfigError, MissingFileError
from jaxrl_sync.config.modes import check_mode
from jaxrl_sync.config.sections import RunConfig, SyncSection

_TAKEN_LIVE = (
    *("fanout", "fanout_degree", "relay", "site", "sites", "spot"),
    *("keep_versions", "offload_limit_mb"),
)
"""Keys of [sync] that say how engines take versions from a trainer and from each other."""


def check(config: RunConfig) -> None:
    """Raise for the first rule that ``config`` breaks."""
    _check_task(config)
    _check_model(config)
    _check_trainer_mesh(config)
    _check_engine_mesh(config)
    check_mode(config)
    _check_loss(config)
    _check_lengths(config)
    _check_density(config)
    _check_adapters(config)
    _check_files(config)
    _check_hub(config)
    _check_fleet(config)
    _check_channel(config)


def _check_channel(config: RunConfig) -> None:
    sync = config.sync
    if sync.transport != "file":
        return
    if sync.file.path is None:
        raise ConfigError("sync.transport='file' needs sync.file.path, found none")
    if sync.slots < 2:
        raise ConfigError(
            f"sync.transport='file' needs sync.slots >= 2, found {sync.slots}: a version is read beside the "
            "one that serves"
        )
    if config.eval.pin:
        raise ConfigError(
            "eval.pin=true needs a trainer that serves the versions that it keeps, found "
            "sync.transport='file', where the newest sync.file.keep of them stay"
        )


def check_whole_run(config: RunConfig) -> None:
    """Raise for what a run as a whole would ignore; a single engine may differ from the run that it joins."""
    sync = config.sync
    if sync.transport != "file":
        return
    default = SyncSection()
    ignored = [f"sync.{k}={v!r}" for k in _TAKEN_LIVE if (v := getattr(sync, k)) != getattr(default, k)]
    if ignored:
        raise ConfigError(
            f"sync.transport='file' reads every version from the folder, so {', '.join(ignored)} would be "
            "ignored; expected the defaults, or another transport"
        )


def _check_fleet(config: RunConfig) -> None:
    sync, replicas = config.sync, config.engine.replicas
    if len(sync.sites) > replicas:
        raise ConfigError(f"sync.sites names {len(sync.sites)} replicas, engine.replicas={replicas}")
    beyond = [n for n in sync.spot if n >= replicas]
    if beyond:
        raise ConfigError(f"sync.spot has replica {beyond[0]}, expected 0 to {replicas - 1}")


def _check_hub(config: RunConfig) -> None:
    hub = config.hub
    given = hub.tls_cert is not None and hub.tls_key is not None
    if hub.tls == "files" and not given:
        raise ConfigError("hub.tls='files' needs hub.tls_cert and hub.tls_key")
    if hub.tls != "files" and (hub.tls_cert is not None or hub.tls_key is not None):
        raise ConfigError(f"hub.tls_cert and hub.tls_key need hub.tls='files', found {hub.tls!r}")
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = getattr(hub, name)
        if path is not None and not Path(path).is_file():
            raise MissingFileError(f"hub.{name}={path}: no such file")


def _check_adapters(config: RunConfig) -> None:
    if config.engine.adapters == "beside" and config.model.lora is None:
        raise ConfigError("engine.adapters='beside' needs model.lora, found none")


def _check_density(config: RunConfig) -> None:
    every, processes = config.sync.density_every_steps, config.trainer.processes
    if every and processes > 1:
        raise ConfigError(f"sync.density_every_steps={every} needs trainer.processes=1, found {processes}")


def _check_task(config: RunConfig) -> None:
    task = config.task
    if not task.name and not task.mix:
        raise ConfigError("task.name is missing: expected a task, or several as [[task.mix]]")
    if task.mix and (task.name or task.args):
        given = f"name={task.name!r}" if task.name else "args"
        raise ConfigError(f"task.{given} beside [[task.mix]]: expected one task or a mix, not both")


def _check_model(config: RunConfig) -> None:
    m = config.model
    if m.num_heads % m.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={m.num_heads} must be a multiple of model.num_kv_heads={m.num_kv_heads}"
        )
    if m.head_dim % 2:
        raise ConfigError(f"model.head_dim={m.head_dim} must be even (rotary embedding pairs its elements)")


def _check_trainer_mesh(config: RunConfig) -> None:
    t, m = config.trainer, config.model
    have, want = t.processes * t.devices, t.mesh.size
    if have != want:
        raise ConfigError(
            f"trainer.mesh dp={t.mesh.dp} x fsdp={t.mesh.fsdp} x tp={t.mesh.tp} needs {want} devices, found "
            f"{have} (trainer.processes={t.processes} x trainer.devices={t.devices})"
        )
    _divides("trainer.mesh.tp", t.mesh.tp, "model.num_heads", m.num_heads)
    _shares_kv_heads("trainer.mesh.tp", t.mesh.tp, m.num_kv_heads)
    _divides("trainer.mesh.tp", t.mesh.tp, "model.d_ff", m.d_ff)
    _divides("trainer.mesh.tp", t.mesh.tp, "model.vocab_size", m.vocab_size)
    _divides("trainer.mesh.fsdp", t.mesh.fsdp, "model.d_model", m.d_model)
    _divides("trainer.mesh dp x fsdp", t.mesh.dp * t.mesh.fsdp, "trainer.rows", t.rows)


def _check_engine_mesh(config: RunConfig) -> None:
    e, t = config.engine, config.trainer
    if e.placement != "colocated":
        what = f"engine tp (engine.processes={e.processes} x engine.devices={e.devices})"
        _check_engine_tp(config, what, e.processes * e.devices)
    if e.placement != "disaggregated":
        what = f"colocated engine's tp (trainer.processes={t.processes} x trainer.devices={t.devices})"
        _check_engine_tp(config, what, t.processes * t.devices)


def _check_engine_tp(config: RunConfig, what: str, tp: int) -> None:
    e, m = config.engine, config.model
    _divides(what, tp, "model.num_heads", m.num_heads)
    _divides(what, tp, "model.d_ff", m.d_ff)
    _divides(what, tp, "engine.slots", e.slots)
    if not m.tied_embeddings:
        _divides(what, tp, "model.vocab_size", m.vocab_size)
    _shares_kv_heads(what, tp, m.num_kv_heads)


def _shares_kv_heads(what: str, tp: int, heads: int) -> None:
    if heads % tp and tp % heads:
        raise ConfigError(f"{what} = {tp} must divide or be a multiple of model.num_kv_heads={heads}")


def _divides(what: str, size: int, of: str, total: int) -> None:
    if total % size:
        raise ConfigError(f"{what} = {size} must divide {of}={total}")


def _check_loss(config: RunConfig) -> None:
    bound, loss = config.loop.staleness_bound, config.loss
    if bound >= 1 and loss.correction in (None, "none"):
        raise ConfigError(
            f"loop.staleness_bound={bound} trains on samples of older weights and needs an explicit "
            f"loss.correction, found {loss.correction or 'nothing'}; expected clip, tis_token, tis_sequence, "
            "masked_is or decoupled"
        )
    if bound >= 1 and loss.correction == "clip" and loss.anchor == "proximal":
        raise ConfigError(
            f"loop.staleness_bound={bound} with loss.correction='clip' and loss.anchor='proximal' leaves the "
            "staleness uncorrected; expected anchor 'rollout' or another correction"
        )
    if loss.correction == "decoupled" and loss.anchor != "proximal":
        raise ConfigError(f"loss.correction='decoupled' needs loss.anchor='proximal', found {loss.anchor!r}")
    if loss.correction in ("tis_token", "tis_sequence") and loss.is_cap is None:
        raise ConfigError(f"loss.correction={loss.correction!r} needs loss.is_cap, found nothing")
    if loss.is_low >= loss.is_high:
        raise ConfigError(f"loss.is_low={loss.is_low} must be below loss.is_high={loss.is_high}")
    if (loss.geo_low is None) != (loss.geo_high is None):
        raise ConfigError("loss.geo_low and loss.geo_high must be given both or not at all")


def _check_lengths(config: RunConfig) -> None:
    tokens, room, row = config.loop.sampling.max_tokens, config.engine.max_len, config.trainer.seq_len
    if tokens >= room:
        raise ConfigError(
            f"loop.sampling.max_tokens={tokens} leaves no room for a prompt in engine.max_len={room}"
        )
    if room > row:
        raise ConfigError(
            f"engine.max_len={room} exceeds trainer.seq_len={row}: the longest sample must fit one packed row"
        )
    chunk = min(config.trainer.logprob_chunk, row)
    _divides("trainer.logprob_chunk", chunk, "trainer.seq_len", row)


def _check_files(config: RunConfig) -> None:
    for key in ("checkpoint", "tokenizer"):
        value = getattr(config.model, key)
        if value is not None and not Path(value).exists():
            raise MissingFileError(f"model.{key}: {value} does not exist")
