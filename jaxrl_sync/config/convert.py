"""The rooms' own frozen dataclasses, made from a run's config.

Rooms above this one make theirs themselves: ``trainer.settings.trainer_config``,
``orchestrator.config.loop_config``. Imports are inside the functions: describing an engine must not bring
jax into a process that has no use for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrl_sync.config.sections import RunConfig

if TYPE_CHECKING:
    from jaxrl_sync.inference.config import EngineConfig
    from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
    from jaxrl_sync.transfer.config import PublisherConfig, SubscriberConfig
    from jaxrl_sync.transfer.payload.settings import PayloadSettings
    from jaxrl_sync.transfer.verbs.settings import VerbsSettings


def to_decoder(config: RunConfig) -> DecoderConfig:
    """The decoder's shape."""
    from jaxrl_sync.sharding.presets.lora import Lora
    from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, RopeScaling

    scaling, lora = config.model.rope_scaling, config.model.lora
    fields = config.model.model_dump(exclude={"checkpoint", "tokenizer", "rope_scaling", "lora"})
    return DecoderConfig(
        **fields,
        rope_scaling=RopeScaling(**scaling.model_dump()) if scaling else None,
        lora=Lora(lora.rank, lora.alpha, lora.paths) if lora else None,
    )


def to_engine(config: RunConfig) -> EngineConfig:
    """Sizes and rules of one engine replica."""
    from jaxrl_sync.inference.config import EngineConfig
    from jaxrl_sync.sharding.presets.quantization import Quantization

    e = config.engine
    return EngineConfig(
        slots=e.slots,
        max_len=e.max_len,
        prefill_lengths=e.prefill_lengths,
        prefill_rows=e.prefill_rows,
        attend_lengths=e.attend_lengths,
        decode_steps_per_dispatch=e.decode_steps_per_dispatch,
        max_stop_ids=e.max_stop_ids,
        max_waiting=e.max_waiting,
        compute_dtype=e.compute_dtype,
        deterministic=e.deterministic,
        kv_policy=config.sync.kv_policy,
        extras=e.extras,
        version_probe=e.version_probe,
        quantization=None if e.weights == "plain" else Quantization(e.weights, e.weight_blocks),
        adapters=config.model.lora is not None and e.adapters == "beside",
        seed=config.run.seed,
    )


def to_verbs(config: RunConfig) -> VerbsSettings:
    """One side of the edges over RDMA."""
    from jaxrl_sync.transfer.verbs.devices import Choice
    from jaxrl_sync.transfer.verbs.settings import VerbsSettings

    v = config.sync.verbs
    gid_index = None if v.gid_index < 0 else v.gid_index
    return VerbsSettings(
        choice=Choice(
            include=v.devices,
            exclude=v.exclude,
            gid_index=gid_index,
            near=v.near,
            pkey=None if v.pkey < 0 else v.pkey,
        ),
        rails=v.rails,
        chunk_bytes=v.chunk_bytes,
        ring=v.ring,
        queue_pairs=v.queue_pairs,
        placement=v.placement,
        min_run_bytes=v.min_run_bytes,
        mtu=v.mtu,
        timeout=v.timeout,
        retries=v.retries,
        traffic_class=v.traffic_class,
        service_level=v.service_level,
        backend=v.backend,
    )


def to_payload(config: RunConfig) -> PayloadSettings:
    """What travels: everything, or frames of what changed."""
    from jaxrl_sync.transfer.codec.rules import CodingRules
    from jaxrl_sync.transfer.payload.settings import PayloadSettings

    s = config.sync.sparse
    rules = CodingRules(s.positions, s.values, s.zstd)
    return PayloadSettings(config.sync.payload, rules, s.anchor_every, s.history, s.compare)


def to_publisher(config: RunConfig) -> PublisherConfig:
    """How one trainer process publishes."""
    from jaxrl_sync.transfer.config import PublisherConfig

    s = config.sync
    return PublisherConfig(
        transport="auto" if s.transport == "file" else s.transport,
        host=config.run.host,
        threads=s.threads,
        keep_versions=s.keep_versions,
        verify=s.verify,
        chunk_bytes=s.tcp.chunk_bytes,
        timeout_s=s.timeout_s,
        hub_timeout_s=config.run.start_timeout_s,
        ttl_s=config.hub.ttl_s,
        verbs=to_verbs(config),
        payload=to_payload(config),
        fanout=s.fanout,
        fanout_degree=s.fanout_degree,
        site=s.site,
        offload_limit_bytes=None if s.offload_limit_mb is None else s.offload_limit_mb << 20,
    )


def to_subscriber(config: RunConfig, replica: int, rank: int) -> SubscriberConfig:
    """How rank ``rank`` of engine replica ``replica`` receives."""
    from jaxrl_sync.transfer.config import SubscriberConfig

    s = config.sync
    return SubscriberConfig(
        engine=f"engine-{replica}",
        rank=rank,
        size=config.engine.processes,
        transport="auto" if s.transport == "file" else s.transport,
        slots=s.slots,
        connections=s.tcp.connections,
        threads=s.threads,
        verify=s.verify,
        recount_every=s.sparse.recount_every,
        timeout_s=s.timeout_s,
        hub_timeout_s=config.run.start_timeout_s,
        ttl_s=config.hub.ttl_s,
        verbs=to_verbs(config),
        site=s.sites[replica] if replica < len(s.sites) else s.site,
        reliable=replica not in s.spot,
        eager=s.initiator == "pull" and config.engine.processes == 1,
        relay=s.relay or s.fanout != "star" or len({s.site, *s.sites}) > 1,
        host=config.run.host,
        payload=to_payload(config),
    )
