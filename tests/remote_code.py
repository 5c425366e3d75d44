"""A model with remote code in its folder."""

import json
import shutil
from pathlib import Path


def with_remote_code(model: Path, folder: Path, *, model_type: str, tokenizer: bool = False) -> Path:
    """Copies a model, with a configuration that names classes in its folder; importing them raises.

    Args:
        model_type: known or unknown to transformers.
        tokenizer: the tokenizer needs remote code too.
    """
    copy = folder / "remote_code"
    shutil.copytree(model, copy)
    (copy / "acme.py").write_text("raise AssertionError('code of the model was run')\n")
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "acme.Config", "AutoModelForCausalLM": "acme.Model"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    if tokenizer:
        described = json.loads((copy / "tokenizer_config.json").read_text())
        described |= {"tokenizer_class": "AcmeTokenizer", "auto_map": {"AutoTokenizer": ["acme.Tokenizer", None]}}
        (copy / "tokenizer_config.json").write_text(json.dumps(described))
    return copy
