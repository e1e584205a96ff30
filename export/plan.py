"""What to export: precision, profiles, taps."""

from dataclasses import dataclass

from oxidize.runtime.contracts import PROFILES
from oxidize.runtime.errors import UsageError

from .config import ModelConfig

PRECISIONS = ("fp32", "fp16", "int4")
PARTS = ("qkv", "o", "gate_up", "down")  # the matrices of a layer
SMALL_MODEL = 500_000_000  # weights in the layers


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The choices of one export.

    taps: 0-based layers whose output the body also returns. max_positions: length of the rope tables, the model's own
    by default. half_activations: float16 activations at precision "int4", which ONNX Runtime's GPU kernels need.

    More at precision "int4": head_bits, 8 or 4, of the embedding table and the head; zero_points in 4-bit blocks;
    int8_parts, the matrices of each layer that get 8 bits, by default what `wide_parts` says. None of these touches
    a Q4_0 matrix, whose blocks are kept.
    """

    precision: str
    profiles: tuple[str, ...] = ("ort",)
    taps: tuple[int, ...] = ()
    max_positions: int | None = None
    head_bits: int = 8
    zero_points: bool = True
    int8_parts: tuple[str, ...] | None = None
    half_activations: bool = False

    @property
    def dtype(self) -> str:
        """The numpy and ONNX name of the activations' type."""
        return "float16" if self.precision == "fp16" or self.half_activations else "float32"

    def positions(self, config: ModelConfig) -> int:
        """How many positions the rope tables cover."""
        return min(self.max_positions or config.max_positions, config.max_positions)

    def wide_parts(self, config: ModelConfig) -> tuple[str, ...]:
        """The parts of a layer that get 8 bits at precision "int4".

        8 bits cost no time where weights come from the cache, but twice the traffic where they come from memory. On
        SmolLM2-135M the divergence from the source falls from 0.23 nats to 0.16 with qkv and to 0.07 with down as
        well, at equal speed; in a large model down is too much of the traffic.
        """
        if self.int8_parts is not None:
            return self.int8_parts
        width = 2 * (config.heads + config.kv_heads) * config.head_dim + 3 * config.intermediate_size
        small = config.layers * config.hidden_size * width < SMALL_MODEL
        return ("qkv", "down") if small else ("qkv",)

    def check(self, config: ModelConfig) -> None:
        """Refuse choices that do not exist or do not fit the model."""
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if not self.profiles or not set(self.profiles) <= set(PROFILES):
            raise UsageError(f"profiles must be some of {', '.join(PROFILES)}, not {self.profiles!r}")
        if self.half_activations and self.precision == "fp32":
            raise UsageError("half_activations needs precision int4 or fp16, not fp32")
        if any(not 0 <= tap < config.layers for tap in self.taps):
            raise UsageError(f"taps must be layers 0 to {config.layers - 1}, not {list(self.taps)}")
        if self.max_positions is not None and self.max_positions < 1:
            raise UsageError(f"max_positions must be at least 1, not {self.max_positions}")
        if not set(self.int8_parts or ()) <= set(PARTS):
            raise UsageError(f"int8_parts must be some of {', '.join(PARTS)}, not {self.int8_parts!r}")
        if self.head_bits not in (4, 8):
            raise UsageError(f"head_bits must be 4 or 8, not {self.head_bits}")
        if self.dtype == "float16" and config.sandwich_norms:
            raise UsageError(
                f"{config.architecture} overflows float16 activations; use fp32, or int4 with float32 activations"
            )
        if self.precision == "int4" and config.hidden_size % 32:
            raise UsageError(
                f"precision int4 needs a hidden size divisible by 32, not {config.hidden_size}; use fp32 or fp16"
            )
