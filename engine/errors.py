"""The error tree. Read it first: every way a request or the engine can fail has one class here.

The engine deals in no HTTP statuses; `server/http/error_table.py` is the only table that maps errors to them.

    EngineError
    ├─ RequestError            the caller can fix it
    │  ├─ InvalidRequest
    │  ├─ ContextTooLong
    │  ├─ TextTooLong
    │  ├─ SlotFileRefused
    │  └─ Unsupported
    ├─ Overloaded              try again later
    ├─ TimedOut                the request took longer than it may
    ├─ LoadError               refuses to start
    │  ├─ UnsupportedModel
    │  ├─ CheckpointMismatch
    │  ├─ DraftMismatch
    │  └─ SettingError
    └─ EngineFault             our bug or the device's
       ├─ SlotNotSaved
       ├─ StepFailed
       ├─ ReplicasFailed
       └─ EngineStopped
          └─ DeviceLost
             └─ RankLost
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """Root of all errors the engine raises on purpose."""


class RequestError(EngineError):
    """The request cannot be served as sent; the caller can change it."""

    param: str | None = None


class InvalidRequest(RequestError):
    """A field has a value outside its range or of the wrong kind."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


class ContextTooLong(RequestError):
    """The prompt does not fit the context of one sequence."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            # Clients recognise OpenAI's words, which are the first part.
            f"This model's maximum context length is {n_ctx} tokens. However, the prompt has {n_prompt} tokens"
            " (one is kept for the reply); --ctx-size sets it"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx
        self.param = "messages"


class TextTooLong(RequestError):
    """A text has more bytes than the tokens that it may have can write. It is refused without being tokenised."""

    def __init__(self, param: str, n_bytes: int, n_bytes_most: int, n_tokens: int, setting: str) -> None:
        super().__init__(
            f"{param}: the text has {n_bytes} bytes, {n_tokens} tokens of this model hold at most"
            f" {n_bytes_most}; {setting} sets the limit"
        )
        self.param = param


class SlotFileRefused(RequestError):
    """A slot's file cannot be restored here: it is another model's, damaged, or not there at all."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"filename: {reason}")
        self.param = "filename"


class Unsupported(RequestError):
    """A known feature that this model or build does not have."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


class Overloaded(EngineError):
    """The queue is full."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class TimedOut(EngineError):
    """The request took longer than the server allows."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the request was not finished within {limit_s:g} s; --request-timeout sets the limit"
        )


class LoadError(EngineError):
    """The server cannot start with these settings and files."""


class UnsupportedModel(LoadError):
    """The checkpoint's architecture or a feature it needs has no implementation here."""


class CheckpointMismatch(LoadError):
    """Tensors of the checkpoint and of the network do not pair up one to one."""

    def __init__(self, path: str, missing: Sequence[str], unused: Sequence[str]) -> None:
        parts = [
            f"{what} {', '.join(list(names)[:8])}{' …' if len(names) > 8 else ''}"
            for what, names in (("missing:", missing), ("unused:", unused))
            if names
        ]
        super().__init__(f"{path}: {'; '.join(parts)}")
        self.missing = tuple(missing)
        self.unused = tuple(unused)


class DraftMismatch(LoadError):
    """The draft network cannot serve this target."""


class SettingError(LoadError):
    """A setting cannot take effect; names the setting, its value and the reason."""

    def __init__(self, setting: str, value: object, reason: str) -> None:
        super().__init__(f"--{setting.replace('_', '-')} {value}: {reason}")
        self.setting = setting


class EngineFault(EngineError):
    """A failure that is not the caller's."""


class SlotNotSaved(EngineFault):
    """The folder of saved slots does not take a file: it is full, or cannot be written to."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the slot could not be saved: {reason}; --slot-save-path sets the folder")


class StepFailed(EngineFault):
    """A pass failed for this request and failed again when tried alone."""


class ReplicasFailed(EngineFault):
    """A request has lost more replicas than it may, or one on which nothing else ran."""


class EngineStopped(EngineFault):
    """The engine is no longer running; the server is stopping or has failed."""


class DeviceLost(EngineStopped):
    """The device answers this process no more, as after an illegal access. Only another process can use it."""

    def __init__(self) -> None:
        super().__init__("the server's device has failed, and it computes no more until it is started again")


class RankLost(DeviceLost):
    """A process that computes a part of the network has ended, or its part of a pass has failed."""

    def __init__(self, why: str) -> None:
        EngineStopped.__init__(
            self,
            f"a process of --tensor-parallel-size is lost ({why}), and nothing is computed until a new start",
        )
