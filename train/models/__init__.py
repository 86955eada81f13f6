"""The networks. `build_model` makes the one that a configuration names."""

from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.fc_densenet import PRESETS, FCDenseNet, build_model
from exitwave.train.models.unet3d import UNet3D

__all__ = ["PRESETS", "CosmoFlow", "FCDenseNet", "UNet3D", "build_model"]
