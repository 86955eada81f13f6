"""The networks. `build_model` makes the one that a configuration names."""

from exitwave.train.models.fc_densenet import PRESETS, FCDenseNet, build_model

__all__ = ["PRESETS", "FCDenseNet", "build_model"]
