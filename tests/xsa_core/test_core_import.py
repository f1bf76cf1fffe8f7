"""`import xsa_core` is light and its public names are there."""

import subprocess
import sys

import xsa_core

HEAVY = (
    "timm",
    "lm_eval",
    "transformers",
    "torchaudio",
    "torchvision",
    "xformers",
    "safetensors",
    "scipy",
)


def test_every_public_name_resolves():
    for name in xsa_core.__all__:
        assert getattr(xsa_core, name) is not None


def test_importing_and_using_the_models_loads_no_heavy_library():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import xsa_core; light = set(sys.modules) - before\n"
        "from xsa_core import GPT, GPTConfig, Encoder, SelfAttention, probe, initialize\n"
        "model = GPT(GPTConfig(vocab_size=7, n_layers=1, n_heads=1, d_model=8, max_seq_len=4))\n"
        "initialize(model, 0)\n"
        "model(torch.zeros(1, 4, dtype=torch.int64))\n"
        f"print(len(light), [m for m in {HEAVY} if m in set(sys.modules) - before])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split(maxsplit=1) == ["1", "[]\n"], result.stdout
