"""The main job: train a GPT on text, every op ours. ``torchrun --nproc-per-node 2 -m trainwright.train``.

Read it top to bottom: `config` (what can be set), `data` (text to tokens to batches), `model` (the GPT), `loop`
(the training loop), `metrics` (what is measured and drawn), `checkpoint` (what survives a kill). `reference` is the
same model in plain torch; `compare` runs the two side by side.
"""
