"""Small configurations of each model type that ONNX Runtime's exporter registers.

A type gets the sizes of decoders, what its task changes, then what the class that is registered for it changes, then
what is its own. Types of the exporter's map of diffusers have sizes of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.exports.architectures import decoders, diffusion, encoder_decoders, encoders, multimodal

_TABLES: tuple[Any, ...] = (decoders, encoders, encoder_decoders, multimodal)

# Fields that are a configuration of their own.
_PARTS = {
    "vision": "VisionConfig", "audio": "AudioConfig", "tts": "TTSConfig", "codec_decoder": "CodecDecoderConfig",
    "codec_encoder": "CodecEncoderConfig", "code_predictor": "CodePredictorConfig",
    "speaker_encoder": "SpeakerEncoderConfig",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The source of a model type in the exporter: a class of modules, its configuration, and its task by name."""

    module: Any
    config: Any
    task: str


def registered() -> list[str]:
    """Return all model types of the exporter's registry, then its classes of diffusers."""
    from mobius._registry import registry

    return [*registry.architectures(), *diffusion.BY_TYPE]


def architecture(name: str, changes: dict[str, Any]) -> Architecture:
    """Return what a model type is built from; changes go over its sizes."""
    from mobius import _diffusers_builder
    from mobius._config_resolver import _default_task_for_model
    from mobius._registry import registry

    if name in diffusion.BY_TYPE:
        _diffusers_builder._init_diffusers_class_map()
        module, config_class, task = _diffusers_builder._DIFFUSERS_CLASS_MAP[name]
        return Architecture(module, config_class(**diffusion.BY_TYPE[name]), task)
    module, task = registry.get(name), _default_task_for_model(name)
    sizes = dict(decoders.SIZES)
    for table_name, key in (("BY_TASK", task), ("BY_CLASS", module.__name__), ("BY_TYPE", name)):
        for table in _TABLES:
            sizes |= getattr(table, table_name, {}).get(key, {})
    return Architecture(module, configured(_config_class(name, module), sizes | changes), task)


def _config_class(name: str, module: Any) -> Any:
    from mobius._configs import ArchitectureConfig
    from mobius._registry import registry

    return registry.get_config_class(name) or getattr(module, "config_class", None) or ArchitectureConfig


def configured(config_class: Any, sizes: dict[str, Any]) -> Any:
    """Return a configuration of those sizes that its class has."""
    from mobius import _configs

    fields = {field.name for field in dataclasses.fields(config_class)}
    return config_class(
        **{
            key: configured(getattr(_configs, _PARTS[key]), value) if key in _PARTS else value
            for key, value in sizes.items()
            if key in fields
        }
    )
