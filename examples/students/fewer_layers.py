"""A smaller student: a model without some of its layers.

    python examples/students/fewer_layers.py TEACHER STUDENT FIRST END

Leaves out the layers FIRST to END - 1. Those in the middle change a model less than its first or last ones.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="folder or name of a model of transformers")
    parser.add_argument("student", type=Path, help="folder to be written")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.teacher)
    layers, config = model.model.layers, model.config
    if not 0 <= arguments.first < arguments.end <= len(layers) or arguments.end - arguments.first == len(layers):
        parser.error(f"FIRST and END must be a part of the layers 0 to {len(layers)} of {arguments.teacher}")
    del layers[arguments.first : arguments.end]
    if getattr(config, "layer_types", None) is not None:
        del config.layer_types[arguments.first : arguments.end]
    config.num_hidden_layers = len(layers)
    model.save_pretrained(arguments.student)
    AutoTokenizer.from_pretrained(arguments.teacher).save_pretrained(arguments.student)


if __name__ == "__main__":
    main()
