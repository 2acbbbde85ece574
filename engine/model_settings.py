"""Settings of the model: its files, how it is computed, and the images that it sees.

Apart from the others (`settings.py`) for length alone: they are fields of the same dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The fields of `Settings` that come first."""

    # model
    model: str = setting(
        "",
        "GGUF file, folder of safetensors, or hub name org/name; org/name:Q4_K_M takes one of its GGUF files",
        "-m",
        "--hf-repo",
        "-hf",
    )
    model_draft: str | None = setting(
        None,
        "file, folder or hub name of a draft model or a draft head (EAGLE-3, MTP, DFlash, DSpark); its files say which",
        "-md",
        "--spec-draft-model",
        "-hfd",
        "--hf-repo-draft",
    )
    alias: str | None = setting(
        None,
        "model name shown to clients, by default the hub name, or the folder's or file's; after commas, further names"
        " of it",
        "-a",
        "--served-model-name",
    )
    chat_template: str | None = setting(
        None,
        "Jinja text that replaces all chat templates of the model's files, or a name such as chatml or llama3",
    )
    chat_template_file: str | None = setting(None, "file of such a text")
    tags: str | None = setting(None, "comma list of tags that /v1/models shows")
    device: str = setting("auto", "cpu, cuda, cuda:N or auto", "-dev")
    device_draft: str | None = setting(
        None,
        "device of a draft model: the target's GPU, which is the default, or cpu",
        "-devd",
        "--spec-draft-device",
    )
    dtype: str = setting(
        "auto",
        "arithmetic type of the weights; auto takes the checkpoint's, for float16 on a CPU bfloat16",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    exact: bool = setting(
        default=False,
        meaning="do not start unless every operator, and every sum over ranks, gives a row the same bits whatever is"
        " computed beside it, so that a seed's text is the same at any load, with any drafts; on the CPU this is so"
        " without asking, but with --dtype float16",
    )
    round_activations: bool = setting(
        default=False,
        meaning="round inputs of products with weights of few bits to eight bits, as llama.cpp does, for speed: on the"
        " CPU, in bfloat16, not of fp8; text changes a little, and is as ever the same with any drafts, at any load",
    )
    capture_passes: bool = setting(
        True,  # noqa: FBT003 - as other settings have it
        "capture passes of few tokens and replay them: on CUDA as graphs at start, which takes seconds and some device"
        " memory; on the CPU each shape of a pass when it comes for the first time, with prompts the second",
        "--cuda-graphs",
    )
    async_scheduling: bool = setting(
        default=True,
        meaning="launch a pass while the pass before is unread, where it does not depend on what only the host knows,"
        " on CUDA; so the device does not wait for the host",
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that compute the model together, each a part of every layer: on as many GPUs, or on the CPU with a"
        " share of its threads each",
        "-tp",
        least=1,
        most=64,
    )
    threads: int | None = setting(
        None, "CPU threads of the engine; all cores by default", "-t", least=1, most=1024
    )

    # images
    vision: bool = setting(
        default=True,
        meaning="load the part of the model that sees images, if its files have one",
    )
    image_max_tokens: int | None = setting(
        None,
        "most tokens that an image takes, where the model scales images; larger ones are made smaller. By default as"
        " the model's files say, on a CPU no more than 1024",
        least=1,
        most=65536,
    )
    image_cache: int = setting(
        256, "MiB for what the model sees in images, kept for requests that show them again", least=0
    )
    image_limit: int = setting(16, "images that a request may show", least=0, most=1024)
    image_pixels: int = setting(
        40, "millions of pixels that an image may have; larger ones are refused unread", least=1, most=1000
    )
    image_timeout: float = setting(
        10.0, "seconds that fetching an image may take, and decoding it as many again", least=0.1, most=3600
    )
    allow_remote_images: bool = setting(
        default=False, meaning="fetch images that requests name by http and https addresses"
    )
    remote_image_hosts: str | None = setting(
        None,
        "comma list of the hosts that --allow-remote-images fetches from; by default all whose addresses are public",
    )
    media_path: str | None = setting(
        None, "folder from which requests may show images by file: addresses; none by default"
    )
