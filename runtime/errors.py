"""The errors oxidize raises on purpose. Each message says what was expected, what came and what to do.

OxidizeError                 exit 1   anything that failed at run time
├── UsageError               exit 2   an argument, prompt or pairing the user can change
├── VerificationError        exit 3   two outputs that had to be equal are not
├── BundleError              exit 4   a bundle that is missing, corrupt or hostile
├── CheckpointError          exit 1   a source checkpoint that cannot be read as it stands
│   └── UnsupportedModelError exit 1  a checkpoint whose maths this version does not implement
└── ProviderError            exit 1   ONNX Runtime or an execution provider that is not there or refuses
"""


class OxidizeError(Exception):
    """Base of all deliberate errors; `str(error)` is one line fit for a terminal."""

    exit_code = 1


class UsageError(OxidizeError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2


class VerificationError(OxidizeError):
    """Outputs that must be equal differ."""

    exit_code = 3


class BundleError(OxidizeError):
    """A bundle is missing, incomplete, altered or malformed."""

    exit_code = 4


class CheckpointError(OxidizeError):
    """A source checkpoint is missing, truncated or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """A source checkpoint needs maths that is not implemented here."""


class ProviderError(OxidizeError):
    """ONNX Runtime is absent, or an execution provider is absent or failed."""
