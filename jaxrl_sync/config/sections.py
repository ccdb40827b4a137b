"""The sections of a run's TOML file as pydantic models: every key, its type, its bounds and its default.

This is the one place where a user-visible default stands. The rooms have frozen dataclasses of their own;
``jaxrl_sync.config.convert`` makes them from these models. Unknown keys are errors; types are strict (a
quoted number is not a number).
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Platform = Literal["cpu", "cuda", "tpu"]
Scalar = bool | int | float | str
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]  # 11 days: what every clock and every wait can count
Fraction = Annotated[float, Field(gt=0, le=1)]
Lengths = Annotated[tuple[Positive, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run as a whole and how it is supervised."""

    name: Annotated[str, Field(pattern=r"^\w[\w.+-]*$")] = "run"
    """Prefix of the automatic run directory ``<root>/<name>-<date>-<time>``."""
    root: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    steps: Positive = 100
    """Optimizer updates in all, counted from the first one of the first lineage."""
    host: str = "127.0.0.1"
    """Address that every listener of the run binds to."""
    start_timeout_s: Seconds = 240.0
    """From the start of a process to its first sign of life (compilation included)."""
    stuck_timeout_s: Seconds = 180.0
    """Without any progress for that long the run ends with the name of who is waited for."""
    grace_s: Seconds = 30.0
    """Between SIGTERM and SIGKILL of a process that is asked to stop."""
    stopped_timeout_s: Seconds = 20.0
    """A process that stays stopped (SIGSTOP) for that long is killed, so that its death can be handled."""
    engine_restarts: NonNegative = 3
    """Restarts in all per engine replica before its death ends the run."""
    hub_restarts: NonNegative = 3
    keep_batches: bool = False
    """Keep every batch as ``RUN_DIR/batches/step-<x>.rank-<d>.frame``, for replay and for comparisons."""


class RopeScalingTable(Section):
    """See ``jaxrl_sync.sharding.presets.qwen3.RopeScaling``."""

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_position: Positive


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraTable(Section):
    """Low-rank adapters (arXiv 2106.09685): they alone are trained, the model's own weights stay."""

    rank: Positive
    alpha: Annotated[float, Field(gt=0)]
    targets: Annotated[tuple[Projection, ...], Field(strict=False, min_length=1)] = get_args(Projection)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths below ``layers/`` of the adapted projections."""
        mlp = ("gate_proj", "up_proj", "down_proj")
        return tuple(("mlp/" if t in mlp else "attn/") + t for t in dict.fromkeys(self.targets))


class ModelSection(Section):
    """Shape of the decoder; see ``jaxrl_sync.sharding.presets.qwen3.DecoderConfig``."""

    vocab_size: Positive
    num_layers: Positive
    d_model: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    d_ff: Positive
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    tied_embeddings: bool = False
    qk_norm: bool = True
    """Queries and keys are normalised per head (Qwen3); false: Llama's attention."""
    rope_scaling: RopeScalingTable | None = None
    """Llama 3's stretched RoPE."""
    lora: LoraTable | None = None
    checkpoint: str | None = None
    """Folder with safetensors weights that the trainer starts from; random weights without."""
    tokenizer: str | None = None
    """A ``tokenizer.json``; without it the task's own character tokenizer is used."""


class MixTable(Section):
    """One task of several, ``[[task.mix]]``."""

    name: str
    label: Annotated[str, Field(pattern=r"^[\w.:+-]+$")] | None = None
    """Its name in metrics and reports, the task's own without; needed where a task comes twice."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the trained groups, beside the weights of the others."""
    args: dict[str, Scalar] = {}


class TaskSection(Section):
    """Which environment produces prompts and rewards; ``args`` go to the task as they are.

    Either one task by ``name``, or several as a ``mix``.
    """

    name: str = ""
    seed: NonNegative = 0
    args: dict[str, Scalar] = {}
    mix: Annotated[tuple[MixTable, ...], Field(strict=False)] = ()


class MeshTable(Section):
    """Sizes of the trainer's mesh axes."""

    dp: Positive = 1
    fsdp: Positive = 1
    tp: Positive = 1

    @property
    def size(self) -> int:
        """Number of devices of the mesh."""
        return self.dp * self.fsdp * self.tp


class RoleSection(Section):
    """What every role that computes has: its platform, its devices, its environment."""

    platform: Platform = "cpu"
    processes: Positive = 1
    """Processes that form one JAX world."""
    devices: Positive = 1
    """Devices per process; on ``cpu`` that many virtual ones."""
    memory_fraction: Fraction | None = None
    threads: NonNegative = 0
    """Cap on the compute threads of one process; 0 leaves it to the runtime."""
    env: dict[Annotated[str, Field(pattern="^[^=]+$")], str] = {}


class TrainerSection(RoleSection):
    """Mesh, precision, optimizer, packing and checkpoints of the trainer."""

    mesh: MeshTable = MeshTable()
    gather: Literal["step", "layer"] = "step"
    """When FSDP shards are gathered: all before the layer loop, or each in its layer."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    init_std: Annotated[float, Field(gt=0)] = 0.02
    learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step over the peak one (cosine)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seq_len: Positive = 128
    """Length of one packed row, in tokens."""
    rows: Positive = 8
    """Packed rows of one micro-batch over all data ranks; its token budget is ``rows * seq_len``."""
    logprob_chunk: Positive = 128
    """Tokens of every row whose logits exist at once while log-probs are computed."""
    checkpoint_every_steps: NonNegative = 0
    """0 writes only the last one."""
    checkpoint_keep: Positive = 2
    offload: Literal["none", "optimizer"] = "none"
    """What goes to host memory while a colocated engine has the devices."""
    sft_steps: NonNegative = 0
    """Supervised updates on the task's demonstrations before version 0 (0: none)."""
    sft_learning_rate: Annotated[float, Field(gt=0)] = 1e-3


class LossSection(Section):
    """The objective and its off-policy correction; the formulas stand in ``jaxrl_sync/trainer/losses.py``."""

    anchor: Literal["rollout", "proximal"] = "rollout"
    """Log-probs in the denominator of the clipped ratio."""
    correction: Literal["none", "clip", "tis_token", "tis_sequence", "masked_is", "decoupled"] | None = None
    """How samples of an older policy are corrected; must be stated when ``loop.staleness_bound`` >= 1."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    is_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncation of the importance weight."""
    is_low: Annotated[float, Field(gt=0)] = 0.5
    is_high: Annotated[float, Field(gt=0)] = 2.0
    geo_low: Annotated[float, Field(gt=0)] | None = None
    geo_high: Annotated[float, Field(gt=0)] | None = None
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the frozen reference policy (version 0)."""
    kl_weighting: Literal["none", "importance"] = "none"
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus, which keeps a policy that starts from random weights exploring."""
    max_log_ratio: Annotated[float, Field(gt=0)] = 20.0
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""


class SamplingTable(Section):
    """How tokens are drawn; top_k 0 and top_p 1 are off."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegative = 0
    top_p: Fraction = 1.0
    max_tokens: Positive = 64


class LoopSection(Section):
    """The asynchronous loop: batch, staleness, permits, deadlines."""

    staleness_bound: NonNegative
    """Updates that the weights which made a sample may lag behind those it trains; 0 is synchronous."""
    prompts_per_step: Positive = 16
    group_size: Positive = 8
    """Rollouts per prompt; one engine request carries the whole group."""
    inflight_groups: NonNegative = 0
    """Permits; 0 means as many as staleness allows."""
    group_timeout_s: Seconds = 120.0
    retry_cap: NonNegative = 2
    """Times a group is tried again before its prompt is dropped."""
    max_consecutive_drops: Positive = 32
    """Prompts dropped in a row before the run ends with their cause."""
    target_lag: Positive = 2
    """Batches the orchestrator may ship ahead of the trainer's committed version."""
    swap_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 180.0
    """Deadline on one training step, from frame to acknowledgement."""
    pipeline_depth: NonNegative = 0
    """Batches of rollouts that may run or wait beyond the shipped ones; 0: as many as staleness allows.
    A small depth generates later, on newer weights, what would only wait."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """Running rollouts that the next batch would make too stale: wait for them, or drop and count them."""
    drop_uniform_groups: bool = False
    """Filter groups whose rewards are all equal (they carry no gradient)."""
    batch_by: Literal["groups", "samples"] = "groups"
    """A batch is full with ``prompts_per_step`` groups, whatever they lost, or with as many samples."""
    epochs: Positive | None = None
    """Passes over a finite data set; without it the prompts go round until the steps are done."""
    last_batch: Literal["short", "drop"] = "short"
    """What becomes of the rest, too little for a batch, when the data ends before the steps do."""
    engine_wait_s: Seconds = 120.0
    """How long the loop goes on without a single engine that serves."""
    trainer_wait_s: Seconds = 30.0
    """How long the loop goes on without a trainer process whose lease at the hub has ended."""
    task_timeout_s: Seconds = 60.0
    """Deadline on one call of the task: a prompt, a step of an environment, the scores of a group."""
    task_threads: Positive = 8
    """Calls of the task that may run at once."""
    sampling: SamplingTable = SamplingTable()


class EngineSection(RoleSection):
    """Replicas of the inference engine; its mesh is one tensor-parallel axis over a replica's devices."""

    replicas: Positive = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights that the engine holds, hence of the wire. ``float16`` has no room for more than 65504;
    it is for weights alone, activations have ``compute_dtype``."""
    weights: Literal["plain", "fp8", "int8"] = "plain"
    """How the layers' matrices are held and travel: in ``dtype``, or as one byte per element with a float32
    scale per block, quantised by the trainer from the value in ``dtype``."""
    weight_blocks: Literal["128x128", "1x128"] = "128x128"
    """Blocks of quantised matrices: square, or 128 along the contraction for each output."""
    adapters: Literal["merged", "beside"] = "merged"
    """Where ``model.lora`` is merged: by the trainer, before weights travel, or by the engine in every step;
    then from one version to the next only adapters change, and with a sparse payload only they travel."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    slots: Positive = 64
    """Samples decoded at once; a multiple of the replica's devices."""
    max_len: Positive = 256
    """Prompt and answer together, in tokens."""
    prefill_lengths: Lengths = (32, 128)
    """Prompt lengths that prefill is compiled for, ``max_len`` apart."""
    prefill_rows: Positive = 8
    attend_lengths: Lengths = ()
    """Cache lengths that the decode step is compiled for, ``max_len`` apart."""
    decode_steps_per_dispatch: Positive = 4
    """Decode steps between two moments at which a swap, a pause or an abort can happen."""
    max_stop_ids: Positive = 4
    max_waiting: Positive = 4096
    """Requests that may wait before new ones are refused."""
    deterministic: bool = False
    """One decode and one prefill shape, so that a sample does not depend on its neighbours."""
    extras: Annotated[tuple[Literal["entropy"], ...], Field(strict=False)] = ()
    """Named per-token arrays that are recorded beside the log-probs; they travel with the samples."""
    version_probe: bool = False
    """Weights carry a version stamp per layer, and every forward pass reports which stamps it used."""
    port: NonNegative = 0
    placement: Literal["disaggregated", "colocated", "mixed"] = "disaggregated"
    """Processes of their own; the trainer's processes, taking turns with it (one replica over all its
    devices); or replica 0 there and the others on their own."""
    sleep: Literal["release", "keep"] = "release"
    """What a colocated engine does with its KV cache while the trainer has the devices: give it up and
    compute it again, or keep it (and go on as ``sync.kv_policy`` says)."""


class HubSection(Section):
    """The directory of versions and members."""

    port: NonNegative = 0
    ttl_s: Seconds = 10.0
    """Lease of a member; its heartbeat comes three times as often."""
    tls: Literal["off", "self-signed", "files"] = "off"
    """HTTPS for what hub and engines answer: with a certificate that is made for the run and pinned by every
    client, or with ``tls_cert`` and ``tls_key``. Weights and batches stay unencrypted: docs/security.md."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    """PEM file of the authority that clients trust; without it they pin the hub's certificate."""
    metrics_open: bool = False
    """Whether ``GET /metrics`` of hub and engines answers without the run token."""


class EvalSection(Section):
    """Evaluation, pinned to one version, overlapping training."""

    every_steps: NonNegative = 0
    """0 evaluates only version 0 and the last one."""
    prompts: Positive = 64
    samples: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    share: Fraction = 0.5
    """Largest part of the permits and of the engines that evaluation takes while training goes on."""
    pin: bool = False
    """Have the trainer keep the version, for engines that come late, until its evaluation is over."""
    timeout_s: Seconds = 180.0


class TcpTable(Section):
    """The TCP transport."""

    connections: Annotated[int, Field(ge=1, le=16)] = 2
    """Of one engine process to one trainer process."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 1 << 20


Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists only


class VerbsTable(Section):
    """The RDMA transport; ``jaxrl-sync verbs`` shows what there is and what would be chosen."""

    devices: Names = ()
    """Only these, as ``mlx5_0``, ``mlx5_0:1`` or ``mlx5*``; empty: any with an active port."""
    exclude: Names = ()
    rails: Annotated[int, Field(ge=1, le=16)] = 1
    """Ports per edge, in the order of ``devices`` where that names them; both sides need as many."""
    gid_index: Annotated[int, Field(ge=-1, le=255)] = -1
    """-1: the best routable one."""
    pkey: Annotated[int, Field(ge=-1, le=0xFFFF)] = -1
    """Partition key by value; -1: the first one of the port's table."""
    near: str = ""
    """PCI address of the GPU whose memory it is, as ``0000:3b:00.0``: the nearest port is taken."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 1 << 20
    ring: Annotated[int, Field(ge=2, le=1024)] = 16
    """Chunks of registered memory per edge and side."""
    queue_pairs: Annotated[int, Field(ge=1, le=64)] = 2
    """Per rail."""
    placement: Literal["auto", "placed", "staged"] = "auto"
    """placed: written to the final place in the slot; staged: through the ring; auto: by the runs' length."""
    min_run_bytes: Annotated[int, Field(ge=1, le=1 << 40)] = 64 << 10
    """Mean contiguous run from which on ``auto`` places."""
    timeout: Annotated[int, Field(ge=1, le=31)] = 14
    """4.096 us * 2^timeout per attempt."""
    retries: Annotated[int, Field(ge=0, le=7)] = 6
    mtu: Literal[0, 256, 512, 1024, 2048, 4096] = 0
    """0: the smaller one of both ports."""
    traffic_class: Annotated[int, Field(ge=0, le=255)] = 0
    service_level: Annotated[int, Field(ge=0, le=15)] = 0
    backend: Literal["native", "pyverbs"] = "native"
    """The C extension, or rdma-core's Python bindings (slower; on Debian for the system's Python)."""


class SparseTable(Section):
    """How changes are written where ``payload`` isn't full; see docs/payloads.md."""

    positions: Literal["auto", "bitmap", "u32", "gap16", "gap8", "rice"] = "auto"
    values: Literal["auto", "overwrite", "xor", "ulp"] = "overwrite"
    """overwrite may be applied twice; xor and ulp are smaller; auto takes what costs least."""
    zstd: Literal["auto", "on", "off"] = "auto"
    anchor_every: NonNegative = 0
    """Versions after which everything is sent again; 0: only where it is needed."""
    history: Positive = 8
    """Versions whose changes the trainer keeps for engines that skip some."""
    compare: Literal["auto", "host", "device"] = "auto"
    """Where the trainer finds out what changed; auto: on accelerators there, on CPUs on the host."""
    recount_every: Positive = 16
    """Versions after which an engine counts the digests over every weight again."""


class FileTable(Section):
    """A folder as a channel of versions; docs/files.md."""

    path: str | None = None
    """Where it is, from the run directory on if not absolute. With another ``transport`` the trainer writes
    it as well, for engines elsewhere, for late ones and for ``jaxrl-sync replay``."""
    sealed: bool = True
    """Sealed with the run token: who can write the folder but lacks the token can't pass weights off."""
    anchor_every: Positive = 16
    """Versions between two that are stored whole."""
    keep: Positive = 4
    """Newest versions that stay, beside pinned ones and those that somebody reads."""
    fsync: bool = True
    readable: Literal["owner", "group", "all"] = "owner"
    """Who may read new files beside their owner, who alone may write them."""
    owners: Annotated[tuple[NonNegative, ...], Field(strict=False)] = ()
    """User ids whose files are read, beside one's own and root's."""
    check_owner: bool = True
    """False for mounts that tell no owners; then it should be sealed."""


class SyncSection(Section):
    """When engines take new weights, and how those travel; docs/modes.md."""

    mode: Literal["sync", "one_step_off", "async"] = "async"
    """Without it as ``loop.staleness_bound`` says: 0 is sync, more is async."""
    initiator: Literal["push", "pull"] = "push"
    """Who starts a round: the loop asks every engine (push), or engines take what they see (pull)."""
    transport: Literal["auto", "shm", "verbs", "tcp", "file"] = "auto"
    payload: Literal["full", "sparse", "bitmap", "auto"] = "auto"
    """auto: what changed, where that takes less time than everything (never over shared memory)."""
    every_steps: Positive = 1
    """Updates between two publishes."""
    density_every_steps: NonNegative = 0
    """Every so many updates one is compared bit by bit while the trainer waits, for ``RUN_DIR/density.jsonl``
    and the report; 0: none."""
    kv_policy: Literal["keep", "recompute"] = "keep"
    """What running sequences do with their KV cache at a swap."""
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    slots: Annotated[int, Field(ge=1, le=8)] = 2
    """Whole versions that an engine has room for: the serving one and the shadow. With 1 the serving one is
    overwritten while generation stands still; more than 2 keep older ones to roll back to."""
    keep_versions: Positive = 1
    """Published versions that the trainer keeps for late engines, beside those that an evaluation pinned."""
    offload_limit_mb: Annotated[int, Field(ge=0)] | None = None
    """Host memory of a trainer process for copies of pinned versions; where it is full, publishing waits.
    Without it any."""
    fanout: Literal["star", "chain", "tree"] = "star"
    """Whom engines take from: the trainer, or each other along a chain or a tree, while still receiving."""
    fanout_degree: Annotated[int, Field(ge=1, le=1024)] = 2
    """How many an engine serves at a time in a tree."""
    relay: bool = False
    """Engines serve what they hold, so that a late one gets it without the trainer. Always with a chain, a
    tree or several sites."""
    site: str = ""
    """Where the trainer stands."""
    sites: Names = ()
    """Where the engine replicas stand, in their order, at ``site`` if left out. One of each site takes from
    outside, the others from it."""
    spot: Annotated[tuple[NonNegative, ...], Field(strict=False)] = ()
    """Engine replicas that may vanish at any time: they never count as the last copy of a version."""
    threads: Positive = 1
    """Threads that pack and scatter."""
    timeout_s: Seconds = 60.0
    verify: bool = True
    """Check the state digest of every received version before it serves."""
    sparse: SparseTable = SparseTable()
    tcp: TcpTable = TcpTable()
    verbs: VerbsTable = VerbsTable()
    file: FileTable = FileTable()


class RunConfig(Section):
    """One run: what ``config.toml`` holds."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection
    trainer: TrainerSection = TrainerSection()
    loss: LossSection = LossSection()
    loop: LoopSection
    engine: EngineSection = EngineSection()
    hub: HubSection = HubSection()
    eval: EvalSection = EvalSection()
    sync: SyncSection = SyncSection()
