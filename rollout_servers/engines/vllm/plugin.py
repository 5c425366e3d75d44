"""vLLM's plug-in: Qwen's vision-language models without torchvision, with images by Pillow and without videos.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`), also in the one in which it
inspects a model's class. Where torchvision is installed, nothing changes.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import ClassVar

_WANTED = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
"""Imports torchvision; vLLM takes `smart_resize` of it, which `_FOUND` has too."""
_FOUND = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_AUTO_VIDEO = "transformers.models.auto.video_processing_auto"


def register() -> None:
    """Makes vLLM's models importable, and their processors loadable, without torchvision."""
    if importlib.util.find_spec("torchvision") is None and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module of Pillow in the place of that of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WANTED:
            return None
        _replace_video_processor()
        found = importlib.util.find_spec(_FOUND)
        assert found is not None and found.origin is not None, "transformers has a module for Pillow"
        return importlib.util.spec_from_file_location(fullname, found.origin)


def _replace_video_processor() -> None:
    """Lets a processor be loaded without its part for videos, which needs torchvision."""
    from transformers import processing_utils
    from transformers.image_processing_utils import BaseImageProcessor

    class NoVideos(BaseImageProcessor):
        """Stands for the video processor. vLLM asks for its sizes, and refuses videos: their most number is 0."""

        size: ClassVar = {"shortest_edge": 1 << 16, "longest_edge": 1 << 16}
        patch_size, temporal_patch_size, merge_size = 16, 2, 2
        fps, min_frames, max_frames = 2, 4, 4

        @classmethod
        def from_pretrained(cls, *_arguments: object, **_named: object) -> "NoVideos":
            """As `AutoVideoProcessor.from_pretrained`."""
            return cls()

    # Where torchvision is missing, transformers has no class to compare it with.
    processing_utils.MODALITY_TO_BASE_CLASS_MAPPING["video_processor"] = "ImageProcessingMixin"
    vars(importlib.import_module(_AUTO_VIDEO))["AutoVideoProcessor"] = NoVideos
