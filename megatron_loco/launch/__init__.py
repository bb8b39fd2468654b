"""Run a YAML configuration: check every key, print what it resolves to, and start Megatron under torchrun.

``python -m megatron_loco.launch CONFIG.yaml [KEY=VALUE ...]``; the sections of the file are listed in
:mod:`megatron_loco.launch.sections`.
"""
